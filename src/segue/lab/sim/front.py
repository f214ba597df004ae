"""A frontend of a deployment: production's `Fleet` in virtual time, and the clients that ask it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from segue.engine.request import Output, RankHints, Request
from segue.kv.errors import AbortedByClient, ErrorCode, ErrorInfo, SegueError
from segue.kv.ids import LeaderId, Role
from segue.kv.session.api import SessionHandler
from segue.kv.session.node import SessionNode
from segue.lab.sim.clients import Asked, Wanted
from segue.lab.sim.fleet_wire import FleetWire
from segue.lab.sim.loop import SimLoop
from segue.lab.sim.runtime import SimSessionNode
from segue.lab.sim.world import Process, SkewedClock, new_leader
from segue.server.fleet.fleet import Fleet, FleetRuntime
from segue.server.fleet.fleet_settings import FleetSettings
from segue.server.registry.client import InstanceWatch
from segue.server.registry.registry_records import InstanceRecord

if TYPE_CHECKING:
    from segue.lab.sim.deployment import Deployment


class FrontNode(Process):
    """One frontend in one life."""

    def __init__(self, deployment: Deployment, index: int, life: int) -> None:
        super().__init__(deployment.world, f"front{index}" + (f"#{life}" if life else ""))
        self.deployment = deployment
        self.index = index
        self.rng = deployment.world.rng(self.name)
        self.me = new_leader(self.rng)
        #: requests that have not ended, by their names
        self.asked: dict[str, Asked] = {}
        clock = SkewedClock(deployment.world, 0.0, 1.0)
        self.loop = SimLoop(self, clock, deployment.network, f"127.0.2.{index + 1}")  # type: ignore[abstract]
        self.fleet: Fleet
        self.wire: FleetWire

    def begin(self, registry: InstanceWatch) -> None:
        """Follow the registry from now on."""
        deployment = self.deployment
        runtime = FleetRuntime(
            node=self._node,
            me=self.me,
            uniform=self.rng.uniform,
            randbelow=self.rng.randrange,
            new_room=lambda: self.rng.getrandbits(63) or 1,
        )

        def make() -> None:
            self.fleet = Fleet(
                registry,
                FleetSettings(
                    served_model="m",
                    policy=deployment.policy,
                    retry_budget=deployment.scenario.retry_budget,
                    no_replica_wait_s=deployment.scenario.no_replica_wait_s,
                ),
                secret=deployment.secret,
                limits=deployment.front_limits,
                metrics=deployment.metrics,
                runtime=runtime,
            )
            self.fleet.start()

        self.loop.enter(make)

    def _node(self, *, handlers: Mapping[Role, SessionHandler], **options: Any) -> SessionNode:
        [handler] = set(handlers.values())
        self.wire = FleetWire(self, handler)
        return SimSessionNode(loop=self.loop, handlers=dict.fromkeys(handlers, self.wire), **options)

    @property
    def view(self) -> dict[LeaderId, InstanceRecord]:
        """What it believes that the registry lists."""
        replicas = self.fleet.membership.replicas.values()
        return {replica.leader: replica.record for replica in replicas if replica.listed}

    # ---- clients -------------------------------------------------------------------------------

    def request(self, wanted: Wanted) -> None:
        """A client asks, and leaves after a while if it is to."""
        asked = Asked(wanted, self.world.now + wanted.budget_s)
        self.deployment.asked[wanted.name] = self.asked[wanted.name] = asked
        task = self.loop.enter(self.loop.create_task, self._ask(asked))
        if wanted.abort_after_s is not None:
            self.after(wanted.abort_after_s, self.loop.enter, task.cancel)

    async def _ask(self, asked: Asked) -> None:
        wanted, checks = asked.wanted, self.deployment.checks
        request = Request(
            request_id=wanted.name,
            prompt=wanted.prompt,
            sampling=wanted.sampling,
            priority=wanted.priority,
            tenant=wanted.tenant,
            ranks=RankHints(
                disagg_prefill_dp_rank=wanted.prefill_dp_rank,
                force_query_prefill_dp_rank=wanted.force_query,
            ),
        )
        try:
            try:
                async for output in self.fleet.submit(request, budget_s=wanted.budget_s):
                    self._given(asked, output)
                    if output.finish is not None:
                        self._end(asked, "done")
            except asyncio.CancelledError:
                left = AbortedByClient("the client left", origin=self.name, phase="frontend").info
                self.fleet.cancel(wanted.name, left)  # as `server.frontend.generate` does
                self._end(asked, "aborted", left)
            except SegueError as error:
                late = error.info.code is ErrorCode.DEADLINE_EXCEEDED and error.info.origin == "frontend"
                checks.answers.refused(self, asked, error.info)
                self._end(asked, "late" if late else "failed", error.info)
            if not asked.outcome:
                self.world.fail(f"{wanted.name}: the outputs ended without an end")
        except Exception as error:
            self.world.fail(error)

    def _given(self, asked: Asked, output: Output) -> None:
        asked.tokens += output.token_ids
        asked.usage = output.usage or asked.usage
        asked.prompt_logprobs += output.prompt_logprobs or []
        self.deployment.checks.answers.tokens(asked)

    def _end(self, asked: Asked, outcome: str, error: ErrorInfo | None = None) -> None:
        asked.outcome, asked.error = outcome, error
        del self.asked[asked.wanted.name]
        rooms = [f"{room:x}" for room in asked.rooms]
        self.world.note(self.name, f"{outcome} {asked.wanted.name} rooms={rooms} {error or ''}")
        self.deployment.checks.answers.ended(asked)
        self.deployment.checks.answers.ended_at(self, asked)

    def died(self) -> None:
        """The process was killed: its clients see their connections end."""
        for asked in self.asked.values():
            asked.outcome = "frontend died"
            asked.error = ErrorInfo(code=ErrorCode.PEER_LOST, text="the frontend died", origin=self.name)
        self.asked.clear()
