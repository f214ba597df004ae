"""A child of `segue serve` that dies is started again, and what was in flight is served by its successor."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import traffic
from served import Served
from tiny_model import VOCAB

pytestmark = [pytest.mark.timeout(240)]

SERVE = ("--dtype", "float32", "--kv-gib", "0.05", "--threads-per-worker", "1", "--port", "0")


def serving(tiny: Path, *flags: str) -> Served:
    return Served("--model", str(tiny), "--served-model-name", "tiny", *SERVE, *flags)


def pid_of(served: Served, name: str) -> int:
    return int(re.findall(rf"event=started child={re.escape(name)} pid=(\d+)", served.log())[-1])


def kill(served: Served, name: str) -> None:
    os.kill(pid_of(served, name), signal.SIGKILL)


def results_of(
    url: str, asks: Sequence[traffic.Ask], meanwhile: Callable[[], object] = lambda: None
) -> list[traffic.Result]:
    """The results of `asks`; `meanwhile` is called when one of them has a token, then all are sent again."""

    async def run() -> list[traffic.Result]:
        first = asyncio.Event()

        def begin() -> list[asyncio.Task[traffic.Result]]:
            return [
                asyncio.create_task(traffic.stream(url, "tiny", ask, first=first, within_s=120))
                for ask in asks
            ]

        running = begin()
        await first.wait()
        meanwhile()
        running += begin()
        return list(await asyncio.gather(*running))

    return asyncio.run(run())


def assert_nobody_notices(served: Served, victim: str, *, longest: int = 300, max_tokens: int = 600) -> None:
    """Every stream that ran when `victim` was killed, and every one that came while it was away, ends with
    the tokens that it would have had."""
    asks = traffic.asks(5, 4, vocab=VOCAB - 8, longest=longest, max_tokens=max_tokens)
    before = results_of(served.url, asks)
    assert [(r.error, r.text) for r in before if r.error] == []
    again = len(re.findall(rf"event=serves_again child={re.escape(victim)}", served.log()))
    after = results_of(served.url, asks, lambda: kill(served, victim))
    assert [(r.error, r.text) for r in after if r.error] == []
    assert [r.tokens for r in after] == [r.tokens for r in before]
    served.logged(re.compile(rf"event=serves_again child={re.escape(victim)}"), again + 1)


@pytest.mark.slow
def test_the_only_decode_is_killed_and_every_stream_ends_with_its_own_tokens(tiny: Path) -> None:
    with serving(tiny) as served:
        assert_nobody_notices(served, "decode-0")
        assert served.stop() == 0
