"""The decisions of `shm`'s copying threads: the next slice, the end of jobs, the answers that are due.

No thread, lock or system call is in here: `Copier` calls it under its lock, and a test or a simulator in any
order it likes. A job is *held* while a thread is inside
a slice of it, and from its end on until that was reported. A fence, and the end of a path, wait until no job
is held: then nothing of it is written any more.
"""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from segue.kv.errors import SegueError
from segue.kv.ids import RankId
from segue.kv.layout.blocks import CopyBlock
from segue.kv.transport.base import TransportEvent
from segue.kv.transport.memory.pool_memory import HostBytes
from segue.kv.transport.memory.ranges import pieces
from segue.kv.transport.write_book import Write

Then = Callable[[], None]


@dataclass(slots=True, eq=False)
class CopyJob:
    """One write. `allowed` says whether the receiver still grants its epoch, `clock` how long it took."""

    peer: RankId
    write: Write
    blocks: Sequence[CopyBlock]
    source: HostBytes
    target: mmap.mmap
    allowed: Callable[[], bool]
    clock: Callable[[], float]
    active: int = 0  # threads that copy a slice of it right now

    def event(self) -> TransportEvent:
        """The one event that ends it."""
        return self.write.end(self.peer, self.clock())


@dataclass(slots=True, eq=False)
class _Queued:
    """A job with slices that nobody has taken yet; `ahead` is the next one, None at the end."""

    job: CopyJob
    slices: Iterator[list[CopyBlock]]
    ahead: list[CopyBlock] | None


@dataclass(slots=True, eq=False)
class _AwaitedJobs:
    """A report that is due once none of `jobs` is held any more."""

    jobs: set[CopyJob]
    report: Then


def slices(blocks: Sequence[CopyBlock], slice_bytes: int) -> Iterator[list[CopyBlock]]:
    """The blocks in groups of at most `slice_bytes`: one test and one lock for many small ones."""
    group: list[CopyBlock] = []
    size = 0
    for piece in pieces(blocks, slice_bytes):
        if group and size + piece.nbytes > slice_bytes:
            yield group
            group, size = [], 0
        group.append(piece)
        size += piece.nbytes
    if group:
        yield group


class CopyQueue:
    """At most `max_jobs` jobs wait, the oldest first; threads share the slices of one."""

    def __init__(self, *, slice_bytes: int, max_jobs: int) -> None:
        self._slice_bytes = slice_bytes
        self._max_jobs = max_jobs
        self._queue: deque[_Queued] = deque()
        self._held: set[CopyJob] = set()
        self._waiting: list[_AwaitedJobs] = []

    def __len__(self) -> int:
        return len(self._queue)

    def submit(self, job: CopyJob) -> bool:
        """Queue `job`; False when the queue is full."""
        if len(self._queue) >= self._max_jobs:
            return False
        parts = slices(job.blocks, self._slice_bytes)
        self._queue.append(_Queued(job, parts, next(parts, [])))
        return True

    def take(self) -> tuple[CopyJob, list[CopyBlock]]:
        """The next slice: the caller copies it and calls `finish`. Only while some wait."""
        queued = self._queue[0]
        job, blocks = queued.job, queued.ahead or []
        queued.ahead = next(queued.slices, None)
        if queued.ahead is None:
            self._queue.popleft()
        job.active += 1
        self._held.add(job)
        return job, blocks

    def finish(self, job: CopyJob, error: SegueError | None, *, refused: bool = False) -> bool:
        """A slice of `job` is not being copied any more, because of `error` if there is one. True when
        `job` ends with it: the caller then tells `job.event()`, and after that calls `reported`."""
        job.active -= 1
        job.write.fail(error, refused=refused)
        if job.write.error is not None:
            self._drop(lambda other: other is job)
        if job.active:
            return False
        if any(queued.job is job for queued in self._queue):
            self._held.discard(job)  # nobody can wait for it: who cancels it takes it from the queue
            return False
        return True

    def reported(self, job: CopyJob) -> list[Then]:
        """The end of `job` was reported: what is to be called now that it is not held any more."""
        self._held.discard(job)
        for entry in self._waiting:
            entry.jobs.discard(job)
        ready = [entry.report for entry in self._waiting if not entry.jobs]
        self._waiting = [entry for entry in self._waiting if entry.jobs]
        return ready

    def cancel(
        self, peer: RankId, epoch: int | None, error: SegueError, then: Then
    ) -> tuple[list[CopyJob], bool]:
        """End the jobs of `peer` (of `epoch`, or of all if None) with `error`.

        Returns those that nobody copies, which the caller holds until it has emitted their events and called
        `reported` for each, and whether `then` waits: it is among what `reported` returns for the last job
        of this peer and epoch that anybody holds. Else there is none, and the caller runs it.
        """

        def hit(job: CopyJob) -> bool:
            return job.peer == peer and epoch in (None, job.write.epoch)

        idle = self._end(hit, error)
        waits_for = {job for job in self._held if hit(job)}
        if waits_for:
            self._waiting.append(_AwaitedJobs(waits_for, then))
        return idle, bool(waits_for)

    def fail(self, error: SegueError) -> list[CopyJob]:
        """End every job with `error`: nothing starts any more. Returns those that nobody copies, to be
        emitted by the caller as `cancel` says; whoever copies another ends it with `finish`."""
        return self._end(lambda _job: True, error)

    def clear(self) -> None:
        """Forget what waits, without a word."""
        self._queue.clear()

    def _drop(self, hit: Callable[[CopyJob], bool]) -> list[CopyJob]:
        """Take what `hit` says from the queue."""
        dropped = [queued.job for queued in self._queue if hit(queued.job)]
        if dropped:
            self._queue = deque(queued for queued in self._queue if not hit(queued.job))
        return dropped

    def _end(self, hit: Callable[[CopyJob], bool], error: SegueError) -> list[CopyJob]:
        idle = [job for job in self._drop(hit) if job not in self._held]
        self._held.update(idle)
        for job in self._held:
            if hit(job):
                job.write.fail(error)
        return idle
