"""A task that nobody waits for: whatever it raises is heard of, and what must go on goes on."""

from __future__ import annotations

import asyncio
import logging

import pytest

from segue.kv.errors import Draining, ErrorCode, SegueError
from segue.kv.session import tasks


@pytest.mark.parametrize(
    ("error", "code", "traceback"),
    [(Draining("it leaves"), ErrorCode.DRAINING, False), (KeyError("a bug"), ErrorCode.INTERNAL, True)],
)
def test_a_failure_in_the_background_reaches_its_owner_typed(
    error: Exception, code: ErrorCode, traceback: bool, caplog: pytest.LogCaptureFixture
) -> None:
    heard: list[SegueError] = []

    async def work() -> None:
        raise error

    async def main() -> None:
        await tasks.background(work(), name="the work", failed=heard.append)

    asyncio.run(main())
    assert [each.info.code for each in heard] == [code]
    # A bug is logged with where it came from; what is expected is its owner's to log.
    assert [bool(record.exc_info) for record in caplog.records] == [True] * traceback


def test_a_cancelled_one_is_no_failure_even_before_its_first_step() -> None:
    heard: list[SegueError] = []

    async def main() -> None:
        forever = asyncio.Event()
        for steps in (0, 1):
            task = tasks.background(forever.wait(), name="x", failed=heard.append)
            for _ in range(steps):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait({task})
            assert task.cancelled()

    asyncio.run(main())
    assert not heard


def test_what_must_not_end_begins_again_whatever_it_raises_and_pauses_longer_each_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ends: list[Exception | None] = [
        KeyError("a bug"),
        Draining("it left"),
        None,
        OSError("x"),
        ValueError("y"),
    ]
    heard: list[ErrorCode] = []
    pauses: list[float] = []
    sleep = asyncio.sleep

    async def work() -> None:
        if not ends:
            await asyncio.Event().wait()
        end = ends.pop(0)
        if end is not None:
            raise end

    def failed(error: SegueError) -> None:
        heard.append(error.info.code)
        raise RuntimeError("a bug in the owner")  # is no reason to stop either

    async def pause(seconds: float) -> None:
        pauses.append(seconds)
        await sleep(0)

    async def main() -> None:
        task = tasks.keep_running(work, name="the work", failed=failed)
        while ends or not pauses:
            await sleep(0)
        for _ in range(5):
            await sleep(0)
        assert not task.done()
        task.cancel()
        await asyncio.wait({task})

    monkeypatch.setattr(tasks.asyncio, "sleep", pause)  # type: ignore[attr-defined]
    monkeypatch.setattr(tasks, "LONGEST_PAUSE_S", 0.5)
    caplog.set_level(logging.CRITICAL)
    asyncio.run(main())
    assert heard == [ErrorCode.INTERNAL, ErrorCode.DRAINING] + [ErrorCode.INTERNAL] * 3
    assert pauses == [0.1, 0.2, 0.4, 0.5, 0.5]


def test_pauses_are_short_again_after_a_long_life(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    lives = [0.0, 0.0, 100.0, 0.0]
    pauses: list[float] = []
    sleep = asyncio.sleep

    async def work() -> None:
        if not lives:
            await asyncio.Event().wait()
        now[0] += lives.pop(0)
        raise Draining("it left")

    async def pause(seconds: float) -> None:
        pauses.append(seconds)
        await sleep(0)

    async def main() -> None:
        monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now[0])
        task = tasks.keep_running(work, name="the work")
        for _ in range(20):
            await sleep(0)
        task.cancel()
        await asyncio.wait({task})

    monkeypatch.setattr(tasks.asyncio, "sleep", pause)  # type: ignore[attr-defined]
    asyncio.run(main())
    assert pauses == [0.1, 0.2, 0.1, 0.2]
