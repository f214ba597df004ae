"""The checks of a role's books see what is wrong with them, at rest and while something runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from pair import FRONT, Pair
from test_roles_admission import finish, made, step, submitted

from segue.kv.errors import Internal
from segue.server.schedulers.unified import UnifiedScheduler


def rested() -> UnifiedScheduler:
    """One that has served a request: two pages are cached."""
    scheduler = made()
    scheduler.submit(FRONT, submitted("r", list(range(9)), 2), 0.0)
    finish(scheduler)
    assert scheduler.cache.tree.pages == 2
    return scheduler


AT_REST: list[tuple[str, Callable[[UnifiedScheduler], Any]]] = [
    ("3 pages used at rest, 2 of them by the tree", lambda s: s.cache.pool.allocate(1)),
    ("shared at rest with nobody", lambda s: s.cache.tree.match(list(range(8)))),
    ("1 pages quarantined at rest", lambda s: s.cache.pool.quarantine(s.cache.pool.allocate(1))),
]


@pytest.mark.parametrize(("text", "breaks"), AT_REST, ids=[text for text, _ in AT_REST])
def test_a_page_that_is_still_held_at_rest_is_seen_and_is_nothing_while_a_request_is_there(
    text: str, breaks: Callable[[UnifiedScheduler], Any]
) -> None:
    scheduler = rested()
    breaks(scheduler)
    with pytest.raises(AssertionError, match=text):
        scheduler.check_integrity()
    scheduler.submit(FRONT, submitted("runs", [1], 9), 0.0)
    step(scheduler)
    scheduler.check_integrity()


def test_a_slot_that_is_still_held_at_rest_is_seen() -> None:
    pair = Pair(slots=(2, 2), rests=False)
    cache = pair.decode.scheduler.cache
    pair.decode.scheduler.check_integrity()
    assert cache.take_slot() is not None
    with pytest.raises(AssertionError, match="1 slots held at rest"):
        pair.decode.scheduler.check_integrity()


def test_tables_of_requests_that_differ_are_seen() -> None:
    scheduler = made()
    scheduler.submit(FRONT, submitted("r", [1], 2), 0.0)
    scheduler.check_integrity()
    state = scheduler.admission.by_seq.pop(1)
    with pytest.raises(AssertionError, match="tables of requests differ"):
        scheduler.check_integrity()
    scheduler.admission.by_seq[1] = scheduler.admission.by_seq[2] = state
    with pytest.raises(AssertionError, match="tables of requests differ"):
        scheduler.check_integrity()


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize(("what", "count"), [("pool", "_free"), ("slots", "_free"), ("tree", "_evictable")])
def test_books_of_pages_and_of_slots_that_do_not_add_up_are_seen(what: str, count: str, side: str) -> None:
    scheduler = getattr(Pair(slots=(2, 2), rests=False), side).scheduler
    scheduler.check_integrity()
    books = getattr(scheduler.cache, what)
    setattr(books, count, getattr(books, count) + 1)
    with pytest.raises(Internal):
        scheduler.check_integrity()
