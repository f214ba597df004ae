"""A stream under TLS, over a socket that does what OpenSSL may: take less, want to wait, end."""

from __future__ import annotations

import ctypes
import select
import ssl
from typing import Any

import numpy as np
import pytest

from segue.kv.transport.net.stream import RECORD_BYTES, Channel, PlainChannel, TlsChannel
from segue.kv.transport.tcp.tcp_wire import Cursor

KiB = 1024


class Records:
    """An `SSLSocket`: each call does the next of `steps`, which is so many bytes at most, or raised."""

    def __init__(self, *steps: int | Exception) -> None:
        self.steps = list(steps)
        self.sent = b""
        self.attempts: list[bytes] = []
        self.source = b""

    def fileno(self) -> int:
        return 7

    def _step(self) -> int:
        step = self.steps.pop(0)
        if isinstance(step, Exception):
            raise step
        return step

    def send(self, data: Any, flags: int = 0) -> int:
        assert flags == 0, "TLS has none"
        self.attempts.append(bytes(data))
        taken = self.attempts[-1][: self._step()]
        self.sent += taken
        return len(taken)

    def recv_into(self, target: Any, nbytes: int) -> int:
        found = self.source[: min(self._step(), nbytes)]
        ctypes.memmove(target, found, len(found))
        self.source = self.source[len(found) :]
        return len(found)

    def recv(self, nbytes: int) -> bytes:
        return bytes(min(self._step(), nbytes))

    def do_handshake(self) -> None:
        self._step()

    def close(self) -> None: ...


def channel(*steps: int | Exception) -> tuple[TlsChannel, Records]:
    sock = Records(*steps)
    return TlsChannel(sock), sock  # type: ignore[arg-type]


def rows(memory: np.ndarray, *lengths: int) -> Cursor:
    """Over so many bytes of `memory`, each row 10 bytes behind the last."""
    starts = np.cumsum([0, *lengths[:-1]]) + 10 * np.arange(len(lengths))
    table = np.array(
        [(memory.ctypes.data + start, n) for start, n in zip(starts, lengths, strict=True)], np.uint64
    )
    return Cursor(table)


def bytes_of(memory: np.ndarray, *lengths: int) -> bytes:
    at, found = 0, b""
    for length in lengths:
        found += memory[at : at + length].tobytes()
        at += length + 10
    return found


def random(nbytes: int) -> np.ndarray:
    return np.random.default_rng(1).integers(0, 256, nbytes, np.uint8)


WAITS = [ssl.SSLWantReadError(), ssl.SSLWantWriteError(), BlockingIOError()]


@pytest.mark.parametrize("wait", WAITS, ids=lambda exc: type(exc).__name__)
def test_full_records_are_sent_whatever_the_rows_and_an_attempt_that_is_repeated_is_the_same(
    wait: Exception,
) -> None:
    lengths = (40, 3000, 20 * KiB, 1, 7, 30 * KiB, 5)
    memory = random(100 * KiB)
    wanted, cursor = bytes_of(memory, *lengths), rows(memory, *lengths)
    made, sock = channel(
        wait, RECORD_BYTES, wait, 5000, wait, RECORD_BYTES, RECORD_BYTES, RECORD_BYTES, RECORD_BYTES
    )
    assert made.send_rows(cursor, 10**6) == -1
    assert made.send_rows(cursor, 10**6) == RECORD_BYTES
    assert made.send_rows(cursor, 10**6) == 5000, "OpenSSL took a part of one"
    assert made.send_rows(cursor, 10**6) == len(wanted) - RECORD_BYTES - 5000
    assert cursor.left == 0
    assert sock.sent == wanted
    assert sock.attempts[0] == sock.attempts[1]
    assert sock.attempts[2] == sock.attempts[3]
    assert {len(attempt) for attempt in sock.attempts[:-1]} == {RECORD_BYTES}


def test_no_more_is_sent_in_one_turn_than_the_limit_says_but_for_a_record() -> None:
    memory = random(100 * KiB)
    made, _ = channel(*[RECORD_BYTES] * 5)
    cursor = rows(memory, 80 * KiB)
    assert made.send_rows(cursor, 20 * KiB) == 2 * RECORD_BYTES
    assert cursor.left == 80 * KiB - 2 * RECORD_BYTES


@pytest.mark.parametrize("wait", WAITS, ids=lambda exc: type(exc).__name__)
def test_what_was_received_before_a_wait_or_an_end_is_told_first(wait: Exception) -> None:
    lengths = (40, 3000, 20 * KiB)
    source, memory = random(30 * KiB), np.zeros(30 * KiB, np.uint8)
    made, sock = channel(wait, 40, 100, wait, 0)
    sock.source = bytes_of(source, *lengths)
    cursor = rows(memory, *lengths)
    assert made.receive_rows(cursor, 10**6) == -1, "nothing yet, and no end"
    assert made.receive_rows(cursor, 10**6) == 140
    assert made.receive_rows(cursor, 10**6) == 0, "the end"
    sock.steps = [RECORD_BYTES] * 10
    assert made.receive_rows(cursor, 10**6) == cursor.nbytes - 140
    assert bytes_of(memory, *lengths) == bytes_of(source, *lengths)
    assert np.count_nonzero(memory) == np.count_nonzero(np.frombuffer(bytes_of(source, *lengths), np.uint8))


@pytest.mark.parametrize("wait", WAITS, ids=lambda exc: type(exc).__name__)
@pytest.mark.parametrize("kind", [PlainChannel, TlsChannel])
def test_what_must_wait_is_no_end_and_no_byte(kind: type[Channel], wait: Exception) -> None:
    made = kind(Records(wait, wait, wait))  # type: ignore[arg-type]
    made._flags = 0
    assert made.receive(10) is None
    assert made.send(b"x") == 0
    assert made.discard(bytearray(10), 10) == -1


def test_no_more_is_thrown_away_than_was_asked_for() -> None:
    made, sock = channel(100, 100)
    sock.source = bytes(100)
    sock.recv_into = lambda scratch, nbytes: min(nbytes, len(scratch))  # type: ignore[method-assign]
    assert made.discard(bytearray(50), 20) == 20
    assert made.discard(bytearray(50), 70) == 50


def test_a_handshake_says_what_it_waits_for() -> None:
    made, _ = channel(ssl.SSLWantReadError(), ssl.SSLWantWriteError(), 0)
    assert [made.handshake() for _ in range(3)] == [select.EPOLLIN, select.EPOLLOUT, 0]
