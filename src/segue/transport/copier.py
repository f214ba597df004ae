"""The one thread of `shm` that copies: a queue of jobs, each cut into slices.

Between two slices a job looks whether it was cancelled here or its epoch ended at the receiver.
numpy copies a two-dimensional block in one call without the interpreter's lock, so a slice costs
the other threads of the process nothing but memory bandwidth.
"""

from __future__ import annotations

import mmap
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from segue.core.errors import Internal, SegueError, TransferFailed
from segue.layout.blocks import CopyBlock
from segue.transport.base import TransportEvent, WriteFailed, Written
from segue.transport.ranges import pieces

Then = Callable[[], None]


@dataclass(slots=True)
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
    cut: SegueError | None = None

    def failed(self, error: SegueError) -> WriteFailed:
        """The event that ends this job without success."""
        return WriteFailed(self.peer, self.epoch, self.tag, error)


def copy_block(source: mmap.mmap, target: mmap.mmap, b: CopyBlock) -> None:
    """Copy one block whose bounds were checked."""
    shape = (b.rows, b.row_bytes)
    np.copyto(
        np.ndarray(shape, np.uint8, target, b.dst_offset, (b.dst_stride, 1)),
        np.ndarray(shape, np.uint8, source, b.src_offset, (b.src_stride, 1)),
    )


class Copier:
    """Runs jobs in order. `emit` is called on this thread."""

    def __init__(
        self,
        name: str,
        emit: Callable[[TransportEvent], None],
        on_crash: Callable[[BaseException], None],
        *,
        slice_bytes: int,
        max_jobs: int,
    ) -> None:
        self._emit = emit
        self._on_crash = on_crash
        self._slice_bytes = slice_bytes
        self._max_jobs = max_jobs
        self._wake = threading.Condition()
        self._jobs: deque[Job] = deque()
        self._running: Job | None = None
        self._after: list[Then] = []
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def submit(self, job: Job) -> bool:
        """Queue `job`; False when the queue is full or the thread is ending."""
        with self._wake:
            if self._stopping or len(self._jobs) >= self._max_jobs:
                return False
            self._jobs.append(job)
            self._wake.notify()
        return True

    def cancel(self, peer: str, epoch: int | None, error: SegueError, then: Then) -> Then | None:
        """End the jobs of `peer` (of `epoch`, or of all if None) with `error`, and then run `then`.

        Queued jobs never start. If one of them is running, it stops at the end of its slice
        and this thread reports; None is returned. Else the caller must run what is returned.
        """

        def hit(job: Job) -> bool:
            return job.peer == peer and (epoch is None or job.epoch == epoch)

        with self._wake:
            failed = [job for job in self._jobs if hit(job)]
            if failed:
                self._jobs = deque(job for job in self._jobs if not hit(job))

            def report() -> None:
                for job in failed:
                    self._emit(job.failed(error))
                then()

            if self._running is not None and hit(self._running):
                self._running.cut = error
                self._after.append(report)
                return None
        return report

    def stop(self, timeout_s: float) -> bool:
        """Drop the queue, stop a running job at its next slice, end the thread. True when ended."""
        with self._wake:
            self._stopping = True
            self._jobs.clear()
            if self._running is not None:
                self._running.cut = TransferFailed("the transport is closing")
            self._wake.notify()
        if threading.current_thread() is self._thread:
            return True
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while (job := self._next()) is not None:
                event = self._copy(job)
                with self._wake:
                    self._running = None
                    after, self._after = self._after, []
                del job  # its mappings may be closed by what follows
                self._emit(event)
                for then in after:
                    then()
        except BaseException as exc:
            with self._wake:
                self._stopping = True
                lost = [*([self._running] if self._running else []), *self._jobs]
                self._jobs.clear()
                self._running = None
            for job in lost:
                self._emit(job.failed(Internal(f"the copying thread has failed: {exc!r}")))
            self._on_crash(exc)
            raise

    def _next(self) -> Job | None:
        with self._wake:
            while not self._jobs and not self._stopping:
                self._wake.wait()
            if self._stopping:
                return None
            self._running = self._jobs.popleft()
            return self._running

    def _copy(self, job: Job) -> TransportEvent:
        budget = 0
        for piece in pieces(job.blocks, self._slice_bytes):
            if budget < piece.nbytes:
                budget = self._slice_bytes
                if job.cut is not None:
                    return job.failed(job.cut)
                if not job.allowed():
                    return job.failed(
                        TransferFailed(
                            f"epoch {job.epoch:x} is not granted by {job.peer[:8]}", retryable=False
                        )
                    )
            copy_block(job.source, job.target, piece)
            budget -= piece.nbytes
        return Written(job.peer, job.epoch, job.tag, job.nbytes, time.perf_counter() - job.posted)
