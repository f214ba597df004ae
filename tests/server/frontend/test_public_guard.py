"""The public door among slow, silent and endless clients: each is bounded, and nobody else notices."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import multiprocessing
import resource
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from frontend_rig import DEADLINE_S, FakeBackend, Running, http_post, serve

from segue.kv.limits import Limits
from segue.kv.session.deadline import STOOD_STILL_S
from segue.server.frontend.http_server import public_guard
from segue.server.frontend.tokenizer import ModelTokenizer
from segue.server.http.guarded_http import (
    MAX_HEAD_BYTES,
    MAX_PIPELINED,
    RESERVED_DESCRIPTORS,
    max_connections,
    raise_descriptor_limit,
)

CHAT = "/v1/chat/completions"
HI = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
HALF = b"GET /health HTTP/1.1\r\nhost: x\r\nx: "
WHOLE = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
#: What is to be late in these tests has so long; on a clock that they move on.
LATE_S = 60.0


@pytest.fixture(scope="module", autouse=True)
def _descriptors() -> None:
    raise_descriptor_limit()


class Client:
    """A plain socket that says what it likes."""

    def __init__(self, running: Running, *said: bytes) -> None:
        self.sock = socket.create_connection(("127.0.0.1", running.port))
        self.sock.settimeout(DEADLINE_S)
        running.opened.append(self)  # type: ignore[attr-defined]
        for data in said:
            self.sock.sendall(data)

    def say(self, data: bytes) -> None:
        self.sock.sendall(data)

    def rest(self) -> bytes:
        """Everything until the server closes; what a reset leaves counts as the end."""
        got = b""
        with contextlib.suppress(ConnectionError):
            while piece := self.sock.recv(65536):
                got += piece
        self.sock.close()
        return got

    def answer(self) -> tuple[int, bytes]:
        """Status and body of the next answer, which has a length."""
        got = b""
        while b"\r\n\r\n" not in got:
            piece = self.sock.recv(65536)
            assert piece, got
            got += piece
        head, _, body = got.partition(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        while len(body) < length:
            body += self.sock.recv(65536)
        return int(head.split()[1]), body


@contextlib.contextmanager
def guarded(tokenizer: ModelTokenizer, backend: FakeBackend | None = None, **kw: Any) -> Iterator[Running]:
    settings = {key: kw.pop(key) for key in ("body_timeout_s", "limits", "jumping") if key in kw}
    bounds = {key: kw.pop(key) for key in ("max_requests",) if key in kw}
    guard = dataclasses.replace(public_guard(**kw), **bounds)
    clients: list[Client] = []
    with serve(backend or FakeBackend(tokenizer), tokenizer, guard=guard, **settings) as running:
        running.opened = clients  # type: ignore[attr-defined]
        try:
            yield running
        finally:
            for client in clients:
                client.sock.close()


def held(running: Running) -> tuple[int, int]:
    return running.on_loop(lambda: (running.server.pending, running.server.busy))  # type: ignore[no-any-return]


def until_held(running: Running, wanted: tuple[int, int]) -> None:
    until = time.monotonic() + DEADLINE_S
    while held(running) != wanted:
        assert time.monotonic() < until, held(running)
        time.sleep(0.01)


def until_empty(running: Running) -> None:
    until_held(running, (0, 0))


def error_of(raw: bytes) -> tuple[int, dict[str, Any]]:
    head, _, body = raw.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]


# ---- heads --------------------------------------------------------------------------------------


def test_300_half_sent_requests_end_at_their_deadline(tokenizer: ModelTokenizer) -> None:
    with guarded(tokenizer, head_s=LATE_S, jumping=True) as running:
        half = [Client(running, HALF) for _ in range(300)]
        assert running.http.get("/health").status_code == 200
        running.over(LATE_S)
        for client in half:
            status, error = error_of(client.rest())
            assert status == 408
            assert error["code"] == "REQUEST_TIMEOUT"
            assert error["type"] == "invalid_request_error"
        running.http.close()
        until_empty(running)


def test_a_head_that_trickles_has_no_longer_and_a_silent_connection_is_just_closed(
    tokenizer: ModelTokenizer,
) -> None:
    with guarded(tokenizer, head_s=LATE_S, jumping=True) as running:
        silent, crlf, trickle = Client(running), Client(running, b"\r\n"), Client(running, HALF)
        running.over(0.0)
        for _ in range(6):
            assert held(running) == (3, 0), "none has had its time"
            trickle.say(b"x")
            running.over(LATE_S / 6)
        assert error_of(trickle.rest())[0] == 408
        assert silent.rest() == b""
        assert crlf.rest() == b""
        until_empty(running)


@pytest.mark.parametrize("shape", ["many headers", "one header", "a url", "a trailer"])
def test_an_endless_head_is_refused_at_its_bound(tokenizer: ModelTokenizer, shape: str) -> None:
    opening, more = {
        "many headers": (b"GET /health HTTP/1.1\r\n", b"a: " + b"b" * 100 + b"\r\n"),
        "one header": (HALF, b"y" * 100),
        "a url": (b"GET /", b"y" * 100),
        "a trailer": (
            b"POST /nowhere HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n0\r\nx: ",
            b"y" * 100,
        ),
    }[shape]
    with guarded(tokenizer) as running:
        client = Client(running, opening)
        # So little that the server has read all of it when it answers.
        with contextlib.suppress(ConnectionError):
            client.say(more * ((3 if shape == "a trailer" else 2) * MAX_HEAD_BYTES // len(more)))
        raw = client.rest()
        if shape == "a trailer":
            assert b"HTTP/1.1 431" not in raw  # it was answered before; then the connection ends
        else:
            status, error = error_of(raw)
            assert (status, error["code"]) == (431, "REQUEST_TOO_LARGE")
        until_empty(running)


def test_a_head_just_below_the_bound_and_a_big_body_pass(tokenizer: ModelTokenizer) -> None:
    with guarded(tokenizer) as running:
        filler = b"a: " + b"b" * (MAX_HEAD_BYTES - len(WHOLE) - 100) + b"\r\n"
        client = Client(running, WHOLE.replace(b"\r\n\r\n", b"\r\n") + filler + b"\r\n")
        assert client.answer()[0] == 200
        body = json.dumps(HI | {"user": "u" * 900_000}).encode()
        # In one write with its head, so that one read has both.
        client.say(http_post(CHAT, body))
        assert client.answer()[0] == 200
        chunked = b"".join(
            b"%x\r\n%s\r\n" % (len(p), p) for p in (body[i : i + 700] for i in range(0, len(body), 700))
        )
        client.say(f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n".encode())
        client.say(chunked + b"0\r\n\r\n")
        assert client.answer()[0] == 200


def test_what_is_no_http_gets_the_error_body(tokenizer: ModelTokenizer) -> None:
    with guarded(tokenizer) as running:
        for opening in (b"\x16\x03\x01\x02\x00\x01", b"HELLO\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n"):
            status, error = error_of(Client(running, opening).rest())
            assert (status, error["code"]) == (400, "INVALID_REQUEST")


# ---- later requests, bodies, idle time ----------------------------------------------------------


def test_a_later_request_has_the_same_deadline(tokenizer: ModelTokenizer) -> None:
    with guarded(tokenizer, head_s=LATE_S, idle_s=3 * LATE_S, jumping=True) as running:
        apart = Client(running, WHOLE)
        assert apart.answer()[0] == 200
        apart.say(HALF)
        running.over(LATE_S)
        assert error_of(apart.rest())[0] == 408
        # Its beginning came in the read that ended the first one, and nothing after it.
        together = Client(running, WHOLE + HALF)
        running.over(LATE_S)
        raw = together.rest()
        assert raw.startswith(b"HTTP/1.1 200")
        assert b"HTTP/1.1 408" in raw
        until_empty(running)


def test_an_idle_connection_ends_after_its_time_and_a_reused_one_goes_on(tokenizer: ModelTokenizer) -> None:
    with guarded(tokenizer, idle_s=LATE_S, head_s=3 * LATE_S, jumping=True) as running:
        client = Client(running, WHOLE)
        assert client.answer()[0] == 200
        running.over(LATE_S / 2)
        client.say(WHOLE)
        assert client.answer()[0] == 200
        running.over(LATE_S)
        assert client.rest() == b""
        until_empty(running)


def test_a_body_that_trickles_is_408(tokenizer: ModelTokenizer) -> None:
    with guarded(tokenizer, body_timeout_s=LATE_S, head_s=3 * LATE_S, jumping=True) as running:
        client = Client(running, http_post(CHAT, b"{", 1000))
        running.over(LATE_S)
        status, error = error_of(client.rest())
        assert (status, error["code"]) == (408, "REQUEST_TIMEOUT")
        assert running.metric("segue_requests_total", endpoint="chat", outcome="REQUEST_TIMEOUT") == 1
        until_empty(running)


def test_a_body_has_its_own_time_which_is_longer_than_a_heads(tokenizer: ModelTokenizer) -> None:
    times = {"head_s": LATE_S, "request_s": 3 * LATE_S, "body_timeout_s": 3 * LATE_S}
    with guarded(tokenizer, jumping=True, **times) as running:
        asked = http_post(CHAT, HI)
        client = Client(running, asked[:-1])
        until_held(running, (0, 1))
        running.over(LATE_S + STOOD_STILL_S / 2)  # not so late that the server takes itself for stopped
        running.over(0.0)  # its timers have had their turn
        client.say(asked[-1:])
        assert client.answer()[0] == 200


def test_a_body_that_nobody_reads_does_not_hold_its_connection(tokenizer: ModelTokenizer) -> None:
    with guarded(tokenizer, head_s=LATE_S, request_s=2 * LATE_S, jumping=True) as running:
        client = Client(running, b"GET /health HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{")
        running.over(2 * LATE_S)
        raw = client.rest()
        assert raw.startswith(b"HTTP/1.1 200")
        assert raw.count(b"HTTP/1.1") == 1
        until_empty(running)


def test_what_comes_while_an_answer_runs_does_not_end_it(tokenizer: ModelTokenizer) -> None:
    """An old client's line break after its body, or the next request's beginning, are no reason."""
    backend = FakeBackend(tokenizer, hang_at=2)
    with guarded(tokenizer, backend, head_s=LATE_S, jumping=True) as running:
        asked = http_post(CHAT, HI | {"stream": True, "max_tokens": 8})
        clients = [Client(running, asked + more) for more in (b"\r\n", HALF)]
        assert backend.reached.wait(DEADLINE_S)
        for _ in range(2):
            other = Client(running, HALF)
            running.over(LATE_S)
            assert error_of(other.rest())[0] == 408  # more time than a head has is over
        for client in clients:
            client.sock.settimeout(0.1)
            got = b""
            with contextlib.suppress(TimeoutError):
                while piece := client.sock.recv(65536):
                    got += piece
                raise AssertionError(f"the stream was ended: {got!r}")
            assert b"HTTP/1.1 408" not in got
            client.sock.close()


def test_requests_sent_ahead_are_bounded(tokenizer: ModelTokenizer) -> None:
    backend = FakeBackend(tokenizer, hang_at=0)
    with guarded(tokenizer, backend) as running:
        client = Client(running, http_post(CHAT, HI) * (MAX_PIPELINED + 2))
        assert client.rest() == b""
        until_empty(running)
        few = Client(running, WHOLE * 5)
        raw = b""
        while raw.count(b"HTTP/1.1 200") < 5:
            piece = few.sock.recv(65536)
            assert piece
            raw += piece


@pytest.mark.parametrize("answered", [0, 1, 2])
def test_a_client_that_has_asked_again_and_leaves_ends_its_work(
    tokenizer: ModelTokenizer, answered: int
) -> None:
    """Another request waits behind the one that runs, which must learn too that nobody reads it any more."""
    backend = FakeBackend(tokenizer, hang_at=1)
    with guarded(tokenizer, backend) as running:
        short, long = (http_post(CHAT, HI | more) for more in ({"max_tokens": 1}, {"stream": True}))
        client = Client(running, short * answered + long + long)
        assert backend.reached.wait(DEADLINE_S)
        client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.sock.close()
        assert backend.ended.wait(DEADLINE_S)
        until_empty(running)


# ---- how many -----------------------------------------------------------------------------------


def test_bounds_follow_from_the_descriptors() -> None:
    for descriptors in (1, 300, 1024, 20_000, 2**31):
        assert 8 <= max_connections(descriptors) <= max(8, descriptors - RESERVED_DESCRIPTORS)
    assert max_connections(1024) == 1024 - RESERVED_DESCRIPTORS
    assert max_connections(2**31) == 8192


def test_silent_connections_make_room_among_themselves(tokenizer: ModelTokenizer) -> None:
    with guarded(tokenizer, descriptors=RESERVED_DESCRIPTORS + 40, head_s=3600.0) as running:
        silent = [Client(running) for _ in range(60)]
        assert running.http.get("/health").status_code == 200
        waiting, busy = held(running)
        assert waiting <= 10
        assert busy == 0
        assert running.server.counts["pending_dropped"] >= 50
        for client in silent:
            client.sock.close()


def test_unfinished_clients_make_room_and_answers_never_do(tokenizer: ModelTokenizer) -> None:
    backend = FakeBackend(tokenizer, hang_at=1)
    with guarded(tokenizer, backend, max_requests=6) as running:
        asked = http_post(CHAT, HI | {"stream": True})
        streams = [Client(running, asked) for _ in range(5)]
        for stream in streams:
            assert stream.sock.recv(5) == b"HTTP/"
        unfinished = Client(running, http_post(CHAT, b"{", 1000))
        until_held(running, (0, 6))
        idle = Client(running, WHOLE)
        assert idle.answer()[0] == 200
        assert unfinished.rest() == b""
        streams.append(Client(running, asked))
        assert streams[-1].sock.recv(5) == b"HTTP/"
        assert held(running) == (1, 6)

        raw = Client(running, WHOLE).rest()
        assert raw.startswith(b"HTTP/1.1 429")
        assert b"retry-after: 1" in raw
        assert running.on_loop(lambda: len(backend.open)) == 6
        streams[0].sock.close()
        until_held(running, (1, 5))
        idle.say(WHOLE)
        assert idle.answer()[0] == 200
        for stream in streams:
            stream.sock.close()
        idle.sock.close()
        until_empty(running)


def test_one_address_in_front_of_many_clients_is_not_throttled(tokenizer: ModelTokenizer) -> None:
    """A proxy: all connections at once, all from one address, more than may be strangers."""
    backend = FakeBackend(tokenizer, hang_at=1)
    with guarded(tokenizer, backend, descriptors=RESERVED_DESCRIPTORS + 400) as running:  # 50 an address
        asked = http_post(CHAT, HI | {"stream": True})
        streams = [Client(running, asked) for _ in range(250)]
        for stream in streams:
            assert stream.sock.recv(5) == b"HTTP/"
        assert held(running) == (0, 250)
        for stream in streams:
            stream.sock.close()
        until_empty(running)


# ---- with 1,024 descriptors in all --------------------------------------------------------------


def _small_process(pipe: Any, folder: Path, soft: int, hard: int) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    tokenizer = ModelTokenizer.load(folder)
    with serve(FakeBackend(tokenizer), tokenizer, limits=Limits()) as running:
        pipe.send((running.port, resource.getrlimit(resource.RLIMIT_NOFILE)[0]))
        while pipe.recv() == "cpu":
            pipe.send(time.process_time())


@pytest.mark.slow
@pytest.mark.parametrize(("soft", "hard"), [(1024, 1024), (256, 1200)])
def test_a_thousand_idle_sockets_do_not_end_a_service_with_1024_descriptors(
    model_folder: Path, soft: int, hard: int
) -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_small_process, args=(theirs, model_folder, soft, hard))
    process.start()
    idle: list[socket.socket] = []
    try:
        assert ours.poll(60)
        port, limit = ours.recv()
        assert limit == hard  # it asked for all it may have
        for _ in range(hard + 100):
            sock = socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S)
            idle.append(sock)
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=DEADLINE_S) as client:
            assert client.get("/health").status_code == 200
            assert client.post(CHAT, json=HI).status_code == 200
        # Clients that ask and stay are no better.
        for sock in idle:
            with contextlib.suppress(ConnectionError):
                sock.sendall(WHOLE)
        for _ in range(hard + 100):
            sock = socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S)
            sock.sendall(WHOLE)
            idle.append(sock)
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=DEADLINE_S) as client:
            assert client.post(CHAT, json=HI).status_code == 200
        ours.send("stop")
        process.join(DEADLINE_S)
        assert process.exitcode == 0
    finally:
        for sock in idle:
            sock.close()
        if process.is_alive():
            process.kill()
        process.join()
