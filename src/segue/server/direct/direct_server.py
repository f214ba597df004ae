"""Direct mode: instances behind other people's routers, each answering its leg of a request over HTTP.

The server is the frontend's own. It places each request as a frontend does: decode's server on a prefill
instance and on its own, prefill's server on its own alone. What differs is who chooses the pair (the router)
and what prefill answers.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from functools import partial
from typing import Any

import msgspec

from segue.kv import BootstrapUnreachable, Incarnation, LeaderId, Role, SegueError, new_room
from segue.server.direct.decode_rendezvous import FIND_S, DecodeRendezvous, Meeting
from segue.server.direct.prefill_rendezvous import MEET_S, PrefillRendezvous
from segue.server.fleet.fleet import Fleet
from segue.server.fleet.replica import Replica
from segue.server.frontend.app import Generating, OpenAIServer, OpenAIServerSettings, with_header_rank
from segue.server.frontend.http_call import HttpCall, Receive, Scope, Send
from segue.server.frontend.legs import TICKET, Bootstrap, RetainedTicket, legs_of, pack_ticket, unpack_ticket
from segue.server.frontend.native import as_completion, native_plan, read_native
from segue.server.frontend.openai_types import ChatBody, CompletionBody
from segue.server.frontend.params import ModelCard, rank_hints
from segue.server.frontend.plan import Plan
from segue.server.frontend.problems import BadParam
from segue.server.frontend.tokenizer import ModelTokenizer
from segue.server.messages.control import FlushCache, Load
from segue.server.messages.records import Records
from segue.server.observe.metrics import Metrics
from segue.server.registry.client import InstanceWatch
from segue.server.registry.registry_records import InstanceRecord

Make = Callable[[Generating, ModelCard, str], Plan]


class OwnAndPrefill:
    """What the registry lists, as far as a server in direct mode needs it: its own instance and, of decode,
    every prefill instance. To prefill's server its own leaders are unified ones: they get a request and
    nobody else does."""

    def __init__(self, registry: InstanceWatch, me: Incarnation) -> None:
        self._registry = registry
        self._me = me

    async def watch(self, role: Role | None = None) -> AsyncIterator[list[InstanceRecord]]:
        """See `InstanceWatch.watch`."""
        async with aclosing(self._registry.watch(role)) as lists:  # type: ignore[type-var]
            async for records in lists:
                own = next((r for r in records if r.incarnation == self._me), None)
                if own is not None and own.role is Role.PREFILL:
                    own = msgspec.structs.replace(own, role=Role.UNIFIED)
                others = own is not None and own.role is Role.DECODE
                shown = [r for r in records if others and r.role is Role.PREFILL]
                yield [*shown, own] if own is not None else shown


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
    ) -> None:
        super().__init__(fleet, tokenizer, settings, metrics, records)
        self.fleet = fleet
        self.me = me

    def sizes(self) -> dict[str, int]:
        """What requests hold here; all zero at rest."""
        return {"calls": self.calls, **self.fleet.sizes()}

    def check_model(self, name: str | None) -> None:
        """As the frontend's; a router that knows of no model says `unknown`."""
        super().check_model(None if name == "unknown" else name)

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
        """What runs on each DP rank of this instance, by SGLang's names."""
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
    """Of a prefill instance. In SGLang's style it answers when prefill's part is done; in vLLM's it computes
    the prompt and answers with a ticket for what it retains."""

    def __init__(self, *arguments: Any, rooms: PrefillRendezvous, secret: bytes) -> None:
        super().__init__(*arguments)
        self._rooms = rooms
        self._secret = secret

    async def generation(
        self, call: HttpCall, started: float, body: Generating, raw: bytes, make: Make[Generating]
    ) -> None:
        """See `OpenAIServer.generation`."""
        legs = await self.off_loop(len(raw), partial(legs_of, raw))
        transfer = legs.transfer or {}
        if legs.bootstrap is not None:
            call.held.set(0)
            answered = self._leg(call, started, rank_hints(body).routed_dp_rank, legs.bootstrap.room)
        elif transfer.get("do_remote_decode"):
            answered = self._retain(call, started, body, raw, make)
        else:
            raise _no_legs("prefill")
        del body, raw, make, legs, transfer
        await answered

    async def _leg(self, call: HttpCall, started: float, rank: int | None, room: int) -> None:
        """Decode places the request; this leg only waits for its end, and its end is that of the request."""
        async with call:
            await self._rooms.wait(room, rank, self.budget_s(started))
            await call.answer(
                200,
                {"id": call.id, "object": "prefill", "text": "", "choices": [], "meta_info": {"id": call.id}},
            )

    async def _retain(
        self, call: HttpCall, started: float, body: Generating, raw: bytes, make: Make[Generating]
    ) -> None:
        """Compute the prompt and its first token. `min_tokens` 1 is the router's and not the client's: with
        it the first token would be another one than a client gets that allows its answer to be empty."""
        rank = rank_hints(body).routed_dp_rank
        dp_rank = secrets.randbelow(self._rooms.dp.size) if rank is None else rank
        seed = secrets.randbits(63) if body.seed is None else body.seed
        body = msgspec.structs.replace(
            body,
            seed=seed,
            stream=False,
            stream_options=None,
            max_tokens=1,
            max_completion_tokens=None,
            min_tokens=None,
            routed_dp_rank=dp_rank,
            disagg_prefill_dp_rank=None,
        )
        ticket = RetainedTicket(room=new_room(), issuer=self.me, dp_rank=dp_rank, seed=seed)
        answer = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            TICKET: pack_ticket(ticket, self._secret),
        }
        async with call:
            plan = await self.plan(call, body, raw, make)
            del body, raw, make
            with self._rooms.ticket(ticket.room, dp_rank, self.budget_s(started)):
                await self.run(call, plan, started, self.backend, {"kv_transfer_params": answer})


class DecodeDirectServer(DirectServer):
    """Of a decode instance: it gets the answer of the whole request, from whichever prefill instance has the
    other leg or made the ticket."""

    def __init__(self, *arguments: Any, meetings: DecodeRendezvous, secret: bytes) -> None:
        super().__init__(*arguments)
        self._meetings = meetings
        self._secret = secret

    def sizes(self) -> dict[str, int]:
        """See `DirectServer.sizes`."""
        return {**super().sizes(), **self._meetings.sizes()}

    async def generation(
        self, call: HttpCall, started: float, body: Generating, raw: bytes, make: Make[Generating]
    ) -> None:
        """See `OpenAIServer.generation`."""
        legs = await self.off_loop(len(raw), partial(legs_of, raw))
        other: Bootstrap | RetainedTicket
        if legs.bootstrap is not None:
            other = legs.bootstrap
        elif legs.transfer is not None:
            other = unpack_ticket(legs.transfer, self._secret)
            if body.seed is None:
                body = msgspec.structs.replace(body, seed=other.seed)
        else:
            raise _no_legs("decode")
        hint = rank_hints(body).disagg_prefill_dp_rank
        meet_s = min(MEET_S, self.budget_s(started))
        async with Meeting(self._meetings, self.fleet, other, hint, meet_s) as meeting, call:
            await meeting.ask()
            plan = await self.plan(call, body, raw, make)
            del body, raw, make, legs
            await meeting.wait(len(plan.samples))
            await self.run(call, plan, started, meeting)


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
