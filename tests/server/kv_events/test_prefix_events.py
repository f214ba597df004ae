"""A frontend with `prefix_aware` knows what the prefix caches of its instances hold."""

from __future__ import annotations

import asyncio

from deployment import LIMITS, VOCAB, deployment

from segue.engine.request import Request, SamplingParams
from segue.kv.ids import LeaderId, Role
from segue.server.fleet.fleet import Fleet
from segue.server.fleet.fleet_settings import FleetSettings
from segue.server.messages.control import FlushCache
from segue.server.observe.metrics import Metrics
from segue.server.registry.client import RegistryClient

PROMPT = [7 + number % (VOCAB - 7) for number in range(200)]


async def until(fleet: Fleet, leader: LeaderId, tokens: range) -> None:
    """Wait until the number of cached tokens that the frontend knows is in `tokens`."""
    index = fleet.membership.prefix_index
    assert index is not None
    async with asyncio.timeout(60):
        while index.cached([leader], PROMPT).get(leader, -1) not in tokens:  # noqa: ASYNC110 (nobody is told)
            await asyncio.sleep(0.01)


def test_a_frontend_follows_what_is_stored_flushed_and_computed_again() -> None:
    with deployment(Role.PREFILL, Role.DECODE) as made:
        prefill = next(r.instance.me for r in made.running if r.instance.config.role is Role.PREFILL)

        async def ask(fleet: Fleet, name: str) -> None:
            sampling = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
            request = Request(request_id=name, prompt=PROMPT, sampling=sampling)
            async for output in fleet.submit(request, budget_s=60):
                assert output.error is None

        async def main() -> None:
            url = f"http://127.0.0.1:{made.registry.port}"
            client = RegistryClient(url, secret=None, limits=LIMITS.limits())
            served = made.running[0].instance.config.served_model
            both = []
            for policy in ("prefix_aware", "total_requests"):
                chosen = FleetSettings(served_model=served, policy=policy)
                fleet = Fleet(client, chosen, secret=None, limits=LIMITS.limits(), metrics=Metrics())
                fleet.start()
                both.append(fleet)
            fleet, other = both
            async with asyncio.timeout(60):
                while not (fleet.can_serve and other.can_serve):
                    await asyncio.wait({asyncio.ensure_future(f.changed()) for f in both}, timeout=0.1)
            await until(fleet, prefill, range(1))
            await ask(other, "a")  # another frontend's request: nothing to guess by
            await until(fleet, prefill, range(150, 201))
            session = fleet.membership.replicas[prefill].session
            assert session is not None
            session.send(FlushCache())
            await until(fleet, prefill, range(1))
            await ask(fleet, "b")
            await until(fleet, prefill, range(150, 201))
            assert other.membership.prefix_index is None
            index = fleet.membership.prefix_index
            session.close()
            await until(fleet, prefill, range(-1, 0))
            await until(fleet, prefill, range(150, 201))  # after the next session, from the whole
            for one in both:
                await one.close()
            assert index is not None
            assert index.blocks == 0
            await client.aclose()

        asyncio.run(main())
