"""A peer in a process of its own is killed, stopped or started again in the middle of a hand-off, in both
flows, under both policies, over tcp and shm.

EngineCore of the other side lives: its asserts hold in each step, and it serves the next request. Each
request ends once: with the KV of its prompt, or under `fail` with one typed error. At rest nothing is held.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from vllm_bench import TO_PREFILL, request
from vllm_model import ModelEngine
from vllm_pair import TensorWorker, expected, held_by, landed, make_engine, run_step
from vllm_process import Remote

from ports import HeldPort
from segue.integrations.vllm.vllm_params import engine_id
from segue.integrations.vllm.vllm_settings import ConnectorSettings, LoadFailurePolicy
from segue.integrations.vllm.vllm_table import RequestEnd
from segue.kv import Incarnation, LeaderId, Role

pytestmark = pytest.mark.slow

TOKENS = 30
#: Tokens that decode has got when a fault comes; in the concurrent flow prefill has computed no more.
COMPUTED = 12
ROOM_S = 4.0


@dataclass(frozen=True)
class Case:
    concurrent: bool
    policy: LoadFailurePolicy
    shared: bool

    def settings(self, query_port: int = 0, **more: Any) -> dict[str, Any]:
        transport = ["shm" if self.shared else "tcp"]
        return {"transport": transport, "room_s": ROOM_S, "query_port": query_port} | more


#: What a stopped process does over shm depends on the policy.
CASES = (
    Case(False, LoadFailurePolicy.RECOMPUTE, False),
    Case(True, LoadFailurePolicy.RECOMPUTE, True),
    Case(True, LoadFailurePolicy.FAIL, True),
)
every_case = pytest.mark.parametrize(
    "case", CASES, ids=["sequential-recompute-tcp", "concurrent-recompute-shm", "concurrent-fail-shm"]
)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as found:
        yield found


@pytest.fixture
def held_port() -> HeldPort:
    return HeldPort()


@pytest.fixture
def port(held_port: HeldPort) -> int:
    return held_port.port


def to_both(transfer: str, leader: LeaderId, port: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a router sends to prefill and to decode in the concurrent flow."""
    to_decode = {
        "do_remote_prefill": True,
        "transfer_id": transfer,
        "remote_bootstrap_addr": f"http://127.0.0.1:{port}",
        "remote_engine_id": engine_id(leader),
    }
    return {**TO_PREFILL, "transfer_id": transfer}, to_decode


def at_rest(engine: ModelEngine, until: Callable[[Callable[[], object]], None]) -> None:
    until(lambda: engine.at_rest and not held_by(engine))
    assert len(engine.pool.free) == len(engine.pool.blocks)
    assert not any(block.refs for block in engine.pool.blocks)


def ended(engine: ModelEngine, name: str, case: Case, tokens: int = TOKENS) -> None:
    """A load that failed has ended as the policy says."""
    assert name not in engine.loaded
    if case.policy is LoadFailurePolicy.FAIL:
        assert engine.ends[name] is RequestEnd.ERROR
        return
    assert engine.ends[name] is RequestEnd.LENGTH
    worker = engine.worker
    assert isinstance(worker, TensorWorker)
    assert torch.equal(worker.kv[name], expected(range(tokens)))


def codes(engine: ModelEngine) -> dict[str, int]:
    return dict(engine.table.take_figures().outcomes)


class FromRemote:
    """A prefill in a process of its own, and decode here, with one hand-off at the moment of a fault."""

    def __init__(
        self, stack: ExitStack, case: Case, port: int, session_port: int = 0, room_s: float = ROOM_S
    ) -> None:
        self.case, self.port = case, port
        self.stack = stack
        self.settings = case.settings(port, port=session_port, room_s=room_s)
        self.prefill = self.start()
        policy, settings = case.policy, ConnectorSettings(**case.settings(room_s=room_s))
        self.decode = make_engine(stack, Role.DECODE, settings, policy, shared=case.shared)

    def start(self) -> Remote:
        return Remote(self.stack, Role.PREFILL, self.case.policy, self.case.shared, **self.settings)

    def params(self, name: str, tokens: int = TOKENS) -> dict[str, Any]:
        """Have prefill ready for decode: concurrent, with a part of the prompt computed; else with all."""
        if self.case.concurrent:
            leader = LeaderId(Incarnation(self.prefill.incarnation))
            to_prefill, to_decode = to_both(name, leader, self.port)
            self.prefill.ask(run=False)
            self.prefill.ask(add=f"p{name}", tokens=tokens, params=to_prefill)
            self.prefill.ask(step=COMPUTED // 6)
            return to_decode
        self.prefill.ask(add=f"p{name}", tokens=tokens, params=TO_PREFILL)
        answers = self.prefill.until(lambda found: f"p{name}" in found["answers"])["answers"]
        self.prefill.ask(step=2, run=False)
        found: dict[str, Any] = answers[f"p{name}"]
        return found

    def until(self, condition: Callable[[], object], within_s: float = 30.0) -> None:
        until(self.decode, condition, within_s)

    def loads(self, name: str) -> None:
        """A hand-off without a fault."""
        params = self.params(name)
        self.decode.add(request(f"d{name}", TOKENS, params))
        self.prefill.ask(run=True)
        self.until(lambda: f"d{name}" in self.decode.ends)
        assert f"d{name}" in self.decode.loaded, codes(self.decode)
        codes(self.decode)

    def begin(self, name: str) -> None:
        """A hand-off of which decode has a part, over a session that is open; the rest does not come."""
        self.loads("first")
        self.prefill.ask(sends_only=COMPUTED)
        params = self.params(name)
        self.decode.add(request(f"d{name}", TOKENS, params))
        self.until(lambda: landed(self.decode, f"d{name}") == COMPUTED)

    def rests(self) -> None:
        at_rest(self.decode, self.until)

    def serves_alone(self) -> None:
        """EngineCore of decode lives."""
        self.decode.add(request("alone", TOKENS))
        self.until(lambda: "alone" in self.decode.ends)
        assert self.decode.ends["alone"] is RequestEnd.LENGTH
        self.rests()


def until(engine: ModelEngine, condition: Callable[[], object], within_s: float = 30.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, (engine.ends, held_by(engine))
        run_step(engine)
        time.sleep(0.001)


@every_case
def test_prefill_is_killed(stack: ExitStack, case: Case, port: int) -> None:
    from_remote = FromRemote(stack, case, port, room_s=20.0)
    from_remote.begin("1")
    from_remote.prefill.signal(signal.SIGKILL)
    from_remote.until(lambda: "d1" in from_remote.decode.ends)
    ended(from_remote.decode, "d1", case)
    assert codes(from_remote.decode) == {"PEER_LOST": 1}
    from_remote.serves_alone()


@every_case
def test_prefill_is_stopped(stack: ExitStack, case: Case, port: int) -> None:
    """Over tcp decode's blocks are free while it is stopped. Over shm prefill writes into them itself: the
    metric shows them until it goes on, or is killed."""
    from_remote = FromRemote(stack, case, port)
    from_remote.begin("1")
    from_remote.prefill.signal(signal.SIGSTOP)
    decode = from_remote.decode
    from_remote.until(lambda: "d1" in decode.ends)
    ended(decode, "d1", case)
    if case.shared:
        figures = decode.table.take_figures()
        assert figures.outcomes == {"DEADLINE_EXCEEDED": 1}
        assert figures.quarantined == figures.pinned == -(-TOKENS // 4)
    else:
        assert codes(decode) == {"DEADLINE_EXCEEDED": 1}
        from_remote.rests()
        assert decode.table.take_figures().quarantined == 0
    goes_on = case.policy is LoadFailurePolicy.RECOMPUTE
    from_remote.prefill.signal(signal.SIGCONT if goes_on else signal.SIGKILL)
    from_remote.serves_alone()
    if goes_on:
        from_remote.prefill.ask(run=True, sends_only=0)
        from_remote.prefill.until(lambda found: found["free"] and not found["held"])
        from_remote.loads("2")


@every_case
def test_prefill_is_started_again(stack: ExitStack, case: Case, port: int) -> None:
    """At the same port: params of before name another process."""
    session = HeldPort()
    from_remote = FromRemote(stack, case, port, session.port, room_s=20.0)
    from_remote.loads("first")
    params = from_remote.params("1")
    from_remote.prefill.signal(signal.SIGKILL)
    from_remote.prefill = from_remote.start()
    from_remote.decode.add(request("d1", TOKENS, params))
    from_remote.until(lambda: "d1" in from_remote.decode.ends)
    ended(from_remote.decode, "d1", case)
    assert codes(from_remote.decode) == {"PEER_RESTARTED": 1}
    from_remote.loads("2")
    from_remote.serves_alone()


@every_case
def test_decode_is_killed(stack: ExitStack, case: Case, port: int) -> None:
    """Prefill's blocks are free, and it serves the next decode."""
    settings = ConnectorSettings(**case.settings(port))
    prefill = make_engine(stack, Role.PREFILL, settings, case.policy, shared=case.shared)
    worker = prefill.worker
    assert isinstance(worker, TensorWorker)

    def hand_over(decode: Remote, name: str) -> None:
        if case.concurrent:
            to_prefill, to_decode = to_both(name, worker.side.address.leader, port)
            prefill.add(request(f"p{name}", TOKENS, to_prefill))
            run_step(prefill)
            run_step(prefill)
            decode.ask(add=f"d{name}", tokens=TOKENS, params=to_decode)
            return
        prefill.add(request(f"p{name}", TOKENS, TO_PREFILL))
        until(prefill, lambda: f"p{name}" in prefill.answers)
        run_step(prefill)
        decode.ask(add=f"d{name}", tokens=TOKENS, params=prefill.answers[f"p{name}"])

    first, second = (
        Remote(stack, Role.DECODE, case.policy, case.shared, **case.settings()) for _ in range(2)
    )
    worker.sends_only = COMPUTED
    hand_over(first, "1")
    first.until(lambda found: found["landed"]["d1"] == COMPUTED)
    first.signal(signal.SIGKILL)
    worker.sends_only = 0
    until(prefill, lambda: "p1" in prefill.ends)
    assert prefill.ends["p1"] is RequestEnd.LENGTH
    hand_over(second, "2")
    until(prefill, lambda: "d2" in second.ask()["ends"])
    found = second.ask()
    assert (found["loaded"], found["right"]) == (["d2"], {"d2": True})
    at_rest(prefill, lambda condition: until(prefill, condition))
    second.until(lambda found: found["free"] and not found["held"])
