"""The choice of a pair's transport: prefill measures those that both offer, over scratch, and announces
one."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from logging.handlers import QueueHandler
from queue import SimpleQueue
from typing import Any, ClassVar

import msgspec
import pytest
from test_conn_new_transport import Board
from test_manager import LIMITS, Side, ask, assert_at_rest, assert_handed_over, spec

from segue.kv import transport_negotiation as opening
from segue.kv.config import HOST
from segue.kv.errors import OutOfCapacity, PeerLost, TransferFailed
from segue.kv.ids import RankId, Role
from segue.kv.layout.blocks import CopyBlock
from segue.kv.path_figures import PathCandidate, PathChoice
from segue.kv.protocol.messages import PathChosen
from segue.kv.session.api import Session
from segue.kv.transport.base import Endpoint, EventSink, PeerGone, WriteFailed, Written
from segue.kv.transport.kinds import KINDS, TransportKinds
from segue.kv.transport.memory.pool_memory import allocate
from segue.kv.transport.options import TransportOptions
from segue.kv.transport.probe import SCRATCH_BYTES, HostSpeed


class Steady(Board):
    """Says that each byte took `byte_s`, whatever it took; of the ranks in `slowly` a hundred times that."""

    byte_s: ClassVar[float]
    slowly: ClassVar[set[RankId]] = set()
    ended: ClassVar[threading.Event]

    def __init__(self, on_event: EventSink, options: TransportOptions) -> None:
        def told(event: Any) -> None:
            if isinstance(event, Written):
                factor = 100 if event.peer in self.slowly else 1
                event = msgspec.structs.replace(event, seconds=event.nbytes * self.byte_s * factor)
            on_event(event)

        super().__init__(told, options)


class First(Steady):
    """The preferred one."""

    name = "first"
    preference = 1
    byte_s = 1e-9
    _ranks: ClassVar[dict[RankId, Board]] = {}


class Second(Steady):
    name = "second"
    preference = 2
    byte_s = 1e-9
    _ranks: ClassVar[dict[RankId, Board]] = {}
    measured: ClassVar[threading.Event] = threading.Event()

    def write(self, peer: RankId, epoch: int, tag: int, blocks: Sequence[CopyBlock]) -> None:
        self.measured.set()
        super().write(peer, epoch, tag, blocks)


class Slow(First):
    byte_s = 1e-7


class Full(First):
    def connect(self, peer: RankId, endpoint: Endpoint, timeout_s: float) -> None:
        raise OutOfCapacity("its cgroup's memory is full")


class Silent(First):
    """Its writes never land."""

    def write(self, peer: RankId, epoch: int, tag: int, blocks: Sequence[CopyBlock]) -> None:
        self.begun.release()

    begun: ClassVar[threading.Semaphore]


def kinds(first: type[First]) -> TransportKinds:
    return TransportKinds({**KINDS.known, "first": first, "second": Second})


def choosing(role: Role, first: type[First] = First, **options: Any) -> Side:
    """A leader that offers both and may choose. Memory does a gigabyte a second on its host."""
    host = HostSpeed(memory_bytes_per_s=1e9, socket_bytes_per_s=1e9)
    runtime = replace(HOST, transports=kinds(first), host_speed=lambda: host)
    options = {"transports": ("first", "second"), "scratch_bytes": SCRATCH_BYTES, **options}
    memory = allocate(spec().nbytes + options["scratch_bytes"])
    return Side(role, memory=memory, runtime=runtime, **options)


@contextmanager
def met(prefill: Side, *decodes: Side) -> Iterator[None]:
    try:
        prefill.manager.start()
        for decode in decodes:
            decode.manager.start()
            decode.manager.add_peer(prefill.me, *prefill.manager.plane.address)
        yield
    finally:
        for side in (*decodes, prefill):
            side.close()


@contextmanager
def chosen_lines(caplog: pytest.LogCaptureFixture) -> Iterator[SimpleQueue[logging.LogRecord]]:
    """The lines of the log that say what was chosen, as they come."""
    caplog.set_level(logging.INFO, "segue.kv")
    lines: SimpleQueue[logging.LogRecord] = SimpleQueue()
    handler = QueueHandler(lines)
    handler.addFilter(lambda record: "path chosen" in record.getMessage())
    logger = logging.getLogger("segue.kv")
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


def choice_of(prefill: Side, decode: Side) -> PathChoice | None:
    return ask(prefill, lambda: prefill.manager.paths()[str(decode.me)].choice)


def transports_of(prefill: Side, decode: Side) -> tuple[str, str]:
    found = [
        ask(side, side.manager.paths)[str(other.me)] for side, other in ((prefill, decode), (decode, prefill))
    ]
    return found[0].transport, found[1].transport


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    probing(monkeypatch, 60.0)
    monkeypatch.setattr(opening, "EACH_S", 30.0)


def probing(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """So long may a probe take."""
    monkeypatch.setattr(opening, "PROBE_SHARE", seconds / LIMITS.connect_s)


def hurried(prefill: Side, monkeypatch: pytest.MonkeyPatch, times: float = math.inf) -> None:
    """Probe writes over the transport `first` have 0.2 s to land, `times` times; other transports and paths
    have time."""
    rank: Any = prefill.manager._ranks[0]
    measure, left = rank.measure, [times]

    async def within(name: str, *given: Any) -> Any:
        *rest, left_s = given
        if name == "first" and left[0] > 0:
            left[0], left_s = left[0] - 1, 0.2
        return await measure(name, *rest, left_s)

    monkeypatch.setattr(rank, "measure", within)


@pytest.mark.parametrize(("first", "taken"), [(First, "first"), (Slow, "second"), (Full, "second")])
def test_a_pair_takes_the_preferred_transport_unless_another_is_clearly_faster_or_it_fails(
    first: type[First], taken: str
) -> None:
    prefill, decode = choosing(Role.PREFILL, first), choosing(Role.DECODE, first)
    with met(prefill, decode):
        assert_handed_over(prefill, decode, 33, 8)
        assert transports_of(prefill, decode) == (taken, taken)
        choice = choice_of(prefill, decode)
        assert choice is not None
        measured = {one.transport: one.figures for one in choice.candidates if one.figures is not None}
        assert ("first" in measured) == (first is not Full)
        assert measured["second"] is not None
        assert measured["second"].bytes_per_s == pytest.approx(1e9)
        if first is Full:
            assert "its cgroup's memory is full" in choice.candidates[0].why_not
            assert "first" in ask(prefill, lambda: prefill.manager.compatibility.info.endpoints), (
                "others may use it"
            )
        assert_at_rest(prefill)
        assert_at_rest(decode)


def test_pairs_of_one_fleet_use_different_transports(monkeypatch: pytest.MonkeyPatch) -> None:
    prefill, near, far = choosing(Role.PREFILL), choosing(Role.DECODE), choosing(Role.DECODE)
    monkeypatch.setattr(Steady, "slowly", {RankId(far.me)})
    monkeypatch.setattr(Second, "slowly", set())
    with met(prefill, near, far):
        for decode in (near, far, near):
            assert_handed_over(prefill, decode, 33, 8)
        assert transports_of(prefill, near) == ("first", "first")
        assert transports_of(prefill, far) == ("second", "second")


def test_one_line_of_the_log_says_what_was_chosen_and_what_was_not(caplog: pytest.LogCaptureFixture) -> None:
    prefill = choosing(Role.PREFILL, Slow)
    decode = choosing(Role.DECODE, Slow, transports=("first",))
    with chosen_lines(caplog) as lines, met(prefill, decode):
        line = lines.get(timeout=60)
    assert line.levelno == logging.WARNING
    assert "transport=first: first 0.01 GB/s" in line.getMessage()
    assert "second is not offered by both" in line.getMessage()
    assert "far under what this host can do: a plain socket has 1.00 GB/s" in line.getMessage()


@pytest.mark.parametrize("changed", [{"scratch_bytes": 0}, {"transports": ("first",), "scratch_bytes": 0}])
def test_with_a_side_that_knows_no_probe_the_preferred_transport_is_taken(changed: dict[str, Any]) -> None:
    """An older version, and a transport that was named."""
    for mine, theirs in ((changed, {}), ({}, changed)):
        prefill, decode = choosing(Role.PREFILL, Slow, **mine), choosing(Role.DECODE, Slow, **theirs)
        with met(prefill, decode):
            assert_handed_over(prefill, decode, 33, 8)
            assert transports_of(prefill, decode) == ("first", "first")
            assert choice_of(prefill, decode) is None


def test_a_transport_that_does_not_answer_is_not_chosen_and_another_pair_goes_on_meanwhile(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Silent, "begun", threading.Semaphore(0), raising=False)
    prefill = choosing(Role.PREFILL, Silent)
    stuck, named = choosing(Role.DECODE, Silent), choosing(Role.DECODE, Silent, transports=("second",))
    with met(prefill, stuck):
        assert Silent.begun.acquire(timeout=60), "it is being measured, for 30 s from now on"
        named.manager.start()
        named.manager.add_peer(prefill.me, *prefill.manager.plane.address)
        assert_handed_over(prefill, named, 33, 8)
        assert ask(prefill, lambda: prefill.manager._peers[stuck.me].choosing)
        assert str(stuck.me) not in ask(prefill, prefill.manager.paths), "it has no transport to be shown"
        named.close()
    prefill, decode = choosing(Role.PREFILL, Silent), choosing(Role.DECODE, Silent)
    hurried(prefill, monkeypatch)
    with chosen_lines(caplog) as lines, met(prefill, decode):
        assert_handed_over(prefill, decode, 33, 8)
        assert transports_of(prefill, decode) == ("second", "second")
        choice = choice_of(prefill, decode)
        assert choice is not None
        assert choice.candidates[0].late
        line = lines.get(timeout=60)
    assert line.levelno == logging.WARNING, "it may be far better than the one that was taken"
    assert "first was not measured in time: its writes did not land" in line.getMessage()


class LateOnce(First):
    """Its first write ends, and badly, only after it has been measured anew."""

    held: ClassVar[list[WriteFailed]]
    writes: ClassVar[Iterator[int]]

    def write(self, peer: RankId, epoch: int, tag: int, blocks: Sequence[CopyBlock]) -> None:
        number = next(self.writes)
        if number == 0:
            self.held.append(WriteFailed(peer, epoch, tag, TransferFailed("it came too late")))
            return
        if number == 1:
            self._tell(self.held[0])
        super().write(peer, epoch, tag, blocks)


class OpensLate(First):
    """Its path is open only after the other transport has been measured."""

    def connect(self, peer: RankId, endpoint: Endpoint, timeout_s: float) -> None:
        assert Second.measured.wait(60)
        super().connect(peer, endpoint, timeout_s)


@pytest.mark.parametrize("first", [LateOnce, OpensLate])
def test_a_transport_that_was_late_once_is_measured_again_and_taken(
    first: type[First], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A busy host must not cost a pair its best transport for as long as the session lasts."""
    monkeypatch.setattr(Second, "measured", threading.Event())
    monkeypatch.setattr(LateOnce, "held", [], raising=False)
    monkeypatch.setattr(LateOnce, "writes", count(), raising=False)
    prefill, decode = choosing(Role.PREFILL, first), choosing(Role.DECODE, first)
    if first is LateOnce:
        hurried(prefill, monkeypatch, times=1)
    else:
        candidate = prefill.manager.opening._candidate

        async def soon(*given: Any) -> PathCandidate:
            *rest, name, until = given
            if name == "first" and not Second.measured.is_set():
                until = asyncio.get_running_loop().time() + 0.2
            return await candidate(*rest, name, until)

        monkeypatch.setattr(prefill.manager.opening, "_candidate", soon)
    with chosen_lines(caplog) as lines, met(prefill, decode):
        assert_handed_over(prefill, decode, 33, 8)
        assert transports_of(prefill, decode) == ("first", "first")
        choice = choice_of(prefill, decode)
        assert choice is not None
        assert [one.figures is not None for one in choice.candidates] == [True, True]
        assert Second.measured.is_set()
        assert_at_rest(prefill)
        assert_at_rest(decode)
        line = lines.get(timeout=60)
    assert line.levelno == logging.INFO
    assert "not measured" not in line.getMessage(), "the line says how it ended"


class Mapped(First):
    """To open its path is to map a pool, which is not done before the test says so."""

    in_memory = True
    begun: ClassVar[threading.Event]
    may_end: ClassVar[threading.Event]

    def connect(self, peer: RankId, endpoint: Endpoint, timeout_s: float) -> None:
        self.begun.set()
        assert self.may_end.wait(60)
        super().connect(peer, endpoint, timeout_s)


def test_a_pool_that_takes_long_to_map_is_waited_for_and_nothing_is_measured_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody is waited for but our own kernel; over another transport the pair would be slow for as long as
    it is joined. 1 GiB takes 0.1 to 0.4 s, and the first time for a transport is 0.3 s."""
    monkeypatch.setattr(opening, "EACH_S", 0.1)
    monkeypatch.setattr(Second, "measured", threading.Event())
    for name in ("begun", "may_end"):
        monkeypatch.setattr(Mapped, name, threading.Event(), raising=False)
    prefill, decode = choosing(Role.PREFILL, Mapped), choosing(Role.DECODE, Mapped)
    with met(prefill, decode):
        assert Mapped.begun.wait(60)
        assert not Second.measured.wait(3 * opening.EACH_S)
        Mapped.may_end.set()
        assert_handed_over(prefill, decode, 33, 8)
        assert transports_of(prefill, decode) == ("first", "first")
        choice = choice_of(prefill, decode)
        assert choice is not None
        assert [one.figures is not None for one in choice.candidates] == [True, True]


def test_what_decode_does_before_it_lets_anybody_write_is_no_time_of_a_transport(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(opening, "EACH_S", 0.1)
    prefill, decode = choosing(Role.PREFILL), choosing(Role.DECODE)
    rank, measured = decode.manager._ranks[0], []
    admit, candidate = rank.admit, prefill.manager.opening._candidate

    async def busy(*args: Any) -> None:
        await asyncio.sleep(3 * opening.EACH_S)
        await admit(*args)

    async def noted(*args: Any) -> PathCandidate:
        measured.append(await candidate(*args))
        return measured[-1]

    monkeypatch.setattr(rank, "admit", busy)
    monkeypatch.setattr(prefill.manager.opening, "_candidate", noted)
    with met(prefill, decode):
        assert_handed_over(prefill, decode, 33, 8)
        assert transports_of(prefill, decode) == ("first", "first")
        choice = choice_of(prefill, decode)
        assert choice is not None
        assert [one.figures is not None for one in choice.candidates] == [True, True]
        assert measured[0].transport == "first"


def test_a_decode_that_cannot_let_anybody_measure_is_said_to_be_the_reason(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    probing(monkeypatch, 0.25)
    prefill, decode = choosing(Role.PREFILL), choosing(Role.DECODE)

    async def full(*_: Any) -> None:
        raise OutOfCapacity("too many grants live")

    monkeypatch.setattr(decode.manager._ranks[0], "admit", full)
    with chosen_lines(caplog) as lines, met(prefill, decode):
        assert_handed_over(prefill, decode, 33, 8)
        assert transports_of(prefill, decode) == ("first", "first")
        line = lines.get(timeout=60)
    assert line.levelno == logging.WARNING
    assert "first was not measured: decode was not ready for it in time" in line.getMessage()


def test_the_end_of_a_path_that_is_not_the_chosen_one_ends_nothing() -> None:
    """Not even where a transport proves that its own path is over: bytes go over another."""
    prefill, decode = choosing(Role.PREFILL), choosing(Role.DECODE)
    with met(prefill, decode):
        assert_handed_over(prefill, decode, 33, 8)
        session = ask(decode, lambda: decode.manager._peers[prefill.me].session)
        gone = PeerGone(RankId(prefill.me), True, PeerLost("its stream was closed"))
        decode.manager.moved(0, "second", gone)
        assert_handed_over(prefill, decode, 33, 8)
        assert ask(decode, lambda: decode.manager._peers[prefill.me].session) is session


def test_decode_keeps_no_grant_of_a_probe_whether_it_ends_or_its_prefill_dies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Silent, "begun", threading.Semaphore(0), raising=False)
    fenced: list[str] = []
    prefill, decode = choosing(Role.PREFILL, Silent), choosing(Role.DECODE, Silent)
    ranks, left = decode.manager._ranks, threading.Event()
    fence = ranks[0].fence

    def noted(name: str, peer: RankId, epoch: int) -> None:
        fence(name, peer, epoch)
        fenced.append(name)
        if len(fenced) == 2:
            left.set()

    monkeypatch.setattr(ranks[0], "fence", noted)
    with met(prefill, decode):
        assert Silent.begun.acquire(timeout=60)
        prefill.manager.close()
        assert left.wait(60), "nobody is left to choose"
        assert fenced == ["first", "second"]
        for name in ("first", "second"):
            assert not ranks[0]._by_name[name]._granted  # type: ignore[attr-defined]


@contextmanager
def ends(side: Side, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The end of the side's first session."""
    ended: list[str] = []
    over, closed = threading.Event(), side.manager.closed

    def noted(session: Session, error: Any) -> None:
        closed(session, error)
        ended.append(str(error))
        over.set()

    monkeypatch.setattr(side.manager, "closed", noted)
    yield ended
    assert over.wait(60)


def test_a_choice_that_there_is_not_ends_the_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Silent, "begun", threading.Semaphore(0), raising=False)
    prefill, decode = choosing(Role.PREFILL, Silent), choosing(Role.DECODE, Silent)
    with met(prefill, decode), ends(decode, monkeypatch) as ended:
        assert Silent.begun.acquire(timeout=60)
        peer = ask(decode, lambda: decode.manager._peers[prefill.me])
        decode.manager.io.post(decode.manager.received, peer.session, PathChosen("carrier pigeon"))
    assert "has chosen what there is not" in ended[0]


def test_a_prefill_that_never_chooses_keeps_decode_waiting_until_its_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Silent, "begun", threading.Semaphore(0), raising=False)
    monkeypatch.setattr(opening, "OPENING_S", 0.0)
    limits = msgspec.structs.replace(LIMITS, connect_s=1.0)
    prefill, decode = choosing(Role.PREFILL, Silent), choosing(Role.DECODE, Silent, limits=limits)
    with met(prefill, decode), ends(decode, monkeypatch) as ended:
        pass
    assert "has chosen no path in 1 s" in ended[0]
