"""Random instances killed while 32 clients stream: no hang, no wrong token, typed errors, no leak."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import soak_kills
import traffic
from cluster import Cluster
from tiny_model import VOCAB

TWO_AND_TWO = ("prefill-0", "prefill-1", "decode-0", "decode-1")
#: A dead peer is seen at once by its closed socket, and not by its silence.
BUDGET = ("--request-budget-s", "60")


@pytest.mark.timeout(300)
def test_three_kills_under_load(tiny: Path) -> None:
    # With pauses, or the instances that come back would have to share two cores with a full load.
    assert_kills_lose_nothing(tiny, 3, think_s=0.8, max_tokens=120)


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_fifty_kills_under_load(tiny: Path) -> None:
    assert_kills_lose_nothing(tiny, 50)


def assert_kills_lose_nothing(model: Path, kills: int, think_s: float = 0.0, max_tokens: int = 300) -> None:
    asks = traffic.asks(3, 48, vocab=VOCAB - 8, longest=200, max_tokens=max_tokens)
    asks += traffic.asks(4, 1, vocab=VOCAB - 8, longest=20, max_tokens=4)
    # So small a pool that cached prompts go soon, and a full batch has to be retracted now and then.
    with Cluster(model, TWO_AND_TWO, limits=BUDGET, kv_gib=0.006) as cluster:
        report = asyncio.run(soak_kills.run(cluster, asks, kills=kills, think_s=think_s))
        soak_kills.check(report, kills)
        soak_kills.check_healed(report, kills)
