"""Frames between a leader and its ranks: whole ones, in their time, and none that is too large."""

import socket

import pytest

from segue.engine.ranks import pipe
from segue.engine.ranks.pipe import HEAD, Pipe
from segue.kv.errors import PeerLost, RequestTooLarge


@pytest.fixture
def ends():
    """Both ends of a pipe, and the socket below the second."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield Pipe(ours, "rank 1"), Pipe(theirs, "the leader"), theirs


def test_frames_come_one_by_one_however_they_are_cut(ends):
    one, other, below = ends
    below.sendall(HEAD.pack(3) + b"abc" + HEAD.pack(0) + HEAD.pack(2) + b"d")
    assert [one.receive(60.0), one.receive(60.0)] == [b"abc", b""]
    below.sendall(b"e")
    assert one.receive() == b"de"
    one.send(b"back", 60.0)
    assert other.receive(60.0) == b"back"


def test_as_much_as_is_allowed_and_no_byte_more_is_sent_or_taken(ends, monkeypatch):
    monkeypatch.setattr(pipe, "MAX_BYTES", 8)
    one, other, below = ends
    one.send(b"x" * 8, 60.0)
    assert other.receive(60.0) == b"x" * 8
    with pytest.raises(RequestTooLarge, match="9 bytes, at most 8"):
        one.send(b"x" * 9, 60.0)
    below.sendall(HEAD.pack(9))
    with pytest.raises(PeerLost, match="a frame of 9 bytes"):
        one.receive(60.0)


@pytest.mark.parametrize("head", [False, True], ids=["before a frame", "within one"])
def test_who_ends_or_says_nothing_in_its_time_is_lost(ends, head):
    one, _, below = ends
    below.sendall(HEAD.pack(3) + b"a" if head else b"")
    with pytest.raises(PeerLost, match="said nothing in the time"):
        one.receive(0.01)
    below.close()
    with pytest.raises(PeerLost, match="has ended"):
        one.receive(60.0)


def test_a_send_has_its_own_time_and_not_that_of_the_last_receive(ends, monkeypatch):
    """A rank waits for orders without end; who does not read must be noticed all the same."""
    one, other, _ = ends
    other.send(b"x", 60.0)
    one.receive()
    assert one._sock.gettimeout() is None
    monkeypatch.setattr(pipe, "MAX_BYTES", 2**30)
    with pytest.raises(PeerLost, match=r"did not read within 0\.01 s"):
        one.send(b"x" * 2**24, 0.01)
