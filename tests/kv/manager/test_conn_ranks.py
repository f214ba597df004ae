"""The transport to each peer: the memory of peers is bounded, and a rank is typed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from test_manager import Side, spec

from segue.kv.config import KVConfig, LeaderRuntime
from segue.kv.errors import TransferFailed
from segue.kv.ids import LeaderId, RankId, Role, TransferId, new_incarnation
from segue.kv.limits import Limits
from segue.kv.protocol import events
from segue.kv.ranks.local_rank import local_rank
from segue.kv.ranks.rank_group import Ranks
from segue.kv.transport.base import Endpoint
from segue.kv.transport.memory.pool_memory import Memory, allocate
from segue.kv.transport.options import TransportOptions

PEERS = 3
#: one rank at either side
PAIRS = ((0, 0),)


class Recorder:
    """A transport that notes what it is asked."""

    def __init__(self, name: str, on_event: Any, options: TransportOptions) -> None:
        self.name = name
        self.options = options
        self.asked: list[tuple[Any, ...]] = []
        self.closed = False

    def register(self, memory: Any) -> Endpoint:
        return Endpoint(self.name, memory.nbytes, b"")

    def connect(self, peer: RankId, endpoint: Endpoint, timeout_s: float) -> None:
        self.asked.append(("connect", peer, endpoint.transport, timeout_s))

    def grant(self, peer: RankId, epoch: int, area: Any) -> None:
        self.asked.append(("grant", peer, epoch, area))

    def fence(self, peer: RankId, epoch: int) -> None:
        self.asked.append(("fence", peer, epoch))

    def write(self, peer: RankId, epoch: int, tag: int, blocks: Any) -> None:
        self.asked.append(("write", peer, epoch, tag))

    def close(self) -> None:
        self.closed = True


class Made:
    """The one rank of a side, over two recorders."""

    def __init__(self, role: Role) -> None:
        self.made: dict[str, Recorder] = {}
        self.config = KVConfig(
            role=role, model="m", spec=spec(), transports=("shm", "tcp"), limits=Limits(max_sessions=PEERS)
        )
        self.memory = allocate(self.config.spec.nbytes)
        rank = local_rank(self.config, self.memory, LeaderRuntime(transports=self))
        self.ranks = Ranks([rank], self.config.me, role, PEERS)

    def create(self, name: str, on_event: Any, options: TransportOptions) -> Any:
        self.made[name] = Recorder(name, on_event, options)
        return self.made[name]

    def for_memory(self, names: Sequence[str], memory: Memory) -> Sequence[str]:
        return names

    def transfer(self, peer: LeaderId) -> TransferId:
        me = self.config.me
        return TransferId(1, 0, me, peer) if self.config.role is Role.PREFILL else TransferId(1, 0, peer, me)


def test_an_effect_goes_to_the_transport_of_its_peer_and_names_its_rank() -> None:
    made = Made(Role.PREFILL)
    near, far = LeaderId(new_incarnation()), LeaderId(new_incarnation(), 1)
    made.ranks.choose(near, "shm", PAIRS, {near})
    made.ranks.choose(far, "tcp", PAIRS, {near, far})
    made.ranks.carry_out(events.PostWrite(made.transfer(near), 0, 7, 1, 2, ()))
    made.ranks.carry_out(events.Fence(made.transfer(far), 0, RankId(far), 8))
    assert made.made["shm"].asked == [("write", RankId(near, 2), 7, 1)]
    assert made.made["tcp"].asked == [("fence", RankId(far), 8)]
    assert made.made["shm"].options.me == RankId(made.config.me)
    made.ranks.close()
    assert all(transport.closed for transport in made.made.values())
    made.memory.close()


def test_a_grant_names_the_bytes_of_its_pages_and_no_others() -> None:
    made, peer = Made(Role.DECODE), LeaderId(new_incarnation())
    made.ranks.choose(peer, "tcp", PAIRS, {peer})
    made.ranks.carry_out(events.Grant(made.transfer(peer), 0, 7, (3, 1)))
    ((what, name, epoch, area),) = made.made["tcp"].asked
    assert (what, name, epoch) == ("grant", RankId(peer), 7)
    pool = made.config.spec
    size = pool.page_tokens
    found = {at for start, end in area.ranges().tolist() for at in range(start, end)}
    wanted = {
        at
        for layer in range(pool.layer_count)
        for value, width in ((False, pool.k_token_bytes), (True, pool.v_token_bytes))
        for page in (1, 3)
        for start in (pool.offset(layer, value, page * size),)
        for at in range(start, start + size * width)
    }
    assert found == wanted
    made.memory.close()


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_what_is_remembered_of_peers_is_bounded_and_never_a_live_one(role: Role) -> None:
    made = Made(role)
    stays = LeaderId(new_incarnation())
    made.ranks.choose(stays, "tcp", PAIRS, {stays})
    others = [LeaderId(new_incarnation()) for _ in range(20)]
    for other in others:
        made.ranks.choose(other, "shm", PAIRS, {stays, other})
    # A fence may come after its session, so the last ones that left are still known.
    for known in (stays, *others[-(PEERS - 1) :]):
        made.ranks.carry_out(events.Fence(made.transfer(known), 0, RankId(known), 1))
    assert [ask[1] for ask in made.made["tcp"].asked] == [RankId(stays)]
    assert len(made.made["shm"].asked) == PEERS - 1
    with pytest.raises(KeyError):
        made.ranks.carry_out(events.Fence(made.transfer(others[0]), 0, RankId(others[0]), 1))
    made.memory.close()


def test_an_endpoint_that_cannot_be_read_is_a_typed_error() -> None:
    made, side = Made(Role.PREFILL), Side(Role.DECODE)
    peer = LeaderId(new_incarnation())
    made.ranks.choose(peer, "shm", PAIRS, {peer})
    info = side.manager.compatibility.info
    asyncio.run(made.ranks.connect(peer, info, 1.0))
    assert made.made["shm"].asked == [("connect", RankId(peer), "shm", 1.0)]
    info.endpoints["shm"][0] = b"\xc1"
    with pytest.raises(TransferFailed, match="unreadable endpoint"):
        asyncio.run(made.ranks.connect(peer, info, 1.0))
    side.close()
    made.memory.close()


def test_what_one_dead_rank_of_a_peer_leaves_unproven_is_asked_again_over_the_transport_that_knows() -> None:
    """Its death proves nothing of the others, so the fences of our ranks decide, each for itself."""
    made = Made(Role.DECODE)
    peer = LeaderId(new_incarnation())
    made.ranks.choose(peer, "tcp", ((0, 0), (1, 0)), {peer})
    assert not made.ranks.died(RankId(peer, 1))
    fence = events.Fence(made.transfer(peer), 0, RankId(peer, 1), 7)
    made.ranks.carry_out(fence, made.ranks.route_over("shm", peer))
    assert made.made["shm"].asked == [("fence", RankId(peer, 1), 7)]
    assert made.made["tcp"].asked == []
    assert made.ranks.died(RankId(peer, 0)), "now all are dead"
    made.memory.close()
