"""`segue switch`: an instance comes back in another role while requests run, and nothing is lost."""

from __future__ import annotations

import gc
import json
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from deployment import VOCAB, deployment, lineage_config, lineage_engine
from killable import Cluster, cluster, save_tokenizer

from segue.cli.main import main
from segue.engine.engine_api import ExpertPeers
from segue.engine.ranks.dp_group import DpGroup
from segue.engine.request import Request, SamplingParams
from segue.kv.ids import Role, new_incarnation
from segue.server.fleet.operator import Operator
from segue.server.instance.instance import Instance
from segue.server.instance.leader import FromFrontend, Inspect
from segue.server.instance.rank_workers import OpenedReplica
from segue.server.instance.role_lifecycle import RoleLifecycle
from segue.server.messages.control import Load, Submit
from segue.server.messages.operate import SetDraining, Switch
from segue.server.messages.ticket import Ticket
from segue.server.registry.registry_records import InstanceRecord
from segue_lab.sim.sim_engine import LineageEngine, reference

TOKENS = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("switched")
    save_tokenizer(made, 97)
    return made


class Others:
    """`ExpertPeers` that have nothing to compute; what they were asked."""

    behind = False

    def __init__(self) -> None:
        self.asked: list[str] = []

    def done(self) -> bool:
        self.asked.append("done")
        return True

    def listen(self, wake: object, leave: object, lost: object) -> None:
        self.asked.append("listen")

    def stop_listening(self) -> None: ...

    def close(self) -> None:
        self.asked.append("close")


class Switchable:
    """One leader of an instance in a thread of its own, as `segue prefill` runs it in a process."""

    def __init__(
        self, role: Role, registry: str, expert_peers: ExpertPeers | None = None, **of_dp: Any
    ) -> None:
        engine, memory = lineage_engine()
        self._engine, self._memory = engine, memory
        config = lineage_config(role, registry, name=f"{role}-0", **of_dp)
        self.turns = RoleLifecycle(config, OpenedReplica(engine, memory, expert_peers=expert_peers))
        self.served: list[Instance] = []
        self.ready = threading.Event()
        self.thread = threading.Thread(target=self.turns.run, args=(self._ready,))
        self.thread.start()
        assert self.ready.wait(60)

    def _ready(self, instance: Instance) -> None:
        self.served.append(instance)
        self.ready.set()

    @property
    def name(self) -> str:
        return self.turns.instance.me.incarnation[:8]

    def close(self) -> None:
        self.turns.drain()
        self.thread.join(60)
        assert not self.thread.is_alive(), "it did not drain"
        assert isinstance(self._engine, LineageEngine)
        self._engine.memory.release()
        self._memory.close()


def turn(one: Switchable) -> None:
    """Have it become prefill, as an operator does whose `switch` finds it without requests."""
    instance = one.turns.instance
    for order in (Switch(Role.PREFILL), Switch(Role.PREFILL, turn=True)):
        instance.plane.io.post(instance._steer, order)


@contextmanager
def switchable(made: Cluster, role: Role, dp: int = 1) -> Iterator[list[Switchable]]:
    """All leaders of one instance."""
    incarnation = new_incarnation()
    of_dp = [{"dp": dp, "dp_rank": rank, "incarnation": incarnation} for rank in range(dp)]
    with ExitStack() as stack:
        leaders = [Switchable(role, made.url, **(one if dp > 1 else {})) for one in of_dp]
        for leader in leaders:
            stack.callback(leader.close)
        yield leaders


def ask(made: Cluster, number: int) -> None:
    """One request; its tokens must be those of an undisturbed run."""
    prompt = [3 + (number * 7 + i) % 90 for i in range(40 + number % 5)]
    body = {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "seed": 1}
    content = json.dumps({"model": "tiny", "return_token_ids": True, **body})
    answer = made.http.post("/v1/completions", content=content, headers={"x-request-id": f"r{number}"})
    assert answer.status_code == 200, answer.text
    sampling = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True, seed=1)
    wanted = reference(prompt, sampling, VOCAB, TOKENS)
    assert answer.json()["choices"][0]["token_ids"] == wanted


def later(before: Role, after: Role, dp: int) -> Any:
    return pytest.param(before, after, dp, marks=pytest.mark.slow)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after", "dp"),
    [
        (Role.DECODE, Role.PREFILL, 1),
        later(Role.PREFILL, Role.UNIFIED, 1),
        later(Role.UNIFIED, Role.DECODE, 1),
        later(Role.DECODE, Role.PREFILL, 2),
        later(Role.PREFILL, Role.DECODE, 3),
    ],
)
def test_a_role_is_switched_under_load_and_back_and_nothing_is_lost(
    folder: Path, capsys: pytest.CaptureFixture[str], before: Role, after: Role, dp: int
) -> None:
    with cluster(folder, Role.PREFILL, Role.DECODE) as made, switchable(made, before, dp) as leaders:
        one = leaders[0]
        made.seen(dp + (before is not Role.UNIFIED), before)
        stop = threading.Event()
        served: list[int] = []

        def load(lane: int) -> None:
            number = lane
            while not stop.is_set():
                ask(made, number)
                served.append(number)
                number += 4

        with ThreadPoolExecutor(4) as pool:
            lanes = [pool.submit(load, lane) for lane in range(4)]
            try:
                for old, new in ((before, after), (after, before)):
                    name = one.name
                    assert main(["switch", name, new, "--registry", made.url, "--timeout", "100"]) == 0
                    said = capsys.readouterr().out
                    for rank in range(dp):
                        assert f"{old} {name} dp{rank} drained" in said
                    assert f"{new} {one.name} serving, before it {old}" in said
                    assert one.name != name
                    there = {leader.turns.instance.me for leader in leaders}
                    assert len(there) == dp
                    made.until(lambda there=there: there <= {  # type: ignore[misc]
                        r.leader for r in made.fleet.membership.replicas.values() if r.usable})  # fmt: skip
                    for number in range(10_000, 10_008):
                        ask(made, number)
            finally:
                stop.set()
            for lane in lanes:
                lane.result(100)
        assert len(served) > 8
        for leader in leaders:
            assert [instance.config.role for instance in leader.served] == [before, after, before]
        made.counted("segue_requests_total", len(served) + 16, endpoint="completions", outcome="ok")
        # What it did in its first role is still known.
        assert main(["explain", "r0", "--registry", made.url]) == 0


@pytest.mark.slow
def test_a_leader_with_companions_keeps_them_in_its_next_role_and_leaves_only_with_them(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    others = Others()
    with cluster(folder, Role.PREFILL, Role.DECODE) as made:
        one = Switchable(Role.DECODE, made.url, others)
        try:
            assert main(["switch", one.name, "prefill", "--registry", made.url, "--timeout", "60"]) == 0
            assert "serving, before it decode" in capsys.readouterr().out
            assert others.asked == ["listen", "listen"]
        finally:
            one.close()
        assert others.asked[2:] == ["done", "close"]


@pytest.mark.slow
def test_a_leader_with_companions_that_is_to_leave_between_two_roles_leaves_with_them(folder: Path) -> None:
    others = Others()
    with cluster(folder, Role.PREFILL, Role.DECODE) as made:
        one = Switchable(Role.DECODE, made.url, others)
        instance = one.turns.instance
        closes = instance.close

        def and_told() -> None:
            closes()
            one.turns.drain()

        instance.close = and_told  # type: ignore[method-assign]
        turn(one)
        one.thread.join(60)
        one.close()
        assert others.asked == ["listen", "listen", "done", "close"]


@pytest.mark.slow
def test_a_leader_says_that_it_is_done_if_another_rank_was_between_two_roles() -> None:
    class Leaving(Others):
        """One of them is done before we are in our second role."""

        def listen(self, wake: object, leave: Any, lost: object) -> None:
            super().listen(wake, leave, lost)
            if self.asked == ["listen", "listen"]:
                leave()

    others = Leaving()
    with deployment() as made:
        one = Switchable(Role.DECODE, f"http://127.0.0.1:{made.registry.port}", others)
        turn(one)
        one.thread.join(60)
        one.close()
    assert others.asked == ["listen", "listen", "done", "close"]


@pytest.mark.slow
def test_a_leader_says_that_it_is_done_if_it_is_to_leave_while_the_role_before_is_collected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    others = Others()
    with deployment() as made:
        one = Switchable(Role.DECODE, f"http://127.0.0.1:{made.registry.port}", others)
        first, unfreezes = one.turns.instance, gc.unfreeze

        def and_told() -> None:
            unfreezes()
            assert one.turns.instance is not first
            one.turns.drain()

        monkeypatch.setattr(gc, "unfreeze", and_told)
        turn(one)
        one.thread.join(60)
        one.close()
    assert others.asked == ["listen", "listen", "done", "close"]


@pytest.mark.slow
def test_nothing_of_the_role_before_is_kept_for_what_its_companions_say(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The memory of its pages, tables and sessions would be held until the next switch."""
    others = DpGroup(0, 1, [], "what it has loaded")
    ordered, unfreezes = threading.Event(), gc.unfreeze
    # Whoever gives the order still holds the instance.
    monkeypatch.setattr(gc, "unfreeze", lambda: (ordered.wait(60), unfreezes()))
    with deployment() as made:
        one = Switchable(Role.DECODE, f"http://127.0.0.1:{made.registry.port}", others)
        first = weakref.ref(one.turns.instance)
        one.served.clear()
        one.ready.clear()
        turn(one)
        ordered.set()
        try:
            assert one.ready.wait(60)
            assert one.served[0] is one.turns.instance
            assert first() is None
        finally:
            one.close()


def test_a_switch_waits_for_what_is_there_and_resume_ends_it(capsys: pytest.CaptureFixture[str]) -> None:
    with deployment(Role.PREFILL, Role.DECODE) as made:
        [p], [d] = made.by_role(Role.PREFILL), made.by_role(Role.DECODE)
        # Decode alone hears of it: it stays until it is cancelled.
        made.front.submit("held", [1, 2, 3], p, d, only=d)
        made.has(d)
        name, url = d.me.incarnation[:8], f"http://127.0.0.1:{made.registry.port}"
        for timeout_s in ("0.3", "3", "30"):  # the longer ones if it is over before there was an answer
            assert main(["switch", name, "prefill", "--registry", url, "--timeout", timeout_s]) == 1
            said = capsys.readouterr()
            if said.out:
                break
        assert f"decode {name} dp0 is draining after {timeout_s} s: 1 requests" in said.err
        assert main(["resume", name, "--registry", url]) == 0
        made.front.cancel("held", d)
        made.front.submit("next", [1, 2, 3], p, d)
        assert len(made.front.tokens("next")) == 4
        made.assert_comes_to_rest()
        assert d.leader.running
        assert d.next_config is None


def test_an_instance_that_was_resumed_after_its_drain_does_not_turn(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    each = Operator.order_each

    async def and_resumed(self: Operator, record: InstanceRecord, *rest: Any) -> None:
        await each(self, record, *rest)
        await each(self, record, SetDraining(draining=False), "serving", 10, lambda _where, _sight: None)

    monkeypatch.setattr(Operator, "order_each", and_resumed)
    with deployment(Role.PREFILL, Role.DECODE) as made:
        [p], [d] = made.by_role(Role.PREFILL), made.by_role(Role.DECODE)
        name, url = d.me.incarnation[:8], f"http://127.0.0.1:{made.registry.port}"
        assert main(["switch", name, "prefill", "--registry", url]) == 1
        assert "takes requests again: somebody has resumed it" in capsys.readouterr().err
        made.front.submit("next", [1, 2, 3], p, d)
        assert len(made.front.tokens("next")) == 4


def load_of(instance: Instance) -> Load:
    """The load that its leader reports now."""
    said: queue.SimpleQueue[Load] = queue.SimpleQueue()
    instance.leader.inbox.put(Inspect(lambda scheduler: said.put(scheduler.load())))
    return said.get(timeout=60)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_resume_and_a_request_after_the_last_look_keep_an_instance_in_its_role() -> None:
    """All between the leader's word that it is drained and the order to turn: it publishes pages again."""
    with deployment(Role.PREFILL, Role.DECODE) as made:
        [p], [d] = made.by_role(Role.PREFILL), made.by_role(Role.DECODE)
        made.front.submit("first", [1, 2, 3], p, d)  # so that the two leaders have met
        assert len(made.front.tokens("first")) == 4
        d.plane.io.post(d._steer, Switch(Role.PREFILL))
        until(lambda: load_of(d).drained)
        done, goes_on = threading.Event(), threading.Event()
        request = Request(request_id="held", prompt=list(range(40)), sampling=SamplingParams(max_tokens=4))
        ticket = Ticket(room=7, attempt=0, prefill=p.me, decode=d.me, budget_s=60.0)

        def in_one_turn() -> None:
            said = threading.Event()
            d._steer(Switch(Role.PREFILL, turn=True))
            d.leader.inbox.put(Inspect(lambda _scheduler: (said.set(), goes_on.wait(60))))
            assert said.wait(60)
            d._steer(SetDraining(draining=False))
            d.leader.inbox.put(FromFrontend(made.front.me.incarnation, Submit(request, ticket)))
            d.plane.io.post(goes_on.set)  # and before that what the leader has said is taken
            done.set()

        d.plane.io.post(in_one_turn)
        assert done.wait(60)
        made.has(d)
        until(lambda: load_of(d).pages["used"] > 0)
        made.front.submit("next", [1, 2, 3], p, d)
        assert len(made.front.tokens("next")) == 4
        assert d.next_config is None
        made.front.cancel("held", d)
        made.assert_comes_to_rest()
        assert d.leader.running


@pytest.mark.parametrize(
    ("role", "why"),
    [
        ("decode", "cannot become decode: it is decode"),
        ("frontend", "invalid choice: 'frontend'"),
    ],
)
def test_a_role_that_cannot_be_is_refused_and_the_instance_serves_on(
    folder: Path, capsys: pytest.CaptureFixture[str], role: str, why: str
) -> None:
    with cluster(folder, Role.PREFILL, Role.DECODE) as made:
        [d] = made.by_role(Role.DECODE)
        name = d.instance.me.incarnation[:8]
        assert main(["switch", name, role, "--registry", made.url]) == (2 if role == "frontend" else 1)
        assert why in capsys.readouterr().err
        assert not d.instance.scheduler.admission.draining
        ask(made, 1)
