"""The canary: `/ready` is true only after a real generation has gone all the way through."""

from __future__ import annotations

import asyncio
import itertools
import logging

from segue.engine.request import Request, SamplingParams
from segue.kv import ErrorCode, ErrorInfo, SegueError
from segue.kv.session import Backoff
from segue.server.frontend.backend import Backend

log = logging.getLogger("segue.frontend.ready")


async def keep_proving(backend: Backend, prompt: list[int], *, budget_s: float = 30.0) -> None:
    """Run a canary whenever somebody could serve and nothing has proven it; never returns.

    Two tokens: the second is made by decode from the KV that was handed over.
    """
    backoff = Backoff(0.2)
    for number in itertools.count():
        while not backend.can_serve or backend.proven:
            backoff.reset()
            await backend.changed()
        try:
            await _canary(backend, f"canary-{number}", prompt, budget_s)
        except SegueError as error:
            log.warning("the canary failed: %s", error)
            await asyncio.sleep(backoff.next_s())


async def _canary(backend: Backend, request_id: str, prompt: list[int], budget_s: float) -> None:
    params = SamplingParams(max_tokens=2, min_tokens=2, temperature=0.0, ignore_eos=True)
    request = Request(request_id=request_id, prompt=prompt, sampling=params)
    try:
        await backend.submit(request, budget_s=budget_s).deliver(lambda _: None)
    finally:
        # Ignored after a proper end.
        backend.cancel(request_id, ErrorInfo(code=ErrorCode.ABORTED_BY_CLIENT, text="the canary ended"))
