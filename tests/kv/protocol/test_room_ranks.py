"""The DP rank of prefill that owns a room: no side guesses it."""

from __future__ import annotations

import itertools

import pytest

from segue.kv.errors import DpRankOutOfRange, InvalidRequest
from segue.kv.protocol.room_ranks import FOLLOW_BOOTSTRAP_ROOM, DpRanks


def test_lesson_02_the_prefill_rank_comes_from_the_first_source_that_knows() -> None:
    """All combinations of what is known, against the order that the protocol fixes."""
    sources = itertools.product(
        (None, 3), (1, 4), (FOLLOW_BOOTSTRAP_ROOM, "total_tokens"), (True, False), (True, False)
    )
    for hint, size, balance, declared, asked in sources:
        if size == 1 and hint:
            continue
        if hint is not None:
            expected: int | None = 3
        elif size == 1:
            expected = 0
        elif balance == FOLLOW_BOOTSTRAP_ROOM and not declared and not asked:
            expected = 1
        else:
            expected = None
        dp = DpRanks(size=size, load_balance=balance, force_query=declared)
        assert dp.inferred(2**63 + 5, hint, force_query=asked) == expected


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_that_does_not_exist_is_refused(rank: int) -> None:
    with pytest.raises(DpRankOutOfRange, match="ranks 0 to 3"):
        DpRanks(size=4).inferred(1, rank)
    with pytest.raises(InvalidRequest):
        DpRanks(size=0).inferred(1, rank)
