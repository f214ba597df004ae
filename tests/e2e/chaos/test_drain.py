"""One instance of a deployment leaves while clients stream: it ends what it has, and nobody notices."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from pathlib import Path

import httpx2 as httpx
import pytest
import soak_kills
import traffic
from cluster import Cluster
from served import Served
from soak_kills import WITHIN_S, Kill, Traffic
from test_kills import TWO_AND_TWO
from tiny_model import VOCAB
from under_load import leave, under_load

pytestmark = pytest.mark.timeout(300)

CLIENTS = 16
REFUSED = 'retries_total{code="DRAINING"}'
#: An instance without work leaves before it has told the frontend that it drains.
DRAINS = re.compile(r"(prefill|decode) \w+ dp0 drains$|the session with (prefill|decode) \w+ dp0 ended")


def asked(part: Served) -> None:
    """Any answer of an instance, or none as it has left."""
    with contextlib.suppress(httpx.TransportError):
        httpx.get(f"{part.door}/integrity", timeout=60)


@pytest.mark.parametrize("name", [pytest.param("prefill-0", marks=pytest.mark.soak), "decode-0"])
def test_a_leaving_instance_ends_its_streams_and_gets_no_new_ones(name: str, tiny: Path) -> None:
    # Prompts that keep a prefill instance busy, and answers that keep a decode instance.
    asks = traffic.asks(51, 24, vocab=VOCAB - 8, longest=1200, max_tokens=200)
    asks += traffic.asks(52, 1, vocab=VOCAB - 8, longest=20, max_tokens=4)
    with Cluster(tiny, TWO_AND_TWO, limits=("--drain-s", "60")) as cluster:
        leaver = cluster.parts[name]

        async def act(load: Traffic) -> None:
            left = Kill(name, time.monotonic())
            load.report.kills.append(left)
            leaving = asyncio.create_task(asyncio.to_thread(leave, cluster, name))
            left.first_success_s = await load.success_since(left.at, WITHIN_S)
            # The frontend knows, and has heard of what was on its way there when it came to know: the
            # instance has answered somebody else since, and then the frontend answers.
            frontend = cluster.parts["frontend"]
            await asyncio.to_thread(frontend.logged, DRAINS, within_s=WITHIN_S)
            await asyncio.to_thread(asked, leaver)
            known = (await asyncio.to_thread(soak_kills.healed, cluster.url)).get(REFUSED, 0)
            await leaving
            refused = (await asyncio.to_thread(soak_kills.healed, cluster.url)).get(REFUSED, 0)
            assert refused == known, "the frontend went on placing requests there"

        report = asyncio.run(under_load(cluster.url, asks, act, clients=CLIENTS, rest=cluster.rest))
        assert leaver.process.returncode == 0
        assert len(report.after) == len(report.before) - 1
        # Its peers hold less now; `rest` knows exactly how much, so nothing is compared with before.
        report.before = report.after
        soak_kills.check(report, 1)
        assert report.spanned >= CLIENTS / 2, "hardly a stream ran when it left"
        assert report.failed == {}
        assert report.failed_begun == {}
        # What it had begun it has ended itself; a request may be refused that was on its way to it.
        assert {what for what in report.healed if "code=" in what} <= {REFUSED}
