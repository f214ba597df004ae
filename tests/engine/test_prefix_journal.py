"""The journal of a prefix tree matches its content."""

from __future__ import annotations

import random

from segue.engine.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEvent,
    net,
    next_hash,
    page_hashes,
)
from segue.engine.pages import PagePool
from segue.engine.prefix import PrefixTree
from segue.engine.prefix_journal import PrefixJournal

SIZE = 4


def chained(parent: int | None, tokens: list[int]) -> list[int]:
    """The hashes of the pages of `tokens`, which follow the page with hash `parent`."""
    hashes: list[int] = []
    for at in range(0, len(tokens), SIZE):
        parent = next_hash(parent, tokens[at : at + SIZE])
        hashes.append(parent)
    return hashes


def follow(there: set[int], events: list[KVEvent]) -> set[int]:
    """`there` after `events`, as a subscriber reckons it, one after the other."""
    for event in events:
        match event:
            case BlockStored():
                assert event.parent_block_hash is None or event.parent_block_hash in there, "parents first"
                assert event.block_hashes == chained(event.parent_block_hash, event.token_ids)
                there = there | set(event.block_hashes)
            case BlockRemoved():
                assert there.issuperset(event.block_hashes)
                there = there - set(event.block_hashes)
            case AllBlocksCleared():
                there = set()
    return there


def held(journal: PrefixJournal) -> set[int]:
    return follow(set(), journal.whole())


def offer(pool: PagePool, tree: PrefixTree, tokens: list[int]) -> None:
    """A sequence that has ended: what the tree does not take is free again."""
    needed = len(tokens) // SIZE
    if needed > pool.free:
        tree.evict(needed - pool.free)
    pages = pool.allocate(needed)
    tree.insert(tokens, pages)
    pool.release(pages)


def test_changes_and_the_whole_agree_over_random_sequences_evictions_and_flushes() -> None:
    rng = random.Random(5)
    pool = PagePool(24, SIZE)
    tree = PrefixTree(pool, SIZE)
    offer(pool, tree, [1] * 8)
    journal = PrefixJournal(tree, SIZE)
    there = held(journal)
    assert there == set(page_hashes([1] * 8, SIZE)), "what was there before is known"
    for _ in range(400):
        offer(pool, tree, [rng.randrange(2) for _ in range(SIZE * rng.randint(1, 6))])
        if rng.random() < 0.1:
            tree.evict(rng.randint(1, 9))
        if rng.random() < 0.02:
            tree.clear()
        if rng.random() < 0.5:
            events = journal.take()
            cleared, stored, removed = net(events)
            assert (set() if cleared else there) - set(removed) | set(stored) == held(journal)
            there = follow(there, events)
            assert there == held(journal)
            assert not journal.pending
    tree.check_integrity()


def test_what_nobody_takes_is_bounded_and_everything_is_told_anew() -> None:
    pool = PagePool(64, SIZE)
    tree = PrefixTree(pool, SIZE)
    journal = PrefixJournal(tree, SIZE, max_blocks=10)
    for first in range(6):
        offer(pool, tree, [first] * 12)
    assert journal.pending, "though nothing of it is kept"
    events = journal.take()
    assert isinstance(events[0], AllBlocksCleared)
    assert not journal.pending
    assert follow({1, 2, 3}, events) == held(journal)
    assert len(held(journal)) == 18
    offer(pool, tree, [9] * 4)
    [event] = journal.take()
    assert isinstance(event, BlockStored)
    for first in range(20, 26):  # more than may wait, but taken in time
        offer(pool, tree, [first] * 12)
        assert all(isinstance(event, BlockStored | BlockRemoved) for event in journal.take())


def test_of_what_came_before_everything_went_nothing_is_told_as_there() -> None:
    before, after = BlockStored([1, 2], None, [0] * 8, SIZE), BlockStored([3], None, [0] * 4, SIZE)
    assert net([before, AllBlocksCleared(), after]) == (True, [3], [])
    assert net([before, BlockRemoved([2]), after]) == (False, [1, 3], [2])


def test_hashes_of_pages_are_those_of_their_salt_also_of_pages_that_were_there_before() -> None:
    pool = PagePool(24, SIZE)
    tree, prompt, longer = PrefixTree(pool, SIZE), [1] * 8, [1] * 16
    pages = pool.allocate(2)
    tree.insert(prompt, pages, 7)
    pool.release(pages)
    journal = PrefixJournal(tree, SIZE)
    assert held_of(journal.whole()) == set(page_hashes(prompt, SIZE, 7))
    for salt in (7, 8, 0):
        pages = pool.allocate(4)
        tree.insert(longer, pages, salt)
        pool.release(pages)
    every = [set(page_hashes(longer, SIZE, salt)) for salt in (7, 8, 0)]
    assert len(set.union(*every)) == 12
    assert held_of(journal.take()) == set.union(*every) - set(page_hashes(prompt, SIZE, 7))
    assert held_of(journal.whole()) == set.union(*every)


def held_of(events: list[KVEvent]) -> set[int]:
    return {block for event in events if isinstance(event, BlockStored) for block in event.block_hashes}
