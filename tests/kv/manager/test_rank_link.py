"""The link between a leader and a rank's process, in virtual time: who is heard, and who is given up; and
over sockets: what the engine says over it beside the hand-off."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from hand_loop import HandLoop
from segue.kv import process_link
from segue.kv.errors import PeerLost, RequestTooLarge, SegueError, TransferFailed
from segue.kv.io import IoThread
from segue.kv.limits import Limits
from segue.kv.process_link import Frames, PingCommand, PongAnswer, encode
from segue.kv.ranks import rank_link
from segue.kv.ranks import rank_wire as wire
from segue.kv.ranks.rank_link import RankLink


class Wire:
    """An asyncio transport that notes what is written to it; what is not read stays in its buffer."""

    def __init__(self) -> None:
        self.said: list[Any] = []
        self.frames = Frames(wire.HandOff)
        self.unread = 0
        self.closing = self.aborted = False

    def write(self, data: bytes) -> None:
        self.said += self.frames.feed(data)

    def get_write_buffer_size(self) -> int:
        return self.unread

    def is_closing(self) -> bool:
        return self.closing

    def close(self) -> None:
        self.closing = True

    def abort(self) -> None:
        self.aborted = True


class Rig:
    """A link on a loop whose time the test tells."""

    def __init__(self, *, ping: bool = True, connected: bool = True) -> None:
        self.heard: list[Any] = []
        self.ended: list[tuple[SegueError, bool]] = []
        self.loop, self.wire = HandLoop(), Wire()
        io: Any = SimpleNamespace(loop=self.loop, call=lambda coroutine, _: coroutine.close())
        limits = Limits(max_session_backlog_bytes=100, keepalive_s=1.0, peer_silence_s=5.0)
        self.link = RankLink(None, "the worker", limits=limits, io=io)  # type: ignore[arg-type]
        if connected:
            self.link.connection_made(self.wire)  # type: ignore[arg-type]
        self.attach(ping)

    def attach(self, ping: bool = False) -> None:
        self.link.attach(self.heard.append, lambda *what: self.ended.append(what), ping=ping)

    def hears(self, *messages: Any) -> None:
        self.link.data_received(b"".join(map(encode, messages)))


PING, PONG, DONE = PingCommand(), PongAnswer(), wire.DoneAnswer(1)


def test_a_question_whether_one_is_there_is_answered_and_is_no_message() -> None:
    rig = Rig(ping=False)
    rig.hears(PING, DONE, PONG, PING)
    assert (rig.heard, rig.wire.said) == ([DONE], [PONG, PONG])
    assert rig.loop.timers == [], "who does not ask does not wait for answers either"


def test_who_is_silent_for_too_long_is_given_up_once_and_its_end_is_told_when_it_is_known() -> None:
    rig = Rig()
    for _ in range(20):
        rig.loop.advance(1.0)
        rig.hears(PONG)
    assert rig.wire.said == [PING] * 20
    rig.loop.advance(4.5)
    assert rig.ended == [], "it may be silent for 5"
    rig.loop.advance(0.5)
    [(error, over)] = rig.ended
    assert (type(error), over) == (PeerLost, False)
    assert "the worker has said nothing for 5.0 s" in str(error)
    assert rig.loop.timers == []
    said = list(rig.wire.said)
    rig.hears(DONE)
    rig.link.send(DONE)
    assert (rig.heard, rig.wire.said, rig.wire.closing) == ([], said, False), "that it has ended is no guess"
    rig.link.connection_lost(None)
    rig.link.connection_lost(None)
    assert rig.ended == [(error, False), (error, True)]


@pytest.mark.parametrize("stood_s", [2.5, 30.0])
def test_who_stood_still_itself_for_more_than_a_question_takes_no_other_for_silent(stood_s: float) -> None:
    rig = Rig()
    rig.loop.advance(4.0)  # it may be silent for 5
    rig.loop.stand_still(stood_s)
    assert rig.ended == []
    rig.loop.advance(4.5)
    assert rig.ended == []
    rig.loop.advance(0.5)
    assert [over for _, over in rig.ended] == [False], "it was asked anew, and has said nothing since"


def test_one_that_need_not_speak_is_never_given_up() -> None:
    rig = Rig(ping=False)
    rig.loop.advance(1000.0)
    assert rig.ended == []
    rig.link.connection_lost(None)
    [(error, over)] = rig.ended
    assert (str(error), over) == ("the worker has ended", True)


def test_nonsense_is_the_end_of_what_is_heard_and_not_of_the_connection() -> None:
    rig = Rig()
    rig.link.data_received(b"\x00\x00\x00\x01\xc1")
    rig.link.data_received(b"\x00\x00\x00\x01\xc1")
    rig.hears(DONE)
    [(error, over)] = rig.ended
    assert (type(error), over, rig.heard, rig.wire.closing) == (TransferFailed, False, [], False)


@pytest.mark.parametrize(("unread", "lost"), [(100, False), (101, True)])
def test_who_does_not_read_more_than_may_wait_is_given_up(unread: int, lost: bool) -> None:
    rig = Rig()
    rig.wire.unread = unread
    rig.link.send(DONE)
    assert rig.wire.said == ([] if lost else [DONE])
    assert [(type(error), over) for error, over in rig.ended] == ([(PeerLost, False)] if lost else [])


@pytest.mark.parametrize("over", [False, True])
def test_who_comes_after_the_end_hears_of_it(over: bool) -> None:
    rig = Rig()
    rig.wire.unread = 101
    rig.link.send(DONE)
    if over:
        rig.link.connection_lost(None)
    rig.ended.clear()
    rig.attach()
    assert [(type(error), over) for error, over in rig.ended] == [(PeerLost, over)]


def test_after_our_own_end_nobody_is_told_of_anything_any_more() -> None:
    async def main() -> None:
        rig = Rig()
        closing = asyncio.ensure_future(rig.link._hang_up())
        await asyncio.sleep(0)
        assert (rig.wire.closing, rig.loop.timers) == (True, [])
        rig.hears(DONE)
        rig.link.send(DONE)
        rig.link.data_received(b"\xff\xff\xff\xff")
        rig.link.connection_lost(None)
        await closing
        assert (rig.heard, rig.ended, rig.wire.said) == ([], [], [])

    asyncio.run(main())


@pytest.mark.parametrize("given_up", [True, False])
def test_the_end_of_our_side_waits_for_what_is_still_to_be_read_unless_the_other_is_given_up(
    given_up: bool,
) -> None:
    async def main() -> None:
        rig = Rig()
        if given_up:
            rig.loop.advance(6.0)
        closing = asyncio.ensure_future(rig.link._hang_up())
        for _ in range(5):
            await asyncio.sleep(0)
        assert rig.wire.aborted is given_up
        assert not closing.done(), "its end of the socket is not closed before this is told"
        rig.link.connection_lost(None)
        await closing

    asyncio.run(main())


def test_one_that_was_never_connected_says_nothing_and_is_closed_at_once() -> None:
    rig = Rig(connected=False)
    rig.link.send(DONE)
    asyncio.run(asyncio.wait_for(rig.link._hang_up(), 60))
    assert rig.wire.said == []


# ---- what the engine says ----------------------------------------------------------------------------


class Count(msgspec.Struct, frozen=True, tag=True):
    """A message of an engine."""

    number: int
    filler: bytes = b""


@pytest.fixture
def ends() -> Iterator[tuple[RankLink, RankLink, socket.socket]]:
    """Both ends, and the socket of the second one."""
    ours, theirs = socket.socketpair()
    raw = theirs.dup()
    made = [RankLink(sock, name, messages=Count) for sock, name in ((ours, "rank 1"), (theirs, "the leader"))]
    yield made[0], made[1], raw
    for link in made:
        link.close()
    raw.close()


def test_messages_of_the_engine_come_in_their_order_beside_those_of_the_hand_off(ends: Any) -> None:
    one, other, _ = ends
    heard = list[Any]()
    for link in (one, other):
        link.io.post(link.attach, heard.append, lambda *_: None)
        link.io.call(asyncio.sleep(0), 60)
    for number in range(50):
        other.post(DONE)
        other.post(Count(number))
    assert [one.receive(60.0) for _ in range(50)] == [Count(number) for number in range(50)]
    assert heard == [DONE] * 50
    one.post(Count(7))
    assert other.receive() == Count(7)


def test_as_much_as_is_allowed_and_no_byte_more_is_sent_or_taken(
    ends: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other, raw = ends
    longest = Count(1, bytes(100))
    nbytes = len(encode(longest)) - process_link.HEAD.size
    monkeypatch.setattr(process_link, "MAX_BYTES", nbytes)
    one.post(longest)
    assert other.receive(60.0) == longest
    with pytest.raises(RequestTooLarge, match=f"{nbytes + 1} bytes; at most {nbytes}"):
        one.post(Count(1, bytes(101)))
    raw.sendall(process_link.HEAD.pack(nbytes + 1))
    with pytest.raises(TransferFailed, match=f"a frame of {nbytes + 1} bytes"):
        one.receive(60.0)


def test_who_says_nothing_in_its_time_or_ends_is_lost_and_what_it_said_before_is_heard(ends: Any) -> None:
    one, other, raw = ends
    raw.close()
    with pytest.raises(PeerLost, match="rank 1 said nothing in the time"):
        one.receive(0.01)
    other.post(Count(3))
    other.close()
    assert one.receive(60.0) == Count(3)
    for _ in range(2):
        with pytest.raises(PeerLost, match="rank 1 has ended"):
            one.receive(60.0)
    one.post(Count(4))  # nobody is there any more, and nobody minds
    one.close()
    one.close()
    with pytest.raises(PeerLost):
        one.receive(60.0)


def test_who_says_more_than_it_is_asked_is_given_up_before_it_fills_our_memory(ends: Any) -> None:
    one, other, _ = ends
    lost = threading.Event()
    one.io.post(one.attach, lambda _: None, lambda *_: lost.set())
    for number in range(rank_link.MAX_WAITING + 1):
        other.post(Count(number))
    assert lost.wait(60)
    assert [one.receive(60.0).number for _ in range(rank_link.MAX_WAITING)] == list(
        range(rank_link.MAX_WAITING)
    )
    with pytest.raises(PeerLost, match="says more than it is asked"):
        one.receive(60.0)


def test_a_link_that_carries_more_outlives_a_role_and_hears_nothing_of_the_one_before(ends: Any) -> None:
    one, other, _ = ends
    first, second = list[Any](), list[Any]()
    one.io.post(one.attach, first.append, lambda *_: None)
    one.release()
    other.post(DONE)
    other.post(Count(1))
    assert one.receive(60.0) == Count(1)
    one.io.post(one.attach, second.append, lambda *_: None)
    one.io.call(asyncio.sleep(0), 60)
    other.post(wire.DoneAnswer(2))
    other.post(Count(2))
    assert one.receive(60.0) == Count(2)
    assert (first, second) == ([], [wire.DoneAnswer(2)])


# ---- the loop of another thread ----------------------------------------------------------------------


def test_what_takes_too_long_on_the_io_thread_is_cancelled_there() -> None:
    io, cancelled = IoThread(), threading.Event()

    async def for_ever() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    async def answer() -> int:
        return 7

    io.start()
    assert io.running
    with pytest.raises(TimeoutError):
        io.call(for_ever(), 0.05)
    assert cancelled.wait(60)
    assert io.call(answer(), 20) == 7
    io.stop()
    io.stop()
    assert not io.running
    io.post(lambda: None)  # nobody is there any more, and nobody minds
    never = IoThread()
    never.stop()
    assert never.loop.is_closed()
