"""The processes that may be a rank of a leader: those of the same user that show the nonce."""

from __future__ import annotations

import fcntl
import os
import socket
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from segue.kv.errors import BootstrapTimeout, BootstrapUnreachable, Unauthorized
from segue.kv.ranks import rank_listener
from segue.kv.ranks.rank_listener import RankListener, connect_rank

NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")


@pytest.fixture
def listener() -> Iterator[RankListener]:
    made = RankListener()
    yield made
    made.close()


@pytest.fixture
def others() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


def ended(*socks: socket.socket) -> None:
    for sock in socks:
        sock.close()


def connected(listener: RankListener) -> socket.socket:
    """Somebody of our user who says nothing yet."""
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(b"\0" + listener.invitation[32:])
    sock.settimeout(60)
    return sock


def test_each_rank_gets_the_socket_of_its_number_whichever_comes_first(
    listener: RankListener, others: ThreadPoolExecutor
) -> None:
    coming = {rank: others.submit(connect_rank, listener.invitation, rank, 60) for rank in (3, 1, 2)}
    found = listener.accept([1, 2, 3], 60)
    for rank, sock in found.items():
        sock.sendall(b"to rank %d" % rank)
        theirs = coming[rank].result(60)
        assert theirs.recv(100) == b"to rank %d" % rank
        ended(sock, theirs)


def test_who_shows_another_nonce_or_rank_is_refused_and_keeps_nobody_from_coming(
    listener: RankListener, others: ThreadPoolExecutor
) -> None:
    wrong = bytes(32) + listener.invitation[32:]
    waiting = others.submit(listener.accept, [1], 60)
    silent = connected(listener)
    cut = connected(listener)
    cut.sendall(b"half of")
    cut.close()
    for invitation, rank in ((wrong, 1), (listener.invitation, 2)):
        with pytest.raises(Unauthorized, match=f"refused rank {rank}"):
            connect_rank(invitation, rank, 60)
    theirs = connect_rank(listener.invitation, 1, 60)
    ours = waiting.result(60)[1]
    assert silent.recv(1) == b"", "nobody waits for it any more"
    ended(silent, ours, theirs)


def test_a_hello_that_comes_in_pieces_is_read_to_its_end(
    listener: RankListener, others: ThreadPoolExecutor
) -> None:
    waiting = others.submit(listener.accept, [1], 60)
    theirs = connected(listener)
    hello = (1).to_bytes(4, "big") + listener.invitation[:32]
    for piece in (hello[:3], hello[3:20], hello[20:]):
        theirs.sendall(piece)
        ends_at = time.monotonic() + 60
        while unread(theirs):
            assert time.monotonic() < ends_at
            os.sched_yield()
    assert theirs.recv(1) == b"\x01"
    ended(theirs, waiting.result(60)[1])


def unread(sock: socket.socket) -> int:
    """The kernel's memory for bytes that were sent and not read; it tells nobody when they are."""
    found = fcntl.ioctl(sock, termios.TIOCOUTQ, bytes(4))
    return int.from_bytes(found, sys.byteorder)


def test_a_second_process_of_one_rank_is_refused(listener: RankListener, others: ThreadPoolExecutor) -> None:
    waiting = others.submit(listener.accept, [1, 2], 60)
    first = connect_rank(listener.invitation, 1, 60)
    with pytest.raises(Unauthorized):
        connect_rank(listener.invitation, 1, 60)
    second = connect_rank(listener.invitation, 2, 60)
    ended(first, second, *waiting.result(60).values())


def test_those_that_do_not_come_are_named_and_the_others_are_let_go(
    listener: RankListener, others: ThreadPoolExecutor
) -> None:
    coming: Future[socket.socket] = others.submit(connect_rank, listener.invitation, 1, 60)
    with pytest.raises(BootstrapTimeout, match=r"ranks 2, 3 did not connect within 0\.5 s"):
        listener.accept([1, 2, 3], 0.5)
    theirs = coming.result(60)
    assert theirs.recv(1) == b""
    theirs.close()


def test_the_oldest_of_those_that_say_nothing_gives_way(
    listener: RankListener, others: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_listener, "MAX_UNKNOWN", 2)
    waiting = others.submit(listener.accept, [1], 60)
    silent = [connected(listener) for _ in range(3)]
    assert silent[0].recv(1) == b""
    theirs = connect_rank(listener.invitation, 1, 60)
    ended(*silent, theirs, *waiting.result(60).values())


def test_a_leader_that_does_not_answer_or_is_not_there_is_a_typed_error(listener: RankListener) -> None:
    with pytest.raises(BootstrapTimeout, match="rank 1 in"):
        connect_rank(listener.invitation, 1, 0.05)
    listener.close()
    with pytest.raises(BootstrapUnreachable):
        connect_rank(listener.invitation, 1, 60)


def as_nobody(code: str, *arguments: str) -> subprocess.Popen[str]:
    """A process of another user."""
    become = f"import os, socket, sys\nos.setuid({NOBODY})\n"
    command = [sys.executable, "-c", become + code, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@needs_root
def test_a_process_of_another_user_is_no_rank_whatever_it_knows(
    listener: RankListener, others: ThreadPoolExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    code = """
sock = socket.socket(socket.AF_UNIX)
invitation = bytes.fromhex(sys.argv[1])
sock.connect(b"\\0" + invitation[32:])
try:
    sock.sendall((1).to_bytes(4, "big") + invitation[:32])
    print(sock.recv(1))
except (BrokenPipeError, ConnectionResetError):
    print(b"")
"""
    waiting = others.submit(listener.accept, [1], 60)
    with as_nobody(code, listener.invitation.hex()) as stranger:
        assert stranger.communicate(timeout=60)[0] == "b''\n"
    assert f"a process of user {NOBODY} tried to be a rank" in caplog.text
    theirs = connect_rank(listener.invitation, 1, 60)
    ended(theirs, *waiting.result(60).values())


@needs_root
def test_nothing_is_told_to_a_listener_of_another_user() -> None:
    name = f"segue-test-{os.getpid()}"
    code = """
sock = socket.socket(socket.AF_UNIX)
sock.bind("\\0" + sys.argv[1])
sock.listen()
print(flush=True)
print(sock.accept()[0].recv(100))
"""
    with as_nobody(code, name) as stranger:
        assert stranger.stdout is not None
        stranger.stdout.readline()
        with pytest.raises(Unauthorized, match=f"a process of user {NOBODY} listens"):
            connect_rank(bytes(32) + name.encode(), 1, 60)
        assert stranger.communicate(timeout=60)[0] == "b''\n"
