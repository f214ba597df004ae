"""Leaders whose ranks are processes of their own: what arrives, and what is left of a
hand-off when one of them dies, stands still, or says nonsense."""

from __future__ import annotations

import asyncio
import gc
import os
import queue
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np
import pytest
from kv_sides import (
    DEADLINE_S,
    LIMITS,
    Side,
    ask,
    assert_at_rest,
    assert_succeeds,
    expect,
    joined,
    published,
    receive,
)
from rank_process import Wanted

from segue.kv.config import KVConfig
from segue.kv.errors import (
    BootstrapTimeout,
    ErrorCode,
    ErrorInfo,
    OutOfCapacity,
    PeerLost,
    SegueError,
    TransferFailed,
)
from segue.kv.handles import Change, KVReceiver, KVSender
from segue.kv.ids import (
    KVPoll,
    LeaderId,
    RankCoord,
    RankId,
    Role,
    Span,
    TransferId,
    new_incarnation,
    new_room,
)
from segue.kv.io import LoopIo
from segue.kv.layout.content import Content
from segue.kv.layout.spec import KVShape, PoolSpec
from segue.kv.limits import Limits
from segue.kv.manager import KVManager
from segue.kv.process_link import PingCommand, encode
from segue.kv.protocol import events
from segue.kv.ranks import rank_wire as wire
from segue.kv.ranks import rank_worker
from segue.kv.ranks.rank_link import RankLink
from segue.kv.ranks.rank_listener import RankListener
from segue.kv.ranks.rank_worker import RankWorker
from segue.kv.ranks.worker_rank import WorkerRank
from segue.kv.transport.base import Fenced
from segue.kv.transport.memory.pool_memory import Memory, allocate

SHAPE = KVShape(layers=3, kv_heads=6, k_dim=8, v_dim=8, dtype="float16", item_bytes=2)
PAGES, PAGE = 16, 4
PROCESS = Path(__file__).with_name("rank_process.py")


def specs(ranks: int) -> list[PoolSpec]:
    """The heads of the model shared out evenly."""
    heads = SHAPE.kv_heads // ranks
    return [
        PoolSpec(
            shape=SHAPE,
            coord=RankCoord(tp=rank),
            page_tokens=PAGE,
            pages=PAGES,
            layer_count=SHAPE.layers,
            head_start=rank * heads,
            head_count=heads,
        )
        for rank in range(ranks)
    ]


class RankProcess:
    """A rank's process, our end of its link, and its pool."""

    def __init__(
        self,
        index: int,
        me: LeaderId,
        role: Role,
        spec: PoolSpec,
        transport: str,
        listener: RankListener | None = None,
    ):
        self.memory: Memory = allocate(spec.nbytes)
        ours, theirs = socket.socketpair()
        where = f"@{listener.invitation.hex()}" if listener else str(theirs.fileno())
        fd = self.memory.only.fd
        assert fd is not None
        self.process = subprocess.Popen(
            [sys.executable, str(PROCESS), where, str(fd)],
            stdin=subprocess.PIPE,
            pass_fds=(theirs.fileno(), fd),
        )
        theirs.close()
        assert self.process.stdin is not None
        self.process.stdin.write(msgspec.msgpack.encode(Wanted(index, me, role, spec, transport, LIMITS)))
        self.process.stdin.close()
        if listener:
            ours.close()
            ours = listener.accept([index], 60)[index]
        self.link = RankLink(ours, f"the worker of rank {index}", limits=LIMITS)

    def close(self) -> None:
        self.process.kill()
        self.process.wait(60)
        self.memory.close()


class RankedSide(Side):
    """A manager over ranks in processes of their own."""

    def __init__(
        self,
        role: Role,
        ranks: int,
        transport: str,
        listener: RankListener | None = None,
    ) -> None:
        self.me = LeaderId(new_incarnation())
        self.specs = specs(ranks)
        self.spec = self.specs[0]
        self.processes = [
            RankProcess(i, self.me, role, spec, transport, listener) for i, spec in enumerate(self.specs)
        ]
        self.changes: queue.Queue[Change] = queue.Queue()
        self.lost: queue.Queue[SegueError] = queue.Queue()
        config = KVConfig(
            role=role, model="m", spec=self.specs[0], me=self.me, transports=[transport], limits=LIMITS
        )
        self.manager = KVManager(
            config,
            [WorkerRank(i, each.link) for i, each in enumerate(self.processes)],
            self.changes.put,
            on_rank_lost=self.lost.put,
        )

    def fill(self, rng: np.random.Generator) -> None:
        for each in self.processes:
            each.memory.buffer[:] = rng.bytes(each.memory.nbytes)

    def heads(self, layer: int, value: bool, slot: int) -> bytes:
        """All heads of one token, from the ranks that hold them."""
        found = b""
        for spec, each in zip(self.specs, self.processes, strict=True):
            at = spec.offset(layer, value, slot)
            found += bytes(
                each.memory.buffer[at : at + (spec.v_token_bytes if value else spec.k_token_bytes)]
            )
        return found

    def close(self) -> None:
        self.manager.close()
        for each in self.processes:
            each.close()


@contextmanager
def ranked(
    prefill_ranks: int, decode_ranks: int, transport: str, listener: RankListener | None = None
) -> Iterator[tuple[RankedSide, RankedSide]]:
    decode = RankedSide(Role.DECODE, decode_ranks, transport, listener)
    prefill = RankedSide(Role.PREFILL, prefill_ranks, transport, listener)
    with joined(prefill, decode):
        yield prefill, decode


def hand_over(prefill: RankedSide, decode: RankedSide, tokens: int, chunks: Sequence[int]) -> None:
    _, sender, receiver = published(prefill, decode, tokens, 2)
    for start, end in pairwise((0, *chunks, tokens)):
        sender.send(Span(start, end), range(PAGES), b"7" if end == tokens else None)
    assert_succeeds({decode: receiver, prefill: sender})
    for token in range(tokens):
        for layer in range(SHAPE.layers):
            for value in (False, True):
                sent = prefill.heads(layer, value, token)
                assert decode.heads(layer, value, 2 * PAGE + token) == sent, (token, layer, value)


def assert_soon_at_rest(side: RankedSide) -> None:
    """Nothing is held any more, once the workers have answered that the last epoch is over."""
    until = time.monotonic() + 60.0
    while ask(side, side.manager.sizes)["unanswered"] and time.monotonic() < until:
        pass
    assert_at_rest(side)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize(("prefill_ranks", "decode_ranks"), [(1, 1), (2, 2), (3, 2), (1, 3)])
def test_bytes_arrive_between_worker_processes(transport: str, prefill_ranks: int, decode_ranks: int) -> None:
    with ranked(prefill_ranks, decode_ranks, transport) as (prefill, decode):
        rng = np.random.default_rng(prefill_ranks * 10 + decode_ranks)
        for chunks in ((), (8, 20)):
            prefill.fill(rng)
            decode.fill(rng)
            hand_over(prefill, decode, 33, chunks)
        for side in (prefill, decode):
            assert_soon_at_rest(side)


def reserved(prefill: RankedSide, decode: RankedSide) -> tuple[KVSender, KVReceiver]:
    """A hand-off of which decode has said where to write, and prefill has sent the first half."""
    _, sender, receiver = published(prefill, decode, 32)
    sender.send(Span(0, 16), range(PAGES))
    decode.wait(receiver, KVPoll.TRANSFERRING)
    return sender, receiver


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_the_death_of_one_rank_ends_every_hand_off_of_its_leader_at_once_and_frees_all_pages(
    role: Role, transport: str
) -> None:
    """Long before the deadline of any; the other side hears why, and nothing begins any more."""
    with ranked(2, 2, transport) as (prefill, decode):
        sender, receiver = reserved(prefill, decode)
        victim = prefill if role is Role.PREFILL else decode
        victim.processes[1].process.kill()
        for side, handle in ((prefill, sender), (decode, receiver)):
            side.next(events.Release)
            assert handle.poll() is KVPoll.FAILED
            assert handle.error is not None
        error = victim.lost.get(timeout=60)
        assert isinstance(error, PeerLost)
        assert "the worker of rank 1 has ended" in str(error)
        transfer = TransferId(new_room(), 0, prefill.me, decode.me)
        late = (expect if role is Role.PREFILL else receive)(victim.manager, transfer, 4, DEADLINE_S)
        victim.next(events.Release)
        assert late.error is not None
        assert late.error.code is ErrorCode.PEER_LOST


@pytest.mark.slow
def test_ranks_that_have_connected_by_an_invitation_hand_over_and_die_as_any_others() -> None:
    listener = RankListener()
    with ranked(2, 1, "shm", listener=listener) as (prefill, decode):
        listener.close()
        prefill.fill(np.random.default_rng(1))
        hand_over(prefill, decode, 33, (8,))
        sender, receiver = reserved(prefill, decode)
        prefill.processes[1].process.kill()
        for side, handle in ((prefill, sender), (decode, receiver)):
            side.next(events.Release)
            assert handle.error is not None
        assert sender.error is not None
        assert sender.error.code is ErrorCode.PEER_LOST


@pytest.mark.slow
def test_a_rank_that_stands_still_keeps_pages_until_it_is_known_to_be_dead() -> None:
    """Its silence ends the hand-offs, and proves nothing: it may write when it goes on."""
    with ranked(2, 2, "shm") as (prefill, decode):
        sender, receiver = reserved(prefill, decode)
        stopped = prefill.processes[1].process
        stopped.send_signal(signal.SIGSTOP)
        rank: Any = prefill.manager._ranks[1]
        # Of this one alone: the others may be slow, and are not lost.
        rank._link.limits = msgspec.structs.replace(LIMITS, peer_silence_s=0.6)
        try:
            error = prefill.lost.get(timeout=60)
            assert "has said nothing" in str(error)
            decode.next(events.Quarantined)
            assert sender.poll() is KVPoll.FAILED
            assert receiver.poll() is KVPoll.FAILED
            sizes = prefill.manager.sizes(), decode.manager.sizes()
            assert [each["quarantined"] for each in sizes] == [1, 1]
            assert not any(isinstance(c, events.Release) for c in list(prefill.changes.queue))
        finally:
            stopped.kill()
        prefill.next(events.Release)
        decode.next(events.Release)


@pytest.mark.parametrize(
    ("said", "kind", "text"),
    [
        (b"", PeerLost, "rank 3 has ended"),
        (b"\x00\x00\x00\x02\xc1\xc1", TransferFailed, "unreadable message"),
        (b"\xff\xff\xff\xff", TransferFailed, "a frame of 4294967295 bytes"),
        (None, BootstrapTimeout, "was not ready within"),
    ],
)
def test_a_worker_that_does_not_say_what_it_has_is_refused_typed_and_in_time(
    said: bytes | None, kind: type[SegueError], text: str
) -> None:
    ours, theirs = socket.socketpair()
    if said is not None:
        theirs.sendall(said)
        if not said:
            theirs.close()
    link = RankLink(ours, "rank 3", limits=Limits(connect_s=0.2))
    with pytest.raises(kind, match=text):
        WorkerRank(3, link)
    link.close()
    theirs.close()


class Owner:
    """Notes what a rank answers."""

    def __init__(self) -> None:
        self.heard: list[Any] = []
        self.news = asyncio.Event()

    def note(self, what: Any) -> None:
        self.heard.append(what)
        self.news.set()

    def moved(self, rank: int, transport: str, event: Any) -> None:
        self.note(event)

    def granted(self, rank: int, peer: RankId, epoch: int, error: ErrorInfo | None = None) -> None:
        self.note(("granted", peer, epoch, error))

    def hashed(self, answer: events.ChecksumReady) -> None:
        self.note(answer)

    def lost(self, rank: int, error: SegueError) -> None:
        self.note(error)

    async def until(self, holds: Callable[[], object]) -> None:
        """Wait until it is so."""
        async with asyncio.timeout(60):
            while not holds():
                self.news.clear()
                await self.news.wait()


PEER = RankId(LeaderId(new_incarnation()), 1)
FULL = OutOfCapacity("no grant is free")


def with_raw_worker(use: Callable[[WorkerRank, Owner, socket.socket], Coroutine[Any, Any, None]]) -> None:
    """A rank whose worker is the test, which says and hears every byte."""
    ours, theirs = socket.socketpair()
    theirs.sendall(encode(wire.ReadyAnswer(specs(1)[0], {"shm": b"x"})))
    limits = Limits(max_session_backlog_bytes=2**20)
    rank, owner = WorkerRank(0, RankLink(ours, "the worker", limits=limits)), Owner()

    async def main() -> None:
        await rank.start(owner, LoopIo(asyncio.get_running_loop()))
        theirs.setblocking(False)
        rank._link.io.call(asyncio.sleep(0), 60)  # or what the test says unasked would be nobody's
        await use(rank, owner, theirs)
        await asyncio.to_thread(rank.close)

    asyncio.run(main())
    theirs.close()


@pytest.mark.parametrize("said", [b"\x00\x00\x00\x01\xc1", encode(wire.FailedAnswer(FULL.info))])
def test_a_worker_that_says_nonsense_or_gives_up_is_lost_and_everything_is_answered(said: bytes) -> None:
    async def use(rank: WorkerRank, owner: Owner, worker: socket.socket) -> None:
        transfer = TransferId(5, 0, PEER.leader, PEER.leader)
        rank.write("shm", PEER, 5, 7, ())
        rank.fence("shm", PEER, 5)
        rank.checksum(events.ComputeChecksum(transfer, 0, 8, Content((), ())))
        worker.sendall(said)
        await owner.until(lambda: any(isinstance(heard, SegueError) for heard in owner.heard))
        worker.sendall(encode(PingCommand()))
        await asyncio.sleep(0.05)
        rank.fence("shm", PEER, 6)
        kinds = [type(heard).__name__ for heard in owner.heard]
        assert "Fenced" not in kinds, "it lives, and may still write, whenever that is asked"
        worker.shutdown(socket.SHUT_RDWR)
        await owner.until(lambda: len(owner.heard) == 5)
        kinds = [type(heard).__name__ for heard in owner.heard]
        assert kinds[0] == "WriteFailed"
        assert kinds[2:] == ["Fenced", "Fenced", "ChecksumReady"]
        rank.write("shm", PEER, 6, 9, ())
        assert type(owner.heard[-1]).__name__ == "WriteFailed", "it is answered at once"
        with pytest.raises(SegueError):
            await rank.connect("shm", PEER, b"", 1.0)

    with_raw_worker(use)


def test_a_worker_that_does_not_read_is_given_up_before_it_fills_our_memory() -> None:
    async def use(rank: WorkerRank, owner: Owner, worker: socket.socket) -> None:
        pages = list(range(2**30, 2**30 + 20_000))
        for epoch in range(1, 50):
            rank.grant("shm", PEER, epoch, pages)
        await owner.until(lambda: owner.heard)
        [error] = owner.heard
        assert "does not read" in str(error)

    with_raw_worker(use)


class Refusing:
    """A rank of this process that refuses a grant, and a fence once."""

    spec = specs(1)[0]
    endpoints: ClassVar[dict[str, bytes]] = {}
    checksums = ("words-64",)

    def __init__(self) -> None:
        self.fences = 0
        self.owner: Any = None

    async def start(self, owner: Any, _io: Any) -> None:
        self.owner = owner

    async def connect(self, transport: str, peer: RankId, endpoint: bytes, timeout_s: float) -> None:
        raise ZeroDivisionError("a bug")

    def grant(self, *_: Any) -> bool:
        raise FULL

    def fence(self, transport: str, peer: RankId, epoch: int) -> None:
        self.fences += 1
        if self.fences == 1:
            raise RuntimeError("a bug")
        self.owner.moved(0, transport, Fenced(peer, epoch, True))

    def close(self) -> None: ...


def test_a_link_that_stays_open_keeps_nothing_of_a_worker_that_is_closed() -> None:
    """Else the pool of the rank would stay as long as the link."""
    ours, theirs = socket.socketpair()
    word = msgspec.defstruct("Word", [], tag=True)
    link, rank = RankLink(theirs, "the leader", messages=word), Refusing()
    worker, kept = RankWorker(rank, link, lambda _: None), weakref.ref(rank)  # type: ignore[arg-type]
    worker.start()
    worker.close()
    link.io.call(asyncio.sleep(0), DEADLINE_S)
    del worker, rank
    gc.collect()
    assert kept() is None
    link.close()
    ours.close()


def test_what_a_worker_is_refused_ends_one_hand_off_and_not_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_worker, "FENCE_AGAIN_S", 0.0)
    ours, theirs = socket.socketpair()
    refusing, gone = Refusing(), queue.Queue[SegueError]()
    worker = RankWorker(refusing, RankLink(theirs, "the leader"), gone.put)  # type: ignore[arg-type]
    worker.start()
    rank, owner = WorkerRank(0, RankLink(ours, "rank 0")), Owner()

    async def main() -> None:
        await rank.start(owner, LoopIo(asyncio.get_running_loop()))
        with pytest.raises(SegueError, match="a bug"):
            await rank.connect("shm", PEER, b"", 5.0)
        rank.grant("shm", PEER, 5, [1])
        rank.fence("shm", PEER, 5)
        await owner.until(lambda: len(owner.heard) == 2)
        await asyncio.to_thread(rank.close)

    asyncio.run(main())
    assert owner.heard == [("granted", PEER, 5, FULL.info), Fenced(PEER, 5, True)]
    assert isinstance(gone.get(timeout=60), PeerLost)
    worker.close()


@pytest.mark.slow
def test_descriptors_of_worker_ranks_are_closed() -> None:
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    with ranked(2, 2, "tcp") as (prefill, decode):
        hand_over(prefill, decode, 8, ())
    assert len(os.listdir("/proc/self/fd")) == before
