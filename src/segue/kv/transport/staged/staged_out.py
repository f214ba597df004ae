"""The writing end of a staged path. Everything here runs on the loop's thread.

A piece of a write asks the reader for a slot first, and only then takes a slot of our own. It holds that one
for a copy and a write of the inner transport, which end by themselves: no full pool waits for another one.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from segue.kv.errors import SegueError, TransferFailed
from segue.kv.ids import RankId
from segue.kv.layout.blocks import CopyBlock
from segue.kv.transport.base import PeerGone, TransportEvent, WriteFailed, Written
from segue.kv.transport.library.library_wire import ControlStream
from segue.kv.transport.staged import staged_wire as wire
from segue.kv.transport.staged.staged_copies import CopyMayRun, PackedPiece, pack
from segue.kv.transport.staged.staged_slots import Slots
from segue.kv.transport.write_book import Write, WriteBook, fenced, not_granted

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
    """The path to the reader `peer`, whose slots have `slot_bytes` each, and whose memory `target_bytes`."""

    #: Set before anything else is asked.
    stream: ControlStream

    def __init__(
        self,
        host: WriterHost,
        peer: RankId,
        target_bytes: int,
        slot_bytes: int,
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
        self._book: WriteBook[PackedPiece] = WriteBook(peer, host.emit, host.now, host.max_waiting)
        self._told = False

    # ---- what is asked ---------------------------------------------------------------------------

    def write(self, write: Write, blocks: Sequence[CopyBlock]) -> None:
        """Queue a write whose blocks lie inside both memories."""
        if self.error is not None:
            self._book.fail(write, self.error)
            return
        self._book.add(write, pack(blocks, self._piece_bytes))
        self._pump()

    def fence(self, epoch: int) -> None:
        """Fail what has not begun; say `Fenced` when nothing of the epoch is under way."""
        self._book.drop(fenced(epoch), epoch)  # so that no end of a piece begins one of them
        self._kill_all(fenced(epoch), epoch)
        self._book.fence(epoch)

    def end(self, error: SegueError) -> None:
        """The stream has ended, or the path is not wanted. Idempotent."""
        if self.error is not None:
            return
        self.error = error
        self.stream.close()
        self._book.drop(error)
        self._kill_all(error)
        self._perhaps_gone()

    def _kill_all(self, error: SegueError, epoch: int | None = None) -> None:
        """No piece (of `epoch`) is wanted any more."""
        for number, piece in list(self.pieces.items()):
            if epoch in (None, piece.write.epoch):
                self._kill(number, error)

    def _kill(self, number: int, error: SegueError, *, refused: bool = False) -> None:
        """A piece is not wanted any more. A running copy ends first."""
        piece = self.pieces[number]
        piece.write.fail(error, refused=refused)
        if piece.dead and piece.state is not _S.FILLED:
            return
        piece.dead = True
        if piece.state in (_S.WANTED, _S.GRANTED):
            self._give_up(number)
        elif piece.state is _S.WRITING:
            self._host.inner_fence(self.peer, piece.inner_epoch)
        elif piece.state is _S.FILLED and self.error is not None:
            self._book.unproven.add(piece.write.epoch)
            self._over(number)

    def _give_up(self, number: int) -> None:
        if self.error is None:
            self.stream.send(wire.GivenUp(number))
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
                self.stream.answered()
                self._over(number)
            case wire.PieceRefused(number):
                piece = self.pieces.get(number)
                if piece is None:
                    return
                if piece.state is _S.FILLED:
                    self.stream.answered()
                    piece.write.fail(not_granted(self.peer, piece.write.epoch), refused=True)
                    self._over(number)
                else:
                    self._kill(number, not_granted(self.peer, piece.write.epoch), refused=True)
            case _:
                raise TransferFailed(f"{self.peer} says {type(message).__name__}, which is not its turn")

    # ---- a piece on its way ------------------------------------------------------------------------

    def _pump(self) -> None:
        while self._book.waiting and len(self.pieces) < WINDOW and self.error is None:
            write, packed = self._book.begin()
            number = self._host.number()
            self.pieces[number] = OutPiece(write, packed)
            self.stream.send(wire.Want(number, write.epoch, packed.nbytes))

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
        piece.write.fail(error)
        if piece.dead or error is not None:
            if isinstance(error, CopyMayRun):
                self._book.still_read.add(piece.write.epoch)
            else:
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
            piece.write.fail(event.error, refused=event.refused)
            self._give_up(number)
            if not piece.dead and not event.refused:
                self.end(event.error)
        elif piece.dead:
            self._give_up(number)
        else:
            piece.state = _S.FILLED
            self.stream.send(wire.Filled(number, piece.packed.into), owes=True)

    # ---- books ---------------------------------------------------------------------------------------

    def _over(self, number: int) -> None:
        """A piece has ended."""
        piece = self.pieces.pop(number)
        self._book.over(piece.write)
        self._pump()
        self._perhaps_gone()

    def _perhaps_gone(self) -> None:
        """After the end: told once nothing reads our memory."""
        if self.error is not None and not self.pieces and not self._book.still_read and not self._told:
            self._told = True
            if self._host.writer_gone(self):
                self._host.emit(PeerGone(self.peer, False, self.error))
            self.gone.set()
