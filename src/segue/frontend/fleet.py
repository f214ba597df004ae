"""`FleetBackend`: requests to a fleet of prefill, decode and unified replicas.

The two halves of a request are one transaction: both are submitted at once, an error on either ends both at
once, and what the caller sees is one stream that ends once. Before the first token a failure that another
worker could heal is tried again there, within the request's deadline and a budget for the whole fleet.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass

import msgspec

from segue.balance.base import Ask, Policy
from segue.balance.policies import make_policy
from segue.core.control import Cancel, Submit
from segue.core.errors import (
    AbortedByClient,
    BootstrapUnreachable,
    DeadlineExceeded,
    Draining,
    ErrorCode,
    ErrorInfo,
    Internal,
    OutOfCapacity,
    SegueError,
    status_of,
)
from segue.core.limits import Limits
from segue.core.request import Output, Request, Ticket
from segue.core.types import Placement, Role, new_room
from segue.frontend.replicas import InstanceWatch, Replica, Replicas, Signal
from segue.handoff.ticket import FOLLOW_BOOTSTRAP_ROOM, sign
from segue.observe.metrics import Metrics

MAX_ATTEMPTS = 3

#: Not a worker's fault, so nobody is avoided for it (lesson 11).
_BLAMELESS = {ErrorCode.DRAINING, ErrorCode.DEADLINE_EXCEEDED}


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSettings:
    """`backlog_outputs` is how far a client may fall behind its generation; `no_replica_wait_s` how
    long a request waits for somebody to serve it; `retry_budget` how many retries may be made in a
    row, of which each success gives `retry_refill` back."""

    served_model: str
    policy: str = "total_tokens"
    backlog_outputs: int = 1024
    no_replica_wait_s: float = 2.0
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
    ) -> None:
        self.settings = settings
        self.limits = limits
        self.metrics = metrics
        self.secret = secret or b""
        self._signal = Signal()
        self._context: int | None = None
        self._proven: set[tuple[Placement, Placement]] = set()
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
        usable = self.replicas.usable
        return bool(usable(Role.UNIFIED) or (usable(Role.PREFILL) and usable(Role.DECODE)))

    @property
    def proven(self) -> bool:
        usable = {r.placement for r in self.replicas if r.usable}
        return any(p in usable and d in usable for p, d in self._proven)

    @property
    def in_flight(self) -> int:
        """Requests that were admitted and have not ended."""
        return len(self._streams)

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

    async def place(self, prompt: list[int], avoid: set[Placement], deadline: float) -> Route:
        """Who runs a prompt. Waits a little for somebody to come; then BootstrapUnreachable."""
        loop = asyncio.get_running_loop()
        until = min(deadline, loop.time() + self.settings.no_replica_wait_s)
        while True:
            route = self._choose(prompt, avoid, loop.time())
            if route is not None:
                return route
            if self._draining:
                raise Draining("this frontend is draining; ask another")
            try:
                async with asyncio.timeout_at(until):
                    await self._signal.wait()
            except TimeoutError:
                raise BootstrapUnreachable(self._nobody(), phase="placement", origin="frontend") from None

    def _choose(self, prompt: list[int], avoid: set[Placement], now: float) -> Route | None:
        ask = Ask(new_room(), prompt)
        prefill = self.replicas.usable(Role.PREFILL)
        # A unified replica stands beside the decode replicas: whoever decodes is chosen first.
        decode = self.replicas.usable(Role.UNIFIED) + (self.replicas.usable(Role.DECODE) if prefill else [])
        if not decode:
            return None
        d = self._pick(self._decode_policy, decode, avoid, ask, now)
        if d.role is Role.UNIFIED:
            return Route(ask.room, d, d)
        following = [
            r
            for r in prefill
            if r.record.load_balance != FOLLOW_BOOTSTRAP_ROOM
            or r.where.dp_rank == ask.room % r.record.dp_size
        ]
        return Route(ask.room, self._pick(self._prefill_policy, following or prefill, avoid, ask, now), d)

    def _pick(
        self, policy: Policy, replicas: list[Replica], avoid: set[Placement], ask: Ask, now: float
    ) -> Replica:
        """By policy among the good ones; if there are none, among the least bad."""
        others = [r for r in replicas if r.placement not in avoid] or replicas
        calm = [r for r in others if r.cool_until <= now] or others
        by_placement = {r.placement: r for r in calm}
        return by_placement[policy.choose([r.candidate() for r in calm], ask).placement]

    def _nobody(self) -> str:
        counts = {role: len(self.replicas.usable(role)) for role in (Role.PREFILL, Role.DECODE)}
        return (
            f"nobody can serve: {counts[Role.PREFILL]} prefill, {counts[Role.DECODE]} decode and no unified "
            "replica are usable; a request needs one of each, or a unified one"
        )

    def may_retry(self, code: ErrorCode) -> bool:
        """Take one retry out of the fleet's budget, which keeps a failing fleet from doubling its load."""
        if self._retries_left < 1 or self._draining:
            return False
        self._retries_left -= 1
        self.metrics.retries.labels(code).inc()
        return True

    def alone(self, replica: Replica) -> bool:
        """Nobody else could take what `replica` failed at."""
        return len(self.replicas.usable(replica.role)) <= 1 and not (
            replica.role is Role.DECODE and self.replicas.usable(Role.UNIFIED)
        )

    def succeeded(self, route: Route) -> None:
        """A request ended well on `route`."""
        s = self.settings
        self._retries_left = min(s.retry_budget, self._retries_left + s.retry_refill)
        self.replicas.praise(route.prefill)
        self.replicas.praise(route.decode)
        pair = (route.prefill.placement, route.decode.placement)
        if pair not in self._proven:
            self._proven.add(pair)
            self._signal.notify()

    def blamed(self, replica: Replica, info: ErrorInfo) -> None:
        """A request failed on `replica`. Only what is a worker's fault counts against it."""
        if status_of(info.code) < 500 or info.code in _BLAMELESS:
            return
        self.replicas.blame(replica, asyncio.get_running_loop().time())
        # Not proven any more: `/ready` waits for the next success (lesson 09).
        self._proven = {pair for pair in self._proven if replica.placement not in pair}
        self._signal.notify()

    def _membership_changed(self) -> None:
        known = {r.placement for r in self.replicas}
        self._proven = {(p, d) for p, d in self._proven if p in known and d in known}
        sizes = [r.record.context_tokens for r in self.replicas if r.usable]
        self._context = min(sizes, default=None)
        self._signal.notify()


@dataclass(frozen=True, slots=True)
class Route:
    """Where one attempt runs; for a unified replica both halves are the same."""

    room: int
    prefill: Replica
    decode: Replica

    @property
    def replicas(self) -> tuple[Replica, ...]:
        return (self.decode,) if self.prefill is self.decode else (self.decode, self.prefill)


class Attempt:
    """One try of a request on one route."""

    def __init__(self, backend: FleetBackend, stream: FleetStream, route: Route, number: int) -> None:
        self.route = route
        self.number = number
        self._backend = backend
        self._stream = stream
        request = stream.request
        # A worker may still be ending the attempt before: another id keeps the two apart.
        self.request_id = f"{request.request_id}~{number}" if number else request.request_id
        self._tokens = len(request.prompt) + request.sampling.max_tokens
        self._live: set[Replica] = set()

    def start(self, deadline: float) -> None:
        """Submit to both leaders at once."""
        route = self.route
        ticket = sign(
            Ticket(
                room=route.room,
                attempt=self.number,
                prefill=route.prefill.placement,
                decode=route.decode.placement,
                budget_s=deadline - asyncio.get_running_loop().time(),
            ),
            self._backend.secret,
            self._backend.replicas.incarnation,
        )
        request = self._stream.request
        if self.number:
            request = msgspec.structs.replace(request, request_id=self.request_id)
        message = Submit(request, ticket)
        self._live = set(route.replicas)
        for replica in route.replicas:
            self._backend.replicas.enter(replica, self.request_id, self, self._tokens)
        for replica in route.replicas:
            if replica.session is not None:
                replica.session.send(message)

    def output(self, replica: Replica, output: Output) -> None:
        """An output of either half. Only decode gives tokens; prefill gives an error or nothing."""
        if output.error is not None:
            self._live.discard(replica)
            self._failed(replica, output.error.exception().at(origin=replica.name))
        elif replica is not self.route.decode:
            if output.token_ids:
                self._failed(replica, Internal("prefill sent tokens", origin=replica.name))
        else:
            if output.finish is not None:
                self._live.clear()
                self._leave()
            self._stream.arrived(output)

    def lost(self, replica: Replica, error: SegueError) -> None:
        """The session with one half's replica ended."""
        self._live.discard(replica)
        self._failed(replica, error)

    def _failed(self, replica: Replica, error: SegueError) -> None:
        info = error.info
        culprit = next((r for r in self.route.replicas if info.origin.startswith(r.name)), replica)
        # The other half ends now, not at its deadline (lesson 10).
        self.end(info)
        self._backend.blamed(culprit, info)
        self._stream.attempt_failed(self, culprit, error)

    def end(self, reason: ErrorInfo) -> None:
        """End this attempt wherever it still runs."""
        for replica in self._live:
            if replica.session is not None:
                replica.session.send(Cancel(self.request_id, reason))
        self._live.clear()
        self._leave()

    def _leave(self) -> None:
        for replica in self.route.replicas:
            self._backend.replicas.leave(replica, self.request_id, self._tokens)


class FleetStream:
    """The outputs of one request, over its attempts. Ends exactly once."""

    def __init__(self, backend: FleetBackend, request: Request, deadline: float) -> None:
        self.request = request
        self._backend = backend
        self._deadline = deadline
        self._queue: deque[Output] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._attempt: Attempt | None = None
        self._attempts = 0
        self._avoid: set[Placement] = set()
        self._delivered = False
        self._error: SegueError | None = None
        self._ended = False
        self._alarm = asyncio.get_running_loop().call_at(deadline, self._expire)

    def __aiter__(self) -> FleetStream:
        return self

    async def __anext__(self) -> Output:
        while True:
            if self._queue:
                return self._queue.popleft()
            if self._error is not None:
                raise self._error
            if self._ended:
                raise StopAsyncIteration
            if self._attempt is None:
                await self._start()
                continue
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    async def _start(self) -> None:
        prompt = self.request.prompt
        try:
            route = await self._backend.place(prompt, self._avoid, self._deadline)
        except SegueError as error:
            self.fail(error)
            return
        if self._ended:
            # Cancelled while it waited for somebody to come.
            return
        self._attempt = Attempt(self._backend, self, route, self._attempts)
        self._attempts += 1
        self._attempt.start(self._deadline)

    def arrived(self, output: Output) -> None:
        """The next output, from the attempt that runs."""
        if self._ended:
            return
        self._delivered = self._delivered or bool(output.token_ids)
        self._queue.append(output)
        if output.finish is not None:
            assert self._attempt is not None
            self._backend.succeeded(self._attempt.route)
            self._end()
        elif len(self._queue) > self._backend.settings.backlog_outputs:
            self.fail(
                AbortedByClient(
                    f"the client reads too slowly: {len(self._queue)} outputs wait for it", phase="stream"
                )
            )
        self._wake()

    def attempt_failed(self, attempt: Attempt, culprit: Replica, error: SegueError) -> None:
        """An attempt ended badly: try again elsewhere, or fail."""
        if self._ended or attempt is not self._attempt:
            return
        self._avoid.add(culprit.placement)
        info = error.info
        again = (
            info.retryable
            and not self._delivered
            and self._attempts < MAX_ATTEMPTS
            # A full worker is not asked again at once; a lost one may have a successor soon.
            and not (info.code is ErrorCode.OUT_OF_CAPACITY and self._backend.alone(culprit))
            and self._backend.may_retry(info.code)
        )
        if again:
            self._attempt = None
            self._wake()
        else:
            self._fail(error)

    def fail(self, error: SegueError) -> None:
        """End the request with `error`, on all workers, now. A no-op after the end."""
        if self._ended:
            return
        if self._attempt is not None:
            self._attempt.end(error.info)
        self._fail(error)

    def _fail(self, error: SegueError) -> None:
        self._error = error
        self._queue.clear()
        self._end()
        self._wake()

    def _expire(self) -> None:
        where = "decode" if self._delivered else "prefill or hand-off"
        attempt = self._attempt
        route = "nobody" if attempt is None else " and ".join(r.name for r in attempt.route.replicas)
        self.fail(
            DeadlineExceeded(
                f"the request's deadline passed during {where} on {route}",
                origin="frontend",
                phase="stream" if self._delivered else "first token",
                room=attempt.route.room if attempt else 0,
            )
        )

    def _end(self) -> None:
        self._ended = True
        self._alarm.cancel()
        self._backend.forget(self)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
