"""A child of `segue serve` that is killed while clients stream: it is started again, and its successor serves
what was in flight."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import traffic
from served import Served
from tiny_model import VOCAB

pytestmark = [pytest.mark.timeout(400)]

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


def test_the_only_prefill_and_then_the_only_decode_are_killed(tiny: Path) -> None:
    with serving(tiny) as served:
        # Long prompts, so that some of them wait for prefill when it dies.
        assert_nobody_notices(served, "prefill-0", longest=3000, max_tokens=40)
        assert_nobody_notices(served, "decode-0")
        assert served.stop() == 0


@pytest.mark.soak
def test_a_unified_instance_and_one_of_two_ranks_are_killed(tiny: Path) -> None:
    with serving(tiny, "--unified") as served:
        assert_nobody_notices(served, "unified-0")
    with serving(tiny, "--prefill-tp", "2") as served:
        assert_nobody_notices(served, "prefill-0", longest=3000, max_tokens=40)
        [rank] = served.instances("segue.server.instance.rank_process")
        rank.kill()
        served.logged(re.compile("event=serves_again child=prefill-0"), 2)
        assert_nobody_notices(served, "decode-0")


def test_a_dp_rank_is_killed_and_its_instance_comes_back_whole(tiny: Path) -> None:
    with serving(tiny, "--decode-dp", "2") as served:
        asks = traffic.asks(5, 4, vocab=VOCAB - 8, longest=300, max_tokens=600)
        before = results_of(served.url, asks)
        after = results_of(served.url, asks, lambda: kill(served, "decode-0.dp1"))
        assert [(r.error, r.tokens) for r in after] == [("", r.tokens) for r in before]
        served.logged(re.compile("event=serves_again child=decode-0"))
        assert len(served.instances("decode")) == 2
        assert served.stop() == 0


def test_the_frontend_is_killed_and_serves_at_the_same_port(tiny: Path) -> None:
    with serving(tiny) as served:
        asks = traffic.asks(5, 4, vocab=VOCAB - 8, longest=300, max_tokens=200)
        before = results_of(served.url, asks)
        kill(served, "frontend")
        served.logged(re.compile("event=serves_again child=frontend"))
        after = results_of(served.url, asks)
        assert [(r.error, r.tokens) for r in after] == [("", r.tokens) for r in before]
        assert served.stop() == 0


def test_an_instance_that_cannot_start_again_ends_the_service_with_the_reason(
    tiny: Path, tmp_path: Path
) -> None:
    """Its model is gone. Who waits hears it at once, and does not wait for its own deadline."""
    folder = tmp_path / "model"
    shutil.copytree(tiny, folder)
    served = Served("--model", str(folder), "--served-model-name", "tiny", *SERVE)
    with served:
        asks = traffic.asks(5, 4, vocab=VOCAB - 8, longest=300, max_tokens=2000)

        def lost() -> None:
            (folder / "model.safetensors").unlink()
            kill(served, "decode-0")

        results = results_of(served.url, asks, lost)
        assert {r.error for r in results} == {"BOOTSTRAP_UNREACHABLE"}
        assert all("ask another" not in r.text for r in results)
        assert served.process.wait(60) == 1
        assert "segue: decode-0 was started again 5 times within 60 s of service" in served.log()
        assert "Traceback" not in served.log().split("segue: decode-0 was started again")[1]
        served.forget()
