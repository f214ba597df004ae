"""The small rooms under the transports: kinds, handshake, fake, ranges, loop, books."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
import numpy as np
import pytest

from areas import whole
from library_double import DoubleTransport
from ranks import make_shm, make_tcp, options, rank
from segue.kv.errors import ConfigError, Internal, OutOfCapacity, PeerRefused, TransferFailed
from segue.kv.ids import Incarnation, LeaderId, RankId, new_incarnation
from segue.kv.layout.blocks import CopyBlock
from segue.kv.transport.base import (
    Endpoint,
    EventSink,
    Fenced,
    PeerGone,
    TransportEvent,
    WriteFailed,
    Written,
)
from segue.kv.transport.emitter import EventEmitter
from segue.kv.transport.epochs import FencedEpochs, Grants
from segue.kv.transport.fake import FakeTransport
from segue.kv.transport.kinds import KINDS, USABLE, TransportKinds
from segue.kv.transport.memory import ranges
from segue.kv.transport.memory.pool_memory import Memory, MemoryKind, Region, allocate, host_region
from segue.kv.transport.net import key_handshake as handshake
from segue.kv.transport.net.ioloop import IoLoop
from segue.kv.transport.paths import Paths
from segue.kv.transport.tcp.tcp_wire import MAX_PART_ROWS, cut
from segue.kv.transport.write_book import fenced, not_granted

T = TypeVar("T")


def double_library(sink: EventSink, me: RankId) -> DoubleTransport:
    """A transport over a library, which is a double."""
    return DoubleTransport(sink, options(me))


# ---- kinds ---------------------------------------------------------------------------------------


def preferred(ours: dict[str, list[Endpoint]], theirs: dict[str, list[Endpoint]]) -> str | None:
    """The first of those that a pair could use."""
    return next(iter(KINDS.common(ours, theirs)), None)


def test_an_unknown_transport_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="fake, shm, tcp, nixl, mooncake, mori, ascend, staged_shm"):
        KINDS.create("carrier-pigeon", lambda _e: None, options(rank("a")))


def test_one_that_cannot_be_used_says_why() -> None:
    assert set(KINDS.available()) == set(KINDS.known)
    here = KINDS.available()
    assert here["shm"] == here["tcp"] == here["fake"] == USABLE


def _shm(host: str, version: int = 1) -> Endpoint:
    data = msgspec.msgpack.encode({"version": version, "name": b"x", "key": b"k", "host": host})
    return Endpoint("shm", 1, data)


def test_auto_chooses_shm_on_one_host_and_tcp_between_hosts() -> None:
    tcp = [Endpoint("tcp", 1, b"")]
    fake = [Endpoint("fake", 1, b"")]
    here, there = {"shm": [_shm("h1")], "tcp": tcp}, {"shm": [_shm("h2")], "tcp": tcp}
    assert preferred(here, here) == "shm"
    assert preferred(here, there) == preferred(there, here) == "tcp"
    assert preferred({"shm": [_shm("h1")]}, {"shm": [_shm("h2")]}) is None
    assert preferred(here, {"shm": [_shm("h1", version=2)], "tcp": tcp}) == "tcp"
    newer = {"shm": [_shm("h1", version=2)], "tcp": tcp}
    assert preferred(newer, newer) == "tcp", "equal, and none that this version knows"
    nameless = {"shm": [_shm("")], "tcp": tcp}
    assert preferred(nameless, nameless) == "tcp", "two hosts that could not say which they are"
    assert preferred(here, {"shm": [Endpoint("shm", 1, b"\xc1")], "tcp": tcp}) == "tcp"
    assert preferred({"fake": fake}, {"fake": fake, "tcp": tcp}) == "fake"
    assert preferred({"tcp": tcp}, {"shm": [_shm("h1")]}) is None


def test_every_transport_of_this_version_describes_itself() -> None:
    classes = [KINDS.kind(name) for name in KINDS.known]
    assert {kind.name for kind in classes} == set(KINDS.known)
    assert len({kind.preference for kind in classes}) == len(classes), "the order of `auto` is one"
    assert all(kind.memory_kinds for kind in classes)
    assert KINDS.automatic() == ("shm", "tcp")


def test_auto_offers_what_registers_the_memory_and_says_why_it_leaves_out_the_rest() -> None:
    plain = Memory([host_region(np.zeros(4096, np.uint8))])
    assert KINDS.offered("auto", plain) == {"shm": "it registers no host memory", "tcp": USABLE}
    device = Memory([Region(1 << 40, 4096, "cuda:0")])
    assert set(KINDS.offered("auto", device).values()) == {"it registers no device memory"}
    assert KINDS.offered("shm", plain) == {"shm": USABLE}, "who names one hears why from the transport itself"


def test_a_pair_takes_a_transport_that_reaches_every_rank_from_every_rank() -> None:
    tcp = [Endpoint("tcp", 1, b"")] * 2
    here = {"shm": [_shm("h1"), _shm("h1")], "tcp": tcp}
    assert preferred(here, here) == "shm"
    apart = {"shm": [_shm("h1"), _shm("h2")], "tcp": tcp}
    assert preferred(here, apart) == preferred(apart, here) == "tcp"
    assert preferred({"tcp": []}, {"tcp": tcp}) is None


def test_a_transport_whose_module_is_missing_is_listed_with_the_reason() -> None:
    lacks = TransportKinds({"tcp": KINDS.known["tcp"], "rocket": "segue.transport.no_such_module:Rocket"})
    assert lacks.available()["tcp"] == USABLE
    assert "cannot be imported: No module named" in lacks.available()["rocket"]
    with pytest.raises(ConfigError, match="'rocket' cannot be used here: cannot be imported"):
        lacks.create("rocket", lambda _e: None, options(rank("a")))
    theirs = {"rocket": [Endpoint("rocket", 1, b"")]}
    assert preferred(theirs, theirs) is None, "one that this side does not know"


def test_the_order_of_a_pair_is_that_of_prefill_s_list() -> None:
    end = [Endpoint("x", 1, b"")]
    prefill, decode = {"nixl": end, "tcp": end, "fake": end}, {"fake": end, "tcp": end, "mooncake": end}
    assert KINDS.common(prefill, decode) == ["tcp", "fake"]
    assert KINDS.common(decode, prefill) == ["fake", "tcp"]


def test_a_setting_names_each_transport_once_in_its_order() -> None:
    assert KINDS.names("auto,tcp") == ("shm", "tcp")
    assert KINDS.names("tcp,auto,tcp") == ("tcp", "shm")


def test_a_pool_of_several_kinds_of_memory_is_offered_for_what_registers_all_of_it() -> None:
    shared = allocate(4096)
    both = Memory([*shared.regions, host_region(np.zeros(4096, np.uint8))])
    assert KINDS.offered("auto", both) == {"shm": "it registers no host memory", "tcp": USABLE}
    both.close()


def test_real_endpoints_of_this_host_choose_shm() -> None:
    memory = allocate(4096)
    sides = []
    for me in (rank("a"), rank("b")):
        made = {name: KINDS.create(name, lambda _e: None, options(me)) for name in ("shm", "tcp")}
        sides.append((made, {name: [t.register(memory)] for name, t in made.items()}))
    assert preferred(sides[0][1], sides[1][1]) == "shm"
    for made, _ in sides:
        for transport in made.values():
            transport.close()
    memory.close()


@pytest.mark.parametrize("name", ["fake", "shm", "tcp"])
@pytest.mark.parametrize("incarnation", ["", "ä" * 32, "AB" * 16, "ab" * 15, "ab " * 16])
def test_a_rank_that_cannot_travel_is_refused(name: str, incarnation: str) -> None:
    me = RankId(LeaderId(Incarnation(incarnation)))
    with pytest.raises(ConfigError, match="32 hex digits"):
        KINDS.create(name, lambda _e: None, options(me))


@pytest.mark.parametrize("numbers", [(2**32, 0), (0, 2**32), (-1, 0)])
def test_a_rank_whose_numbers_cannot_travel_is_refused(numbers: tuple[int, int]) -> None:
    with pytest.raises(ConfigError, match="no rank"):
        options(rank("a", *numbers))


# ---- handshake -----------------------------------------------------------------------------------


HELLO = rank("aaaa", dp_rank=3, number=2)


def test_both_ends_prove_the_key_and_it_never_travels() -> None:
    key = handshake.new_key()
    listener, writer = handshake.ListenerProof(key), handshake.WriterProof(key, HELLO)
    frames = [listener.challenge()]
    frames.append(writer.respond(frames[0]))
    hello, verdict = listener.accept(frames[1])
    writer.finish(verdict)
    assert hello == HELLO
    assert all(key not in frame for frame in (*frames, verdict))


def test_a_recorded_answer_is_worthless_for_another_challenge() -> None:
    key = handshake.new_key()
    writer = handshake.WriterProof(key, HELLO)
    recorded = writer.respond(handshake.ListenerProof(key).challenge())
    with pytest.raises(PeerRefused, match="wrong key"):
        handshake.ListenerProof(key).accept(recorded)


def test_each_flipped_bit_is_refused() -> None:
    key = handshake.new_key()
    listener, writer = handshake.ListenerProof(key), handshake.WriterProof(key, HELLO)
    good = writer.respond(listener.challenge())
    for i in range(len(good)):
        bad = bytearray(good)
        bad[i] ^= 1
        with pytest.raises(PeerRefused):
            listener.accept(bytes(bad))
    listener.accept(good)


def test_a_recorded_verdict_is_worthless_for_another_writer() -> None:
    """A recording of one connection, its challenge and its verdict does not reveal the key."""
    key = handshake.new_key()
    listener, writer = handshake.ListenerProof(key), handshake.WriterProof(key, HELLO)
    challenge = listener.challenge()
    _, verdict = listener.accept(writer.respond(challenge))
    again = handshake.WriterProof(key, HELLO)
    again.respond(challenge)
    with pytest.raises(PeerRefused, match="could not prove"):
        again.finish(verdict)


@pytest.mark.parametrize("version", [handshake.VERSION - 1, handshake.VERSION + 1])
def test_whoever_speaks_another_version_is_refused_at_each_step(
    version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An older or a newer segue, whose frames are as long and that knows the key."""
    key = handshake.new_key()

    def both() -> tuple[handshake.ListenerProof, handshake.WriterProof]:
        return handshake.ListenerProof(key), handshake.WriterProof(key, HELLO)

    def theirs(step: Callable[[], T]) -> T:
        with monkeypatch.context() as patch:
            patch.setattr(handshake, "VERSION", version)
            return step()

    listener, writer = both()
    with pytest.raises(PeerRefused, match=f"speaks stream version {version}, this side {handshake.VERSION}"):
        writer.respond(theirs(listener.challenge))
    listener, writer = both()
    challenge = theirs(listener.challenge)
    frame = theirs(lambda: writer.respond(challenge))
    with pytest.raises(PeerRefused, match=f"stream version {version}; this side"):
        listener.accept(frame)
    _, verdict = theirs(lambda: listener.accept(frame))
    with pytest.raises(PeerRefused, match="unreadable"):
        writer.finish(verdict)


def test_what_is_no_segue_listener_is_not_answered_and_its_verdict_is_none() -> None:
    key = handshake.new_key()
    listener, writer = handshake.ListenerProof(key), handshake.WriterProof(key, HELLO)
    challenge = listener.challenge()
    with pytest.raises(PeerRefused, match="does not answer as a segue transport"):
        writer.respond(b"SSH-" + challenge[4:])
    _, verdict = listener.accept(writer.respond(challenge))
    with pytest.raises(PeerRefused, match="unreadable"):
        writer.finish(b"SSH-" + verdict[4:])


def test_refusals_carry_their_reason_whatever_letters_it_has() -> None:
    key = handshake.new_key()
    for reason, told in (
        ("another user", "another user"),
        ("for ü", r"for \?"),
        ("x" * 200, "x" * 128 + "$"),
    ):
        listener, writer = handshake.ListenerProof(key), handshake.WriterProof(key, HELLO)
        writer.respond(listener.challenge())
        with pytest.raises(PeerRefused, match=told):
            writer.finish(listener.refuse(reason))
    verdict = bytearray(listener.refuse("x"))
    verdict[-1] = 0xFF  # of a peer that sends what it likes
    with pytest.raises(PeerRefused):
        writer.finish(bytes(verdict))


# ---- fake ----------------------------------------------------------------------------------------


def test_fake_never_nests_its_events() -> None:
    depth: list[int] = []
    order: list[TransportEvent] = []

    def sink(event: TransportEvent) -> None:
        assert not depth
        depth.append(1)
        order.append(event)
        if isinstance(event, Written) and event.tag < 3:
            writer.write(rank("b"), 3, event.tag + 1, [CopyBlock(0, 0, 1, 1)])
        depth.pop()

    memory = allocate(4096)
    writer = FakeTransport(sink, options(rank("a")))
    writer.connect(rank("b"), writer.register(memory), 1)
    writer.write(rank("b"), 3, 0, [CopyBlock(0, 0, 1, 1)])
    assert [e.tag for e in order if isinstance(e, Written)] == [0, 1, 2, 3]
    memory.close()


def test_fake_completes_and_moves_nothing() -> None:
    log: list[TransportEvent] = []
    memory = allocate(4096)
    memory.buffer[:3] = b"abc"
    writer = FakeTransport(log.append, options(rank("a")))
    endpoint = writer.register(memory)
    writer.connect(rank("b"), endpoint, 1)
    writer.write(rank("b"), 3, 1, [CopyBlock(0, 100, 1, 3)])
    assert isinstance(log[0], Written)
    assert memory.buffer[100:103] == bytes(3)
    memory.close()


def test_fake_keeps_the_rules_of_epochs_and_endpoints() -> None:
    log: list[TransportEvent] = []
    memory = allocate(4096)
    writer = FakeTransport(log.append, options(rank("a")))
    endpoint = writer.register(memory)
    with pytest.raises(PeerRefused, match="not a fake endpoint"):
        writer.connect(rank("b"), Endpoint("tcp", 4096, b""), 1)
    writer.connect(rank("b"), endpoint, 1)
    writer.fence(rank("b"), 3)
    writer.write(rank("b"), 3, 1, [CopyBlock(0, 0, 1, 1)])
    writer.write(rank("b"), 4, 2, [CopyBlock(0, 4096, 1, 1)])
    assert log[0] == Fenced(rank("b"), 3, True)
    assert [type(event) for event in log[1:]] == [WriteFailed, WriteFailed]
    memory.close()


# ---- ranges, books, loop ----------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 3])
def test_the_last_byte_of_a_block_may_be_the_last_of_either_memory_and_no_later_one(rows: int) -> None:
    start = 100 - 8 - 10 * (rows - 1)
    assert ranges.check([CopyBlock(start, start, rows, 8, 10, 10)], 100, 100) == 8 * rows
    for source, target in ((start + 1, start), (start, start + 1)):
        with pytest.raises(TransferFailed, match="outside"):
            ranges.check([CopyBlock(source, target, rows, 8, 10, 10)], 100, 100)


def test_more_rows_than_the_limit_are_refused() -> None:
    with pytest.raises(TransferFailed, match="rows"):
        ranges.check([CopyBlock(0, 0, ranges.MAX_ROWS + 1, 1, 0, 1)], 10, 2**40)


@pytest.mark.parametrize(
    "blocks",
    [
        [CopyBlock(0, 0, 2**11, 1, 0, 1, 2**11, 0, 2**11), CopyBlock(0, 0, 1, 1)],
        [CopyBlock(0, 0, 1, 1, 0, 1, 2**22, 0, 1), CopyBlock(0, 0, 1, 1)],
        [CopyBlock(0, 0, 2**21, 1, 0, 1), CopyBlock(0, 0, 2**21, 1, 0, 1), CopyBlock(0, 0, 1, 1)],
    ],
    ids=["rows of groups", "groups of a row", "several blocks"],
)
def test_the_limit_of_rows_is_of_all_groups_of_all_blocks(blocks: list[CopyBlock]) -> None:
    assert ranges.check(blocks[:-1], 10, 2**40) == ranges.MAX_ROWS
    with pytest.raises(TransferFailed, match=f"a write of {ranges.MAX_ROWS + 1} rows"):
        ranges.check(blocks, 10, 2**40)


@pytest.mark.parametrize("field", CopyBlock.__struct_fields__)
def test_no_field_of_a_block_may_be_negative(field: str) -> None:
    """A stride that goes backwards leaves the memory at its beginning."""
    good = CopyBlock(500, 500, 3, 4, 10, 10, 3, 100, 100)
    assert ranges.check([good], 1000, 1000) == 36
    with pytest.raises(TransferFailed, match="negative"):
        ranges.check([msgspec.structs.replace(good, **{field: -1})], 1000, 1000)


@pytest.mark.parametrize("field", ["src_offset", "src_stride", "src_group_stride"])
def test_each_field_that_says_what_is_read_is_held_against_the_source(field: str) -> None:
    exact = CopyBlock(1000 - 224, 0, 3, 4, 10, 10, 3, 100, 100)  # its last byte is the last
    assert ranges.check([exact], 1000, 1000) == 36
    with pytest.raises(TransferFailed, match="reads outside"):
        ranges.check([msgspec.structs.replace(exact, **{field: getattr(exact, field) + 1})], 1000, 1000)


def test_pieces_keep_the_bytes_and_the_limit() -> None:
    blocks = [CopyBlock(0, 5, 7, 10, 20, 30), CopyBlock(1, 500, 2, 100, 0, 100), CopyBlock(0, 900, 1, 3)]
    for limit in (1, 9, 25, 64, 1000):
        cut = list(ranges.pieces(blocks, limit))
        assert all(0 < b.nbytes <= limit for b in cut)
        assert sum(b.nbytes for b in cut) == sum(b.nbytes for b in blocks)


@pytest.mark.parametrize("rows", [1, MAX_PART_ROWS, MAX_PART_ROWS + 1, 2 * MAX_PART_ROWS + 5])
def test_no_part_has_more_rows_than_its_receiver_takes(rows: int) -> None:
    parts = list(cut([CopyBlock(3, 7, rows, 1, 2, 4)], 2**20))
    assert all(0 < len(part.source) == len(part.target) == part.nbytes <= MAX_PART_ROWS for part in parts)
    assert np.concatenate([part.source for part in parts])[:, 0].tolist() == list(range(3, 3 + 2 * rows, 2))
    assert np.concatenate([part.target for part in parts])[:, 0].tolist() == list(range(7, 7 + 4 * rows, 4))


def test_grants_are_bounded() -> None:
    grants = Grants(limit=3)
    assert [grants.add("a", e, whole(1)) for e in (1, 2, 2)] == [True, True, False]
    grants.add("b", 1, whole(1))
    with pytest.raises(OutOfCapacity):
        grants.add("b", 2, whole(1))
    assert grants.remove("a", 1)
    assert not grants.remove("a", 1)
    assert len(grants) == 2
    grants.add("c", 7, whole(1))
    with pytest.raises(OutOfCapacity):
        grants.add("d", 1, whole(1))
    grants.remove_peer("a")
    assert ("a", 2) not in grants
    assert len(grants) == 2


def test_ended_forgets_only_the_oldest() -> None:
    ended = FencedEpochs(limit=2)
    for epoch in (1, 2, 3):
        ended.add("a", epoch)
    assert [("a", e) in ended for e in (1, 2, 3)] == [False, True, True]
    assert ("b", 3) not in ended


def test_a_dead_transport_tells_each_peer_once_in_the_order_given() -> None:
    """In each process in the same order, as a set would not."""
    told: list[RankId] = []
    emitter = EventEmitter("x", lambda event: told.append(event.peer))
    peers = [RankId(LeaderId(new_incarnation(), rank), 0) for rank in range(20)]
    emitter.fail(RuntimeError("a bug"))
    emitter.all_gone(iter([*peers, *peers[::-1]]))
    assert told == peers


def test_the_books_of_paths_keep_the_one_that_is_open() -> None:
    emitter = EventEmitter("x", lambda _event: None)
    paths: Paths[str] = Paths("x", frozenset(MemoryKind), emitter)
    peer, memory = rank("a"), Memory([host_region(np.zeros(10, np.uint8))])
    with pytest.raises(ConfigError, match="register the memory"):
        paths.check_connect(peer)
    paths.check_register(memory)
    paths.memory = memory
    assert paths.check_connect(peer) is memory
    assert paths.add(peer, "first")
    assert paths.check_connect(peer) is None
    assert not paths.add(peer, "of a connect at the same time")
    assert paths.check_write(peer, 1) == ("first", memory)
    assert not paths.remove(peer, "an older one that has ended"), "which is not the one that is open"
    assert paths.of == {peer: "first"}
    assert paths.remove(peer, "first")
    assert not paths.remove(peer, "first")
    with pytest.raises(TransferFailed, match="no x path"):
        paths.check_write(peer, 1)


def test_a_transport_that_was_closed_takes_no_memory_and_no_path() -> None:
    emitter = EventEmitter("x", lambda _event: None)
    paths: Paths[str] = Paths("x", frozenset(MemoryKind), emitter)
    emitter.closed = True
    with pytest.raises(ConfigError, match="before it is closed"):
        paths.check_register(Memory([host_region(np.zeros(10, np.uint8))]))
    assert not paths.add(rank("a"), "opened meanwhile"), "who opened it closes it"
    with pytest.raises(TransferFailed, match="closed"):
        paths.check_connect(rank("a"))


def test_what_an_epoch_s_end_makes_of_a_write_is_not_to_be_tried_again() -> None:
    for error in (fenced(3), not_granted(rank("a"), 3)):
        assert not error.info.retryable, error


def test_the_loop_runs_calls_in_order_and_timers_by_time() -> None:
    now = [100.0]  # it stands still while timers are set, however long that takes
    loop = IoLoop("test-loop", lambda _exc: None, clock=lambda: now[0])
    seen: list[object] = []
    done = threading.Event()
    loop.start()

    def arm() -> None:
        loop.later(0.02, done.set)
        loop.later(0.01, lambda: seen.append("late"))
        loop.later(0.0, lambda: seen.append("soon"))
        loop.later(0.0, lambda: seen.append("never")).cancel()

    for i in range(100):
        loop.post(lambda i=i: seen.append(i))  # type: ignore[misc]
    loop.post(arm)
    loop.post(lambda: now.append(now.pop() + 1.0))
    assert done.wait(60)
    assert loop.stop(lambda: seen.append("last"), 60)
    assert seen == [*range(100), "soon", "late", "last"]
    loop.post(lambda: seen.append("dropped"))


def test_lesson_22_a_loop_that_crashes_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    crashes: list[BaseException] = []
    hooked: list[object] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: hooked.append(args.exc_value))
    loop = IoLoop("test-loop", crashes.append)
    loop.start()
    loop.post(lambda: {}["missing"])  # type: ignore[arg-type]
    loop._thread.join(60)
    assert [type(e) for e in crashes] == [type(e) for e in hooked] == [KeyError]


@pytest.mark.parametrize("name", ["shm", "tcp"])
def test_lesson_22_a_sink_that_raises_fails_the_peers_at_once(name: str, hooked: threading.Event) -> None:
    """A thread of a transport that dies takes nothing with it silently."""
    gone = threading.Event()

    def sink(event: TransportEvent) -> None:
        if isinstance(event, Fenced):
            raise KeyError("a bug in the owner")
        if isinstance(event, PeerGone):
            gone.set()

    memory = allocate(4096)
    transport = KINDS.create(name, sink, options(rank("a")))
    transport.connect(rank("a"), transport.register(memory), 60)
    transport.fence(rank("a"), 1)
    assert gone.wait(60)
    assert hooked.wait(60)
    transport.close()
    memory.close()


@pytest.mark.parametrize("name", ["shm", "tcp", "staged_tcp"])
def test_lesson_22_a_sink_that_raises_for_one_peer_hears_of_the_others(
    name: str, hooked: threading.Event
) -> None:
    gone = threading.Event()

    def sink(event: TransportEvent) -> None:
        if event.peer == rank("b"):
            raise KeyError("a bug in the owner")
        if isinstance(event, PeerGone):
            gone.set()

    words = ("a", "b", "c")
    sides = [KINDS.create(name, sink if word == "a" else print, options(rank(word))) for word in words]
    memories = [allocate(4096) for _ in sides]
    ends = [side.register(memory) for side, memory in zip(sides, memories, strict=True)]
    for word, end in zip("bc", ends[1:], strict=True):
        sides[0].connect(rank(word), end, 60)
    sides[0].fence(rank("b"), 1)
    assert hooked.wait(20)
    assert gone.wait(20)
    for side, memory in zip(sides, memories, strict=True):
        side.close()
        memory.close()


@pytest.mark.parametrize("make", [make_shm, make_tcp, double_library], ids=["shm", "tcp", "library"])
def test_lesson_22_a_thread_that_dies_is_told_of_who_writes_here_and_of_whom_we_write_to(
    make: Callable[..., Any], hooked: threading.Event
) -> None:
    """Each of them once, and as no proof; and whoever asks for a fence afterwards hears an answer."""
    told: queue.SimpleQueue[TransportEvent] = queue.SimpleQueue()
    open_before = len(os.listdir("/proc/self/fd"))
    sides = [make(sink, rank(word)) for word, sink in zip("abc", (print, told.put, print), strict=True)]
    memories = [allocate(4096) for _ in sides]
    ends = [side.register(memory) for side, memory in zip(sides, memories, strict=True)]
    writer, broken, _ = sides
    writer.connect(rank("b"), ends[1], 60)
    broken.connect(rank("c"), ends[2], 60)
    broken.grant(rank("a"), 1, whole(4096))
    writer.write(rank("b"), 1, 1, [CopyBlock(0, 0, 1, 1)])

    def die() -> None:
        raise KeyError("a bug")

    broken._loop.post(die)
    gone = [told.get(timeout=60) for _ in range(2)]
    assert {(type(event), event.peer, event.proven) for event in gone} == {
        (PeerGone, rank("a"), False),
        (PeerGone, rank("c"), False),
    }
    assert hooked.wait(60)
    for peer in (rank("a"), rank("c"), rank("d")):
        broken.fence(peer, 5)
        answer = told.get(timeout=60)
        assert isinstance(answer, Fenced)
        assert (answer.peer, answer.epoch) == (peer, 5)
    broken.write(rank("c"), 6, 1, [CopyBlock(0, 0, 1, 1)])
    failed = told.get(timeout=60)
    assert isinstance(failed, WriteFailed)
    assert isinstance(failed.error, Internal)
    for side, memory in zip(sides, memories, strict=True):
        side.close()
        memory.close()
    assert len(os.listdir("/proc/self/fd")) == open_before, "what nobody closes while its owner lives"
