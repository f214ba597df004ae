"""Somebody waits for a registry that comes late, never, or is not ours."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable

import pytest

from ports import HeldPort
from segue.kv.errors import BootstrapTimeout, BootstrapUnreachable, PeerRefused, SegueError, Unauthorized
from segue.kv.limits import Limits
from segue.server.registry import arrival as module
from segue.server.registry.arrival import arrival, until_answered
from segue.server.registry.registry_server import serve

LIMITS = Limits(handshake_s=60.0, connect_s=60.0)
SECRET = b"a-secret-of-some-length"


class Waiting:
    """One who waits for the registry at a port where nobody is yet, and nobody else will be."""

    def __init__(self, *, wait_s: float = 60.0, url: str = "", held: HeldPort | None = None) -> None:
        self._held = held or HeldPort()
        self.port = self._held.port
        self.stop = asyncio.Event()
        self.said: list[str] = []
        self.spoke = asyncio.Event()
        self.task = asyncio.ensure_future(
            arrival(
                url or f"http://127.0.0.1:{self.port}",
                secret=SECRET,
                limits=LIMITS,
                tls=None,
                wait_s=wait_s,
                stop=self.stop,
                say=self._say,
            )
        )

    def _say(self, text: str) -> None:
        self.said.append(text)
        self.spoke.set()


async def answers(status: bytes, served: asyncio.Event, port: int) -> asyncio.Server:
    """Something at `port` that answers every request with `status`."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 " + status + b"\r\ncontent-length: 4\r\nconnection: close\r\n\r\nbusy")
        await writer.drain()
        writer.close()
        served.set()

    return await asyncio.start_server(answer, "127.0.0.1", port)


async def test_a_registry_that_comes_late_is_waited_for_and_said_at_once() -> None:
    one = Waiting()
    await one.spoke.wait()
    assert (
        f"waiting for the registry, 60 s at most: the registry at http://127.0.0.1:{one.port}" in one.said[0]
    )
    assert not one.task.done()
    server = await serve("127.0.0.1", one.port, secret=SECRET, limits=LIMITS)
    assert await one.task is True
    await server.close()


async def test_one_that_never_comes_is_given_up_by_name_and_setting() -> None:
    for wait_s in (
        0.3,
        3.0,
        30.0,
    ):  # that its time is over when it has first asked is the machine's doing
        one = Waiting(wait_s=wait_s)
        said = rf"{one.port} cannot be reached.*{wait_s:g} s \(--registry-wait-s\)"
        with pytest.raises(BootstrapUnreachable, match=said):
            await one.task
        if one.said:
            break
    assert len(one.said) == 1


async def test_with_no_time_to_wait_it_is_asked_once() -> None:
    one = Waiting(wait_s=0.0)
    with pytest.raises(BootstrapUnreachable):
        await one.task
    assert one.said == []


async def test_whoever_is_asked_to_stop_stops_waiting() -> None:
    one = Waiting()
    await one.spoke.wait()
    one.stop.set()
    assert await one.task is False


async def test_a_name_that_is_not_known_yet_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, held, known = asyncio.get_running_loop(), HeldPort(), asyncio.Event()
    original = loop.getaddrinfo

    async def getaddrinfo(host: str | bytes | None, *rest: object, **more: object) -> object:
        if host in ("segue-prefill", b"segue-prefill"):
            if not known.is_set():
                raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
            host = "127.0.0.1"
        return await original(host, *rest, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(loop, "getaddrinfo", getaddrinfo)
    one = Waiting(url=f"http://segue-prefill:{held.port}", held=held)
    await one.spoke.wait()
    server = await serve("127.0.0.1", held.port, secret=SECRET, limits=LIMITS)
    known.set()
    assert await one.task is True
    await server.close()


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504, 522])
async def test_a_proxy_with_nobody_behind_it_is_waited_for(status: int) -> None:
    one, served = Waiting(), asyncio.Event()
    proxy = await answers(b"%d Because" % status, served, one.port)
    await served.wait()
    await one.spoke.wait()
    proxy.close()
    await proxy.wait_closed()
    server = await serve("127.0.0.1", one.port, secret=SECRET, limits=LIMITS)
    assert await one.task is True
    await server.close()


async def test_what_time_heals_is_asked_again_and_said_once() -> None:
    answers_: list[SegueError | None] = [
        BootstrapUnreachable("it restarts"),
        BootstrapTimeout("it restarts"),
        None,
    ]
    said: list[str] = []

    async def ask() -> None:
        answer = answers_.pop(0)
        if answer is not None:
            raise answer

    def asked(stop: asyncio.Event) -> Awaitable[bool]:
        return until_answered(ask, wait_s=60, stop=stop, say=said.append)

    assert await asked(asyncio.Event())
    assert answers_ == []
    assert len(said) == 1
    assert "it restarts" in said[0]
    answers_.extend([PeerRefused("no"), BootstrapUnreachable("away")])
    with pytest.raises(PeerRefused):
        await asked(asyncio.Event())
    stop = asyncio.Event()
    stop.set()
    assert not await asked(stop)


async def test_what_time_does_not_heal_is_raised_at_once() -> None:
    one = Waiting()
    stranger = await answers(b"404 Not Found", asyncio.Event(), one.port)
    with pytest.raises(PeerRefused, match="is no segue registry"):
        await one.task
    stranger.close()
    other = Waiting()
    server = await serve("127.0.0.1", other.port, secret=SECRET[::-1], limits=LIMITS)
    with pytest.raises(Unauthorized):
        await other.task
    await server.close()


def test_pauses_grow_to_a_bound_and_differ_between_those_who_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Virtual time: ten minutes of waiting ask some hundred times, not thousands."""

    async def wait(seed: float) -> tuple[list[float], list[str]]:
        now, pauses, said = 0.0, list[float](), list[str]()

        async def pause(task: Awaitable[object], timeout_s: float) -> object:
            nonlocal now
            task.close()  # type: ignore[attr-defined]
            pauses.append(timeout_s)
            now += timeout_s
            raise TimeoutError

        class Backend:
            def __init__(self, *_: object) -> None: ...
            async def instances(self, *_: object) -> None:
                raise BootstrapUnreachable("nobody")

            async def close(self) -> None: ...

        monkeypatch.setattr(module, "open_backend", Backend)
        monkeypatch.setattr(module.time, "monotonic", lambda: now)
        monkeypatch.setattr(module.asyncio, "wait_for", pause)
        monkeypatch.setattr(module.random, "uniform", lambda low, high: low + (high - low) * seed)
        with pytest.raises(BootstrapUnreachable, match="given up after 600 s"):
            await arrival(
                "http://h:1",
                secret=None,
                limits=LIMITS,
                tls=None,
                wait_s=600.0,
                stop=asyncio.Event(),
                say=said.append,
            )
        monkeypatch.undo()
        return pauses, said

    first, said = asyncio.run(wait(0.0))
    second, _ = asyncio.run(wait(1.0))
    assert first[:5] != second[:5]
    assert sum(first) == pytest.approx(600.0)
    for pauses in (first, second):
        assert max(pauses) <= 5.0
        assert 100 < len(pauses) < 300
        assert min(pauses[:-1]) >= 0.1
    assert 600 / 25 < len(said) <= 600 / 15 + 1
