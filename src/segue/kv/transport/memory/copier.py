"""The threads of `shm` that copy: a queue of jobs, each cut into slices that they share.

Between two slices a job looks whether it was cancelled here or its epoch ended at the receiver.
numpy copies a block in one call without the interpreter's lock, so a slice costs
the other threads of the process nothing but memory bandwidth. `copy_queue` has the decisions.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from segue.kv.errors import Internal, SegueError
from segue.kv.ids import RankId
from segue.kv.layout.blocks import CopyBlock
from segue.kv.transport.base import TransportEvent
from segue.kv.transport.memory.copy_queue import CopyJob, CopyQueue, Then
from segue.kv.transport.memory.pool_memory import HostBytes
from segue.kv.transport.shm.shm_host import HOST, ShmHost
from segue.kv.transport.write_book import not_granted

Copy = Callable[[CopyJob, Sequence[CopyBlock]], None]


def copy_block(source: HostBytes, target: HostBytes, b: CopyBlock) -> None:
    """Copy one block whose bounds were checked."""
    shape = (b.groups, b.rows, b.row_bytes)
    np.copyto(
        np.ndarray(shape, np.uint8, target, b.dst_offset, (b.dst_group_stride, b.dst_stride, 1)),
        np.ndarray(shape, np.uint8, source, b.src_offset, (b.src_group_stride, b.src_stride, 1)),
    )


def copy_slice(job: CopyJob, blocks: Sequence[CopyBlock]) -> None:
    """Copy some blocks of a job."""
    for block in blocks:
        copy_block(job.source, job.target, block)


class Copier:
    """Runs jobs, the oldest first; threads share the slices of one. `emit` is called on them.

    A thread that ends by an exception takes the others with it: each ends the slice that it is inside,
    and only then is anybody told that nothing of its job is written any more. `on_crash` hears last.
    `copy` copies a slice.
    """

    def __init__(
        self,
        name: str,
        emit: Callable[[TransportEvent], None],
        on_crash: Callable[[BaseException], None],
        *,
        slice_bytes: int,
        max_jobs: int,
        threads: int,
        copy: Copy = copy_slice,
        host: ShmHost = HOST,
    ) -> None:
        self._emit = emit
        self._on_crash = on_crash
        self._slice_bytes = slice_bytes
        self._copy = copy
        self._host = host
        self._wake = host.condition()
        self._jobs = CopyQueue(slice_bytes=slice_bytes, max_jobs=max_jobs)  # under `_wake`
        self._stopping = False
        self._threads = [host.copying(name, i, threads, self._run) for i in range(threads)]

    def start(self) -> None:
        """Start the threads."""
        for thread in self._threads:
            thread.start()

    def submit(self, job: CopyJob) -> bool:
        """Queue `job`; False when the queue is full or the threads are ending."""
        with self._wake:
            if self._stopping or not self._jobs.submit(job):
                return False
            self._wake.notify(-(-job.write.nbytes // self._slice_bytes) or 1)
        return True

    def cancel(self, peer: RankId, epoch: int | None, error: SegueError, then: Then) -> Then | None:
        """End the jobs of `peer` (of `epoch`, or of all if None) with `error`, and then run `then`.

        Slices that no thread copies at this moment never start. `then` runs when the ends of all of them were
        told; the caller must run what is returned, if anything is.
        """
        with self._wake:
            idle, waits = self._jobs.cancel(peer, epoch, error, then)
        if not waits:
            return then
        return partial(self._report_all, idle) if idle else None

    def stop(self, timeout_s: float) -> bool:
        """Drop the queue, let running slices end, end the threads. True when they have ended."""
        with self._wake:
            self._stopping = True
            self._jobs.clear()
            self._wake.notify_all()
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            if not self._host.is_current(thread):
                thread.join(max(0.0, deadline - time.monotonic()))
        return not any(t.is_alive() for t in self._threads if not self._host.is_current(t))

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        except BaseException as exc:
            try:
                self._fail(Internal(f"a copying thread has failed: {exc!r}"))
            finally:
                self._on_crash(exc)
            raise

    def _fail(self, error: SegueError) -> None:
        """The others end with the slice that they are inside; what nobody copies ends here."""
        with self._wake:
            self._stopping = True
            lost = self._jobs.fail(error)
            self._wake.notify_all()
        self._report_all(lost)

    def _turn(self) -> bool:
        """Copy one slice, and say what ends with it. False when the copier stops."""
        with self._wake:
            while not len(self._jobs) and not self._stopping:
                self._wake.wait()
            if self._stopping:
                return False
            job, blocks = self._jobs.take()
        error: SegueError | None = None
        refused = False
        try:
            if job.write.error is None and not job.allowed():
                refused = True
                error = not_granted(job.peer, job.write.epoch)
            elif job.write.error is None:
                self._copy(job, blocks)
        except BaseException as exc:
            error = Internal(f"a copying thread has failed: {exc!r}")
            raise
        finally:
            self._finish(job, error, refused)
        return True

    def _finish(self, job: CopyJob, error: SegueError | None, refused: bool) -> None:
        with self._wake:
            ended = self._jobs.finish(job, error, refused=refused)
        if ended:
            self._report(job)

    def _report_all(self, jobs: Sequence[CopyJob]) -> None:
        for job in jobs:
            self._report(job)

    def _report(self, job: CopyJob) -> None:
        try:
            self._emit(job.event())  # before anybody can be told that nothing is in flight
        finally:
            with self._wake:
                reports = self._jobs.reported(job)
            for report in reports:
                report()
