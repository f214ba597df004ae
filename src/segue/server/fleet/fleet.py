"""`Fleet`: generations on prefill, decode and unified replicas that a registry lists.

A failure that another worker could heal is healed there, before the first token and after it, within the
request's deadline, a number of attempts and a budget for the whole fleet.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from itertools import islice

from segue.engine.request import Request
from segue.kv import (
    Draining,
    ErrorInfo,
    Internal,
    LeaderId,
    Limits,
    OutOfCapacity,
    Role,
    SegueError,
    new_room,
)
from segue.kv.session import SessionNode, Tls, Uniform
from segue.server.balance.policies import PREFIX_AWARE
from segue.server.balance.policy import RandBelow
from segue.server.balance.prefix_index import PrefixIndex
from segue.server.fleet.call import Call, DirectHalf, Parts, Signal
from segue.server.fleet.fleet_settings import FleetSettings
from segue.server.fleet.membership import Membership
from segue.server.fleet.retry_after import RetryAfter
from segue.server.fleet.router import Router
from segue.server.messages.records import MAX_FOUND, Records, RequestRecord, matcher
from segue.server.observe.metrics import Metrics
from segue.server.registry.client import InstanceWatch


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetRuntime:
    """The parts that a simulation replaces: the network and the random generator. `me` None: a fresh one."""

    node: Callable[..., SessionNode] = SessionNode
    me: LeaderId | None = None
    uniform: Uniform = random.uniform
    randbelow: RandBelow = random.randrange
    new_room: Callable[[], int] = new_room


class Fleet:
    """The backend of a frontend (`server.frontend.backend.Backend`), over the replicas that the registry
    lists."""

    def __init__(
        self,
        registry: InstanceWatch,
        settings: FleetSettings,
        *,
        secret: bytes | None,
        limits: Limits,
        metrics: Metrics,
        tls: Tls | None = None,
        records: Records | None = None,
        runtime: FleetRuntime | None = None,
        span_below: Callable[[str], str] | None = None,
    ) -> None:
        runtime = runtime or FleetRuntime()
        self.limits = limits
        self.records = Records() if records is None else records
        self._news = Signal()
        self._calls: dict[str, Call] = {}
        index = PrefixIndex() if settings.policy == PREFIX_AWARE else None
        self.membership = Membership(
            registry,
            secret=secret,
            limits=limits,
            metrics=metrics,
            served_model=settings.served_model,
            changed=self._membership_changed,
            explain=self.explain,
            tls=tls,
            me=runtime.me,
            make_node=runtime.node,
            uniform=runtime.uniform,
            index=index,
        )
        self.router = Router(self.membership.replicas, settings, runtime.randbelow, index)
        self._parts = Parts(
            membership=self.membership,
            router=self.router,
            settings=settings,
            metrics=metrics,
            news=self._news,
            new_room=runtime.new_room,
            records=self.records,
            vacancies=RetryAfter(lambda: self.in_flight),
            span_below=span_below,
        )

    def explain(self, request_id: str) -> list[RequestRecord]:
        """The records of a request and of its samples; running ones come last."""
        fits = matcher(request_id)
        live = [call.record(ended=False) for name, call in self._calls.items() if fits(name)]
        return self.records.find(request_id) + live[:MAX_FOUND]

    def live(self, count: int, tenant: str = "") -> list[RequestRecord]:
        """Records of at most `count` generations that go on, the newest first; with `tenant` only its own."""
        calls = reversed(self._calls.values())
        own = (call for call in calls if tenant in ("", call.attempts.request.tenant))
        return [call.record(ended=False) for call in islice(own, count)]

    def _membership_changed(self) -> None:
        self.router.membership_changed()
        self._news.notify()

    # ---- the process's side ---------------------------------------------------------------------

    def start(self) -> None:
        """Begin to watch the registry and to open sessions."""
        self.membership.start()

    def drain(self) -> None:
        """Take no new requests from now on."""
        self.router.draining = True
        self._news.notify()

    def await_restarted(self, roles: Collection[Role]) -> None:
        """Lost instances of these `roles`, and of no others, are being started again: requests that nobody
        can serve meanwhile wait for them, each within its budget."""
        self.router.awaited = frozenset(roles)
        self._news.notify()

    async def close(self) -> None:
        """End everything; what still runs fails with Draining."""
        self.drain()
        for call in list(self._calls.values()):
            call.fail(Draining("the frontend is leaving"))
        await self.membership.close()

    # ---- Backend --------------------------------------------------------------------------------

    @property
    def context_tokens(self) -> int | None:
        return self.router.context_tokens

    @property
    def can_serve(self) -> bool:
        return self.router.can_serve

    @property
    def proven(self) -> bool:
        return self.router.proven

    @property
    def in_flight(self) -> int:
        """Requests that were admitted and have not ended."""
        return len(self._calls)

    def lacking(self) -> SegueError:
        return self.router.lacking()

    def sizes(self) -> dict[str, int]:
        return {"streams": len(self._calls), **self.membership.sizes()}

    async def changed(self) -> None:
        await self._news.wait()

    def submit(self, request: Request, *, budget_s: float, half: DirectHalf | None = None) -> Call:
        """See `Backend.submit`; with `half`, a unified replica gets that half of a request alone."""
        if self.router.draining:
            raise Draining("this frontend is draining; ask another")
        if len(self._calls) >= self.limits.max_queue:
            full = OutOfCapacity(f"{self.limits.max_queue} requests are in flight already")
            raise self._parts.vacancies.refused(full, asyncio.get_running_loop().time())
        self.router.check_ranks(request.ranks)
        request_id = request.request_id
        if request_id in self._calls:
            raise Internal(f"the request id {request_id} is in use")
        deadline = asyncio.get_running_loop().time() + budget_s
        ended = partial(self._calls.pop, request_id, None)
        call = Call(request, deadline, self._parts, ended, half)
        self._calls[request_id] = call
        return call

    def complete(self, request_id: str) -> None:
        call = self._calls.get(request_id)
        if call is not None:
            call.complete()

    def cancel(self, request_id: str, reason: ErrorInfo) -> None:
        call = self._calls.get(request_id)
        if call is not None:
            call.fail(reason.exception())
