"""The tables of what has no machine: early destinations and ended hand-offs each have their own end."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest
from handoff_world import expect, peer_up, pool_spec, receive

from segue.kv.errors import ErrorCode, Internal, PeerLost
from segue.kv.ids import Incarnation, KVPoll, LeaderId, Role, TransferId
from segue.kv.limits import Limits
from segue.kv.protocol import events
from segue.kv.protocol.exchange import Exchange
from segue.kv.protocol.messages import Declined, Destination, Failed, Gone
from segue.kv.session.frames import encode_message

ME, ONE, TWO = (LeaderId(Incarnation(letter * 32)) for letter in "abc")
SPEC = pool_spec(8, 4)


def prefill(**limits: float) -> Exchange:
    exchange = Exchange(Role.PREFILL, ME, "prefill", Limits(**limits))  # type: ignore[arg-type]
    for peer in (ONE, TWO):
        exchange.handle(peer_up(peer, SPEC, "tcp"), 0.0)
    return exchange


def destination(transfer: TransferId, epoch: int, budget_s: float = 60.0) -> Destination:
    return Destination(
        transfer=transfer,
        epoch=epoch,
        budget_s=budget_s,
        prompt_tokens=4,
        prefix_tokens=0,
        pages=[0],
        transport="tcp",
        plan_hash=0,
    )


def test_one_peers_loss_leaves_the_early_destinations_of_others() -> None:
    exchange = prefill()
    mine, others = TransferId(1, 0, ME, ONE), TransferId(2, 0, ME, TWO)
    exchange.handle(events.Received(ONE, destination(mine, 1)), 1.0)
    exchange.handle(events.Received(TWO, destination(others, 2)), 1.0)
    exchange.handle(events.PeerDown(ONE, PeerLost("gone").info), 2.0)
    assert exchange.sizes()["early"] == 1
    [*_, phase, release] = exchange.handle(expect(mine, 4, 60.0), 3.0)
    assert phase.error.code is ErrorCode.PEER_LOST
    assert release == events.Release(mine.sent_as)
    opened = exchange.handle(expect(others, 4, 60.0), 3.0)
    assert not any(isinstance(e, events.Phase) and e.phase is KVPoll.FAILED and not e.error for e in opened)
    assert "PEER_LOST" not in str(opened)


def test_what_failed_without_a_session_is_told_to_its_own_peer_only() -> None:
    exchange = prefill()
    mine = TransferId(1, 0, ME, ONE)
    exchange.handle(expect(mine, 4, 60.0), 1.0)
    exchange.handle(events.PeerDown(ONE, PeerLost("gone").info), 2.0)
    again = exchange.handle(peer_up(TWO, SPEC, "tcp"), 4.0)
    assert not [effect for effect in again if isinstance(effect, events.Send)]
    again = exchange.handle(peer_up(ONE, SPEC, "tcp"), 4.0)
    assert [type(effect.message) for effect in again if isinstance(effect, events.Send)] == [Failed]


@pytest.mark.parametrize("placed", [True, False])
def test_a_tombstone_outlives_its_deadline_by_what_may_still_be_under_way(placed: bool) -> None:
    """Without a decode that it was placed for the room alone remembers."""
    exchange = prefill(peer_silence_s=10.0)
    mine = TransferId(1, 0, ME, ONE)
    exchange.handle(expect(mine, 4, 5.0, **({} if placed else {"decode": None})), 1.0)
    exchange.handle(events.EndRoom(mine.sent_as, PeerLost("over").info), 4.9)
    exchange.handle(events.Tick(), 14.8)
    late = exchange.handle(events.Received(ONE, destination(mine, 1)), 14.8)
    assert [type(effect.message) for effect in late if isinstance(effect, events.Send)] == [Failed, Gone]
    exchange.handle(events.Tick(), 15.0)
    assert exchange.phase(mine) is None


@pytest.mark.parametrize("word", [Failed, Declined])
def test_a_late_word_of_an_earlier_attempt_leaves_the_room_of_the_next_one_alone(word: Any) -> None:
    """The first attempt may have had no room here: this leader was full."""
    exchange = prefill()
    first, second = TransferId(1, 0, ME, ONE), TransferId(1, 1, ME, ONE)
    exchange.handle(expect(second, 4, 60.0), 3.0)
    exchange.handle(events.Received(ONE, word(first, PeerLost("late").info)), 4.0)
    assert exchange.open_halves() == [second.sent_as]
    ended = exchange.handle(events.Received(ONE, word(second, PeerLost("late").info)), 4.0)
    assert events.Release(second.sent_as) in ended


@pytest.mark.slow
def test_all_that_is_said_again_on_a_new_session_fits_into_its_backlog() -> None:
    """Else the session would end with its first words, and so would each one after it."""
    limits, pool = Limits(), pool_spec(4096, 4)
    exchange = Exchange(Role.DECODE, ME, "decode", limits, "tcp")
    exchange.handle(peer_up(ONE, pool, "tcp"), 0.0)
    longest = msgspec.structs.replace(Internal("x").info, text="\U0001f4a5" * 100_000)
    rooms = itertools.count(1)
    # As many tombstones as there may be, and as many hand-offs whose pages wait for a proof.
    for published in (False, True):
        for page in range(limits.max_transfers):
            transfer = TransferId(next(rooms), 0, ONE, ME)
            exchange.handle(receive(transfer, 4, 60.0), 0.0)
            if published:
                exchange.handle(events.Publish(transfer.received_as, (page,), 0), 0.0)
            exchange.handle(events.EndRoom(transfer.received_as, longest), 1.0)
    exchange.handle(events.PeerDown(ONE, PeerLost("cut").info), 1.0)
    sizes = exchange.sizes()
    assert (sizes["transfers"], sizes["ended"]) == (limits.max_transfers, limits.max_transfers)
    effects = exchange.handle(peer_up(ONE, pool, "tcp"), 2.0)
    said = [effect.message for effect in effects if isinstance(effect, events.Send)]
    assert len(said) >= 3 * limits.max_transfers
    encoder = msgspec.msgpack.Encoder()
    assert sum(len(encode_message(encoder, message)) for message in said) < limits.max_session_backlog_bytes
