"""The checks of an exchange's tables see each thing that may be wrong with them, and nothing else."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from handoff_world import CLIENT, PROMPT, Case
from test_handoff_transitions import a_destination

from segue.kv.errors import Internal
from segue.kv.ids import KVPoll, TransferId
from segue.kv.limits import Limits
from segue.kv.protocol.exchange import Exchange
from segue.kv.protocol.rooms import Parked, Room, RoomState
from segue.kv.protocol.timers import DeadlineEntry
from segue.kv.protocol.tombstones import Tombstone

Break = Callable[[Case, Exchange], object]


def timer(exchange: Exchange) -> DeadlineEntry:
    exchange._deadlines.add(made := DeadlineEntry(9.0, lambda _: None))
    return made


def early(w: Case, exchange: Exchange, transfer: TransferId | None = None) -> None:
    """A destination waits, by all books, for a room of its own; without `transfer` for the one that is
    bound."""
    name = transfer or w.transfer
    rooms = exchange.rooms
    room = rooms.rooms.get(name.sent_as)
    if room is None:
        room = rooms.rooms[name.sent_as] = Room(name.sent_as)
    rooms._keep(
        room.parked, Parked(w.decode.me, a_destination(name, 0), DeadlineEntry(9.0, lambda _: None), 9.0)
    )


def over(w: Case, exchange: Exchange, transfer: TransferId | None = None) -> None:
    name = transfer or w.transfer
    tombstone = Tombstone(KVPoll.FAILED, CLIENT, timer(exchange), opened=True, ended_by_peer=True)
    exchange._tombstones.ended[name] = tombstone


def both(w: Case, exchange: Exchange) -> None:
    name = w.new_transfer()
    early(w, exchange, name)
    over(w, exchange, name)


def many(w: Case, exchange: Exchange, add: Callable[[Case, Exchange, TransferId], None]) -> None:
    for _ in range(4):
        add(w, exchange, w.new_transfer())


def bound(exchange: Exchange) -> Room:
    [room] = exchange.rooms.rooms.values()
    return room


def unheld(w: Case, exchange: Exchange) -> None:
    room = bound(exchange)
    room.machine, room.state = None, RoomState.EXPECTED
    room.holding.clear()


BROKEN: list[tuple[str, Break]] = [
    ("cannot be found by its epoch", lambda w, e: e._epochs.clear()),
    (
        "an epoch outlived its transfer",
        lambda w, e: e._epochs.update({(w.decode.me, 99): e.machines[w.transfer]}),
    ),
    ("is live and early", early),
    ("is live and ended", over),
    ("is early and ended", both),
    ("more tombstones than", lambda w, e: many(w, e, over)),
    ("more early destinations than", lambda w, e: many(w, e, early)),
    ("the counts of parked destinations disagree", lambda w, e: setattr(e.rooms, "parked", 1)),
    ("the counts of parked destinations disagree", lambda w, e: setattr(e.rooms, "parked_pages", 1)),
    ("2 rooms are counted as open", lambda w, e: setattr(e.rooms, "open", 2)),
    ("1 rooms are counted as closed", lambda w, e: e.rooms._closed.update({w.transfer.sent_as: None})),
    ("more hand-offs than", lambda w, e: setattr(e.rooms, "open", 3)),
    ("belongs to no room or receiver", unheld),
    ("is held and has no machine", lambda w, e: bound(e).holding.add(w.new_transfer())),
    ("does not know that its machine holds pages", lambda w, e: bound(e).holding.clear()),
    ("is BOUND with machine None", lambda w, e: setattr(bound(e), "machine", None)),
    ("is BOUND and its engine has None", lambda w, e: setattr(bound(e), "expected", None)),
    ("is BOUND in phase FAILED", lambda w, e: setattr(bound(e), "phase", KVPoll.FAILED)),
    ("has no deadline", lambda w, e: e._deadlines.cancel(bound(e).timer)),
    ("the deadline heap and the tables disagree", lambda w, e: setattr(e._deadlines, "live", 9)),
    ("the deadline heap and the tables disagree", lambda w, e: timer(e)),
]


@pytest.mark.parametrize(("text", "breaks"), BROKEN, ids=[text for text, _ in BROKEN])
def test_each_thing_that_is_wrong_with_the_tables_is_named(text: str, breaks: Break) -> None:
    w = Case(limits=Limits(max_transfers=2, max_early_destinations=2)).waiting()
    exchange = w.prefill.exchange
    exchange.check_integrity()
    breaks(w, exchange)
    with pytest.raises(Internal, match=text):
        exchange.check_integrity()


def test_as_many_as_there_may_be_are_not_too_many() -> None:
    w = Case(limits=Limits(max_transfers=2, max_early_destinations=2)).waiting()
    exchange = w.prefill.exchange
    early(w, exchange, w.new_transfer())
    for _ in range(2):
        over(w, exchange, w.new_transfer())
    early(w, exchange, msgspec.structs.replace(w.transfer, attempt=1))
    exchange.check_integrity()
    assert w.s.prompt == PROMPT
