"""`FleetBackend`: requests to a fleet of prefill, decode and unified replicas.

The two halves of a request are one transaction: both are submitted at once, an error on either ends both at
once, and what the caller sees is one stream that ends once. A failure that another worker could heal is
healed there, before the first token and after it, within the request's deadline, a number of attempts and a
budget for the whole fleet.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass

from segue.balance.attempts import LOSSES, MISFITS, UNREACHED, Attempts, Next
from segue.balance.base import PlacementRequest, Policy
from segue.balance.policies import make_policy
from segue.core.errors import (
    BootstrapUnreachable,
    Draining,
    ErrorCode,
    ErrorInfo,
    Internal,
    OutOfCapacity,
    SegueError,
    Starting,
    status_of,
)
from segue.core.limits import MAX_ATTEMPTS, Limits
from segue.core.request import Output, Request
from segue.core.types import LeaderId, Role, new_room
from segue.frontend.replicas import InstanceWatch, Replica, Replicas, Signal
from segue.frontend.stream import FleetStream, Route
from segue.handoff.ticket import FOLLOW_BOOTSTRAP_ROOM
from segue.observe.metrics import Metrics
from segue.session.tls import Tls

#: Not a worker's fault, so nobody is avoided for it (lesson 11).
_BLAMELESS = MISFITS | {ErrorCode.DRAINING, ErrorCode.DEADLINE_EXCEEDED}

#: One worker's end fails all that ran there at once; it says nothing about the others, so what follows it
#: is bounded by each request's attempts and not by the fleet's budget. A pair that cannot be joined is
#: remembered, so that it costs one retry in its life.
_UNBUDGETED = LOSSES | MISFITS | UNREACHED | {ErrorCode.DRAINING}


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSettings:
    """`backlog_outputs` is how far a client may fall behind its generation for longer than
    `backlog_wait_s` (after a pause of our own all that was sent meanwhile comes at once, before any
    client has a turn; what can wait is bounded by the request's `max_tokens`); `no_replica_wait_s` how
    long a request waits for somebody to serve it, `replacement_wait_s` how long one waits whose
    client has tokens already, `reported_loss_wait_s` how long one passes over a worker that its peer says
    is gone; `max_attempts` how often one request is placed in all; `retry_budget` how many
    retries the fleet may make in a row, of which each success gives `retry_refill` back."""

    served_model: str
    policy: str = "total_tokens"
    backlog_outputs: int = 1024
    backlog_wait_s: float = 5.0
    no_replica_wait_s: float = 2.0
    replacement_wait_s: float = 10.0
    reported_loss_wait_s: float = 1.0
    max_attempts: int = MAX_ATTEMPTS
    retry_budget: float = 10.0
    retry_refill: float = 0.1


class FleetBackend:
    """A `Backend` over the replicas that the registry lists."""

    def __init__(
        self,
        registry: InstanceWatch,
        settings: FleetSettings,
        *,
        secret: bytes | None,
        limits: Limits,
        metrics: Metrics,
        tls: Tls | None = None,
    ) -> None:
        self.settings = settings
        self.limits = limits
        self.metrics = metrics
        self.secret = secret or b""
        self._signal = Signal()
        self._context: int | None = None
        #: Somebody could serve at some time: who is missing now was lost, and not awaited since the start.
        self._started = False
        self._proven: set[tuple[LeaderId, LeaderId]] = set()
        #: Pairs that refused one another: incarnations that are alive, so never more than there are pairs.
        self._refused: set[tuple[LeaderId, LeaderId]] = set()
        self._streams: dict[str, FleetStream] = {}
        self._draining = False
        self._retries_left = settings.retry_budget
        # One policy object for each half: they are chosen independently, never in lock-step.
        self._prefill_policy: Policy = make_policy(settings.policy, random.randrange)
        self._decode_policy: Policy = make_policy(settings.policy, random.randrange)
        self.replicas = Replicas(
            registry,
            secret=secret,
            limits=limits,
            metrics=metrics,
            served_model=settings.served_model,
            changed=self._membership_changed,
            tls=tls,
        )

    # ---- the process's side ---------------------------------------------------------------------

    def start(self) -> None:
        """Begin to watch the registry and to open sessions."""
        self.replicas.start()

    def drain(self) -> None:
        """Take no new requests from now on."""
        self._draining = True
        self._signal.notify()

    async def close(self) -> None:
        """End everything; what still runs fails with Draining."""
        self.drain()
        for stream in list(self._streams.values()):
            stream.fail(Draining("the frontend is leaving"))
        await self.replicas.close()

    # ---- Backend --------------------------------------------------------------------------------

    @property
    def context_tokens(self) -> int | None:
        return self._context

    @property
    def can_serve(self) -> bool:
        if self._draining:
            return False
        return bool(self._serving())

    @property
    def proven(self) -> bool:
        usable = {r.leader for r in self.replicas if r.usable}
        return any(p in usable and d in usable for p, d in self._proven)

    @property
    def in_flight(self) -> int:
        """Requests that were admitted and have not ended."""
        return len(self._streams)

    def lacking(self) -> SegueError:
        if self._draining:
            return Draining("this frontend is draining; ask another")
        where = {"phase": "placement", "origin": "frontend"}
        counts = {role: len(self.replicas.usable(role)) for role in (Role.PREFILL, Role.DECODE)}
        there = f"{counts[Role.PREFILL]} prefill, {counts[Role.DECODE]} decode and no unified"
        away = [r for r in self.replicas if r.session is None]
        if away:
            there += f", and {len(away)} that are registered and not connected"
        needed = "a request needs one of each with the same model and dtype, or a unified one"
        if self._started:
            return BootstrapUnreachable(f"nobody can serve: usable replicas are {there}; {needed}").at(
                **where
            )
        missing = [str(role) for role, count in counts.items() if not count] or ["a matching pair"]
        return Starting(
            f"segue is starting, nobody can serve yet: the tokenizer is loaded, usable replicas are {there}; "
            f"waiting for {' and '.join(missing)} to load the model and to register ({needed})"
        ).at(**where)

    def sizes(self) -> dict[str, int]:
        return {"streams": len(self._streams), **self.replicas.sizes()}

    async def changed(self) -> None:
        await self._signal.wait()

    def submit(self, request: Request, *, budget_s: float) -> AsyncIterator[Output]:
        if self._draining:
            raise Draining("this frontend is draining; ask another")
        if len(self._streams) >= self.limits.max_queue:
            raise OutOfCapacity(f"{self.limits.max_queue} requests are in flight already")
        if request.request_id in self._streams:
            raise Internal(f"the request id {request.request_id} is in use")
        stream = FleetStream(self, request, asyncio.get_running_loop().time() + budget_s)
        self._streams[request.request_id] = stream
        return stream

    def cancel(self, request_id: str, reason: ErrorInfo) -> None:
        stream = self._streams.get(request_id)
        if stream is not None:
            stream.fail(reason.exception())

    # ---- the streams' side ----------------------------------------------------------------------

    def forget(self, stream: FleetStream) -> None:
        """The stream has ended."""
        self._streams.pop(stream.request.request_id, None)

    async def place(self, attempts: Attempts, deadline: float) -> Route:
        """Who runs the next attempt. Waits a little for somebody to come; then BootstrapUnreachable."""
        loop, s = asyncio.get_running_loop(), self.settings
        wait_s = max(s.replacement_wait_s, s.no_replica_wait_s) if attempts.delivered else s.no_replica_wait_s
        until = min(deadline, loop.time() + wait_s)
        # A worker that its peer says is gone is waited for: for its end to be seen, or its successor.
        patient_until = min(
            until, loop.time() + (s.reported_loss_wait_s if attempts.reported_by_peer else 0.0)
        )
        while True:
            now = loop.time()
            patient = now < patient_until
            route = self._choose(attempts, now, patient)
            if route is not None:
                return route
            if self._draining and not attempts.delivered:
                raise Draining("this frontend is draining; ask another")
            if now >= until:
                raise self.lacking()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(patient_until if patient else until):
                    await self._signal.wait()

    def _choose(self, attempts: Attempts, now: float, patient: bool) -> Route | None:
        ask = PlacementRequest(new_room(), attempts.request.prompt)
        serving = self._serving()
        # A unified replica stands beside the decode replicas: whoever decodes is chosen first.
        halves = [r for r in serving if r.role is Role.PREFILL]
        decode = [r for r in serving if r.role is not Role.PREFILL]
        decode = [r for r in decode if r.role is Role.UNIFIED or self._partners(r, halves)] or decode
        d = self._pick(self._decode_policy, decode, attempts, ask, now, patient)
        if d is None or d.role is Role.UNIFIED:
            return None if d is None else Route(ask.room, d, d)
        prefill = self._partners(d, halves) or [r for r in halves if r.record.model == d.record.model]
        following = [
            r
            for r in prefill
            if r.record.load_balance != FOLLOW_BOOTSTRAP_ROOM
            or r.where.dp_rank == ask.room % r.record.dp_size
        ]
        p = self._pick(
            self._prefill_policy, following or prefill, attempts, ask, now, patient, half=Role.PREFILL
        )
        return None if p is None else Route(ask.room, p, d)

    def _serving(self) -> list[Replica]:
        """Usable replicas that a request may be given to: a prefill or decode replica only if the other
        half of its pair is there with the same model and dtype, for no other one could read its KV."""
        usable = self.replicas.usable
        prefill, decode = usable(Role.PREFILL), usable(Role.DECODE)
        models = {p.record.model for p in prefill} & {d.record.model for d in decode}
        return usable(Role.UNIFIED) + [r for r in prefill + decode if r.record.model in models]

    def _partners(self, decode: Replica, prefill: list[Replica]) -> list[Replica]:
        """Those of `prefill` that can hand KV to `decode`, as far as we know."""
        d, model = decode.leader, decode.record.model
        return [p for p in prefill if p.record.model == model and (p.leader, d) not in self._refused]

    def refused(self, route: Route) -> bool:
        """The two halves of `route` cannot be joined (no common transport, say): they are not paired again
        while there is a choice. Returns whether there is one."""
        self._refused.add((route.prefill.leader, route.decode.leader))
        serving = self._serving()
        prefill = [r for r in serving if r.role is Role.PREFILL]
        return any(r.role is Role.UNIFIED or self._partners(r, prefill) for r in serving if r not in prefill)

    def _pick(
        self,
        policy: Policy,
        replicas: list[Replica],
        attempts: Attempts,
        ask: PlacementRequest,
        now: float,
        patient: bool,
        half: Role = Role.DECODE,
    ) -> Replica | None:
        """By policy among the good ones; if there are none, among the least bad."""
        by_leader = {r.leader: r for r in replicas}
        others = attempts.candidates([r.candidate() for r in replicas], patient=patient)
        calm = [c for c in others if by_leader[c.leader].cool_until <= now] or others
        if not calm:
            return None
        return by_leader[attempts.choose(policy, calm, ask, prefill=half is Role.PREFILL).leader]

    def may_retry(self, code: ErrorCode, follows: Next) -> bool:
        """Take one retry out of the fleet's budget, which keeps a failing fleet from doubling its load.

        A frontend that drains starts nothing new, but what it began may still be continued.
        """
        if self._draining and follows is not Next.CONTINUE:
            return False
        if code not in _UNBUDGETED:
            if self._retries_left < 1:
                return False
            self._retries_left -= 1
        counter = self.metrics.continuations if follows is Next.CONTINUE else self.metrics.retries
        counter.labels(code).inc()
        return True

    def alone(self, replica: Replica) -> bool:
        """Nobody else could take what `replica` failed at."""
        serving = self._serving()
        alike = [r for r in serving if r.role is replica.role and r.record.model == replica.record.model]
        return len(alike) <= 1 and not (
            replica.role is Role.DECODE and any(r.role is Role.UNIFIED for r in serving)
        )

    def record_success(self, route: Route) -> None:
        """A request ended well on `route`."""
        s = self.settings
        self._retries_left = min(s.retry_budget, self._retries_left + s.retry_refill)
        self.replicas.record_success(route.prefill)
        self.replicas.record_success(route.decode)
        pair = (route.prefill.leader, route.decode.leader)
        if pair not in self._proven:
            self._proven.add(pair)
            self._signal.notify()

    def record_failure(self, replica: Replica, info: ErrorInfo) -> None:
        """A request failed on `replica`. Only what is a worker's fault counts against it."""
        if status_of(info.code) < 500 or info.code in _BLAMELESS:
            return
        self.replicas.record_failure(replica, asyncio.get_running_loop().time())
        # Not proven any more: `/ready` waits for the next success (lesson 09).
        self._proven = {pair for pair in self._proven if replica.leader not in pair}
        self._signal.notify()

    def _membership_changed(self) -> None:
        known = {r.leader for r in self.replicas}
        self._proven = {(p, d) for p, d in self._proven if p in known and d in known}
        self._refused = {(p, d) for p, d in self._refused if p in known and d in known}
        sizes = [r.record.context_tokens for r in self._serving()]
        self._started = self._started or bool(sizes)
        self._context = min(sizes, default=None)
        self._signal.notify()
