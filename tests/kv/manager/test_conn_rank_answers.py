"""Each answer of a rank's process reaches its leader unchanged and once; and the effect of its end."""

from __future__ import annotations

import asyncio
import queue
import socket
from types import SimpleNamespace
from typing import Any

import pytest
from test_worker_rank import FULL, PEER, Owner, Refusing, with_raw_worker

from segue.kv.errors import BootstrapTimeout, PeerLost, SegueError, TransferFailed
from segue.kv.ids import RankId, TransferId
from segue.kv.io import LoopIo
from segue.kv.layout.content import Content
from segue.kv.limits import Limits
from segue.kv.process_link import Frames, PongAnswer, encode
from segue.kv.protocol import events
from segue.kv.ranks import rank_wire as wire
from segue.kv.ranks.local_rank import FENCE_AGAIN_S
from segue.kv.ranks.rank_link import RankLink
from segue.kv.ranks.rank_worker import RankWorker
from segue.kv.ranks.worker_rank import WorkerRank
from segue.kv.transport.base import Fenced, PeerGone, WriteFailed, Written

TRANSFER = TransferId(5, 0, PEER.leader, PEER.leader)
NOTHING = Content((), ())


def asked(tag: int) -> events.ComputeChecksum:
    return events.ComputeChecksum(TRANSFER, 0, tag, NOTHING)


def test_only_what_is_still_unanswered_is_answered_when_the_worker_ends() -> None:
    async def use(rank: WorkerRank, owner: Owner, worker: socket.socket) -> None:
        for tag in (1, 2):
            rank.write("shm", PEER, 5, tag, ())
            rank.fence("shm", PEER, 10 + tag)
            rank.checksum(asked(tag))
        rank.checksum(asked(3))
        rank.write("shm", PEER, 6, 3, ())
        error = TransferFailed("broke").info
        for answer in (
            wire.MovedAnswer("shm", Written(PEER, 5, 1, 640, 0.25)),
            wire.MovedAnswer("shm", Fenced(PEER, 11, False)),
            events.ChecksumReady(TRANSFER, 0, 1, 77),
            wire.MovedAnswer("shm", WriteFailed(PEER, 6, 3, error.exception(), True)),
            wire.MovedAnswer("shm", PeerGone(PEER, True, error.exception())),
        ):
            worker.sendall(encode(answer))
        await owner.until(lambda: len(owner.heard) == 5)
        landed, fenced, hashed, broken, gone = owner.heard
        assert landed == Written(PEER, 5, 1, 640, 0.25)
        assert fenced == Fenced(PEER, 11, False)
        assert hashed == events.ChecksumReady(TRANSFER, 0, 1, 77)
        assert (broken.peer, broken.epoch, broken.tag, broken.refused) == (PEER, 6, 3, True)
        assert (gone.peer, gone.proven, gone.error.info) == (PEER, True, error)
        owner.heard.clear()
        worker.shutdown(socket.SHUT_RDWR)
        await owner.until(lambda: len(owner.heard) == 5)
        failed, lost, fenced, *hashed = owner.heard
        assert (failed.tag, failed.refused, str(failed.error)) == (2, False, str(lost))
        assert isinstance(lost, PeerLost)
        assert fenced == Fenced(PEER, 12, True), "the end of its process is the proof"
        assert [(each.tag, each.error) for each in hashed] == [(2, lost.info), (3, lost.info)], "each of them"
        rank.fence("shm", PEER, 13)
        assert owner.heard[-1] == Fenced(PEER, 13, True)
        rank.write("shm", PEER, 5, 4, ())
        failed = owner.heard[-1]
        assert (failed.epoch, failed.tag, str(failed.error)) == (5, 4, str(lost)), "or nobody would"
        for refused in (lambda: rank.grant("shm", PEER, 6, [1]), lambda: rank.checksum(asked(4))):
            with pytest.raises(PeerLost):
                refused()
        with pytest.raises(PeerLost):
            await rank.connect("shm", PEER, b"", 5.0)

    with_raw_worker(use)


def test_who_waits_for_an_answer_hears_that_the_worker_is_lost_or_that_it_takes_too_long() -> None:
    async def use(rank: WorkerRank, owner: Owner, worker: socket.socket) -> None:
        rank._link.limits = Limits(peer_silence_s=0.05, keepalive_s=0.01)
        with pytest.raises(BootstrapTimeout, match="ConnectCommand in time"):
            await rank.connect("shm", PEER, b"", 0.01)
        rank._link.limits = Limits()
        admitting = asyncio.ensure_future(rank.connect("shm", PEER, b"", 60.0))
        await asyncio.sleep(0)
        worker.sendall(encode(wire.DoneAnswer(1)))  # too late, and of nobody
        worker.sendall(2 * encode(wire.DoneAnswer(2)))  # once is enough
        await admitting
        waiting = asyncio.ensure_future(rank.connect("shm", PEER, b"", 60.0))
        await asyncio.sleep(0)
        worker.sendall(encode(wire.DoneAnswer(3, FULL.info)))
        with pytest.raises(SegueError, match="no grant is free"):
            await waiting
        waiting = asyncio.ensure_future(rank.connect("shm", PEER, b"", 60.0))
        await asyncio.sleep(0)
        worker.shutdown(socket.SHUT_RDWR)
        with pytest.raises(PeerLost):
            await waiting
        assert not rank._asked

    with_raw_worker(use)


def test_a_question_has_its_own_time_and_that_of_a_worker_which_is_slow_to_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits: list[float | None] = []
    timeout = asyncio.timeout

    def noted(delay: float | None) -> asyncio.Timeout:
        waits.append(delay)
        return timeout(delay)

    async def use(rank: WorkerRank, owner: Owner, worker: socket.socket) -> None:
        rank._link.limits = Limits(peer_silence_s=20.0)
        monkeypatch.setattr(asyncio, "timeout", noted)
        asking = [asyncio.ensure_future(rank.connect("shm", PEER, b"", wait_s)) for wait_s in (5.0, 7.0)]
        await asyncio.sleep(0)
        monkeypatch.undo()
        assert waits == [25.0, 27.0]
        for number in (1, 2):
            worker.sendall(encode(wire.DoneAnswer(number)))
        assert await asyncio.gather(*asking) == [None, None]

    with_raw_worker(use)


def test_after_its_close_a_rank_says_nothing_any_more() -> None:
    async def use(rank: WorkerRank, owner: Owner, worker: socket.socket) -> None:
        rank.write("shm", PEER, 5, 1, ())
        await asyncio.to_thread(rank.close)
        await asyncio.to_thread(rank.close)
        await asyncio.sleep(0)
        assert owner.heard == []

    with_raw_worker(use)


class Answering(Refusing):
    """A rank of a worker that answers whatever it is asked, and notes the order of what it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.order: list[str] = []

    async def connect(self, transport: str, peer: RankId, endpoint: bytes, timeout_s: float) -> None:
        self.order.append(f"connect {transport} {endpoint!r} {timeout_s}")

    def write(
        self, transport: str, peer: RankId, epoch: int, tag: int, blocks: Any, ready: Any = None
    ) -> None:
        if tag == 9:
            raise RuntimeError("a bug")
        self.owner.moved(0, transport, Written(peer, epoch, tag, 640, 0.25))

    def grant(self, transport: str, peer: RankId, epoch: int, pages: Any, slot: Any = None) -> bool:
        self.order.append(f"grant {epoch} {pages} {slot}")
        return True

    def fence(self, transport: str, peer: RankId, epoch: int) -> None:
        self.owner.moved(0, transport, Fenced(peer, epoch, epoch == 5))
        if epoch == 6:
            for proven in (True, False):
                self.owner.moved(0, transport, PeerGone(peer, proven, PeerLost("it has ended")))
            self.owner.moved(0, transport, WriteFailed(peer, 6, 8, TransferFailed("cut"), True))

    def checksum(self, effect: events.ComputeChecksum) -> None:
        if effect.tag == 9:
            raise RuntimeError("a bug")
        error = FULL.info if effect.tag == 8 else None
        self.owner.hashed(events.ChecksumReady(effect.transfer, effect.rank, effect.tag, 77, error))

    def close(self) -> None:
        self.order.append("closed")


def test_each_command_has_its_answer_and_what_cannot_be_done_is_answered_too() -> None:
    ours, theirs = socket.socketpair()
    answering, gone = Answering(), queue.Queue[SegueError]()
    worker = RankWorker(answering, RankLink(theirs, "the leader"), gone.put)  # type: ignore[arg-type]
    worker.start()
    rank, owner = WorkerRank(0, RankLink(ours, "rank 0")), Owner()

    async def main() -> None:
        await rank.start(owner, LoopIo(asyncio.get_running_loop()))
        await rank.connect("shm", PEER, b"where", 5.0)
        rank.grant("shm", PEER, 5, [3, 1], 2)
        rank.write("shm", PEER, 5, 1, ())
        rank.write("shm", PEER, 5, 9, ())
        for tag in (7, 8, 9):
            rank.checksum(asked(tag))
        rank.fence("shm", PEER, 5)
        rank.fence("shm", PEER, 6)
        await owner.until(lambda: len(owner.heard) == 11)
        await asyncio.to_thread(rank.close)

    asyncio.run(main())
    answers = sorted(
        (each for each in owner.heard if isinstance(each, events.ChecksumReady)), key=lambda each: each.tag
    )
    assert [(each.tag, each.checksum) for each in answers[:2]] == [(7, 77), (8, 77)]
    assert answers[1].error == FULL.info
    assert answers[2].error is not None
    assert "a bug" in answers[2].error.text
    broken = sorted(
        (each for each in owner.heard if isinstance(each, WriteFailed)), key=lambda each: -each.tag
    )
    assert [(each.tag, each.refused) for each in broken] == [(9, False), (8, True)]
    rest = [
        each for each in owner.heard if not isinstance(each, events.ChecksumReady | WriteFailed | PeerGone)
    ]
    assert rest == [
        ("granted", PEER, 5, None),
        Written(PEER, 5, 1, 640, 0.25),
        Fenced(PEER, 5, True),
        Fenced(PEER, 6, False),
    ]
    assert [each.proven for each in owner.heard if isinstance(each, PeerGone)] == [True, False]
    said = (rank.spec, rank.endpoints, rank.checksums)
    assert said == (answering.spec, answering.endpoints, answering.checksums)
    assert answering.order == [
        "connect shm b'where' 5.0",
        "grant 5 [3, 1] 2",
    ]
    assert isinstance(gone.get(timeout=60), PeerLost)
    worker.close()
    assert gone.empty(), "once"


def alone(rank: Any) -> tuple[RankWorker, list[Any], list[Any]]:
    """A worker without a leader: when it calls again, and when it takes its leader for gone."""
    later, gone = list[Any](), list[Any]()
    io = SimpleNamespace(loop=SimpleNamespace(call_later=lambda *what: later.append(what)))
    link: Any = SimpleNamespace(io=io, release=lambda: None)
    return RankWorker(rank, link, gone.append), later, gone


def test_a_leader_that_is_not_heard_is_not_gone_before_its_end_of_the_channel_is() -> None:
    """Its fences may still come, and writes may land: to end now would leave them without an answer."""
    worker, _, gone = alone(Answering())
    worker._ended(PeerLost("it does not read"), False)
    assert gone == []
    worker._ended(PeerLost("it has ended"), True)
    assert [str(error) for error in gone] == ["it has ended"]


def test_a_fence_that_was_not_taken_is_asked_for_again_by_the_worker_itself() -> None:
    rank, fence = Answering(), wire.FenceCommand("shm", PEER, 5)
    taken: list[int] = []

    def take(transport: str, peer: RankId, epoch: int) -> None:
        taken.append(epoch)
        if len(taken) < 3:
            raise RuntimeError("a bug")

    rank.fence = take  # type: ignore[method-assign]
    worker, later, _ = alone(rank)
    worker._asked(fence)
    for number in (1, 2):
        [(delay, call, command)] = later
        assert (len(taken), delay, command) == (number, FENCE_AGAIN_S, fence)
        later.clear()
        call(command)
    assert (taken, later) == ([5, 5, 5], [])
    worker.close()
    worker._asked(fence)
    assert taken == [5, 5, 5], "its transports are closed, and the link may have another rank"


def test_a_worker_closes_its_link_only_after_its_transports() -> None:
    """The end of the link is the proof that nothing of it is written any more."""
    ours, theirs = socket.socketpair()
    answering = Answering()
    worker = RankWorker(answering, RankLink(theirs, "the leader"), lambda _: None)  # type: ignore[arg-type]
    worker.start()
    ours.settimeout(60)
    ours.recv(64 * 1024)
    closing: list[str] = []

    def close() -> None:
        ours.setblocking(False)
        with pytest.raises(BlockingIOError):
            ours.recv(1)
        closing.append("the channel was open")

    answering.close = close  # type: ignore[method-assign]
    worker.close()
    assert closing == ["the channel was open"]
    ours.settimeout(60)
    assert ours.recv(1) == b""
    ours.close()


# ---- the wire ----------------------------------------------------------------------------------------


def test_messages_are_found_wherever_the_bytes_are_cut() -> None:
    said: list[Any] = [PongAnswer(), wire.DoneAnswer(3), wire.MovedAnswer("shm", Fenced(PEER, 5, True))]
    data = b"".join(encode(message) for message in said)
    for size in (1, 3, 7, len(data)):
        frames = Frames(wire.HandOff)
        found = [message for at in range(0, len(data), size) for message in frames.feed(data[at : at + size])]
        assert found == said
    frames = Frames(wire.HandOff)
    assert frames.feed(data[:-1]) == said[:2]
    assert frames.feed(data[-1:]) == said[2:]
