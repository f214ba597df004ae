"""The inbox of a connection: frames out of bytes, however they come, in memory that follows what has come."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from segue.kv.session.frames import (
    HANDSHAKE_FRAME_BYTES,
    HEADER,
    KIND_MESSAGE,
    KIND_SESSION,
    encode_preamble,
    pack_frame,
)
from segue.kv.session.inbox import ChangedFrame, Inbox, LongFrame
from segue.kv.versions import Versions

LIMIT = 2**20


def opened() -> Inbox:
    inbox = Inbox()
    inbox.max_frame_bytes = LIMIT
    inbox.opened()
    return inbox


def put(inbox: Inbox, data: bytes, most: int = 2**30) -> list[bytes]:
    """The bodies that `data` completes when it comes in pieces of at most `most` bytes."""
    bodies = []
    while data:
        space = inbox.space()
        assert len(space) > 0
        piece = data[: min(len(space), most)]
        space[: len(piece)] = piece
        inbox.add(len(piece))
        data = data[len(piece) :]
        while (frame := inbox.next_frame()) is not None:
            assert frame[0] == KIND_MESSAGE
            bodies.append(bytes(frame[1]))
    return bodies


@settings(deadline=None)
@given(st.lists(st.integers(0, 70_000), max_size=8), st.integers(1, 100_000))
def test_frames_come_out_as_they_went_in(lengths: list[int], most: int) -> None:
    inbox = opened()
    # Of a few bytes at a time there would be too many pieces for one example.
    most = max(most, sum(lengths) // 500)
    bodies = [bytes([i]) * length for i, length in enumerate(lengths)]
    assert put(inbox, b"".join(pack_frame(KIND_MESSAGE, body) for body in bodies), most) == bodies


def test_memory_follows_what_came_and_not_what_was_announced() -> None:
    inbox = opened()
    put(inbox, pack_frame(KIND_MESSAGE, b"first"))
    at_rest = inbox.buffer_bytes
    whole = pack_frame(KIND_MESSAGE, b"x" * LIMIT)
    assert put(inbox, whole[: HEADER.size]) == []
    assert inbox.buffer_bytes == at_rest, "a header alone takes memory"
    came = HEADER.size
    while came < len(whole):
        bodies = put(inbox, whole[came : came + 50_000])
        came = min(len(whole), came + 50_000)
        assert inbox.buffer_bytes <= max(at_rest, 4 * came)
    assert [len(body) for body in bodies] == [LIMIT]
    assert inbox.buffer_bytes == at_rest, "an empty inbox keeps the memory of its largest frame"


@pytest.mark.parametrize("kind", [KIND_SESSION, KIND_MESSAGE])
def test_a_stranger_s_frame_is_small(kind: int) -> None:
    inbox = Inbox()
    assert put(inbox, pack_frame(KIND_MESSAGE, b"x" * HANDSHAKE_FRAME_BYTES)) != []
    with pytest.raises(LongFrame, match=f"{HANDSHAKE_FRAME_BYTES + 1} bytes"):
        put(inbox, pack_frame(kind, b"x" * (HANDSHAKE_FRAME_BYTES + 1))[: HEADER.size])


@pytest.mark.parametrize("bit", range(8 * (HEADER.size + 5)))
def test_no_flipped_bit_gets_through(bit: int) -> None:
    frame = bytearray(pack_frame(KIND_MESSAGE, b"hello"))
    frame[bit // 8] ^= 1 << bit % 8
    with pytest.raises(ChangedFrame):
        put(opened(), bytes(frame))


def test_the_preamble_comes_first_and_once() -> None:
    inbox = Inbox()
    preamble = encode_preamble(Versions(7, 7))
    data = preamble + pack_frame(KIND_MESSAGE, b"next")
    for i in range(len(preamble)):
        assert inbox.preamble() is None
        inbox.space()[:1] = data[i : i + 1]
        inbox.add(1)
    told = inbox.preamble()
    assert told is not None
    assert bytes(told) == preamble
    assert put(inbox, data[len(preamble) :]) == [b"next"]


def test_a_dropped_inbox_keeps_almost_nothing_and_still_has_room_to_read_the_end_into() -> None:
    inbox = opened()
    put(inbox, pack_frame(KIND_MESSAGE, b"x" * 10_000)[:-1])
    inbox.drop()
    assert 0 < inbox.buffer_bytes < 1024
    assert len(inbox.space()) > 0
