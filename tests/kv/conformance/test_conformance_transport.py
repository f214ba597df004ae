"""One suite that every transport passes: bytes, epochs, fences, refusals and leaks, in one process."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

import msgspec
import numpy as np
import pytest
from conformance_doubles import hold
from conformance_harness import Pair, Side, content, each_head, until

from areas import whole
from layouts import laid_out
from ranks import rank
from segue.kv.errors import ConfigError, PeerRefused, SegueError
from segue.kv.ids import Span
from segue.kv.layout.blocks import CopyBlock
from segue.kv.layout.content import whole_pages
from segue.kv.layout.planner import plan_pair
from segue.kv.layout.spec import KVShape, PoolSpec
from segue.kv.transport.base import Endpoint, Fenced, PeerGone, WriteFailed, Written

MiB = 2**20
Pairs = Callable[..., Pair]


def fill(side: Side, seed: int = 1) -> None:
    side.array[:] = np.random.default_rng(seed).integers(1, 256, side.memory.nbytes, np.uint8)


@pytest.mark.parametrize("nbytes", [1, 7, 4096, 65537, 3 * MiB + 5])
def test_one_range(pair: Pairs, nbytes: int) -> None:
    p = pair(4 * MiB, 5 * MiB)
    fill(p.writer)
    p.grant(3)
    done = p.move(3, 1, CopyBlock(11, MiB + 13, 1, nbytes))
    assert isinstance(done, Written)
    assert (done.peer, done.nbytes) == (p.reader.me, nbytes)
    expected = np.zeros(5 * MiB, np.uint8)
    expected[MiB + 13 : MiB + 13 + nbytes] = p.writer.array[11 : 11 + nbytes]
    assert np.array_equal(p.reader.array, expected)


def test_the_first_and_the_last_byte(pair: Pairs) -> None:
    p = pair(MiB)
    fill(p.writer)
    p.grant(3)
    assert isinstance(p.move(3, 1, CopyBlock(MiB - 1, 0, 1, 1), CopyBlock(0, MiB - 1, 1, 1)), Written)
    assert (p.reader.array[0], p.reader.array[-1]) == (p.writer.array[-1], p.writer.array[0])
    assert np.count_nonzero(p.reader.array) == 2


def test_nothing_to_move_is_written(pair: Pairs) -> None:
    p = pair(MiB)
    p.grant(3)
    assert isinstance(p.move(3, 1), Written)
    assert isinstance(p.move(3, 2, CopyBlock(0, 0, 0, 100), CopyBlock(0, 0, 100, 0)), Written)


def test_thousands_of_ranges(pair: Pairs) -> None:
    p = pair(4 * MiB)
    fill(p.writer)
    p.grant(3)
    rng = random.Random(5)
    blocks, expected = [], np.zeros(4 * MiB, np.uint8)
    for cell in rng.sample(range(4 * MiB // 512), 6000):
        source, length = rng.randrange(4 * MiB - 512), rng.randrange(1, 513)
        blocks.append(CopyBlock(source, cell * 512, 1, length))
        expected[cell * 512 : cell * 512 + length] = p.writer.array[source : source + length]
    done = p.move(3, 1, *blocks)
    assert isinstance(done, Written)
    assert done.nbytes == sum(b.nbytes for b in blocks)
    assert np.array_equal(p.reader.array, expected)


def test_a_block_of_very_many_rows_of_one_byte(pair: Pairs) -> None:
    p = pair(MiB)
    fill(p.writer)
    p.grant(3)
    assert isinstance(p.move(3, 1, CopyBlock(0, 0, 100, 1, 3, 7, 1000, 300, 700)), Written)
    assert np.array_equal(p.reader.array[:700_000:7], p.writer.array[:300_000:3])
    assert np.count_nonzero(p.reader.array) == 100_000


LAYOUTS = [
    ("", 16, "", 16),
    ("", 16, "LKNHB", 4),
    ("LNKBH", 4, "", 16),
    ("LNKBH", 16, "LNKHB", 16),
    ("NLKBH", 4, "LKNBH", 64),
]


@pytest.mark.parametrize(("order", "size", "other_order", "other_size"), LAYOUTS)
def test_exact_bytes_of_a_hand_off(
    pair: Pairs, order: str, size: int, other_order: str, other_size: int
) -> None:
    """Content = f(room, layer, token, head), from pages of one pool into other pages of another."""
    shape = KVShape(layers=4, kv_heads=3, k_dim=8, v_dim=8, dtype="bfloat16", item_bytes=2)
    pools = [
        laid_out(PoolSpec(shape=shape, page_tokens=n, pages=600 // n, layer_count=4, head_count=3), o)
        for o, n in ((order, size), (other_order, other_size))
    ]
    source, target = pools
    plan = plan_pair([source], [target])
    p = pair(source.nbytes, target.nbytes)
    rng, tokens = random.Random(3), 90
    each = [-(-tokens // pool.page_tokens) for pool in pools]
    taken = [rng.sample(range(pool.pages), 3 * n) for pool, n in zip(pools, each, strict=True)]
    rooms = {
        room: [ids[n * i : n * i + n] for ids, n in zip(taken, each, strict=True)]
        for i, room in enumerate((5, 6, 7))
    }
    for room, (pages, into) in rooms.items():
        for key, at in each_head(source, pages, tokens):
            p.writer.array[at] = content(source, room, key)
        p.reader.transport.grant(p.writer.me, room, whole_pages(target, into))
        p.write(room, 0, *plan.blocks(0, 0, Span(0, tokens), pages, into, 0))
    for room, (_, into) in rooms.items():
        assert isinstance(p.writer.outcome(room, 0), Written)
        for key, at in each_head(target, into, tokens):
            assert np.array_equal(p.reader.array[at], content(target, room, key))
    untouched = sorted(set(range(target.pages)) - set(taken[1]))
    for _, at in each_head(target, untouched, target.page_tokens * len(untouched)):
        assert not p.reader.array[at].any()


def move_as_one(pair: Pairs, nbytes: int) -> None:
    p = pair(nbytes)
    words = p.writer.array.view(np.uint64)
    words[:] = np.arange(len(words), dtype=np.uint64)
    del words
    p.grant(3)
    done = p.move(3, 1, CopyBlock(0, 0, 1, nbytes))
    assert isinstance(done, Written)
    assert done.nbytes == nbytes
    assert np.array_equal(p.reader.array, p.writer.array)


def test_64_mebibytes(pair: Pairs) -> None:
    move_as_one(pair, 64 * MiB)


@pytest.mark.slow
def test_one_gibibyte(pair: Pairs) -> None:
    move_as_one(pair, 1024 * MiB)


def test_concurrent_writes_of_many_hand_offs(pair: Pairs) -> None:
    p = pair(8 * MiB)
    fill(p.writer)
    cells = 8 * 32
    cell = 8 * MiB // cells

    def run(worker: int) -> None:
        for i in range(32):
            at = (worker * 32 + i) * cell
            p.write(100 + worker, i, CopyBlock(at, at, 16, cell // 32, cell // 16, cell // 16))

    for worker in range(8):
        p.grant(100 + worker)
    threads = [threading.Thread(target=run, args=(worker,)) for worker in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for worker in range(8):
        for i in range(32):
            assert isinstance(p.writer.outcome(100 + worker, i), Written)
    written = p.reader.array.reshape(-1, 2, cell // 32)
    assert np.array_equal(written[:, 0], p.writer.array.reshape(-1, 2, cell // 32)[:, 0])
    assert not written[:, 1].any()


def test_both_ways_at_once(pair: Pairs) -> None:
    p = pair(MiB)
    fill(p.writer)
    p.reader.transport.connect(p.writer.me, p.writer.endpoint, 60)
    p.grant(3)
    p.writer.transport.grant(p.reader.me, 4, whole(MiB))
    assert isinstance(p.move(3, 1, CopyBlock(0, 0, 1, 1000)), Written)
    p.reader.transport.write(p.writer.me, 4, 9, [CopyBlock(0, MiB - 1000, 1, 1000)])
    assert isinstance(p.reader.outcome(4, 9), Written)
    assert np.array_equal(p.writer.array[-1000:], p.writer.array[:1000])


# ---- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "bad",
    [
        CopyBlock(0, MiB - 10, 1, 11),
        CopyBlock(MiB - 10, 0, 1, 11),
        CopyBlock(0, 0, 3, 100, 100, MiB // 2),
        CopyBlock(0, 0, 3, 100, MiB // 2, 100),
        CopyBlock(-1, 0, 1, 10),
        CopyBlock(0, -1, 1, 10),
        CopyBlock(0, 2**63, 1, 10),
        CopyBlock(0, 0, 2, 100, 100, 50),
        CopyBlock(0, 0, 2**40, 1, 0, 1),
        CopyBlock(0, 100, -1, 10),
        CopyBlock(0, 0, 2, 100, 100, 100, 2, 200, MiB - 100),
        CopyBlock(0, 0, 2, 100, 100, 100, 2, MiB - 100, 200),
        CopyBlock(0, 0, 2, 100, 100, 100, 2, 200, 199),
    ],
)
def test_outside_either_memory_is_refused_before_a_byte_moves(pair: Pairs, bad: CopyBlock) -> None:
    p = pair(MiB)
    fill(p.writer)
    p.grant(3)
    assert isinstance(p.move(3, 1, CopyBlock(0, 0, 1, 5000), bad), WriteFailed)
    assert not p.reader.array.any()
    assert isinstance(p.move(3, 2, CopyBlock(0, 0, 1, 5000)), Written)


def test_an_epoch_that_was_not_granted_does_not_land(pair: Pairs) -> None:
    p = pair(MiB)
    fill(p.writer)
    p.grant(3)
    p.reader.transport.grant(rank("cccc"), 4, whole(MiB))
    for epoch in (4, 5):
        failed = p.move(epoch, 1, CopyBlock(0, 0, 1, 5000))
        assert isinstance(failed, WriteFailed)
        assert failed.refused
    assert not p.reader.array.any()
    assert isinstance(p.move(3, 1, CopyBlock(0, 0, 1, 5000)), Written)


def test_lesson_06_a_late_write_after_an_abort_does_not_land(pair: Pairs) -> None:
    p = pair(MiB)
    fill(p.writer)
    p.grant(3)
    p.grant(4)
    assert isinstance(p.move(3, 1, CopyBlock(0, 0, 1, 100)), Written)
    fenced = p.reader.fence(p.writer.me, 3)
    failed = p.move(3, 2, CopyBlock(0, 4096, 1, 100))
    assert isinstance(failed, WriteFailed)
    assert failed.refused
    assert not p.reader.array[100:].any()
    assert fenced.peer == p.writer.me
    assert isinstance(p.move(4, 3, CopyBlock(0, 8192, 1, 100)), Written)  # others are not touched


def test_lesson_07_an_epoch_ended_at_the_writer_starts_nothing(pair: Pairs) -> None:
    p = pair(MiB)
    fill(p.writer)
    p.grant(3)
    assert p.writer.fence(p.reader.me, 3).proven
    failed = p.move(3, 1, CopyBlock(0, 0, 1, 100))
    assert isinstance(failed, WriteFailed)
    assert not failed.refused
    assert not p.reader.array.any()


def test_fence_is_idempotent_and_answers_for_the_unknown(pair: Pairs) -> None:
    p = pair(MiB)
    p.grant(3)
    for side, peer in ((p.writer, p.reader.me), (p.reader, p.writer.me), (p.writer, rank("cccc"))):
        side.fence(peer, 3)
        side.fence(peer, 3)
        side.fence(peer, 99)
        assert len([e for e in side.log if isinstance(e, Fenced) and e.peer == peer]) == 3


def test_a_write_to_a_stranger_fails(pair: Pairs) -> None:
    p = pair(MiB)
    p.writer.transport.write(rank("cccc"), 3, 1, [CopyBlock(0, 0, 1, 1)])
    failed = p.writer.outcome(3, 1)
    assert isinstance(failed, WriteFailed)
    assert failed.peer == rank("cccc")


def test_a_wrong_key_is_refused(name: str, pair: Pairs) -> None:
    p = pair(MiB)
    stranger = Side(name, rank("cccc"), MiB)
    try:
        address = msgspec.msgpack.decode(p.reader.endpoint.data)
        address["key"] = bytes(len(address["key"]))
        forged = Endpoint(p.reader.endpoint.transport, MiB, msgspec.msgpack.encode(address))
        with pytest.raises(PeerRefused, match="wrong key"):
            stranger.transport.connect(p.reader.me, forged, 60)
        p.reader.transport.grant(stranger.me, 3, whole(MiB))
        stranger.transport.write(p.reader.me, 3, 1, [CopyBlock(0, 0, 1, 1)])
        assert isinstance(stranger.outcome(3, 1), WriteFailed)
        stranger.transport.connect(p.reader.me, p.reader.endpoint, 60)
        stranger.transport.write(p.reader.me, 3, 2, [CopyBlock(0, 0, 1, 1)])
        assert isinstance(stranger.outcome(3, 2), Written)
    finally:
        stranger.close()


@pytest.mark.parametrize(
    "data", [b"", b"\xc1", msgspec.msgpack.encode({"version": 1}), msgspec.msgpack.encode([1])]
)
def test_an_unreadable_endpoint_is_refused(name: str, pair: Pairs, data: bytes) -> None:
    p = pair(MiB)
    with pytest.raises(PeerRefused):
        p.writer.transport.connect(rank("cccc"), Endpoint(name, MiB, data), 60)


def test_another_version_or_transport_is_refused(name: str, pair: Pairs) -> None:
    p = pair(MiB)
    address = msgspec.msgpack.decode(p.reader.endpoint.data)
    newer = msgspec.msgpack.encode({**address, "version": 2})
    for endpoint in (Endpoint(name, MiB, newer), Endpoint("other", MiB, p.reader.endpoint.data)):
        with pytest.raises(PeerRefused):
            p.writer.transport.connect(rank("cccc"), endpoint, 60)


def test_connect_is_idempotent_and_fails_when_nobody_listens(name: str, pair: Pairs) -> None:
    p = pair(MiB)
    p.writer.transport.connect(p.reader.me, p.reader.endpoint, 60)
    gone = Side(name, rank("cccc"), MiB)
    gone.close()
    with pytest.raises(SegueError):
        p.writer.transport.connect(rank("cccc"), gone.endpoint, 60)
    p.grant(3)
    assert isinstance(p.move(3, 1, CopyBlock(0, 0, 1, 1)), Written)


def test_one_memory_once(pair: Pairs) -> None:
    p = pair(MiB)
    with pytest.raises(ConfigError):
        p.writer.transport.register(p.writer.memory)


# ---- fences and ends while bytes move ----------------------------------------------------------------


def test_cancel_in_flight_at_the_writer(pair: Pairs) -> None:
    """After `Fenced` at the writer nothing changes at the destination, whatever the source becomes."""
    p = pair(32 * MiB)
    p.writer.array[:] = 1
    p.grant(3)
    p.grant(4)
    for tag in range(16):
        p.write(3, tag, CopyBlock(0, 0, 1, 32 * MiB))
    p.write(4, 0, CopyBlock(0, 0, 1, 10))
    assert p.writer.fence(p.reader.me, 3).proven
    ends = [p.writer.outcome(3, tag) for tag in range(16)]
    fenced = next(i for i, e in enumerate(p.writer.log) if isinstance(e, Fenced))
    told = [i for i, e in enumerate(p.writer.log) if isinstance(e, Written | WriteFailed) and e.epoch == 3]
    assert len(told) == len(ends) == 16
    assert max(told) < fenced
    assert isinstance(p.writer.outcome(4, 0), Written)
    p.writer.array[:] = 2
    assert not (p.reader.array == 2).any()


def test_fence_in_flight_at_the_receiver(pair: Pairs) -> None:
    """If the receiver's fence is proven, no byte lands after it, while a write is running."""
    p = pair(64 * MiB)
    p.writer.array[:] = 1
    p.grant(3)
    for tag in range(8):
        p.write(3, tag, CopyBlock(0, 0, 1, 64 * MiB))
    if p.reader.fence(p.writer.me, 3).proven:
        p.reader.array[:] = 0
    else:  # one-sided: the writer's own fence is the proof
        assert p.writer.fence(p.reader.me, 3).proven
        p.reader.array[:] = 0
    ends = [p.writer.outcome(3, tag) for tag in range(8)]
    assert isinstance(ends[-1], WriteFailed)
    assert not p.reader.array.any()


def test_close_of_the_writer_in_flight_is_a_proof_for_the_receiver(pair: Pairs) -> None:
    p = pair(64 * MiB)
    p.writer.array[:] = 1
    p.grant(3)
    for tag in range(8):
        p.write(3, tag, CopyBlock(0, 0, 1, 64 * MiB))
    p.writer.transport.close()
    told = len(p.writer.log)
    gone = p.reader.take(PeerGone)
    assert (gone.peer, gone.proven) == (p.writer.me, True)
    p.reader.array[:] = 0
    assert p.reader.fence(p.writer.me, 3).proven
    assert not p.reader.array.any()
    assert len(p.writer.log) == told  # no event after close


def test_close_of_the_receiver_in_flight_fails_the_writes(pair: Pairs) -> None:
    p = pair(16 * MiB)
    p.grant(3)
    for tag in range(8):
        p.write(3, tag, CopyBlock(0, 0, 1, 16 * MiB))
    p.reader.transport.close()
    p.writer.take(PeerGone, peer=p.reader.me)
    for tag in range(8):
        p.writer.outcome(3, tag)
    assert isinstance(p.move(3, 99, CopyBlock(0, 0, 1, 1)), WriteFailed)


def test_a_fence_after_a_path_was_replaced_is_true_for_the_one_before(name: str, pair: Pairs) -> None:
    """Once it is answered, nothing reads our memory for the epoch, by whichever path that was posted. Where
    nothing proves that of the old path, it is not answered."""
    p = pair(16 * MiB)
    p.writer.array[:] = 1
    p.grant(3)
    land = hold(name)
    for tag in range(8):
        p.write(3, tag, CopyBlock(0, 0, 1, 16 * MiB))
    p.reader.transport.close()
    p.writer.take(PeerGone, peer=p.reader.me)
    again = Side(name, p.reader.me, 16 * MiB)
    try:
        p.writer.transport.connect(again.me, again.endpoint, 60)
        p.writer.transport.fence(again.me, 3)
        p.writer.fence(again.me, 4)
        answered = any(isinstance(event, Fenced) and event.epoch == 3 for event in p.writer.log)
        p.writer.array[:] = 2
        land()
        again.transport.grant(p.writer.me, 5, whole(16 * MiB))
        assert isinstance(p.move(5, 0, CopyBlock(0, 0, 1, 10)), Written)
        p.writer.fence(again.me, 5)
        assert not (answered and (p.reader.array == 2).any())
        assert np.count_nonzero(again.array == 2) == 10
    finally:
        again.close()


@pytest.mark.parametrize("thread", ["own", "inner"])
@pytest.mark.parametrize("dead", ["writer", pytest.param("reader", marks=pytest.mark.slow)])
def test_lesson_22_writes_and_fences_are_answered_when_an_io_thread_has_died(
    name: str, pair: Pairs, dead: str, thread: str, hooked: threading.Event
) -> None:
    """At once where the thread was, by its silence at the other side. What is asked afterwards fails."""
    if not name.startswith(("shm", "tcp", "staged_")) or (thread == "inner" and "staged" not in name):
        pytest.skip("no such thread that moves bytes")
    p = pair(16 * MiB)
    side, other = (p.writer, p.reader) if dead == "writer" else (p.reader, p.writer)
    transport = side.transport if thread == "own" else side.transport._inner  # type: ignore[attr-defined]
    p.grant(3)
    for tag in range(4):
        p.write(3, tag, CopyBlock(0, 0, 1, 16 * MiB))
    p.writer.transport.fence(p.reader.me, 4)

    def die() -> None:
        raise KeyError("a bug")

    transport._loop.post(die)  # type: ignore[attr-defined]
    p.write(3, 4, CopyBlock(0, 0, 1, 16 * MiB))
    p.writer.transport.fence(p.reader.me, 5)
    assert hooked.wait(60)
    side.take(PeerGone, peer=other.me)
    for epoch in (3, 6):
        assert p.reader.fence(p.writer.me, epoch).proven or name.startswith("shm")
        p.writer.fence(p.reader.me, epoch)
    for epoch in (4, 5):
        p.writer.take(Fenced, epoch=epoch)
    for tag in range(5):
        p.writer.outcome(3, tag)
    if dead == "writer":
        assert isinstance(p.move(7, 0, CopyBlock(0, 0, 1, 1)), WriteFailed)
    if name.startswith("staged_"):
        for end in (p.writer.transport, p.reader.transport):
            until(lambda end=end: not end.out_slots.held, "a slot of the writer is lost")
        until(lambda: not p.reader.transport.in_slots.held or "shm" in name, "a slot of the reader is lost")


def test_close_is_idempotent_and_ends_everything(name: str) -> None:
    side = Side(name, rank("aaaa"), MiB)
    side.transport.close()
    side.transport.close()
    side.transport.grant(rank("bbbb"), 1, whole(MiB))
    side.transport.fence(rank("bbbb"), 1)
    with pytest.raises(SegueError):
        side.transport.connect(rank("bbbb"), side.endpoint, 1)
    assert side.log == []
    side.memory.close()


def test_lesson_09_the_next_peer_of_the_same_name_works(name: str, pair: Pairs) -> None:
    p = pair(MiB)
    p.grant(7)
    p.writer.transport.close()
    p.reader.take(PeerGone)
    again = Side(name, p.writer.me, MiB)
    try:
        again.array[:] = 9
        again.transport.connect(p.reader.me, p.reader.endpoint, 60)
        again.transport.write(p.reader.me, 7, 0, [CopyBlock(0, 0, 1, 77)])
        assert isinstance(again.outcome(7, 0), WriteFailed)  # the old grants ended with the old peer
        p.grant(8)
        again.transport.write(p.reader.me, 8, 1, [CopyBlock(0, 0, 1, 77)])
        assert isinstance(again.outcome(8, 1), Written)
        assert np.count_nonzero(p.reader.array == 9) == 77
    finally:
        again.close()
