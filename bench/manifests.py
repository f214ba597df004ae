"""The manifests of segue's own engine, run as written: a network namespace for each pod, under load.

    make cluster
    .venv/bin/python bench/manifests.py [--requests 1000] [--rate 6] [--min-ready-s 20] [--short]

The pods go through a start, a rolling update, a scale up and down, and the loss of a node. Each request is
greedy; its tokens are compared with those of the same prompt before the first change. `tests/deploy/pods.py`
says what stands in for a cluster. The model is the tests' random one.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import from_tests
import tiny_model
from pods import FORGET_S, Cluster, enter, integrity, missing
from rendered import chart, objects
from traffic import Ask, Result, asks, stream

assert from_tests
BEGAN = time.monotonic()
AT_ONCE = 8
#: Seconds without a request before the parts are asked what they hold.
REST_S = 30.0
HTTP = {"segue-prefill": 7200, "segue-decode": 7200, "segue-frontend": 8000}
REGISTRY = ["--registry", "dns://segue-instances:7000", "--secret-file", "/etc/segue/secret/secret"]


def say(text: str) -> None:
    print(f"{time.monotonic() - BEGAN:7.1f} s  {text}", flush=True)


class Load:
    """Requests at a steady rate, at most `AT_ONCE` open, at the frontends that a Service would choose."""

    def __init__(self, cluster: Cluster, rate: float) -> None:
        self._cluster = cluster
        self._rate = rate
        found = asks(1, 12, vocab=tiny_model.VOCAB - 8, longest=120, max_tokens=8)
        self._asks = [Ask(one.prompt, 8 if i % 6 else 48) for i, one in enumerate(found)]
        self._expected: dict[Ask, list[int]] = {}
        self._rng = random.Random(7)
        self.failed = 0
        self.done = 0

    async def _one(self, ask: Ask) -> Result:
        addresses = self._cluster.endpoints("segue-frontend")
        if not addresses:
            return Result(ask, error="NO_FRONTEND")
        return await stream(f"http://{self._rng.choice(addresses)}:8000", "tiny", ask, within_s=90)

    async def learn(self) -> None:
        for ask in self._asks:
            result = await self._one(ask)
            assert not result.error, (result.error, result.text)
            self._expected[ask] = result.tokens
        say(f"{len(self._asks)} prompts answered once; every later answer must equal these")

    async def during(self, what: str, change: Callable[[], object], least: int) -> None:
        """Ask while `change` goes on, and at least `least` times."""
        changing = asyncio.create_task(asyncio.to_thread(change))
        open_tasks: set[asyncio.Task[Result]] = set()
        results: list[Result] = []

        def ended(task: asyncio.Task[Result]) -> None:
            open_tasks.discard(task)
            if not task.cancelled():
                results.append(task.result())

        began, asked = time.monotonic(), 0
        while asked < least or not changing.done():
            task = asyncio.create_task(self._one(self._rng.choice(self._asks)))
            open_tasks.add(task)
            task.add_done_callback(ended)
            asked += 1
            if len(open_tasks) >= AT_ONCE:
                await asyncio.wait(open_tasks, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.sleep(max(0.0, began + asked / self._rate - time.monotonic()))
        await changing
        while open_tasks:
            await asyncio.wait(open_tasks)
        errors = Counter(one.error for one in results if one.error)
        wrong = sum(not one.error and one.tokens != self._expected[one.ask] for one in results)
        times = sorted(one.ended - one.began for one in results)
        self.done += len(results)
        self.failed += errors.total() + wrong
        say(
            f"{what}: {len(results)} requests in {time.monotonic() - began:.0f} s, {errors.total()} failed "
            f"{dict(errors) or ''}, {wrong} with other tokens; seconds p50 {times[len(times) // 2]:.2f}, "
            f"max {times[-1]:.2f}"
        )
        for one in [one for one in results if one.error][:3]:
            say(f"  {one.error}: {one.text}")


def at_rest(cluster: Cluster) -> list[str]:
    """What the pods still hold, once they have had time to let go of it."""
    until = time.monotonic() + REST_S
    while True:
        held = []
        for pod in [pod for pod in cluster.pods if not pod.ended.is_set()]:
            try:
                state = integrity(pod, HTTP[pod.owner])
            except OSError as error:  # one that is leaving is told of as ended a moment later
                held.append(f"{pod.name}: {error}")
                continue
            if not state["at_rest"] or state["problems"]:
                held.append(f"{pod.name}: {state}")
        if not held or time.monotonic() > until:
            return held
        time.sleep(0.5)


async def sizes_and_nodes(
    cluster: Cluster, load: Load, args: argparse.Namespace, apply: Callable[[int, int, int], None]
) -> None:
    """Scale up and down, then lose a node on which no frontend is."""
    least = args.requests // 10
    say("scale up: prefill 3, decode 3")
    await load.during("scale up", lambda: apply(2, 3, 3), least)
    say("scale down: frontend 1, prefill 1, decode 1")
    await load.during("scale down", lambda: apply(1, 1, 1), least)
    say("scale up: prefill 2, decode 2")
    await load.during("scale up again", lambda: apply(1, 2, 2), least)
    [door] = cluster.of("segue-frontend")
    [node] = {"a", "b"} - {door.node}
    lost = [pod.name for pod in cluster.pods if pod.node == node and not pod.ended.is_set()]
    say(f"the link of node {node} goes down; on it: {', '.join(lost)}")
    await load.during("node lost", lambda: cluster.lose(node), int(30 * args.rate))
    say(f"the cluster gives node {node} up and replaces its pods")
    await load.during("node replaced", lambda: cluster.evict(node), least)
    say(" ".join(["segue ps", *REGISTRY]))
    print((await asyncio.to_thread(cluster.run, door, ["segue", "ps", *REGISTRY], 60)).stdout)


async def scenario(args: argparse.Namespace, folder: Path) -> int:
    (folder / "models").mkdir()
    tiny_model.save(folder / "models" / "tiny")
    cache = folder / "cache"
    cache.mkdir()
    secret = folder / "secret"
    secret.mkdir()
    (secret / "secret").write_bytes(base64.b64encode(os.urandom(32)))
    cluster = Cluster(
        folder / "pods",
        secrets={"segue": secret},
        claims={"models": folder / "models", "cache": cache},
        say=say,
    )

    def apply(frontend: int, prefill: int, decode: int, *, tag: str = "0.2.0") -> None:
        values = (
            *("model.name=/models/tiny", "model.servedName=tiny", "model.claim=models", "cacheClaim=cache"),
            *(f"{part}.cpu=1" for part in ("prefill", "decode", "frontend")),
            *(f"frontend.replicas={frontend}", f"prefill.replicas={prefill}", f"decode.replicas={decode}"),
            *("kvGiB=0.05", f"image.tag={tag}", f"minReadySeconds={args.min_ready_s}"),
        )
        cluster.apply(objects(chart(*values)))

    load = Load(cluster, args.rate)
    size = (1, 1, 1) if args.short else (2, 2, 2)
    try:
        say("helm template segue deploy/chart, applied: {} frontends, {} prefill, {} decode".format(*size))
        await asyncio.to_thread(apply, *size)
        await asyncio.sleep(FORGET_S + 1)  # what a balancer takes to see the frontends
        await load.learn()
        say("helm upgrade --set image.tag=next: a rolling update of all parts")
        await load.during("rolling update", lambda: apply(*size, tag="next"), args.requests)
        if not args.short:
            await sizes_and_nodes(cluster, load, args, lambda *size: apply(*size, tag="next"))
        held = await asyncio.to_thread(at_rest, cluster)
        for one in held:
            say(f"not at rest: {one}")
        for pod in [pod for pod in cluster.pods if not pod.ended.is_set()]:
            cluster.delete(pod, wait=False)
        for pod in cluster.pods:
            await asyncio.to_thread(pod.ended.wait)
        say(f"{load.done} requests, {load.failed} failed or with other tokens; {len(held)} parts not at rest")
        return int(bool(load.failed or held))
    finally:
        cluster.close()
        if args.logs:
            for pod in cluster.pods:
                (Path(args.logs) / f"{pod.name}.log").write_text(pod.log)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=1000, help="during the rolling update, at least")
    parser.add_argument("--rate", type=float, default=6.0, help="requests per second")
    parser.add_argument("--min-ready-s", type=int, default=20, help="the chart's minReadySeconds")
    parser.add_argument("--short", action="store_true", help="the rolling update alone, of one pod each")
    parser.add_argument("--logs", help="an existing folder for the logs of the pods")
    args = parser.parse_args()
    if "SEGUE_PODS" not in os.environ and (reason := missing()):
        print(reason, file=sys.stderr)
        return 1
    enter(sys.argv)
    with tempfile.TemporaryDirectory(prefix="segue-pods-") as folder:
        return asyncio.run(scenario(args, Path(folder)))


if __name__ == "__main__":
    sys.exit(main())
