"""The writing end of a staged path. Everything here runs on the loop's thread.

A piece of a write asks the reader for a slot first, and only then takes a slot of our own. It holds that one
for a copy and a write of the inner transport, which end by themselves: no full pool waits for another one.
"""

from __future__ import annotations

import enum
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import msgspec

from segue.kv.errors import OutOfCapacity, SegueError, TransferFailed
from segue.kv.ids import RankId
from segue.kv.layout.blocks import CopyBlock
from segue.kv.transport.base import Fenced, PeerGone, TransportEvent, WriteFailed, Written
from segue.kv.transport.paths import Write, fenced, not_granted
from segue.kv.transport.staged import staged_wire as wire
from segue.kv.transport.staged.staged_copies import PackedPiece, pack
from segue.kv.transport.staged.staged_slots import Slots

#: Pieces of one path between its question for a slot and the copy at the other end.
WINDOW = 8


class PieceState(enum.Enum):
    """How far a piece is."""

    WANTED = "the reader was asked for a slot"
    GRANTED = "it waits for a slot of ours"
    COPYING = "it is being copied out of our memory"
    WRITING = "the inner transport has it"
    FILLED = "it is in the reader's slot"


_S = PieceState


@dataclass(slots=True, eq=False)
class OutPiece:
    """A piece between its question and its end. `dead`: nobody wants it any more."""

    write: Write
    packed: PackedPiece
    state: PieceState = _S.WANTED
    inner_epoch: int = 0
    offset: int = 0
    slot: int = 0
    dead: bool = False


class WriterHost(Protocol):
    """The transport, as a path asks it."""

    out_slots: Slots
    slot_bytes: int
    max_waiting: int

    def number(self) -> int: ...
    def copy_out(
        self, packed: PackedPiece, slot: int, ended: Callable[[SegueError | None], None]
    ) -> None: ...
    def inner_write(self, peer: RankId, epoch: int, tag: int, block: CopyBlock) -> None: ...
    def inner_fence(self, peer: RankId, epoch: int) -> None: ...
    def emit(self, event: TransportEvent) -> None: ...
    def writer_gone(self, path: StagedWriter) -> bool: ...
    def now(self) -> float: ...


class StagedWriter:
    """The path to the reader `peer`, whose slots have `slot_bytes` each, and whose memory `target_bytes`.
    `say` sends a message, with whether its answer is owed; `answered` says that one came; `close` ends the
    stream."""

    def __init__(
        self,
        host: WriterHost,
        peer: RankId,
        target_bytes: int,
        slot_bytes: int,
        say: Callable[[msgspec.Struct, bool], None],
        answered: Callable[[], None],
        close: Callable[[], None],
        gone: threading.Event,
    ) -> None:
        self.peer = peer
        self.target_bytes = target_bytes
        self.error: SegueError | None = None
        #: set after the end, once nothing reads our memory
        self.gone = gone
        #: the inner transport has no path to the peer any more
        self.inner_gone = False
        self.pieces: dict[int, OutPiece] = {}
        self._host = host
        self._piece_bytes = min(slot_bytes, host.slot_bytes)
        self._say = say
        self._answered = answered
        self._close = close
        self._queue: deque[tuple[Write, PackedPiece]] = deque()
        self._fences: dict[int, int] = {}
        #: ended with pieces of which nobody knows whether they were copied
        self._unknown: set[int] = set()
        self._told = False

    # ---- what is asked ---------------------------------------------------------------------------

    def write(self, write: Write, blocks: Sequence[CopyBlock]) -> None:
        """Queue a write whose blocks lie inside both memories."""
        if self.error is not None:
            self._end_write(write, self.error)
            return
        if len(self._queue) >= self._host.max_waiting:
            self._end_write(write, OutOfCapacity(f"too many writes to {self.peer} are waiting"))
            return
        packed = list(pack(blocks, self._piece_bytes))
        write.parts = len(packed)
        if not packed:
            self._host.emit(write.end(self.peer, self._host.now()))
        self._queue.extend((write, piece) for piece in packed)
        self._pump()

    def fence(self, epoch: int) -> None:
        """Fail what has not begun; say `Fenced` when nothing of the epoch is under way."""
        self._drop(epoch, fenced(epoch))
        self._fences[epoch] = self._fences.get(epoch, 0) + 1
        self._settle(epoch)

    def end(self, error: SegueError) -> None:
        """The stream has ended, or the path is not wanted. Idempotent."""
        if self.error is not None:
            return
        self.error = error
        self._close()
        for write in dict.fromkeys(write for write, _ in self._queue):
            write.parts = sum(piece.write is write for piece in self.pieces.values()) + 1
            self._end_part(write, error)
        self._queue.clear()
        for number in list(self.pieces):
            self._kill(number, error)
        self._perhaps_gone()

    def _drop(self, epoch: int, error: SegueError, *, refused: bool = False) -> None:
        writes = dict.fromkeys(write for write, _ in self._queue if write.epoch == epoch)
        self._queue = deque(item for item in self._queue if item[0].epoch != epoch)
        numbers = [number for number, piece in self.pieces.items() if piece.write.epoch == epoch]
        for write in writes:
            write.parts = sum(piece.write is write for piece in self.pieces.values()) + 1
            self._end_part(write, error, refused=refused)
        for number in numbers:
            self._kill(number, error, refused=refused)

    def _kill(self, number: int, error: SegueError, *, refused: bool = False) -> None:
        """A piece is not wanted any more. A running copy ends first."""
        piece = self.pieces[number]
        write = piece.write
        if write.error is None:
            write.error, write.refused = error, refused
        if piece.dead and piece.state is not _S.FILLED:
            return
        piece.dead = True
        if piece.state in (_S.WANTED, _S.GRANTED):
            self._give_up(number)
        elif piece.state is _S.WRITING:
            self._host.inner_fence(self.peer, piece.inner_epoch)
        elif piece.state is _S.FILLED and self.error is not None:
            self._unknown.add(write.epoch)
            self._over(number)

    def _give_up(self, number: int) -> None:
        if self.error is None:
            self._say(wire.GivenUp(number), False)
        self._over(number)

    # ---- what the reader says ----------------------------------------------------------------------

    def told(self, message: wire.StagedMessage) -> None:
        """A message of the reader; raises TransferFailed for one that is not its turn."""
        match message:
            case wire.SlotGranted(number, inner_epoch, offset):
                piece = self.pieces.get(number)
                if piece is None:
                    return  # given up meanwhile, which it will hear
                if piece.state is not _S.WANTED or not 0 < inner_epoch < 2**64:
                    raise TransferFailed(f"{self.peer} grants a slot that nobody waits for")
                piece.state, piece.inner_epoch, piece.offset = _S.GRANTED, inner_epoch, offset
                self._host.out_slots.take(self, partial(self._got, number))
            case wire.PieceCopied(number) if number in self.pieces and self.pieces[number].state is _S.FILLED:
                self._answered()
                self._over(number)
            case wire.PieceRefused(number):
                piece = self.pieces.get(number)
                if piece is None:
                    return
                if piece.state is _S.FILLED:
                    self._answered()
                    self._fail(piece, not_granted(self.peer, piece.write.epoch), refused=True)
                    self._over(number)
                else:
                    self._kill(number, not_granted(self.peer, piece.write.epoch), refused=True)
            case _:
                raise TransferFailed(f"{self.peer} says {type(message).__name__}, which is not its turn")

    @staticmethod
    def _fail(piece: OutPiece, error: SegueError, *, refused: bool = False) -> None:
        if piece.write.error is None:
            piece.write.error, piece.write.refused = error, refused

    # ---- a piece on its way ------------------------------------------------------------------------

    def _pump(self) -> None:
        while self._queue and len(self.pieces) < WINDOW and self.error is None:
            write, packed = self._queue.popleft()
            number = self._host.number()
            self.pieces[number] = OutPiece(write, packed)
            self._say(wire.Want(number, write.epoch, packed.nbytes), False)

    def _got(self, number: int, slot: int) -> bool:
        """A slot of ours."""
        piece = self.pieces.get(number)
        if piece is None or piece.dead:
            return False
        piece.state, piece.slot = _S.COPYING, slot
        self._host.copy_out(piece.packed, slot, partial(self._copied_out, number))
        return True

    def _copied_out(self, number: int, error: SegueError | None) -> None:
        piece = self.pieces[number]
        if error is not None:
            self._fail(piece, error)
        if piece.dead or error is not None:
            self._host.out_slots.give(piece.slot)
            self._give_up(number)
            return
        piece.state = _S.WRITING
        block = CopyBlock(piece.slot, piece.offset, 1, piece.packed.nbytes)
        self._host.inner_write(self.peer, piece.inner_epoch, number, block)

    def moved(self, number: int, event: Written | WriteFailed) -> None:
        """The inner transport has ended its write of a piece."""
        piece = self.pieces[number]
        self._host.out_slots.give(piece.slot)
        if isinstance(event, WriteFailed):
            self._fail(piece, event.error, refused=event.refused)
            self._give_up(number)
            if not piece.dead and not event.refused:
                self.end(event.error)
        elif piece.dead:
            self._give_up(number)
        else:
            piece.state = _S.FILLED
            self._say(wire.Filled(number, piece.packed.into), True)

    # ---- books ---------------------------------------------------------------------------------------

    def _over(self, number: int) -> None:
        """A piece has ended."""
        piece = self.pieces.pop(number)
        self._end_part(piece.write, piece.write.error, refused=piece.write.refused)
        self._pump()
        self._perhaps_gone()

    def _end_part(self, write: Write, error: SegueError | None, *, refused: bool = False) -> None:
        write.parts -= 1
        if error is not None and write.error is None:
            write.error, write.refused = error, refused
        if not write.parts:
            self._host.emit(write.end(self.peer, self._host.now()))
        self._settle(write.epoch)

    def _end_write(self, write: Write, error: SegueError) -> None:
        write.error = error
        self._host.emit(write.end(self.peer, self._host.now()))

    def _settle(self, epoch: int) -> None:
        """Answer the fences of an epoch of which nothing is under way."""
        if epoch in self._fences and not any(p.write.epoch == epoch for p in self.pieces.values()):
            for _ in range(self._fences.pop(epoch)):
                self._host.emit(Fenced(self.peer, epoch, epoch not in self._unknown))

    def _perhaps_gone(self) -> None:
        """After the end: told once nothing reads our memory."""
        if self.error is not None and not self.pieces and not self._told:
            self._told = True
            for epoch in list(self._fences):
                self._settle(epoch)
            if self._host.writer_gone(self):
                self._host.emit(PeerGone(self.peer, False, self.error))
            self.gone.set()
