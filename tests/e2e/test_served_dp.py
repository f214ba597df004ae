"""Data-parallel ranks in real processes, with a real model: who answers, and what becomes of the others."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from served import Served
from test_served_ranks import PROMPTS, reference

from ports import HeldPort
from segue.engine.request import RankHints, Request, SamplingParams
from segue.kv.ids import LeaderId, Role
from segue.kv.limits import Limits
from segue.server.fleet.fleet import Fleet
from segue.server.fleet.fleet_settings import FleetSettings
from segue.server.fleet.replica import Replica
from segue.server.observe.metrics import Metrics
from segue.server.registry.client import RegistryClient

pytestmark = [pytest.mark.timeout(400)]

MODEL = ("--served-model-name", "tiny", "--dtype", "float32", "--kv-gib", "0.1")


def ask(url: str, prompt: list[int], headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    body |= {"return_token_ids": True, **fields}
    return httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=120)


@pytest.mark.slow
def test_two_prefill_ranks_and_one_decode_rank_answer_as_the_reference_does(tiny: Path) -> None:
    with Served("--model", str(tiny), *MODEL, "--port", "0", "--prefill-dp", "2") as made:
        expected = reference(tiny)
        ways: list[dict[str, Any]] = [
            {},
            {"disagg_prefill_dp_rank": 0},
            {"disagg_prefill_dp_rank": 1},
            {"disagg_prefill_dp_rank": 1, "force_query_prefill_dp_rank": True},
            {"force_query_prefill_dp_rank": True, "routed_dp_rank": 0},
        ]
        for way in ways:
            answers = [ask(made.url, prompt, **way).json()["choices"][0]["token_ids"] for prompt in PROMPTS]
            assert answers == expected, way
        for way in ({"disagg_prefill_dp_rank": 2}, {"routed_dp_rank": 1}):
            refused = ask(made.url, PROMPTS[0], **way)
            assert (refused.status_code, refused.json()["error"]["code"]) == (400, "DP_RANK_OUT_OF_RANGE")
        assert ask(made.url, PROMPTS[0], {"X-Data-Parallel-Rank": "7"}).status_code == 400
        about = {n: httpx.get(f"{url}/server_info", timeout=60).json() for n, url in made.doors(3).items()}
        assert {name: (info["dp_rank"], info["dp_size"]) for name, info in about.items()} == {
            "prefill-0.dp0": (0, 2),
            "prefill-0.dp1": (1, 2),
            "decode-0": (0, 1),
        }
        assert made.stop() == 0


# ---- 1,000 requests over four ranks and two --------------------------------------------------------

PREFILL, DECODE, REQUESTS, AT_ONCE = 4, 2, 1000, 32
LIMITS = Limits(max_queue=2048)


#: A registry alone in its process, at the port that it is given; it says which one that is.
REGISTRY = """
import asyncio, sys
from segue.server.registry.registry_server import serve
from segue.kv.limits import Limits

async def main():
    server = await serve("127.0.0.1", int(sys.argv[1]), secret=None, limits=Limits())
    print(server.port, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


class OneRegistry:
    """A registry that can be killed and started anew at its address."""

    def __init__(self) -> None:
        self._held = HeldPort()  # nobody takes it, nor is connected to itself there, while it is away
        self.port = self._held.port
        self.open()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def open(self) -> None:
        command = [sys.executable, "-c", REGISTRY, str(self.port)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        assert int(self.process.stdout.readline()) == self.port

    def kill(self) -> None:
        """kill -9: it says goodbye to nobody."""
        self.process.kill()
        self.process.communicate(timeout=10)


@dataclass
class Traffic:
    """The results of the requests: the number that each rank got, and their errors."""

    requests: Counter[LeaderId] = field(default_factory=Counter)
    tokens: Counter[LeaderId] = field(default_factory=Counter)
    roles: dict[LeaderId, Role] = field(default_factory=dict)
    errors: Counter[str] = field(default_factory=Counter)
    #: by how much the chosen rank had more than the idlest one of its role, of what the policy counts
    excess: list[int] = field(default_factory=list)
    done: int = 0
    seconds: float = 0.0

    def imbalance(self, counted: Counter[LeaderId], role: Role, ranks: int) -> float:
        """The busiest rank's share over the mean."""
        counts = [count for leader, count in counted.items() if self.roles[leader] is role]
        return max(counts) * ranks / sum(counts)


def _counted(policy: str, rank: Replica) -> int:
    return len(rank.running) if policy == "total_requests" else rank.tokens


async def _run(
    registry: OneRegistry, policy: str, half: Callable[[], None], prefill: int = PREFILL
) -> Traffic:
    """1,000 requests of very different lengths, `AT_ONCE` at a time, to `prefill` ranks; `half` is called in
    the middle. Of every fourth request decode asks the registry which of them has it."""
    client = RegistryClient(registry.url, secret=None, limits=LIMITS)
    settings = FleetSettings(served_model="tiny", policy=policy, retry_budget=1e9)
    fleet = Fleet(client, settings, secret=None, limits=LIMITS, metrics=Metrics())
    traffic, rng = Traffic(), random.Random(7)
    normal = fleet.membership.enter

    def enter(replica: Replica, request_id: str, sink: Any, tokens: int) -> None:
        ranks = [r for r in fleet.membership.replicas.values() if r.usable and r.role is replica.role]
        traffic.excess.append(_counted(policy, replica) - min(_counted(policy, rank) for rank in ranks))
        traffic.requests[replica.leader] += 1
        traffic.tokens[replica.leader] += tokens
        traffic.roles[replica.leader] = replica.role
        normal(replica, request_id, sink, tokens)

    fleet.membership.enter = enter  # type: ignore[method-assign]
    waiting = list(range(REQUESTS))

    async def client_loop() -> None:
        while waiting:
            number = waiting.pop()
            if number == REQUESTS // 2:
                await asyncio.to_thread(half)
            length = rng.choice((8, 20, 60, 200))
            prompt = [rng.randrange(3, 200) for _ in range(length)]
            count = rng.choice((1, 4, 12))
            sampling = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
            ranks = RankHints(force_query_prefill_dp_rank=number % 4 == 0)
            request = Request(request_id=f"r{number}", prompt=prompt, sampling=sampling, ranks=ranks)
            given = 0
            try:
                async for output in fleet.submit(request, budget_s=60):
                    given += len(output.token_ids)
                assert given == count
                traffic.done += 1
            except Exception as error:
                traffic.errors[repr(error)] += 1

    fleet.start()
    async with asyncio.timeout(60):
        while len([r for r in fleet.membership.replicas.values() if r.usable]) < prefill + DECODE:
            await fleet.changed()
    began = time.monotonic()
    await asyncio.gather(*(client_loop() for _ in range(AT_ONCE)))
    traffic.seconds = time.monotonic() - began
    await fleet.close()
    await client.aclose()
    return traffic


@pytest.fixture
def parts(tiny: Path) -> Iterator[tuple[OneRegistry, Served, Served]]:
    """Four prefill ranks and two decode ranks under two commands, and a registry of its own."""
    registry = OneRegistry()
    shared = ("--model", str(tiny), *MODEL, "--registry", registry.url, "--threads-per-worker", "1")
    try:
        prefill = Served(*shared, "--dp", str(PREFILL), command="prefill", wait=False)
        decode = Served(*shared, "--dp", str(DECODE), command="decode", wait=False)
        try:
            yield registry, prefill.ready(), decode.ready()
        finally:
            for part in (prefill, decode):
                if part.process.poll() is None:
                    part.stop(at_rest=False)
                part.forget()
    finally:
        registry.kill()


def told(name: str, traffic: Traffic, prefill: int = PREFILL) -> None:
    """The row for docs/results.md."""
    shares = [
        f"{traffic.imbalance(counted, role, ranks):.3f}"
        for role, ranks in ((Role.PREFILL, prefill), (Role.DECODE, DECODE))
        for counted in (traffic.requests, traffic.tokens)
    ]
    sys.stdout.write(f"| {name} | {traffic.done} | {' | '.join(shares)} | {traffic.seconds:.0f} |\n")


@pytest.mark.soak
def test_1000_requests_are_balanced_over_four_prefill_and_two_decode_ranks(
    parts: tuple[OneRegistry, Served, Served],
) -> None:
    registry, prefill, decode = parts
    for policy in ("total_requests", "total_tokens"):
        traffic = asyncio.run(_run(registry, policy, lambda: None))
        told(policy, traffic)
        assert (traffic.done, traffic.errors) == (REQUESTS, {})
        # A rank that the machine favours is idle more often and gets more: no share is promised, the choice
        # is. The idlest one may have no credit left; one drawn at random is the idlest in about a third.
        assert traffic.excess.count(0) > 0.6 * len(traffic.excess)
        assert Counter(traffic.roles.values()) == {Role.PREFILL: PREFILL, Role.DECODE: DECODE}, "all had some"
    assert prefill.stop(at_rest=False) == 0
    assert decode.stop(at_rest=False) == 0


@pytest.mark.soak
def test_1000_requests_while_the_registry_is_killed_and_started_anew(
    parts: tuple[OneRegistry, Served, Served],
) -> None:
    registry = parts[0]
    for policy in ("total_requests", "total_tokens"):

        def half() -> None:
            registry.kill()
            registry.open()

        traffic = asyncio.run(_run(registry, policy, half))
        told(f"{policy}, registry killed", traffic)
        assert (traffic.done, traffic.errors) == (REQUESTS, {})


@pytest.mark.slow
def test_1000_requests_while_a_prefill_rank_is_killed(parts: tuple[OneRegistry, Served, Served]) -> None:
    registry, prefill, _ = parts

    def half() -> None:
        victim = prefill.instances("prefill")[0]
        os.kill(victim.pid, signal.SIGKILL)

    for lost, policy in enumerate(("total_requests", "total_tokens")):
        traffic = asyncio.run(_run(registry, policy, half, PREFILL - lost))
        told(f"{policy}, one of {PREFILL - lost} prefill ranks killed", traffic, PREFILL - lost)
        assert traffic.done + sum(traffic.errors.values()) == REQUESTS, "none is lost"
        assert traffic.errors == {}, "what ran on it was placed anew"
    assert prefill.stop(at_rest=False) == 1, "an instance that has lost a rank did not end well"
