"""A listener continues after any fault of one connection or lack of a system resource."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import uvloop
from session_peers import DEADLINE_S

from segue.kv.errors import BootstrapUnreachable, OutOfCapacity, PeerRefused, SegueError
from segue.kv.session import guarded_listener as module
from segue.kv.session.guarded_listener import GuardedListener
from segue.kv.session.listen import listening, url_of


class Stranger(asyncio.Protocol):
    """One incoming connection, and what became of it."""

    def __init__(self) -> None:
        self.transport: Any = None
        self.refused: SegueError | None = None
        self.why_cut: SegueError | None = None
        self.news = asyncio.Event()

    def refuse_when_made(self, error: SegueError) -> None:
        assert self.transport is None
        self.refused = error

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.news.set()

    def cut(self, error: SegueError) -> None:
        self.why_cut = self.why_cut or error
        self.news.set()
        if self.transport is not None:
            self.transport.abort()


class Door:
    """A listener with what it made and counted; `lacks` are what it gets in the place of the next clients."""

    def __init__(self, *, tls: Any = None, handshake_s: float = 30.0, limit: int = 8) -> None:
        self.made: list[Stranger] = []
        self.counts: Counter[str] = Counter()
        self.rooms = 0
        self.lacks: list[OSError] = []
        self.listener = GuardedListener(
            self._make,
            server_tls=tls,
            handshake_s=handshake_s,
            count=lambda what: self.counts.update([what]),
            max_pending=limit,
            make_room=self._make_room,
        )
        self.sock = listening("127.0.0.1", 0, what="a test", flag="port")
        self.clients: list[socket.socket] = []

    def _make(self) -> Stranger:
        self.made.append(Stranger())
        return self.made[-1]

    def _make_room(self) -> None:
        self.rooms += 1

    async def come(self, said: bytes = b"", host: str = "127.0.0.1") -> Stranger:
        """One more client, from `host`; returns once it is being let in."""
        client = socket.create_connection(self.sock.getsockname(), source_address=(host, 0))
        before = len(self.made)
        self.clients.append(client)
        client.sendall(said)
        while len(self.made) == before:  # noqa: ASYNC110  nobody is told
            await asyncio.sleep(0)
        return self.made[-1]

    async def is_lost(self) -> None:
        """One more client, whom nobody can let in."""
        with socket.create_connection(self.sock.getsockname()):
            before = len(self.lacks)
            while len(self.lacks) == before:  # noqa: ASYNC110
                await asyncio.sleep(0)
            await asyncio.sleep(0)


async def told(one: Stranger) -> Stranger:
    await one.news.wait()
    return one


def run(test: Callable[[Door], Awaitable[None]], **options: Any) -> None:
    async def main() -> None:
        door, accept = Door(**options), module.accepted

        async def or_lacks(loop: asyncio.AbstractEventLoop, sock: socket.socket) -> Any:
            client, where = await accept(loop, sock)
            if door.lacks:
                client.close()
                raise door.lacks.pop(0)
            return client, where

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(module, "accepted", or_lacks)
            await served(door)

    async def served(door: Door) -> None:
        async with asyncio.timeout(DEADLINE_S):
            door.listener.open(door.sock)
            try:
                await test(door)
            finally:
                await door.listener.close()
                door.sock.close()
                for client in door.clients:
                    client.close()
        assert not door.listener._admissions

    asyncio.run(main())


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM])
def test_without_descriptors_the_oldest_that_has_proven_nothing_goes_and_then_whom_the_owner_chooses(
    code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PAUSE_S", 0.0)

    async def test(door: Door) -> None:
        first, second, third = [await told(await door.come()) for _ in range(3)]
        door.lacks += [OSError(code, "none left")] * 3
        for _ in range(2):
            await door.is_lost()
        for one in (first, second):
            assert isinstance(one.why_cut, OutOfCapacity)
        assert third.why_cut is None
        assert (door.counts, door.rooms) == ({"pending_dropped": 2}, 0)
        door.listener.authenticated(third)
        await door.is_lost()
        assert door.rooms == 1
        assert third.why_cut is None
        assert (await told(await door.come())).why_cut is None

    run(test)


def test_a_connection_that_is_lost_while_it_is_accepted_costs_nobody_else_anything() -> None:
    async def test(door: Door) -> None:
        first = await told(await door.come())
        door.lacks += [
            ConnectionAbortedError(errno.ECONNABORTED, "aborted"),
            OSError(errno.EPERM, "firewall"),
        ]
        for _ in range(2):
            await door.is_lost()
        await told(await door.come())
        assert first.why_cut is None
        assert (door.counts, door.rooms) == ({}, 0)

    run(test)


def test_one_address_pushes_out_its_own_strangers_and_nobody_elses() -> None:
    async def test(door: Door) -> None:
        alone = await told(await door.come(host="127.0.0.2"))
        flood = [await told(await door.come()) for _ in range(9)]
        assert alone.why_cut is None
        assert [one.why_cut is None for one in flood] == [False] * 5 + [True] * 4, "half of all may be its"

    run(test)


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_who_knocks_in_the_turn_in_which_nobody_is_accepted_any_more_is_not_lost(
    new_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    """An accepted connection that nobody has would stay open, and its client would wait."""

    async def main() -> None:
        loop, tasks = asyncio.get_running_loop(), list[asyncio.Task[Any]]()
        with listening("127.0.0.1", 0, what="a test", flag="port") as sock:
            for first in (True, False):  # the loop hears of both in one turn, in either order
                with sock.dup() as same:
                    if not first:
                        loop.add_reader(same, lambda: tasks[-1].cancel())
                    tasks.append(asyncio.create_task(module.accepted(loop, sock)))
                    await asyncio.sleep(0)
                    if first:
                        loop.add_reader(same, lambda: tasks[-1].cancel())
                    with socket.create_connection(sock.getsockname()):
                        await asyncio.wait(tasks)
                        loop.remove_reader(same)
                        taken = sock.accept() if tasks[-1].cancelled() else tasks[-1].result()
                        taken[0].close()

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(main())


def test_a_flood_of_connections_leaves_others_their_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(door: Door) -> None:
        loop, accepted, seen = asyncio.get_running_loop(), 0, asyncio.Event()
        at: list[int] = []

        async def at_once(*_: object) -> tuple[socket.socket, tuple[str, int]]:
            nonlocal accepted
            if accepted == 100:
                await asyncio.Event().wait()
            if not accepted:
                loop.call_soon(lambda: (at.append(accepted), seen.set()))
            accepted += 1
            ours, theirs = socket.socketpair()
            ours.setblocking(False)
            door.clients.append(theirs)
            return ours, (f"10.0.0.{accepted}", 1)

        monkeypatch.setattr(module, "accepted", at_once)
        await door.come()
        await seen.wait()
        assert at[0] <= module.AT_ONCE

    run(test, limit=1000)


@pytest.mark.parametrize("family", ["127.0.0.1", "::1"])
def test_a_port_is_free_for_a_restart_though_its_last_connections_are_remembered(family: str) -> None:
    """The side that closes first has them in TIME_WAIT for a minute."""
    first = listening(family, 0, what="a test", flag="port")
    first.setblocking(True)
    with socket.create_connection(first.getsockname()[:2]) as client:
        served, _ = first.accept()
        served.close()
        client.recv(1)
    port = first.getsockname()[1]
    first.close()
    listening(family, port, what="a test", flag="port").close()


TLS: Any = object()  # it is not used before there is a first byte of TLS


def test_who_says_nothing_before_tls_is_cut_in_time_and_who_leaves_at_once() -> None:
    async def test(door: Door) -> None:
        mute = await told(await door.come())
        assert isinstance(mute.why_cut, BootstrapUnreachable)
        assert len(door.listener.pending) == 0
        gone = await door.come()
        door.clients[-1].close()
        assert isinstance((await told(gone)).why_cut, BootstrapUnreachable)
        assert door.counts == {}, "nobody was refused"

    run(test, tls=TLS, handshake_s=0.05)


def test_a_first_byte_that_is_not_tls_is_refused_in_plain_bytes_and_is_still_there_to_be_read() -> None:
    async def test(door: Door) -> None:
        plain = await told(await door.come(b"GET /"))
        assert isinstance(plain.refused, PeerRefused)
        assert plain.why_cut is None
        assert plain in door.listener.pending

    run(test, tls=TLS)


def test_who_is_still_being_let_in_goes_for_others_and_at_the_end_like_everybody() -> None:
    async def test(door: Door) -> None:
        mute = [await door.come() for _ in range(3)]
        assert isinstance((await told(mute[0])).why_cut, OutOfCapacity)
        assert door.clients[0].recv(1) == b"", "its socket is closed, too"
        assert door.counts == {"pending_dropped": 2}, "half of all may be from one address"
        await door.listener.close()
        for one in mute[1:]:
            assert (await told(one)).why_cut is not None
        await door.listener.close()

    run(test, tls=TLS, limit=2)


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:80"),
        ("0.0.0.0", "http://127.0.0.1:80"),
        ("::", "http://[::1]:80"),
        ("fd00::1", "http://[fd00::1]:80"),
        ("node-1", "http://node-1:80"),
    ],
)
def test_the_url_of_what_listens_is_one_that_this_host_can_use(host: str, url: str) -> None:
    assert url_of("http", host, 80) == url
