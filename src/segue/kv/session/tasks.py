"""The three ways to run a task. Do not call `create_task` directly: its exceptions are lost and nothing
restarts it (`tests/house` forbids it).

`background` reports a failure to its owner, `keep_running` restarts, and `awaited` is for a result that the
caller takes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

from segue.kv.backoff import Backoff
from segue.kv.errors import Internal, SegueError

log = logging.getLogger(__name__)

T = TypeVar("T")

#: Pauses of `keep_running` between a failure and the next beginning.
FIRST_PAUSE_S: Final = 0.1
LONGEST_PAUSE_S: Final = 5.0


def typed(error: Exception, what: str) -> SegueError:
    """`error` itself if it is a SegueError. Any other exception is a bug: it is logged with its traceback and
    becomes Internal. `what` names the work that failed."""
    if isinstance(error, SegueError):
        return error
    log.error("a bug: %s failed", what, exc_info=error)
    return Internal(f"a bug: {what} failed: {error!r}")


def awaited(
    work: Coroutine[Any, Any, T], *, name: str = "", loop: asyncio.AbstractEventLoop | None = None
) -> asyncio.Task[T]:
    """A task `name` for `work` on `loop` (default: the running one) whose result or exception the caller
    takes, or whose cancellation it waits for."""
    return (loop or asyncio.get_running_loop()).create_task(work, name=name or None)


def background(
    work: Coroutine[Any, Any, object],
    *,
    name: str,
    failed: Callable[[SegueError], None],
    loop: asyncio.AbstractEventLoop | None = None,
) -> asyncio.Task[None]:
    """Run `work` once on `loop`, with no caller that waits for it. Each exception but a cancellation reaches
    `failed` (see `typed`), which must end the work's purpose visibly. `name` stands in the log."""

    async def guarded() -> None:
        try:
            await work
        except Exception as error:
            failed(typed(error, name))

    task = awaited(guarded(), name=name, loop=loop)
    # Cancelled before its first step it would leave `work` behind, never awaited.
    task.add_done_callback(lambda _: work.close())
    return task


def keep_running(
    make: Callable[[], Coroutine[Any, Any, object]],
    *,
    name: str,
    failed: Callable[[SegueError], None] | None = None,
    loop: asyncio.AbstractEventLoop | None = None,
) -> asyncio.Task[None]:
    """Run the coroutines of `make` on `loop`, one after the other, until the task is cancelled. When one
    raises or ends, `failed` is called (see `typed`), and the next begins after a pause that grows up to
    `LONGEST_PAUSE_S`. `name` stands in the log."""

    async def again() -> None:
        clock = asyncio.get_running_loop().time
        backoff = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        while True:
            began = clock()
            try:
                await make()
                raise Internal(f"{name} has ended, which it must not")
            except Exception as error:
                reason = typed(error, name)
            log.warning("%s begins again: %s", name, reason)
            try:
                if failed is not None:
                    failed(reason)
            except Exception as error:
                typed(error, f"to say that {name} failed")
            if clock() - began > LONGEST_PAUSE_S:
                backoff.reset()
            await asyncio.sleep(backoff.next_s())

    return awaited(again(), name=name, loop=loop)
