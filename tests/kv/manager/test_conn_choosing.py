"""How a leader comes to the transport of a pair, with ranks that do as they are told."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from segue.kv.config import HOST
from segue.kv.errors import BootstrapTimeout, OutOfCapacity, PeerLost, SegueError, TransferFailed
from segue.kv.ids import LeaderId, Role, new_incarnation
from segue.kv.limits import Limits
from segue.kv.peers import Compatibility, Peer
from segue.kv.protocol.messages import HANDOFF_VERSIONS, LeaderInfo, PathChosen
from segue.kv.transport_negotiation import TransportNegotiation

PEER = LeaderId(new_incarnation())
NAMES = ["first", "second"]


class Ranks:
    """Notes over which transports it opens paths; `fails` are the errors of some."""

    def __init__(self) -> None:
        self.fails: dict[str, SegueError] = {}
        self.opened: list[tuple[str, float]] = []
        self.route = ""
        self.writes = True
        self.endpoints = {name: [b""] for name in NAMES}

    def change(self, peer: LeaderId, name: str) -> None:
        assert peer == PEER
        self.route = name

    def writes_for(self, peer: LeaderId) -> bool:
        return self.writes

    async def connect(self, peer: LeaderId, info: LeaderInfo, timeout_s: float) -> None:
        self.opened.append((self.route, timeout_s))
        if self.route in self.fails:
            raise self.fails[self.route]

    def withdraw(self, name: str) -> bool:
        del self.endpoints[name]
        return True


class Rig:
    def __init__(self, role: Role) -> None:
        self.ranks = Ranks()
        info = LeaderInfo(
            versions=HANDOFF_VERSIONS,
            model="m",
            dp_size=1,
            ranks=[],
            endpoints=self.ranks.endpoints,
            max_transfers=1,
        )
        self.compatibility = Compatibility(role, info, HOST.transports)
        self.sent: list[Any] = []
        session: Any = SimpleNamespace(peer=SimpleNamespace(leader=PEER), send=self.sent.append)
        plan: Any = None  # nothing here is about ranks
        self.peer = Peer(session, info, NAMES, plan, asyncio.get_running_loop().create_future())
        ranks: Any = self.ranks
        self.opening = TransportNegotiation(role, Limits(connect_s=7.0), self.compatibility, ranks)


def run(role: Role, test: Callable[[Rig], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(60):
            await test(Rig(role))

    asyncio.run(main())


@pytest.mark.parametrize(
    ("fails", "taken"),
    [
        ({}, "first"),
        ({"first": OutOfCapacity("no room to map it")}, "second"),
        ({"first": BootstrapTimeout("no answer")}, "second"),
    ],
)
def test_prefill_opens_the_first_that_works_and_tells_decode_once(
    fails: dict[str, SegueError], taken: str
) -> None:
    async def test(rig: Rig) -> None:
        rig.ranks.fails = fails
        await rig.opening.open(rig.peer)
        assert rig.ranks.opened == [(name, 7.0) for name in NAMES[: NAMES.index(taken) + 1]]
        assert rig.sent == [PathChosen(taken)]
        assert (rig.peer.transport, rig.ranks.route) == (taken, taken)
        assert [*rig.compatibility.info.endpoints] == NAMES, "the next session tries the whole list"

    run(Role.PREFILL, test)


def test_where_none_works_the_error_of_the_last_one_ends_the_session() -> None:
    async def test(rig: Rig) -> None:
        rig.ranks.fails = {"first": OutOfCapacity("full"), "second": TransferFailed("refused")}
        with pytest.raises(TransferFailed, match="refused"):
            await rig.opening.open(rig.peer)
        assert rig.sent == []

    run(Role.PREFILL, test)


@pytest.mark.parametrize("relays", [False, True])
def test_decode_takes_what_prefill_has_chosen_and_opens_paths_between_its_own_ranks(relays: bool) -> None:
    async def test(rig: Rig) -> None:
        rig.ranks.writes = relays
        rig.peer.chosen.set_result("second")
        await rig.opening.open(rig.peer)
        assert (rig.peer.transport, rig.ranks.route, rig.sent) == ("second", "second", [])
        assert rig.ranks.opened == [("second", 7.0)] * relays

    run(Role.DECODE, test)


def test_decode_follows_no_choice_that_there_is_not() -> None:
    async def test(rig: Rig) -> None:
        rig.peer.chosen.set_result("third")
        with pytest.raises(TransferFailed, match="'third', which is not one of"):
            await rig.opening.open(rig.peer)
        assert rig.ranks.opened == []

    run(Role.DECODE, test)


def test_decode_that_has_no_room_for_its_own_paths_meets_anew_without_that_transport() -> None:
    async def test(rig: Rig) -> None:
        rig.ranks.fails = {"first": OutOfCapacity("full")}
        rig.peer.chosen.set_result("first")
        with pytest.raises(PeerLost, match="begins anew without first: full"):
            await rig.opening.open(rig.peer)
        assert [*rig.compatibility.info.endpoints] == ["second"]

    run(Role.DECODE, test)


def test_a_prefill_that_never_chooses_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("segue.kv.transport_negotiation.MAPPING_S", -14.0)  # and twice `connect_s`

    async def test(rig: Rig) -> None:
        with pytest.raises(PeerLost, match="has chosen no transport in 0 s"):
            await rig.opening.open(rig.peer)

    run(Role.DECODE, test)
