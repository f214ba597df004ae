"""Staging: slots as credits, hand-offs of memory that no transport takes, and what a bad peer can do."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec
import numpy as np
import pytest
import torch

from areas import whole
from ports import HeldPort
from ranks import rank
from segue.kv.config import KVConfig
from segue.kv.errors import (
    BootstrapTimeout,
    ConfigError,
    ErrorCode,
    OutOfCapacity,
    PeerRefused,
    SegueError,
    TransferFailed,
)
from segue.kv.handles import Change
from segue.kv.ids import ChecksumKind, KVPoll, RankId, Role, RoomKey, Span, new_room
from segue.kv.layout.blocks import CopyBlock
from segue.kv.layout.spec import KVShape, PoolSpec
from segue.kv.limits import Limits
from segue.kv.manager import KVManager
from segue.kv.transport.base import Endpoint, Fenced, PeerGone, TransportEvent, WriteFailed, Written
from segue.kv.transport.epochs import Grants
from segue.kv.transport.kinds import KINDS
from segue.kv.transport.memory.pool_memory import Memory, Region, allocate, host_region
from segue.kv.transport.options import TransportOptions
from segue.kv.transport.staged import staged_transport
from segue.kv.transport.staged import staged_wire as wire
from segue.kv.transport.staged.staged_copies import Copies, CopyThreads, PackedPiece, pack
from segue.kv.transport.staged.staged_in import MAX_PIECES, InPiece, StagedReader
from segue.kv.transport.staged.staged_out import WINDOW, StagedWriter
from segue.kv.transport.staged.staged_slots import Slots
from segue.kv.transport.staged.staged_transport import StagedHost, StagedTransport, StagedTuning
from segue.kv.transport.write_book import Write

PATIENCE_S = 60.0
NAMES = ["staged_tcp", "staged_shm"]
MiB = 2**20


class End:
    """One staged transport over memory of the host that nobody else may look at."""

    def __init__(
        self, name: str, me: RankId, nbytes: int, staging_bytes: int = 64 * 1024, slots: int = 8
    ) -> None:
        self.me = me
        self.events: queue.Queue[TransportEvent] = queue.Queue()
        self.array = np.zeros(nbytes, np.uint8)
        self.memory = Memory([host_region(self.array)])
        options = TransportOptions(me=me, staging_bytes=staging_bytes)
        kind = KINDS.kind(name)
        assert issubclass(kind, StagedTransport)
        self.transport = kind(self.events.put, options, StagedTuning(slots=slots))
        self.endpoint = self.transport.register(self.memory)

    def connect(self, other: End) -> None:
        self.transport.connect(other.me, other.endpoint, PATIENCE_S)

    def wait(self, count: int) -> list[TransportEvent]:
        return [self.events.get(timeout=PATIENCE_S) for _ in range(count)]


@contextmanager
def ends(name: str, count: int, nbytes: int, **options: int) -> Iterator[list[End]]:
    made = [End(name, rank(letter * 4), nbytes, **options) for letter in "abcdef"[:count]]
    try:
        yield made
    finally:
        for end in made:
            end.transport.close()


@contextmanager
def linked(name: str = "staged_tcp") -> Iterator[tuple[End, End]]:
    """A writer and a reader that it is connected to, which grants it epoch 3."""
    with ends(name, 2, MiB) as (writer, reader):
        writer.connect(reader)
        reader.transport.grant(writer.me, 3, whole(MiB))
        yield writer, reader


def drain(*of: End) -> None:
    """What was posted to their loops has run."""
    for end in of:
        turned = threading.Event()
        end.transport._loop.post(turned.set)
        assert turned.wait(PATIENCE_S)


@contextmanager
def held_copies(end: End, way: str = "out") -> Iterator[tuple[threading.Event, threading.Event]]:
    """Copies out of the memory of `end` (or `into` it) begin, and wait for the second event."""
    copies = end.transport._copies
    copy, began, goes_on = getattr(copies, way), threading.Event(), threading.Event()

    def slow(blocks: list[CopyBlock], slot: int) -> None:
        began.set()
        assert goes_on.wait(PATIENCE_S)
        copy(blocks, slot)

    setattr(copies, way, slow)
    try:
        yield began, goes_on
    finally:
        goes_on.set()
        setattr(copies, way, copy)


def kinds(events: list[TransportEvent]) -> list[type]:
    return [type(event) for event in events]


@pytest.mark.parametrize("slots", [1, 2, 8])
@pytest.mark.parametrize("name", NAMES)
def test_pools_that_are_full_of_one_another_s_pieces_still_move(name: str, slots: int) -> None:
    """Three sides write to both others at once, each many times what all slots hold."""
    nbytes = 256 * 1024
    with ends(name, 3, 4 * nbytes, staging_bytes=2 * slots * 4096, slots=slots) as made:
        for n, end in enumerate(made):
            end.array[: 2 * nbytes] = np.random.default_rng(n).integers(0, 256, 2 * nbytes, np.uint8)
            for other in made:
                if other is not end:
                    end.connect(other)
                    other.transport.grant(end.me, 7 + n, whole(4 * nbytes))
        moves = [(n, (n + step) % 3, step - 1) for n in range(3) for step in (1, 2)]
        for n, to, half in moves:
            block = CopyBlock(half * nbytes, (2 + half) * nbytes, 1, nbytes)
            made[n].transport.write(made[to].me, 7 + n, half, [block])
        for end in made:
            assert all(isinstance(event, Written) for event in end.wait(2))
        for n, to, half in moves:
            sent = made[n].array[half * nbytes : (half + 1) * nbytes]
            assert np.array_equal(made[to].array[(2 + half) * nbytes : (3 + half) * nbytes], sent)
        for end in made:
            drain(end)
            assert (end.transport.out_slots.held, end.transport.in_slots.held) == (0, 0)


@pytest.mark.parametrize("name", NAMES)
def test_a_fence_frees_the_slots_of_what_was_under_way(name: str) -> None:
    with ends(name, 2, MiB) as (writer, reader):
        writer.connect(reader)
        for epoch in range(1, 30):
            reader.transport.grant(writer.me, epoch, whole(MiB))
            writer.transport.write(reader.me, epoch, 0, [CopyBlock(0, 0, 1, MiB)])
            side = (reader, writer)[epoch % 2]
            side.transport.fence(writer.me if side is reader else reader.me, epoch)
            if side is reader:
                assert side.wait(1) == [Fenced(writer.me, epoch, True)]
                assert isinstance(writer.wait(1)[0], WriteFailed | Written)
            else:
                ended, fenced = side.wait(2)
                assert isinstance(ended, WriteFailed | Written)
                assert fenced == Fenced(reader.me, epoch, True)
                reader.transport.fence(writer.me, epoch)
                reader.wait(1)
        reader.transport.grant(writer.me, 99, whole(MiB))
        writer.transport.write(reader.me, 99, 0, [CopyBlock(0, 0, 1, MiB)])
        assert isinstance(writer.wait(1)[0], Written), "no slot was lost"


def test_slots_are_given_in_turn_and_no_peer_has_more_than_half() -> None:
    slots = Slots(100, 10, 4)
    got: list[tuple[str, int]] = []

    def take(peer: str, wants: bool = True) -> None:
        def take_it(offset: int) -> bool:
            if wants:
                got.append((peer, offset))
            return wants

        slots.take(peer, take_it)

    for peer in "aaab":
        take(peer)
    assert got == [("a", 100), ("a", 110), ("b", 120)], "the third of a waits, though one is free"
    take("c", wants=False)
    take("c")
    assert got[3:] == [("c", 130)], "what is not wanted any more is given to the next"
    take("b")
    slots.give(110)
    assert got[4:] == [("a", 110)]
    slots.give(100)
    assert got[5:] == [("b", 100)]
    assert slots.held == 4


def test_a_peer_that_had_to_wait_for_its_share_is_next_and_not_last() -> None:
    slots = Slots(0, 10, 2)
    got: list[str] = []
    for name in ("a1", "b1", "a2", "c1", "d1"):
        slots.take(name[0], lambda _, name=name: got.append(name) or True)
    assert got == ["a1", "b1"]
    slots.give(10)
    assert got[2:] == ["c1"]
    slots.give(0)
    assert got[3:] == ["a2"]


def test_pieces_hold_what_a_slot_holds_and_all_of_it() -> None:
    rng = np.random.default_rng(3)
    source, target = rng.integers(0, 256, 4096, np.uint8), np.zeros(4096, np.uint8)
    blocks = [
        CopyBlock(0, 100, 1, 700),
        CopyBlock(800, 1000, 5, 30, 60, 40, 3, 400, 300),
        CopyBlock(3000, 3000, 900, 1),
    ]
    for slot_bytes in (16, 33, 450, 4096):
        target[:] = 0
        slots = allocate(8192)
        packed = list(pack(blocks, slot_bytes))
        assert max(piece.nbytes for piece in packed) <= slot_bytes
        for piece in packed:
            Copies(Memory([host_region(source)]), slots).out(piece.out, 4096)
            Copies(Memory([host_region(target)]), slots).into(piece.into, 4096)
        expected = np.zeros(4096, np.uint8)
        for block in blocks:
            for at, to, nbytes in block.ranges():
                expected[to : to + nbytes] = source[at : at + nbytes]
        assert np.array_equal(target, expected)
        slots.close()


def test_a_block_over_several_regions_is_copied_region_by_region() -> None:
    arrays = [np.random.default_rng(n).integers(0, 256, 4096, np.uint8) for n in range(3)]
    tensors = [torch.from_numpy(array) for array in arrays]
    memory = Memory(
        [
            host_region(arrays[0]),
            *(Region(t.data_ptr(), t.nbytes, "cpu:0", owner=t) for t in tensors[1:]),
        ]
    )
    stride, slots = memory.starts[1], allocate(8192)
    block = CopyBlock(8, 0, 3, 16, stride, 16, 2, 64, 48)
    Copies(memory, slots).out([block], 0)
    expected = b"".join(a[at : at + 16].tobytes() for at in (8, 72) for a in arrays)
    assert bytes(slots.buffer[:96]) == expected
    slots.buffer[:96] = bytes(96)
    back = CopyBlock(0, 8, 3, 16, 16, stride, 2, 48, 64)
    Copies(memory, slots).into([back], 0)
    assert not any(a[at : at + 16].any() for at in (8, 72) for a in arrays)
    slots.close()


@pytest.mark.parametrize(
    "message",
    [
        wire.Filled(5, [CopyBlock(0, 0, 1, 10)]),
        wire.Filled(1, [CopyBlock(0, 4096, 1, 100)]),
        wire.Filled(1, [CopyBlock(0, 0, 1, 99)]),
        wire.Filled(1, [CopyBlock(64, 0, 1, 100)]),
        wire.Filled(1, [CopyBlock(0, 2**40, 1, 100)]),
        wire.Want(2, 3, 2**30),
        wire.PieceCopied(1),
        wire.SlotGranted(1, 1, 0),
    ],
)
def test_a_writer_that_says_what_it_may_not_is_cut_and_writes_nothing(message: msgspec.Struct) -> None:
    with ends("staged_tcp", 2, MiB) as (writer, reader):
        writer.connect(reader)
        reader.array[:] = 9
        reader.transport.grant(writer.me, 3, whole(2048))
        path = writer.transport._writers[0].stream
        told = threading.Event()
        said = path._told
        path._told = lambda _message: told.set()  # the writer is an impostor from now on
        for each in (wire.Want(1, 3, 100), message):
            writer.transport._loop.post(lambda each=each: path.send(each))
            if isinstance(each, wire.Want) and each.number == 1:
                assert told.wait(PATIENCE_S)
        if message == wire.Filled(5, [CopyBlock(0, 0, 1, 10)]):
            path._told = said  # it hears that there is no such piece
        else:
            gone = reader.wait(1)[0]
            assert type(gone).__name__ == "PeerGone"
        assert (reader.array == 9).all()


def test_memory_of_a_device_that_no_tensor_owns_is_refused() -> None:
    transport = KINDS.create("staged_tcp", lambda _: None, TransportOptions(me=rank("aaaa")))
    with pytest.raises(ConfigError, match="no tensor of torch"):
        transport.register(Memory([Region(4096, 64, "cuda:0", owner=object())]))
    transport.close()


def test_staging_stands_for_what_takes_no_device_memory_and_for_nothing_else() -> None:
    tensor = torch.zeros(64, dtype=torch.uint8)
    device = Memory([Region(tensor.data_ptr(), 64, "cpu:0", owner=tensor)])
    host = Memory([host_region(np.zeros(64, np.uint8))])
    assert KINDS.for_memory(["shm", "tcp"], device) == ["staged_shm", "staged_tcp"]
    assert KINDS.for_memory(["mori", "tcp"], device) == ["mori", "tcp"]
    assert KINDS.for_memory(["shm", "tcp"], host) == ["shm", "tcp"]


# ---- the reader's slots ------------------------------------------------------------------------------


class Said:
    """The control stream of a path, with what was said over it and the words that are owed for that."""

    def __init__(self) -> None:
        self.said: list[msgspec.Struct] = []
        self.owed = 0
        self.open = True

    def send(self, message: msgspec.Struct, *, owes: bool = False) -> None:
        self.said.append(message)
        self.owed += owes

    def answered(self) -> None:
        self.owed -= 1

    def close(self) -> None:
        self.open = False


class Reading(Said):
    """The transport of one reading path, with two slots."""

    def __init__(self) -> None:
        super().__init__()
        self.in_slots, self.slot_bytes, self.grants = Slots(0, 64, 4), 64, Grants()
        self.fenced: list[int] = []
        self.copies: list[Callable[[SegueError | None], None]] = []
        self.events: list[object] = []
        self.forgotten: list[int] = []
        self.path = StagedReader(self, WRITER)
        self.path.stream = self
        self.grants.add(WRITER, 7, whole(64))

    def inner_grant(self, peer: RankId, offset: int, nbytes: int, path: StagedReader, piece: InPiece) -> int:
        return 100 + piece.number

    def inner_fence(self, peer: RankId, epoch: int) -> None:
        self.fenced.append(epoch)

    def inner_forget(self, epoch: int) -> None:
        self.forgotten.append(epoch)

    def check(self, peer: RankId, epoch: int, blocks: list[CopyBlock], nbytes: int) -> None: ...

    def copy_in(self, blocks: list[CopyBlock], slot: int, ended: Callable[[SegueError | None], None]) -> None:
        self.copies.append(ended)

    def emit(self, event: TransportEvent) -> None:
        self.events.append(event)

    def forget_reader(self, path: StagedReader) -> None:
        self.events.append(Forgotten())

    def reader_gone(self, peer: RankId) -> bool:
        return True


class Forgotten:
    """`forget_reader` was called."""


WRITER = rank("aaaa")


def test_a_piece_that_arrives_behind_a_fence_is_refused_and_its_path_stays() -> None:
    """The fence has ended the grant on another thread, and not yet come to the loop."""
    host = Reading()
    host.path.told(wire.Want(1, 7, 10))
    host.grants.remove(WRITER, 7)
    host.path.told(wire.Filled(1, [CopyBlock(0, 0, 1, 10)]))
    assert host.said == [wire.SlotGranted(1, 101, 0), wire.PieceRefused(1)]
    assert (host.copies, host.in_slots.held, host.open) == ([], 0, True)
    answered: list[bool] = []
    host.path.fence(7, lambda: answered.append(True))
    assert answered == [True]


@pytest.mark.parametrize("word", [wire.GivenUp(1), None])
def test_a_slot_is_given_on_when_neither_end_writes_there(word: msgspec.Struct | None) -> None:
    """The writer says so of a piece, or by a new path of all that came before; our own end by its fence."""
    host = Reading()
    host.path.told(wire.Want(1, 7, 10))
    (piece,) = host.path.pieces.values()
    if word is None:
        host.path.end(TransferFailed("cut"))
    for step in ("fence", "word") if word is None else ("word", "fence"):
        assert host.in_slots.held == 1, step
        if step == "fence":
            assert host.fenced == [101]
            host.path.fenced(piece, False)
        elif word is None:
            host.path.replaced()
        else:
            host.path.told(word)
    assert (host.in_slots.held, host.forgotten) == (0, [101])
    assert kinds(host.events) == ([PeerGone, Forgotten] if word is None else [])


def test_a_writer_asks_for_a_bounded_number_of_slots() -> None:
    host = Reading()
    for number in range(MAX_PIECES):
        host.path.told(wire.Want(number, 7, 10))
    with pytest.raises(TransferFailed, match="more than 64 slots"):
        host.path.told(wire.Want(MAX_PIECES, 7, 10))
    assert len(host.path.pieces) == MAX_PIECES


class Writing(Said):
    """The transport of one writing path, with four slots."""

    def __init__(self) -> None:
        super().__init__()
        self.out_slots, self.slot_bytes, self.max_waiting = Slots(0, 64, 4), 64, 8
        self.events: list[TransportEvent] = []
        self.copies: list[Callable[[SegueError | None], None]] = []
        self.numbers = iter(range(1, 99))
        self.path = StagedWriter(self, WRITER, 4096, 64, threading.Event())
        self.path.stream = self

    def number(self) -> int:
        return next(self.numbers)

    def now(self) -> float:
        return 0.0

    def copy_out(self, packed: PackedPiece, slot: int, ended: Callable[[SegueError | None], None]) -> None:
        self.copies.append(ended)

    def inner_write(self, peer: RankId, epoch: int, tag: int, block: CopyBlock) -> None: ...

    def inner_fence(self, peer: RankId, epoch: int) -> None: ...

    def emit(self, event: TransportEvent) -> None:
        self.events.append(event)

    def writer_gone(self, path: StagedWriter) -> bool:
        return True


@pytest.mark.parametrize("refused", [True, False])
def test_a_write_that_the_inner_transport_did_not_carry_has_failed_as_that_says(refused: bool) -> None:
    """A refusal leaves the path as it is: the reader does not grant the epoch any more, or the slot's."""
    host = Writing()
    host.path.write(Write(7, 1, 64, 0.0), [CopyBlock(0, 0, 1, 64)])
    host.path.told(wire.SlotGranted(1, 51, 0))
    host.copies[0](None)
    error = TransferFailed("not carried")
    host.path.moved(1, WriteFailed(WRITER, 51, 1, error, refused))
    assert host.events[0] == WriteFailed(WRITER, 7, 1, error, refused)
    assert [type(event) for event in host.events[1:]] == ([] if refused else [PeerGone])
    assert host.out_slots.held == 0


def test_no_piece_of_a_fenced_epoch_asks_for_a_slot_that_another_one_has_given_up() -> None:
    host = Writing()
    host.path.write(Write(7, 1, 2 * WINDOW * 64, 0.0), [CopyBlock(0, 0, 1, 2 * WINDOW * 64)])
    host.path.fence(7)
    assert [type(message) for message in host.said] == [wire.Want] * WINDOW + [wire.GivenUp] * WINDOW
    assert kinds(host.events) == [WriteFailed, Fenced]


@pytest.mark.parametrize("word", [wire.PieceCopied(1), wire.PieceRefused(1)])
def test_a_filled_slot_is_owed_one_word_which_the_reader_says(word: msgspec.Struct) -> None:
    host = Writing()
    host.path.write(Write(7, 1, 64, 0.0), [CopyBlock(0, 0, 1, 64)])
    host.path.told(wire.SlotGranted(1, 51, 0))
    host.copies[0](None)
    host.path.moved(1, Written(WRITER, 51, 1, 64, 0.0))
    assert host.owed == 1
    host.path.told(word)
    [event] = host.events
    assert isinstance(event, Written if isinstance(word, wire.PieceCopied) else WriteFailed)
    assert (host.owed, host.path.pieces) == (0, {})


@pytest.mark.parametrize("filled", [True, False])
def test_a_fence_of_a_path_that_broke_proves_nothing_of_a_piece_that_was_filled(filled: bool) -> None:
    """The reader may still copy it. Nothing is answered before our own copies have ended."""
    host = Writing()
    host.path.write(Write(7, 1, 128, 0.0), [CopyBlock(0, 0, 1, 128)])
    for number in (1, 2):
        host.path.told(wire.SlotGranted(number, 50 + number, 0))
    if filled:
        host.copies[0](None)
        host.path.moved(1, Written(WRITER, 51, 1, 64, 0.0))
        assert isinstance(host.said[-1], wire.Filled)
    host.path.end(TransferFailed("cut"))
    host.path.fence(7)
    assert host.events == []
    for ended in host.copies[filled:]:
        ended(None)
    assert kinds(host.events) == [WriteFailed, Fenced, PeerGone]
    assert host.events[1] == Fenced(WRITER, 7, not filled)
    assert host.out_slots.held == 0


def test_a_proof_of_the_inner_transport_frees_a_slot_without_a_word() -> None:
    host = Reading()
    host.path.told(wire.Want(1, 7, 10))
    (piece,) = host.path.pieces.values()
    host.path.fenced(piece, True)
    assert host.in_slots.held == 1, "nobody has given it up"
    host.path.fence(7, lambda: None)
    assert host.said[-1] == wire.PieceRefused(1)
    host.path.fenced(piece, True)
    assert host.in_slots.held == 0


def test_a_slot_is_free_when_the_inner_transport_has_a_proof_after_the_end_of_the_path() -> None:
    """The writer's process has ended: the inner path may end before the control stream does."""
    host = Reading()
    host.path.told(wire.Want(1, 7, 10))
    (piece,) = host.path.pieces.values()
    host.path.fence(7, lambda: None)
    host.path.fenced(piece, False)
    assert (host.fenced, host.in_slots.held) == ([101], 1)
    host.path.end(TransferFailed("cut"))
    assert host.fenced == [101, 101], "asked again"
    host.path.fenced(piece, True)
    assert host.in_slots.held == 0


@pytest.mark.parametrize("word", [wire.GivenUp(1), wire.Filled(1, [CopyBlock(0, 0, 1, 10)]), None])
def test_a_writer_owes_a_word_for_a_held_slot_that_is_refused_until_the_slot_is_free(
    word: msgspec.Struct | None,
) -> None:
    """Else a path of which only the writer knows the end would keep the slot."""
    host = Reading()
    for number in range(1, 4):  # a path has half of the four slots, so that the third piece waits
        host.path.told(wire.Want(number, 7, 10))
    host.path.told(wire.GivenUp(2))
    host.path.fence(7, lambda: None)
    assert host.said[-2:] == [wire.PieceRefused(1), wire.PieceRefused(3)]
    assert host.owed == 1, "a piece without a slot owes nothing, nor does one that was given up"
    if word is None:
        host.path.fenced(host.path.pieces[1], True)
    else:
        host.path.told(word)
    assert host.owed == 0
    for piece in list(host.path.pieces.values()):
        host.path.fenced(piece, True)
    assert (host.owed, host.in_slots.held) == (0, 0)


class JoinedReading(Reading):
    """The reading end of a `Joined`."""

    def __init__(self, joined: Joined) -> None:
        super().__init__()
        self.joined = joined

    def send(self, message: msgspec.Struct, *, owes: bool = False) -> None:
        super().send(message, owes=owes)
        self.joined.messages.append((self.joined.writing.path, message))

    def inner_fence(self, peer: RankId, epoch: int) -> None:
        piece = self.path.pieces.get(epoch - 100)
        if piece is not None:
            self.joined.local.append(lambda: self.path.fenced(piece, self.joined.proven))

    def copy_in(self, blocks: list[CopyBlock], slot: int, ended: Callable[[SegueError | None], None]) -> None:
        self.joined.local.append(lambda: ended(None))


class Joined(Said):
    """Both ends of one path. `messages` are on their way, `local` are copies and answers of the inner
    transport, which is one that has proofs of its own or (not `proven`) none."""

    def __init__(self, proven: bool) -> None:
        super().__init__()
        self.proven = proven
        self.messages: list[tuple[StagedReader | StagedWriter, msgspec.Struct]] = []
        self.local: list[Callable[[], None]] = []
        self.writing = Writing()
        writing = self.writing
        writing.path.stream = self
        writing.copy_out = lambda packed, slot, ended: self.local.append(lambda: ended(None))
        writing.inner_write = self.inner_write
        self.reading = JoinedReading(self)

    def send(self, message: msgspec.Struct, *, owes: bool = False) -> None:
        super().send(message, owes=owes)
        self.messages.append((self.reading.path, message))

    def inner_write(self, peer: RankId, epoch: int, tag: int, block: CopyBlock) -> None:
        event = Written(peer, epoch, tag, block.nbytes, 0.0)
        self.local.append(lambda: self.writing.path.moved(tag, event))

    def step(self) -> bool:
        """One message or one local end; False when nothing is under way."""
        if self.local:
            self.local.pop(0)()
        elif self.messages:
            path, message = self.messages.pop(0)
            path.told(message)
        else:
            return False
        return True


@pytest.mark.parametrize("proven", [True, False])
@pytest.mark.parametrize("hears", ["writer", "reader"])
def test_a_path_that_ends_at_one_end_alone_keeps_no_slot_whatever_its_pieces_had_come_to(
    hears: str, proven: bool
) -> None:
    """Half-open before each step of a write of six pieces. Both owners fence; an end to which a word is owed
    ends by the silence. Without a proof of the inner transport the slots wait for the writer's next path."""
    step = 0
    while True:
        joined = Joined(proven)
        writer, reader = joined.writing.path, joined.reading.path
        writer.write(Write(7, 1, 6 * 64, 0.0), [CopyBlock(0, 0, 1, 6 * 64)])
        took = sum(joined.step() for _ in range(step))
        if took < step:
            break
        joined.messages.clear()
        (writer if hears == "writer" else reader).end(TransferFailed("cut"))
        fenced: list[bool] = []
        reader.fence(7, lambda fenced=fenced: fenced.append(True))
        writer.fence(7)
        for _ in range(3):
            while joined.local:
                joined.step()
            joined.messages.clear()
            if joined.reading.owed and reader.over is None:
                reader.end(TransferFailed("silence"))
            if joined.owed and writer.error is None:
                writer.end(TransferFailed("silence"))
        assert fenced == [True], step
        told = [kind for kind in kinds(joined.writing.events) if kind is not PeerGone]
        assert told in ([WriteFailed, Fenced], [Written, Fenced]), step
        assert joined.writing.out_slots.held == 0, step
        if not proven and joined.reading.in_slots.held:
            assert reader.over is not None, f"nobody ends the path of step {step}"
            reader.replaced()
        assert joined.reading.in_slots.held == 0, step
        step += 1
    assert step > 30


def test_the_end_of_a_path_is_told_once_however_many_pieces_end_with_it() -> None:
    host = Writing()
    host.path.write(Write(7, 1, 256, 0.0), [CopyBlock(0, 0, 1, 256)])
    host.path.end(TransferFailed("cut"))
    host.path.end(TransferFailed("again"))
    assert kinds(host.events) == [WriteFailed, PeerGone]
    reading = Reading()
    reading.path.told(wire.Want(1, 7, 10))
    (piece,) = reading.path.pieces.values()
    reading.path.end(TransferFailed("cut"))
    reading.path.fenced(piece, True)
    reading.path.end(TransferFailed("again"))
    assert kinds(reading.events) == [PeerGone, Forgotten]


def test_copies_that_wait_do_not_begin_after_the_end_of_their_threads() -> None:
    """The memory may be gone by then."""
    threads, ran = CopyThreads("test-copy", count=1), []
    began, goes_on = threading.Event(), threading.Event()

    def first() -> None:
        began.set()
        assert goes_on.wait(PATIENCE_S)

    threads.submit(first)
    assert began.wait(PATIENCE_S)
    threads.submit(lambda: ran.append(1))
    assert not threads.close(0.0), "one still runs"
    goes_on.set()
    assert threads.close(PATIENCE_S)
    threads.submit(lambda: ran.append(2))
    assert threads.close(PATIENCE_S)
    assert ran == []


def test_the_inner_transport_has_the_port_behind_that_of_the_control_stream() -> None:
    held = HeldPort("0.0.0.0", count=2)
    port = held.port
    told = {"host": "0.0.0.0", "advertise": "kv.example"}
    for options, ports in (
        ({"advertise_port": 7000}, (7000, 7001)),
        ({"port": port}, (port, port + 1)),
        ({"port": port, "advertise_port": 7000}, (7000, 7001)),
    ):
        transport = KINDS.create(
            "staged_tcp", lambda _: None, TransportOptions(me=rank("aaaa"), **told, **options)
        )
        with contextlib.closing(transport):
            endpoint = transport.register(Memory([host_region(np.zeros(64, np.uint8))]))
        inner = msgspec.msgpack.decode(endpoint.data, type=staged_transport.StagedAddress).inner
        found = [msgspec.msgpack.decode(end.data)["port"] for end in (endpoint, inner)]
        assert tuple(found) == ports, options


@pytest.mark.parametrize("first", ["either", "control stream"])
@pytest.mark.parametrize("name", NAMES)
def test_a_new_path_waits_for_the_end_of_the_inner_one_and_no_longer(
    name: str, first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staged_transport, "_LINGER_S", 10 * PATIENCE_S)
    with ends(name, 2, MiB) as (writer, reader):
        writer.connect(reader)
        emitter = writer.transport._inner._emitter
        late: queue.SimpleQueue[TransportEvent] = queue.SimpleQueue()
        tell = emitter._on_event
        if first == "control stream":
            emitter._on_event = late.put
        reader.transport.close()
        assert type(writer.wait(1)[0]).__name__ == "PeerGone"
        again = End(name, reader.me, MiB)
        connecting = threading.Thread(target=writer.connect, args=(again,), daemon=True)
        connecting.start()
        if first == "control stream":
            event = late.get(timeout=PATIENCE_S)
            connecting.join(0.1)
            assert connecting.is_alive(), "the inner path has not ended"
            emitter._on_event = tell
            tell(event)
        connecting.join(PATIENCE_S / 2)
        assert not connecting.is_alive()
        again.transport.grant(writer.me, 5, whole(MiB))
        with held_copies(writer) as (began, goes_on):
            writer.transport.write(again.me, 5, 2, [CopyBlock(0, 0, 1, 100)])
            assert began.wait(PATIENCE_S)
            writer.transport.fence(again.me, 5)
            drain(writer)
            assert writer.events.empty(), "a fence is one of the new path"
            goes_on.set()
            assert kinds(writer.wait(2)) == [WriteFailed, Fenced]
        again.transport.close()


def test_a_connect_that_the_inner_transport_refuses_leaves_nothing_at_either_end() -> None:
    with ends("staged_tcp", 2, MiB) as (writer, reader):
        inner = writer.transport._inner
        connect, left = inner.connect, []

        def full(peer: RankId, endpoint: Endpoint, timeout_s: float) -> None:
            left.append(timeout_s)
            raise OutOfCapacity("no room for its mapping")

        inner.connect = full
        with pytest.raises(OutOfCapacity, match="no room"):
            writer.connect(reader)
        assert 0 < left[0] <= PATIENCE_S
        (gone,) = reader.wait(1)
        assert (type(gone), gone.peer) == (PeerGone, writer.me)
        drain(reader)
        assert not reader.transport._readers
        inner.connect = connect
        writer.connect(reader)
        reader.transport.grant(writer.me, 3, whole(MiB))
        writer.transport.write(reader.me, 3, 1, [CopyBlock(0, 0, 1, 100)])
        assert isinstance(writer.wait(1)[0], Written)


def test_an_endpoint_without_slots_is_refused() -> None:
    with ends("staged_tcp", 2, MiB) as (writer, reader):
        data = msgspec.msgpack.decode(reader.endpoint.data) | {"slot_bytes": 0}
        reader.endpoint = msgspec.structs.replace(reader.endpoint, data=msgspec.msgpack.encode(data))
        with pytest.raises(PeerRefused, match="slots of 0 bytes"):
            writer.connect(reader)
        assert not writer.transport._writers


def test_a_connect_does_not_wait_for_an_old_path_for_ever() -> None:
    with linked() as (writer, reader):
        with held_copies(writer) as (began, goes_on):
            writer.transport.write(reader.me, 3, 1, [CopyBlock(0, 0, 1, 100)])
            assert began.wait(PATIENCE_S)
            (path,) = writer.transport._writers
            writer.transport._loop.post(lambda: path.end(TransferFailed("cut")))
            drain(writer)
            with pytest.raises(BootstrapTimeout, match=r"did not end within 0\.05 s"):
                writer.transport.connect(reader.me, reader.endpoint, 0.05)
            goes_on.set()
            assert kinds(writer.wait(2)) == [WriteFailed, PeerGone]
        writer.connect(reader)


def test_a_registration_without_memory_for_slots_says_what_to_change_and_frees_the_port() -> None:
    class Full(StagedHost):
        def slots(self, nbytes: int) -> Memory:
            raise OutOfCapacity("no memory")

    held = HeldPort(count=2)  # the inner transport has the next one
    options = TransportOptions(me=rank("aaaa"), port=held.port, staging_bytes=64 * 1024)
    memory = Memory([host_region(np.zeros(64, np.uint8))])
    kind = KINDS.kind("staged_tcp")
    assert issubclass(kind, StagedTransport)
    full = kind(lambda _: None, options, host=Full())
    with pytest.raises(OutOfCapacity, match="65536 bytes of staging slots; lower staging_bytes"):
        full.register(memory)
    again = kind(lambda _: None, options)
    again.register(memory)
    for transport in (full, again):
        transport.close()


def test_slots_are_unmapped_at_the_end() -> None:
    with ends("staged_tcp", 1, MiB) as (end,):
        slots = end.transport._slots
        end.transport.close()
        with pytest.raises(ValueError, match=r"released|closed"):
            slots.buffer[0] = 1


def test_the_end_of_one_writer_is_no_proof_of_another_one() -> None:
    """Slots of a path that ended wait for the proof of their own writer."""
    with ends("staged_shm", 3, MiB) as (writer, other, reader):
        for end in (writer, other):
            end.connect(reader)
        reader.transport.grant(writer.me, 3, whole(MiB))
        with held_copies(writer) as (began, goes_on):
            writer.transport.write(reader.me, 3, 1, [CopyBlock(0, 0, 1, 100)])
            assert began.wait(PATIENCE_S)
            (path,) = reader.transport._readers[writer.me]
            reader.transport._loop.post(lambda: path.end(TransferFailed("cut")))
            assert reader.wait(1)[0].peer == writer.me
            unproven = PeerGone(writer.me, False, TransferFailed("its socket has ended"))
            of_another = PeerGone(other.me, True, TransferFailed("it is dead"))
            for event in (unproven, of_another):
                reader.transport._from_inner(event)
            drain(reader, reader)
            assert reader.transport.in_slots.held == 1
            goes_on.set()
        writer.transport.close()
        deadline = threading.Event()
        for _ in range(int(PATIENCE_S * 100)):
            if not reader.transport.in_slots.held:
                break
            deadline.wait(0.01)
        assert reader.transport.in_slots.held == 0, "its goodbye is one"


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_paths_that_break_again_and_again_cost_no_slot(name: str) -> None:
    """Each time pieces have a slot of the reader, into which the writer's process might still write."""
    with ends(name, 2, MiB) as (writer, reader):
        for epoch in range(3):
            writer.connect(reader)
            reader.transport.grant(writer.me, epoch, whole(MiB))
            with held_copies(writer) as (began, goes_on):
                writer.transport.write(reader.me, epoch, 1, [CopyBlock(0, 0, 1, MiB)])
                assert began.wait(PATIENCE_S)
                path = reader.transport._readers[writer.me][-1]
                reader.transport._loop.post(lambda path=path: path.end(TransferFailed("cut")))
                assert isinstance(reader.wait(1)[0], PeerGone)
                goes_on.set()
                assert kinds(writer.wait(2)) == [WriteFailed, PeerGone]
        writer.connect(reader)
        reader.transport.grant(writer.me, 9, whole(MiB))
        writer.transport.write(reader.me, 9, 1, [CopyBlock(0, 0, 1, MiB)])
        assert isinstance(writer.wait(1)[0], Written)
        assert len(reader.transport._readers[writer.me]) == 1
        assert reader.transport.in_slots.held == 0


@pytest.mark.parametrize("name", NAMES)
def test_a_path_ends_with_its_inner_path_though_nothing_is_written(name: str) -> None:
    """Else the next hand-off would find out, and fail."""
    with linked(name) as (writer, reader):
        writer.transport.write(reader.me, 3, 1, [CopyBlock(0, 0, 1, 100)])
        assert isinstance(writer.wait(1)[0], Written)
        reader.transport._inner.close()
        assert isinstance(writer.wait(1)[0], PeerGone)


def test_a_copy_that_hangs_holds_up_the_end_for_a_bounded_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A device may hang. Its slots stay mapped, for it might still copy."""
    monkeypatch.setattr(staged_transport, "_CLOSE_S", 0.05)
    with linked() as (writer, _), held_copies(writer) as (began, goes_on):
        slots, threads = writer.transport._slots, writer.transport._copying._threads
        writer.transport.write(rank("bbbb"), 3, 1, [CopyBlock(0, 0, 1, 100)])
        assert began.wait(PATIENCE_S)
        writer.transport.close()
        assert "its memory must stay" in caplog.text
        goes_on.set()
        for thread in threads:
            thread.join(PATIENCE_S)
        slots.buffer[0] = 1  # would raise, or worse
        assert writer.events.empty(), "no event after close"
        slots.close()


@pytest.mark.parametrize("name", NAMES)
def test_a_pool_without_memory_for_slots_leaves_nothing_open(name: str) -> None:
    transport = KINDS.create(name, lambda _: None, TransportOptions(me=rank("aaaa"), staging_bytes=2**50))
    before = sockets()
    with pytest.raises(OutOfCapacity, match="lower staging_bytes"):
        transport.register(Memory([host_region(np.zeros(64, np.uint8))]))
    assert sockets() == before
    transport.close()


def sockets() -> int:
    found = 0
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found += os.readlink(f"/proc/self/fd/{fd}").startswith("socket:")
    return found


# ---- hand-offs ---------------------------------------------------------------------------------------

SHAPE = KVShape(layers=3, kv_heads=2, k_dim=8, v_dim=8, dtype="float16", item_bytes=2)
PAGES, PAGE, TOKENS = 16, 4, 45
LIMITS = Limits(keepalive_s=0.5, peer_silence_s=60.0, handshake_s=60.0, connect_s=60.0)


class Half:
    """A manager over memory of the host, as it is or declared as a device's."""

    def __init__(self, role: Role, transports: list[str], on_device: bool, staging_bytes: int) -> None:
        self.spec = PoolSpec(shape=SHAPE, page_tokens=PAGE, pages=PAGES, layer_count=3, head_count=2)
        self.tensor = torch.zeros(self.spec.nbytes, dtype=torch.uint8)
        kind = {"device": "cpu:0"} if on_device else {}
        region = Region(self.tensor.data_ptr(), self.tensor.nbytes, owner=self.tensor, **kind)
        self.changes: queue.Queue[Change] = queue.Queue()
        config = KVConfig(
            role=role,
            model="m",
            spec=self.spec,
            transports=transports,
            limits=LIMITS,
            staging_bytes=staging_bytes,
        )
        self.manager = KVManager(config, Memory([region]), self.changes.put)
        self.me, self.address = config.me, self.manager.start()

    def wait(self, handle: object, phase: KVPoll) -> None:
        while (now := handle.poll()) is not phase:
            assert not now.terminal, handle.error
            self.changes.get(timeout=PATIENCE_S)


@contextmanager
def halves(
    transports: tuple[list[str], list[str]], on_device: tuple[bool, bool], staging_bytes: int = 128 * 1024
) -> Iterator[tuple[Half, Half]]:
    prefill = Half(Role.PREFILL, transports[0], on_device[0], staging_bytes)
    decode = Half(Role.DECODE, transports[1], on_device[1], staging_bytes)
    try:
        decode.manager.add_peer(prefill.me, *prefill.address)
        yield prefill, decode
    finally:
        decode.manager.close()
        prefill.manager.close()


CASES = [
    (["tcp"], ["tcp"], True, True, ChecksumKind.WORDS),
    (["shm"], ["shm"], True, True, ChecksumKind.WORDS),
    (["tcp"], ["tcp", "staged_tcp"], True, False, ChecksumKind.WORDS),
    (["tcp", "staged_tcp"], ["tcp"], False, True, ChecksumKind.WORDS),
    (["staged_shm"], ["staged_shm"], False, False, ChecksumKind.XXH3),
]


@pytest.mark.parametrize(("ours", "theirs", "here", "there", "kind"), CASES)
def test_kv_of_a_device_is_handed_over_checked(
    ours: list[str], theirs: list[str], here: bool, there: bool, kind: ChecksumKind
) -> None:
    with halves((ours, theirs), (here, there)) as (prefill, decode):
        for number in range(3):
            content = os.urandom(prefill.spec.nbytes)
            prefill.tensor[:] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
            key = RoomKey(new_room())
            sender = prefill.manager.expect(key, TOKENS, PATIENCE_S)
            receiver = decode.manager.receive(key, prefill.me, TOKENS, PATIENCE_S)
            decode.wait(receiver, KVPoll.WAITING_FOR_INPUT)
            receiver.publish(range(2, 2 + 12))
            ready = prefill.manager.ready()
            sender.send(Span(0, 20), range(12))
            sender.send(Span(20, TOKENS), range(12), b"first token", ready=ready)
            ready.signal()
            decode.wait(receiver, KVPoll.SUCCESS)
            prefill.wait(sender, KVPoll.SUCCESS)
            landed = bytes(decode.tensor.numpy())
            for layer in range(3):
                for value in (False, True):
                    at = prefill.spec.offset(layer, value, 0)
                    to = decode.spec.offset(layer, value, 2 * PAGE)
                    nbytes = TOKENS * prefill.spec.k_token_bytes
                    assert landed[to : to + nbytes] == content[at : at + nbytes], number
            (peer,) = prefill.manager._peers.values()
            assert peer.checksum is kind
            assert peer.transport.startswith("staged_")
            sender.clear()
            receiver.clear()


def test_a_byte_that_changed_on_a_device_ends_both_halves() -> None:
    with halves((["tcp"], ["tcp"]), (True, True)) as (prefill, decode):
        key = RoomKey(new_room())
        sender = prefill.manager.expect(key, TOKENS, PATIENCE_S)
        receiver = decode.manager.receive(key, prefill.me, TOKENS, PATIENCE_S)
        decode.wait(receiver, KVPoll.WAITING_FOR_INPUT)
        receiver.publish(range(12))
        (transport,) = decode.manager._ranks[0]._by_name.values()
        into = transport._copies.into

        def flipped(blocks: list[CopyBlock], slot: int) -> None:
            into(blocks, slot)
            decode.tensor[blocks[0].dst_offset] ^= 1

        transport._copies.into = flipped
        sender.send(Span(0, TOKENS), range(12), b"")
        for half, handle in ((prefill, sender), (decode, receiver)):
            while not handle.poll().terminal:
                half.changes.get(timeout=PATIENCE_S)
            assert handle.error is not None
            assert handle.error.code is ErrorCode.CHECKSUM_MISMATCH


def test_a_copy_that_fails_fails_its_hand_off_and_no_slot_is_lost() -> None:
    with linked() as (writer, reader):
        copies = writer.transport._copies
        out = copies.out

        def broken(blocks: list[CopyBlock], slot: int) -> None:
            copies.out = out
            raise RuntimeError("out of device memory")

        copies.out = broken
        writer.transport.write(reader.me, 3, 1, [CopyBlock(0, 0, 1, 100)])
        (failed,) = writer.wait(1)
        assert isinstance(failed, WriteFailed)
        assert isinstance(failed.error, TransferFailed)
        assert "out of device memory" in str(failed.error)
        writer.transport.write(reader.me, 3, 2, [CopyBlock(0, 0, 1, MiB)])
        assert isinstance(writer.wait(1)[0], Written)


def test_a_path_that_has_ended_is_over_when_its_last_copy_is_and_no_sooner() -> None:
    """Until then nothing is told of it, its fences are not answered, and no other path is opened."""
    with linked() as (writer, reader):
        with held_copies(writer) as (began, goes_on):
            writer.transport.write(reader.me, 3, 1, [CopyBlock(0, 0, 1, 100)])
            assert began.wait(PATIENCE_S)
            (path,) = writer.transport._writers
            ended, end = threading.Event(), path.end
            path.end = path.stream._ended = lambda error: (end(error), ended.set())
            reader.transport.close()
            assert ended.wait(PATIENCE_S)
            writer.transport.fence(reader.me, 3)
            again = End("staged_tcp", reader.me, MiB)
            connecting = threading.Thread(target=writer.connect, args=(again,))
            connecting.start()
            drain(writer)
            assert writer.events.empty(), "the copy still reads the memory"
            assert connecting.is_alive()
            goes_on.set()
            assert kinds(writer.wait(3)) == [WriteFailed, Fenced, PeerGone]
        connecting.join(PATIENCE_S)
        again.transport.grant(writer.me, 5, whole(MiB))
        writer.transport.write(again.me, 5, 2, [CopyBlock(0, 0, 1, 100)])
        assert isinstance(writer.wait(1)[0], Written)
        again.transport.close()


@pytest.mark.parametrize("ends_by", ["reader", "writer", "stream"])
def test_nobody_hears_of_an_end_while_a_copy_still_writes_the_memory(ends_by: str) -> None:
    with linked("staged_shm") as (writer, reader):
        writer.array[:] = 7
        with held_copies(reader, "into") as (began, goes_on):
            writer.transport.write(reader.me, 3, 1, [CopyBlock(0, 0, 1, 100)])
            assert began.wait(PATIENCE_S)
            if ends_by == "reader":
                reader.transport.fence(writer.me, 3)
            elif ends_by == "writer":
                writer.transport.fence(reader.me, 3)
            else:
                (path,) = reader.transport._readers[writer.me]
                reader.transport._loop.post(lambda: path.end(TransferFailed("cut")))
            drain(writer, reader, writer, reader)  # a word there and back
            assert reader.events.empty()
            assert ends_by == "stream" or writer.events.empty()
            goes_on.set()
            told = {"reader": [Fenced], "writer": [WriteFailed, Fenced], "stream": [PeerGone]}[ends_by]
            assert kinds((writer if ends_by == "writer" else reader).wait(len(told))) == told
        assert (reader.array[:100] == 7).all(), "all of it was there before"
