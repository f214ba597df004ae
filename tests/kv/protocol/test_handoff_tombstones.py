"""What is said again on a new session fits into its backlog."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from handoff_world import peer_up, pool_spec, receive
from script_driver import leader

from segue.kv.errors import Internal, PeerLost
from segue.kv.ids import Role, TransferId
from segue.kv.limits import Limits
from segue.kv.protocol import events
from segue.kv.protocol.exchange import Exchange
from segue.kv.session.frames import encode_message

ME, ONE = leader("d"), leader("p")


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
