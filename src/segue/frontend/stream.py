"""One request's outputs over its attempts, and one attempt on its pair of replicas.

What follows a failure is decided by `balance.attempts.Attempts`; here it is carried out.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from segue.balance.attempts import MISFITS, Attempts, Next
from segue.core.control import Cancel, Submit
from segue.core.errors import (
    AbortedByClient,
    DeadlineExceeded,
    ErrorCode,
    ErrorInfo,
    Internal,
    SegueError,
)
from segue.core.request import Output, Request, Ticket
from segue.frontend.replicas import Replica
from segue.handoff.ticket import sign

if TYPE_CHECKING:
    from segue.frontend.fleet import FleetBackend


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

    def __init__(
        self, backend: FleetBackend, stream: FleetStream, route: Route, request: Request, number: int
    ) -> None:
        self.route = route
        self.request = request
        self.number = number
        #: Decode has sent a token: prefill has done its part, and its end no longer matters.
        self.begun = False
        self._backend = backend
        self._stream = stream
        self._tokens = len(request.prompt) + request.sampling.max_tokens
        self._live: set[Replica] = set()

    def start(self, deadline: float) -> None:
        """Submit to both leaders at once."""
        route, replicas = self.route, self._backend.replicas
        ticket = sign(
            Ticket(
                room=route.room,
                attempt=self.number,
                prefill=route.prefill.leader,
                decode=route.decode.leader,
                budget_s=deadline - asyncio.get_running_loop().time(),
            ),
            self._backend.secret,
            replicas.incarnation,
        )
        message = Submit(self.request, ticket)
        self._live = set(route.replicas)
        for replica in route.replicas:
            replicas.enter(replica, self.request.request_id, self, self._tokens)
        for replica in route.replicas:
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
            if output.token_ids and not self.begun:
                self.begun = True
                if self.number and output.usage is not None:
                    self._backend.metrics.placed_again(output.usage)
                if self.route.prefill is not self.route.decode:
                    self._leave(self.route.prefill)
            if output.finish is not None:
                self._live.clear()
                self._leave(*self.route.replicas)
            self._stream.arrived(output)

    def lost(self, replica: Replica, error: SegueError) -> None:
        """The session with one half's replica ended."""
        self._ended_at(replica, error)

    def _ended_at(self, replica: Replica, error: SegueError) -> None:
        self._live.discard(replica)
        if replica is self.route.decode or not self.begun:
            self._failed(replica, error)

    def _failed(self, replica: Replica, error: SegueError) -> None:
        # The other half ends now, not at its deadline (lesson 10).
        self.end(error.info)
        self._stream.attempt_failed(self, replica, error)

    def end(self, reason: ErrorInfo) -> None:
        """End this attempt wherever it still runs."""
        for replica in self._live:
            if replica.session is not None:
                replica.session.send(Cancel(self.request.request_id, reason))
        self._live.clear()
        self._leave(*self.route.replicas)

    def _leave(self, *replicas: Replica) -> None:
        for replica in replicas:
            self._backend.replicas.leave(replica, self.request.request_id, self._tokens)


class FleetStream:
    """The outputs of one request, over its attempts. Ends exactly once."""

    def __init__(self, backend: FleetBackend, request: Request, deadline: float) -> None:
        self.request = request
        self.attempts = Attempts(request, backend.settings.max_attempts)
        self._backend = backend
        self._deadline = deadline
        self._queue: deque[Output] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._attempt: Attempt | None = None
        self._error: SegueError | None = None
        self._ended = False
        self._patience: asyncio.TimerHandle | None = None
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
        try:
            route = await self._backend.place(self.attempts, self._deadline)
        except SegueError as error:
            self.fail(error)
            return
        if self._ended:
            # Cancelled while it waited for somebody to come.
            return
        request = self.attempts.begin(route.prefill.leader, route.decode.leader)
        self._attempt = Attempt(self._backend, self, route, request, self.attempts.number)
        self._attempt.start(self._deadline)

    def arrived(self, output: Output) -> None:
        """The next output, from the attempt that runs."""
        if self._ended:
            return
        try:
            shown = self.attempts.arrived(output)
        except Internal as error:
            self.fail(error)
            return
        self._queue.append(shown)
        if output.finish is not None:
            assert self._attempt is not None
            self._backend.record_success(self._attempt.route)
            self._end()
        elif self._behind() and self._patience is None:
            wait_s = self._backend.settings.backlog_wait_s
            self._patience = asyncio.get_running_loop().call_later(wait_s, self._give_up)
        self._wake()

    def _behind(self) -> bool:
        return len(self._queue) > self._backend.settings.backlog_outputs

    def _give_up(self) -> None:
        """The client fell behind a while ago. If it still is, nobody reads what is generated for it."""
        self._patience = None
        if self._behind():
            text = f"the client reads too slowly: {len(self._queue)} outputs wait for it"
            self.fail(AbortedByClient(text, phase="stream"))

    def attempt_failed(self, attempt: Attempt, reporter: Replica, error: SegueError) -> None:
        """An attempt ended badly: place it again, continue it elsewhere, or fail."""
        if self._ended or attempt is not self._attempt:
            return
        info, backend = error.info, self._backend
        at = self.attempts.failed_replica(info, reporter.leader)
        failed = next((r for r in attempt.route.replicas if r.leader == at), reporter)
        backend.record_failure(failed, info)
        follows = self.attempts.failed(info, reporter.leader)
        # A full worker is not asked again at once; a lost one may have a successor soon.
        hopeless = info.code is ErrorCode.OUT_OF_CAPACITY and backend.alone(failed)
        if info.code in MISFITS:
            hopeless = not backend.refused(attempt.route)
        if follows is Next.END or hopeless or not backend.may_retry(info.code, follows):
            self._fail(error)
            return
        self._attempt = None
        self._wake()

    def fail(self, error: SegueError) -> None:
        """End the request with `error`, on all workers, now. A no-op after the end."""
        if self._ended:
            return
        if self._attempt is not None:
            self._attempt.end(error.info)
        self._fail(error)

    def _fail(self, error: SegueError) -> None:
        self._error = self.attempts.root_cause(error.info).exception()
        self._queue.clear()
        self._end()
        self._wake()

    def _expire(self) -> None:
        begun, attempt = self.attempts.delivered, self._attempt
        where = "decode" if begun else "prefill or hand-off"
        route = "nobody" if attempt is None else " and ".join(r.name for r in attempt.route.replicas)
        self.fail(
            DeadlineExceeded(
                f"the request's deadline passed during {where} on {route}",
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
        self._backend.forget(self)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
