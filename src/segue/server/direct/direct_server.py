"""Direct mode: instances behind other people's routers, each answering its leg of a request over HTTP.

The server is the frontend's own, and places its half of a request on a leader of its own instance. The
router has chosen the pair. The halves find each other by the room: prefill's leader expects it, decode's
leader binds it (`kv.protocol.rooms`). The two servers exchange nothing: of a leg that its server refuses, the
other half hears as of one that its leader refuses, by the leader of the server's process.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, contextmanager, suppress
from functools import partial
from typing import Any

import msgspec

from segue.engine.request import Request
from segue.kv import (
    BootstrapUnreachable,
    DeadlineExceeded,
    DpRanks,
    ErrorInfo,
    Handles,
    Incarnation,
    Internal,
    LeaderId,
    Role,
    RoomKey,
    SegueError,
    new_room,
)
from segue.kv.ids import OPEN_RANK
from segue.kv.session import is_loopback
from segue.server.balance.attempts import LOSSES
from segue.server.fleet.call import Call, DirectHalf
from segue.server.fleet.fleet import Fleet
from segue.server.fleet.replica import Replica
from segue.server.frontend.app import Generating, OpenAIServer, OpenAIServerSettings, with_header_rank
from segue.server.frontend.backend import Generation
from segue.server.frontend.http_call import HttpCall, Receive, Scope, Send
from segue.server.frontend.legs import Bootstrap, ComputedRoom, computed_room, legs_of, transfer_params
from segue.server.frontend.native import as_completion, native_plan, read_native
from segue.server.frontend.params import ModelCard, rank_hints
from segue.server.frontend.plan import Plan, sample_count
from segue.server.frontend.problems import BadParam
from segue.server.frontend.request_fields import ChatBody, CompletionBody, GenerateFields
from segue.server.frontend.tokenizer import ModelTokenizer
from segue.server.messages.control import FlushCache, Load
from segue.server.messages.records import Records
from segue.server.observe.metrics import Metrics
from segue.server.registry.client import InstanceWatch
from segue.server.registry.registry_records import InstanceRecord

#: How long an instance may take to appear in the registry's list, or a leader of our own to be connected.
FIND_S = 2.0

Make = Callable[[Generating, ModelCard, str], Plan]


class OwnInstance:
    """The registry's list as a server in direct mode needs it: the leaders of its own instance as unified
    ones, so that only they get its requests. `prefill` are the prefill instances."""

    def __init__(self, registry: InstanceWatch, me: Incarnation) -> None:
        self.prefill: list[InstanceRecord] = []
        self._registry = registry
        self._me = me

    async def watch(self, role: Role | None = None) -> AsyncIterator[list[InstanceRecord]]:
        """See `InstanceWatch.watch`."""
        async with aclosing(self._registry.watch(role)) as lists:  # type: ignore[type-var]
            async for records in lists:
                self.prefill = [r for r in records if r.role is Role.PREFILL]
                own = [r for r in records if r.incarnation == self._me]
                yield [msgspec.structs.replace(record, role=Role.UNIFIED) for record in own]


class OneRoom:
    """The backend of one body's `count` samples: each is a half in one room (`fleet.call.DirectHalf`).
    `prefill` has the other halves, if it is known; it is None on prefill itself."""

    def __init__(self, fleet: Fleet, room: int, count: int) -> None:
        self.room = room
        self.prefill: LeaderId | None = None
        self._fleet = fleet
        self._ordinals: dict[str, int] = {}
        self._calls: list[Call | None] = [None] * count

    def holds(self, plan: Plan) -> None:
        """`plan` has the samples."""
        self._calls = [None] * len(plan.samples)
        self._ordinals = {s.request.request_id: k for k, s in enumerate(plan.samples)}

    def submit(self, request: Request, *, budget_s: float) -> Generation:
        """See `server.frontend.backend.Generator`."""
        ordinal = self._ordinals[request.request_id]
        half = DirectHalf(self.room, ordinal, self.prefill)
        call = self._calls[ordinal] = self._fleet.submit(request, budget_s=budget_s, half=half)
        return call

    def untold(self, error: ErrorInfo) -> list[RoomKey]:
        """The halves of which nobody tells the other one that they have ended with `error`: no leader has got
        them, or it may be gone. A leader tells of its own half."""
        gone = error.code in LOSSES
        return [
            RoomKey(self.room, ordinal=k)
            for k, call in enumerate(self._calls)
            if gone or call is None or not call.attempts.begun
        ]

    def complete(self, request_id: str) -> None:
        """See `server.frontend.backend.Generator`."""
        self._fleet.complete(request_id)

    def cancel(self, request_id: str, reason: ErrorInfo) -> None:
        """See `server.frontend.backend.Generator`."""
        self._fleet.cancel(request_id, reason)


class DirectServer(OpenAIServer):
    """The HTTP server of an instance that a router asks. As it is here, that of a unified instance."""

    def __init__(
        self,
        fleet: Fleet,
        tokenizer: ModelTokenizer,
        settings: OpenAIServerSettings,
        metrics: Metrics,
        records: Records,
        me: LeaderId,
        halves: Handles | None = None,
    ) -> None:
        super().__init__(fleet, tokenizer, settings, metrics, records)
        self.fleet = fleet
        self.me = me
        #: halves of the leader in this process; a unified leader has none
        self.halves = halves

    def sizes(self) -> dict[str, int]:
        """Resources that requests hold here; all zero at rest."""
        return {"calls": self.calls, **self.fleet.sizes()}

    def check_model(self, name: str | None) -> None:
        """Like the frontend's; a router that knows no model sends `unknown`."""
        super().check_model(None if name == "unknown" else name)

    @contextmanager
    def one_room(
        self, room: int, body: GenerateFields, tell: Callable[[Handles, RoomKey, ErrorInfo], object]
    ) -> Iterator[OneRoom]:
        """The room of a leg. If what is done with it fails, `tell` is called for each half whose other half
        would wait."""
        try:
            count = sample_count(body)
        except BadParam:
            count = 0  # both legs are refused
        one = OneRoom(self.fleet, room, count)
        del body
        try:
            yield one
        except Exception as failure:
            error: SegueError = Internal(f"{type(failure).__name__} while a leg was answered")
            if isinstance(failure, TimeoutError):
                error = DeadlineExceeded("the request's deadline passed")
            elif isinstance(failure, SegueError):
                error = failure
            if self.halves is not None:
                for key in one.untold(error.info):
                    tell(self.halves, key, error.info)
            raise

    async def native(self, scope: Scope, receive: Receive, send: Send) -> None:
        """SGLang's `/generate`."""

        async def work(call: HttpCall, started: float) -> None:
            await self.generation(call, started, *await self._read_native(call))

        await self.serve(scope, receive, send, "generate", work)

    async def _read_native(self, call: HttpCall) -> tuple[CompletionBody, bytes, Make[CompletionBody]]:
        raw = await self.receive(call)
        native = await self.off_loop(len(raw), lambda: read_native(raw))
        body = with_header_rank(call, as_completion(native))
        return body, raw, partial(native_plan, self.planner, native)

    async def render_chat(self, scope: Scope, receive: Receive, send: Send) -> None:
        """vLLM's `/v1/chat/completions/render`: the prompt's token ids."""

        async def work(call: HttpCall, started: float) -> None:
            body, raw = await self.read(call, ChatBody)
            await self._render(call, await self.plan(call, body, raw, self.planner.chat))

        await self.serve(scope, receive, send, "render", work)

    async def render_completion(self, scope: Scope, receive: Receive, send: Send) -> None:
        """vLLM's `/v1/completions/render`; of several prompts the first one's."""

        async def work(call: HttpCall, started: float) -> None:
            body, raw = await self.read(call, CompletionBody)
            await self._render(call, await self.plan(call, body, raw, self.planner.completion))

        await self.serve(scope, receive, send, "render", work)

    async def _render(self, call: HttpCall, plan: Plan) -> None:
        prompt = plan.samples[0].request.prompt
        await call.answer(200, {"token_ids": prompt, "count": len(prompt)})

    def own(self) -> list[Replica]:
        """The DP ranks of this instance that this server has a session with."""
        there = self.fleet.membership.replicas.values()
        return [r for r in there if r.leader.incarnation == self.me.incarnation and r.session is not None]

    def loads(self) -> list[dict[str, int]]:
        """The load of each DP rank of this instance, by SGLang's names."""
        found = [replica.load for replica in self.own() if replica.load is not None]
        return [as_load(load) for load in sorted(found, key=lambda load: load.dp_rank)]

    async def flush_cache(self) -> None:
        """Every DP rank of this instance forgets its cached prefixes. BootstrapUnreachable if one is not
        there."""
        try:
            async with asyncio.timeout(FIND_S):
                while not (own := self.own()) or len(own) < own[0].record.dp_size:
                    await self.fleet.changed()
        except TimeoutError:
            raise BootstrapUnreachable("not all DP ranks of this instance can be reached") from None
        for replica in own:
            if replica.session is not None:
                replica.session.send(FlushCache())


class PrefillDirectServer(DirectServer):
    """The server of a prefill instance. Its leg computes the prompt and opens its room. Decode finds the room
    by the number that the router has drawn (SGLang's style) or that the answer carries (vLLM's)."""

    def __init__(self, *arguments: Any, dp: DpRanks, where: InstanceRecord) -> None:
        super().__init__(*arguments)
        self._dp = dp
        self._where = where

    async def generation(
        self, call: HttpCall, started: float, body: Generating, raw: bytes, make: Make[Generating]
    ) -> None:
        """See `OpenAIServer.generation`."""
        legs = await self.off_loop(len(raw), partial(legs_of, raw))
        hints = rank_hints(body)
        rank = hints.routed_dp_rank
        more: dict[str, object] | None = None
        instead: dict[str, object] | None = None
        if legs.bootstrap is not None:
            if not is_at(self._where, legs.bootstrap):
                raise nobody_at(legs.bootstrap)
            room = legs.bootstrap.room
            rank = hints.disagg_prefill_dp_rank if rank is None else rank
            body = msgspec.structs.replace(body, stream=False, stream_options=None, routed_dp_rank=rank)
            meta = {"id": call.id}
            instead = {"id": call.id, "object": "prefill", "text": "", "choices": [], "meta_info": meta}
        elif (legs.transfer or {}).get("do_remote_decode"):
            # `min_tokens` 1 is the router's and not the client's: with it the first token would be another
            # one than a client gets that allows its answer to be empty.
            rank = secrets.randbelow(self._dp.size) if rank is None else rank
            computed = ComputedRoom(new_room(), LeaderId(self.me.incarnation, rank))
            room = computed.room
            body = msgspec.structs.replace(
                body,
                stream=False,
                stream_options=None,
                max_tokens=1,
                max_completion_tokens=None,
                min_tokens=None,
                routed_dp_rank=rank,
                disagg_prefill_dp_rank=rank,
            )
            more = {"kv_transfer_params": transfer_params(computed)}
        else:
            raise _no_legs("prefill")
        where = rank_hints(body).looked_for(self._dp, room)
        known_elsewhere = legs.bootstrap is not None

        def tell(halves: Handles, key: RoomKey, error: ErrorInfo) -> None:
            if known_elsewhere:
                budget_s, announce = self.settings.limits.request_budget_s, where != self.me.dp_rank
                halves.refuse(key, error, budget_s, announce=announce)

        with self.one_room(room, body, tell) as one:
            async with call:
                plan = await self.plan(call, body, raw, make)
                del body, raw, make, legs
                if rank is None and self._dp.size > 1 and len(plan.samples) > 1:
                    self._together(plan, room)
                one.holds(plan)
                await self.run(call, plan, started, one, more, instead)

    def _together(self, plan: Plan, room: int) -> None:
        """Place all samples on one DP rank: the registry knows one for each room."""
        rank = self._dp.follows(room)
        if rank is None:
            own = [replica for replica in self.own() if replica.usable]
            idlest = min(own, key=lambda r: r.candidate().requests, default=None)
            rank = self.me.dp_rank if idlest is None else idlest.leader.dp_rank
        for sample in plan.samples:
            ranks = msgspec.structs.replace(sample.request.ranks, routed_dp_rank=rank)
            sample.request = msgspec.structs.replace(sample.request, ranks=ranks)


class DecodeDirectServer(DirectServer):
    """The server of a decode instance. Its leg gets the answer of the whole request, and its KV from the
    prefill instance that has the room."""

    def __init__(self, *arguments: Any, listed: OwnInstance) -> None:
        super().__init__(*arguments)
        self._listed = listed

    async def generation(
        self, call: HttpCall, started: float, body: Generating, raw: bytes, make: Make[Generating]
    ) -> None:
        """See `OpenAIServer.generation`."""
        legs = await self.off_loop(len(raw), partial(legs_of, raw))
        if legs.bootstrap is None and legs.transfer is None:
            raise _no_legs("decode")
        named = legs.bootstrap or computed_room(legs.transfer or {})

        def tell(halves: Handles, key: RoomKey, error: ErrorInfo) -> None:
            prefill = one.prefill or self._listed_as(named)
            if prefill is not None:  # else there is nobody to tell
                halves.decline(key, prefill, error)

        with self.one_room(named.room, body, tell) as one:
            async with call:
                one.prefill = await self._find(named)
                plan = await self.plan(call, body, raw, make)
                del body, raw, make, legs
                one.holds(plan)
                await self.run(call, plan, started, one)

    async def _find(self, named: Bootstrap | ComputedRoom) -> LeaderId:
        """The prefill leader that has the room. Raises BootstrapUnreachable if the registry names none."""
        with suppress(TimeoutError):
            async with asyncio.timeout(FIND_S):
                while (found := self._listed_as(named)) is None:
                    await self.fleet.changed()
                return found
        if isinstance(named, Bootstrap):
            raise nobody_at(named)
        text = f"prefill {named.prefill}, which has computed this prompt, is not there any more"
        raise BootstrapUnreachable(text, phase="placement")

    def _listed_as(self, named: Bootstrap | ComputedRoom) -> LeaderId | None:
        # The newest last: one that was killed may still be listed at the address of its successor.
        for record in reversed(self._listed.prefill):
            if isinstance(named, Bootstrap):
                if is_at(record, named):
                    return LeaderId(record.incarnation, OPEN_RANK)
            elif any(leader == named.prefill for leader, _ in record.leaders()):
                return named.prefill
        return None


def is_at(record: InstanceRecord, named: Bootstrap) -> bool:
    """Whether `named` is the bootstrap address of this instance. Hosts are compared as they are written: a
    name that a client sends is never looked up."""
    host = named.host.strip("[]").lower()
    return record.bootstrap_port == named.port and any(
        where.host.lower() == host or (is_loopback(where.host) and is_loopback(host))
        for where in record.replicas
    )


def nobody_at(named: Bootstrap) -> SegueError:
    """The error of a leg that names the bootstrap address of no prefill instance, or of another one."""
    return BootstrapUnreachable(
        f"no prefill instance that is asked or registered has the bootstrap address "
        f"{named.host[:200]}:{named.port} (its --advertise-host or --host, and its --bootstrap-port)",
        phase="placement",
    )


def as_load(load: Load) -> dict[str, int]:
    """One DP rank's load, by SGLang's names."""
    return {
        "dp_rank": load.dp_rank,
        "num_reqs": load.running + load.waiting,
        "num_waiting_reqs": load.waiting,
        "num_tokens": load.tokens,
    }


def _no_legs(role: str) -> SegueError:
    return BadParam(
        f"this is a {role} instance: a router for prefill and decode gives bootstrap_host, bootstrap_port "
        "and bootstrap_room, or kv_transfer_params; without one, ask segue's own frontend",
        "bootstrap_room",
    )
