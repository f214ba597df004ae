"""A transport is one file and one line: this one is a class of this file, and one line of a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from kv_sides import assert_handed_over, sides

from segue.kv.config import LeaderRuntime
from segue.kv.errors import TransferFailed
from segue.kv.ids import RankId
from segue.kv.layout.blocks import CopyBlock
from segue.kv.layout.content import Content
from segue.kv.transport.base import Endpoint, EventSink, Fenced, Transport, WriteFailed, Written
from segue.kv.transport.kinds import KINDS, TransportKinds
from segue.kv.transport.memory.copier import copy_block
from segue.kv.transport.memory.pool_memory import Memory, MemoryKind
from segue.kv.transport.options import TransportOptions


class Board(Transport):
    """Ranks of one process copy into each other's memory, which they find on a board by their ids."""

    name = "board"
    preference = 1
    memory_kinds = frozenset({MemoryKind.SHARED, MemoryKind.HOST})
    written: ClassVar[list[RankId]] = []
    _ranks: ClassVar[dict[RankId, Board]] = {}

    def __init__(self, on_event: EventSink, options: TransportOptions) -> None:
        self._tell = on_event
        self._me = options.me
        self._granted: set[tuple[RankId, int]] = set()

    def register(self, memory: Memory) -> Endpoint:
        self._memory = memory
        self._ranks[self._me] = self
        return Endpoint(self.name, memory.nbytes, b"")

    def connect(self, peer: RankId, endpoint: Endpoint, timeout_s: float) -> None:
        if peer not in self._ranks:
            raise TransferFailed(f"{peer} is not on the board")

    def grant(self, peer: RankId, epoch: int, area: Content) -> None:
        self._granted.add((peer, epoch))

    def write(self, peer: RankId, epoch: int, tag: int, blocks: Sequence[CopyBlock]) -> None:
        target = self._ranks[peer]
        if (self._me, epoch) not in target._granted:
            self._tell(WriteFailed(peer, epoch, tag, TransferFailed("not granted"), refused=True))
            return
        for block in blocks:
            copy_block(self._memory.buffer, target._memory.buffer, block)
        self.written.append(peer)
        self._tell(Written(peer, epoch, tag, sum(block.nbytes for block in blocks), 0.0))

    def fence(self, peer: RankId, epoch: int) -> None:
        self._granted.discard((peer, epoch))
        self._tell(Fenced(peer, epoch, True))

    def close(self) -> None:
        self._ranks.pop(self._me, None)


WITH_BOARD = TransportKinds({**KINDS.known, "board": Board})


OWN_FIRST = {"transports": ("board", "tcp"), "runtime": LeaderRuntime(transports=WITH_BOARD)}


def test_a_transport_of_ones_own_carries_a_hand_off() -> None:
    with sides(**OWN_FIRST) as (prefill, decode):
        assert_handed_over(prefill, decode, 23, 7)
        assert {peer.leader for peer in Board.written} == {decode.me}
    assert not Board._ranks


def test_who_does_not_know_a_transport_takes_the_next_one() -> None:
    written = len(Board.written)
    with sides("tcp", prefill=OWN_FIRST) as (prefill, decode):
        assert_handed_over(prefill, decode, 8, 8)
        assert len(Board.written) == written
