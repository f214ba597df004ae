"""Something is done to a deployment while clients stream; every request is judged as in `soak_kills`."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable, Mapping

from cluster import Cluster
from served import Served, State
from soak_kills import WITHIN_S, Report, Traffic, healed, references
from traffic import Ask

#: What a leaving instance may take beyond the time that its requests get.
LEAVE_S = 90.0


async def under_load(
    url: str,
    asks: list[Ask],
    act: Callable[[Traffic], Awaitable[None]],
    *,
    clients: int,
    rest: Callable[[], Mapping[str, State]],
) -> Report:
    """Run `act` while `clients` stream without a pause and a prober asks its short question; `rest` is
    what waits for everybody to hold nothing. The report has no kills but those that `act` adds."""
    report = Report()
    reference = await references(url, asks)
    report.before = dict(await asyncio.to_thread(rest))
    traffic = Traffic(url, asks, reference, report, 0)
    begun = [asyncio.Event() for _ in range(clients)]
    running = [asyncio.create_task(traffic.client(i, first)) for i, first in enumerate(begun)]
    running.append(asyncio.create_task(traffic.prober()))
    try:
        # Each has had a token: else `act` may meet no stream in its middle, where only the probe got through.
        async with asyncio.timeout(WITHIN_S):
            await asyncio.gather(*(first.wait() for first in begun))
        await traffic.success_since(time.monotonic(), WITHIN_S)
        await act(traffic)
        await traffic.success_since(time.monotonic(), WITHIN_S)
    finally:
        traffic.stop()
        _, late = await asyncio.wait(running, timeout=WITHIN_S)
    assert not late, f"{len(late)} clients have not ended"
    for task in running:
        task.result()
    report.after = dict(await asyncio.to_thread(rest))
    report.healed = await asyncio.to_thread(healed, url)
    return report


def leave(cluster: Cluster, name: str) -> None:
    """SIGTERM an instance and wait until it has drained, which must succeed; it is not in `cluster` then."""
    part = cluster.parts[name]
    part.process.send_signal(signal.SIGTERM)
    assert part.process.wait(LEAVE_S) == 0, part.log()[-3000:]
    del cluster.parts[name]
    Served.live.remove(part)  # it ended because we said so
    part.__exit__(None, None, None)
