"""Prefill hears where to write when every rank of decode lets it, and not before."""

from __future__ import annotations

import itertools

import pytest
from test_handoff_transitions import Case, kinds

from segue.kv.ids import KVPoll, Role
from segue.kv.protocol import events
from segue.kv.protocol.messages import Destination, Gone

RANKS = 3


def granting(ranks: int = RANKS) -> Case:
    """Decode's engine has reserved pages; none of its ranks has granted yet."""
    w = Case(ranks=(1, ranks))
    w.grants_late = True
    w.open()
    w.publish(w.r)
    assert w.receiver_state == "GRANTING"
    return w


def granted(w: Case, rank: int) -> list[str]:
    return kinds(w.tell(w.decode, events.Granted(w.transfer, rank)))


def told(w: Case) -> int:
    return sum(isinstance(message, Destination) for _, message in w.queues[Role.PREFILL])


@pytest.mark.parametrize("order", list(itertools.permutations(range(RANKS))))
def test_the_last_rank_s_grant_is_what_prefill_is_told_after(order: tuple[int, ...]) -> None:
    w = granting()
    for rank in order[:-1]:
        assert granted(w, rank) == []
        assert granted(w, rank) == [], "one rank twice is not two ranks"
        assert told(w) == 0
    assert granted(w, RANKS) == [], "a rank that the plan does not have"
    assert granted(w, order[-1]) == ["Destination"]
    assert w.receiver_state == "PUBLISHED"
    assert granted(w, 0) == []
    w.grants_late = False
    w.work()
    assert w.r.phases[-1] is KVPoll.SUCCESS
    w.come_to_rest()


def test_a_hand_off_that_ends_before_all_have_granted_is_fenced_at_every_rank() -> None:
    """A grant that comes after its fence would never end: each rank is fenced after it was asked to grant."""
    w = granting()
    granted(w, 1)
    w.abort(w.decode, w.r)
    asked = [(type(e).__name__, e.rank) for _, e in w.log if isinstance(e, events.Grant | events.Fence)]
    assert asked == [("Grant", rank) for rank in range(RANKS)] + [("Fence", rank) for rank in range(RANKS)]
    assert granted(w, 0) == [], "too late"
    assert told(w) == 0
    w.settle()
    w.come_to_rest()


def test_a_rank_that_never_grants_costs_one_deadline_and_no_page() -> None:
    w = granting(1)
    w.advance(1000.0)
    assert w.r.phases[-1] is KVPoll.FAILED
    w.settle()
    w.come_to_rest()


def test_prefill_that_speaks_of_a_hand_off_which_it_was_not_told_of_ends_it() -> None:
    w = granting()
    w.tell(w.decode, events.Received(w.prefill.me, Gone(w.transfer)))
    assert w.r.phases[-1] is KVPoll.FAILED
    assert w.receiver_state == "QUARANTINED"
    w.settle()
    w.come_to_rest()
