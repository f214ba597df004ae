"""A process stands still past every timeout while clients stream, and goes on as if nothing had been.

Its peers have given it up meanwhile: its streams went on elsewhere, its pages were fenced. What it
still believes when it wakes up must harm nobody: no stream gets a token of it, no page a late write.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import psutil
import pytest
import soak_kills
import traffic
from cluster import MODEL, Cluster
from served import Served
from soak_kills import WITHIN_S, Kill, Report, Traffic
from test_kills import BUDGET, TWO_AND_TWO
from tiny_model import VOCAB
from under_load import leave, under_load

pytestmark = pytest.mark.timeout(300)

QUICK = ("--keepalive-s", "0.5", "--peer-silence-s", "4", *BUDGET)
#: Longer than the silence after which a peer is given up, with the sign of life before it.
PAUSE_S = 5.5
#: Longer than all others too: the handshake's and a dial's 5 s, and the registry's 10 s.
LONG_PAUSE_S = 13.0
OTHER = {"prefill-0": "prefill-1", "decode-0": "decode-1"}


def asks(max_tokens: int = 200) -> list[traffic.Ask]:
    """Long ones, so that a pause meets streams in their middle, and a short one for the prober."""
    return [
        *traffic.asks(41, 32, vocab=VOCAB - 8, longest=200, max_tokens=max_tokens),
        *traffic.asks(42, 1, vocab=VOCAB - 8, longest=20, max_tokens=4),
    ]


def pausing(
    process: psutil.Process, pause_s: float, *, others_serve: bool, moved: str = ""
) -> Callable[[Traffic], Awaitable[None]]:
    """Stop `process` for `pause_s`. While it stands still others must serve, where there are others, and the
    frontend counts with `moved` what it takes away from it: it stands still until then."""

    async def act(load: Traffic) -> None:
        pause = Kill(str(process.pid), time.monotonic())
        load.report.kills.append(pause)
        process.send_signal(signal.SIGSTOP)
        try:
            if others_serve:
                pause.first_success_s = await load.success_since(pause.at, WITHIN_S)
            await asyncio.sleep(pause.at + pause_s - time.monotonic())
            async with asyncio.timeout(WITHIN_S):
                while moved and not soak_kills.count(load.report, moved):
                    load.report.healed = await asyncio.to_thread(soak_kills.healed, load.url)
            assert process.status() == psutil.STATUS_STOPPED
        finally:
            process.send_signal(signal.SIGCONT)
        woken_s = await load.success_since(time.monotonic(), WITHIN_S)
        if pause.first_success_s is None:
            pause.first_success_s = woken_s

    return act


def check(report: Report, clients: int) -> None:
    """No stream hangs, has a wrong token or an error: each was continued within its deadline."""
    soak_kills.check(report, 1)
    assert report.failed == {}
    assert report.failed_begun == {}
    assert report.spanned >= clients / 2, "hardly a stream ran when it began"


@pytest.mark.parametrize(
    ("name", "clients", "pause_s"),
    [
        ("decode-0", 16, PAUSE_S),
        pytest.param("decode-0", 32, LONG_PAUSE_S, marks=pytest.mark.soak),
        pytest.param("prefill-0", 32, LONG_PAUSE_S, marks=pytest.mark.soak),
    ],
)
def test_lesson_10_a_paused_instance_costs_no_stream_and_serves_again(
    name: str, clients: int, pause_s: float, tiny: Path
) -> None:
    with Cluster(tiny, TWO_AND_TWO, limits=QUICK) as cluster:
        paused = psutil.Process(cluster.parts[name].process.pid)
        moved = soak_kills.CONTINUED if name == "decode-0" else soak_kills.RETRIED
        act = pausing(paused, pause_s, others_serve=True, moved=moved)
        # So long that most of a stream's time is its generation: the pause meets some that have a token.
        report = asyncio.run(under_load(cluster.url, asks(800), act, clients=clients, rest=cluster.rest))
        check(report, clients)
        assert soak_kills.count(report, moved) > 0, report.healed
        before, after = (
            {s["incarnation"] for s in states.values()} for states in (report.before, report.after)
        )
        assert before == after, "who only paused is the same as before"
        # It serves again: nobody else of its role is left.
        right = asyncio.run(soak_kills.references(cluster.url, asks()[:8]))
        leave(cluster, OTHER[name])
        assert asyncio.run(soak_kills.references(cluster.url, asks()[:8])) == right
        cluster.rest()


@pytest.mark.soak
def test_streams_stall_while_the_frontend_is_paused_and_then_end_well(tiny: Path) -> None:
    """The instances give the frontend up and end what they did for it; it begins all of it anew."""
    with Cluster(tiny, TWO_AND_TWO, limits=QUICK) as cluster:
        paused = psutil.Process(cluster.parts["frontend"].process.pid)
        act = pausing(paused, LONG_PAUSE_S, others_serve=False)
        # So long that they cannot end, into the sockets' buffers, before the frontend is given up.
        long = asks(2000)
        report = asyncio.run(under_load(cluster.url, long, act, clients=32, rest=cluster.rest))
        check(report, 32)
        assert soak_kills.count(report, soak_kills.CONTINUED) > 0, report.healed


@pytest.mark.soak
def test_nobody_notices_that_the_registry_is_paused(tiny: Path) -> None:
    """`segue serve` has its registry in the supervisor. All that it knew is past its time when it wakes."""
    flags = ("--prefill", "2", "--decode", "2", "--dtype", "float32", "--kv-gib", "0.05", "--port", "0")
    flags += ("--threads-per-worker", "1", "--model", str(tiny), "--served-model-name", MODEL)
    with Served(*flags, *QUICK) as made:
        act = pausing(psutil.Process(made.process.pid), LONG_PAUSE_S, others_serve=True)
        report = asyncio.run(under_load(made.url, asks(), act, clients=32, rest=made.at_rest))
        check(report, 32)
        assert soak_kills.count(report, soak_kills.CONTINUED) == 0, report.healed
        assert soak_kills.count(report, soak_kills.RETRIED) == 0, report.healed
