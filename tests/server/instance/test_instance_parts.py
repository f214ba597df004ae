"""Parts of an instance on their own: its state, what an operator may order, its turns, its other ranks."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import httpx2 as httpx
import msgspec
import pytest
from deployment import deployment, lineage_config, lineage_engine
from fleet_records import load

from ports import HeldPort
from segue.engine.kv_events import AllBlocksCleared
from segue.kv.errors import (
    BootstrapUnreachable,
    DeadlineExceeded,
    Draining,
    Internal,
    InvalidRequest,
    PeerLost,
    SegueError,
)
from segue.kv.ids import Incarnation, LeaderId, Role, successor
from segue.kv.limits import Limits
from segue.kv.process_link import encode
from segue.server.instance import integrity
from segue.server.instance import rank_workers as workers
from segue.server.instance import registry_link as registry
from segue.server.instance import role_lifecycle as turns
from segue.server.instance.instance import LOOK_AGAIN_S, Instance
from segue.server.instance.leader import Abandon, Drain, Hold, Inspect, NextRole
from segue.server.instance.rank_process import (
    CannotWord,
    HereWord,
    LoadedWord,
    ServeOrder,
    SetUpOrder,
)
from segue.server.instance.rank_workers import OpenedReplica, RankProcess, Workers, open_replica
from segue.server.instance.role_lifecycle import RoleLifecycle
from segue.server.messages.control import Load
from segue.server.messages.operate import SetDraining, Switch
from segue.server.settings.commands import InstanceConfig
from segue.server.settings.shared_config import AccessConfig, ModelConfig
from segue_lab.sim.sim_engine import lineage_spec

ME = LeaderId(Incarnation("a" * 32), 1)


# ---- its state ---------------------------------------------------------------------------------------


class State:
    """A leader, a plane and a manager, as `instance_state` asks them."""

    def __init__(self, **said: Any) -> None:
        self.running, self.answers = True, True
        self.me = ME
        self.role = Role.DECODE
        self.config = self
        self.sessions = [LeaderId(Incarnation(letter * 32)) for letter in "cb"]
        self.inbox = self
        self.said = load(**said)
        self.mine: dict[str, int] = {"requests": 0, "ended": 7}
        self.managers: dict[str, int] = {"transfers": 0}
        self.wrong: AssertionError | None = None

    def put(self, item: Inspect) -> None:
        if self.answers:
            scheduler: Any = self
            item.look(scheduler)

    def load(self) -> Load:
        return self.said

    def sizes(self) -> dict[str, int]:
        return self.mine

    def check_integrity(self) -> None:
        if self.wrong is not None:
            raise self.wrong

    def ask(self, **door: int) -> Any:
        leader: Any = self
        manager: Any = SimpleNamespace(sizes=lambda: self.managers, problems=lambda: ["a manager's problem"])
        return asyncio.run(integrity.instance_state(leader, leader, manager, door))


def test_an_instance_is_at_rest_when_no_table_of_its_parts_holds_anything() -> None:
    state = State()
    assert state.ask(legs=0).at_rest
    assert not state.ask(legs=1).at_rest
    state.managers["transfers"] = 1
    assert not state.ask().at_rest
    state = State()
    state.mine["requests"] = 1
    found = state.ask(legs=2)
    assert not found.at_rest
    assert found.tables == {"requests": 1, "ended": 7, "transfers": 0, "door_legs": 2}
    assert found.sessions == sorted(map(str, state.sessions))
    assert (found.role, found.incarnation) == ("decode", ME.incarnation)


@pytest.mark.parametrize(
    ("pages", "said"),
    [
        ({}, None),
        ({"pages_free": 7}, "2 are used and 0"),
        ({"pages_free": 6, "pages_quarantined": 3}, "and 3"),
    ],
)
def test_pages_that_are_held_at_rest_are_a_problem_and_others_are_told_too(
    pages: dict[str, int], said: str | None
) -> None:
    state = State(**pages)
    problems = state.ask().problems
    assert problems[0] == "a manager's problem"
    assert len(problems) == (1 if said is None else 2)
    assert said is None or said in problems[1]
    state.mine["requests"] = 1
    assert len(state.ask().problems) == 1, "somebody has them"
    state.wrong = AssertionError("a page is in two lists")
    assert "a page is in two lists" in state.ask().problems
    state.wrong = AssertionError()
    assert any("integrity" in problem for problem in state.ask().problems)


def test_a_leader_that_has_left_or_does_not_answer_has_no_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(integrity, "ANSWER_S", 0.01)
    state = State()
    state.answers = False
    with pytest.raises(DeadlineExceeded):
        state.ask()
    state.running = False
    with pytest.raises(Draining):
        state.ask()


# ---- what it is told to do ---------------------------------------------------------------------------


@contextlib.contextmanager
def instance(role: Role = Role.DECODE, **settings: Any) -> Iterator[Instance]:
    """One that has not started."""
    engine, memory = lineage_engine()
    made = Instance(lineage_config(role, name="mine", **settings), engine, memory)
    loop = made.plane.io.loop
    try:
        yield made
    finally:
        made.plane.io.loop = loop  # some tests put another thing there
        (made.manager or made.plane).close()
        engine.memory.release()  # type: ignore[attr-defined]
        memory.close()


def inbox(made: Instance) -> list[Any]:
    found = []
    while not made.leader.inbox.empty():
        found.append(made.leader.inbox.get())
    return found


def test_an_order_holds_the_leader_or_frees_it_and_one_that_leaves_takes_none() -> None:
    with instance() as made:
        made._steer(SetDraining(draining=True))
        made._steer(SetDraining(draining=False))
        made._steer(Switch(role=Role.PREFILL))
        assert inbox(made) == [Hold(True), Hold(False), Hold(True)]
        for role in (Role.DECODE, Role.FRONTEND, Role.OPERATOR):
            with pytest.raises(InvalidRequest, match="cannot become"):
                made._steer(Switch(role=role))
        assert inbox(made) == []
        made._stop.set()
        for order in (
            SetDraining(draining=False),
            Switch(role=Role.PREFILL),
            Switch(role=Role.PREFILL, turn=True),
        ):
            with pytest.raises(Draining):
                made._steer(order)
        assert inbox(made) == []


@pytest.mark.parametrize(
    ("said", "door", "leaving", "turns"),
    [
        ({"draining": True, "drained": True}, 0, False, True),
        ({"draining": True}, 0, False, False),
        ({}, 0, False, False),
        ({"draining": True, "drained": True}, 1, False, False),
        ({"draining": True, "drained": True}, 0, True, False),
    ],
)
def test_an_instance_turns_only_once_nothing_is_left_of_its_role_and_only_if_it_stays(
    said: dict[str, bool], door: int, leaving: bool, turns: bool
) -> None:
    with instance() as made:
        made._steer(Switch(role=Role.PREFILL, turn=True))
        [asked] = inbox(made)
        assert isinstance(asked, Inspect), "what is left is asked of the leader, now"
        made._sights.door = lambda: {"legs": door}
        if leaving:
            made._stop.set()
        made._turn(made._in_role(Role.PREFILL), load(**said))
        assert (made.next_config is not None) is turns
        assert [type(item) for item in inbox(made)] == [NextRole] * turns
        if made.next_config is not None:
            assert (made.next_config.role, made.next_config.name) == (Role.PREFILL, None)
            with pytest.raises(Draining):
                made._steer(SetDraining(draining=False))


@pytest.mark.parametrize("left", ["a request", "a page in quarantine", "nothing"])
def test_no_role_takes_the_memory_of_one_that_holds_something(left: str) -> None:
    """The pages of a leader may still be written or read by others after its end."""
    with instance() as made:
        made.scheduler.drain()
        made.next_config = made._in_role(Role.PREFILL)
        pool = made.scheduler.cache.pool
        if left == "a request":
            made.scheduler.admission.by_seq[1] = SimpleNamespace()  # type: ignore[assignment]
        elif left == "a page in quarantine":
            pool.quarantine(pool.allocate(1))
        made.leader.run = lambda: None  # type: ignore[method-assign]
        made.run()
        assert (made.failure is None) is (left == "nothing")
        assert made.failure is None or "cannot become prefill and leaves" in str(made.failure)


@pytest.mark.parametrize(("chosen", "limit"), [(0, None), (5, 5)])
def test_a_decode_instance_that_is_to_compute_no_prompt_computes_none_also_without_a_prefill(
    chosen: int, limit: int | None
) -> None:
    """0 is none at all, and not prompts of at most no token: those frontends give to it where they must."""
    page_tokens = lineage_config(Role.DECODE).engine.page_tokens
    with instance(engine=ModelConfig(page_tokens=page_tokens, max_local_prefill_length=chosen)) as made:
        assert made.scheduler.load().local_tokens == limit


def test_what_the_registry_shows_of_an_instance_is_what_it_is_and_gone_when_it_has_left() -> None:
    with deployment(Role.PREFILL, Role.DECODE) as made:
        there = {record.role: record for record in made.registry.store.instances().instances}
        for each in made.running:
            config, found = each.instance.config, there[each.instance.config.role]
            wanted = 8998 if config.role is Role.PREFILL else 0
            assert (found.bootstrap_port, found.shared_experts, found.draining) == (wanted, False, False)
            assert (found.source, found.served_model) == (config.model, config.served_model)
            [where] = found.replicas
            assert (where.host, where.port) == each.instance.plane.address
            assert (where.transports, bool(where.version)) == (["shm"], True)
        store = made.registry.store
    assert store.instances().instances == []
    with instance(
        advertise_host="10.0.0.9", advertise_port=4711, dp=3, dp_rank=2, incarnation="b" * 32
    ) as one:
        record = one._record()
        [where] = record.replicas
        assert (where.host, where.port, where.dp_rank, record.dp_size) == ("10.0.0.9", 4711, 2, 3)
        one._registry = SimpleNamespace()  # type: ignore[assignment]
        one._say_draining()
        one.expert_peers = object()  # type: ignore[assignment]
        assert (one._record().draining, one._record().shared_experts) == (True, True)


async def test_the_registry_hears_one_word_after_the_other_and_the_last_one_last() -> None:
    said: list[bool] = []

    class Slow:
        def __init__(self) -> None:
            self.go_on = asyncio.Event()

        async def set_draining(self, draining: bool) -> None:
            said.append(draining)
            await self.go_on.wait()
            if len(said) == 1:
                raise BootstrapUnreachable("away, which the keep-alive makes good")

    with instance() as made:
        slow = made._registry = Slow()  # type: ignore[assignment]
        telling = asyncio.ensure_future(made._tell_registry())
        for draining in (True, False, True, False):
            made._say_draining(draining)
            for _ in range(3):
                await asyncio.sleep(0)
        assert said == [True], "the first is not over"
        slow.go_on.set()  # type: ignore[attr-defined]
        for _ in range(5):
            await asyncio.sleep(0)
        assert said == [True, False]
        assert not telling.done()
        telling.cancel()


@pytest.mark.parametrize(
    ("drained", "held", "watched", "looks"),
    [(True, 1, True, True), (False, 1, True, False), (True, 0, True, False), (True, 1, False, False)],
)
def test_what_is_left_below_a_leader_that_has_drained_is_looked_at_again_for_who_waits_for_it(
    drained: bool, held: int, watched: bool, looks: bool
) -> None:
    """The leader itself reports nothing more: nothing changes for it."""
    with instance() as made:
        later: list[tuple[object, ...]] = []
        made.plane.io.loop = SimpleNamespace(call_later=lambda *args: later.append(args))  # type: ignore[assignment]
        made._sights.door = lambda: {"legs": held}
        made.operators.report = lambda _load: None  # type: ignore[method-assign]
        if watched:
            made.operators._watching[ME] = (None, "draining")  # type: ignore[assignment]
        made._reported(load(draining=True, drained=drained))
        assert later == ([(LOOK_AGAIN_S, made._ask_load, made._reported)] if looks else [])


@pytest.mark.parametrize(
    ("role", "settings", "warns"),
    [
        (Role.PREFILL, {}, False),
        (Role.DECODE, {"host": "0.0.0.0", "advertise_host": "10.0.0.9", "secret_file": "s"}, True),
        (
            Role.UNIFIED,
            {"host": "10.0.0.9", "secret_file": "s", "access": AccessConfig(api_key="k" * 20)},
            False,
        ),
    ],
)
def test_an_open_door_is_told_of(
    role: Role, settings: dict[str, Any], warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with instance(role, **settings) as made:
        made._make_direct_server(None)  # type: ignore[arg-type]
        assert ("without an API key" in caplog.text) is warns


def test_what_routers_and_probes_are_told_of_an_instance_is_what_it_was_set_to() -> None:
    settings: dict[str, Any] = {
        "dp": 3,
        "dp_rank": 2,
        "load_balance": "total_tokens",
        "incarnation": "b" * 32,
    }
    with instance(Role.PREFILL, **settings) as made:
        status = made._status()
        assert status.about == {
            "disaggregation_mode": "prefill",
            "served_model_name": made.config.served_model,
            "incarnation": "b" * 32,
            "tp_size": 1,
            "pp_size": 1,
            "cp_size": 1,
            "dp_size": 3,
            "dp_rank": 2,
            "load_balance_method": "total_tokens",
            "disable_radix_cache": False,
        }
        assert made._record().load_balance == "total_tokens"
        assert not status.alive(), "its loop does not run"
        made.leader.running = True
        assert status.alive()
        made.failure = Internal("a part has failed for good")
        assert not status.alive(), "it finishes what is there, and is unhealthy"


def test_a_lost_rank_ends_everything_now_and_only_the_first_reason_is_the_instance_s() -> None:
    with instance() as made:
        posted: list[Any] = []
        made.plane.io.post = lambda work, *args: posted.append(work)  # type: ignore[method-assign]
        first, second = PeerLost("rank 1 has ended"), Internal("so has the step")
        made._lost(first)
        made._lost(second)
        made._leave_for("the HTTP server", Internal("and this"))
        assert made.failure is first
        assert inbox(made) == [Abandon(first.info), Abandon(second.info), Drain()]
        assert posted == [made._stop.set, made._say_draining] * 3


@pytest.mark.parametrize(
    ("switched", "failed", "left"),
    [(False, False, True), (False, True, True), (True, False, False), (True, True, True)],
)
def test_the_other_ranks_leave_with_an_instance_unless_it_serves_on_in_another_role(
    switched: bool, failed: bool, left: bool
) -> None:
    closed: list[str] = []

    def keeps_no_listener() -> None:
        closed.append("no listener")

    with instance() as made:
        for name in ("workers", "expert_peers", "_publisher"):
            close = partial(closed.append, name)
            setattr(made, name, SimpleNamespace(close=close, stop_listening=keeps_no_listener))
        made.next_config = made.config if switched else None
        made.failure = Internal("a bug") if failed else None
        made.close()
        assert closed == [*(["workers", "expert_peers"] if left else ["no listener"]), "_publisher"]


def test_what_one_frontend_is_told_of_the_cache_is_not_published_to_all() -> None:
    published: list[Any] = []
    with instance() as made:
        made.plane.io.post = lambda *_: None  # type: ignore[method-assign]
        made._publisher = SimpleNamespace(publish=published.append)  # type: ignore[assignment]
        made._prefixes(Incarnation("f" * 32), [AllBlocksCleared()])
        assert published == []
        made._prefixes(None, [AllBlocksCleared()])
        assert published == [[AllBlocksCleared()]]


# ---- its turns ---------------------------------------------------------------------------------------


class Life:
    """An instance that lives and ends at once, and what was done with it."""

    made: list[Life]
    starts = True
    fails: SegueError | None = None
    expert_peers: object | None = None
    switches: list[InstanceConfig]

    def __init__(
        self, config: InstanceConfig, engine: object, memory: object, *, me: LeaderId | None, **_: object
    ) -> None:
        self.config, self.engine, self.memory = config, engine, memory
        self.me = me or ME
        self.steps: list[str] = []
        self.next_config: InstanceConfig | None = None
        self.failure: SegueError | None = None
        self.during: Callable[[], object] = lambda: None
        records = SimpleNamespace(records=object())
        self.scheduler = SimpleNamespace(admission=records)
        Life.made.append(self)

    def start(self) -> bool:
        self.steps.append("start")
        if self.fails is not None:
            raise self.fails
        return self.starts

    def run(self) -> None:
        self.steps.append("run")
        if Life.switches:
            self.next_config = Life.switches.pop(0)
        self.during()

    def close(self) -> None:
        self.steps.append("close")

    def drain(self) -> None:
        self.steps.append("drain")


@pytest.fixture
def lives(monkeypatch: pytest.MonkeyPatch) -> type[Life]:
    class Fresh(Life):
        pass

    Life.made, Life.switches = [], []
    monkeypatch.setattr(turns, "Instance", Fresh)
    monkeypatch.setattr(turns, "gc", SimpleNamespace(collect=int, freeze=int, unfreeze=int))
    return Fresh


CONFIG = InstanceConfig(model="m", registry="http://127.0.0.1:1", role=Role.DECODE)
AS_PREFILL = InstanceConfig(model="m", registry="http://127.0.0.1:1", role=Role.PREFILL)
REPLICA = OpenedReplica(object(), object())  # type: ignore[arg-type]


def turned() -> tuple[RoleLifecycle, list[Life]]:
    engine, memory, ready = object(), object(), list[Life]()
    made = RoleLifecycle(CONFIG, OpenedReplica(engine, memory))  # type: ignore[arg-type]
    made.run(ready.append)  # type: ignore[arg-type]
    assert all((life.engine, life.memory) == (engine, memory) for life in Life.made)
    return made, ready


def test_a_leader_that_is_switched_is_its_successor_with_the_records_of_its_requests(
    lives: type[Life],
) -> None:
    Life.switches = [AS_PREFILL]
    _, ready = turned()
    first, second = Life.made
    assert ready == [first, second]
    assert [life.steps for life in ready] == [["start", "run", "close"]] * 2
    assert second.config is AS_PREFILL
    assert second.me == LeaderId(successor(ME.incarnation, Role.PREFILL), ME.dp_rank)
    assert second.scheduler.admission.records is first.scheduler.admission.records


def test_a_leader_that_failed_or_could_not_start_has_no_other_life(lives: type[Life]) -> None:
    Life.switches = [AS_PREFILL]
    lives.run = lambda self: (Life.run(self), setattr(self, "failure", Internal("a bug")))[0]  # type: ignore[assignment, func-returns-value]
    _, ready = turned()
    assert len(ready) == len(Life.made) == 1
    Life.made.clear()
    lives.starts = False
    _, ready = turned()
    assert (ready, Life.made[0].steps) == ([], ["start", "close"])
    Life.made.clear()
    lives.fails = BootstrapUnreachable("nobody")
    with pytest.raises(BootstrapUnreachable):
        turned()
    assert Life.made[0].steps == ["start", "close"]


def test_a_signal_before_the_start_or_between_two_lives_is_not_lost(lives: type[Life]) -> None:
    early = RoleLifecycle(CONFIG, REPLICA)
    early.drain()
    early.run(lambda _: pytest.fail("it has left"))
    assert Life.made[0].steps == ["drain", "close"]
    Life.made.clear()
    lives.expert_peers = object()  # which compute with it until all of them are done
    together = RoleLifecycle(CONFIG, REPLICA)
    together.drain()
    together.run(lambda _: None)
    assert Life.made[0].steps == ["drain", "drain", "start", "run", "close"]
    Life.made.clear()
    lives.starts = False
    alone = RoleLifecycle(CONFIG, REPLICA)
    alone.run(lambda _: pytest.fail("it has not registered"))
    assert Life.made[0].steps == ["start", "run", "close"], "it tells them that it is done"
    lives.starts = True
    lives.expert_peers = None
    Life.made.clear()
    Life.switches = [AS_PREFILL]
    between = RoleLifecycle(CONFIG, REPLICA)
    first = Life.made[0]
    first.close = lambda: (first.steps.append("close"), between.drain())[0]  # type: ignore[method-assign, func-returns-value]
    between.run(lambda _: None)
    assert first.steps == ["start", "run", "close", "drain"]
    assert [life.steps for life in Life.made[1:]] == [["close"]], "told to the one that had ended"


# ---- its registry ------------------------------------------------------------------------------------


def test_an_instance_without_a_registry_runs_one_for_as_long_as_it_is_there() -> None:
    held = HeldPort()
    port = held.port
    config = InstanceConfig(model="m", role=Role.PREFILL, bootstrap_port=port)

    def serves() -> None:
        with registry.registry_of(config) as found:
            assert found is not None
            assert found.registry == f"http://127.0.0.1:{port}"
            assert httpx.get(f"{found.registry}/v1/health", timeout=60).status_code == 200
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        serves()
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://127.0.0.1:{port}/v1/health", timeout=60)


def test_a_signal_ends_the_wait_for_a_registry_and_is_the_process_s_again_afterwards(
    monkeypatch: pytest.MonkeyPatch, own_handlers: dict[signal.Signals, Any]
) -> None:
    async def waits(_config: InstanceConfig, _tls: object, stop: asyncio.Event) -> bool:
        signal.raise_signal(number)
        await asyncio.wait_for(stop.wait(), 60)
        return False

    monkeypatch.setattr(registry, "wait_for_registry", waits)
    for number, before in own_handlers.items():
        with registry.registry_of(CONFIG) as found:
            assert found is None
        assert signal.getsignal(number) == before


# ---- its other ranks ---------------------------------------------------------------------------------


class Link:
    """The scripted messages of a rank, and the messages that it got."""

    name = "the process of rank 1"

    def __init__(self, log: list[str], *words: object) -> None:
        self.log, self.words = log, list(words)
        self.told: list[Any] = []
        self.limits = Limits()

    def receive(self, within_s: float | None = None) -> object:
        return self.words.pop(0)

    def post(self, message: Any) -> None:
        self.told.append(message)

    def close(self) -> None:
        self.log.append("closed")


class Process:
    """A process that leaves when it is asked to, or never by itself."""

    pid = 7

    def __init__(self, log: list[str], *, stubborn: bool = False) -> None:
        self.log, self.stubborn = log, stubborn

    def wait(self, timeout_s: float | None = None) -> int:
        if self.stubborn and timeout_s is not None:
            raise subprocess.TimeoutExpired("x", timeout_s)
        self.log.append("waited")
        return 0

    def kill(self) -> None:
        self.stubborn = False
        self.log.append("killed")


class Made(NamedTuple):
    workers: Workers
    log: list[str]
    links: list[Link]


def ranks(*words: tuple[object, ...], stubborn: bool = False) -> Made:
    """Ranks 1 … with what each says."""
    log: list[str] = []
    links = [Link(log, *each) for each in words]
    made = Workers(0, InstanceConfig(role=Role.PREFILL, model="m"))
    made.all = [RankProcess(Process(log, stubborn=stubborn), link) for link in links]  # type: ignore[arg-type]
    return Made(made, log, links)


SPEC = lineage_spec(8)
FINE = LoadedWord("print", SPEC)


def own() -> Any:
    return SimpleNamespace(fingerprint="print", pool=SimpleNamespace(spec=SPEC))


def test_each_rank_is_told_which_it_is_and_never_the_secret_and_only_once_all_are_there() -> None:
    made = ranks((HereWord(),), (HereWord(),))
    config = InstanceConfig(model="m", registry="http://127.0.0.1:1", tp=3, secret=b"s" * 32)
    made.workers.set_up(config, 100, 5)
    orders = [link.told[0] for link in made.links]
    assert all(type(order) is SetUpOrder for order in orders)
    assert [(order.rank, order.pool_bytes, order.port) for order in orders] == [(1, 100, 5), (2, 100, 5)]
    assert {order.config.tp for order in orders} == {3}
    assert not any(b"s" * 32 in encode(order) for order in orders)
    late = ranks((HereWord(),), (LoadedWord("print", SPEC),))
    with pytest.raises(Internal, match="rank 2 said"):
        late.workers.set_up(config, 100, 5)
    assert late.links[0].told == []


def test_the_bytes_of_a_page_are_those_of_all_ranks_and_what_does_not_fit_is_refused() -> None:
    assert ranks((FINE,), (FINE,)).workers.loaded(own()) == 3 * SPEC.page_bytes
    for word, error in (
        (CannotWord(PeerLost("no memory").info), PeerLost),
        (HereWord(), Internal),
        (LoadedWord("another", SPEC), Internal),
        (LoadedWord("print", lineage_spec(9)), Internal),
    ):
        with pytest.raises(error):
            ranks((FINE,), (word,)).workers.loaded(own())


def test_the_first_reason_why_a_replica_is_over_is_told_once_and_when_no_rank_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(workers, "WorkerRank", lambda rank, _link: rank)
    made, orders = ranks((), ()), list[bytes]()
    made.workers.tell = orders.append
    told: list[tuple[str, list[str]]] = []
    served = made.workers.serve(ME, ("shm",), CONFIG, lambda error: told.append((str(error), list(made.log))))
    assert served == [1, 2]
    assert [msgspec.msgpack.decode(order, type=ServeOrder) for order in orders] == [
        ServeOrder(ME, Role.DECODE, ["shm"])
    ]
    made.workers.fail(PeerLost("the first"))
    made.workers.fail(PeerLost("what came of it"))
    assert told == [("the first", ["killed", "killed", "waited", "waited"])]


def test_a_rank_that_is_lost_between_two_roles_is_told_to_the_next_one_and_not_to_the_one_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(workers, "WorkerRank", lambda rank, _link: rank)
    made, told = ranks((), ()), list[str]()
    gone = PeerLost("rank 2 has ended")
    made.workers.serve(ME, (), CONFIG, lambda _: told.append("first"))
    made.workers.tell = lambda _: made.workers.fail(gone)  # as whoever watches the ranks says
    with pytest.raises(PeerLost, match="rank 2"):
        made.workers.serve(ME, (), CONFIG, lambda _: told.append("second"))
    assert told == []


def test_ranks_of_a_model_that_could_not_be_loaded_are_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    made = ranks((), (), stubborn=True)

    def loaded(*_: object) -> None:
        raise PeerLost("rank 1 has ended on the way")

    monkeypatch.setattr(workers, "Workers", lambda count, limits: made.workers)
    monkeypatch.setattr(workers, "_loaded", loaded)
    with pytest.raises(PeerLost):
        open_replica(InstanceConfig(model="m", registry="http://127.0.0.1:1", tp=3))
    assert made.log[:2] == ["killed", "killed"], "at once: one that loads would leave later"
    assert made.log.count("closed") == 2


def test_ranks_are_asked_to_leave_together_and_one_that_does_not_is_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(workers, "LEAVE_S", 0.0)
    made = ranks((), ())
    made.workers.close()
    assert made.log == ["closed"] * 2 + ["waited"] * 2
    made = ranks((), (), stubborn=True)
    made.workers.close()
    assert made.log == ["closed"] * 2 + ["killed", "waited"] * 2
