"""One request on a fleet: its attempts, one after the other, their outputs, and its deadline.

A pair is a transaction: both halves are submitted at once, an error of either ends the other at once, and the
next attempt begins only after both halves of the last one have ended or were told to. If decode fails before
its first token, prefill's half may go on, for the next attempt on the same prefill. The router decides what
follows a failure; this module carries it out. The caller sees one stream of outputs that ends once.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from segue.engine.request import Output, Request, Wait
from segue.kv import (
    AbortedByClient,
    DeadlineExceeded,
    ErrorCode,
    ErrorInfo,
    Internal,
    LeaderId,
    SegueError,
    TransferFailed,
)
from segue.kv.ids import OPEN_RANK
from segue.server.balance.attempts import DOUBTS, Attempts, Next
from segue.server.balance.policy import PlacementRequest
from segue.server.fleet.fleet_settings import FleetSettings
from segue.server.fleet.membership import Membership
from segue.server.fleet.replica import REASONS, Replica, Route
from segue.server.fleet.retry_after import RetryAfter
from segue.server.fleet.router import Router
from segue.server.messages.control import Cancel, Replace, Submit
from segue.server.messages.records import Path, Records, RequestRecord
from segue.server.messages.ticket import Ticket
from segue.server.observe.metrics import Metrics

#: Reason of the `Cancel` that ends a request whose caller has enough, as after a stop string.
_ENOUGH = AbortedByClient("the caller has all that it wants").info
#: Reason of the one that ends prefill's half where the next attempt is placed without it.
_ELSEWHERE = TransferFailed("the next attempt is placed elsewhere").info


class Signal(asyncio.Event):
    """Wakes everybody who waits, in the order they came. Look at the state first, then wait: nothing runs
    between."""

    def notify(self) -> None:
        """Wake them."""
        self.set()
        self.clear()


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Objects that all calls of one fleet share. `news` is notified whenever a placement may have become
    possible; `new_room` draws the id of an attempt's hand-off. `span_below` makes a call's own `traceparent`
    from the request's, for the workers; None in a process that exports no spans."""

    membership: Membership
    router: Router
    settings: FleetSettings
    metrics: Metrics
    news: Signal
    new_room: Callable[[], int]
    records: Records
    vacancies: RetryAfter
    span_below: Callable[[str], str] | None


@dataclass(frozen=True, slots=True)
class DirectHalf:
    """One half of a request in direct mode: of its sample number `ordinal`, in a `room` that a router has
    named. `prefill` has the other half, and leaves its DP rank open if that is not known; it is None for the
    half of prefill itself."""

    room: int
    ordinal: int
    prefill: LeaderId | None = None


class Attempt:
    """One try of a call on one route; or several, one after the other, that share prefill's half."""

    def __init__(
        self, call: Call, parts: Parts, route: Route, request: Request, number: int, half: DirectHalf | None
    ) -> None:
        self.route = route
        self._half = half
        self._call = call
        self._parts = parts
        self._request = request
        self._number = number
        #: how often decode's half was placed again
        self.replaced = 0
        #: Decode has sent a token: prefill has done its part, and nothing from there is heard any more.
        self._begun = False
        self._tokens = len(request.prompt) + request.sampling.max_tokens
        #: The ids of the halves, and the replicas whose half may still run.
        self._ids: dict[Replica, str] = {}
        self._live: list[Replica] = []

    def start(self, budget_s: float) -> None:
        """Submit to both leaders at once."""
        self._live = list(self.route.replicas)
        self._send(self._submit(budget_s), *self._live)

    def keeps(self, error: ErrorInfo) -> bool:
        """Whether prefill's half goes on after decode has failed with `error`."""
        prefill, decode = self.route.prefill, self.route.decode
        spent = self.replaced + 1 >= self._parts.membership.limits.max_bindings
        able = prefill is not decode and prefill in self._live and not (self._begun or self._half or spent)
        return able and error.code not in DOUBTS

    def replace(self, route: Route, request: Request, number: int, budget_s: float) -> None:
        """Go on with prefill's half, and with decode's on the decode replica of `route`."""
        self.route, self._request, self._number = route, request, number
        self.replaced += 1
        self._live.append(route.decode)
        submit = self._submit(budget_s)
        self._send(submit, route.decode)
        if route.prefill.session is not None:
            route.prefill.session.send(Replace(self._ids[route.prefill], submit.ticket))

    def _submit(self, budget_s: float) -> Submit:
        where, handed_over = self.route.prefill.where, self.route.prefill is not self.route.decode
        return Submit(
            self._request, self._ticket(budget_s), (where.host, where.port) if handed_over else None
        )

    def _ticket(self, budget_s: float) -> Ticket:
        route, prefill = self.route, self.route.prefill.leader
        half = self._half
        if half is not None:
            prefill = half.prefill or prefill
        elif self._request.ranks.force_query_prefill_dp_rank and route.prefill is not route.decode:
            prefill = LeaderId(prefill.incarnation, OPEN_RANK)
        return self._parts.membership.signed(
            Ticket(
                room=route.room,
                attempt=self._number,
                prefill=prefill,
                decode=route.decode.leader,
                budget_s=budget_s,
                ordinal=None if half is None else half.ordinal,
            )
        )

    def _send(self, message: Submit, *replicas: Replica) -> None:
        for replica in replicas:
            self._ids[replica] = message.request.request_id
            self._parts.membership.enter(replica, message.request.request_id, self, self._tokens)
        # With what other requests send in this turn of the loop.
        self._parts.membership.gather()
        for replica in replicas:
            if replica.session is not None:
                replica.session.send(message)

    def output(self, replica: Replica, output: Output) -> None:
        """An output of either half. Only decode gives tokens; prefill gives an error or nothing."""
        if output.error is not None:
            self._ended_at(replica, output.error.exception().at(origin=replica.name))
        elif replica is not self.route.decode:
            if output.token_ids:
                self._failed(replica, Internal("prefill sent tokens", origin=replica.name))
        else:
            if output.token_ids and not self._begun:
                self._begun = True
                if self._number and output.usage is not None:
                    self._parts.metrics.placed_again(output.usage, kept=self.replaced > 0)
                if self.route.prefill is not self.route.decode:
                    self._leave(self.route.prefill)
            if output.finish is not None:
                self._live.clear()
                self._leave(*self.route.replicas)
            self._call.arrived(output)

    def lost(self, replica: Replica, error: SegueError) -> None:
        """The session with one half's replica ended."""
        self._ended_at(replica, error)

    def _ended_at(self, replica: Replica, error: SegueError) -> None:
        if replica in self._live:
            self._live.remove(replica)
        self._failed(replica, error)

    def _failed(self, replica: Replica, error: SegueError) -> None:
        # The other half ends now, not at its deadline (lesson 10), or goes on.
        kept = self._call.attempt_failed(self, replica, error)
        self.end(error.info, *([self.route.prefill] if kept else []))

    @property
    def begun(self) -> bool:
        """Whether decode has sent a token."""
        return self._begun

    def end(self, reason: ErrorInfo, *kept: Replica, complete: bool = False) -> None:
        """End this attempt wherever it still runs, but on `kept`; as a success if it is `complete`."""
        for replica in self._live:
            if replica.session is not None and replica not in kept:
                replica.session.send(Cancel(self._ids[replica], reason, complete))
        self._live = list(kept)
        self._leave(*(replica for replica in self.route.replicas if replica not in kept))

    def _leave(self, *replicas: Replica) -> None:
        for replica in replicas:
            self._parts.membership.leave(replica, self._ids[replica], self._tokens)


class Call:
    """The outputs of one request, over its attempts. Ends exactly once, at `deadline` (seconds of the
    loop's clock) at the latest; `ended` is called then. With `half` only that half of it is run."""

    def __init__(
        self,
        request: Request,
        deadline: float,
        parts: Parts,
        ended: Callable[[], object],
        half: DirectHalf | None = None,
    ) -> None:
        self._above = request.traceparent
        if self._above and parts.span_below is not None:
            request = msgspec.structs.replace(request, traceparent=parts.span_below(self._above))
        self.attempts = Attempts(request, parts.settings.max_attempts)
        self._parts = parts
        self._half = half
        self._loop = asyncio.get_running_loop()
        self._deadline = deadline
        self._on_end = ended
        self._queue: deque[Output] = deque()
        #: takes outputs while a reader waits, and the reader's future
        self._take: Callable[[Output], Wait | None] | None = None
        self._waiter: asyncio.Future[Wait | None] | None = None
        self._attempt: Attempt | None = None
        #: the last attempt, of which prefill's half goes on
        self._kept: Attempt | None = None
        self._answered = False
        self._error: SegueError | None = None
        self._ended = False
        self._patience: asyncio.TimerHandle | None = None
        self._alarm = self._loop.call_at(deadline, self._expire)
        self._began = self._loop.time()
        self._path = Path(self._began)
        self._path.enter("place", self._began)

    def __aiter__(self) -> Call:
        return self

    async def __anext__(self) -> Output:
        while not self._queue:
            await self._more()
        return self._queue.popleft()

    async def deliver(self, take: Callable[[Output], Wait | None]) -> None:
        """Call `take` with each output, in order, until one has `finish`: at the moment it arrives, unless
        what `take` has returned last is still awaited. Raises what `take` raises, and what ends the request.
        """
        try:
            while True:
                wait = take(self._queue.popleft()) if self._queue else await self._taken(take)
                if wait is not None:
                    await wait()
        except StopAsyncIteration:
            return

    async def _taken(self, take: Callable[[Output], Wait | None]) -> Wait | None:
        self._take = take
        try:
            return await self._more()
        finally:
            self._take = None

    async def _more(self) -> Wait | None:
        """Until something has happened, or `take` is to wait for what is returned. Raises what ended the
        request, StopAsyncIteration if it ended well."""
        if self._error is not None:
            raise self._error
        if self._ended:
            raise StopAsyncIteration
        if self._attempt is None:
            await self._start()
            return None
        self._waiter = self._loop.create_future()
        try:
            return await self._waiter
        finally:
            self._waiter = None

    # ---- where ----------------------------------------------------------------------------------

    async def _start(self) -> None:
        try:
            route = await self._place()
        except SegueError as error:
            self.fail(error)
            return
        if self._ended:
            # Cancelled while it waited for somebody to come.
            return
        request = self.attempts.begin(*route.pair)
        kept, self._kept = self._kept, None
        goes_on = kept is not None and kept.route.prefill is route.prefill is not route.decode
        if kept is not None and goes_on:
            route = msgspec.structs.replace(route, room=kept.route.room)
        elif kept is not None:
            kept.end(_ELSEWHERE)
        names = " > ".join(dict.fromkeys((route.prefill.name, route.decode.name)))
        how = REASONS[route.reason]
        text = f"attempt {self.attempts.number} room {route.room}: {names} ({route.why}); {how}"
        self._parts.metrics.placements.labels(route.reason).inc()
        self._path.enter("attempt", self._loop.time(), text)
        budget_s = self._deadline - self._loop.time()
        if kept is not None and goes_on:
            self._attempt = kept
            kept.replace(route, request, self.attempts.number, budget_s)
            return
        self._attempt = Attempt(self, self._parts, route, request, self.attempts.number, self._half)
        self._attempt.start(budget_s)

    async def _place(self) -> Route:
        """Choose the replicas of the next attempt. Waits a little for a replica to register, and until the
        deadline while lost instances are being restarted; then BootstrapUnreachable."""
        loop, s, router, attempts = self._loop, self._parts.settings, self._parts.router, self.attempts
        long = attempts.delivered or (attempts.begun and router.awaited is not None)
        wait_s = max(s.replacement_wait_s, s.no_replica_wait_s) if long else s.no_replica_wait_s
        until = min(self._deadline, loop.time() + wait_s)
        # A worker that its peer says is gone is waited for: for its end to be seen, or its successor.
        passed_over_s = s.reported_loss_wait_s if attempts.reported_by_peer else 0.0
        patient_until = min(until, loop.time() + passed_over_s)
        asked = attempts.request
        room = self._parts.new_room() if self._half is None else self._half.room
        request = PlacementRequest(room, asked.prompt, asked.ranks, asked.cache_salt)
        awaited = False
        while True:
            now = loop.time()
            if awaited or router.awaited:
                # The supervisor's word of a restarted instance may come before our session to it is open.
                until = min(self._deadline, now + max(s.replacement_wait_s, s.no_replica_wait_s))
            awaited = bool(router.awaited)
            patient = now < patient_until
            route = router.choose(attempts, request, now, patient=patient)
            if route is None and self._half is not None:
                route = router.refuser(request)
            if route is not None:
                return route
            # A frontend that hears of restarts drains only when no instance will come back.
            if router.draining and (not attempts.delivered or router.awaited is not None):
                raise router.lacking()
            ends = self._deadline if awaited else until
            if now >= ends:
                raise router.lacking()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(patient_until if patient else ends):
                    await self._parts.news.wait()

    # ---- what comes back ------------------------------------------------------------------------

    def arrived(self, output: Output) -> None:
        """The next output, from the attempt that runs."""
        if self._ended:
            return
        try:
            shown = self.attempts.arrived(output)
        except Internal as error:
            self.fail(error)
            return
        self._give(shown)
        if not self._answered:
            self._answered = True
            self._path.enter("answer", self._loop.time())
        if output.finish is not None:
            self._succeed()

    def _give(self, output: Output) -> None:
        take = self._take
        if take is None:
            self._queue.append(output)
            if self._behind() and self._patience is None and output.finish is None:
                self._patience = self._loop.call_later(self._parts.settings.backlog_wait_s, self._give_up)
            self._wake()
            return
        try:
            wait = take(output)
        except Exception as error:
            # It is raised where `deliver` waits.
            self._take = None
            if self._waiter is not None and not self._waiter.done():
                self._waiter.set_exception(error)
            return
        if wait is not None:
            self._take = None
            self._wake(wait)

    def _behind(self) -> bool:
        return len(self._queue) > self._parts.settings.backlog_outputs

    def _give_up(self) -> None:
        """The client fell behind a while ago. If it still is, nobody reads what is generated for it."""
        self._patience = None
        if self._behind():
            text = f"the client reads too slowly: {len(self._queue)} outputs wait for it"
            self.fail(AbortedByClient(text, phase="stream"))

    def attempt_failed(self, attempt: Attempt, reporter: Replica, error: SegueError) -> bool:
        """An attempt ended badly: place it again, continue it elsewhere, or fail. Returns whether prefill's
        half goes on, for the next one."""
        if attempt is self._kept:
            self._kept = None
            self._parts.router.kept_failed(self.attempts, attempt.route, error.info, self._loop.time())
        if self._ended or attempt is not self._attempt:
            return False
        parts, info, route = self._parts, error.info, attempt.route
        # Decode may hear of it before us.
        prefills = reporter is route.prefill or (
            self.attempts.failed_replica(info, reporter.leader) == route.prefill.leader
        )
        gone = bool(attempt.replaced) and prefills and info.code is ErrorCode.OUT_OF_CAPACITY
        if gone:
            follows = self.attempts.prefill_gone()
        else:
            follows = parts.router.after_failure(self.attempts, route, reporter, info, self._loop.time())
        parts.news.notify()
        if follows is Next.END:
            self._fail(error)
            return False
        kept = follows is Next.PLACE_AGAIN and self.attempts.kv_holder == route.prefill.leader
        self._kept = attempt if kept and not gone and attempt.keeps(info) else None
        self._answered = False
        said = f"{info.code} at {info.origin or reporter.name}: {info.text}"
        self._path.enter("place", self._loop.time(), f"{follows.name.lower()} after {said}")
        counter = parts.metrics.continuations if follows is Next.CONTINUE else parts.metrics.retries
        counter.labels(info.code).inc()
        self._attempt = None
        self._wake()
        return self._kept is not None

    # ---- its end --------------------------------------------------------------------------------

    def complete(self) -> None:
        """The caller has all that it wants: end the request on all workers, as a success. A no-op after the
        end."""
        if self._ended:
            return
        if self._attempt is not None:
            self._attempt.end(_ENOUGH, complete=True)
        self._queue.clear()
        self._succeed()

    def _succeed(self) -> None:
        if self._attempt is not None and self._attempt.begun:
            self._parts.router.record_success(self._attempt.route)
        self._parts.vacancies.served(self._loop.time() - self._began)
        self._parts.news.notify()
        self._end()
        self._wake()

    def fail(self, error: SegueError) -> None:
        """End the request with `error`, on all workers, now. A no-op after the end."""
        if self._ended:
            return
        if self._attempt is not None:
            self._attempt.end(error.info)
        self._fail(error)

    def _fail(self, error: SegueError) -> None:
        last = self.attempts.root_cause(error.info).exception()
        self._error = self._parts.vacancies.refused(last, self._loop.time())
        self._queue.clear()
        self._end()
        self._wake()

    def _expire(self) -> None:
        begun, attempt = self.attempts.delivered, self._attempt
        where = "decode" if begun else "prefill or hand-off"
        route = "nobody" if attempt is None else " and ".join(r.name for r in attempt.route.replicas)
        text = f"the request's deadline passed during {where} on {route}"
        if attempt is None and not self._parts.router.can_serve:
            text = f"the request's deadline passed while it waited: {self._parts.router.lacking().info.text}"
        self.fail(
            DeadlineExceeded(
                text,
                origin="frontend",
                phase="stream" if begun else "first token",
                room=attempt.route.room if attempt else 0,
            )
        )

    def _end(self) -> None:
        self._ended = True
        self._alarm.cancel()
        if self._patience is not None:
            self._patience.cancel()
        if self._kept is not None:
            self._kept.end(_ENOUGH if self._error is None else self._error.info)
            self._kept = None
        self._parts.records.put(self.record(ended=True))
        # An attempt names its call: of such circles only the garbage collector gets rid.
        self._attempt = None
        self._on_end()

    def record(self, *, ended: bool) -> RequestRecord:
        """The record for `segue explain`."""
        now, request, attempt = self._loop.time(), self.attempts.request, self._attempt
        return RequestRecord(
            request_id=request.request_id,
            where=self._parts.membership.name,
            role="frontend",
            began=self._began,
            seconds=now - self._began,
            steps=self._path.steps(),
            omitted=self._path.omitted,
            room=attempt.route.room if attempt is not None else 0,
            attempt=max(0, self.attempts.number),
            facts={
                "prompt_tokens": len(request.prompt),
                "output_tokens": len(self.attempts.output),
                "attempts": self.attempts.begun,
            },
            error=None if self._error is None else self._error.info,
            ended=ended,
            traceparent=self._above,
            span=request.traceparent if request.traceparent != self._above else "",
            tenant=request.tenant,
        )

    def _wake(self, wait: Wait | None = None) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(wait)
