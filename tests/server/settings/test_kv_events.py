"""Pages of prompts by their hashes, and what is different after some events."""

from __future__ import annotations

import pytest

from segue.engine.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEvent,
    net,
    next_hash,
    page_hashes,
)


def stored(*hashes: int) -> BlockStored:
    return BlockStored(list(hashes), None, [], 4)


@pytest.mark.parametrize(
    ("events", "different"),
    [
        ([], (False, [], [])),
        ([stored(1, 2)], (False, [1, 2], [])),
        ([stored(1, 2), BlockRemoved([1])], (False, [2], [1])),
        ([BlockRemoved([1]), stored(1)], (False, [1], [])),
        ([stored(1), BlockRemoved([2]), AllBlocksCleared()], (True, [], [])),
        ([stored(1), AllBlocksCleared(), stored(3), BlockRemoved([3, 4])], (True, [], [3, 4])),
    ],
)
def test_the_last_word_on_a_page_counts_and_a_clear_forgets_all_before_it(
    events: list[KVEvent], different: tuple[bool, list[int], list[int]]
) -> None:
    assert net(events) == different


def test_a_page_is_known_by_all_tokens_up_to_its_end_and_a_part_of_one_is_none() -> None:
    prompt = list(range(10))
    hashes = list(page_hashes(prompt, 4))
    assert len(hashes) == 2
    assert list(page_hashes(prompt[:8], 4)) == hashes
    assert list(page_hashes(prompt[:7], 4)) == hashes[:1]
    assert list(page_hashes([9, *prompt[1:]], 4))[1] != hashes[1], "what comes before it is in its hash"
    assert hashes == [first := next_hash(None, prompt[:4]), next_hash(first, prompt[4:8])]
