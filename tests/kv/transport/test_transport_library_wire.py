"""The control stream of `library`: what is lost when a peer goes."""

from __future__ import annotations

import socket
import threading

from hand_loop import HandLoop
from ranks import rank
from segue.kv.errors import SegueError
from segue.kv.transport.library.library_wire import AskAnswer, ControlStream, Goodbye, Message, frame
from segue.kv.transport.net.ioloop import IoLoop
from segue.kv.transport.net.stream import PlainChannel


def test_silence_counts_from_the_question_and_not_from_an_old_answer() -> None:
    ours, theirs = socket.socketpair()
    loop, ended = HandLoop(), list[SegueError]()
    stream = ControlStream(loop, PlainChannel(ours), rank("aaaa"), lambda message: None, ended.append, 10.0)  # type: ignore[arg-type]
    stream.expect()
    stream.answered()
    loop.advance(9.0)
    stream.expect()
    loop.advance(9.0)
    assert ended == [], "it has had 9 of its 10 seconds"
    loop.advance(5.0)
    assert len(ended) == 1
    theirs.close()


def test_a_goodbye_is_heard_though_nobody_reads_our_answer_any_more() -> None:
    """The peer says goodbye and closes; we have not read that yet, and what we say to it fails."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    told: list[Message] = []
    ended: list[SegueError] = []
    over = threading.Event()

    def end(error: SegueError) -> None:
        ended.append(error)
        over.set()

    loop = IoLoop("test", lambda exc: None)
    stream = ControlStream(loop, PlainChannel(ours), rank("aaaa"), told.append, end, 10.0)
    theirs.sendall(frame(Goodbye()))
    theirs.close()
    loop.start()
    loop.post(lambda: stream.send(AskAnswer(3, True)))
    loop.post(stream.open)
    try:
        assert over.wait(10)
    finally:
        loop.stop(stream.close, 5)
    assert told == [Goodbye()]
    assert len(ended) == 1
