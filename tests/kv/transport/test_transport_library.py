"""The base of transports over a library, over one that fails in the worst way (`library_double`)."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from library_ends import PATIENCE_S, End

from areas import whole
from library_double import FAULTS, DoubleTransport
from ranks import options, rank
from segue.kv.errors import BootstrapTimeout, OutOfCapacity, PeerLost, TransferFailed
from segue.kv.ids import RankId
from segue.kv.layout.blocks import CopyBlock
from segue.kv.transport.base import Fenced, PeerGone, WriteFailed, Written
from segue.kv.transport.library import library_transport as library
from segue.kv.transport.library import library_wire
from segue.kv.transport.library.library_out import MAX_IN_FLIGHT_BYTES, WritingPath, pieces
from segue.kv.transport.memory.pool_memory import Memory, host_region

MiB = 2**20


class DoubleEnd(End):
    """A transport over the double, and memory that numpy allocated."""

    def __init__(self, me: RankId, sizes: tuple[int, ...], stall_s: float) -> None:
        memory = Memory([host_region(np.zeros(n, np.uint8)) for n in sizes])
        super().__init__(lambda sink, me: DoubleTransport(sink, options(me, stall_s=stall_s)), me, memory)

    def on_loop(self, call: Callable[[], object]) -> object:
        """The result of `call` on the transport's thread, after all earlier calls."""
        answer: queue.SimpleQueue[object] = queue.SimpleQueue()
        self.transport._loop.post(lambda: answer.put(call()))
        return answer.get(timeout=PATIENCE_S)

    def owed(self) -> list[int]:
        """The messages that the peer of each stream owes us."""
        transport = self.transport
        streams = [*transport._writing.values(), *(path._stream for path in transport._receiving)]
        return [stream._owed for stream in streams]


Ends = Callable[..., tuple[DoubleEnd, DoubleEnd]]


@pytest.fixture
def ends() -> Iterator[Ends]:
    """Makes a writer and a reader, connected; afterwards no thread is left."""
    before = set(threading.enumerate())
    made: list[DoubleEnd] = []

    def make(
        sizes: tuple[int, ...] = (4 * MiB,), *, connect: bool = True, stall_s: float = PATIENCE_S
    ) -> tuple[DoubleEnd, DoubleEnd]:
        writer, reader = (DoubleEnd(rank(word), sizes, stall_s) for word in ("aaaa", "bbbb"))
        made.extend((writer, reader))
        if connect:
            writer.transport.connect(reader.me, reader.endpoint, PATIENCE_S)
        return writer, reader

    yield make
    FAULTS.running.set()
    FAULTS.closing.set()
    for end in made:
        end.transport.close()
    FAULTS.reset()
    for thread in set(threading.enumerate()) - before:
        thread.join(PATIENCE_S)
    assert set(threading.enumerate()) <= before


def start(writer: End, reader: End, epoch: int, *blocks: CopyBlock) -> None:
    """Grant an epoch and write for it."""
    reader.transport.grant(writer.me, epoch, whole(reader.memory.nbytes))
    writer.transport.write(reader.me, epoch, 1, blocks)


def posted(count: int = 1) -> None:
    """Wait until the library has been given so many posts."""
    for _ in range(count):
        assert FAULTS.taken.acquire(timeout=PATIENCE_S)


def until(condition: Callable[[], bool]) -> None:
    """Wait for something that tells nobody."""
    for _ in range(int(PATIENCE_S * 1000)):
        if condition():
            return
        threading.Event().wait(0.001)
    raise AssertionError("it never came")


def lands_nothing(reader: End) -> None:
    """Bytes under way, if any, do not land."""
    for array in reader.arrays:
        array[:] = 0
    FAULTS.running.set()
    assert not any(array.any() for array in reader.arrays)


@pytest.mark.parametrize("how", ["the post raises", "what landed is said to have failed"])
def test_an_error_of_the_library_ends_the_path_and_no_page_is_free_before_the_readers_end_is_closed(
    ends: Ends, how: str
) -> None:
    writer, reader = ends()
    writer.arrays[0][:] = 1
    if how == "the post raises":
        FAULTS.fail_after = 0
        FAULTS.running.clear()
    else:
        FAULTS.says_failed = True
    start(writer, reader, 3, CopyBlock(0, 0, 1, 4 * MiB))
    failed = writer.take(WriteFailed, epoch=3)
    assert isinstance(failed.error, TransferFailed)
    assert not writer.take(PeerGone, peer=reader.me).proven
    assert writer.fenced(reader.me, 3), "the writing end was closed: our memory is quiet"
    assert reader.take(PeerGone, peer=writer.me).proven
    assert reader.fenced(writer.me, 3).proven
    lands_nothing(reader)
    FAULTS.reset()
    writer.transport.connect(reader.me, reader.endpoint, PATIENCE_S)
    start(writer, reader, 4, CopyBlock(0, 0, 1, 100))
    writer.take(Written, epoch=4)


def test_a_fence_at_the_reader_waits_for_the_writers_own_success(ends: Ends) -> None:
    writer, reader = ends()
    writer.arrays[0][:] = 1
    FAULTS.running.clear()
    start(writer, reader, 3, CopyBlock(0, 0, 1, MiB))
    posted()
    reader.transport.grant(writer.me, 4, whole(MiB))
    reader.transport.fence(writer.me, 3)
    assert reader.fenced(writer.me, 4).proven, "one of which nothing is in flight"
    assert not [e for e in reader.log if isinstance(e, Fenced) and e.epoch == 3]
    FAULTS.running.set()
    assert reader.take(Fenced, epoch=3).proven
    assert reader.arrays[0][:MiB].all()
    writer.take(Written, epoch=3)


def test_a_peer_that_answers_no_fence_loses_its_path(ends: Ends) -> None:
    writer, reader = ends()
    FAULTS.running.clear()
    start(writer, reader, 3, CopyBlock(0, 0, 1, MiB))
    posted()

    def hurry() -> None:
        """Until here nobody is late."""
        for path in reader.transport._receiving:
            path._stream._silence._silence_s = 0.2
            path._stream._silence.stop()

    reader.transport._loop.post(hurry)
    assert reader.fenced(writer.me, 3).proven
    assert isinstance(writer.take(PeerGone).error, PeerLost)
    writer.take(WriteFailed, epoch=3)
    lands_nothing(reader)


def test_where_nothing_proves_an_end_the_fence_is_never_answered_and_new_hand_offs_work(ends: Ends) -> None:
    writer, reader = ends()
    FAULTS.unproven = True
    FAULTS.fail_after = 0
    start(writer, reader, 3, CopyBlock(0, 0, 1, 100))
    writer.take(WriteFailed, epoch=3)
    assert not reader.take(PeerGone).proven
    FAULTS.fail_after = None
    writer.transport.connect(reader.me, reader.endpoint, PATIENCE_S)
    start(writer, reader, 4, CopyBlock(0, 0, 1, 100))
    writer.take(Written, epoch=4)
    reader.transport.fence(writer.me, 3)
    assert reader.fenced(writer.me, 4).proven
    assert not [e for e in reader.log if isinstance(e, Fenced) and e.epoch == 3]
    writer.transport.close()
    reader.fenced(writer.me, 5)
    assert not [e for e in reader.log if isinstance(e, PeerGone) and e.proven], "epoch 3 is not over"


def test_a_goodbye_is_a_proof_whatever_the_library_can_prove(ends: Ends) -> None:
    writer, reader = ends()
    FAULTS.unproven = True
    start(writer, reader, 3, CopyBlock(0, 0, 1, 100))
    writer.take(Written, epoch=3)
    writer.transport.close()
    assert reader.take(PeerGone).proven
    assert reader.fenced(writer.me, 3).proven


def test_a_reader_that_cannot_make_its_end_refuses_the_path(ends: Ends) -> None:
    writer, reader = ends(connect=False)
    FAULTS.refuse = "no memory to register with"
    with pytest.raises(PeerLost):
        writer.transport.connect(reader.me, reader.endpoint, PATIENCE_S)
    FAULTS.refuse = ""
    writer.transport.connect(reader.me, reader.endpoint, PATIENCE_S)
    assert not [e for e in writer.log if isinstance(e, PeerGone)], "who asked was told"


def test_connect_has_a_deadline_while_the_library_loads(ends: Ends) -> None:
    FAULTS.loading = threading.Event()
    writer, reader = ends(connect=False)
    with pytest.raises(BootstrapTimeout):
        writer.transport.connect(reader.me, reader.endpoint, 0.1)
    (given_up,) = writer.transport._writing
    FAULTS.loading.set()
    assert given_up.join(PATIENCE_S), "nothing of it is left, though the library is there now"
    writer.on_loop(lambda: None)
    assert not writer.transport._writing
    assert not [e for e in writer.log if isinstance(e, PeerGone)], "who asked was told"
    writer.transport.connect(reader.me, reader.endpoint, PATIENCE_S)
    start(writer, reader, 3, CopyBlock(0, 0, 1, 1))
    writer.take(Written, epoch=3)


@pytest.mark.parametrize("whose", ["writer", "reader"])
def test_a_path_for_which_there_is_no_thread_is_not_made_and_ends_no_other(
    ends: Ends, whose: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host gives a process so many threads."""
    writer, reader = ends(connect=False)
    start_thread = threading.Thread.start

    def refused(thread: threading.Thread) -> None:
        if thread.name == {"writer": "segue-library-out", "reader": "segue-library-in"}[whose]:
            raise RuntimeError("can't start new thread")
        start_thread(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refused)
        with pytest.raises(OutOfCapacity if whose == "writer" else PeerLost):
            writer.transport.connect(reader.me, reader.endpoint, PATIENCE_S)
    assert reader.take(PeerGone).proven
    assert not reader.transport._receiving.of
    until(lambda: not writer.transport._writing)
    writer.transport.connect(reader.me, reader.endpoint, PATIENCE_S)
    start(writer, reader, 3, CopyBlock(0, 0, 1, 1))
    writer.take(Written, epoch=3)


def test_a_transport_closes_whole_while_a_path_that_got_no_thread_is_still_there(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The close, on another thread, may come before the loop has removed the path."""
    writer, reader = ends(connect=False)

    def refused(_path: WritingPath) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(WritingPath, "start", refused)
    monkeypatch.setattr(writer.transport, "_shut", lambda _path: None)
    with pytest.raises(OutOfCapacity, match="no thread for the path"):
        writer.transport.connect(reader.me, reader.endpoint, PATIENCE_S)
    writer.transport.close()
    listener = writer.transport._listener
    assert listener is not None
    assert listener._sock.fileno() == -1
    assert not writer.transport._loop._thread.is_alive()


def test_a_path_whose_thread_starts_after_the_close_ends_and_nobody_waits_for_it(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, reader = ends(connect=False)
    start_path = WritingPath.start

    def late(path: WritingPath) -> None:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(writer.transport.close).result(PATIENCE_S)
        start_path(path)

    monkeypatch.setattr(WritingPath, "start", late)
    with pytest.raises(TransferFailed, match="was closed"):
        writer.transport.connect(reader.me, reader.endpoint, PATIENCE_S)
    assert not writer.transport._loop._thread.is_alive()


def test_a_library_that_is_not_loaded_in_time_is_said_to_be_missing_from_choices(
    ends: Ends, caplog: pytest.LogCaptureFixture
) -> None:
    FAULTS.loading = threading.Event()
    writer, _ = ends(connect=False)
    writer.transport.loaded(0.0)
    assert "library is not loaded after 0 s" in caplog.text
    caplog.clear()
    FAULTS.loading.set()
    writer.transport.loaded(PATIENCE_S)
    assert not caplog.text


def test_regions_that_somebody_else_allocated_on_both_sides(ends: Ends) -> None:
    writer, reader = ends((1000, 5000, 300))
    rng = np.random.default_rng(1)
    for array in writer.arrays:
        array[:] = rng.integers(1, 256, array.nbytes, np.uint8)
    starts = writer.memory.starts
    start(
        writer,
        reader,
        3,
        CopyBlock(starts[0] + 10, starts[1] + 20, 9, 100, 110, 500),
        CopyBlock(starts[2], starts[0], 1, 300),
    )
    writer.take(Written, epoch=3)
    for i in range(9):
        expected = writer.arrays[0][10 + 110 * i : 110 + 110 * i]
        assert np.array_equal(reader.arrays[1][20 + 500 * i : 120 + 500 * i], expected)
    assert np.array_equal(reader.arrays[0][:300], writer.arrays[2])
    start(writer, reader, 4, CopyBlock(starts[1], starts[0] + 900, 1, 101))
    assert "outside the regions" in str(writer.take(WriteFailed, epoch=4).error)
    assert not reader.arrays[0][900:].any()


def test_posts_are_bounded_and_neighbours_are_one_row(ends: Ends) -> None:
    writer, reader = ends((64 * MiB,))
    start(writer, reader, 3, CopyBlock(0, 0, 64, MiB, MiB, MiB), CopyBlock(1, 3, 9000, 1, 3, 5))
    writer.take(Written, epoch=3)
    assert sum(nbytes for _, nbytes in FAULTS.posts) == 64 * MiB + 9000
    assert all(rows <= 2000 and nbytes <= 8 * MiB for rows, nbytes in FAULTS.posts)
    assert [rows for rows, _ in FAULTS.posts][:8] == [1] * 8
    FAULTS.reset()
    FAULTS.running.clear()
    start(writer, reader, 4, CopyBlock(0, 0, 1, 64 * MiB))
    posted(4)
    writer.fenced(reader.me, 99)
    assert sum(nbytes for _, nbytes in FAULTS.posts) == MAX_IN_FLIGHT_BYTES


def test_rows_that_touch_on_one_side_only_stay_apart() -> None:
    (rows,) = pieces([CopyBlock(0, 0, 3, 10, 10, 20), CopyBlock(30, 50, 2, 5, 5, 5)], MiB, 100)
    assert rows.source.tolist() == [[0, 10], [10, 10], [20, 20]]
    assert rows.target.tolist() == [[0, 10], [20, 10], [40, 20]]
    assert rows.nbytes == 40


def test_a_writer_that_connects_anew_keeps_its_grants(ends: Ends) -> None:
    writer, reader = ends()
    reader.transport.grant(writer.me, 3, whole(reader.memory.nbytes))
    again = DoubleEnd(writer.me, (4 * MiB,), PATIENCE_S)
    try:
        again.transport.connect(reader.me, reader.endpoint, PATIENCE_S)
        again.transport.write(reader.me, 3, 1, [CopyBlock(0, 0, 1, 100)])
        again.take(Written, epoch=3)
        writer.take(PeerGone)
        assert not [e for e in reader.log if isinstance(e, PeerGone)]
    finally:
        again.transport.close()


def test_a_path_that_is_ending_is_no_path_to_who_connects(ends: Ends) -> None:
    writer, reader = ends()
    FAULTS.closing.clear()
    reader.transport.close()
    old = writer.transport._paths.of[reader.me]
    until(lambda: old.error is not None)
    with pytest.raises(BootstrapTimeout, match="old library path"):
        writer.transport.connect(reader.me, reader.endpoint, 0.05)
    FAULTS.closing.set()
    again = DoubleEnd(reader.me, (4 * MiB,), PATIENCE_S)
    try:
        writer.transport.connect(again.me, again.endpoint, PATIENCE_S)
        writer.take(PeerGone)
        start(writer, again, 4, CopyBlock(0, 0, 1, 100))
        writer.take(Written, epoch=4)
    finally:
        again.transport.close()


def test_each_side_owes_an_answer_until_it_has_given_it_and_none_afterwards(ends: Ends) -> None:
    """One too many would end a healthy path once nothing is said for a while, one too few none that hangs."""
    writer, reader = ends()
    assert writer.on_loop(writer.owed) == [0], "its greeting was answered"
    assert reader.on_loop(reader.owed) == [0]
    busy, free = threading.Event(), threading.Event()

    def stand_still() -> None:
        busy.set()
        free.wait(PATIENCE_S)

    reader.transport._loop.post(stand_still)
    assert busy.wait(PATIENCE_S)
    writer.transport.write(reader.me, 3, 1, [CopyBlock(0, 0, 1, 100)])
    until(lambda: writer.on_loop(writer.owed) == [1])
    free.set()
    assert writer.take(WriteFailed, epoch=3).refused
    assert writer.on_loop(writer.owed) == [0]
    FAULTS.running.clear()
    start(writer, reader, 4, CopyBlock(0, 0, 1, 100))
    posted()
    reader.transport.fence(writer.me, 4)
    assert reader.on_loop(reader.owed) == [1]
    FAULTS.running.set()
    assert reader.take(Fenced, epoch=4).proven
    assert reader.on_loop(reader.owed) == [0]
    assert writer.on_loop(writer.owed) == [0]


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_new_path_does_not_answer_for_what_the_old_one_may_still_read(ends: Ends, when: str) -> None:
    writer, reader = ends()
    FAULTS.reads_on = True
    FAULTS.fail_after = 0
    start(writer, reader, 3, CopyBlock(0, 0, 1, 100))
    writer.take(PeerGone)
    reader.take(PeerGone)  # with its grants
    FAULTS.fail_after = None
    if when == "before":
        writer.transport.fence(reader.me, 3)
    writer.transport.connect(reader.me, reader.endpoint, PATIENCE_S)
    start(writer, reader, 4, CopyBlock(0, 0, 1, 100))
    writer.take(Written, epoch=4)
    writer.transport.write(reader.me, 3, 2, [CopyBlock(0, 0, 1, 100)])  # a late one, by the new path
    writer.take(WriteFailed, epoch=3, tag=2)
    writer.transport.fence(reader.me, 3)
    assert writer.fenced(reader.me, 4).proven
    assert not [e for e in writer.log if isinstance(e, Fenced) and e.epoch == 3]
    writer.transport.close()
    assert library.STILL_USED.pop()[0] is writer.memory


def test_a_fence_of_one_peer_and_epoch_is_held_back_by_what_is_unquiet_of_it_alone(ends: Ends) -> None:
    writer, reader = ends()
    FAULTS.reads_on = True
    FAULTS.fail_after = 0
    start(writer, reader, 3, CopyBlock(0, 0, 1, 100))
    writer.take(PeerGone)
    for peer, epoch in ((reader.me, 3), (reader.me, 4), (rank("dddd"), 3)):
        writer.transport.fence(peer, epoch)
    writer.on_loop(lambda: None)
    fenced = [event for event in writer.log if isinstance(event, Fenced)]
    assert fenced == [Fenced(reader.me, 4, True), Fenced(rank("dddd"), 3, True)]
    writer.transport.close()
    assert library.STILL_USED.pop()[0] is writer.memory, "else it becomes somebody else's"


# ---- the control stream ----------------------------------------------------------------------------


def test_messages_arrive_whole_however_their_bytes_are_cut() -> None:
    sent = [
        library_wire.ReceiverReady((library_wire.RegionAt(1 << 46, 77, "cuda:0"),), bytes(5000)),
        library_wire.GrantEpoch(2**64 - 1),
        library_wire.AskAnswer(3, False),
        library_wire.Goodbye(),
    ]
    data = b"".join(map(library_wire.frame, sent))
    for step in (1, 7, 4096, len(data)):
        frames, found = library_wire.ControlFrames(), []
        for at in range(0, len(data), step):
            found += frames.feed(data[at : at + step])
        assert found == sent


@pytest.mark.parametrize(
    "data",
    [b"\xff\xff\xff\xff", b"\x01\x00\x00\x00\xc1", library_wire.frame(library_wire.Goodbye())[:-1] + b"x"],
)
def test_what_is_no_message_is_refused(data: bytes) -> None:
    with pytest.raises(TransferFailed):
        library_wire.ControlFrames().feed(data)
