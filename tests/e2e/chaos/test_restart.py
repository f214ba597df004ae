"""An instance that is killed and started again at the same port under the same name: its peers recover."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
import traffic
from cluster import MODEL, Cluster
from served import rest
from soak_kills import references
from tiny_model import VOCAB

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("victim", [pytest.param("decode-0", marks=pytest.mark.soak), "prefill-0"])
def test_lesson_09_an_instance_restarted_at_its_port_serves_the_next_request(victim: str, tiny: Path) -> None:
    asks = traffic.asks(21, 6, vocab=VOCAB - 8, longest=300, max_tokens=400)
    with Cluster(tiny) as cluster:
        reference = asyncio.run(references(cluster.url, asks))
        before = cluster.rest()
        results = asyncio.run(killed_in_the_middle(cluster, victim, asks))
        for result in results:
            assert result.tokens == reference[result.ask][: len(result.tokens)], "a wrong token"
            assert not result.error or result.error in traffic.TYPED, result.text
        asyncio.run(serves_again(cluster, asks[0], reference))
        again = asyncio.run(references(cluster.url, asks))
        assert again == reference
        # Both sides dropped the dead incarnation and hold nothing of it.
        after = cluster.rest()
        old = {s["incarnation"] for s in before.values()} - {s["incarnation"] for s in after.values()}
        assert len(old) == 1
        [gone] = old
        left = [peer for state in after.values() for peer in state["sessions"]]
        assert not any(peer.startswith(gone[:8]) for peer in left)


async def killed_in_the_middle(
    cluster: Cluster, victim: str, asks: list[traffic.Ask]
) -> list[traffic.Result]:
    """The results of requests that ran while `victim` was killed and came back at its old ports."""
    first = asyncio.Event()
    running = [
        asyncio.create_task(traffic.stream(cluster.url, MODEL, ask, first=first, within_s=90)) for ask in asks
    ]
    await first.wait()
    ports = cluster.ports(victim)
    await asyncio.to_thread(cluster.kill, victim)
    await asyncio.to_thread(cluster.start, victim)
    assert cluster.ports(victim) == ports
    return list(await asyncio.gather(*running))


async def serves_again(
    cluster: Cluster, ask: traffic.Ask, reference: dict[traffic.Ask, list[int]], within_s: float = 60
) -> None:
    until = time.monotonic() + within_s
    while (result := await traffic.stream(cluster.url, MODEL, ask)).error:
        assert time.monotonic() < until, f"still {result.error}: {result.text}"
    assert result.tokens == reference[ask]


@pytest.mark.soak
def test_the_registry_and_then_the_frontend_die_under_load_and_come_back(tiny: Path) -> None:
    asks = traffic.asks(22, 16, vocab=VOCAB - 8, longest=200, max_tokens=500)
    with Cluster(tiny) as cluster:
        reference = asyncio.run(references(cluster.url, asks))

        async def without_registry() -> list[traffic.Result]:
            first = asyncio.Event()
            running = [asyncio.create_task(traffic.stream(cluster.url, MODEL, a, first=first)) for a in asks]
            await first.wait()
            await asyncio.to_thread(cluster.registry.shut)
            # Who is known stays known: new requests are served without it.
            later = [asyncio.create_task(traffic.stream(cluster.url, MODEL, a)) for a in asks]
            return list(await asyncio.gather(*running, *later))

        for result in asyncio.run(without_registry()):
            assert (result.error, result.tokens) == ("", reference[result.ask]), result.text
        cluster.registry.open()
        cluster.rest()

        async def without_frontend() -> list[traffic.Result]:
            first = asyncio.Event()
            running = [asyncio.create_task(traffic.stream(cluster.url, MODEL, a, first=first)) for a in asks]
            await first.wait()
            await asyncio.to_thread(cluster.kill, "frontend")
            return list(await asyncio.gather(*running))

        broken = asyncio.run(without_frontend())
        assert {r.error for r in broken} <= {"BROKEN", ""}
        for result in broken:
            assert result.tokens == reference[result.ask][: len(result.tokens)]
        # The instances end what nobody reads any more, and serve the next frontend.
        rest([part for name, part in cluster.parts.items() if name != "frontend"])
        cluster.start("frontend")
        assert asyncio.run(references(cluster.url, asks)) == reference
