"""Simulates the queues of a number of workers, event by event, in virtual time. Pure, seeded.

Workers behave as segue's schedulers do. A request goes to the worker (of each role) with the fewest requests,
and waits until the one that will generate has room for its KV. Prompts are computed in order of arrival, in
chunks, those of several prompts in one forward as long as its token budget lasts. A prefill worker sends the
KV of a chunk while it computes the next; the first token comes when the last of it has landed. A unified
worker computes a token of each running sequence and chunks of prompts in one forward, so a prompt stands
between two tokens of the others.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from segue_lab.advise.costs import StepTimes, pairs
from segue_lab.advise.workload import AskedLoad


class HandOffWire(msgspec.Struct, frozen=True, kw_only=True):
    """How KV moves from one prefill worker: bytes a second, and seconds for each hand-off beside them."""

    name: str
    bytes_per_s: float
    latency_s: float = 0.0


class WorkerKind(msgspec.Struct, frozen=True, kw_only=True):
    """Any of the workers, all equal: the time of its forwards, the prompt tokens and sequences of one, the
    tokens of KV it has room for, and the time (seconds) that a request and a forward take beside."""

    steps: StepTimes
    chunk_tokens: int
    max_batch: int
    kv_tokens: int
    request_s: float = 0.0
    step_s: float = 0.0


class WorkerSplit(msgspec.Struct, frozen=True):
    """So many prefill and decode workers, or `unified` ones."""

    prefill: int = 0
    decode: int = 0
    unified: int = 0

    @property
    def workers(self) -> int:
        """All of them."""
        return self.prefill + self.decode + self.unified

    def __str__(self) -> str:
        return f"{self.unified} unified" if self.unified else f"{self.prefill} + {self.decode}"


@dataclass(slots=True)
class SimulatedTimes:
    """Simulated times: times to first token (seconds), times between tokens as (seconds, count), finished
    requests and the time of the last one (seconds)."""

    ttft_s: list[float] = field(default_factory=list)
    gaps: list[tuple[float, int]] = field(default_factory=list)
    finished: int = 0
    end_s: float = 0.0


@dataclass(slots=True, eq=False)
class _Job:
    number: int
    due: float
    prompt: int
    output: int
    source: _Worker
    target: _Worker
    computed: int = 0
    last_s: float = 0.0

    @property
    def tokens(self) -> int:
        return self.prompt + self.output


@dataclass(slots=True, eq=False)
class _Worker:
    """One worker. `prompts` are to be computed, `reserving` wait for room for their KV, `joining` have their
    first token, and `leaving` are those that run, by the number of the forward with their last token."""

    held: int = 0
    free_tokens: int = 0
    busy: bool = False
    reserving: deque[_Job] = field(default_factory=deque)
    prompts: deque[_Job] = field(default_factory=deque)
    joining: deque[_Job] = field(default_factory=deque)
    fresh: list[_Job] = field(default_factory=list)
    leaving: list[tuple[int, int, _Job]] = field(default_factory=list)
    chunks: list[tuple[_Job, int]] = field(default_factory=list)
    forwards: int = 0
    context: int = 0
    ended_s: float = 0.0
    wire_free_s: float = 0.0


class QueueRun:
    """One simulated run: its workers, queues and requests in progress."""

    def __init__(
        self,
        kind: WorkerKind,
        split: WorkerSplit,
        wire: HandOffWire | None,
        kv_token_bytes: int,
        state_bytes: int,
        chance: random.Random,
    ) -> None:
        self.kind, self.wire, self.chance = kind, wire, chance
        self.kv_token_bytes, self.state_bytes = kv_token_bytes, state_bytes
        if split.unified:
            self.sources = self.targets = [_Worker() for _ in range(split.unified)]
        else:
            self.sources = [_Worker() for _ in range(split.prefill)]
            self.targets = [_Worker() for _ in range(split.decode)]
        for worker in self.targets:
            worker.free_tokens = kind.kv_tokens
        self.now = 0.0
        self.seen = SimulatedTimes()
        self.on_finished: Callable[[], None] = lambda: None
        self._events: list[tuple[float, int, Callable[[_Worker, _Job | None], None], _Worker, _Job | None]]
        self._events = []
        self._count = 0

    def _at(
        self,
        when: float,
        what: Callable[[_Worker, _Job | None], None],
        worker: _Worker,
        job: _Job | None = None,
    ) -> None:
        self._count += 1
        heapq.heappush(self._events, (when, self._count, what, worker, job))

    def arrive(self, due: float, prompt: int, output: int) -> None:
        """A request comes at `due`; where it goes is chosen then."""
        nowhere = self.targets[0]
        job = _Job(self._count, due, prompt, output, nowhere, nowhere)
        self._at(due + self.kind.request_s, self._arrived, nowhere, job)

    def run(self) -> SimulatedTimes:
        while self._events:
            self.now, _, what, worker, job = heapq.heappop(self._events)
            what(worker, job)
        return self.seen

    # ---- a request -------------------------------------------------------------------------------

    def _arrived(self, _: _Worker, job: _Job | None) -> None:
        assert job is not None
        job.source = min(self.sources, key=_held)
        job.target = job.source if self.sources is self.targets else min(self.targets, key=_held)
        for worker in {id(w): w for w in (job.source, job.target)}.values():
            worker.held += 1
        job.target.reserving.append(job)
        self._reserve(job.target)

    def _reserve(self, target: _Worker) -> None:
        while target.reserving and target.reserving[0].tokens <= target.free_tokens:
            job = target.reserving.popleft()
            target.free_tokens -= job.tokens
            job.source.prompts.append(job)
            self._start(job.source)

    def _first_token(self, target: _Worker, job: _Job | None) -> None:
        assert job is not None
        if job.source is not target:
            job.source.held -= 1
        job.last_s = self.now
        self.seen.ttft_s.append(self.now - job.due)
        if job.output == 1:
            self._finish(job)
        else:
            target.joining.append(job)
        self._start(target)

    def _finish(self, job: _Job) -> None:
        target = job.target
        target.held -= 1
        target.free_tokens += job.tokens
        self.seen.finished += 1
        self.seen.end_s = self.now
        self._reserve(target)
        self.on_finished()

    # ---- a forward -------------------------------------------------------------------------------

    def _start(self, worker: _Worker) -> None:
        if worker.busy:
            return
        kind = self.kind
        while worker.joining and len(worker.leaving) < kind.max_batch:
            job = worker.joining.popleft()
            worker.fresh.append(job)
            worker.context += job.prompt
            heapq.heappush(worker.leaving, (worker.forwards + job.output - 1, job.number, job))
        sequences = len(worker.leaving)
        left, work = kind.chunk_tokens - sequences, 0
        for job in worker.prompts:
            if left <= 0:
                break
            tokens = min(left, job.prompt - job.computed)
            worker.chunks.append((job, tokens))
            work += pairs(job.computed, tokens)
            left -= tokens
        tokens = kind.chunk_tokens - sequences - left
        if not tokens and not sequences:
            return
        worker.busy = True
        worker.context += sequences  # each has one token more than before the forward
        taken = kind.steps.of(tokens, work, sequences, worker.context)
        if spread := kind.steps.prompt_spread if tokens else kind.steps.spread:
            taken *= self.chance.choice(spread)
        self._at(self.now + taken + kind.step_s, self._ended, worker)

    def _ended(self, worker: _Worker, _: _Job | None) -> None:
        worker.forwards += 1
        self._token_of_each(worker)
        worker.ended_s = self.now
        chunks, worker.chunks = worker.chunks, []
        for job, tokens in chunks:
            self._chunk_ended(worker, job, tokens)
        worker.busy = False
        self._start(worker)

    def _token_of_each(self, worker: _Worker) -> None:
        """Every running sequence has its next token; those that ran before waited for one forward."""
        stayed = len(worker.leaving) - len(worker.fresh)
        if stayed:
            self.seen.gaps.append((self.now - worker.ended_s, stayed))
        for job in worker.fresh:
            self.seen.gaps.append((self.now - job.last_s, 1))
        worker.fresh.clear()
        while worker.leaving and worker.leaving[0][0] <= worker.forwards:
            _, _, job = heapq.heappop(worker.leaving)
            worker.context -= job.tokens - 1
            self._finish(job)

    def _chunk_ended(self, worker: _Worker, job: _Job, tokens: int) -> None:
        job.computed += tokens
        last = job.computed == job.prompt
        if last:
            worker.prompts.popleft()
        if job.target is worker:
            if last:
                self._first_token(worker, job)
            return
        landed, wire = self.now, self.wire
        if wire is not None:
            nbytes = tokens * self.kv_token_bytes + (self.state_bytes if last else 0)
            worker.wire_free_s = max(worker.wire_free_s, self.now) + nbytes / wire.bytes_per_s
            landed = worker.wire_free_s + wire.latency_s
        if last:
            self._at(landed, self._first_token, job.target, job)


class HandOffTimes(NamedTuple):
    """Times of one prompt on idle workers, in seconds: all of its wire time, and how long after the last
    forward the last of it lands (the wire carries a chunk while the next one is computed)."""

    wire_s: float
    exposed_s: float


def hand_off_times(
    kind: WorkerKind, wire: HandOffWire, prompt: int, kv_token_bytes: int, state_bytes: int = 0
) -> HandOffTimes:
    """The hand-off of a prompt of so many tokens."""
    now = free = 0.0
    for start in range(0, prompt, kind.chunk_tokens):
        tokens = min(kind.chunk_tokens, prompt - start)
        now += kind.steps.of(tokens, pairs(start, tokens), 0, 0) + kind.step_s
        nbytes = tokens * kv_token_bytes + (state_bytes if start + tokens == prompt else 0)
        free = max(free, now) + nbytes / wire.bytes_per_s
    whole = prompt * kv_token_bytes + state_bytes
    return HandOffTimes(whole / wire.bytes_per_s + wire.latency_s, free - now + wire.latency_s)


def _held(worker: _Worker) -> int:
    return worker.held


def simulate(
    kind: WorkerKind,
    split: WorkerSplit,
    load: AskedLoad,
    requests: int,
    *,
    wire: HandOffWire | None = None,
    kv_token_bytes: int = 0,
    state_bytes: int = 0,
    seed: int = 0,
) -> SimulatedTimes:
    """`requests` requests of `load`, from an empty deployment until the last one has ended. The same
    arguments give the same result. No request may be longer than `kind.kv_tokens`."""
    run = QueueRun(kind, split, wire, kv_token_bytes, state_bytes, random.Random(f"{seed}/spread"))
    lengths = random.Random(f"{seed}/lengths")
    arrivals = random.Random(f"{seed}/arrivals")
    drawn = ((load.prompt.draw(lengths), load.output.draw(lengths)) for _ in range(requests))
    if load.rate is not None:
        due = 0.0
        for prompt, output in drawn:
            due += arrivals.expovariate(load.rate)
            run.arrive(due, prompt, output)
        return run.run()

    def following() -> None:
        if (lengths_of := next(drawn, None)) is not None:
            run.arrive(run.now, *lengths_of)

    run.on_finished = following
    for _ in range(load.concurrency or 0):
        following()
    return run.run()
