"""A wrong or malicious decode leader costs neither memory nor time of others; a bug in one room cannot harm
the rest. What scripts (`scripts/`) can say of it stands there."""

from __future__ import annotations

import math
import time

import msgspec
import pytest
from script_driver import ERRORS, ROOM, Desk, leader

from segue.kv.errors import MAX_ERROR_TEXT, ErrorCode, TransferFailed
from segue.kv.ids import KVPoll, RoomKey, Span
from segue.kv.protocol import events
from segue.kv.protocol.messages import Declined, Failed, HandoffMessage
from segue.kv.protocol.receptions import Reception, Receptions
from segue.kv.protocol.rooms import Rooms
from segue.kv.ready import ReadyEvent
from segue.kv.session.frames import encode_message

LEFT = ERRORS["left"]
OTHER = RoomKey(8)


def test_the_texts_of_a_peer_are_kept_no_longer_than_ours() -> None:
    desk = Desk("new p")
    p, d = desk.nodes["p"], leader("d")
    long = msgspec.structs.replace(LEFT, text="x" * 10**6, origin="y" * 10**6)
    encoded = msgspec.msgpack.encode(Failed(desk.transfer(p, {}), long))
    desk.tell(p, events.Received(d, msgspec.msgpack.decode(encoded, type=Failed)))
    desk.tell(p, events.Received(d, Declined(desk.transfer(p, {"room": "8"}), long, b"same")))
    desk.do("ExpectRoom decode=d; ExpectRoom room=8 decode=d")
    for room in (ROOM, OTHER):
        error = p.ends[room].error
        assert error is not None
        assert len(error.text) == len(error.origin) == MAX_ERROR_TEXT


@pytest.mark.parametrize(
    "words", ["Destination claim=x*65", "Destination transport=" + "x" * 65, "Declined claim=x*65"]
)
def test_no_word_that_waits_is_longer_than_its_page_list(words: str) -> None:
    desk = Desk("new p")
    message = desk.made(desk.nodes["p"], words.split()[0], words.split()[1:])
    encoded = encode_message(msgspec.msgpack.Encoder(), message)
    with pytest.raises(msgspec.ValidationError, match="length <= 64"):
        msgspec.msgpack.decode(bytes(encoded)[-len(msgspec.msgpack.encode(message)) :], type=HandoffMessage)


def test_the_work_for_a_word_does_not_grow_with_the_number_of_rooms() -> None:
    def took(rooms: int) -> float:
        desk = Desk("new p max_transfers=10000 max_early_destinations=10000")
        p = desk.nodes["p"]
        for number in range(rooms):
            room = RoomKey(10**6 + number)
            p.exchange.handle(events.ExpectRoom(key=room, prompt_tokens=10, deadline=60.0), 0.0)
        words = [desk.made(p, "Destination", [f"room={number}"]) for number in range(1, 101)]
        messages = [events.Received(leader("d"), word) for word in words]
        best = math.inf
        for batch in range(4):
            began = time.perf_counter()
            for message in messages[25 * batch : 25 * batch + 25]:
                p.exchange.handle(message, 0.0)
            best = min(best, time.perf_counter() - began)
        return best

    assert took(8000) < 8 * took(10)


def test_the_effects_of_both_levels_follow_each_other_at_once() -> None:
    """A caller that carries out effects in order never sees a hand-off's end without its room's."""
    p = Desk("new p; ExpectRoom; d says Destination; SendChunk 0-10").nodes["p"]
    kinds = [type(effect) for effect in p.exchange.handle(events.EndRoom(ROOM, LEFT), 0.0)]
    assert kinds[kinds.index(events.HandoffPhase) + 1] is events.Phase
    [write] = p.writes
    partner = Desk("new p").fields(p, "FenceDone", write.transfer, 0)["partner"]
    effects = p.exchange.handle(events.FenceDone(write.transfer, 0, partner, False), 0.0)
    kinds = [type(effect) for effect in effects]
    assert kinds[kinds.index(events.HandoffReleased) + 1] is events.Release


@pytest.mark.parametrize("layers", [None, 1])
def test_a_retained_room_ends_when_its_kv_will_never_be_complete(layers: int | None) -> None:
    """That of a whole chunk, or of its first layers."""
    desk = Desk("new p; ExpectRoom retain_s=5; d says Destination")
    p, ready = desk.nodes["p"], ReadyEvent(1, lambda wait, ended: None)
    desk.tell(p, events.SendChunk(ROOM, Span(0, 10), (4, 5, 6), layers=layers, ready=ready))
    error = TransferFailed("the device has failed")
    ready.end(error)
    desk.tell(p, events.WriteBroken(p.writes[0].transfer, 0, 0, error.info))
    assert p.ends[ROOM].error is not None
    assert p.ends[ROOM].error.code is error.info.code
    desk.do("fenced")
    assert p.releases[ROOM] == 1


# ---- bugs ----------------------------------------------------------------------------------------


def test_what_was_decided_before_a_bug_of_another_room_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    exchange = Desk("new p; ExpectRoom; ExpectRoom room=8").nodes["p"].exchange
    normal = Rooms._late

    def breaks(self: Rooms, room: object) -> object:
        if room is self.rooms[OTHER]:
            raise RuntimeError("a bug")
        return normal(self, room)  # type: ignore[arg-type]

    monkeypatch.setattr(Rooms, "_late", breaks)
    with pytest.raises(RuntimeError):
        exchange.handle(events.Tick(), 60.0)
    assert [effect.key for effect in exchange.decided if isinstance(effect, events.Release)] == [ROOM]


def test_a_room_that_breaks_on_the_end_of_its_hand_off_still_hears_its_release(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    desk = Desk("new p; ExpectRoom; d says Destination")
    normal = Rooms.on_phase

    def breaks(self: Rooms, room: object, effect: events.HandoffPhase) -> None:
        normal(self, room, effect)  # type: ignore[arg-type]
        if effect.phase.terminal:
            raise RuntimeError("a bug")

    monkeypatch.setattr(Rooms, "on_phase", breaks)
    desk.do("EndRoom")
    p = desk.nodes["p"]
    assert (p.ends[ROOM].phase, p.releases) == (KVPoll.FAILED, {ROOM: 1})


@pytest.mark.parametrize("at", [KVPoll.WAITING_FOR_INPUT, KVPoll.TRANSFERRING, KVPoll.FAILED])
def test_a_room_that_breaks_ends_alone_and_is_released(at: KVPoll, monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk("new p")
    p, normal, broke = desk.nodes["p"], Rooms.on_phase, []

    def breaks(self: Rooms, room: object, effect: events.HandoffPhase) -> None:
        if effect.transfer.room == ROOM.room and effect.phase is at and not broke:
            broke.append(at)
            raise RuntimeError("a bug")
        normal(self, room, effect)  # type: ignore[arg-type]

    monkeypatch.setattr(Rooms, "on_phase", breaks)
    for room in (ROOM, OTHER):
        desk.do(f"ExpectRoom room={room.room}; d says Destination room={room.room}")
        if not p.ends[room].phase.terminal:
            desk.do(f"SendChunk 0-10 room={room.room}")
    assert not p.ends[OTHER].phase.terminal
    desk.do("PeerDown d; fenced")
    assert broke
    codes = [error.code for room in (ROOM, OTHER) if (error := p.ends[room].error) is not None]
    assert codes == [ErrorCode.INTERNAL, ErrorCode.PEER_LOST]
    assert p.releases == {ROOM: 1, OTHER: 1}


@pytest.mark.parametrize("at", [KVPoll.WAITING_FOR_INPUT, KVPoll.FAILED])
@pytest.mark.parametrize("published", [True, False])
def test_a_receiver_that_breaks_ends_alone_and_is_released(
    at: KVPoll, published: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk = Desk("new d")
    d, normal, broke = desk.nodes["d"], Receptions._on_phase, []

    def breaks(self: Receptions, reception: Reception, effect: events.HandoffPhase) -> None:
        if reception.key == ROOM and effect.phase is at and not broke:
            broke.append(at)
            raise RuntimeError("a bug")
        normal(self, reception, effect)

    monkeypatch.setattr(Receptions, "_on_phase", breaks)
    for key in (ROOM, OTHER):
        desk.do(f"OpenReceiver room={key.room}")
        if published and d.exchange.phase_of(key) is KVPoll.WAITING_FOR_INPUT:
            desk.do(f"Publish room={key.room}")
    desk.do("at 1 PeerDown p dead=true; fenced")
    assert broke
    assert [d.ends[key].phase for key in (ROOM, OTHER)] == [KVPoll.FAILED] * 2  # and once, before its release
    assert d.releases == {ROOM: 1, OTHER: 1}
