"""The reading end of a staged path. Everything here runs on the loop's thread.

The writer reaches our slots alone; we ourselves copy from them into the rank's memory. So whatever the inner
transport proves, an epoch that was fenced is written no more once its last copy has ended. Slots are another
matter. One whose piece was not filled is free when the inner transport proves that nothing is written there,
or when the writer has said so and our own end has answered the fence. A writer that connects anew has said so
of all that came before.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from segue.kv.errors import PeerLost, SegueError, TransferFailed
from segue.kv.ids import RankId
from segue.kv.layout.blocks import CopyBlock
from segue.kv.transport.base import PeerGone, TransportEvent
from segue.kv.transport.epochs import Grants
from segue.kv.transport.library.library_wire import ControlStream
from segue.kv.transport.staged import staged_wire as wire
from segue.kv.transport.staged.staged_copies import CopyMayRun
from segue.kv.transport.staged.staged_slots import Slots

#: Slots that one writer may ask for at once; an honest one asks for a few.
MAX_PIECES = 64


class LeaseState(enum.Enum):
    """How far a slot is for a piece. `QUARANTINED`: nobody wants the piece, and it may still be written."""

    WAITING = "no slot is free"
    HELD = "the writer may write into the slot"
    COPYING = "it is copied into the memory"
    QUARANTINED = "the writer may still write into the slot"


_S = LeaseState


@dataclass(slots=True, eq=False)
class InPiece:
    """A piece that a writer asks a slot for, until that is free again. `fenced`: our end of the inner
    transport writes no more there; `settled`: nor does the writer. `owed`: the writer was told that the piece
    is refused, and has to say that it writes there no more."""

    number: int
    epoch: int
    nbytes: int
    state: LeaseState = _S.WAITING
    slot: int = 0
    inner_epoch: int = 0
    fenced: bool = False
    settled: bool = False
    owed: bool = False


class ReaderHost(Protocol):
    """The transport, as a path asks it."""

    in_slots: Slots
    slot_bytes: int
    grants: Grants

    def inner_grant(
        self, peer: RankId, offset: int, nbytes: int, path: StagedReader, piece: InPiece
    ) -> int: ...
    def inner_fence(self, peer: RankId, epoch: int) -> None: ...
    def inner_forget(self, epoch: int) -> None: ...
    def check(self, peer: RankId, epoch: int, blocks: list[CopyBlock], nbytes: int) -> None: ...
    def copy_in(
        self, blocks: list[CopyBlock], slot: int, ended: Callable[[SegueError | None], None]
    ) -> None: ...
    def emit(self, event: TransportEvent) -> None: ...
    def forget_reader(self, path: StagedReader) -> None: ...
    def reader_gone(self, peer: RankId) -> bool: ...


class StagedReader:
    """One writer's path."""

    #: Set before anything else is asked.
    stream: ControlStream

    def __init__(self, host: ReaderHost, peer: RankId) -> None:
        self.peer = peer
        self.over: SegueError | None = None
        self.pieces: dict[int, InPiece] = {}
        self._host = host
        self._fences: dict[int, list[Callable[[], None]]] = {}
        self._told = False

    def told(self, message: wire.StagedMessage) -> None:
        """A message of the writer; raises TransferFailed for one that is not its turn."""
        match message:
            case wire.Want(number, epoch, nbytes) if number not in self.pieces:
                if nbytes > self._host.slot_bytes:
                    raise TransferFailed(f"{self.peer} wants a slot of {nbytes} bytes")
                if (self.peer, epoch) not in self._host.grants:
                    self.stream.send(wire.PieceRefused(number))
                    return
                if len(self.pieces) >= MAX_PIECES:
                    raise TransferFailed(f"{self.peer} wants more than {MAX_PIECES} slots at once")
                piece = self.pieces[number] = InPiece(number, epoch, nbytes)
                self._host.in_slots.take(self, partial(self._got, piece))
            case wire.Filled(number, blocks):
                self._filled(number, blocks)
            case wire.GivenUp(number):
                given_up = self.pieces.get(number)
                if given_up is not None and given_up.state is not _S.COPYING:
                    self._heard(given_up)
                    self._quarantine(given_up)
                    self._settled(given_up)
            case _:
                raise TransferFailed(f"{self.peer} says {type(message).__name__}, which is not its turn")

    def fence(self, epoch: int, done: Callable[[], None]) -> None:
        """Copy nothing of the epoch any more; `done` is called when nothing is being copied."""
        for piece in [piece for piece in self.pieces.values() if piece.epoch == epoch]:
            self._refuse(piece)
        self._fences.setdefault(epoch, []).append(done)
        self._settle(epoch)

    def end(self, error: SegueError) -> None:
        """The stream has ended, or the path is not wanted. Idempotent."""
        if self.over is not None:
            return
        self.over = error
        self.stream.close()
        for piece in list(self.pieces.values()):
            self._refuse(piece)
        self._perhaps_gone()

    def replaced(self) -> None:
        """After the end: the writer has a new path, so all it wrote by this one has ended."""
        for piece in list(self.pieces.values()):
            self._settled(piece)

    def fenced(self, piece: InPiece, proven: bool) -> None:
        """The inner transport has answered: our end writes nothing into the slot of this piece any more, nor,
        if that is `proven`, does the writer."""
        piece.fenced = True
        piece.settled = piece.settled or proven
        self._perhaps_free(piece)

    # ---- inside --------------------------------------------------------------------------------------

    def _got(self, piece: InPiece, slot: int) -> bool:
        if self.pieces.get(piece.number) is not piece or piece.state is not _S.WAITING:
            return False
        piece.state, piece.slot = _S.HELD, slot
        piece.inner_epoch = self._host.inner_grant(self.peer, slot, piece.nbytes, self, piece)
        self.stream.send(wire.SlotGranted(piece.number, piece.inner_epoch, slot))
        return True

    def _filled(self, number: int, blocks: list[CopyBlock]) -> None:
        piece = self.pieces.get(number)
        if piece is None:  # refused, and its slot was free by a proof
            self.stream.send(wire.PieceRefused(number))
            return
        if piece.state is _S.COPYING or piece.state is _S.WAITING:
            raise TransferFailed(f"{self.peer} has filled a slot that it does not have")
        if piece.state is _S.QUARANTINED:  # it hears, or has heard, that it was refused
            self._free(piece)
            return
        if (self.peer, piece.epoch) not in self._host.grants:  # a fence has ended it, and comes here soon
            self.stream.send(wire.PieceRefused(number))
            self._free(piece)
            return
        try:
            self._host.check(self.peer, piece.epoch, blocks, piece.nbytes)
        except SegueError:
            piece.state = _S.QUARANTINED
            self._free(piece)
            raise
        piece.state = _S.COPYING
        self._host.copy_in(blocks, piece.slot, partial(self._copied, piece))

    def _copied(self, piece: InPiece, error: SegueError | None) -> None:
        if isinstance(error, CopyMayRun):  # the piece stays `COPYING`, with its slot and its fence
            self.end(error)
            return
        self._free(piece)
        if error is not None:
            self.end(error)
        elif self.over is None:
            self.stream.send(wire.PieceCopied(piece.number))
        self._settle(piece.epoch)
        self._perhaps_gone()

    def _refuse(self, piece: InPiece) -> None:
        if piece.state is _S.COPYING:
            return
        if piece.state is _S.QUARANTINED:
            if self.over is not None:  # the inner transport may have a proof by now, or soon
                self._host.inner_fence(self.peer, piece.inner_epoch)
            return
        if self.over is None:
            piece.owed = piece.state is _S.HELD
            self.stream.send(wire.PieceRefused(piece.number), owes=piece.owed)
        self._quarantine(piece)

    def _quarantine(self, piece: InPiece) -> None:
        if piece.state is _S.WAITING:
            del self.pieces[piece.number]
        elif piece.state is _S.HELD:
            piece.state = _S.QUARANTINED
            self._host.inner_fence(self.peer, piece.inner_epoch)

    def _heard(self, piece: InPiece) -> None:
        if piece.owed:
            piece.owed = piece.state is _S.HELD
            self.stream.answered()

    def _settled(self, piece: InPiece) -> None:
        piece.settled = True
        self._perhaps_free(piece)

    def _perhaps_free(self, piece: InPiece) -> None:
        if piece.state is _S.QUARANTINED and piece.fenced and piece.settled:
            self._free(piece)

    def _free(self, piece: InPiece) -> None:
        if self.pieces.pop(piece.number, None) is None:
            return
        self._heard(piece)
        if piece.state is not _S.WAITING:
            self._host.inner_forget(piece.inner_epoch)
            self._host.inner_fence(self.peer, piece.inner_epoch)  # ends the grant
            self._host.in_slots.give(piece.slot)
        self._perhaps_gone()

    def _settle(self, epoch: int) -> None:
        copying = any(p.epoch == epoch and p.state is _S.COPYING for p in self.pieces.values())
        if epoch in self._fences and not copying:
            for done in self._fences.pop(epoch):
                done()

    def _perhaps_gone(self) -> None:
        """After the end: told once nothing is being copied."""
        copying = any(piece.state is _S.COPYING for piece in self.pieces.values())
        if self.over is None or copying:
            return
        if not self.pieces:
            self._host.forget_reader(self)
        if self._told:
            return
        self._told = True
        for epoch in list(self._fences):
            self._settle(epoch)
        if self._host.reader_gone(self.peer):
            self._host.emit(PeerGone(self.peer, True, PeerLost(str(self.over), peer=str(self.peer))))
