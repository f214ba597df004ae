"""A fleet that changes under streaming clients: frontends die and come, instances change their roles.

Used by `test_changes.py` and by `bench/changes.py`, which publishes the numbers. Clients ask several
frontends. What the end of one has cut off they ask again at another one; whatever else fails was lost.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Awaitable, Callable

from cluster import MODEL, Cluster
from soak_kills import WITHIN_S, Report, Traffic, healed, references
from traffic import Ask, Result, stream

from segue.kv.ids import Role
from segue.kv.limits import Limits
from segue.server.fleet.operator import operator

NAMES = ("prefill-0", "prefill-1", "decode-0", "decode-1")
FRONTENDS = ("frontend", "frontend-1")
#: What a change may take while everybody computes on few cores.
CHANGE_S = 120.0


class Spread(Traffic):
    """Clients of all frontends in `urls`, until `total` requests have ended well."""

    def __init__(
        self,
        urls: dict[str, str],
        asks: list[Ask],
        reference: dict[Ask, list[int]],
        report: Report,
        total: int,
    ) -> None:
        super().__init__("", asks, reference, report, 0)
        self.urls = urls
        self.total = total
        #: streams at each frontend, and how many of them its end has cut off
        self.open: dict[str, int] = {}
        self.cut: dict[str, int] = {}
        self.enough = asyncio.Event()
        self._asked = asyncio.Condition()
        self._rng = random.Random(len(asks))

    async def _ask(self, ask: Ask, first: asyncio.Event | None = None) -> Result:
        while True:
            name = self._rng.choice(list(self.urls))
            self.open[name] = self.open.get(name, 0) + 1
            async with self._asked:
                self._asked.notify_all()
            result = await stream(self.urls.get(name, ""), MODEL, ask, within_s=WITHIN_S, first=first)
            self.open[name] -= 1
            if result.error == "BROKEN" and name not in self.urls:
                self.cut[name] = self.cut.get(name, 0) + 1
                if result.tokens != self.reference[ask][: len(result.tokens)]:
                    self.report.wrong.append(f"{ask}: {result.tokens} before the frontend's end")
                continue
            self.judge(result)
            if self.report.completed >= self.total:
                self.enough.set()
            return result

    async def streams_at(self, name: str) -> int:
        """How many, once there are some."""
        async with asyncio.timeout(CHANGE_S), self._asked:
            await self._asked.wait_for(lambda: self.open.get(name))
        return self.open[name]


async def run(
    cluster: Cluster,
    asks: list[Ask],
    act: Callable[[Spread], Awaitable[None]],
    *,
    total: int,
    acts: int,
    clients: int,
    met: Callable[[Spread], bool] = lambda _: True,
) -> tuple[Report, Spread]:
    """Have `clients` stream until `total` requests have ended well, and `act` until then, at least `acts`
    times and until it has `met` somebody."""
    report = Report()
    reference = await references(cluster.url, asks)
    report.before = await asyncio.to_thread(cluster.rest)
    urls = {name: part.url for name, part in cluster.parts.items() if name not in cluster.names}
    traffic = Spread(urls, asks, reference, report, total)
    rng = random.Random(total)
    began = time.monotonic()
    running = [asyncio.create_task(traffic.client(number)) for number in range(clients)]
    enough = asyncio.create_task(traffic.enough.wait())
    try:
        for number in itertools.count(1):
            await act(traffic)
            if number >= acts and enough.done() and met(traffic):
                break
            # At any moment of a request, not at a chosen one.
            await asyncio.wait([enough], timeout=rng.uniform(0.1, 1.0))
    finally:
        enough.cancel()
        traffic.stop()
        _, late = await asyncio.wait(running, timeout=WITHIN_S)
        report.seconds = time.monotonic() - began
    report.hangs += len(late)
    for task in running:
        task.result()
    report.after = await asyncio.to_thread(cluster.rest)
    report.healed = await asyncio.to_thread(healed, cluster.url)
    return report, traffic


def frontend_killer(cluster: Cluster, killed: list[dict[str, float]]) -> Callable[[Spread], Awaitable[None]]:
    """Kills the youngest frontend while it streams, and starts another one, which then gets requests too."""
    numbers = itertools.count(len(FRONTENDS))

    async def act(traffic: Spread) -> None:
        name = list(traffic.urls)[-1]
        streams, at = await traffic.streams_at(name), time.monotonic()
        del traffic.urls[name]
        cluster.parts[name].process.kill()  # now, before a stream ends: `streams` are open
        await asyncio.to_thread(cluster.kill, name)
        del cluster.parts[name]
        follower = f"frontend-{next(numbers)}"
        await asyncio.to_thread(cluster.start, follower)
        traffic.urls[follower] = cluster.parts[follower].url
        await traffic.streams_at(follower)
        killed.append({"streams": streams, "follower_after_s": round(time.monotonic() - at, 3)})

    return act


def switcher(
    cluster: Cluster, switched: list[dict[str, object]], plan: list[tuple[str, Role]]
) -> Callable[[Spread], Awaitable[None]]:
    """Switches one instance after the other to the role that `plan` says, over and over."""
    steps = itertools.cycle(plan)

    async def act(_traffic: Spread) -> None:
        name, role = next(steps)
        url = f"http://127.0.0.1:{cluster.registry.port}"
        async with operator(url, secret=None, limits=Limits(), tls=None) as one:
            state = await asyncio.to_thread(cluster.parts[name].states)
            [mine] = [found["incarnation"] for found in state.values()]
            at = time.monotonic()
            found = await one.switch(await one.named(mine), role, timeout_s=CHANGE_S)
        seconds = round(time.monotonic() - at, 3)
        switched.append({"name": name, "to": str(found.role), "seconds": seconds})

    return act


async def back(cluster: Cluster, switched: list[dict[str, object]]) -> None:
    """Give every instance the role of its name again, so that what it holds can be compared with before."""
    latest = {str(one["name"]): one["to"] for one in switched}
    plan = [(name, Role(name.split("-")[0])) for name, role in latest.items() if role != name.split("-")[0]]
    act = switcher(cluster, [], plan)
    for _ in plan:
        await act(Spread({}, [Ask((1,), 1)], {}, Report(), 0))
