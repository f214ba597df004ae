"""The parts of a leader beside the protocol: threads, the digester's queue, the life of its sessions."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError
from contextlib import nullcontext
from typing import Any

import pytest

from segue.kv.config import SessionConfig
from segue.kv.control_plane import ControlPlane
from segue.kv.ids import Incarnation, LeaderId, Role, TransferId
from segue.kv.threads import ThreadPerCall, WorkerThread

PEER = LeaderId(Incarnation("a" * 32))
TRANSFER = TransferId(1, 0, PEER, LeaderId(Incarnation("b" * 32)))


# ---- threads -----------------------------------------------------------------------------------------


def test_a_call_that_hangs_holds_up_no_other_one_and_each_gives_what_came_of_it() -> None:
    calls, go_on = ThreadPerCall("a-test"), threading.Event()
    hangs = calls.submit(go_on.wait, 60)
    assert calls.submit(divmod, 7, 2).result(60) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        calls.submit(divmod, 7, 0).result(60)
    with pytest.raises(SystemExit):  # who waits would wait for ever
        calls.submit(sys.exit, 3).result(60)
    assert not hangs.done()
    go_on.set()
    assert hangs.result(60) is True


def test_a_call_that_was_cancelled_before_it_began_is_not_made() -> None:
    later: list[Callable[[], None]] = []
    calls, made = ThreadPerCall("a-test", lambda _, run: later.append(run)), list[int]()
    first, second = calls.submit(made.append, 1), calls.submit(made.append, 2)
    assert first.cancel()
    for run in later:
        run()
    assert made == [2]
    assert second.done()
    with pytest.raises(CancelledError):
        first.result(0)


def test_a_worker_does_its_work_as_often_as_it_is_woken_and_none_after_its_end() -> None:
    done, turns = list[int](), threading.Semaphore(0)

    def work() -> None:
        done.append(1)
        turns.release()

    worker = WorkerThread(work, "a-test")
    for _ in range(3):
        worker.wake()
    worker.start()
    for _ in range(3):
        assert turns.acquire(timeout=60)
    worker.end()
    worker.end()
    worker.wake()
    assert len(done) == 3
    WorkerThread(work, "never started").end()
    assert len(done) == 3


# ---- the sessions' life ------------------------------------------------------------------------------


@pytest.mark.parametrize("breaks", ["sessions", "then", "both", ""])
def test_whatever_breaks_at_the_end_the_rest_is_done_once_and_the_thread_ends(
    breaks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    plane = ControlPlane(SessionConfig(role=Role.DECODE), {})

    async def before() -> None:
        told.append("before")
        assert plane.address == ("127.0.0.1", 0), "it does not listen yet"

    async def sessions_end() -> None:
        told.append("sessions")
        if breaks in ("sessions", "both"):
            raise RuntimeError("a bug")

    def then() -> None:
        told.append("then")
        assert plane.io.running
        if breaks in ("then", "both"):
            raise RuntimeError("a bug")

    assert plane.start(before()) == plane.address
    ends = plane.node.close
    monkeypatch.setattr(plane.node, "close", sessions_end)
    plane.io.call(ends(), 60)
    with pytest.raises(RuntimeError) if breaks else nullcontext():
        plane.close(then)
    plane.close(then)
    assert told == ["before", "sessions", "then"]
    assert not plane.io.running


def test_a_peer_is_dialled_by_one_dialler_until_it_is_dropped_and_by_none_after_the_end() -> None:
    plane, dialled = ControlPlane(SessionConfig(role=Role.DECODE), {}), list[str]()

    async def connect(host: str, *_: Any, **__: Any) -> None:
        dialled.append(host)
        await asyncio.Event().wait()

    async def keep(*hosts: str) -> None:
        for host in hosts:
            plane.keep_session(PEER, host, 9, lambda _: None)
        for _ in range(3):
            await asyncio.sleep(0)

    plane.node.connect = connect  # type: ignore[method-assign]
    plane.start()
    plane.io.call(keep("there", "there"), 60)
    plane.io.loop.call_soon_threadsafe(plane.drop_session, PEER)
    plane.io.call(keep("elsewhere"), 60)
    plane.io.call(plane.close_sessions(), 60)
    plane.io.call(keep("too late"), 60)
    plane.close()
    assert dialled == ["there", "elsewhere"]
