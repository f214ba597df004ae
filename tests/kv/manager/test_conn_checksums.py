"""Checksums over real sessions and transports: a byte that changes after it landed ends both sides."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from kv_sides import (
    PAGES,
    SHAPE,
    Side,
    assert_at_rest,
    assert_fails,
    assert_handed_over,
    published,
    sides,
    spec,
)

from areas import whole
from segue.kv.errors import ErrorCode, OutOfCapacity
from segue.kv.handles import KVReceiver, KVSender
from segue.kv.ids import ChecksumMode, Incarnation, KVPoll, LeaderId, Role, Span, TransferId
from segue.kv.layout.content import Content, checksum
from segue.kv.protocol import events
from segue.kv.protocol.messages import HandoffMessage
from segue.kv.ranks import checksums as conn_digest
from segue.kv.ranks.checksums import INLINE_BYTES, Digester
from segue.kv.session.connection import Connection
from segue.kv.transport.memory.pool_memory import allocate

TOKENS = 33


class Hook:
    """Runs `before` on the bytes of one side, between their landing and their verification."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.before: Callable[[memoryview, Content], None] | None = None
        self.side: Side | None = None
        monkeypatch.setattr(conn_digest, "checksum", self._checksum)

    def _checksum(self, regions: Sequence[memoryview], content: Content) -> int:
        [memory] = regions
        if self.before is not None and self.side is not None and memory.obj is self.side.memory.buffer:
            self.before(memory, content)
        return checksum(regions, content)


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> Hook:
    return Hook(monkeypatch)


def flip(memory: memoryview, content: Content) -> None:
    ranges = content.ranges()
    memory[int(ranges[len(ranges) // 2, 1]) - 1] ^= 0x10


def send_all(prefill: Side, decode: Side, tokens: int = TOKENS) -> tuple[TransferId, KVSender, KVReceiver]:
    prefill.memory.buffer[: prefill.spec.nbytes] = os.urandom(prefill.spec.nbytes)
    transfer, sender, receiver = published(prefill, decode, tokens, 2)
    sender.send(Span(0, 16), range(PAGES))
    sender.send(Span(16, tokens), range(PAGES), b"7")
    return transfer, sender, receiver


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("page_tokens", [4, 8])
def test_a_byte_that_changes_after_landing_fails_both_sides(
    transport: str, page_tokens: int, hook: Hook
) -> None:
    with sides(transport, decode={"spec": spec(page_tokens=page_tokens)}) as (prefill, decode):
        hook.side, hook.before = decode, flip
        transfer, sender, receiver = send_all(prefill, decode)
        said = f"room {transfer.room}, chunk 0 (tokens 0 to 16"
        assert_fails(ErrorCode.CHECKSUM_MISMATCH, said, {prefill: sender, decode: receiver})
        for handle in (sender, receiver):
            assert handle.error is not None
            assert (handle.error.retryable, handle.metadata) == (True, None)
        hook.before = None
        assert_handed_over(prefill, decode, TOKENS, 10)


def test_what_can_be_said_is_said_before_anything_is_hashed(
    hook: Hook, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hashing holds the interpreter's lock: metadata that waits for it comes later by as much; and the
    engine hears of the end before the peer does, not after all that follows from it."""
    told: list[str] = []
    send = Connection.send

    def note(session: Connection, message: HandoffMessage) -> None:
        told.append(f"{session.handshake.me.role.value} {type(message).__name__}")
        send(session, message)

    monkeypatch.setattr(Connection, "send", note)
    with sides() as (prefill, decode):
        hook.side, hook.before = prefill, lambda _memory, _content: told.append("prefill hashes")
        let = decode.manager.io.yield_gil
        monkeypatch.setattr(
            decode.manager.io, "yield_gil", lambda: (told.append("decode's engine runs"), let())
        )
        transfer, sender, _receiver = published(prefill, decode, 16, 2)
        sender.send(Span(0, 16), range(PAGES), b"7")
        for side in (prefill, decode):
            side.wait_release(transfer)
    assert told == [
        "prefill PathChosen",
        "decode Destination",
        "prefill Accepted",
        "prefill Metadata",
        "prefill hashes",
        "prefill ChunkPosted",
        "decode's engine runs",
        "decode Committed",
    ]


@pytest.mark.parametrize("mode", list(ChecksumMode))
@pytest.mark.parametrize("pages", [(4, 4), (4, 8), (8, 4)])
def test_every_mode_and_page_size_hands_over(mode: ChecksumMode, pages: tuple[int, int]) -> None:
    """Prefill's setting decides; decode is set to something else each time and must not care."""
    other = ChecksumMode.OFF if mode is ChecksumMode.FULL else ChecksumMode.FULL
    ours = {"spec": spec(page_tokens=pages[0]), "kv_checksum": mode}
    theirs = {"spec": spec(page_tokens=pages[1]), "kv_checksum": other}
    with sides(prefill=ours, decode=theirs) as (prefill, decode):
        assert_handed_over(prefill, decode, TOKENS, 10)
        assert_handed_over(prefill, decode, TOKENS, 64, prefix=16)
        assert_at_rest(prefill)
        assert_at_rest(decode)


def test_a_sampled_flip_is_seen_where_the_sample_looks(hook: Hook) -> None:
    with sides(prefill={"kv_checksum": ChecksumMode.SAMPLED}) as (prefill, decode):
        hook.side, hook.before = decode, flip
        _, sender, receiver = send_all(prefill, decode)
        assert_fails(ErrorCode.CHECKSUM_MISMATCH, "", {prefill: sender, decode: receiver})


@pytest.mark.parametrize("side", [Role.PREFILL, Role.DECODE])
def test_an_abort_while_bytes_are_read_releases_them_after_the_reading(
    side: Role, hook: Hook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conn_digest, "INLINE_BYTES", 0)  # on the digester's thread, as large chunks are
    reading, go_on = threading.Event(), threading.Event()

    def stall(memory: memoryview, content: Content) -> None:
        reading.set()
        assert go_on.wait(60)

    with sides() as (prefill, decode):
        mine = prefill if side is Role.PREFILL else decode
        hook.side, hook.before = mine, stall
        _, sender, receiver = send_all(prefill, decode)
        assert reading.wait(60)
        handle = sender if side is Role.PREFILL else receiver
        handle.abort()
        while handle.poll() is not KVPoll.FAILED:
            mine.changes.get(timeout=60)
        # The other side learns, and its word comes back, while the reading goes on.
        other, others = (decode, receiver) if side is Role.PREFILL else (prefill, sender)
        while others.poll() is not KVPoll.FAILED:
            other.changes.get(timeout=60)
        mine.manager.io.call(_settle(), 60)
        assert not handle.released
        go_on.set()
        hook.before = None
        assert_fails(ErrorCode.ABORTED_BY_CLIENT, "", {mine: handle, other: others})
        assert_handed_over(prefill, decode, TOKENS, 8)


async def _settle() -> None:
    """Everything that was posted to the loop before has run."""


@pytest.mark.parametrize("inline_bytes", [0, INLINE_BYTES], ids=["on the digester's thread", "at once"])
def test_lesson_22_a_range_that_cannot_be_read_fails_its_hand_off_and_the_thread_lives(
    inline_bytes: int, hook: Hook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conn_digest, "INLINE_BYTES", inline_bytes)

    def broken(memory: memoryview, content: Content) -> None:
        raise ValueError("a bug")

    with sides() as (prefill, decode):
        hook.side, hook.before = decode, broken
        _, sender, receiver = send_all(prefill, decode)
        assert_fails(ErrorCode.INTERNAL, "a bug", {prefill: sender, decode: receiver})
        hook.before = None
        assert_handed_over(prefill, decode, TOKENS, 8)


def digest_of(tag: int, nbytes: int) -> events.ComputeChecksum:
    transfer = TransferId(1, 0, LeaderId(Incarnation("a" * 32)), LeaderId(Incarnation("b" * 32)))
    return events.ComputeChecksum(transfer, 0, tag, whole(nbytes))


def test_the_digester_is_bounded_answers_each_once_and_closes_while_it_reads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = allocate(2 * INLINE_BYTES)
    others = set(threading.enumerate())
    answers: list[events.ChecksumReady] = []
    started, go_on = threading.Event(), threading.Event()

    def slow(regions: Sequence[memoryview], content: Content) -> int:
        started.set()
        assert go_on.wait(60)
        return checksum(regions, content)

    digester = Digester(memory, answers.append, max_waiting=2)
    digester.start()
    digester.submit(digest_of(1, 100))  # small: answered at once, on this thread
    assert [(a.tag, a.error) for a in answers] == [(1, None)]
    monkeypatch.setattr(conn_digest, "checksum", slow)
    large = INLINE_BYTES + 1
    digester.submit(digest_of(2, large))
    assert started.wait(60)
    for tag in (3, 4, 5):
        digester.submit(digest_of(tag, large))
    assert [a.tag for a in answers] == [1, 5]
    assert answers[1].error is not None
    assert answers[1].error.code is OutOfCapacity.code
    closing = threading.Thread(target=digester.close)
    closing.start()
    go_on.set()
    closing.join(60)
    assert not closing.is_alive()
    assert not any(t.name == "segue-digest" for t in set(threading.enumerate()) - others)
    count = len(answers)
    digester.submit(digest_of(6, 100))
    assert len(answers) == count
    memory.close()  # nothing holds the mapping any more


def test_a_large_chunk_goes_through_the_thread_and_is_verified(
    hook: Hook, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk of a large model: more than `INLINE_BYTES` on both sides."""
    monkeypatch.setattr(conn_digest, "INLINE_BYTES", 512 * 2**10)
    seen: list[Any] = []

    def note(memory: memoryview, content: Content) -> None:
        seen.append((threading.current_thread().name, content.nbytes))

    shape = type(SHAPE)(layers=3, kv_heads=8, k_dim=256, v_dim=256, dtype="float16", item_bytes=2)
    theirs = {"spec": spec(page_tokens=8, shape=shape)}
    with sides(prefill={"spec": spec(shape=shape)}, decode=theirs) as (prefill, decode):
        hook.side, hook.before = decode, note
        assert_handed_over(prefill, decode, 40, 40)
        assert seen == [("segue-digest", 40 * shape.token_bytes)]
