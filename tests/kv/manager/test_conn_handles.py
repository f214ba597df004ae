"""What a handle says to the protocol, and what it mirrors of it."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import pytest

from segue.kv.clock import VirtualClock
from segue.kv.errors import AbortedByClient, ErrorCode, InvalidRequest, PeerLost
from segue.kv.handles import KVReceiver, KVSender
from segue.kv.ids import Incarnation, KVPoll, LeaderId, Span, TransferId
from segue.kv.protocol import events
from segue.kv.protocol.messages import Metadata

ONE = TransferId(5, 0, LeaderId(Incarnation("a" * 32)), LeaderId(Incarnation("d" * 32)))
METADATA = Metadata(transfer=ONE, prompt_tokens=8, first_token=7)


class Owner:
    """Notes what is posted, batch by batch."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.posted: list[tuple[events.Event, ...]] = []
        self.forgotten: list[TransferId] = []

    def post(self, *batch: events.Event) -> None:
        self.posted.append(batch)

    def forget(self, transfer: TransferId) -> None:
        self.forgotten.append(transfer)


def test_a_sender_says_its_deadline_its_chunks_and_its_metadata_with_the_chunk_it_comes_with() -> None:
    owner = Owner()
    owner.clock.advance(3.0)
    sender = KVSender(owner, ONE)
    sender.init(8, 20.0)
    sender.announce(7.0)
    pages = [4, 2]
    sender.send(Span(0, 4), pages, layers=1)
    pages.append(9)  # what was said stays what it was
    sender.send(Span(0, 4), pages)
    sender.send(Span(4, 8), pages, METADATA, slot=3)
    sender.finish(METADATA)
    assert owner.posted == [
        (events.OpenSender(ONE, 8, 23.0),),
        (events.AnnounceRoom(ONE, 7.0),),
        (events.SendChunk(ONE, Span(0, 4), (4, 2), None, 1),),
        (events.SendChunk(ONE, Span(0, 4), (4, 2, 9), None, None),),
        (events.SendChunk(ONE, Span(4, 8), (4, 2, 9), 3, None), events.SendMetadata(ONE, METADATA)),
        (events.SendMetadata(ONE, METADATA),),
    ]


def test_a_receiver_says_its_deadline_its_hints_and_its_pages() -> None:
    owner = Owner()
    owner.clock.advance(3.0)
    receiver = KVReceiver(owner, ONE)
    receiver.init(8, 20.0)
    receiver.init(8, 20.0, prefill_dp_rank=0, force_query=True)
    receiver.send_metadata(range(2, 4), 16, slot=1)
    receiver.send_metadata([7])
    assert owner.posted == [
        (events.OpenReceiver(ONE, 8, 23.0),),
        (events.OpenReceiver(ONE, 8, 23.0, hint=0, force_query=True),),
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
    assert isinstance(abort, events.AbortTransfer)
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
    assert owner.posted == [(events.AbortTransfer(ONE, reason),)]


def test_page_ids_may_be_those_of_numpy() -> None:
    owner = Owner()
    pages: Any = np.array([4, 2])
    KVSender(owner, ONE).send(Span(0, 4), pages)
    receiver = KVReceiver(owner, ONE)
    receiver.init(pages[0], 1.0)
    receiver.send_metadata(pages, pages[1])
    assert [msgspec.msgpack.encode(event) for (event,) in owner.posted]
    for pages in (["1"], [1.0]):
        with pytest.raises(TypeError):
            receiver.send_metadata(pages)


@pytest.mark.parametrize("budget_s", [math.nan, math.inf, -math.inf])
def test_a_budget_without_an_end_is_refused(budget_s: float) -> None:
    """The deadline of NaN never passes."""
    owner = Owner()
    for handle in (KVSender(owner, ONE), KVReceiver(owner, ONE)):
        with pytest.raises(InvalidRequest, match="budget_s"):
            handle.init(8, budget_s)
    assert owner.posted == []
