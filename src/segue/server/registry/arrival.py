"""Waiting for a registry that is not there yet: in a cluster nothing says who starts first."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Awaitable, Callable

from segue.kv import BootstrapUnreachable, Limits, SegueError
from segue.kv.session import Backoff, Tls
from segue.server.registry.client import open_backend

#: How often somebody who waits is told that it still does.
SAY_EVERY_S = 15.0


async def arrival(
    url: str,
    *,
    secret: bytes | None,
    limits: Limits,
    tls: Tls | None,
    wait_s: float,
    stop: asyncio.Event,
    say: Callable[[str], object],
) -> bool:
    """Return True once the registry at `url` answers us, False if `stop` is set before.

    Errors that time can heal (nobody listens, the name is not known yet, no answer) are waited for, `wait_s`
    in all, then BootstrapUnreachable. Other errors (a wrong secret, no registry of ours, TLS) are raised at
    once. `say` is called at once with the reason for the wait, and then every `SAY_EVERY_S`.
    """
    backend = open_backend(url, secret, limits, tls)

    async def ask() -> None:
        await backend.instances(None, None, 0.0)

    try:
        return await until_answered(ask, wait_s=wait_s, stop=stop, say=say)
    finally:
        await backend.close()


async def until_answered(
    ask: Callable[[], Awaitable[object]], *, wait_s: float, stop: asyncio.Event, say: Callable[[str], object]
) -> bool:
    """Call `ask` until it raises nothing; False if `stop` is set before. Waits and raises as `arrival`."""
    began = said_at = time.monotonic()
    backoff = Backoff(0.2, uniform=random.uniform)
    while not stop.is_set():
        try:
            await ask()
            return True
        except SegueError as error:
            if not error.info.retryable:
                raise
            trouble = error
        now = time.monotonic()
        left_s = began + wait_s - now
        if left_s <= 0:
            text = f"{trouble}; given up after {wait_s:g} s (--registry-wait-s)"
            raise BootstrapUnreachable(text) from trouble
        if said_at == began or now - said_at >= SAY_EVERY_S:
            said_at = now
            say(f"waiting for the registry, {left_s:.0f} s at most: {trouble}")
        # Many instances of one deployment wait for one registry: they must not come all at once.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), min(left_s, backoff.next_s()))
    return False
