"""A frontend of a deployment: production's `Fleet` in virtual time, and the clients that ask it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from segue.engine.request import Output, RankHints, Request
from segue.kv.errors import AbortedByClient, ErrorCode, ErrorInfo, SegueError
from segue.kv.ids import LeaderId, Role
from segue.kv.session.api import SessionHandler
from segue.kv.session.node import SessionNode
from segue.server.fleet.fleet import Fleet, FleetRuntime
from segue.server.fleet.fleet_settings import FleetSettings
from segue.server.fleet.replica import Replica
from segue.server.observe.metrics import Metrics
from segue.server.registry.client import InstanceWatch
from segue.server.registry.registry_records import InstanceRecord
from segue_lab.sim.answer_checks import AnswerChecks
from segue_lab.sim.causes import Causes
from segue_lab.sim.clients import Asked, Wanted
from segue_lab.sim.fleet_wire import FleetWire
from segue_lab.sim.loop import SimLoop
from segue_lab.sim.node_views import FrontView
from segue_lab.sim.runtime import SimSessionNode
from segue_lab.sim.sim_state import SimState
from segue_lab.sim.world import SkewedClock, new_leader


class FrontNode(FrontView):
    """One incarnation of a frontend."""

    def __init__(
        self, state: SimState, causes: Causes, answers: AnswerChecks, index: int, restart: int
    ) -> None:
        super().__init__(state.world, f"front{index}" + (f"#{restart}" if restart else ""))
        self.state = state
        self._causes = causes
        self._answers = answers
        self.index = index
        self.rng = state.world.rng(self.name)
        self.me = new_leader(self.rng)
        self.asked: dict[str, Asked] = {}
        clock = SkewedClock(state.world, 0.0, 1.0)
        self.loop = SimLoop(self, clock, state.network, f"127.0.2.{index + 1}")  # type: ignore[abstract]
        self.wire: FleetWire

    def begin(self, registry: InstanceWatch) -> None:
        """Follow the registry from now on."""
        state = self.state
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
                    policy=state.scenario.policy,
                    retry_budget=state.scenario.retry_budget,
                    no_replica_wait_s=state.scenario.no_replica_wait_s,
                ),
                secret=state.secret,
                limits=state.front_limits,
                metrics=Metrics(),
                runtime=runtime,
            )
            self.fleet.start()

        self.loop.enter(make)

    def _node(self, *, handlers: Mapping[Role, SessionHandler], **options: Any) -> SessionNode:
        [handler] = set(handlers.values())
        self.wire = FleetWire(self, self._causes, self._answers, handler)
        return SimSessionNode(loop=self.loop, handlers=dict.fromkeys(handlers, self.wire), **options)

    def pairs(self, wanted: Wanted | None = None) -> list[tuple[Replica, Replica]]:
        """The pairs that could serve a request, as far as anybody knows."""
        return self.wire.pairs(wanted)

    @property
    def view(self) -> dict[LeaderId, InstanceRecord]:
        """The instances that it takes for listed in the registry."""
        replicas = self.fleet.membership.replicas.values()
        return {replica.leader: replica.record for replica in replicas if replica.listed}

    # ---- clients -------------------------------------------------------------------------------

    def request(self, wanted: Wanted) -> None:
        """A client asks, and leaves after a while if it is to."""
        asked = Asked(wanted, self.world.now + wanted.budget_s)
        self.state.asked[wanted.name] = self.asked[wanted.name] = asked
        task = self.loop.enter(self.loop.create_task, self._ask(asked))
        if wanted.abort_after_s is not None:
            self.after(wanted.abort_after_s, self.loop.enter, task.cancel)

    async def _ask(self, asked: Asked) -> None:
        wanted = asked.wanted
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
                self._answers.refused(self, asked, error.info)
                self._end(asked, "late" if late else "failed", error.info)
            if not asked.outcome:
                self.world.fail(f"{wanted.name}: the outputs ended without an end")
        except Exception as error:
            self.world.fail(error)

    def _given(self, asked: Asked, output: Output) -> None:
        asked.tokens += output.token_ids
        asked.usage = output.usage or asked.usage
        asked.prompt_logprobs += output.prompt_logprobs or []
        self._answers.tokens(asked)

    def _end(self, asked: Asked, outcome: str, error: ErrorInfo | None = None) -> None:
        asked.outcome, asked.error = outcome, error
        del self.asked[asked.wanted.name]
        rooms = [f"{room:x}" for room in asked.rooms]
        self.world.note(self.name, f"{outcome} {asked.wanted.name} rooms={rooms} {error or ''}")
        self._answers.ended(asked)
        self._answers.ended_at(self, asked)

    def died(self) -> None:
        """The process was killed: its clients see their connections end."""
        for asked in self.asked.values():
            asked.outcome = "frontend died"
            asked.error = ErrorInfo(code=ErrorCode.PEER_LOST, text="the frontend died", origin=self.name)
        self.asked.clear()
