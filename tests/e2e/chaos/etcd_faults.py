"""A fleet whose registry is a real etcd, which is killed, started again and stopped while clients ask."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import tiny_model
import traffic
from cluster import MODEL, Cluster
from etcd_server import EtcdServer
from soak_kills import references

#: Killed for less than its leases last, stopped for longer (10 s): they end when it goes on.
#: Afterwards those who have missed anything are noticed.
KILLED_S, STOPPED_S, AFTERWARDS_S = 1.5, 11.0, 2.0


@dataclass
class Outcome:
    """The outcomes of all requests. `during` counts those that ran while etcd was away, `away_s` says for how
    long it was, by what was done to it."""

    completed: int = 0
    during: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    wrong: int = 0
    seconds: float = 0.0
    away_s: dict[str, float] = field(default_factory=dict)


async def _ask(cluster: Cluster, requests: int, at_once: int, server: EtcdServer) -> Outcome:
    asks = traffic.asks(31, 40, vocab=tiny_model.VOCAB - 8, longest=200, max_tokens=24)
    reference = await references(cluster.url, asks)
    outcome, numbers, away, over = Outcome(), itertools.count(), asyncio.Event(), asyncio.Event()
    begun = asyncio.Event()

    async def client() -> None:
        while (number := next(numbers)) < requests or not over.is_set():
            if number == requests // 4:
                begun.set()
            before = away.is_set()
            result = await traffic.stream(cluster.url, MODEL, asks[number % len(asks)])
            outcome.during += before or away.is_set()
            if result.error:
                outcome.errors[result.error] += 1
            elif result.tokens != reference[result.ask]:
                outcome.wrong += 1
            else:
                outcome.completed += 1

    async def faults() -> None:
        await begun.wait()
        for name, begin, end, away_s in (
            ("killed", server.kill, server.start, KILLED_S),
            ("stopped", server.pause, server.resume, STOPPED_S),
        ):
            began = time.monotonic()
            away.set()
            await asyncio.to_thread(begin)
            await asyncio.sleep(away_s)
            await asyncio.to_thread(end)
            away.clear()
            outcome.away_s[name] = time.monotonic() - began
            await asyncio.sleep(AFTERWARDS_S)
        over.set()

    began = time.monotonic()
    await asyncio.gather(faults(), *(client() for _ in range(at_once)))
    outcome.seconds = time.monotonic() - began
    return outcome


def run(folder: Path, model: Path, names: Sequence[str], *, requests: int, at_once: int) -> Outcome:
    """At least `requests` requests, from whose first quarter on etcd is killed and started, then stopped. At
    the end the first of `names` comes back in a new incarnation and is found, and every part must hold
    nothing."""
    server = EtcdServer(folder)
    server.start()
    try:
        urls = dict.fromkeys([*names, "frontend"], server.url)
        with Cluster(model, names, registry_url=urls) as cluster:
            outcome = asyncio.run(_ask(cluster, requests, at_once, server))
            cluster.kill(names[0])
            cluster.start(names[0])
            asyncio.run(references(cluster.url, traffic.asks(32, 8, vocab=99, longest=20, max_tokens=4)))
        return outcome
    finally:
        server.kill()
