"""The copying of `shm`: what is answered when, whatever the order of slices, fences and failures.

The state machine drives `CopyQueue` without threads: each rule is one step that a thread or a caller can
take, so hypothesis chooses the interleaving. The tests below it hold real threads inside a slice by events.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from segue.kv.errors import Internal, TransferFailed
from segue.kv.ids import RankId
from segue.kv.layout.blocks import CopyBlock
from segue.kv.transport.base import TransportEvent, WriteFailed, Written
from segue.kv.transport.memory.copier import Copier
from segue.kv.transport.memory.copy_queue import CopyJob, CopyQueue
from segue.kv.transport.shm.shm_host import HOST
from segue.kv.transport.write_book import Write

SLICE = 10
MEMORY = mmap.mmap(-1, 4096)


def job(peer: RankId, epoch: int, tag: int, count: int) -> CopyJob:
    """A write of `count` slices."""
    blocks = [CopyBlock(0, 0, 1, SLICE) for _ in range(count)]
    write = Write(epoch, tag, count * SLICE, time.monotonic())
    return CopyJob(peer, write, blocks, MEMORY, MEMORY, lambda: True, time.monotonic)


@dataclass(eq=False)
class Fence:
    """A question that must be answered once nothing it asks about is written any more."""

    peer: RankId
    epoch: int | None
    about: list[CopyJob]
    answered: bool = False


@dataclass(eq=False)
class Worker:
    """A copying thread: what it is inside of, and the job whose end it is about to tell."""

    inside: CopyJob | None = None
    tells: CopyJob | None = None


class Interleavings(RuleBasedStateMachine):
    """Three workers, any order of their steps."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = CopyQueue(slice_bytes=SLICE, max_jobs=5)
        self.jobs: list[CopyJob] = []
        self.events: dict[CopyJob, list[TransportEvent]] = {}
        self.slices: dict[CopyJob, int] = {}
        self.fences: list[Fence] = []
        self.workers = [Worker() for _ in range(3)]
        self.tag = 0
        self.failed = False
        self.to_tell: list[CopyJob] = []  # what callers of `cancel` and `fail` have still to tell

    @initialize()
    def some_work(self) -> None:
        self.submit("a", 1, 2)
        self.submit("a", 2, 3)

    @rule(peer=st.sampled_from("ab"), epoch=st.integers(1, 2), count=st.integers(0, 4))
    def submit(self, peer: RankId, epoch: int, count: int) -> None:
        if self.failed:
            return
        self.tag += 1
        made = job(peer, epoch, self.tag, count)
        waiting = len(self.queue)
        assert self.queue.submit(made) is (waiting < 5)
        if waiting < 5:
            self.jobs.append(made)
            self.events[made], self.slices[made] = [], 0

    @precondition(lambda self: len(self.queue))
    @rule(nth=st.integers(0, 2))
    def take(self, nth: int) -> None:
        worker = self.workers[nth]
        if worker.inside is None and worker.tells is None:
            worker.inside, blocks = self.queue.take()
            assert sum(block.nbytes for block in blocks) <= SLICE
            self.slices[worker.inside] += bool(blocks)
            for fence in self.fences:
                assert worker.inside not in fence.about, "a slice of what was fenced starts"

    @rule(nth=st.integers(0, 2), how=st.sampled_from(["copied", "copied", "refused", "failed"]))
    def finish(self, nth: int, how: str) -> None:
        worker = self.workers[nth]
        if worker.inside is None:
            return
        ended, worker.inside = worker.inside, None
        error = {"copied": None, "refused": TransferFailed("no grant"), "failed": Internal("died")}[how]
        if self.queue.finish(ended, error, refused=how == "refused"):
            worker.tells = ended

    @rule(nth=st.integers(0, 2))
    def tell(self, nth: int) -> None:
        worker = self.workers[nth]
        if worker.tells is None:
            return
        reported, worker.tells = worker.tells, None
        self.emit(reported)

    @precondition(lambda self: self.to_tell)
    @rule(n=st.integers(0, 5))
    def tell_for_a_caller(self, n: int) -> None:
        self.emit(self.to_tell.pop(n % len(self.to_tell)))

    @rule(peer=st.sampled_from("ab"), epoch=st.sampled_from([1, 2, None]))
    def fence(self, peer: RankId, epoch: int | None) -> None:
        about = [
            j for j in self.jobs if j.peer == peer and epoch in (None, j.write.epoch) and not self.events[j]
        ]
        fence = Fence(peer, epoch, about)
        idle, waits = self.queue.cancel(peer, epoch, TransferFailed("fenced"), partial(self.report, fence))
        self.fences.append(fence)
        self.to_tell += idle
        assert waits == bool(about), "answered at once only if there is nothing to tell"
        if not waits:
            self.report(fence)

    @precondition(lambda self: not self.failed)
    @rule(rarely=st.integers(0, 9))
    def die(self, rarely: int) -> None:
        if rarely:
            return
        self.failed = True
        self.to_tell += self.queue.fail(Internal("a thread has died"))
        assert not len(self.queue)

    def emit(self, ended: CopyJob) -> None:
        assert not any(w.inside is ended for w in self.workers), "an end is told inside a slice"
        self.events[ended].append(ended.event())
        for report in self.queue.reported(ended):
            report()

    def report(self, fence: Fence) -> None:
        assert not fence.answered
        fence.answered = True
        for asked in fence.about:
            assert not any(w.inside is asked for w in self.workers), "answered while a slice is copied"
            assert self.events[asked], "answered before the write was told"

    @invariant()
    def one_end_each(self) -> None:
        for ended, events in self.events.items():
            assert len(events) <= 1
            if events and isinstance(events[0], Written):
                assert self.slices[ended] == len(ended.blocks), "written without a slice"

    def teardown(self) -> None:
        """Let everything come to its end: then every job has one and every fence an answer."""
        while len(self.queue) or any(w.inside or w.tells for w in self.workers):
            for nth in range(3):
                if len(self.queue):
                    self.take(nth)
                self.finish(nth, "copied")
                self.tell(nth)
        while self.to_tell:
            self.tell_for_a_caller(0)
        assert all(len(events) == 1 for events in self.events.values())
        assert all(fence.answered for fence in self.fences)


Interleavings.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestInterleavings = Interleavings.TestCase


def test_a_job_that_is_cancelled_between_two_slices_ends_at_once() -> None:
    """Nobody is inside a slice of it, so nobody else would ever say so."""
    queue = CopyQueue(slice_bytes=SLICE, max_jobs=1)
    made, answers = job("a", 1, 1, 2), list[str]()
    assert queue.submit(made)
    assert queue.take()[0] is made
    assert not queue.finish(made, None)
    idle, waits = queue.cancel("a", 1, TransferFailed("fenced"), lambda: answers.append("fenced"))
    assert (idle, waits) == ([made], True)
    for answer in queue.reported(made):
        answer()
    assert answers == ["fenced"]


# ---- real threads, held by events ------------------------------------------------------------------


class Held:
    """A copier whose slices wait until they are let go; the events in the order in which they came."""

    def __init__(self, threads: int = 2, max_jobs: int = 10) -> None:
        self.log: list[object] = []
        self.changed = threading.Condition()
        self.entered = threading.Semaphore(0)
        self.inside: set[int] = set()  # tags of jobs that a slice is copied of
        self.go: dict[int, threading.Event] = {}
        self.bad: set[int] = set()
        self.crashes: list[BaseException] = []
        self.copier = Copier(
            "held",
            self.note,
            self.crashed,
            slice_bytes=SLICE,
            max_jobs=max_jobs,
            threads=threads,
            copy=self.copy,
        )
        self.copier.start()

    def note(self, what: object) -> None:
        with self.changed:
            self.log.append(what)
            self.changed.notify_all()

    def crashed(self, exc: BaseException) -> None:
        self.crashes.append(exc)
        self.note("crashed")

    def wait(self, what: object) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: what in self.log, 60), (what, self.log)

    def copy(self, job: CopyJob, _blocks: Sequence[CopyBlock]) -> None:
        self.inside.add(job.write.tag)
        self.entered.release()
        assert self.go[job.write.tag].wait(60)
        self.inside.discard(job.write.tag)
        if job.write.tag in self.bad:
            raise KeyError("a bug while copying")

    def submit(self, tag: int, *, epoch: int = 1, slices: int = 1, peer: RankId = "a") -> bool:
        self.go.setdefault(tag, threading.Event())
        return self.copier.submit(job(peer, epoch, tag, slices))

    def begun(self, count: int = 1) -> None:
        for _ in range(count):
            assert self.entered.acquire(timeout=60)

    def fence(self, epoch: int | None = 1, peer: RankId = "a", word: str = "fenced") -> None:
        now = self.copier.cancel(peer, epoch, TransferFailed("fenced"), partial(self.fenced, word))
        if now is not None:
            now()

    def fenced(self, word: str) -> None:
        self.note((word, sorted(self.inside)))

    def ends(self) -> dict[int, TransportEvent]:
        found = [e for e in self.log if isinstance(e, Written | WriteFailed)]
        assert len({e.tag for e in found}) == len(found), "one end each"
        return {e.tag: e for e in found}


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    monkeypatch.setattr(threading, "excepthook", lambda _args: None)
    made = Held()
    yield made
    for event in made.go.values():
        event.set()
    assert made.copier.stop(60)


def test_a_fence_is_not_answered_while_a_slice_is_copied_although_another_thread_dies(held: Held) -> None:
    held.submit(1)
    held.begun()
    held.submit(2, epoch=2)
    held.begun()
    held.fence()
    held.bad.add(2)
    held.go[2].set()
    held.wait("crashed")
    assert held.inside == {1}
    assert not [e for e in held.log if isinstance(e, tuple)], "answered inside the slice"
    assert 1 not in held.ends()
    held.fence(word="again")  # asked after the death: the same
    held.go[1].set()
    held.wait(("again", []))
    assert held.log.index(held.ends()[1]) < held.log.index(("fenced", []))
    assert isinstance(held.ends()[2], WriteFailed)
    assert [type(exc) for exc in held.crashes] == [KeyError]


def test_a_thread_that_dies_inside_a_job_leaves_it_to_the_one_that_still_copies_it(held: Held) -> None:
    """Both are inside slices of one write: its end is told once, after the second has left."""
    turn = threading.Semaphore(0)

    def copy(_job: CopyJob, _blocks: Sequence[CopyBlock]) -> None:
        held.entered.release()
        assert turn.acquire(timeout=60)
        if not held.bad:
            held.bad.add(1)
            raise KeyError("the first one out dies")

    held.copier._copy = copy
    held.submit(1, slices=3)
    held.begun(2)
    held.fence()
    turn.release()
    held.wait("crashed")
    assert 1 not in held.ends()
    assert ("fenced", []) not in held.log
    turn.release()
    held.wait(("fenced", []))
    assert isinstance(held.ends()[1], WriteFailed)


def test_what_waits_when_a_thread_dies_ends_at_once(held: Held) -> None:
    for tag in (1, 2):
        held.submit(tag)
    held.begun(2)
    held.submit(3)
    held.submit(4, peer="b")
    held.bad.add(1)
    held.go[1].set()
    held.wait("crashed")
    assert set(held.ends()) == {1, 3, 4}
    assert all(isinstance(end, WriteFailed) for end in held.ends().values())
    assert not held.submit(5), "nothing is taken that nobody would copy"
    held.fence(epoch=None, peer="b", word="b")
    assert ("b", [2]) in held.log, "nobody copies anything of this peer"


def test_an_end_that_cannot_be_told_still_answers_the_fence(held: Held) -> None:
    """The owner's bug: whoever waits for the fence must not wait for ever."""
    emit, broken = held.copier._emit, threading.Event()

    def sink(event: TransportEvent) -> None:
        if not broken.is_set():
            broken.set()
            raise KeyError("a bug in the owner")
        emit(event)

    held.copier._emit = sink
    held.submit(1)
    held.begun()
    held.fence()
    held.go[1].set()
    held.wait("crashed")
    assert held.log == [("fenced", []), "crashed"]


def test_a_test_of_the_grant_that_raises_fails_its_write(held: Held) -> None:
    def allowed() -> bool:
        raise ValueError("the table is gone")

    bad = job("a", 1, 1, 1)
    bad.allowed = allowed
    assert held.copier.submit(bad)
    held.wait("crashed")
    assert isinstance(held.ends()[1], WriteFailed)


def test_a_full_queue_takes_no_more_and_a_stopped_one_none(monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(threads=1, max_jobs=2)
    held.submit(1, slices=1)
    held.begun()
    assert held.submit(2)
    assert held.submit(3)
    assert not held.submit(4)
    for event in held.go.values():
        event.set()
    held.begun(2)
    held.copier.stop(60)
    assert not held.submit(5)


def test_a_host_that_does_not_let_threads_choose_cpus_costs_speed_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(*_args: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setaffinity", refused)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 1})
    held = Held()
    held.submit(1)
    held.go[1].set()
    held.begun()
    held.copier.stop(60)
    assert not held.crashes


def test_stop_says_so_whichever_thread_is_still_inside_a_slice() -> None:
    """The caller unmaps what is written to if nobody is."""
    held = Held(threads=2)
    for tag in (1, 2):
        held.submit(tag)
    held.begun(2)
    for tag in (1, 2):
        assert not held.copier.stop(0.0)
        held.go[tag].set()
    assert held.copier.stop(60)


def test_the_first_error_of_a_write_is_the_one_that_is_told() -> None:
    queue = CopyQueue(slice_bytes=SLICE, max_jobs=4)
    write = job("a", 1, 1, 3)
    assert queue.submit(write)
    queue.take()
    queue.take()
    assert not queue.finish(write, Internal("a bug"))
    assert queue.finish(write, TransferFailed("not granted"), refused=True)
    event = write.event()
    assert isinstance(event, WriteFailed)
    assert (str(event.error), event.refused) == (str(Internal("a bug")), False)


@pytest.mark.parametrize(
    ("there", "wanted"),
    [({1, 4, 6, 9}, [[1, 6], [4, 9]]), ({3, 5}, [[3], [5]]), ({7}, [])],
    ids=["two each", "one each", "too few"],
)
def test_threads_that_copy_share_no_cpu_where_there_are_enough(
    there: set[int], wanted: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[list[int]] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: there)
    monkeypatch.setattr(os, "sched_setaffinity", lambda who, cpus: kept.append(cpus) if who == 0 else None)
    ran: list[int] = []
    for nth in range(2):
        thread = HOST.copying("copy", nth, 2, lambda nth=nth: ran.append(nth))  # type: ignore[misc]
        thread.start()
        thread.join(60)
    assert (kept, ran) == (wanted, [0, 1])
