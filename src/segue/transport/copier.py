"""The threads of `shm` that copy: a queue of jobs, each cut into slices that they share.

Between two slices a job looks whether it was cancelled here or its epoch ended at the receiver.
numpy copies a two-dimensional block in one call without the interpreter's lock, so a slice costs
the other threads of the process nothing but memory bandwidth.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from segue.core.errors import Internal, SegueError, TransferFailed
from segue.layout.blocks import CopyBlock
from segue.transport.base import TransportEvent, WriteFailed, Written
from segue.transport.ranges import pieces

Then = Callable[[], None]


@dataclass(slots=True, eq=False)
class Job:
    """One write. `allowed` says whether the receiver still grants its epoch."""

    peer: str
    epoch: int
    tag: int
    blocks: Sequence[CopyBlock]
    nbytes: int
    source: mmap.mmap
    target: mmap.mmap
    allowed: Callable[[], bool]
    posted: float = field(default_factory=time.perf_counter)
    error: SegueError | None = None
    refused: bool = False
    active: int = 0  # threads that copy a slice of it right now

    def event(self) -> TransportEvent:
        """The one event that ends it."""
        if self.error is not None:
            return WriteFailed(self.peer, self.epoch, self.tag, self.error, self.refused)
        seconds = time.perf_counter() - self.posted
        return Written(self.peer, self.epoch, self.tag, self.nbytes, seconds)


@dataclass(slots=True, eq=False)
class _Queued:
    """A job with slices that nobody has taken yet; `ahead` is the next one, None at the end."""

    job: Job
    slices: Iterator[list[CopyBlock]]
    ahead: list[CopyBlock] | None

    def take(self) -> list[CopyBlock]:
        taken = self.ahead or []
        self.ahead = next(self.slices, None)
        return taken


@dataclass(slots=True, eq=False)
class _Waiting:
    """What is to be said once none of `jobs` is being copied any more."""

    jobs: set[Job]
    report: Then


def copy_block(source: mmap.mmap, target: mmap.mmap, b: CopyBlock) -> None:
    """Copy one block whose bounds were checked."""
    shape = (b.rows, b.row_bytes)
    np.copyto(
        np.ndarray(shape, np.uint8, target, b.dst_offset, (b.dst_stride, 1)),
        np.ndarray(shape, np.uint8, source, b.src_offset, (b.src_stride, 1)),
    )


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


class Copier:
    """Runs jobs, the oldest first; threads share the slices of one. `emit` is called on them."""

    def __init__(
        self,
        name: str,
        emit: Callable[[TransportEvent], None],
        on_crash: Callable[[BaseException], None],
        *,
        slice_bytes: int,
        max_jobs: int,
        threads: int,
    ) -> None:
        self._emit = emit
        self._on_crash = on_crash
        self._slice_bytes = slice_bytes
        self._max_jobs = max_jobs
        self._wake = threading.Condition()
        self._queue: deque[_Queued] = deque()
        self._active: set[Job] = set()
        self._waiting: list[_Waiting] = []
        self._stopping = False
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{i}", daemon=True) for i in range(threads)
        ]

    def start(self) -> None:
        """Start the threads."""
        for thread in self._threads:
            thread.start()

    def submit(self, job: Job) -> bool:
        """Queue `job`; False when the queue is full or the threads are ending."""
        parts = slices(job.blocks, self._slice_bytes)
        queued = _Queued(job, parts, next(parts, []))
        with self._wake:
            if self._stopping or len(self._queue) >= self._max_jobs:
                return False
            self._queue.append(queued)
            self._wake.notify(-(-job.nbytes // self._slice_bytes) or 1)
        return True

    def cancel(self, peer: str, epoch: int | None, error: SegueError, then: Then) -> Then | None:
        """End the jobs of `peer` (of `epoch`, or of all if None) with `error`, and then run `then`.

        What nobody copies right now never starts again. If a slice of one is being copied, that
        thread reports at its end and None is returned; else the caller must run what is returned.
        """

        def hit(job: Job) -> bool:
            return job.peer == peer and (epoch is None or job.epoch == epoch)

        with self._wake:
            failed = [queued.job for queued in self._queue if hit(queued.job)]
            if failed:
                self._queue = deque(queued for queued in self._queue if not hit(queued.job))
            active = {job for job in self._active if hit(job)}
            for job in (*failed, *active):
                job.error = job.error or error
            idle = [job for job in failed if job not in active]

            def report() -> None:
                for job in idle:
                    self._emit(job.event())
                then()

            if active:
                self._waiting.append(_Waiting(active, report))
                return None
        return report

    def stop(self, timeout_s: float) -> bool:
        """Drop the queue, let running slices end, end the threads. True when they have ended."""
        with self._wake:
            self._stopping = True
            self._queue.clear()
            self._wake.notify_all()
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))
        return not any(t.is_alive() for t in self._threads if t is not threading.current_thread())

    def _spread(self) -> None:
        """Keep the threads on disjoint CPUs: the scheduler likes to wake them all on the waker's
        core, where they take turns instead of sharing the work (bench/transport.py: 0.73 of a
        memcpy without this, 0.8 to 0.9 with it, for scattered pages on a busy machine)."""
        cpus = sorted(os.sched_getaffinity(0))
        if len(self._threads) <= len(cpus):
            nth = self._threads.index(threading.current_thread())
            os.sched_setaffinity(0, cpus[nth :: len(self._threads)])  # of this thread only

    def _run(self) -> None:
        try:
            self._spread()
            while self._turn():
                pass
        except BaseException as exc:
            with self._wake:
                self._stopping = True
                lost = {*self._active, *(queued.job for queued in self._queue)}
                self._queue.clear()
                self._active.clear()
                waiting, self._waiting = self._waiting, []
                self._wake.notify_all()
            for job in lost:
                job.error = Internal(f"a copying thread has failed: {exc!r}")
                self._emit(job.event())
            for entry in waiting:
                entry.report()
            self._on_crash(exc)
            raise

    def _turn(self) -> bool:
        """Copy one slice, and say what ends with it. False when the copier stops."""
        with self._wake:
            while not self._queue and not self._stopping:
                self._wake.wait()
            if self._stopping:
                return False
            queued = self._queue[0]
            job, blocks = queued.job, queued.take()
            if queued.ahead is None:
                self._queue.popleft()
            job.active += 1
            self._active.add(job)
        if job.error is None and not job.allowed():
            job.refused = True
            job.error = TransferFailed(
                f"epoch {job.epoch:x} is not granted by {job.peer[:8]}", retryable=False
            )
        if job.error is None:
            for block in blocks:
                copy_block(job.source, job.target, block)
        with self._wake:
            job.active -= 1
            if job.error is not None and self._queue and self._queue[0].job is job:
                self._queue.popleft()
            idle = not job.active
            ended = idle and not any(queued.job is job for queued in self._queue)
            ready = self._settle(job) if idle and not ended else []
        if ended:
            self._emit(job.event())  # before anybody can be told that nothing is in flight
            with self._wake:
                ready = self._settle(job)
        for entry in ready:
            entry.report()
        return True

    def _settle(self, job: Job) -> list[_Waiting]:
        """Nobody copies `job` now: who was waiting for that. Under the lock."""
        self._active.discard(job)
        for entry in self._waiting:
            entry.jobs.discard(job)
        ready = [entry for entry in self._waiting if not entry.jobs]
        if ready:
            self._waiting = [entry for entry in self._waiting if entry.jobs]
        return ready
