"""Targets at the control stream of a staged path: both of its ends, and slots that must be free after it."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
from fuzz_changes import SEPARATOR, Target, changed_msgpack

from areas import whole
from ranks import rank
from segue.kv.errors import DECODE_ERRORS, PeerLost, SegueError, TransferFailed
from segue.kv.ids import RankId
from segue.kv.layout.blocks import CopyBlock
from segue.kv.transport.base import Fenced, TransportEvent, WriteFailed, Written
from segue.kv.transport.epochs import Grants
from segue.kv.transport.library.library_wire import ControlFrames, frame
from segue.kv.transport.memory.pool_memory import Memory, host_region
from segue.kv.transport.staged import staged_wire as wire
from segue.kv.transport.staged.staged_copies import Copies, PackedPiece
from segue.kv.transport.staged.staged_in import MAX_PIECES, InPiece, StagedReader
from segue.kv.transport.staged.staged_out import WINDOW, StagedWriter
from segue.kv.transport.staged.staged_slots import Slots
from segue.kv.transport.staged.staged_transport import StagedTransport
from segue.kv.transport.write_book import Write

SLOT_BYTES, SLOTS = 64, 4
GRANTED = 1024
PEER = rank("b")
OVER = PeerLost("the stream has ended")


class _Side:
    """Slots, and what is under way: at most one copy, write or fence of the inner transport is unanswered."""

    def __init__(self) -> None:
        self.in_slots = self.out_slots = Slots(0, SLOT_BYTES, SLOTS)
        self.slot_bytes, self.max_waiting = SLOT_BYTES, 64
        self.said: list[msgspec.Struct] = []
        self.owed = 0
        self.events: list[TransportEvent] = []
        self.later: list[Callable[[], None]] = []

    def send(self, message: msgspec.Struct, *, owes: bool = False) -> None:
        frame(message)
        self.said.append(message)
        self.owed += owes

    def answered(self) -> None:
        self.owed -= 1
        assert self.owed >= 0, "more answers than were owed"

    def close(self) -> None: ...

    def emit(self, event: TransportEvent) -> None:
        self.events.append(event)

    def hears(self, data: bytes, told: Callable[[Any], None]) -> None:
        """Each message behind a right length, for past that begins the interesting."""
        frames = ControlFrames(wire.StagedMessage)
        for body in data.split(SEPARATOR)[:24]:
            for message in frames.feed(len(body).to_bytes(4, "little") + body):
                told(message)
                assert self.in_slots.held <= SLOTS
            if len(self.later) > 1:
                self.later.pop(0)()

    def settle(self) -> None:
        while self.later:
            self.later.pop(0)()


class _Reading(_Side):
    """The reader's transport, with production's check and copies."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = np.zeros(4 * GRANTED, np.uint8)
        memory = Memory([host_region(self.memory)])
        slots = np.full(SLOTS * SLOT_BYTES, 7, np.uint8)
        self._copies = Copies(memory, Memory([host_region(slots)]))
        self.grants = Grants()
        self.grants.add(PEER, 7, whole(GRANTED))
        self._paths, self._lock = SimpleNamespace(memory=memory), threading.Lock()
        self._area: dict[Any, Any] = {}
        self._inner: dict[int, tuple[StagedReader, InPiece]] = {}
        self.gone = Counter[str]()

    def inner_grant(self, peer: RankId, offset: int, nbytes: int, path: StagedReader, piece: InPiece) -> int:
        assert nbytes <= SLOT_BYTES
        epoch = 1000 + len(self.said)
        self._inner[epoch] = (path, piece)
        return epoch

    def inner_fence(self, peer: RankId, epoch: int) -> None:
        if epoch in self._inner:
            path, piece = self._inner[epoch]
            self.later.append(lambda: path.fenced(piece, False))

    def inner_forget(self, epoch: int) -> None:
        del self._inner[epoch]

    def check(self, peer: RankId, epoch: int, blocks: list[CopyBlock], nbytes: int) -> None:
        StagedTransport.check(self, peer, epoch, blocks, nbytes)  # type: ignore[arg-type]

    def copy_in(self, blocks: list[CopyBlock], slot: int, ended: Callable[[SegueError | None], None]) -> None:
        self._copies.into(blocks, slot)
        self.later.append(lambda: ended(None))

    def forget_reader(self, path: StagedReader) -> None:
        self.gone["forgotten"] += 1

    def reader_gone(self, peer: RankId) -> bool:
        self.gone["gone"] += 1
        return True


def _kind(error: TransferFailed) -> str:
    return "unreadable" if "unreadable" in str(error) else str(error)[-20:]


def _reader(data: bytes) -> str:
    host = _Reading()
    path = StagedReader(host, PEER)
    path.stream = host  # type: ignore[assignment]
    told = "all of it"

    def hears(message: Any) -> None:
        path.told(message)
        assert len(path.pieces) <= MAX_PIECES

    try:
        host.hears(data, hears)
    except TransferFailed as error:
        told = _kind(error)
    answered: list[bool] = []
    path.fence(7, lambda: answered.append(True))
    path.end(OVER)
    path.replaced()
    host.settle()
    assert answered == [True]
    assert not path.pieces
    assert host.in_slots.held == 0, "a slot is lost"
    assert host.owed == 0, "a stream whose peer owes nothing would end by its silence"
    assert host.gone["gone"] == 1
    assert not host.memory[GRANTED:].any(), "bytes outside what was granted"
    said = Counter(type(message).__name__ for message in host.said)
    return f"{told}: {'+'.join(sorted(said))}"


class _Writing(_Side):
    """The writer's transport."""

    def __init__(self) -> None:
        super().__init__()
        self.writer: StagedWriter
        self._numbers = 0

    def number(self) -> int:
        self._numbers += 1
        return self._numbers

    def now(self) -> float:
        return 0.0

    def copy_out(self, packed: PackedPiece, slot: int, ended: Callable[[SegueError | None], None]) -> None:
        assert packed.nbytes <= SLOT_BYTES
        self.later.append(lambda: ended(None))

    def inner_write(self, peer: RankId, epoch: int, tag: int, block: CopyBlock) -> None:
        self.later.append(lambda: self.writer.moved(tag, Written(peer, epoch, tag, block.nbytes, 0.0)))

    def inner_fence(self, peer: RankId, epoch: int) -> None: ...

    def writer_gone(self, path: StagedWriter) -> bool:
        return True


def _writer(data: bytes) -> str:
    host = _Writing()
    path = host.writer = StagedWriter(host, PEER, 4 * GRANTED, SLOT_BYTES, threading.Event())
    path.stream = host  # type: ignore[assignment]
    for tag in range(3):
        blocks: Sequence[CopyBlock] = [CopyBlock(0, 256 * tag, 1, 256)]
        path.write(Write(7 + tag % 2, tag, 256, 0.0), blocks)
    told = "all of it"

    def hears(message: Any) -> None:
        path.told(message)
        assert len(path.pieces) <= WINDOW

    try:
        host.hears(data, hears)
    except TransferFailed as error:
        told = _kind(error)
    path.fence(7)
    path.end(OVER)
    host.settle()
    assert not path.pieces
    assert host.out_slots.held == 0, "a slot is lost"
    assert path.gone.is_set()
    ends = [event for event in host.events if isinstance(event, Written | WriteFailed)]
    assert sorted(event.tag for event in ends) == [0, 1, 2], "each write ends once"
    assert sum(isinstance(event, Fenced) for event in host.events) == 1
    written = sum(isinstance(event, Written) for event in ends)
    return f"{told}: {written} written"


def _single(data: bytes) -> str:
    try:
        return type(msgspec.msgpack.decode(data, type=wire.StagedMessage)).__name__
    except DECODE_ERRORS as error:
        raise TransferFailed(str(error)[:40]) from error


def _joined(*messages: msgspec.Struct) -> bytes:
    return SEPARATOR.join(map(msgspec.msgpack.encode, messages))


def _reader_seeds() -> list[bytes]:
    block = CopyBlock(0, 100, 2, 8, 8, 16)
    return [
        _joined(wire.Want(1, 7, 16), wire.Filled(1, [block]), wire.Want(2, 7, 64), wire.GivenUp(2)),
        _joined(*(wire.Want(n, 7, 16) for n in range(6)), wire.Filled(0, [block]), wire.GivenUp(5)),
        _joined(wire.Want(1, 7, 16), wire.Filled(1, [CopyBlock(0, GRANTED - 8, 2, 8)])),
        _joined(wire.Want(1, 7, 16), wire.Filled(1, [CopyBlock(56, 0, 2, 8)])),
        _joined(wire.Want(1, 8, 16), wire.Want(1, 7, 2**30), wire.GivenUp(9)),
        _joined(wire.PieceCopied(1)),
    ]


def _writer_seeds() -> list[bytes]:
    granted = [wire.SlotGranted(n, 50 + n, 64 * n) for n in range(1, 9)]
    copied = [wire.PieceCopied(n) for n in range(1, 9)]
    return [
        _joined(*granted, *granted[:0], *(wire.PieceRefused(99) for _ in range(6)), *copied),
        _joined(granted[0], wire.PieceRefused(1), wire.PieceRefused(2), granted[3], granted[3]),
        _joined(granted[0], wire.PieceCopied(1)),
        _joined(wire.SlotGranted(1, 0, 0)),
        _joined(wire.Want(1, 7, 5)),
    ]


def _message_seeds() -> list[bytes]:
    return [message for seed in (*_reader_seeds(), *_writer_seeds()) for message in seed.split(SEPARATOR)]


TARGETS = [
    Target("staged_message", _message_seeds, _single, changed_msgpack),
    Target("staged_reader", _reader_seeds, _reader, changed_msgpack),
    Target("staged_writer", _writer_seeds, _writer, changed_msgpack),
]
