"""The leader: one loop per replica that decides everything, and never blocks on I/O.

Drain the inbox, let the scheduler decide, run one forward, hand the results back, send what came out.
Sockets belong to the I/O thread (`kv.io`); it puts what arrives into the inbox, which wakes the
loop at once. So a replica's decisions are made in one place, in one order.

While a device or another thread computes, the inbox is served; only what the protocol says of a hand-off that
the forward works on waits for its end. An engine that computes on this thread does so within `collect`.
"""

from __future__ import annotations

import logging
import math
import queue
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from segue.engine.engine_api import Engine, ExpertPeers, SequenceStep, StepHandle
from segue.engine.kv_events import FollowPrefixes, KVEvent
from segue.engine.prefix_journal import PrefixJournal
from segue.engine.request import Grammar, Output
from segue.kv import (
    Change,
    Clock,
    ErrorInfo,
    Incarnation,
    Internal,
    KVPoll,
    Limits,
    OutOfCapacity,
    Phase,
    Quarantined,
    Release,
    SegueError,
)
from segue.server.messages.control import Cancel, FlushCache, Load, Replace, Submit
from segue.server.schedulers.scheduler import Scheduler

log = logging.getLogger("segue.leader")

LOAD_INTERVAL_S = 0.1
#: Time for hand-offs to end on both sides after the whole replica has failed.
ABANDON_S = 5.0
#: After a forward the load is told a moment later, unless another one follows at once: what came of the
#: forward is on its way, and the I/O thread needs the interpreter's lock for it.
QUIET_S = 0.002


Order = Submit | Replace | Cancel | FlushCache | FollowPrefixes


@dataclass(frozen=True, slots=True)
class FromFrontend:
    """A control message of the frontend `origin`."""

    origin: Incarnation
    message: Order


@dataclass(frozen=True, slots=True)
class FrontendGone:
    """The session of the frontend `origin` has ended."""

    origin: Incarnation
    error: ErrorInfo


@dataclass(frozen=True, slots=True)
class Drain:
    """Finish what is there, take nothing new, then leave, at the latest after `drain_s`: together with the
    expert peers, if there are any. The process ends with it."""


@dataclass(frozen=True, slots=True)
class NextRole:
    """Leave now: this process takes another role, over the same memory, and computes on with its expert
    peers. `refused` is called instead if this leader is not drained, and it stays."""

    refused: Callable[[], object]


@dataclass(frozen=True, slots=True)
class Hold:
    """Take nothing new from now on, or take it again, and stay. A leader that leaves takes nothing again, so
    that what it holds when it turns is what it holds at its end."""

    draining: bool


@dataclass(frozen=True, slots=True)
class Abandon:
    """Nothing can be computed any more: everything ends with `error` now, then leave."""

    error: ErrorInfo


@dataclass(frozen=True, slots=True)
class Inspect:
    """Run `look` on the leader's thread (health, integrity, tests)."""

    look: Callable[[Scheduler], None]


@dataclass(frozen=True, slots=True)
class FormatReady:
    """An output format was compiled, or refused."""

    grammar: Grammar


@dataclass(frozen=True, slots=True)
class ForwardReady:
    """The running forward can be collected."""


@dataclass(frozen=True, slots=True)
class PeersAdvanced:
    """Another DP rank waits for us in a step, or is done."""


Item = (
    FromFrontend
    | FrontendGone
    | Change
    | Drain
    | NextRole
    | Hold
    | Abandon
    | Inspect
    | FormatReady
    | ForwardReady
    | PeersAdvanced
)


def _kind(item: Item) -> str:
    return type(item.message if isinstance(item, FromFrontend) else item).__name__


class Leader:
    """See the module's text. `send` delivers outputs to a frontend, `report` the load to all, `prefixes` what
    the prefix tree holds to one that follows it, or (None) what changed there to all of those; they only pass
    on to the I/O thread and never block. With `expert_peers` it also computes the steps of
    others, and leaves only with them."""

    def __init__(
        self,
        scheduler: Scheduler,
        engine: Engine,
        *,
        limits: Limits,
        clock: Clock,
        send: Callable[[Incarnation, list[Output]], None],
        report: Callable[[Load], None],
        prefixes: Callable[[Incarnation | None, list[KVEvent]], None] = lambda _only, _events: None,
        expert_peers: ExpertPeers | None = None,
    ) -> None:
        self._prefixes = prefixes
        self._journal: PrefixJournal | None = None
        self.scheduler = scheduler
        self.engine = engine
        self.limits = limits
        self.clock = clock
        self.inbox: queue.SimpleQueue[Item] = queue.SimpleQueue()
        #: forwards so far
        self.steps = 0
        #: the running one, if it was launched
        self.forward: tuple[Sequence[SequenceStep], StepHandle] | None = None
        self.running = False
        self._send = send
        self._report = report
        self._expert_peers = expert_peers
        self._reported: Load | None = None
        self._report_at = self._quiet_until = clock.now()
        self._unreported = True
        self._drain_until: float | None = None
        self._turns = False
        self._after_forward: list[Change] = []
        #: requests whose output format is being compiled, in their order
        self._parked: dict[Grammar, list[FromFrontend]] = {}

    def changed(self, change: Change) -> None:
        """A hand-off has changed; from any thread. That its bytes move is no news for a scheduler: it would
        take the interpreter's lock from the I/O thread while that checks them."""
        if not (isinstance(change, Phase) and change.phase is KVPoll.TRANSFERRING):
            self.inbox.put(change)

    # ---- the loop ----------------------------------------------------------------------------

    def run(self) -> None:
        """Serve until a `Drain` or a `NextRole` has been carried out."""
        busy, self.running = False, True
        try:
            while not self.drained():
                self._take(block=not busy)
                busy = self.turn()
        finally:
            self.running = False

    def turn(self) -> bool:
        """Do what can be done now; returns whether there may be more."""
        if self.forward is None:
            steps = self.decide()
            if not steps and (self._expert_peers is None or not self._expert_peers.behind):
                return False
            self.launch(steps)  # none, if other DP ranks wait for us in a step
        if self.forward is not None and not self.forward[1].ready:
            self.attend()
            return self.forward[1].ready  # then `attend` may have taken the item that says so
        self.collect()
        return True

    def decide(self) -> Sequence[SequenceStep]:
        """Handle what is in the inbox and decide the next forward. First tokens and failures that are known
        already leave before it."""
        self._take(block=False)
        now, steps, answers = self.clock.now(), list[SequenceStep](), -1
        while not steps and len(self.scheduler.outbox) != answers:
            # requests that end while a step is planned free pages for others
            answers = len(self.scheduler.outbox)
            steps = self._plan(now)
        self._flush()
        if now >= self._report_at and (steps or now >= self._quiet_until):
            self._tell_load(now)
        return steps

    def attend(self) -> None:
        """While a device computes: handle what is in the inbox and what is due."""
        self._take(block=False)
        now = self.clock.now()
        self._plan(now, launch=False)
        self._flush()
        if now >= self._report_at:
            self._tell_load(now)

    def _plan(self, now: float, *, launch: bool = True) -> list[SequenceStep]:
        try:
            self.scheduler.advance(now)
            return self.scheduler.plan(now) if launch else []
        except Exception as exc:  # the boundary: a step that cannot be planned must not end the replica
            log.exception("the next step was not planned")
            self.scheduler.fail_all(Internal(f"a bug while planning a step: {exc!r}").info, now)
            return []

    def launch(self, steps: Sequence[SequenceStep]) -> None:
        """Begin the forward that was decided."""
        self.steps += 1
        try:
            self.scheduler.launched(steps)
            wake = partial(self.inbox.put, ForwardReady())
            handle = self.engine.launch(steps, self.scheduler.on_stored(), wake)
        except Exception as exc:  # the boundary, as in `collect`
            self._failed(steps, exc)
            return
        self.forward = steps, handle

    def collect(self) -> None:
        """Take the results of the forward, if one was launched, and send what came of it."""
        if self.forward is not None:
            (steps, handle), self.forward = self.forward, None
            try:
                self.scheduler.complete(self.engine.collect(handle), self.clock.now())
            except Exception as exc:  # the boundary: one bad step must not end the replica
                self._failed(steps, exc)
        waiting, self._after_forward = self._after_forward, []
        for change in waiting:
            self._handle(change)
        self._flush()
        self._quiet_until = self.clock.now() + QUIET_S

    def _failed(self, steps: Sequence[SequenceStep], exc: Exception) -> None:
        log.error("a step failed sequences=%d", len(steps), exc_info=exc)
        error = exc.info if isinstance(exc, SegueError) else Internal(f"the step failed: {exc!r}").info
        self.scheduler.step_failed(steps, error, self.clock.now())

    def _take(self, *, block: bool) -> None:
        """Handle everything in the inbox; with `block`, wait for the first item or the next deadline."""
        try:
            if block:
                self._handle(self.inbox.get(timeout=self.patience_s()))
            while True:
                self._handle(self.inbox.get_nowait())
        except queue.Empty:
            return

    def patience_s(self) -> float | None:
        """How long the loop may sleep: until the next deadline, or for ever if there is none."""
        deadlines = [d for d in (self.scheduler.next_deadline(), self._drain_until) if d is not None]
        if self._unreported:
            deadlines.append(max(self._report_at, self._quiet_until))
        return max(0.0, min(deadlines) - self.clock.now()) if deadlines else None

    def _handle(self, item: Item) -> None:
        """One item, inside its own error boundary."""
        now = self.clock.now()
        try:
            match item:
                case FromFrontend(origin, Submit() as submit):
                    if not self._park(item, submit):
                        self.scheduler.submit(origin, submit, now)
                case FormatReady(grammar):
                    self._unpark(grammar, now)
                case FromFrontend(origin, Replace() as message):
                    if not self._replace_parked(origin, message):
                        self.scheduler.replace(origin, message, now)
                case FromFrontend(origin, Cancel() as cancel):
                    self._drop_parked(origin, cancel.reason, cancel.request_id)
                    self.scheduler.cancel(
                        origin, cancel.request_id, cancel.reason, now, complete=cancel.complete
                    )
                case FromFrontend(_, FlushCache()):
                    self.scheduler.cache.tree.clear()
                case FromFrontend(origin, FollowPrefixes()):
                    self._tell_prefixes()
                    self._prefixes(origin, self.journal().whole())
                case FrontendGone(origin, error):
                    self._drop_parked(origin, error)
                    self.scheduler.frontend_gone(origin, error, now)
                case Drain():
                    self.scheduler.drain()
                    self._refuse_parked(now)
                    self._turns = False
                    if self._drain_until is None:
                        self._drain_until = now + self.limits.drain_s
                case NextRole(refused):
                    # By what it holds now: whoever asks has seen an earlier load.
                    if self.scheduler.drained:
                        self._turns = True
                    else:
                        refused()
                case Hold(draining):
                    self.scheduler.drain(draining or self._turns or self._drain_until is not None)
                    if self.scheduler.admission.draining:
                        self._refuse_parked(now)
                case Abandon(error):
                    self.scheduler.drain()
                    self._refuse_parked(now)
                    self.scheduler.fail_all(error, now)
                    self._drain_until = min(self._drain_until or math.inf, now + ABANDON_S)
                case Inspect(look):
                    look(self.scheduler)
                case ForwardReady() | PeersAdvanced():
                    pass  # the loop has been woken
                case Phase() | Release() | Quarantined():
                    if self.forward is not None and self.scheduler.computes(item.key):
                        self._after_forward.append(item)
                    else:
                        self.scheduler.on_change(item, now)
        except Exception as exc:  # the boundary: one request's failure never changes another's outcome
            log.exception("an item was not handled kind=%s", type(item).__name__)
            self._broken(item, Internal(f"a bug while handling {_kind(item)}: {exc!r}").info, now)

    # ---- output formats ----------------------------------------------------------------------

    def _park(self, item: FromFrontend, submit: Submit) -> bool:
        """Whether the request waits for its output format to be compiled. A leader that takes nothing new
        parks nothing: the scheduler refuses before the format is looked at."""
        formats, grammar = self.engine.formats, submit.request.sampling.grammar
        if grammar is None or formats is None or self.scheduler.admission.draining or formats.known(grammar):
            return False
        parked = self._parked.get(grammar)
        held = len(self.scheduler.admission.requests) + sum(map(len, self._parked.values()))
        try:
            if held >= self.limits.max_queue:
                raise OutOfCapacity(
                    f"{self.scheduler.config.name} already holds {held} requests; try again later"
                )
            if parked is None:
                done = partial(self.inbox.put, FormatReady(grammar))
                formats.prepare(grammar, done, submit.request.tenant)
                parked = self._parked.setdefault(grammar, [])
        except OutOfCapacity as error:
            self.scheduler.refuse(item.origin, submit, error.info, self.clock.now())
            return True
        parked.append(item)
        return True

    def _unpark(self, grammar: Grammar, now: float) -> None:
        """The format is known: its requests go on where they stopped."""
        assert self.engine.formats is not None
        self.engine.formats.settle(grammar)
        self._submit(self._parked.pop(grammar, []), now)

    def _refuse_parked(self, now: float) -> None:
        """Give what is parked to the scheduler, which takes nothing new: each request gets its answer now."""
        for parked in self._parked.values():
            waiting = parked[:]
            parked.clear()
            self._submit(waiting, now)

    def _submit(self, items: Sequence[FromFrontend], now: float) -> None:
        for item in items:
            if isinstance(item.message, Submit):
                self.scheduler.submit(item.origin, item.message, now)

    def _replace_parked(self, origin: Incarnation, message: Replace) -> bool:
        """Give a request that waits for its output format the ticket of its next decode; False if none
        waits. Its first ticket names a decode that comes no more."""
        for parked in self._parked.values():
            for at, item in enumerate(parked):
                submit = item.message
                assert isinstance(submit, Submit)
                if (item.origin, submit.request.request_id) == (origin, message.request_id):
                    parked[at] = FromFrontend(origin, Submit(submit.request, message.ticket))
                    return True
        return False

    def _drop_parked(self, origin: Incarnation, error: ErrorInfo, request_id: str | None = None) -> None:
        """Forget one request of `origin`, or all of them, which end with `error`. The list stays, also empty,
        until its format is ready: so a format is compiled once at a time."""
        for parked in self._parked.values():
            waiting, parked[:] = parked[:], []
            for item in waiting:
                submit = item.message
                assert isinstance(submit, Submit)
                if item.origin != origin or request_id not in (None, submit.request.request_id):
                    parked.append(item)
                else:
                    self.scheduler.leave_out(submit, error)

    def _broken(self, item: Item, error: ErrorInfo, now: float) -> None:
        """Handling `item` hit a bug: its request ends now, on both sides, and not by its deadline.

        An item that comes only once and frees something is handled once more. Without a hand-off's last
        message its pages would be lost; without a frontend's end its requests would continue. A machine of
        the exchange gets no such second try (`kv.protocol.machine`).
        """
        try:
            match item:
                case FromFrontend(origin, Submit() as submit):
                    self.scheduler.broken(origin, submit.request.request_id, error, now, submit)
                case FromFrontend(origin, (Replace() | Cancel()) as message):
                    self.scheduler.broken(origin, message.request_id, error, now)
                case Phase():
                    self.scheduler.broken_handoff(item.key, error, now)
                case Release() | Quarantined():
                    self.scheduler.on_change(item, now)
                case FrontendGone(origin, reason):
                    self.scheduler.frontend_gone(origin, reason, now)
                case _:
                    pass  # it belongs to no single request
        except Exception:  # the same bug again: the frontend has its answer, the log the rest
            log.exception("a broken request was not ended kind=%s", type(item).__name__)

    def drained(self) -> bool:
        """Everything has ended after a `Drain`, or its time is up; or it turns."""
        if self._drain_until is None:
            return self._turns
        if self.scheduler.idle and (self._expert_peers is None or self._expert_peers.done()):
            return True
        if self.clock.now() >= self._drain_until:
            log.warning("leaving with unfinished requests: %s", self.scheduler.sizes())
            return True
        return False

    # ---- what goes out -----------------------------------------------------------------------

    def _flush(self) -> None:
        bugs, self.scheduler.bugs = self.scheduler.bugs, []
        for what, bug in bugs:
            log.error("the engine broke at %s", what, exc_info=bug)
        by_frontend: dict[Incarnation, list[Output]] = {}
        for origin, output in self.scheduler.outbox:
            by_frontend.setdefault(origin, []).append(output)
        self.scheduler.outbox.clear()
        self._tell_prefixes()
        for origin, outputs in by_frontend.items():
            self._send(origin, outputs)
        self._unreported = True

    def journal(self) -> PrefixJournal:
        """Start a journal of the prefix tree's changes. On the leader's thread, or before it runs."""
        if self._journal is None:
            cache = self.scheduler.cache
            self._journal = PrefixJournal(cache.tree, cache.pool.page_tokens)
        return self._journal

    def _tell_prefixes(self) -> None:
        if self._journal is not None and self._journal.pending:
            self._prefixes(None, self._journal.take())

    def _tell_load(self, now: float) -> None:
        self._report_at, self._unreported = now + LOAD_INTERVAL_S, False
        load = self.scheduler.load()
        if load != self._reported:
            self._reported = load
            self._report(load)
