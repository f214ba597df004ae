"""The parts of a leader beside the protocol: threads, the digester's queue, the life of its sessions."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError
from types import SimpleNamespace
from typing import Any

import pytest

from areas import whole
from segue.kv import control_plane
from segue.kv.config import LeaderRuntime, SessionConfig
from segue.kv.control_plane import ControlPlane
from segue.kv.errors import ConfigError, ErrorCode
from segue.kv.ids import Incarnation, LeaderId, Role, TransferId
from segue.kv.limits import Limits
from segue.kv.protocol import events
from segue.kv.ranks.checksums import Digester
from segue.kv.threads import ThreadPerCall, WorkerThread
from segue.kv.transport.memory.pool_memory import allocate

PEER = LeaderId(Incarnation("a" * 32))
TRANSFER = TransferId(1, 0, PEER, LeaderId(Incarnation("b" * 32)))


# ---- threads -----------------------------------------------------------------------------------------


def test_a_call_that_hangs_holds_up_no_other_one_and_each_gives_what_came_of_it() -> None:
    calls, go_on = ThreadPerCall("a-test"), threading.Event()
    hangs = calls.submit(go_on.wait, 60)
    assert calls.submit(divmod, 7, 2).result(60) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        calls.submit(divmod, 7, 0).result(60)
    with pytest.raises(SystemExit):  # who waits would wait for ever
        calls.submit(sys.exit, 3).result(60)
    assert not hangs.done()
    go_on.set()
    assert hangs.result(60) is True


def test_a_call_that_was_cancelled_before_it_began_is_not_made() -> None:
    later: list[Callable[[], None]] = []
    calls, made = ThreadPerCall("a-test", lambda _, run: later.append(run)), list[int]()
    first, second = calls.submit(made.append, 1), calls.submit(made.append, 2)
    assert first.cancel()
    for run in later:
        run()
    assert made == [2]
    assert second.done()
    with pytest.raises(CancelledError):
        first.result(0)


def test_a_worker_does_its_work_as_often_as_it_is_woken_and_none_after_its_end() -> None:
    done, turns = list[int](), threading.Semaphore(0)

    def work() -> None:
        done.append(1)
        turns.release()

    worker = WorkerThread(work, "a-test")
    for _ in range(3):
        worker.wake()
    worker.start()
    for _ in range(3):
        assert turns.acquire(timeout=60)
    worker.end()
    worker.end()
    worker.wake()
    assert len(done) == 3
    WorkerThread(work, "never started").end()
    assert len(done) == 3


# ---- the digester ------------------------------------------------------------------------------------


class ByHand:
    """A worker whose turns the test takes."""

    def __init__(self, work: Callable[[], object], name: str) -> None:
        self.work = work
        self.woken = 0
        self.ended = False

    def start(self) -> None: ...

    def wake(self) -> None:
        self.woken += 1

    def end(self) -> None:
        self.ended = True


def test_what_waits_to_be_hashed_is_answered_in_its_order_and_a_few_bytes_at_once() -> None:
    memory, answers, made = allocate(4096), list[events.ChecksumReady](), list[ByHand]()

    def worker(work: Callable[[], object], name: str) -> ByHand:
        made.append(ByHand(work, name))
        return made[0]

    digester = Digester(memory, answers.append, 2, inline_bytes=64, worker=worker)

    def ask(tag: int, nbytes: int) -> None:
        digester.submit(events.ComputeChecksum(TRANSFER, tag % 2, tag, whole(nbytes)))

    ask(1, 64)
    assert [(each.tag, each.error) for each in answers] == [(1, None)], "as many bytes as are hashed at once"
    for tag in (2, 3, 4):
        ask(tag, 72)
    assert [each.tag for each in answers] == [1, 4], "two may wait"
    assert answers[1].error is not None
    assert answers[1].error.code is ErrorCode.OUT_OF_CAPACITY
    assert made[0].woken == 2
    made[0].work()
    ask(5, 72)
    for _ in range(2):
        made[0].work()
    assert [(each.tag, each.rank, each.transfer) for each in answers[2:]] == [
        (tag, tag % 2, TRANSFER) for tag in (2, 3, 5)
    ]
    assert not any(each.error for each in answers[2:])
    digester.close()
    assert made[0].ended
    ask(6, 8)
    ask(7, 72)
    assert len(answers) == 5
    memory.close()


def test_a_bug_while_something_is_hashed_is_the_answer_and_nothing_is_raised() -> None:
    """On the digester's thread it would be the end of every later checksum."""
    answers = list[events.ChecksumReady]()
    digester = Digester(SimpleNamespace(buffers=[None]), answers.append, 2)  # type: ignore[arg-type]
    digester.submit(events.ComputeChecksum(TRANSFER, 1, 7, whole(8)))
    [answer] = answers
    assert (answer.transfer, answer.rank, answer.tag) == (TRANSFER, 1, 7)
    assert answer.error is not None
    assert answer.error.code is ErrorCode.INTERNAL
    assert "TypeError" in answer.error.text


# ---- the sessions' life ------------------------------------------------------------------------------


class StepIo:
    """An I/O thread that notes what is asked of it, and runs it on the spot."""

    def __init__(self, told: list[str]) -> None:
        self.told = told
        self.loop: Any = "the loop"
        self.running = False

    def start(self) -> None:
        self.told.append("start")
        self.running = True

    def call(self, coroutine: Coroutine[Any, Any, Any], timeout_s: float) -> Any:
        assert timeout_s == 3.0
        return asyncio.run(coroutine)

    def stop(self) -> None:
        self.told.append("stop")
        self.running = False


class Node:
    def __init__(self, told: list[str], breaks: str) -> None:
        self.told, self.breaks = told, breaks
        self.sessions: dict[LeaderId, object] = {}

    async def listen(self, host: str, port: int) -> tuple[str, int]:
        self.told.append("listen")
        if self.breaks == "listen":
            raise ConfigError("the port is in use")
        return host, 7

    async def close(self) -> None:
        self.told.append("end sessions")
        if self.breaks == "close":
            raise RuntimeError("a bug")


class FakeDialer:
    made: list[FakeDialer]

    def __init__(self, connect: object, name: str, **options: Any) -> None:
        self.name, self.options = name, options
        self.started_on: object = None
        self.stopped = 0
        self.made.append(self)

    def start(self, loop: object) -> None:
        self.started_on = loop

    def stop(self) -> None:
        self.stopped += 1


def plane(breaks: str = "") -> tuple[ControlPlane, list[str]]:
    told: list[str] = []
    config = SessionConfig(role=Role.DECODE, limits=Limits(connect_s=3.0))
    runtime = LeaderRuntime(io=lambda _: StepIo(told), node=lambda **_: Node(told, breaks))  # type: ignore[arg-type, return-value]
    return ControlPlane(config, {}, runtime), told


def test_what_is_to_be_done_before_it_listens_is_and_the_end_is_in_the_opposite_order() -> None:
    made, told = plane()

    async def before() -> None:
        told.append("before")

    assert made.start(before()) == ("127.0.0.1", 7)
    made.close(lambda: told.append("then"))
    made.close(lambda: told.append("twice"))
    assert told == ["start", "before", "listen", "end sessions", "then", "stop"]


def test_one_that_cannot_listen_leaves_no_thread_behind() -> None:
    made, told = plane("listen")
    with pytest.raises(ConfigError, match="in use"):
        made.start()
    assert told[-1] == "stop"


@pytest.mark.parametrize("breaks", ["close", "then", "both"])
def test_whatever_breaks_at_the_end_the_thread_ends(breaks: str) -> None:
    made, told = plane("close" if breaks != "then" else "")
    made.start()

    def then() -> None:
        told.append("then")
        if breaks != "close":
            raise RuntimeError("a bug")

    with pytest.raises(RuntimeError):
        made.close(then)
    assert told[-2:] == ["then", "stop"]


def test_a_peer_is_dialled_by_one_dialler_until_it_is_dropped_and_by_none_after_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(FakeDialer, "made", [], raising=False)
    monkeypatch.setattr(control_plane, "Dialer", FakeDialer)
    made, _ = plane()
    made.start()

    def refused(_: object) -> None: ...

    for _ in range(2):
        made.keep_session(PEER, "there", 9, refused)
    [dialer] = FakeDialer.made
    assert (dialer.name, dialer.started_on, dialer.stopped) == ("there:9", "the loop", 0)
    assert dialer.options["refused"] is refused
    assert dialer.options["patience_s"] == 3.0
    made.drop_session(PEER)
    made.drop_session(PEER)
    assert dialer.stopped == 1
    made.keep_session(PEER, "elsewhere", 9, refused)
    made.close()
    assert [each.stopped for each in FakeDialer.made] == [1, 1]
    made.keep_session(PEER, "there", 9, refused)
    assert len(FakeDialer.made) == 2, "nobody would end it"
