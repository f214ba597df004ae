"""The HTTP server that all others are: how it begins and ends, and what it says without a handler."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from jumps import Jumps
from loops import in_loop
from segue.kv.errors import Internal
from segue.kv.session.listen import listening
from segue.server.http.guarded_http import Guard, GuardedServer
from segue.server.http.http_exchange import EXCHANGE
from tls_files import Authority

ASK = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
LATE_S = 60.0
DEADLINE_S = 60.0


class App:
    """Answers each request once `go_on` is set."""

    def __init__(self, body: bytes = b"hello") -> None:
        self.body = body
        self.asked, self.go_on = asyncio.Event(), asyncio.Event()
        self.ended: list[str] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        exchange = scope[EXCHANGE]()
        self.asked.set()
        try:
            await self.go_on.wait()
            exchange.answer(200, [], self.body)
            self.ended.append("answered")
        except asyncio.CancelledError:
            self.ended.append("cancelled")
            raise


def guarded(
    app: App, drain_s: float = 1.0, tls: Any = None, kind: type[GuardedServer] = GuardedServer, **guard: Any
) -> GuardedServer:
    settings: dict[str, Any] = {
        "head_s": LATE_S,
        "request_s": LATE_S,
        "max_requests": 8,
        "head_is_proof": True,
    }
    sock = listening("127.0.0.1", 0, what="a test", flag="port")
    return kind(app, sock, guard=Guard(**(settings | guard)), drain_s=drain_s, server_tls=tls)


@asynccontextmanager
async def running(app: App, **settings: Any) -> AsyncIterator[GuardedServer]:
    server = guarded(app, **settings)
    async with asyncio.timeout(2 * DEADLINE_S + 10_000):  # also when its clock is moved on
        await server.answering()
        try:
            yield server
        finally:
            app.go_on.set()
            await server.stop()


async def ended(reader: asyncio.StreamReader) -> bytes:
    """The last bytes of the server; a reset is an end, too."""
    try:
        return await asyncio.wait_for(reader.read(), DEADLINE_S)
    except ConnectionError:
        return b""


async def stopped(server: GuardedServer, jumps: Jumps) -> None:
    """It has stopped; its drain is over as soon as everything has had its turns."""
    stopping = asyncio.create_task(server.stop())
    while not stopping.done():
        jumps.over(0.2)
        await asyncio.sleep(0)


async def turns(condition: Callable[[], bool] = lambda: False) -> None:
    """Run what is under way."""
    for _ in range(30):
        if condition():
            return
        await asyncio.sleep(0.001)


@in_loop
async def test_an_answer_that_runs_has_its_drain_time_when_the_server_stops() -> None:
    app, jumps = App(), Jumps()
    async with running(app, drain_s=40.0) as server:
        reader, writer = await asyncio.open_connection(*server.address)
        writer.write(ASK)
        await app.asked.wait()
        stopping = asyncio.create_task(server.stop())
        while not server.should_exit:  # noqa: ASYNC110
            await asyncio.sleep(0)
        for _ in range(30):
            jumps.over(1.0)
            await asyncio.sleep(0)
        app.go_on.set()
        assert (await reader.read()).endswith(b"hello")
        await stopping
        writer.close()
    assert app.ended == ["answered"]


@in_loop
async def test_an_answer_that_outlasts_the_drain_is_ended_and_its_socket_with_it() -> None:
    app, jumps = App(), Jumps()
    async with running(app, drain_s=1.0) as server:
        reader, writer = await asyncio.open_connection(*server.address)
        writer.write(ASK)
        await app.asked.wait()
        await stopped(server, jumps)
        assert b"hello" not in await ended(reader)
        writer.close()
    assert app.ended == ["cancelled"]


@in_loop
async def test_a_client_that_does_not_read_its_answer_keeps_no_socket_of_a_server_that_has_stopped() -> None:
    app, jumps = App(b"x" * 2**24), Jumps()
    app.go_on.set()
    async with running(app) as server:
        _, writer = await asyncio.open_connection(*server.address, limit=2**12)
        writer.write(ASK)
        await turns(lambda: bool(app.ended))
        [connection] = server.server_state.connections
        assert connection.transport.get_write_buffer_size() > 0
        await stopped(server, jumps)
        await turns(lambda: not server.server_state.connections)
        assert not server.server_state.connections
        writer.close()


@in_loop
async def test_a_server_that_cannot_start_or_ends_by_itself_is_not_taken_for_one_that_was_stopped() -> None:
    class CannotStart(GuardedServer):
        async def startup(self, sockets: Any = None) -> None:
            raise OSError("no more of them")

    class NeverUp(GuardedServer):
        async def serve(self, sockets: Any = None) -> None:
            return

    class EndsSoon(GuardedServer):
        async def main_loop(self) -> None:
            return

    for kind, why in ((CannotStart, OSError), (NeverUp, Internal)):
        server = guarded(App(), kind=kind)
        with pytest.raises(why):
            await server.answering()
        await server.stop()
    server = guarded(App(), kind=EndsSoon)
    server.start()
    with pytest.raises(Internal, match="has ended"):
        await server.ended()
    await server.stop()
    server = guarded(App())
    await server.answering()
    ended = asyncio.create_task(server.ended())
    await server.stop()
    await ended


@in_loop
async def test_the_next_head_has_its_time_from_the_end_of_the_answer_before_it() -> None:
    """A request during another one's answer is not read, so its client is not late."""
    app, jumps = App(), Jumps()
    async with running(app, head_s=LATE_S, idle_s=9 * LATE_S) as server:
        reader, writer = await asyncio.open_connection(*server.address)
        writer.write(ASK + ASK[:9])
        await app.asked.wait()
        for part in (1.0, 0.9):  # of the time of a head, more than which the answer takes
            jumps.over(part * LATE_S)
            await turns()
        app.go_on.set()
        assert (await reader.readuntil(b"hello")).startswith(b"HTTP/1.1 200")
        jumps.over(
            0.11 * LATE_S
        )  # not so much later than it was due that the server takes itself for stopped
        await turns()
        writer.write(ASK[9:])
        assert not server.counts
        assert (await reader.readuntil(b"hello")).startswith(b"HTTP/1.1 200")
        writer.close()


@in_loop
async def test_a_client_without_tls_is_told_so_as_its_own_mistake_and_half_a_tls_handshake_ends_in_time(
    tmp_path: Path,
) -> None:
    tls = Authority(tmp_path).issue().load()
    async with running(App(), tls=tls.server) as server:
        loop, sock, told = asyncio.get_running_loop(), socket.create_connection(server.address), b""
        sock.setblocking(False)
        sock.sendall(ASK)
        while b"}}" not in told:  # what it said is not read there: then the connection is reset
            told += await asyncio.wait_for(loop.sock_recv(sock, 2**16), DEADLINE_S)
        sock.close()
        assert told.startswith(b"HTTP/1.1 400 "), "it is of no use to try again"
        assert b"retry-after" not in told
        assert b"only TLS is spoken here" in told
    async with running(App(), tls=tls.server, head_s=0.05) as server:
        reader, writer = await asyncio.open_connection(*server.address)
        writer.write(b"\x16\x03\x01\x02\x00\x01")  # a hello that never ends
        assert await ended(reader) == b""
        writer.close()


@in_loop
async def test_no_more_strangers_are_held_than_the_guard_says() -> None:
    async with running(App(), max_pending=4) as server:
        silent = [await asyncio.open_connection(*server.address) for _ in range(9)]
        await turns(lambda: server.counts.get("pending_dropped", 0) == 5)
        assert server.counts == {"pending_dropped": 5}
        assert server.pending == 4
        for _, writer in silent:
            writer.close()
