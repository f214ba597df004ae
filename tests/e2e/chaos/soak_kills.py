"""Instances killed at random under streaming clients, and what becomes of every request.

Used by `test_kills.py` (3 kills, 50 in `make soak`) and by `bench/kills.py`, which publishes the numbers.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from dataclasses import dataclass, field

import httpx2 as httpx
from cluster import MODEL, Cluster
from holdings import REGISTRY_MORE, State
from traffic import TYPED, Ask, Result, stream

WITHIN_S = 90.0
MAX_GROWTH_MIB = 32
CONTINUED, RETRIED, PLACED_AGAIN = "continuations", "retries", "placed_again_prompt_tokens"
HEALING = (CONTINUED, RETRIED, PLACED_AGAIN)
KEPT = f'{PLACED_AGAIN}_total{{kv="kept"}}'
#: So many kills of random instances hit prefill and decode, before a first token and after it.
MANY_KILLS = 10


@dataclass
class Kill:
    """One kill: who, and how long until a request that began after it succeeded."""

    name: str
    at: float
    first_success_s: float | None = None
    back_s: float = 0.0


@dataclass
class Report:
    """The outcome. `spanned` are the requests during which an instance died; `healed` counts what the
    frontend did about it: continuations after a token and retries before one, by code, and how many prompt
    tokens of those were found in a cache ("kept") or computed again."""

    kills: list[Kill] = field(default_factory=list)
    completed: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    failed_begun: Counter[str] = field(default_factory=Counter)
    hangs: int = 0
    wrong: list[str] = field(default_factory=list)
    untyped: list[str] = field(default_factory=list)
    spanned: int = 0
    spanned_completed: int = 0
    seconds: float = 0.0
    healed: dict[str, float] = field(default_factory=dict)
    before: dict[str, State] = field(default_factory=dict)
    after: dict[str, State] = field(default_factory=dict)


class Traffic:
    """Clients that ask again and again until `stop`, each result judged as it comes; between two
    requests each pauses for `think_s`."""

    def __init__(
        self, url: str, asks: list[Ask], reference: dict[Ask, list[int]], report: Report, think_s: float
    ) -> None:
        self.think_s = think_s
        self.url, self.asks, self.reference, self.report = url, asks, reference, report
        self.probe = min(asks, key=lambda ask: ask.max_tokens)
        self.probes: list[Result] = []
        self._stop = False
        self._done = asyncio.Condition()

    async def client(self, number: int, first: asyncio.Event | None = None) -> None:
        """Long requests, one after the other; `first` is set when a token has come."""
        rng = random.Random(number)
        while not self._stop:
            await self._ask(rng.choice(self.asks), first)
            await asyncio.sleep(self.think_s)

    async def prober(self) -> None:
        """A short request again and again: when is the service back?"""
        while not self._stop:
            result = await self._ask(self.probe)
            async with self._done:
                self.probes.append(result)
                self._done.notify_all()

    async def _ask(self, ask: Ask, first: asyncio.Event | None = None) -> Result:
        result = await stream(self.url, MODEL, ask, within_s=WITHIN_S, first=first)
        self.judge(result)
        if result.error:
            # As a client would: a failed request is not repeated in the same instant.
            await asyncio.sleep(0.05)
        return result

    def stop(self) -> None:
        self._stop = True

    async def success_since(self, at: float, within_s: float) -> float:
        """Seconds after `at` until the first probe that began after it succeeded."""

        def found() -> list[float]:
            return [r.ended - at for r in self.probes if r.began >= at and not r.error]

        async with asyncio.timeout(within_s), self._done:
            await self._done.wait_for(lambda: bool(found()))
            return min(found())

    def judge(self, result: Result) -> None:
        report, right = self.report, self.reference[result.ask]
        spanned = any(result.began < kill.at < result.ended for kill in report.kills)
        report.spanned += spanned
        if result.tokens != right[: len(result.tokens)]:
            pairs = enumerate(zip(result.tokens, right, strict=False))
            at, (came, wanted) = next((i, pair) for i, pair in pairs if pair[0] != pair[1])
            report.wrong.append(f"{result.ask}: token {at} is {came} instead of {wanted}")
        if not result.error:
            if len(result.tokens) != len(right):
                report.wrong.append(f"{result.ask}: ended well after {len(result.tokens)} of {len(right)}")
            report.completed += 1
            report.spanned_completed += spanned
        elif result.error == "HANG":
            report.hangs += 1
        else:
            (report.failed_begun if result.tokens else report.failed)[result.error] += 1
            if result.error not in TYPED:
                report.untyped.append(f"{result.error} {result.text}")


async def references(url: str, asks: list[Ask]) -> dict[Ask, list[int]]:
    """The right answers: what the deployment says while nothing is wrong with it."""
    results = await asyncio.gather(*(stream(url, MODEL, ask) for ask in asks))
    for result in results:
        assert not result.error, f"without a fault: {result.error} {result.text}"
        assert len(result.tokens) == result.ask.max_tokens
    return {r.ask: r.tokens for r in results}


async def run(
    cluster: Cluster,
    asks: list[Ask],
    *,
    kills: int,
    clients: int = 32,
    seed: int = 1,
    calm_s: float = 0.3,
    think_s: float = 0.0,
) -> Report:
    """Kill a random instance `kills` times, or more often until one had something to do; each is started
    again at its ports before the next dies."""
    rng, report = random.Random(seed), Report()
    reference = await references(cluster.url, asks)
    report.before = await asyncio.to_thread(cluster.rest)
    traffic = Traffic(cluster.url, asks, reference, report, think_s)
    started = time.monotonic()
    running = [asyncio.create_task(traffic.client(i)) for i in range(clients)]
    running.append(asyncio.create_task(traffic.prober()))
    try:
        while len(report.kills) < kills or (len(report.kills) < 4 * kills and not await moved(cluster.url)):
            await traffic.success_since(time.monotonic(), WITHIN_S)
            await asyncio.sleep(rng.uniform(0, calm_s))  # any moment of a request, not a chosen one
            name = rng.choice(cluster.names)
            kill = Kill(name, time.monotonic())
            report.kills.append(kill)
            await asyncio.to_thread(cluster.kill, name)
            kill.first_success_s = await traffic.success_since(kill.at, WITHIN_S)
            await asyncio.to_thread(cluster.start, name)
            kill.back_s = time.monotonic() - kill.at
        await traffic.success_since(time.monotonic(), WITHIN_S)
    finally:
        traffic.stop()
        await asyncio.wait(running, timeout=WITHIN_S)
        report.seconds = time.monotonic() - started
    for task in running:
        task.result()
    report.after = await asyncio.to_thread(cluster.rest)
    report.healed = await asyncio.to_thread(healed, cluster.url)
    return report


async def moved(url: str) -> bool:
    """Whether a kill has met a request."""
    found = Report(healed=await asyncio.to_thread(healed, url))
    return count(found, CONTINUED) + count(found, RETRIED) > 0


def healed(url: str) -> dict[str, float]:
    """The frontend's own counts of continuations and retries, and of what their prompts cost."""
    found = {}
    for line in httpx.get(f"{url}/metrics", timeout=60).text.splitlines():
        name, _, value = line.rpartition(" ")
        if name.startswith(tuple(f"segue_{counter}_total{{" for counter in HEALING)):
            found[name.removeprefix("segue_")] = float(value)
    return found


def count(report: Report, counter: str) -> float:
    """The sum of one of the frontend's counters over its labels."""
    return sum(value for name, value in report.healed.items() if name.startswith(f"{counter}_total{{"))


def check(report: Report, kills: int) -> None:
    """The assertions that hold for all numbers."""
    assert len(report.kills) >= kills
    assert all(kill.first_success_s is not None for kill in report.kills)
    assert report.wrong == [], "\n".join(report.wrong[:5])
    assert report.untyped == [], "\n".join(report.untyped[:5])
    assert report.hangs == 0
    assert report.completed > 0
    assert leaks(report) == []


def check_healed(report: Report, kills: int) -> None:
    """The assertions after kills: every request that they hit was placed again or continued."""
    # One instance of each role is always alive, so nothing has a reason to fail.
    assert report.failed == report.failed_begun == Counter()
    continued, retried = count(report, CONTINUED), count(report, RETRIED)
    if kills >= MANY_KILLS:
        assert continued > 0, report.healed
        assert retried > 0, report.healed
        assert report.healed.get(KEPT, 0) > 0, report.healed
    else:
        assert continued + retried > 0, report.healed


def leaks(report: Report, later: int = 0) -> list[str]:
    """The nodes that hold more at rest than before, apart from the descriptors of the first writes. The
    frontend lives through all kills; an instance that was started again is compared with the one that it
    replaced."""
    by_role = {s["role"]: s for s in report.before.values()}
    found = []
    for name, state in report.after.items():
        before = by_role[state["role"]]
        if state["descriptors"] > before["descriptors"] + REGISTRY_MORE + later:
            found.append(f"{name}: {before['descriptors']} descriptors became {state['descriptors']}")
        if state["segments"] != before["segments"]:
            found.append(f"{name}: {before['segments']} segments became {state['segments']}")
        # An instance fills its pool and its caches with time; the frontend has nothing to keep.
        grown = (state["rss_bytes"] - before["rss_bytes"]) / 2**20
        if state["role"] == "frontend" and grown > MAX_GROWTH_MIB:
            found.append(f"{name}: {grown:.0f} MiB more memory")
    return found
