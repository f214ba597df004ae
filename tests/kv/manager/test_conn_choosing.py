"""How a leader comes to the transport of a pair, with ranks that do as they are told."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from segue.kv import transport_negotiation as opening
from segue.kv.config import HOST
from segue.kv.errors import BootstrapTimeout, OutOfCapacity, PeerLost, SegueError, TransferFailed
from segue.kv.ids import LeaderId, RankId, Role, new_incarnation
from segue.kv.limits import Limits
from segue.kv.path_figures import PathCandidate, PathChoice, PathFigures
from segue.kv.peers import Compatibility, PathSpeed, Peer, Probe
from segue.kv.protocol.messages import HANDOFF_VERSIONS, LeaderInfo, PathChosen, ProbeReady
from segue.kv.ranks.local_rank import FENCE_AGAIN_S
from segue.kv.transport.probe import PageShape, Scratch
from segue.kv.transport_negotiation import TransportNegotiation

PEER = LeaderId(new_incarnation())
FAST, SLOW = PathFigures(page_s=1e-6, bytes_per_s=1e10), PathFigures(page_s=1e-3, bytes_per_s=1e6)


class Ranks:
    """Notes what is asked; `found` says what comes of measuring each transport."""

    def __init__(self) -> None:
        self.found: dict[str, PathFigures | Exception] = {"first": FAST, "second": FAST}
        self.asked: list[Any] = []
        self.writes = True
        self.breaks: dict[str, Exception] = {}
        self.endpoints = {"first": [b""], "second": [b""]}

    def __getitem__(self, index: int) -> Any:
        return SimpleNamespace(measure=self._measure, admit=self._admit, fence=self._fence)

    async def try_path(
        self, writer: int, reader: RankId, name: str, endpoint: bytes, timeout_s: float
    ) -> None:
        self.asked.append(("try", writer, reader, name, endpoint))
        if f"try {name}" in self.breaks:
            raise self.breaks[f"try {name}"]

    async def _measure(self, name: str, to: RankId, epoch: int, *more: Any) -> PathFigures:
        self.asked.append(("measure", name, to, epoch))
        found = self.found[name]
        if isinstance(found, Exception):
            raise found
        return found

    async def _admit(self, names: list[str], writer: RankId, epoch: int) -> None:
        self.asked.append(("admit", names, writer, epoch))
        if "admit" in self.breaks:
            raise self.breaks["admit"]

    def _fence(self, name: str, writer: RankId, epoch: int) -> None:
        self.asked.append(("fence", name, writer, epoch))

    def change(self, peer: LeaderId, name: str) -> None:
        self.asked.append(("change", peer, name))

    def writes_for(self, peer: LeaderId) -> bool:
        return self.writes

    async def connect(self, peer: LeaderId, info: LeaderInfo, timeout_s: float) -> None:
        self.asked.append(("connect", timeout_s))
        if "connect" in self.breaks:
            raise self.breaks["connect"]

    def withdraw(self, name: str) -> bool:
        self.asked.append(("withdraw", name))
        self.endpoints.pop(name, None)
        return True


class Rig:
    def __init__(self, role: Role) -> None:
        self.loop = asyncio.get_running_loop()
        self.ranks = Ranks()
        #: whose pools this process maps
        self.in_memory: set[str] = set()
        info = LeaderInfo(
            versions=HANDOFF_VERSIONS,
            model="m",
            dp_size=1,
            ranks=[],
            endpoints={
                name: [f"{name} of 0".encode(), f"{name} of 1".encode()] for name in ("first", "second")
            },
            max_transfers=1,
        )
        self.compatibility = Compatibility(role, info, HOST.transports)
        self.sent: list[Any] = []
        session: Any = SimpleNamespace(peer=SimpleNamespace(leader=PEER), send=self.sent.append)
        left_out = [PathCandidate(transport="third", why_not="is not offered by both")]
        probe = Probe(["first", "second"], left_out, 0, 1, Scratch(5, 8), PageShape(1, 1))
        plan: Any = None  # nothing here is about ranks
        word = self.loop.create_future()
        self.peer = Peer(session, info, "first", PathSpeed("first"), plan, probe, word=word)
        runtime: Any = SimpleNamespace(
            transports=SimpleNamespace(kind=lambda name: SimpleNamespace(in_memory=name in self.in_memory)),
            host_speed=lambda: None,
            connecting=lambda name: None,
        )
        io: Any = SimpleNamespace(loop=self.loop)
        self.opening = TransportNegotiation(
            role,
            Limits(connect_s=7.0),
            self.compatibility,
            self.ranks,  # type: ignore[arg-type]
            io,
            runtime,
            lambda: 77,
        )

        async def told(peer: Peer) -> None: ...

        self.opening._tell = told  # type: ignore[method-assign]

    def of(self, what: str) -> list[Any]:
        return [asked[1:] for asked in self.ranks.asked if asked[0] == what]


def run(role: Role, test: Callable[[Rig], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(60):
            await test(Rig(role))

    asyncio.run(main())


def test_prefill_measures_each_tells_decode_what_it_has_chosen_and_only_then_connects() -> None:
    async def test(rig: Rig) -> None:
        rig.ranks.found["first"] = SLOW
        assert rig.peer.word is not None
        rig.peer.word.set_result(ProbeReady(9))
        await rig.opening.open(rig.peer)
        to = RankId(PEER, 1)
        assert rig.of("try") == [(0, to, name, f"{name} of 1".encode()) for name in ("first", "second")]
        assert rig.of("measure") == [("first", to, 9), ("second", to, 9)]
        assert rig.sent == [PathChosen("second")]
        assert [asked[0] for asked in rig.ranks.asked][-2:] == ["change", "connect"]
        assert (rig.of("change"), rig.of("connect")) == ([(PEER, "second")], [(7.0,)])
        choice = rig.peer.speed.choice
        assert choice is not None
        assert [each.transport for each in choice.candidates] == ["first", "second", "third"]
        assert (rig.peer.transport, rig.peer.choosing) == ("second", False)

    run(Role.PREFILL, test)


def test_a_pool_is_mapped_before_anything_is_measured_and_if_that_fails_it_is_tried_again() -> None:
    async def test(rig: Rig) -> None:
        rig.in_memory = {"second"}
        rig.ranks.breaks["try second"] = OutOfCapacity("its cgroup is full")
        assert rig.peer.word is not None
        rig.peer.word.set_result(ProbeReady(9))
        await rig.opening.open(rig.peer)
        asked = [asked[3] if asked[0] == "try" else asked[0] for asked in rig.ranks.asked]
        assert asked[:4] == ["second", "first", "measure", "second"]
        assert rig.sent == [PathChosen("first")]

    run(Role.PREFILL, test)


def test_a_transport_that_was_late_is_measured_once_more() -> None:
    async def test(rig: Rig) -> None:
        measure = rig.ranks._measure

        async def late_once(name: str, *more: Any) -> PathFigures:
            first = ("measure", "first") not in [asked[:2] for asked in rig.ranks.asked]
            found = await measure(name, *more)
            if name == "first" and first:
                raise BootstrapTimeout("slow")
            return found

        rig.ranks._measure = late_once  # type: ignore[method-assign]
        assert rig.peer.word is not None
        rig.peer.word.set_result(ProbeReady(9))
        await rig.opening.open(rig.peer)
        assert [name for name, *_ in rig.of("measure")] == ["first", "second", "first"]
        assert rig.sent == [PathChosen("first")], "it is as fast, and preferred"

    run(Role.PREFILL, test)


def test_each_transport_has_its_time_and_the_late_ones_share_what_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that never answers leaves the others theirs."""
    monkeypatch.setattr(opening, "EACH_S", 60.0)
    monkeypatch.setattr(opening, "PROBE_SHARE", 100.0)

    async def test(rig: Rig) -> None:
        times: list[tuple[str, float]] = []
        probe = rig.peer.probe
        assert probe is not None

        async def never(name: str, to: RankId, epoch: int, *more: Any) -> PathFigures:
            assert more[:2] == (probe.scratch, probe.shape)
            times.append((name, more[2]))
            raise BootstrapTimeout("slow")

        rig.ranks._measure = never  # type: ignore[method-assign]
        assert rig.peer.word is not None
        rig.peer.word.set_result(ProbeReady(9))
        await rig.opening.open(rig.peer)
        assert [name for name, _ in times] == ["first", "second"] * 2
        assert max(left_s for _, left_s in times[:2]) <= 60
        assert 60 < times[2][1] <= 350 < times[3][1] <= 700, "half of the rest, and then the rest"

    run(Role.PREFILL, test)


@pytest.mark.parametrize(
    ("error", "late"),
    [
        (BootstrapTimeout("slow"), True),
        (TimeoutError(), True),
        (OutOfCapacity("full"), False),
        (KeyError("x"), False),
    ],
)
@pytest.mark.parametrize("where", ["try", "measure"])
def test_a_transport_that_fails_is_not_chosen_and_it_is_said_whether_it_was_only_slow(
    error: Exception, late: bool, where: str
) -> None:
    async def test(rig: Rig) -> None:
        if where == "try":
            rig.ranks.breaks["try first"] = error
        else:
            rig.ranks.found["first"] = error
        assert rig.peer.word is not None
        rig.peer.word.set_result(ProbeReady(9))
        await rig.opening.open(rig.peer)
        assert rig.sent == [PathChosen("second")]
        choice = rig.peer.speed.choice
        assert choice is not None
        assert choice.candidates[0].late is late
        assert choice.candidates[0].figures is None
        assert choice.candidates[0].why_not
        tried = [name for _, _, name, _ in rig.of("try")]
        assert tried.count("first") == (2 if late else 1), "what has failed would fail again"

    run(Role.PREFILL, test)


def test_a_probe_takes_no_longer_than_it_may_however_many_transports_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Decode never says that it is ready."""
    monkeypatch.setattr(opening, "PROBE_SHARE", 0.0)
    monkeypatch.setattr(opening, "EACH_S", 600.0)

    async def test(rig: Rig) -> None:
        await rig.opening.open(rig.peer)
        choice = rig.peer.speed.choice
        assert choice is not None
        assert [each.late for each in choice.candidates] == [True, True, False]
        assert rig.sent == [PathChosen("first")], "the preferred one, where nothing is known"
        assert rig.peer.word is not None
        assert not rig.peer.word.cancelled(), "what is waited for is everybody's"

    run(Role.PREFILL, test)


def test_where_nothing_is_written_nothing_is_connected() -> None:
    async def test(rig: Rig) -> None:
        rig.peer.probe, rig.ranks.writes = None, False
        await rig.opening.open(rig.peer)
        assert rig.ranks.asked == []
        rig.ranks.writes = True
        await rig.opening.open(rig.peer)
        assert rig.ranks.asked == [("connect", 7.0)]
        assert rig.sent == []

    run(Role.PREFILL, test)


def test_what_there_is_no_room_for_is_withdrawn_and_any_other_error_is_the_session_s() -> None:
    async def test(rig: Rig) -> None:
        rig.peer.probe = None
        rig.ranks.breaks["connect"] = TransferFailed("no route")
        with pytest.raises(TransferFailed, match="no route"):
            await rig.opening.open(rig.peer)
        assert rig.of("withdraw") == []
        rig.ranks.breaks["connect"] = OutOfCapacity("its cgroup is full")
        with pytest.raises(PeerLost, match="begins anew without first: its cgroup is full"):
            await rig.opening.open(rig.peer)
        assert rig.of("withdraw") == [("first",)]
        assert rig.compatibility.info.endpoints == {"second": [b""]}, "nobody is told of it any more"

    run(Role.PREFILL, test)


@pytest.mark.parametrize("ready", [True, False])
def test_decode_lets_prefill_measure_follows_its_choice_and_fences_whatever_comes(ready: bool) -> None:
    async def test(rig: Rig) -> None:
        if not ready:
            rig.ranks.breaks["admit"] = OutOfCapacity("no grant is free")
        rig.peer.on_path_message(PathChosen("second"))
        await rig.opening.open(rig.peer)
        writer = RankId(PEER, 0)
        assert rig.of("admit") == [(["first", "second"], writer, 77)]
        assert rig.sent == ([ProbeReady(77)] if ready else []), "only what was granted is said"
        assert rig.of("fence") == [("first", writer, 77), ("second", writer, 77)]
        assert (rig.peer.transport, rig.of("change")) == ("second", [(PEER, "second")])

    run(Role.DECODE, test)


@pytest.mark.parametrize("word", [PathChosen("third"), ProbeReady(5), None])
def test_decode_follows_no_choice_that_there_is_not_and_fences_all_the_same(
    word: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "OPENING_S", 0.02)

    async def test(rig: Rig) -> None:
        if word is None:
            rig.opening._limits = Limits(connect_s=0.01)
        else:
            rig.peer.on_path_message(word)
        with pytest.raises(SegueError) as caught:
            await rig.opening.open(rig.peer)
        assert isinstance(caught.value, PeerLost if word is None else TransferFailed)
        if word is None:
            assert "in 0.03 s" in str(caught.value), "prefill may have a large pool to map before it measures"
        assert len(rig.of("fence")) == 2
        assert rig.of("change") == []

    run(Role.DECODE, test)


def test_scratch_is_fenced_until_the_transport_has_taken_it() -> None:
    async def test(rig: Rig) -> None:
        later: list[tuple[float, Callable[[], None]]] = []
        normal, breaks = rig.ranks._fence, [RuntimeError("a bug"), RuntimeError("again")]

        def fence(name: str, writer: RankId, epoch: int) -> None:
            normal(name, writer, epoch)
            if breaks:
                raise breaks.pop()

        rig.ranks._fence = fence  # type: ignore[method-assign]
        rig.loop.call_later = lambda delay, call: later.append((delay, call))  # type: ignore[method-assign, assignment]
        rig.opening._fence("second", 1, RankId(PEER, 0), 77)
        for number in (1, 2):
            [(delay, call)] = later
            assert (len(rig.of("fence")), delay) == (number, FENCE_AGAIN_S)
            later.clear()
            call()
        assert rig.of("fence") == [("second", RankId(PEER, 0), 77)] * 3
        assert later == []

    run(Role.DECODE, test)


def test_decode_that_speaks_of_its_choice_before_prefill_has_made_one_is_refused() -> None:
    async def test(rig: Rig) -> None:
        assert rig.peer.word is not None
        rig.peer.word.set_result(PathChosen("second"))
        with pytest.raises(TransferFailed, match="PathChosen where it was to say that it is ready"):
            await rig.opening.open(rig.peer)
        assert rig.sent == []

    run(Role.PREFILL, test)


def test_that_a_path_is_slow_for_its_host_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(rig: Rig) -> None:
        del rig.opening._tell  # type: ignore[attr-defined]
        monkeypatch.setattr(opening, "slow", lambda figures, host, in_memory: f"slow {in_memory}")
        rig.in_memory = {"first"}
        for name in ("first", "second"):
            found = [PathCandidate(transport=each, figures=FAST) for each in ("first", "second")]
            rig.peer.take(PathChoice(transport=name, candidates=found))
            await rig.opening._tell(rig.peer)
            assert rig.peer.speed.choice is not None
            assert rig.peer.speed.choice.slow == f"slow {name == 'first'}"

    run(Role.PREFILL, test)
