"""The heap of deadlines against a plain list: nothing live is lost, whatever is cancelled and compacted."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from segue.kv.protocol.timers import DeadlineEntry, Deadlines

STEP = st.one_of(
    st.tuples(st.just("add"), st.integers(0, 9)),
    st.tuples(st.just("cancel"), st.integers(0, 99)),
    st.tuples(st.just("cancel"), st.integers(0, 99)),
    st.tuples(st.just("pop"), st.integers(0, 9)),
    st.tuples(st.just("look"), st.just(0)),
)


def timer(at: float) -> DeadlineEntry:
    return DeadlineEntry(at, lambda _: None)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(steps=st.lists(STEP, min_size=20, max_size=120), slack=st.sampled_from([0, 1, 4]))
def test_deadlines_are_those_of_a_list(steps: list[tuple[str, int]], slack: int) -> None:
    deadlines = Deadlines()
    deadlines.SLACK = slack  # type: ignore[misc]  # so that a short sequence compacts often
    made: list[DeadlineEntry] = []
    live: list[DeadlineEntry] = []  # in the order in which they were added
    for what, n in steps:
        if what == "add":
            made.append(timer(float(n)))
            live.append(made[-1])
            deadlines.add(made[-1])
            assert len(deadlines) <= slack + 2 * len(live)
        elif what == "cancel" and made:
            chosen = live[n % len(live)] if live and n < 90 else made[n % len(made)]
            deadlines.cancel(chosen)
            live = [timer for timer in live if timer is not chosen]
        elif what == "pop":
            due = min((t for t in live if t.at <= n), key=lambda t: t.at, default=None)
            assert deadlines.pop_due(float(n)) is due
            live = [timer for timer in live if timer is not due]
        elif what == "look":
            assert deadlines.next() == min((t.at for t in live), default=None)
        assert deadlines.live == len(live)
        assert all(t.live for t in live)
    for due in sorted(live, key=lambda t: t.at):
        assert deadlines.pop_due(9.0) is due
    assert deadlines.pop_due(9.0) is None


@pytest.mark.parametrize("seed", range(8))
def test_after_a_compaction_the_earliest_timer_is_still_the_first(seed: int) -> None:
    """A heap without some of its entries is no heap."""
    rng, deadlines, made = random.Random(seed), Deadlines(), []
    for _ in range(300):
        made.append(timer(rng.random()))
        deadlines.add(made[-1])
    for each in rng.sample(made, 280):
        deadlines.cancel(each)
    deadlines.add(last := timer(2.0))
    assert len(deadlines) == 21, "it was compacted"
    left = sorted((each for each in [*made, last] if each.live), key=lambda each: each.at)
    assert [deadlines.pop_due(3.0) for _ in left] == left
