"""A leader of several ranks: which of them is asked for what, and when all that were asked have answered."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from segue.kv.errors import OutOfCapacity
from segue.kv.ids import LeaderId, RankId, Role, TransferId, new_incarnation
from segue.kv.layout.content import Content
from segue.kv.protocol import events
from segue.kv.protocol.messages import HANDOFF_VERSIONS, LeaderInfo
from segue.kv.ranks.rank_group import Ranks

ME, PEER, OTHER = (LeaderId(new_incarnation()) for _ in range(3))
FULL = OutOfCapacity("full").info


class Noting:
    """A rank that notes what it is asked for. `grants`: it grants at once."""

    spec = None
    checksums = ("xxh3-64",)

    def __init__(self, number: int, names: tuple[str, ...] = ("shm", "tcp")) -> None:
        self.number = number
        self.endpoints = {name: f"{name} of {number}".encode() for name in names}
        self.grants = False
        self.breaks_close = False
        self.asked: list[tuple[Any, ...]] = []
        self.closed = False

    async def start(self, owner: Any, io: Any) -> None:
        self.asked.append(("start", owner, io))

    async def connect(self, transport: str, peer: RankId, endpoint: bytes, timeout_s: float) -> None:
        self.asked.append(("connect", transport, peer, endpoint, timeout_s))

    def write(
        self, transport: str, peer: RankId, epoch: int, tag: int, blocks: Any, ready: Any = None
    ) -> None:
        self.asked.append(("write", transport, peer, epoch, tag))

    def grant(self, transport: str, peer: RankId, epoch: int, pages: Any, slot: int | None = None) -> bool:
        self.asked.append(("grant", transport, peer, epoch, tuple(pages), slot))
        return self.grants

    def fence(self, transport: str, peer: RankId, epoch: int) -> None:
        self.asked.append(("fence", transport, peer, epoch))

    def checksum(self, effect: events.ComputeChecksum) -> None:
        self.asked.append(("checksum", effect.tag))

    def close(self) -> None:
        self.closed = True
        if self.breaks_close:
            raise RuntimeError("a bug")


def ranks_of(role: Role, *made: Noting) -> Ranks:
    return Ranks(made, ME, role, 8)  # type: ignore[arg-type]


def decode() -> tuple[Ranks, list[Noting], TransferId]:
    """Two ranks of decode: rank 0 has from both of prefill's, and passes on to rank 1."""
    made = [Noting(0), Noting(1)]
    ranks = ranks_of(Role.DECODE, *made)
    ranks.choose(PEER, "tcp", ((0, 0), (1, 0)), {PEER}, ((0, 0, 1), (1, 0, 1)))
    return ranks, made, TransferId(5, 0, PEER, ME)


def test_only_what_all_ranks_have_is_offered() -> None:
    ranks = ranks_of(Role.PREFILL, Noting(0, ("shm", "tcp")), Noting(1, ("tcp", "rdma")))
    assert ranks.endpoints == {"tcp": [b"tcp of 0", b"tcp of 1"]}
    assert not ranks.withdraw("tcp"), "nothing else is offered"
    assert not ranks.withdraw("shm")


def test_every_rank_is_started_and_closed_whatever_one_of_them_raises() -> None:
    made = [Noting(0), Noting(1), Noting(2)]
    ranks = ranks_of(Role.PREFILL, *made)
    owner: Any = object()
    io: Any = object()
    asyncio.run(ranks.start(owner, io))
    assert [each.asked for each in made] == [[("start", owner, io)]] * 3
    made[1].breaks_close = True
    with pytest.raises(RuntimeError):
        ranks.close()
    assert all(each.closed for each in made)


def info() -> LeaderInfo:
    return LeaderInfo(
        versions=HANDOFF_VERSIONS,
        model="m",
        dp_size=1,
        ranks=[],
        endpoints={name: [f"{name} of peer {n}".encode() for n in range(2)] for name in ("shm", "tcp")},
        max_transfers=1,
    )


def test_prefill_opens_the_paths_of_the_plan_and_no_others() -> None:
    made = [Noting(0), Noting(1)]
    ranks = ranks_of(Role.PREFILL, *made)
    ranks.choose(PEER, "tcp", ((0, 1), (1, 0)), {PEER})
    assert ranks.writes_for(PEER)
    asyncio.run(ranks.connect(PEER, info(), 3.0))
    assert [each.asked for each in made] == [
        [("connect", "tcp", RankId(PEER, n), f"tcp of peer {n}".encode(), 3.0)] for n in (1, 0)
    ]


def test_decode_opens_paths_between_its_own_ranks_and_none_where_nothing_is_passed_on() -> None:
    ranks, made, _ = decode()
    assert ranks.writes_for(PEER)
    asyncio.run(ranks.connect(PEER, info(), 3.0))
    assert made[0].asked == [("connect", "tcp", RankId(ME, 1), b"tcp of 1", 3.0)]
    assert made[1].asked == []
    ranks.choose(OTHER, "tcp", ((0, 0), (1, 1)), {PEER, OTHER})
    assert not ranks.writes_for(OTHER)


def test_a_write_goes_to_the_peer_s_rank_and_what_is_passed_on_to_one_of_our_own() -> None:
    made = [Noting(0), Noting(1)]
    ranks = ranks_of(Role.PREFILL, *made)
    ranks.choose(PEER, "tcp", ((0, 0), (1, 1)), {PEER})
    ranks.carry_out(events.PostWrite(TransferId(5, 0, ME, PEER), 1, 7, 9, 1, ()))
    assert (made[0].asked, made[1].asked) == ([], [("write", "tcp", RankId(PEER, 1), 7, 9)])
    ranks, made, transfer = decode()
    ranks.carry_out(events.Relay(transfer, 0, 7, 9, 1, ()))
    ranks.carry_out(events.ComputeChecksum(transfer, 1, 4, Content((), ())))
    assert made[0].asked == [("write", "tcp", RankId(ME, 1), 7, 9)]
    assert made[1].asked == [("checksum", 4)]


def test_a_rank_has_granted_when_it_lets_everybody_write_who_may_and_not_before() -> None:
    ranks, made, transfer = decode()
    grants = [events.Grant(transfer, rank, 7, (3, 1), 2) for rank in (0, 1)]
    assert [ranks.carry_out(grant) for grant in grants] == [False, False]
    writers = [RankId(PEER, 0), RankId(PEER, 1)]
    # Who reads what is passed on lets its writer in, and the writer is fenced for it as well.
    assert {ask[2] for ask in made[0].asked} == {*writers, RankId(ME, 1)}
    assert {ask[2] for ask in made[1].asked} == {RankId(ME, 0)}
    assert {ask[3:] for ask in made[0].asked} == {(7, (3, 1), 2)}
    assert ranks.unanswered == 2
    assert ranks.granted(transfer, 0, writers[0], 7, None) is None
    assert ranks.granted(transfer, 0, writers[0], 7, None) is None, "twice is not both"
    assert ranks.granted(transfer, 0, writers[1], 8, None) is None, "another epoch"
    assert ranks.granted(transfer, 1, RankId(ME, 0), 7, None) == events.Granted(transfer, 1)
    assert ranks.granted(transfer, 0, writers[1], 7, None) is None
    assert ranks.granted(transfer, 0, RankId(ME, 1), 7, None) == events.Granted(transfer, 0)
    assert ranks.granted(transfer, 0, RankId(ME, 1), 7, None) is None
    assert ranks.unanswered == 0
    assert ranks.granted(transfer, 0, writers[0], 7, FULL) == events.AbortTransfer(transfer, FULL)


def test_a_grant_that_holds_at_once_is_not_waited_for() -> None:
    ranks, made, transfer = decode()
    made[1].grants = True
    assert ranks.carry_out(events.Grant(transfer, 1, 7, (3,)))
    assert not ranks.carry_out(events.Grant(transfer, 0, 7, (3,)))
    assert ranks.unanswered == 1
    ranks.carry_out(events.Fence(transfer, 0, RankId(PEER, 0), 7))
    for writer in (RankId(PEER, 0), RankId(PEER, 1), RankId(ME, 1)):
        assert ranks.granted(transfer, 0, writer, 7, None) is None, "its epoch is over"


def test_who_has_died_is_forgotten_when_its_leader_is_met_anew() -> None:
    ranks, _, _ = decode()
    assert not ranks.died(RankId(PEER, 0))
    ranks.choose(PEER, "tcp", ((0, 0), (1, 0)), {PEER})
    assert not ranks.died(RankId(PEER, 1)), "rank 0 has come again"
    assert ranks.died(RankId(PEER, 0))
    assert ranks.died(RankId(OTHER, 0)), "it was never told where to write"


def test_how_a_peer_is_reached_changes_with_the_choice_and_is_known_of_before() -> None:
    ranks, made, transfer = decode()
    before = ranks.route_to(PEER)
    assert before is not None
    ranks.change(PEER, "shm")
    assert (ranks.transport_to(PEER), before.transport) == ("shm", "tcp")
    assert ranks.transport_to(OTHER) is None
    assert ranks.route_over("x", OTHER) is None
    ranks.carry_out(events.Fence(transfer, 1, RankId(ME, 0), 7))
    ranks.carry_out(events.Fence(transfer, 1, RankId(ME, 0), 8), before)
    assert made[1].asked == [("fence", "shm", RankId(ME, 0), 7), ("fence", "tcp", RankId(ME, 0), 8)]
    assert ranks.peer_of(transfer) == PEER
    assert ranks_of(Role.PREFILL, Noting(0)).peer_of(TransferId(5, 0, ME, PEER)) == PEER


def test_a_transport_is_withdrawn_once_and_never_the_last_one() -> None:
    ranks = ranks_of(Role.PREFILL, Noting(0, ("shm", "tcp", "rdma")))
    assert not ranks.withdraw("mori"), "it was not offered"
    assert [ranks.withdraw("shm") for _ in range(2)] == [True, False]
    assert list(ranks.endpoints) == ["tcp", "rdma"]
    assert [ranks.withdraw(name) for name in ("tcp", "rdma")] == [True, False]
    assert list(ranks.endpoints) == ["rdma"]


def test_as_many_peers_are_known_as_there_may_be_and_of_the_others_nothing_stays() -> None:
    """A fence may come long after its session: no route is forgotten before there is need."""
    ranks = ranks_of(Role.PREFILL, Noting(0))
    peers = [LeaderId(new_incarnation()) for _ in range(12)]
    for number, peer in enumerate(peers):
        ranks.choose(peer, "tcp", ((0, 0), (0, 1)), {peers[0], peer})
        ranks.died(RankId(peer, 1))
        known = [each for each in peers if ranks.transport_to(each)]
        assert len(known) == min(number + 1, 8)
        assert known == [peers[0], *peers[max(1, number - 6) : number + 1]][: number + 1]
    assert set(ranks._dead) == set(known)


class Connecting(Noting):
    """A rank whose connects take until the test says so."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.under_way: list[asyncio.Future[None]] = []
        self.ended = 0

    async def connect(self, transport: str, peer: RankId, endpoint: bytes, timeout_s: float) -> None:
        self.under_way.append(asyncio.get_running_loop().create_future())
        await self.under_way[-1]
        self.ended += 1


async def turns() -> None:
    for _ in range(8):
        await asyncio.sleep(0)


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_one_path_is_opened_at_a_time_also_after_who_asked_for_it_has_gone(role: Role) -> None:
    """A connect that cannot be cancelled would else meet the next one at the same path. On decode the paths
    between its ranks are those of every peer."""

    async def main() -> None:
        ranks = ranks_of(role, writer := Connecting(0), Connecting(1))
        relays = ((0, 0, 1),) if role is Role.DECODE else ()
        for peer in (PEER, OTHER):
            ranks.choose(peer, "tcp", ((0, 0),), {PEER, OTHER}, relays)
        peers = (PEER, OTHER, PEER, OTHER) if role is Role.DECODE else (PEER,) * 4
        asking = [asyncio.ensure_future(ranks.connect(peer, info(), 3.0)) for peer in peers]
        await turns()
        asking[0].cancel()
        for number in range(1, 5):
            await turns()
            assert (len(writer.under_way), writer.ended) == (number, number - 1)
            writer.under_way[-1].set_result(None)
        found = await asyncio.gather(*asking, return_exceptions=True)
        assert isinstance(found[0], asyncio.CancelledError)
        assert (found[1:], writer.ended) == ([None] * 3, 4)
        assert not ranks._connecting

    asyncio.run(main())


def test_the_paths_to_two_peers_are_opened_at_once() -> None:
    """One that swallows packets keeps nobody waiting but itself."""

    async def main() -> None:
        ranks = ranks_of(Role.PREFILL, writer := Connecting(0))
        for peer in (PEER, OTHER):
            ranks.choose(peer, "tcp", ((0, 0),), {PEER, OTHER})
        asking = [asyncio.ensure_future(ranks.connect(peer, info(), 3.0)) for peer in (PEER, OTHER)]
        await turns()
        assert len(writer.under_way) == 2
        writer.under_way[1].set_exception(FULL.exception())
        with pytest.raises(OutOfCapacity):
            await asking[1]
        writer.under_way[0].set_result(None)
        await asking[0]

    asyncio.run(main())
