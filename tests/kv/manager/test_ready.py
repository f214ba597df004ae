"""Chunks that are sent before their KV is complete: who waits, and what ends the wait."""

from __future__ import annotations

import os
import queue
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from test_manager import DEADLINE_S, LIMITS, PAGES, Side, ask, assert_at_rest, begin, expect, receive, spec

from segue.kv.config import HOST, KVConfig
from segue.kv.errors import AbortedByClient, ErrorCode, OutOfCapacity
from segue.kv.handles import Change, KVReceiver, KVSender
from segue.kv.ids import KVPoll, Role, Span, TransferId, new_room
from segue.kv.manager import KVManager
from segue.kv.protocol import events
from segue.kv.ranks.local_rank import local_rank
from segue.kv.ranks.rank_link import RankLink
from segue.kv.ranks.rank_worker import RankWorker
from segue.kv.ranks.worker_rank import WorkerRank
from segue.kv.ready import ReadyEvent
from segue.kv.threads import MAX_WAITS, ThreadPerCall, Waits
from segue.kv.transport.memory.pool_memory import allocate

TOKENS = 16


class WorkerSide(Side):
    """A leader whose one rank is at the other end of a link."""

    def __init__(self, role: Role, transport: str) -> None:
        self.spec = spec()
        self.memory = allocate(self.spec.nbytes)
        self.changes = queue.Queue[Change]()
        config = KVConfig(role=role, spec=self.spec, model="m/float32", limits=LIMITS, transports=[transport])
        ours, theirs = socket.socketpair()
        self.link = RankLink(theirs, "the leader", limits=LIMITS)
        self.worker = RankWorker(local_rank(config, self.memory, HOST, 0), self.link, lambda _: None)
        self.worker.start()
        rank = WorkerRank(0, RankLink(ours, "rank 0", limits=LIMITS))
        self.manager = KVManager(config, [rank], self.changes.put)
        self.me = config.me

    def close(self) -> None:
        self.manager.close()
        self.worker.close()
        self.memory.close()


@contextmanager
def pair(transport: str = "shm", worker: bool = False) -> Iterator[tuple[Side, Side]]:
    prefill = WorkerSide(Role.PREFILL, transport) if worker else Side(Role.PREFILL, transport=transport)
    decode = Side(Role.DECODE, transport=transport)
    try:
        prefill.manager.start()
        decode.manager.start()
        decode.manager.add_peer(prefill.me, *prefill.manager.plane.address)
        yield prefill, decode
    finally:
        decode.close()
        prefill.close()


def signal(side: Side, ready: ReadyEvent) -> None:
    """The KV is complete at this side's rank."""
    if isinstance(side, WorkerSide):
        side.worker.signal(ready.number)
    else:
        ready.signal()


def fill(side: Side) -> bytes:
    content = os.urandom(side.spec.nbytes)
    side.memory.buffer[: len(content)] = content
    return content


def landed(side: Side) -> bytes:
    return bytes(side.memory.buffer[: side.spec.nbytes])


def published(prefill: Side, decode: Side) -> tuple[TransferId, KVSender, KVReceiver]:
    transfer, sender, receiver = begin(prefill, decode, TOKENS)
    receiver.publish(range(TOKENS // prefill.spec.page_tokens))
    prefill.wait(sender, KVPoll.WAITING_FOR_INPUT)
    return transfer, sender, receiver


def assert_arrived(prefill: Side, decode: Side, sender: KVSender, receiver: KVReceiver) -> None:
    decode.wait(receiver, KVPoll.SUCCESS)
    prefill.wait(sender, KVPoll.SUCCESS)
    row = TOKENS * prefill.spec.k_token_bytes
    for plane in range(6):
        at = prefill.spec.offset(plane // 2, bool(plane % 2), 0)
        assert landed(decode)[at : at + row] == landed(prefill)[at : at + row]
    sender.clear()
    receiver.clear()
    assert_at_rest(prefill)
    assert_at_rest(decode)


@pytest.mark.parametrize("worker", [False, True])
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_what_is_sent_and_hashed_is_the_content_at_that_moment(transport: str, worker: bool) -> None:
    with pair(transport, worker) as (prefill, decode):
        fill(prefill)
        _, sender, receiver = published(prefill, decode)
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


@pytest.mark.parametrize("worker", [False, True])
def test_a_moment_that_came_before_anybody_waited_or_bound_the_room(worker: bool) -> None:
    with pair(worker=worker) as (prefill, decode):
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


@pytest.mark.parametrize("worker", [False, True])
def test_layers_leave_each_at_its_moment(worker: bool) -> None:
    with pair(worker=worker) as (prefill, decode):
        content = fill(prefill)
        _, sender, receiver = published(prefill, decode)
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


@pytest.mark.parametrize("worker", [False, True])
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_fence_ends_what_still_waits_and_a_late_moment_moves_nothing(transport: str, worker: bool) -> None:
    with pair(transport, worker) as (prefill, decode):
        fill(prefill)
        transfer, sender, receiver = published(prefill, decode)
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
        for handle in (sender, receiver):
            assert handle.error is not None
            assert handle.error.code is ErrorCode.ABORTED_BY_CLIENT
            handle.clear()
        assert_at_rest(prefill)
        assert_at_rest(decode)


@pytest.mark.parametrize("over", [False, True])
@pytest.mark.parametrize("worker", [False, True])
def test_a_hand_off_that_ends_in_the_very_turn_of_its_chunk_leaves_nothing_behind(
    worker: bool, over: bool
) -> None:
    """The fence follows the write and its checksum at once; each of them is answered."""
    with pair(worker=worker) as (prefill, decode):
        transfer, sender, receiver = published(prefill, decode)
        ready = prefill.manager.ready()
        if over:
            signal(prefill, ready)
        prefill.manager.post(
            events.SendChunk(sender.key, Span(0, TOKENS), tuple(range(PAGES)), ready=ready),
            events.EndRoom(sender.key, AbortedByClient("the client left").info),
        )
        for side in (prefill, decode):
            side.wait_release(transfer)
        sender.clear()
        receiver.clear()
        assert_at_rest(prefill)
        assert_at_rest(decode)


@pytest.mark.parametrize("worker", [False, True])
def test_a_moment_that_never_comes_ends_the_hand_off_by_its_deadline(worker: bool) -> None:
    with pair(worker=worker) as (prefill, decode):
        transfer = TransferId(new_room(), 0, prefill.me, decode.me)
        sender = expect(prefill.manager, transfer, TOKENS, 1.0)
        receiver = receive(decode.manager, transfer, TOKENS, DEADLINE_S)
        decode.wait(receiver, KVPoll.WAITING_FOR_INPUT)
        receiver.publish(range(TOKENS // prefill.spec.page_tokens))
        sender.send(Span(0, TOKENS), range(PAGES), b"7", ready=prefill.manager.ready())
        for side in (prefill, decode):
            side.wait_release(transfer)
        for handle in (sender, receiver):
            assert handle.error is not None
            assert handle.error.code is ErrorCode.DEADLINE_EXCEEDED
            handle.clear()
        assert_at_rest(prefill)
        assert_at_rest(decode)


@pytest.mark.parametrize("worker", [False, True])
def test_a_call_that_blocks_until_the_moment_holds_up_nobody_else(worker: bool) -> None:
    with pair(worker=worker) as (prefill, decode):
        fill(prefill)
        event = threading.Event()
        _, waiting, there = published(prefill, decode)
        ready = prefill.manager.ready()
        waiting.send(Span(0, TOKENS), range(PAGES), b"7", ready=ready)
        if isinstance(prefill, WorkerSide):
            prefill.worker.signal(ready.number, event.wait)
        else:
            ready.signal(event.wait)
        _, sender, receiver = begin(prefill, decode, TOKENS)
        receiver.publish(range(4, 8))
        sender.send(Span(0, TOKENS), range(PAGES), b"7")
        decode.wait(receiver, KVPoll.SUCCESS)
        prefill.wait(sender, KVPoll.SUCCESS)
        assert waiting.poll() is KVPoll.TRANSFERRING
        event.set()
        sender.clear()
        receiver.clear()
        assert_arrived(prefill, decode, waiting, there)


@pytest.mark.parametrize("worker", [False, True])
def test_what_a_chunk_waits_for_may_fail_and_the_hand_off_with_it(worker: bool) -> None:
    def broken() -> None:
        raise RuntimeError("the device was lost")

    with pair(worker=worker) as (prefill, decode):
        transfer, sender, receiver = published(prefill, decode)
        ready = prefill.manager.ready()
        sender.send(Span(0, TOKENS), range(PAGES), b"7", ready=ready)
        if isinstance(prefill, WorkerSide):
            prefill.worker.signal(ready.number, broken)
        else:
            ready.signal(broken)
        for side in (prefill, decode):
            side.wait_release(transfer)
        for handle in (sender, receiver):
            assert handle.error is not None
            assert handle.error.code is ErrorCode.TRANSFER_FAILED
            assert "the device was lost" in handle.error.text
            handle.clear()
        assert not any(landed(decode))
        assert_at_rest(prefill)


def test_each_callback_runs_once_whoever_comes_first() -> None:
    calls: list[str] = []
    ready = ReadyEvent(1, Waits(ThreadPerCall("waits")))
    ready.then(lambda: calls.append("before"))
    assert not ready.over
    ready.signal()
    ready.end(OutOfCapacity("too late to fail"))
    ready.then(lambda: calls.append("after"))
    assert (calls, ready.over, ready.error) == (["before", "after"], True, None)


def test_so_many_calls_wait_at_once_and_no_more() -> None:
    event, ended = threading.Event(), threading.Semaphore(0)
    waits = Waits(ThreadPerCall("waits", lambda _name, run: parked.append(run)))
    parked: list[object] = []
    for _ in range(MAX_WAITS):
        waits(event.wait, lambda _: ended.release())
    with pytest.raises(OutOfCapacity):
        waits(event.wait, lambda _: None)
    event.set()
    for run in parked:
        run()  # type: ignore[operator]
    assert ended.acquire(timeout=DEADLINE_S)
    waits(event.wait, lambda _: None)
