"""The checks of an exchange's tables see each thing that may be wrong with them, and nothing else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from test_handoff_tombstones import destination
from test_handoff_transitions import CLIENT, PROMPT, Case

from segue.kv.errors import Internal
from segue.kv.ids import KVPoll
from segue.kv.limits import Limits
from segue.kv.protocol.exchange import Exchange
from segue.kv.protocol.timers import DeadlineEntry
from segue.kv.protocol.tombstones import ParkedDestination, Tombstone

Break = Callable[[Case, Exchange], object]


def early(w: Case, exchange: Exchange, transfer: object = None) -> None:
    name = w.transfer if transfer is None else w.new_transfer()
    timer = DeadlineEntry(name, 9.0)
    exchange._deadlines.add(timer)
    exchange._tombstones.parked[name] = ParkedDestination(w.decode.me, destination(name, 1), timer)


def over(w: Case, exchange: Exchange, transfer: object = None) -> None:
    name = w.transfer if transfer is None else w.new_transfer()
    timer = DeadlineEntry(name, 9.0)
    exchange._deadlines.add(timer)
    exchange._tombstones.ended[name] = Tombstone(KVPoll.FAILED, CLIENT, timer, True, True)


def both(w: Case, exchange: Exchange) -> None:
    early(w, exchange, "another")
    [(name, parked)] = exchange._tombstones.parked.items()
    exchange._tombstones.ended[name] = Tombstone(KVPoll.FAILED, CLIENT, parked.timer, True, True)
    exchange._deadlines.live += 1  # as if it were a timer of its own


def many(w: Case, exchange: Exchange, add: Callable[[Case, Exchange, object], None]) -> None:
    for _ in range(3):
        add(w, exchange, "another")


BROKEN: list[tuple[str, Break]] = [
    ("cannot be found by its epoch", lambda w, e: e._epochs.clear()),
    (
        "an epoch outlived its transfer",
        lambda w, e: e._epochs.update({(w.decode.me, 99): e._machines[w.transfer]}),
    ),
    ("is live and early", early),
    ("is live and ended", over),
    ("is early and ended", both),
    ("more transfers than", lambda w, e: many(w, e, over)),
    ("more early destinations than", lambda w, e: many(w, e, early)),
    ("the deadline heap and the tables disagree", lambda w, e: setattr(e._deadlines, "live", 9)),
    (
        "the deadline heap and the tables disagree",
        lambda w, e: e._deadlines.add(DeadlineEntry(w.transfer, 1.0)),
    ),
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
    for _ in range(2):
        early(w, exchange, "another")
        over(w, exchange, "another")
    exchange.check_integrity()
    assert w.s is not None
    assert w.s.prompt == PROMPT
