"""The events that a handle sends to the protocol, and the state that it mirrors."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from segue.kv.clock import VirtualClock
from segue.kv.errors import AbortedByClient, ErrorCode, OutOfCapacity, PeerLost
from segue.kv.handles import KVReceiver, KVSender
from segue.kv.ids import Incarnation, KVPoll, LeaderId, RoomKey, Span
from segue.kv.protocol import events

ONE = RoomKey(5)
DECODE = LeaderId(Incarnation("d" * 32))
METADATA = b"7"


class Owner:
    """Notes what is posted, batch by batch."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.posted: list[tuple[events.Event, ...]] = []
        self.forgotten: list[RoomKey] = []

    def post(self, *batch: events.Event) -> None:
        self.posted.append(batch)

    def forget(self, key: RoomKey) -> None:
        self.forgotten.append(key)


def test_a_sender_says_its_chunks_and_its_metadata_with_the_chunk_it_comes_with() -> None:
    owner = Owner()
    sender = KVSender(owner, ONE)
    pages = [4, 2]
    sender.send(Span(0, 4), pages, layers=1)
    pages.append(9)  # what was said stays what it was
    sender.send(Span(0, 4), pages)
    sender.send(Span(4, 8), pages, METADATA, slot=3)
    sender.finish(METADATA)
    assert owner.posted == [
        (events.SendChunk(ONE, Span(0, 4), (4, 2), None, 1),),
        (events.SendChunk(ONE, Span(0, 4), (4, 2, 9), None, None),),
        (events.SendChunk(ONE, Span(4, 8), (4, 2, 9), 3, None), events.SendMetadata(ONE, METADATA)),
        (events.SendMetadata(ONE, METADATA),),
    ]


def test_a_sender_says_what_becomes_of_its_room() -> None:
    owner = Owner()
    sender = KVSender(owner, ONE)
    full = OutOfCapacity("the pool is full").info
    sender.evict(full)
    sender.place(1, DECODE)
    sender.close()
    evicted, placed, closed = [event for (event,) in owner.posted]
    assert evicted == events.EndRoom(ONE, full, unbound_s=0.0)
    assert placed == events.PlaceRoom(ONE, 1, DECODE)
    assert isinstance(closed, events.EndRoom)
    assert (closed.key, closed.error.code, closed.unbound_s) == (ONE, ErrorCode.ABORTED_BY_CLIENT, None)


def test_a_receiver_says_its_pages() -> None:
    owner = Owner()
    receiver = KVReceiver(owner, ONE)
    receiver.publish(range(2, 4), 16, slot=1)
    receiver.publish([7])
    assert owner.posted == [
        (events.Publish(ONE, (2, 3), 16, 1),),
        (events.Publish(ONE, (7,), 0, None),),
    ]


@pytest.mark.parametrize("kind", [KVSender, KVReceiver])
def test_a_handle_shows_the_last_phase_and_keeps_what_came_with_an_earlier_one(kind: Any) -> None:
    owner = Owner()
    handle = kind(owner, ONE)
    assert (handle.poll(), handle.released, handle.error) == (KVPoll.BOOTSTRAPPING, False, None)
    owner.clock.advance(2.0)
    handle.apply(events.Phase(ONE, KVPoll.TRANSFERRING))
    assert (handle.poll(), handle.changed_at) == (KVPoll.TRANSFERRING, 2.0)
    owner.clock.advance(2.0)
    handle.apply(events.Quarantined(ONE, 3))
    assert (handle.poll(), handle.changed_at, handle.released) == (KVPoll.TRANSFERRING, 2.0, False)
    handle.apply(events.Phase(ONE, KVPoll.SUCCESS, None, METADATA, 0.25, 640))
    assert (handle.metadata, handle.wire_s, handle.nbytes, handle.changed_at) == (METADATA, 0.25, 640, 4.0)
    handle.apply(events.Release(ONE))
    assert handle.released
    assert handle.poll() is KVPoll.SUCCESS


@pytest.mark.parametrize("kind", [KVSender, KVReceiver])
def test_a_handle_that_is_dropped_ends_its_hand_off_unless_that_has_ended(kind: Any) -> None:
    owner = Owner()
    kind(owner, ONE).clear()
    [(abort,)] = owner.posted
    assert isinstance(abort, events.EndRoom)
    assert (abort.error.code, abort.error.room) == (ErrorCode.ABORTED_BY_CLIENT, 5)
    assert owner.forgotten == [ONE]
    for phase in (KVPoll.SUCCESS, KVPoll.FAILED):
        owner.posted.clear()
        handle = kind(owner, ONE)
        error = PeerLost("gone").info if phase is KVPoll.FAILED else None
        handle.apply(events.Phase(ONE, phase, error=error))
        handle.clear()
        assert owner.posted == []
        assert handle.error == error


def test_an_abort_says_the_reason_that_it_is_given() -> None:
    owner = Owner()
    reason = AbortedByClient("the client left").info
    KVSender(owner, ONE).abort(reason)
    assert owner.posted == [(events.EndRoom(ONE, reason),)]


def test_page_ids_may_be_those_of_numpy() -> None:
    owner = Owner()
    pages: Any = np.array([4, 2])
    KVSender(owner, ONE).send(Span(0, 4), pages)
    receiver = KVReceiver(owner, ONE)
    receiver.publish(pages, pages[1])
    assert [msgspec.msgpack.encode(event) for (event,) in owner.posted]
    for pages in (["1"], [1.0]):
        with pytest.raises(TypeError):
            receiver.publish(pages)
