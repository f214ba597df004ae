"""Faults at their worst moments, in both flows, under both policies, over tcp and shm.

EngineCore of the other side lives: its asserts hold in each step, and it serves the next request. Each
request ends once: with the KV of its prompt, or under `fail` with one typed error. At rest nothing is held.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from vllm_bench import TO_PREFILL, request
from vllm_model import ModelEngine
from vllm_pair import Pair, TensorWorker, expected, held_by, landed, make_engine, run_step
from vllm_process import Remote

from ports import HeldPort
from segue.integrations.vllm.vllm_params import engine_id
from segue.integrations.vllm.vllm_settings import ConnectorSettings, LoadFailurePolicy
from segue.integrations.vllm.vllm_table import RequestEnd
from segue.kv import Incarnation, LeaderId, Role
from segue.kv.layout.content import Content, checksum
from segue.kv.ranks import checksums

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


CASES = [
    pytest.param(
        Case(concurrent, policy, shared),
        id=f"{'concurrent' if concurrent else 'sequential'}-{policy}-{'shm' if shared else 'tcp'}",
    )
    for concurrent in (False, True)
    for policy in LoadFailurePolicy
    for shared in (False, True)
]
every_case = pytest.mark.parametrize("case", CASES)


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


def address_of(region: memoryview) -> int:
    return int(np.frombuffer(region, np.int8).ctypes.data)


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


# ---- in this process ---------------------------------------------------------------------------------


class Both:
    """A pair in this process, with one hand-off at the moment at which a fault comes."""

    def __init__(self, stack: ExitStack, case: Case, port: int, **more: Any) -> None:
        self.case = case
        settings: Any = {"room_s": ROOM_S, "query_port": port, **more}
        self.pair = Pair(stack, policy=case.policy, shared=case.shared, **settings)
        self.prefill, self.decode = self.pair.prefill, self.pair.decode
        worker = self.prefill.worker
        assert isinstance(worker, TensorWorker)
        self.leader, self.port = worker.side.address.leader, port

    def begin(self, name: str, tokens: int = TOKENS) -> None:
        """Concurrent: prefill has computed a part of the prompt, and decode waits for it. Sequential: decode
        has begun."""
        if self.case.concurrent:
            to_prefill, to_decode = to_both(name, self.leader, self.port)
            self.decode.add(request(f"d{name}", tokens, to_decode))
            self.prefill.add(request(f"p{name}", tokens, to_prefill))
            for _ in range(COMPUTED // 6):
                self.pair.step()
        else:
            self.prefill.add(request(f"p{name}", tokens, TO_PREFILL))
            self.pair.until(lambda: f"p{name}" in self.prefill.answers)
            self.decode.add(request(f"d{name}", tokens, self.prefill.answers[f"p{name}"]))
            run_step(self.decode)

    def serves(self, name: str) -> None:
        """A hand-off without a fault, and rest after it."""
        self.begin(name)
        self.pair.until(lambda: f"d{name}" in self.decode.ends)
        assert f"d{name}" in self.decode.loaded
        worker = self.decode.worker
        assert isinstance(worker, TensorWorker)
        assert torch.equal(worker.kv[f"d{name}"], expected(range(TOKENS)))
        for engine in (self.prefill, self.decode):
            at_rest(engine, self.pair.until)


@every_case
def test_a_client_of_decode_leaves(stack: ExitStack, case: Case, port: int) -> None:
    """No other decode may come for the room (`retain_s` 0): prefill does not keep it either."""
    both = Both(stack, case, port, room_s=120.0, retain_s=0.0)
    both.serves("first")
    both.begin("1")
    both.decode.abort("d1")
    both.pair.until(lambda: "p1" in both.prefill.ends)
    assert both.decode.ends["d1"] is RequestEnd.ABORT
    assert both.prefill.ends["p1"] is RequestEnd.LENGTH
    both.serves("2")


@every_case
def test_a_client_of_prefill_leaves(stack: ExitStack, case: Case, port: int) -> None:
    """In the sequential flow its request has ended, and decode has the KV all the same."""
    both = Both(stack, case, port)
    both.begin("1")
    both.prefill.abort("p1")
    both.pair.until(lambda: "d1" in both.decode.ends)
    if case.concurrent:
        ended(both.decode, "d1", case)
        assert codes(both.decode) == {"ABORTED_BY_CLIENT": 1}
    else:
        assert both.decode.loaded == ["d1"]
    both.serves("2")


@every_case
def test_prefill_preempts_in_mid_prompt(stack: ExitStack, case: Case, port: int) -> None:
    """In the concurrent flow the hand-off ends, because its chunks lie in blocks that are no more the
    request's. In the sequential flow nothing has been told to decode."""
    both = Both(stack, case, port)
    if case.concurrent:
        both.begin("1")
    else:
        both.prefill.add(request("p1", TOKENS, TO_PREFILL))
        run_step(both.prefill)
    both.prefill.preempt(both.prefill.running.pop())
    both.prefill.table.step([], ["p1"])
    # Its blocks are given away at once.
    both.prefill.add(request("other", 12))
    both.prefill.waiting.reverse()
    both.pair.until(lambda: {"p1", "other"} <= both.prefill.ends.keys())
    assert set(both.prefill.ends.values()) == {RequestEnd.LENGTH}
    if not case.concurrent:
        both.decode.add(request("d1", TOKENS, both.prefill.answers["p1"]))
    both.pair.until(lambda: "d1" in both.decode.ends)
    if case.concurrent:
        ended(both.decode, "d1", case)
        assert codes(both.decode) == {"OUT_OF_CAPACITY": 1}
    else:
        assert both.decode.loaded == ["d1"]
    both.serves("2")


@every_case
def test_a_byte_flips_where_it_landed(
    stack: ExitStack, case: Case, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = Both(stack, case, port)
    worker = both.decode.worker
    assert isinstance(worker, TensorWorker)
    mine = next(iter(worker.caches[0].values())).untyped_storage()
    flips = iter((0x10,))

    def flipped(regions: Sequence[memoryview], content: Content) -> int:
        at = int(content.ranges()[0, 1]) - 1
        for region in regions:
            if 0 <= at < len(region) and 0 <= address_of(region) - mine.data_ptr() < mine.nbytes():
                region[at] ^= next(flips, 0)
            at -= len(region)
        return checksum(regions, content)

    monkeypatch.setattr(checksums, "checksum", flipped)
    both.begin("1")
    both.pair.until(lambda: "d1" in both.decode.ends)
    ended(both.decode, "d1", case)
    assert codes(both.decode) == {"CHECKSUM_MISMATCH": 1}
    both.pair.until(lambda: "p1" in both.prefill.ends)
    assert both.prefill.ends["p1"] is RequestEnd.LENGTH
    both.serves("2")


# ---- with a peer in a process of its own -------------------------------------------------------------


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
            leader = LeaderId(Incarnation(self.prefill.address["incarnation"]))
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


@pytest.mark.slow
@every_case
def test_prefill_is_killed(stack: ExitStack, case: Case, port: int) -> None:
    from_remote = FromRemote(stack, case, port, room_s=20.0)
    from_remote.begin("1")
    from_remote.prefill.signal(signal.SIGKILL)
    from_remote.until(lambda: "d1" in from_remote.decode.ends)
    ended(from_remote.decode, "d1", case)
    assert codes(from_remote.decode) == {"PEER_LOST": 1}
    from_remote.serves_alone()


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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
