"""The tables of both ends of a `library` path: owed answers, the end of each write, the answer of each fence.
The writing path runs on the test's own thread, with a library whose every answer the test gives."""

from __future__ import annotations

import queue
import select
import threading
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from areas import whole
from hand_loop import HandLoop
from ranks import rank
from segue.kv.errors import OutOfCapacity, PeerLost, PeerRefused, SegueError, TransferFailed
from segue.kv.layout.blocks import CopyBlock
from segue.kv.transport.base import Fenced, PeerGone, TransportEvent, WriteFailed, Written
from segue.kv.transport.epochs import Grants
from segue.kv.transport.library import library_in, library_out, library_wire
from segue.kv.transport.library.library_api import Handle, Library, ReceivingEnd, WritingEnd
from segue.kv.transport.library.library_in import Receiving, ReceivingPath
from segue.kv.transport.library.library_out import WritingPath
from segue.kv.transport.library.library_wire import (
    Ask,
    AskAnswer,
    ControlFrames,
    ControlStream,
    FenceEpoch,
    Goodbye,
    GrantEpoch,
    Greeting,
    Message,
    ReceiverReady,
    RegionAt,
    Settled,
    frame,
)
from segue.kv.transport.memory.pool_memory import Memory, host_region
from segue.kv.transport.tcp.tcp_wire import PartRows
from segue.kv.transport.write_book import Write

PEER = rank("bbbb")
SILENCE_S = 60.0
NBYTES = 10_000

# ---- the writing end ------------------------------------------------------------------------------


class Ended(WritingEnd):
    """`look` is asked what each look finds; `closes` says what closing it gives, or is raised."""

    def __init__(self, path: Writing) -> None:
        self.path = path
        self.posts: list[PartRows] = []
        self.open = self.most = 0

    def post(self, rows: PartRows) -> Handle:
        self.posts.append(rows)
        self.open += 1
        self.most = max(self.most, self.open)
        return len(self.posts)

    def done(self, handle: Handle) -> bool:
        landed = self.path.look(cast("int", handle))
        self.open -= landed
        return landed

    def close(self) -> bool:
        if isinstance(self.path.closes, Exception):
            raise self.path.closes
        return self.path.closes


class Few(Library):
    """A library that takes three rows, or a hundred bytes, at a time."""

    max_rows = 3
    post_bytes = 100

    def receiving(self, *_: Any) -> ReceivingEnd:
        raise NotImplementedError

    def writing(self, *_: Any) -> WritingEnd:
        raise NotImplementedError


class Writing:
    """A path whose thread is the test's: it does what it was asked for, in order, until it has ended."""

    def __init__(
        self, look: Callable[[int], bool] = lambda _n: True, closes: bool | Exception = True
    ) -> None:
        self.look, self.closes = look, closes
        self.now = 1000.0
        self.events: list[TransportEvent] = []
        self.said: list[Message] = []
        self.quiet: list[bool] = []
        self.library: Any = Few()
        self.end = Ended(self)
        self.library.writing = lambda *_: self.end
        self.path = WritingPath(
            "x",
            PEER,
            Memory([host_region(np.zeros(NBYTES, np.uint8))]),
            NBYTES,
            lambda: self.library,
            self.events.append,
            lambda message, _owes: self.said.append(message),
            self._gone,
            silence_s=SILENCE_S,
            clock=lambda: self.now,
        )

    def _gone(self, _path: WritingPath, quiet: bool) -> bool:
        self.quiet.append(quiet)
        return True

    def ready(self, *epochs: int, nbytes: int = NBYTES) -> None:
        """The peer is there and has granted these."""
        self.path.told(ReceiverReady((RegionAt(4096, nbytes, "cpu"),), b""))
        for epoch in epochs:
            self.path.told(GrantEpoch(epoch))

    def write(self, epoch: int, tag: int, rows: int = 1, nbytes: int = 10) -> None:
        block = CopyBlock(0, 0, rows, nbytes, 2 * nbytes, 2 * nbytes)
        self.path.write(Write(epoch, tag, rows * nbytes, self.now), [block])

    def run(self) -> None:
        """Until the end, which something that was asked for brings."""
        self.path._run()

    def told(self, kind: type[TransportEvent]) -> list[tuple[int, ...]]:
        """Epoch and tag of writes, epoch and proof of fences."""
        return [
            (event.epoch, event.proven if isinstance(event, Fenced) else event.tag)
            for event in self.events
            if isinstance(event, kind) and not isinstance(event, PeerGone)
        ]


CLOSES = [True, False, RuntimeError("the library cannot close it")]


@pytest.mark.parametrize("late", [(3, 4, 4, 5), (4, 4, 5)])
@pytest.mark.parametrize("closes", CLOSES, ids=["quiet", "unquiet", "raises"])
def test_fences_that_wait_and_come_while_a_path_breaks_are_answered_where_that_is_true(
    closes: bool | Exception, late: tuple[int, ...]
) -> None:
    """Nothing says that the library has stopped to read for epoch 3; of the others nothing was posted."""

    def breaks(_n: int) -> bool:
        writing.path.fence(3)
        writing.path.end(TransferFailed("broken"))
        for epoch in late:
            writing.path.fence(epoch)
        writing.write(5, 9)
        return False

    writing = Writing(breaks, closes)
    writing.ready(3)
    writing.write(3, 1)
    writing.run()
    quiet = closes is True
    assert writing.told(WriteFailed) == [(3, 1), (5, 9)]
    of_3 = [(3, False)] * (1 + late.count(3)) if quiet else []
    assert sorted(writing.told(Fenced)) == [*of_3, (4, True), (4, True), (5, True)]
    assert writing.quiet == [quiet]
    assert writing.path.unsettled == {3}
    assert Goodbye() not in writing.said, "which would be a proof to the reader"
    assert isinstance(writing.events[-1], PeerGone)


def test_what_is_asked_of_a_path_that_never_opens_has_an_end() -> None:
    writing = Writing()

    def fails() -> Library:
        raise RuntimeError("no driver")

    writing.path._library = fails
    writing.write(3, 1)
    writing.path.fence(3)
    writing.write(4, 2)
    writing.run()
    assert writing.told(WriteFailed) == [(3, 1), (4, 2)]
    assert writing.told(Fenced) == [(3, True)]
    assert writing.said == [Goodbye()]
    assert "no driver" in str(writing.path.error)


def test_a_write_that_never_lands_ends_the_path() -> None:
    def waits(_n: int) -> bool:
        writing.now += 10.0
        if writing.now > 2000.0:
            writing.path.end(TransferFailed("it would have waited for ever"))
        return False

    writing = Writing(waits)
    writing.ready(3)
    writing.write(3, 1)
    writing.run()
    assert "nothing has landed" in str(writing.path.error)
    assert 1000.0 + SILENCE_S < writing.now <= 1000.0 + SILENCE_S + 20.0


@pytest.mark.parametrize("stopped_s", [SILENCE_S / 2 + 1, 3600.0])
def test_a_write_after_a_long_rest_and_a_process_that_was_stopped_have_their_whole_time(
    stopped_s: float,
) -> None:
    steps = [
        0.0,
        10.0,
        stopped_s,
        29.0,
        29.0,
        0.0,
    ]  # between two looks; the process stands still in the third

    def looked(n: int) -> bool:
        if n == 1:
            writing.now += 3600.0  # and nothing to do for an hour
            writing.path.told(GrantEpoch(4))
            writing.write(4, 2)
            return True
        writing.now += steps.pop(0)
        if not steps:
            writing.path.close()
        return not steps

    writing = Writing(looked)
    writing.ready(3)
    writing.write(3, 1)
    writing.run()
    assert writing.told(Written) == [(3, 1), (4, 2)]
    assert writing.said[-1] == Goodbye()


def test_no_post_is_larger_than_its_library_takes_and_not_too_many_are_under_way() -> None:
    def lands(n: int) -> bool:
        rounds.append(n)
        if n == 100 + 3:
            writing.path.close()
        return len(rounds) > 3 * library_out.MAX_IN_FLIGHT_POSTS

    rounds: list[int] = []
    writing = Writing(lands)
    writing.ready(3)
    writing.write(3, 1, rows=3 * 100)
    writing.write(3, 2, rows=1, nbytes=250)
    writing.run()
    assert {len(rows.source) for rows in writing.end.posts} == {3, 1}
    assert max(rows.nbytes for rows in writing.end.posts) == 100
    assert writing.end.most == library_out.MAX_IN_FLIGHT_POSTS
    assert writing.told(Written) == [(3, 1), (3, 2)]


@pytest.mark.parametrize("nbytes", [NBYTES - 1, NBYTES + 1])
def test_a_peer_whose_memory_is_another_than_its_endpoint_says_is_not_written_to(nbytes: int) -> None:
    writing = Writing()
    writing.ready(3, nbytes=nbytes)
    writing.write(3, 1)
    writing.run()
    assert isinstance(writing.path.error, PeerRefused)
    assert writing.told(WriteFailed) == [(3, 1)]
    assert writing.end.posts == []


@pytest.mark.parametrize("how", ["granted", "refused", "fenced", "ended"])
def test_writes_that_wait_for_one_answer_have_all_the_same_end(how: str) -> None:
    writing = Writing()
    writing.ready()
    for tag in (1, 2, 3):
        writing.write(3, tag)
    if how == "fenced":
        writing.path.fence(3)
    if how != "ended":
        writing.path.told(AskAnswer(3, how != "refused"))  # of a fence, the answer comes too late
        writing.path.told(GrantEpoch(4))
        writing.write(4, 4)
        writing.look = lambda _n: writing.path.close() is None
    else:
        writing.path.end(TransferFailed("ended"))
    writing.run()
    assert writing.said.count(Ask(3)) == 1
    wanted = [(3, 1), (3, 2), (3, 3)]
    assert writing.told(Written) == [(3, n) for n in (1, 2, 3) if how == "granted"] + [(4, 4)] * (
        how != "ended"
    )
    failed = [e for e in writing.events if isinstance(e, WriteFailed)]
    assert [(e.epoch, e.tag) for e in failed] == wanted * (how != "granted")
    assert {e.refused for e in failed} <= {how == "refused"}
    assert writing.told(Fenced) == [(3, True)] * (how == "fenced")


def test_the_peers_fence_is_settled_once_when_what_was_posted_has_landed() -> None:
    def runs(_n: int) -> bool:
        writing.path.told(FenceEpoch(3))
        writing.look = lands
        return False

    def lands(_n: int) -> bool:
        assert Settled(3) not in writing.said, "a post is under way"
        writing.write(3, 2)  # late: it is asked for again, and refused
        writing.path.told(AskAnswer(3, False))
        writing.path.close()
        return True

    writing = Writing(runs)
    writing.ready(3)
    writing.write(3, 1)
    writing.run()
    assert writing.said.count(Settled(3)) == 1
    assert writing.told(Written) == [(3, 1)]
    assert [(e.tag, e.refused) for e in writing.events if isinstance(e, WriteFailed)] == [(2, True)]


def test_what_waits_of_an_epoch_that_the_peer_has_ended_is_never_posted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It would land behind our word that nothing does any more."""
    monkeypatch.setattr(library_out, "MAX_IN_FLIGHT_POSTS", 1)

    def runs(_n: int) -> bool:
        writing.path.told(FenceEpoch(3))
        writing.look = lands
        return False

    def lands(_n: int) -> bool:
        writing.path.close()
        return True

    writing = Writing(runs)
    writing.ready(3)
    for tag in (1, 2):
        writing.write(3, tag)
    writing.run()
    assert len(writing.end.posts) == 1
    assert [(e.tag, e.refused) for e in writing.events if isinstance(e, WriteFailed)] == [(2, True)]


@pytest.mark.parametrize("order", [(1, 2, 3), (3, 2, 1), (2, 1, 3)])
def test_an_epoch_is_over_when_all_its_posts_have_landed_in_whatever_order(order: tuple[int, ...]) -> None:
    """The first post is of another epoch, which nobody ends."""
    looks = before = 0

    def looked(n: int) -> bool:
        nonlocal looks, before
        looks, before = looks + (n <= before), n
        if (looks, n) == (0, 1):
            writing.path.told(FenceEpoch(3))
            writing.path.fence(3)
            writing.path.close()
        assert Settled(3) not in writing.said or looks > max(order.index(2), order.index(3)) + 1
        return looks > order.index(n)

    writing = Writing(looked)
    writing.ready(3, 4)
    for epoch, tag in ((4, 1), (3, 2), (3, 3)):
        writing.write(epoch, tag)
    writing.run()
    ends = [
        event.proven if isinstance(event, Fenced) else getattr(event, "tag", None)
        for event in writing.events[:-1]
    ]
    over = max(order.index(2), order.index(3)) + 1
    assert ends == [*order[:over], True, *order[over:]]
    assert writing.said.count(Settled(3)) == 1


def test_what_a_peer_grants_and_what_waits_for_it_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library_out, "MAX_GRANTS", 2)
    writing = Writing()
    writing.ready(3, 4, 5)
    writing.run()
    assert isinstance(writing.path.error, OutOfCapacity)
    monkeypatch.setattr(library_out, "MAX_WAITING", 4)
    writing = Writing(lambda _n: writing.path.close() is None)
    writing.ready(3)
    writing.write(3, 1, rows=12)
    writing.write(3, 2)
    writing.run()
    assert [(e.tag, type(e.error)) for e in writing.events if isinstance(e, WriteFailed)] == [
        (2, OutOfCapacity)
    ]


# ---- the control stream ---------------------------------------------------------------------------


class Loop(HandLoop):
    """One that keeps what it was asked to watch; calls of other threads wait until the test takes them."""

    def __init__(self) -> None:
        super().__init__()
        self.events = 0
        self.ready: Callable[[int], None] = print
        self.posted: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()

    def watch(self, _fd: int, events: int, ready: Callable[[int], None]) -> None:
        self.events, self.ready = events, ready

    def change(self, _fd: int, events: int) -> None:
        self.events = events

    def post(self, call: Callable[[], None]) -> None:
        self.posted.put(call)

    def next(self) -> None:
        """One call, which a thread will have given."""
        self.posted.get(timeout=60)()


class Line:
    """A channel that takes `room` bytes and gives what `hears` was told."""

    buffered = False

    def __init__(self, room: int = 2**30) -> None:
        self.room = room
        self.sent = bytearray()
        self.data: list[bytes] = []
        self.closed = False

    def fileno(self) -> int:
        return 7

    def send(self, data: bytes) -> int:
        taken = data[: self.room]
        self.room -= len(taken)
        self.sent += taken
        return len(taken)

    def receive(self, _nbytes: int) -> bytes | None:
        return self.data.pop(0) if self.data else None

    def close(self, *, reset: bool = False) -> None:
        self.closed = True


class Stream:
    """A control stream, what it told, and how it ended."""

    def __init__(self, line: Line | None = None) -> None:
        self.line, self.loop = line or Line(), Loop()
        self.told: list[Message] = []
        self.ends: list[SegueError] = []
        self.stream = ControlStream(
            cast("Any", self.loop),
            cast("Any", self.line),
            PEER,
            self.told.append,
            self.ends.append,
            SILENCE_S,
        )

    def hears(self, *messages: Message) -> None:
        self.line.data.append(b"".join(map(frame, messages)))
        self.loop.ready(select.EPOLLIN)


def test_a_message_that_does_not_fit_is_sent_when_there_is_room_and_then_nobody_waits_for_room() -> None:
    made = Stream(Line(room=100))
    made.stream.open()
    messages = [Greeting(bytes(50_000)), Ask(3), Ask(4)]
    for message in messages:
        made.stream.send(message)
    assert made.loop.events == select.EPOLLIN | select.EPOLLOUT
    for room in (7, 20_000, 10**6):
        made.line.room = room
        made.loop.ready(select.EPOLLOUT)
    assert ControlFrames().feed(bytes(made.line.sent)) == messages
    assert made.loop.events == select.EPOLLIN, "else the loop would turn without an end"
    assert not made.ends


def test_a_peer_that_does_not_read_ends_before_our_memory_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library_wire, "MAX_UNSENT_BYTES", 1000)
    made = Stream(Line(room=0))
    made.stream.open()
    for epoch in range(1000):
        made.stream.send(Ask(epoch))
    assert not made.ends, "who says something is at work on what the end of the stream ends"
    made.loop.next()
    assert ["does not read" in str(error) for error in made.ends] == [True]
    assert made.line.closed


def test_a_process_that_was_stopped_gives_its_peers_time_to_answer() -> None:
    made = Stream()
    made.stream.open()
    made.stream.expect()
    made.loop.stand_still(10 * SILENCE_S)
    assert not made.ends, "the answer may wait in the socket"
    made.loop.advance(SILENCE_S)
    assert ["said nothing" in str(error) for error in made.ends] == [True]


def test_silence_counts_from_the_question_and_not_from_an_old_answer() -> None:
    made = Stream()
    made.stream.open()
    made.stream.expect()
    made.stream.answered()
    made.loop.advance(0.9 * SILENCE_S)
    made.stream.expect()
    made.loop.advance(0.9 * SILENCE_S)
    assert not made.ends
    made.loop.advance(0.5 * SILENCE_S)
    assert len(made.ends) == 1


def test_a_goodbye_is_heard_though_nobody_reads_our_answer_any_more() -> None:
    """The peer says goodbye and closes; we have not read that yet, and what we say to it fails."""

    def broken(_data: bytes) -> int:
        raise BrokenPipeError(32, "Broken pipe")

    made = Stream()
    made.line.send = broken
    made.stream.open()
    made.stream.send(AskAnswer(3, True))
    assert not made.ends
    made.hears(Goodbye())
    made.hears()
    assert made.told == [Goodbye()]
    assert len(made.ends) == 1


def test_a_peer_that_says_anything_is_there() -> None:
    """Its answer may take longer than other things that it has to say."""
    made = Stream()
    made.stream.open()
    for _ in range(3):
        made.stream.expect()
    assert len(made.loop.timers) == 1
    for epoch in range(4):
        made.loop.advance(0.9 * SILENCE_S)
        made.hears(GrantEpoch(epoch))
    assert not made.ends
    made.loop.advance(1.1 * SILENCE_S)
    assert ["said nothing" in str(error) for error in made.ends] == [True]


def test_nothing_is_told_after_the_end_of_a_stream() -> None:
    made = Stream()
    made.stream._told = lambda message: (made.told.append(message), made.stream.close())[1]
    made.stream.open()
    made.hears(Settled(3), Settled(4))
    assert made.told == [Settled(3)]
    made.stream.send(Ask(3), owes=True)
    made.loop.advance(10 * SILENCE_S)
    assert not made.ends
    assert not made.line.sent


def test_a_stream_that_cannot_be_watched_ends() -> None:
    made = Stream()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    made.loop.watch = full  # type: ignore[method-assign]
    made.stream.open()
    assert ["cannot be watched" in str(error) for error in made.ends] == [True]
    assert made.line.closed


@pytest.mark.parametrize("over", [0, 1])
def test_a_message_may_be_as_long_as_the_limit_and_no_longer(over: int) -> None:
    head = (library_wire.MAX_FRAME_BYTES + over).to_bytes(4, "little")
    if over:
        with pytest.raises(TransferFailed, match="longer than the limit"):
            ControlFrames().feed(head)
    else:
        assert ControlFrames().feed(head) == []


# ---- the receiving end ----------------------------------------------------------------------------


class Receives(ReceivingEnd):
    """An end whose closing gives `closes`, or raises it."""

    blob = b"blob"

    def __init__(self, closes: bool | Exception) -> None:
        self.closes = closes

    def close(self) -> bool:
        if isinstance(self.closes, Exception):
            raise self.closes
        return self.closes


class Incoming:
    """A writer's path as the receiver has it. `made` holds back the library until it is set."""

    def __init__(self, closes: bool | Exception = True) -> None:
        self.loop, self.line, self.grants = Loop(), Line(), Grants()
        self.made = threading.Event()
        self.made.set()
        self.granted: list[ReceivingPath] = []
        self.ends: list[tuple[SegueError, set[int]]] = []
        library = SimpleNamespace(receiving=lambda *_: self.made.wait(60) and Receives(closes))
        self.path = ReceivingPath(
            "x",
            cast("Any", self.loop),
            cast("Any", self.line),
            PEER,
            Memory([host_region(np.zeros(NBYTES, np.uint8))]),
            lambda: cast("Any", library),
            self.grants,
            self.granted.append,
            lambda path, error: self.ends.append((error, set(path.epochs))),
            silence_s=SILENCE_S,
        )
        self.path.open()

    def hears(self, *messages: Message) -> None:
        self.line.data.append(b"".join(map(frame, messages)))
        self.loop.ready(select.EPOLLIN)

    def greets(self) -> None:
        """It says who it is, and its end is made."""
        self.hears(Greeting(b"hello"))
        self.loop.next()

    def said(self) -> list[Message]:
        return ControlFrames().feed(bytes(self.line.sent))

    def close(self) -> None:
        self.path.end(TransferFailed("the test is over"))
        assert self.path.join(60)


@pytest.fixture
def incoming() -> Iterator[Callable[..., Incoming]]:
    made: list[Incoming] = []

    def make(**fields: Any) -> Incoming:
        made.append(Incoming(**fields))
        return made[-1]

    yield make
    for each in made:
        each.made.set()
        each.close()


Make = Callable[..., Incoming]


def test_a_writer_that_never_greets_does_not_keep_its_place(incoming: Make) -> None:
    one = incoming()
    one.loop.advance(SILENCE_S - 1)
    assert not one.ends
    one.loop.advance(2 * SILENCE_S)
    assert [type(error) for error, _ in one.ends] == [PeerLost]


def test_a_writer_that_leaves_before_it_has_greeted_is_forgotten(incoming: Make) -> None:
    one = incoming()
    one.hears()  # an end of the stream, and no byte
    assert [type(error) for error, _ in one.ends] == [PeerLost]


def test_a_writer_that_owes_nothing_may_be_silent_for_ever(incoming: Make) -> None:
    one = incoming()
    one.greets()
    assert one.granted == [one.path]
    one.loop.advance(10 * SILENCE_S)
    assert one.path.over is None
    done: list[int] = []
    one.path.grant(3)
    one.path.fence(3, lambda: done.append(3))
    one.loop.advance(SILENCE_S - 1)
    assert not done
    one.hears(Settled(3))
    assert done == [3]
    one.loop.advance(10 * SILENCE_S)
    assert one.path.over is None
    assert one.said()[1:] == [GrantEpoch(3), FenceEpoch(3)]


@pytest.mark.parametrize("what", [Settled(3), AskAnswer(3, True), GrantEpoch(3), Greeting(b"again")])
def test_a_writer_that_says_what_is_not_its_turn_is_ended(incoming: Make, what: Message) -> None:
    one = incoming()
    one.greets()
    one.path.grant(3)
    one.hears(what)
    one.loop.next()
    assert [type(error) for error, _ in one.ends] == [TransferFailed]


def test_what_a_writer_asks_for_is_granted_only_if_it_is(incoming: Make) -> None:
    one = incoming()
    one.grants.add(PEER, 3, whole(10))
    one.grants.add(rank("cccc"), 4, whole(10))
    one.greets()
    one.hears(Ask(3), Ask(4))
    assert one.said()[1:] == [AskAnswer(3, True), AskAnswer(4, False)]
    assert one.path.epochs == {3}


@pytest.mark.parametrize("closes", CLOSES, ids=["proof", "no proof", "raises"])
def test_what_a_writer_was_granted_is_over_when_closing_its_end_proves_that(
    incoming: Make, closes: bool | Exception
) -> None:
    one, done = incoming(closes=closes), list[int]()
    one.greets()
    one.path.grant(3)
    one.path.fence(3, lambda: done.append(3))
    one.line.data.append(b"")
    one.loop.ready(select.EPOLLIN)
    one.loop.next()
    proven = closes is True
    assert done == [3] * proven
    assert [epochs for _, epochs in one.ends] == [set() if proven else {3}]
    assert one.path.quiet is proven


def test_a_path_that_ended_while_its_end_was_made_is_granted_nothing(incoming: Make) -> None:
    """Where closing it is no proof, what it was granted would be lost for good."""
    one = incoming(closes=False)
    one.made.clear()
    one.hears(Greeting(b"hello"))
    one.line.data.append(b"")
    one.loop.ready(select.EPOLLIN)
    one.made.set()
    for _ in range(2):
        one.loop.next()
    assert one.granted == []
    assert not one.path.ready
    assert [epochs for _, epochs in one.ends] == [set()]


# ---- all writers ----------------------------------------------------------------------------------


class Old:
    """A path as `Receiving` sees it."""

    def __init__(self, epochs: Sequence[int], over: SegueError | None = None) -> None:
        self.peer, self.epochs, self.over, self.ready = PEER, set(epochs), over, True
        self.fences: list[Callable[[], None]] = []

    def fence(self, _epoch: int, done: Callable[[], None]) -> None:
        self.fences.append(done)

    def end(self, error: SegueError) -> None:
        self.over = self.over or error

    def open(self) -> None: ...


def receiving(*paths: Old) -> tuple[Receiving, list[TransportEvent]]:
    events: list[TransportEvent] = []
    made = Receiving(threading.Lock(), Grants(), events.append, lambda *_: cast("Any", Old(())))
    if paths:
        made.of[PEER] = cast("Any", list(paths))
    return made, events


def admit(made: Receiving, word: str = "bbbb") -> None:
    made.admit(cast("Any", Line()), rank(word), b"yes")


def test_an_epoch_that_two_paths_of_a_writer_held_is_over_when_it_is_for_both() -> None:
    """It connected anew in mid-write: what its old path has sent may land whatever the new one says."""
    old, new, other = Old([3, 4], PeerLost("broken", peer="x")), Old([3]), Old([5])
    made, _ = receiving(old, new, other)
    done: list[str] = []
    made.fence(PEER, 3, lambda: done.append("over"))
    assert (len(old.fences), len(new.fences), len(other.fences)) == (1, 1, 0)
    new.fences[0]()
    assert not done
    old.fences[0]()
    assert done == ["over"]
    made.fence(PEER, 6, lambda: done.append("unknown"))
    assert done == ["over", "unknown"]


def test_paths_that_broke_without_a_proof_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = [Old([n], PeerLost("broken", peer="x")) for n in range(library_in.MAX_PATHS_PER_RANK)]
    made, _ = receiving(*broken)
    with pytest.raises(PeerRefused, match="too many paths"):
        admit(made)
    admit(made, "cccc")
    monkeypatch.setattr(library_in, "MAX_PATHS", len(broken) + 1)
    with pytest.raises(PeerRefused, match="too many paths"):
        admit(made, "dddd")


def test_a_writer_that_connects_anew_has_one_path() -> None:
    old = Old([3])
    made, events = receiving(old)
    admit(made)
    assert "connects anew" in str(old.over)
    assert [path.over for path in made.of[PEER]][1:] == [None]
    made._grants.add(PEER, 3, whole(10))
    made._gone(cast("Any", old), cast("SegueError", old.over))
    assert (events, made._grants.of(PEER)) == ([], [3]), "it is here again"
