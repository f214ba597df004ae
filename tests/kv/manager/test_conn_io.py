"""How another thread waits for what it has asked of the I/O thread."""

from __future__ import annotations

import asyncio
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from segue.kv.io import SLICE_S, IoThread
from segue.kv.session.event_loop import MAX_LOOKUPS


class StoodStill(Future[str]):
    """Its waiter wakes up late, as one whose process was stopped: the loop has had no time meanwhile."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times
        self.waited: list[float | None] = []

    def result(self, timeout: float | None = None) -> str:
        self.waited.append(timeout)
        if len(self.waited) <= self.times:
            raise TimeoutError
        if not self.done():
            self.set_result("there")
        return super().result(timeout)


@pytest.fixture
def io() -> Iterator[IoThread]:
    made = IoThread()
    made.start()
    yield made
    made.stop()


def test_what_the_loop_had_no_time_for_is_not_late(io: IoThread) -> None:
    future = StoodStill(1)
    assert io.wait(future, 5.0) == "there"
    assert future.waited == [SLICE_S] * 2


def test_what_has_come_at_the_very_end_of_the_time_is_not_late() -> None:
    class AtLast(Future[str]):
        def result(self, timeout: float | None = None) -> str:
            if not self.done():
                self.set_result("there")
                raise TimeoutError
            return super().result(timeout)

    io = IoThread()
    assert io.wait(AtLast(), SLICE_S) == "there"
    io.stop()


def test_a_wait_ends_after_all_of_its_time() -> None:
    io, future = IoThread(), StoodStill(10**6)
    with pytest.raises(TimeoutError):
        io.wait(future, 5 * SLICE_S / 2)
    assert future.waited == [SLICE_S, SLICE_S, SLICE_S / 2]
    io.stop()


def test_an_error_of_the_work_itself_is_raised_also_if_it_is_a_timeout(io: IoThread) -> None:
    async def late() -> None:
        raise TimeoutError("its own")

    with pytest.raises(TimeoutError, match="its own"):
        io.call(late(), 60.0)

    async def never() -> None:
        await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        io.call(never(), 0.01)


class Names:
    """A resolver that answers once `answers` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[str] = []
        self.answers = threading.Event()
        self._really = socket.getaddrinfo
        monkeypatch.setattr(socket, "getaddrinfo", self)

    def __call__(self, host: str, port: int, *options: Any) -> list[Any]:
        if host[0].isdigit() or options[-1] & socket.AI_NUMERICHOST:
            return self._really(host, port, *options)
        self.asked.append(host)
        self.answers.wait(60)
        if host == "nobody":
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(2, 1, 6, "", ("192.0.2.7", port))]


def test_a_name_is_asked_for_once_at_a_time_and_a_number_not_at_all(
    io: IoThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = Names(monkeypatch)

    async def ask() -> list[Any]:
        resolve = io.loop.getaddrinfo
        asking = [asyncio.ensure_future(resolve(name, 80)) for name in ("one", "one", "nobody", "one")]
        await asyncio.sleep(0)
        asking[1].cancel()
        [(*_, number)] = await resolve("192.0.2.9", 80, type=socket.SOCK_STREAM)
        names.answers.set()
        return [number, *await asyncio.gather(*asking, return_exceptions=True)]

    number, first, second, third, fourth = io.call(ask(), 30)
    assert number == ("192.0.2.9", 80)
    assert first == fourth == [(2, 1, 6, "", ("192.0.2.7", 80))]
    assert isinstance(second, asyncio.CancelledError)
    assert isinstance(third, socket.gaierror)
    assert sorted(names.asked) == ["nobody", "one"]


def test_no_more_names_are_resolved_at_once_than_there_may_be_threads(
    io: IoThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = Names(monkeypatch)

    async def ask() -> str:
        many = [asyncio.ensure_future(io.loop.getaddrinfo(f"n{i}", 80)) for i in range(MAX_LOOKUPS)]
        await asyncio.sleep(0)
        with pytest.raises(socket.gaierror, match="other names") as refused:
            await io.loop.getaddrinfo("one", 80)
        names.answers.set()
        await asyncio.gather(*many)
        await io.loop.getaddrinfo("one", 80)
        return str(refused.value)

    assert str(MAX_LOOKUPS) in io.call(ask(), 30)


def test_a_name_that_has_no_thread_can_be_asked_for_again(
    io: IoThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = Names(monkeypatch)
    names.answers.set()

    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def ask() -> list[Any]:
        with monkeypatch.context() as no_threads:
            no_threads.setattr(threading.Thread, "start", start)
            with pytest.raises(socket.gaierror, match="new thread"):
                await io.loop.getaddrinfo("one", 80)
        return await io.loop.getaddrinfo("one", 80)

    assert io.call(ask(), 30) == [(2, 1, 6, "", ("192.0.2.7", 80))]


SILENT = """
import asyncio, socket
from segue.kv import IoThread

silent = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
silent.bind(("127.0.0.1", 53))
io = IoThread()
io.start()
asked = asyncio.run_coroutine_threadsafe(io.loop.getaddrinfo("somebody", 80), io.loop)
silent.recvfrom(512)
io.stop()
print("running" if io.running else "stopped", "cancelled" if asked.cancelled() else "waits")
"""


def test_a_process_ends_at_once_while_the_name_server_is_silent(tmp_path: Path) -> None:
    """libuv's threads held it for 20 s, and it crashed as its interpreter went before them."""
    resolver = tmp_path / "resolv.conf"
    resolver.write_text("nameserver 127.0.0.1\noptions timeout:30 attempts:5\n")
    enter = ["unshare", "-rnm", "sh", "-c"]
    if (
        shutil.which("ip") is None
        or subprocess.run([*enter, "ip link set lo up"], capture_output=True).returncode
    ):
        pytest.skip("no network namespaces here")
    script = f'ip link set lo up && mount --bind {resolver} /etc/resolv.conf && exec "$0" -c "$1"'
    done = subprocess.run(
        [*enter, script, sys.executable, SILENT], capture_output=True, text=True, timeout=25, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "stopped cancelled\n", "")
