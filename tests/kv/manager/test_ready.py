"""Chunks that are sent before their KV is complete: who waits, and what ends the wait."""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
from kv_sides import (
    DEADLINE_S,
    LIMITS,
    PAGES,
    AgentSide,
    Side,
    ask,
    assert_at_rest,
    assert_fails,
    assert_succeeds,
    begin,
    expect,
    joined,
    published,
    receive,
)

from segue.kv.config import HOST, KVConfig
from segue.kv.errors import (
    AbortedByClient,
    ErrorCode,
    Internal,
    OutOfCapacity,
    TransferFailed,
)
from segue.kv.handles import KVReceiver, KVSender
from segue.kv.ids import KVPoll, Role, RoomKey, Span, TransferId, new_room
from segue.kv.manager import KVManager
from segue.kv.protocol import events
from segue.kv.ranks.local_rank import local_rank
from segue.kv.ranks.rank_link import RankLink
from segue.kv.ranks.rank_worker import RankWorker
from segue.kv.ranks.worker_rank import WorkerRank
from segue.kv.ready import ReadyEvent
from segue.kv.threads import MAX_WAITS, ThreadPerCall, Waits

TOKENS = 16


class WorkerSide(Side):
    """A leader whose one rank is at the other end of a link."""

    def managed(self, config: KVConfig, **_: Any) -> KVManager:
        ours, theirs = socket.socketpair()
        link = RankLink(theirs, "the leader", limits=LIMITS)
        self.worker = RankWorker(local_rank(config, self.memory, HOST, 0), link, lambda _: None)
        self.worker.start()
        return KVManager(config, [WorkerRank(0, RankLink(ours, "rank 0", limits=LIMITS))], self.changes.put)

    def close(self) -> None:
        self.manager.close()
        self.worker.close()
        self.memory.close()


#: Where the manager of prefill has its rank, or is itself.
SIDES = {"own": Side, "worker": WorkerSide, "agent": AgentSide}
each_kind = pytest.mark.parametrize("kind", ["own", "worker", pytest.param("agent", marks=pytest.mark.slow)])


@contextmanager
def pair(transport: str = "shm", kind: str = "own") -> Iterator[tuple[Side, Side]]:
    prefill, decode = SIDES[kind](Role.PREFILL, transport=transport), Side(Role.DECODE, transport=transport)
    with joined(prefill, decode):
        yield prefill, decode


def signal(side: Side, ready: ReadyEvent, wait: Callable[[], object] | None = None) -> None:
    """The KV is complete at this side's rank, or when `wait` returns."""
    if isinstance(side, WorkerSide):
        side.worker.signal(ready.number, wait)
    else:
        ready.signal(wait)


def fill(side: Side) -> bytes:
    content = os.urandom(side.spec.nbytes)
    side.memory.buffer[: len(content)] = content
    return content


def landed(side: Side) -> bytes:
    return bytes(side.memory.buffer[: side.spec.nbytes])


def assert_arrived(prefill: Side, decode: Side, sender: KVSender, receiver: KVReceiver) -> None:
    assert_succeeds({decode: receiver, prefill: sender})
    row = TOKENS * prefill.spec.k_token_bytes
    for plane in range(6):
        at = prefill.spec.offset(plane // 2, bool(plane % 2), 0)
        assert landed(decode)[at : at + row] == landed(prefill)[at : at + row]
    assert_at_rest(prefill)
    assert_at_rest(decode)


@each_kind
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_what_is_sent_and_hashed_is_the_content_at_that_moment(transport: str, kind: str) -> None:
    with pair(transport, kind) as (prefill, decode):
        fill(prefill)
        _, sender, receiver = published(prefill, decode, TOKENS)
        before = landed(decode)
        first, last = prefill.manager.ready(), prefill.manager.ready()
        sender.send(Span(0, 8), range(PAGES), ready=first)
        sender.send(Span(8, TOKENS), range(PAGES), b"7", ready=last)
        for _ in range(5):  # turns of the loop, in which whatever does not wait is hashed
            ask(prefill, lambda: None)
        assert landed(decode) == before
        fill(prefill)
        signal(prefill, last)  # in any order
        signal(prefill, first)
        assert_arrived(prefill, decode, sender, receiver)


@each_kind
def test_a_moment_that_came_before_anybody_waited_or_bound_the_room(kind: str) -> None:
    with pair(kind=kind) as (prefill, decode):
        transfer = TransferId(new_room(), 0, prefill.me, decode.me)
        sender = expect(prefill.manager, transfer, TOKENS, DEADLINE_S)
        ready = prefill.manager.ready()
        sender.send(Span(0, TOKENS), range(PAGES), b"7", ready=ready)
        fill(prefill)
        signal(prefill, ready)
        signal(prefill, ready)  # once more changes nothing
        if isinstance(prefill, WorkerSide):
            while not ready.signalled_at:  # the worker has said so, and may forget it
                ask(prefill, lambda: None)
            while prefill.worker._signalled:
                ask(prefill, lambda: None)
        receiver = receive(decode.manager, transfer, TOKENS, DEADLINE_S)
        decode.wait(receiver, KVPoll.WAITING_FOR_INPUT)
        receiver.publish(range(TOKENS // prefill.spec.page_tokens))
        assert_arrived(prefill, decode, sender, receiver)


@each_kind
def test_layers_leave_each_at_its_moment(kind: str) -> None:
    with pair(kind=kind) as (prefill, decode):
        content = fill(prefill)
        _, sender, receiver = published(prefill, decode, TOKENS)
        moments = [prefill.manager.ready() for _ in range(3)]
        for layers, ready in zip((1, 2, None), moments, strict=True):
            last = b"7" if layers is None else None
            sender.send(Span(0, TOKENS), range(PAGES), last, layers=layers, ready=ready)
        signal(prefill, moments[1])
        at = prefill.spec.offset(1, False, 0)
        row = TOKENS * prefill.spec.k_token_bytes
        while landed(decode)[at : at + row] != content[at : at + row]:
            ask(prefill, lambda: None)
        assert not any(landed(decode)[:at]), "the first layer was not ready"
        for ready in (moments[0], moments[2]):
            signal(prefill, ready)
        assert_arrived(prefill, decode, sender, receiver)


@each_kind
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_fence_ends_what_still_waits_and_a_late_moment_moves_nothing(transport: str, kind: str) -> None:
    with pair(transport, kind) as (prefill, decode):
        fill(prefill)
        transfer, sender, receiver = published(prefill, decode, TOKENS)
        ready = prefill.manager.ready()
        sender.send(Span(0, TOKENS), range(PAGES), b"7", ready=ready)
        prefill.wait(sender, KVPoll.TRANSFERRING)
        receiver.abort(AbortedByClient("the client left").info)
        for side in (prefill, decode):
            side.wait_release(transfer)
        signal(prefill, ready)
        if isinstance(prefill, WorkerSide):
            while not ready.signalled_at:
                ask(prefill, lambda: None)
        ask(prefill, lambda: None)
        assert not any(landed(decode))
        assert_fails(ErrorCode.ABORTED_BY_CLIENT, "left", {prefill: sender, decode: receiver})


@pytest.mark.parametrize("over", [False, True])
@pytest.mark.parametrize("kind", ["own", "worker"])
def test_a_hand_off_that_ends_in_the_very_turn_of_its_chunk_leaves_nothing_behind(
    kind: str, over: bool
) -> None:
    """The fence follows the write and its checksum at once; each of them is answered."""
    with pair(kind=kind) as (prefill, decode):
        _, sender, receiver = published(prefill, decode, TOKENS)
        ready = prefill.manager.ready()
        if over:
            signal(prefill, ready)
        prefill.manager.post(
            events.SendChunk(sender.key, Span(0, TOKENS), tuple(range(PAGES)), ready=ready),
            events.EndRoom(sender.key, AbortedByClient("the client left").info),
        )
        assert_fails(ErrorCode.ABORTED_BY_CLIENT, "left", {prefill: sender, decode: receiver})


@pytest.mark.parametrize("kind", ["own", "worker"])
def test_a_moment_that_never_comes_ends_the_hand_off_by_its_deadline(kind: str) -> None:
    with pair(kind=kind) as (prefill, decode):
        _, sender, receiver = begin(prefill, decode, TOKENS, budget_s=1.0)
        receiver.publish(range(TOKENS // prefill.spec.page_tokens))
        sender.send(Span(0, TOKENS), range(PAGES), b"7", ready=prefill.manager.ready())
        assert_fails(ErrorCode.DEADLINE_EXCEEDED, "", {prefill: sender, decode: receiver})


@each_kind
def test_a_call_that_blocks_until_the_moment_holds_up_nobody_else(kind: str) -> None:
    with pair(kind=kind) as (prefill, decode):
        fill(prefill)
        event = threading.Event()
        _, waiting, there = published(prefill, decode, TOKENS)
        ready = prefill.manager.ready()
        waiting.send(Span(0, TOKENS), range(PAGES), b"7", ready=ready)
        signal(prefill, ready, event.wait)
        _, sender, receiver = published(prefill, decode, TOKENS, 4)
        sender.send(Span(0, TOKENS), range(PAGES), b"7")
        assert_succeeds({decode: receiver, prefill: sender})
        assert waiting.poll() is KVPoll.TRANSFERRING
        event.set()
        assert_arrived(prefill, decode, waiting, there)


@each_kind
def test_what_a_chunk_waits_for_may_fail_and_the_hand_off_with_it(kind: str) -> None:
    def broken() -> None:
        raise RuntimeError("the device was lost")

    with pair(kind=kind) as (prefill, decode):
        _, sender, receiver = published(prefill, decode, TOKENS)
        ready = prefill.manager.ready()
        sender.send(Span(0, TOKENS), range(PAGES), b"7", ready=ready)
        signal(prefill, ready, broken)
        assert_fails(ErrorCode.TRANSFER_FAILED, "the device was lost", {prefill: sender, decode: receiver})
        assert not any(landed(decode))


def test_each_callback_runs_once_whoever_comes_first() -> None:
    calls: list[str] = []
    ready = ReadyEvent(1, Waits(ThreadPerCall("waits")))
    ready.then(lambda: calls.append("before"))
    assert not ready.over
    ready.signal()
    ready.end(OutOfCapacity("too late to fail"))
    ready.then(lambda: calls.append("after"))
    assert (calls, ready.over, ready.error) == (["before", "after"], True, None)


def waiting(threads: int | None = None) -> tuple[Waits, list[Callable[[], None]]]:
    """The threads that it would start; `threads`: how many can be started."""
    started: list[Callable[[], None]] = []

    def spawn(_name: str, run: Callable[[], None]) -> None:
        if threads is not None and len(started) >= threads:
            raise RuntimeError("can't start new thread")
        started.append(run)

    return Waits(ThreadPerCall("waits", spawn)), started


def test_calls_end_in_their_order_on_one_thread_and_equal_ones_in_a_row_are_one() -> None:
    waits, started = waiting()
    log: list[object] = []
    calls = [partial(log.append, name) for name in "abc"]

    def broken() -> None:
        raise RuntimeError("the device was lost")

    for number, call in enumerate([calls[0], calls[1], calls[1], broken, calls[1], calls[2]]):
        waits(call, lambda error, number=number: log.append((number, str(error))))  # type: ignore[misc]
    assert len(started) == 1
    started[0]()
    none = str(None)
    assert log == [
        *("a", (0, none)),
        *("b", (1, none), (2, none)),
        (3, "the device was lost"),
        *("b", (4, none)),
        *("c", (5, none)),
    ]
    waits(calls[0], lambda _: None)
    assert len(started) == 2, "the thread had ended"


def test_one_more_than_may_wait_ends_with_the_error() -> None:
    waits, started = waiting()
    for _ in range(MAX_WAITS):
        waits(int, lambda _: None)
    ready = ReadyEvent(1, waits)
    ready.signal(int)
    assert ready.over
    assert isinstance(ready.error, OutOfCapacity)
    started[0]()
    later = ReadyEvent(2, waits)
    later.signal(int)
    started[1]()
    assert (later.over, later.error) == (True, None)


def test_without_a_thread_what_waits_ends_with_the_reason() -> None:
    waits, _ = waiting(threads=0)
    for _ in range(2):
        ready = ReadyEvent(1, waits)
        ready.signal(int)
        assert ready.over
        assert "can't start new thread" in str(ready.error)


def test_a_rank_that_fails_ends_the_hand_off_also_if_the_chunk_is_complete_elsewhere() -> None:
    with pair(kind="worker") as (prefill, decode):
        assert isinstance(prefill, WorkerSide)
        fill(prefill)
        transfer, sender, receiver = published(prefill, decode, TOKENS)
        ready = prefill.manager.ready()
        sender.send(Span(0, TOKENS), range(PAGES), b"7", ready=ready)
        ready.signal()
        prefill.worker.fail(TransferFailed("the step has raised"))
        for side in (prefill, decode):
            side.wait_release(transfer)
        for handle in (sender, receiver):
            assert handle.error is not None
            assert "the step has raised" in handle.error.text
            handle.clear()
        assert not any(landed(decode))
        late = prefill.manager.expect(RoomKey(new_room()), TOKENS, DEADLINE_S)
        prefill.wait(late, KVPoll.FAILED)


def test_the_end_of_the_io_thread_fails_every_half_at_once() -> None:
    """Nothing is released: transports may still move bytes. No half begins any more."""
    with pair() as (prefill, decode):
        _, sender, receiver = published(prefill, decode, TOKENS)
        waits_for_a_destination = prefill.manager.expect(RoomKey(new_room()), TOKENS, DEADLINE_S)
        prefill.manager.io.post(sys.exit)  # as a bug of the loop would end it
        for handle in (sender, waits_for_a_destination):
            prefill.wait(handle, KVPoll.FAILED)
            assert handle.error is not None
            assert handle.error.code is ErrorCode.INTERNAL
            assert "the thread of the KV hand-off has ended" in handle.error.text
            assert not handle.released
        decode.wait(receiver, KVPoll.FAILED)
        assert receiver.error is not None
        assert receiver.error.code is ErrorCode.PEER_LOST
        with pytest.raises(Internal, match="has ended"):
            prefill.manager.expect(RoomKey(new_room()), TOKENS, DEADLINE_S)
        assert len(prefill.manager.handles) == 2
        assert [error.info.code for error in prefill.lost.queue] == [ErrorCode.INTERNAL]
