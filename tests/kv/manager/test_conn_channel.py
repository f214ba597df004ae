"""The channel between a leader and a rank's process, in virtual time: who is heard, and who is given up."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from hand_loop import HandLoop
from segue.kv.errors import PeerLost, SegueError, TransferFailed
from segue.kv.io import IoThread
from segue.kv.ranks import rank_wire as wire
from segue.kv.ranks.rank_channel import RankChannel


class Wire:
    """An asyncio transport that notes what is written to it; what is not read stays in its buffer."""

    def __init__(self) -> None:
        self.said: list[Any] = []
        self.frames = wire.Frames(wire.Command | wire.Answer)
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
    def __init__(self, **options: Any) -> None:
        self.heard: list[Any] = []
        self.ended: list[tuple[SegueError, bool]] = []
        self.loop, self.wire = HandLoop(), Wire()
        options = {"backlog_bytes": 100, "ping_s": 1.0, "silence_s": 5.0, **options}
        self.channel = RankChannel(
            "the worker",
            wire.Frames(wire.Command | wire.Answer),
            self.heard.append,
            lambda error, over: self.ended.append((error, over)),
            **options,
        )
        self.channel._loop = self.loop  # type: ignore[assignment]
        self.channel.connection_made(self.wire)  # type: ignore[arg-type]

    def hears(self, *messages: Any) -> None:
        self.channel.data_received(b"".join(map(wire.encode, messages)))


def run(test: Callable[[], Any]) -> None:
    async def main() -> None:
        found = test()
        if found is not None:
            await found

    asyncio.run(main())


PING, PONG, DONE = wire.PingCommand(), wire.PongAnswer(), wire.DoneAnswer(1)


def test_a_question_whether_one_is_there_is_answered_and_is_no_message() -> None:
    def test() -> None:
        rig = Rig(ping_s=0.0)
        rig.hears(PING, DONE, PONG, PING)
        assert (rig.heard, rig.wire.said) == ([DONE], [PONG, PONG])
        assert rig.loop.timers == [], "who does not ask does not wait for answers either"

    run(test)


def test_who_is_silent_for_too_long_is_given_up_once_and_its_end_is_told_when_it_is_known() -> None:
    def test() -> None:
        rig = Rig()
        for _ in range(20):
            rig.loop.advance(1.0)
            rig.hears(PONG)
        assert rig.wire.said == [PING] * 20
        rig.loop.advance(5.0)
        assert rig.ended == [], "as long as it may be silent"
        rig.loop.advance(1.0)
        [(error, over)] = rig.ended
        assert (type(error), over) == (PeerLost, False)
        assert "the worker has said nothing for 6.0 s" in str(error)
        assert rig.loop.timers == []
        said = list(rig.wire.said)
        rig.hears(DONE)
        rig.channel.send(DONE)
        assert (rig.heard, rig.wire.said, rig.wire.closing) == ([], said, False), (
            "that it has ended is no guess"
        )
        rig.channel.connection_lost(None)
        rig.channel.connection_lost(None)
        assert rig.ended == [(error, False), (error, True)]

    run(test)


@pytest.mark.parametrize("stood_s", [2.5, 30.0])
def test_who_stood_still_itself_for_more_than_a_question_takes_no_other_for_silent(stood_s: float) -> None:
    def test() -> None:
        rig = Rig()
        rig.loop.advance(4.0)  # it may be silent for 5
        rig.loop.stand_still(stood_s)
        assert rig.ended == []
        rig.loop.advance(5.0)
        assert rig.ended == []
        rig.loop.advance(1.0)
        assert [over for _, over in rig.ended] == [False], "it was asked anew, and has said nothing since"

    run(test)


def test_one_that_need_not_speak_is_never_given_up() -> None:
    def test() -> None:
        rig = Rig(silence_s=0.0)
        rig.loop.advance(1000.0)
        assert rig.ended == []
        rig.channel.connection_lost(None)
        [(error, over)] = rig.ended
        assert (str(error), over) == ("the worker has ended", True)
        assert rig.loop.timers == []

    run(test)


def test_nonsense_is_the_end_of_what_is_heard_and_not_of_the_connection() -> None:
    def test() -> None:
        rig = Rig()
        rig.channel.data_received(b"\x00\x00\x00\x01\xc1")
        rig.channel.data_received(b"\x00\x00\x00\x01\xc1")
        rig.hears(DONE)
        [(error, over)] = rig.ended
        assert (type(error), over, rig.heard, rig.wire.closing) == (TransferFailed, False, [], False)

    run(test)


@pytest.mark.parametrize(("unread", "lost"), [(100, False), (101, True)])
def test_who_does_not_read_more_than_may_wait_is_given_up(unread: int, lost: bool) -> None:
    def test() -> None:
        rig = Rig()
        rig.wire.unread = unread
        rig.channel.send(DONE)
        assert rig.wire.said == [DONE]
        assert [(type(error), over) for error, over in rig.ended] == ([(PeerLost, False)] if lost else [])

    run(test)


def test_after_our_own_end_nobody_is_told_of_anything_any_more() -> None:
    def test() -> None:
        rig = Rig()
        rig.channel.close()
        rig.channel.close()
        assert (rig.wire.closing, rig.loop.timers) == (True, [])
        rig.hears(DONE)
        rig.channel.send(DONE)
        rig.channel.data_received(b"\xff\xff\xff\xff")
        rig.channel.connection_lost(None)
        assert (rig.heard, rig.ended, rig.wire.said) == ([], [], [])

    run(test)


@pytest.mark.parametrize("given_up", [True, False])
def test_the_end_of_our_side_waits_for_what_is_still_to_be_read_unless_the_other_is_given_up(
    given_up: bool,
) -> None:
    async def test() -> None:
        rig = Rig()
        if given_up:
            rig.loop.advance(6.0)
        rig.channel.close()
        closing = asyncio.ensure_future(rig.channel.closed(60.0))
        for _ in range(5):
            await asyncio.sleep(0)
        assert rig.wire.aborted is given_up
        assert not closing.done(), "its end of the socket is not closed before this is told"
        rig.channel.connection_lost(None)
        await closing

    run(test)


def test_one_that_was_never_connected_says_nothing_and_is_closed_at_once() -> None:
    async def test() -> None:
        rig = Rig()
        rig.channel._transport = None
        rig.channel.send(DONE)
        await asyncio.wait_for(rig.channel.closed(60.0), 60)
        assert rig.wire.said == []

    run(test)


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
