"""The prefix tree against a plain dictionary of prefixes."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from segue.engine.pages import PagePool
from segue.engine.prefix import PrefixTree, allocate_evicting
from segue.kv.errors import Internal, OutOfCapacity

SIZE = 2
tokens = st.lists(st.integers(0, 1), max_size=14)
salts = st.integers(0, 2)


class TreeMachine(RuleBasedStateMachine):
    """`written[page]` is the prefix whose KV a page holds: what a real pool would contain."""

    @initialize(pages=st.integers(4, 40))
    def start(self, pages):
        self.pool = PagePool(pages, SIZE)
        self.tree = PrefixTree(self.pool, SIZE)
        self.written = {}
        self.running = []
        self.quarantined = []

    @rule(prompt=tokens, room=st.integers(0, 4), salt=salts)
    def run(self, prompt, room, salt):
        """Serve a prompt as prefill does: match, allocate the rest, compute it, insert."""
        peeked = self.tree.peek(prompt, salt)
        match = self.tree.match(prompt, salt)
        assert match.tokens == peeked == len(match.pages) * SIZE <= len(prompt)
        for i, page in enumerate(match.pages):
            assert self.written[page] == (salt, *prompt[: (i + 1) * SIZE])
        need = self.pool.pages_for(len(prompt)) - len(match.pages)
        before = (self.pool.free, self.tree.pages, self.tree.evictable)
        try:
            fresh = allocate_evicting(self.pool, self.tree, need, room=room)
        except OutOfCapacity:
            assert self.pool.free + self.tree.evictable < need
            assert before == (self.pool.free, self.tree.pages, self.tree.evictable)
            self.pool.release(match.pages)
            return
        pages = match.pages + fresh
        for i in range(len(match.pages), len(pages)):
            self.written[pages[i]] = (salt, *prompt[: (i + 1) * SIZE])
        added = self.tree.insert(prompt, pages, salt)
        assert added == len(prompt) // SIZE - len(match.pages)
        assert self.tree.peek(prompt, salt) == len(prompt) // SIZE * SIZE
        self.running.append(pages)

    @rule(prompt=tokens, salt=salts)
    def run_without_looking(self, prompt, salt):
        """Compute a prompt whole, as two equal prompts in one batch do: duplicates stay the caller's."""
        need = self.pool.pages_for(len(prompt))
        if need > self.pool.free:
            return
        pages = self.pool.allocate(need)
        for i, page in enumerate(pages):
            self.written[page] = (salt, *prompt[: (i + 1) * SIZE])
        known = self.tree.peek(prompt, salt) // SIZE
        assert self.tree.insert(prompt, pages, salt) == len(prompt) // SIZE - known
        self.running.append(pages)

    @rule(data=st.data())
    def finish(self, data):
        if self.running:
            at = data.draw(st.integers(0, len(self.running) - 1))
            self.pool.release(self.running.pop(at))

    @rule(data=st.data())
    def give_up_a_part(self, data):
        """A lease ends page by page: what follows a page may be in use while the page is not."""
        pages = [page for held in self.running for page in held]
        if pages:
            page = data.draw(st.sampled_from(pages))
            next(held for held in self.running if page in held).remove(page)
            self.pool.release([page])

    @rule(data=st.data())
    def quarantine(self, data):
        if self.running:
            held = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
            self.pool.quarantine(held)
            self.quarantined.append(held)

    @rule()
    def prove(self):
        if self.quarantined:
            self.pool.unquarantine(self.quarantined.pop())

    @rule(wanted=st.integers(0, 10))
    def evict(self, wanted):
        expected = min(wanted, self.tree.evictable)
        free, quarantined = self.pool.free, self.pool.quarantined
        in_use = {page for pages in self.running + self.quarantined for page in pages}
        assert self.tree.evict(wanted) == expected
        assert self.pool.free == free + expected
        assert self.pool.quarantined == quarantined
        assert all(self.pool.references(page) for page in in_use)

    @rule()
    def clear(self):
        self.tree.clear()
        assert self.tree.pages == 0

    @invariant()
    def sound(self):
        self.tree.check_integrity()
        self.pool.check_integrity()
        in_use = {page for pages in self.running for page in pages}
        assert self.pool.used <= len(in_use) + self.tree.pages
        assert self.tree.evictable <= self.tree.pages
        if not self.running and not self.quarantined:
            assert self.pool.used == self.tree.pages == self.tree.evictable

    def teardown(self):
        for pages in self.running:
            self.pool.release(pages)
        for pages in self.quarantined:
            self.pool.unquarantine(pages)
        assert self.tree.evictable == self.tree.pages
        self.tree.clear()
        assert self.pool.free == self.pool.total


TestTree = TreeMachine.TestCase
TestTree.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def cached(tree, pool, prompt):
    pages = pool.allocate(len(prompt) // SIZE)
    tree.insert(prompt, pages)
    pool.release(pages)
    return pages


def test_the_least_recently_used_leaf_goes_first_and_tails_before_heads():
    pool = PagePool(20, SIZE)
    tree = PrefixTree(pool, SIZE)
    cached(tree, pool, [1, 1, 2, 2, 3, 3])
    cached(tree, pool, [5, 5, 6, 6])
    pool.release(tree.match([1, 1, 2, 2, 3, 3]).pages)
    assert tree.evict(1) == 1
    assert tree.peek([5, 5, 6, 6]) == 2
    assert tree.evict(2) == 2
    assert tree.peek([5, 5, 6, 6]) == 0
    assert tree.peek([1, 1, 2, 2, 3, 3]) == 4


@pytest.mark.parametrize("asked", [[1, 1, 2, 2, 9, 9], [1, 1, 2, 2], [1, 1, 2, 2, 3, 3, 4, 4]])
def test_a_prefix_that_was_hit_is_evicted_later_also_where_it_ends_inside_a_node(asked):
    pool = PagePool(8, SIZE)
    tree = PrefixTree(pool, SIZE)
    cached(tree, pool, [1, 1, 2, 2, 3, 3, 4, 4])
    cached(tree, pool, [5, 5, 6, 6, 7, 7, 8, 8])
    pool.release(tree.match(asked).pages)
    assert tree.evict(4) == 4
    assert tree.peek([1, 1, 2, 2, 3, 3, 4, 4]) == 8
    assert tree.peek([5, 5]) == 0
    tree.check_integrity()


def test_pages_in_use_are_not_evicted():
    pool = PagePool(8, SIZE)
    tree = PrefixTree(pool, SIZE)
    cached(tree, pool, [1, 1, 2, 2, 3, 3])
    match = tree.match([1, 1, 2, 2])
    assert tree.evictable == 1
    assert tree.evict(10) == 1
    assert tree.peek([1, 1, 2, 2]) == 4
    pool.release(match.pages)
    assert tree.evictable == 2


def test_a_quarantined_page_is_not_evictable():
    pool = PagePool(4, SIZE)
    tree = PrefixTree(pool, SIZE)
    pages = pool.allocate(1)
    tree.insert([1, 1], pages)
    pool.quarantine(pages)
    assert (tree.evictable, tree.evict(1)) == (0, 0)
    pool.unquarantine(pages)
    assert tree.evict(1) == 1


def test_what_is_evictable_is_counted_once_and_not_at_each_look(monkeypatch):
    """A page in use deep in the tree blocks what leads to it, and nothing beside it."""
    pool = PagePool(20, SIZE)
    tree = PrefixTree(pool, SIZE)
    cached(tree, pool, [1, 1, 2, 2, 3, 3, 4, 4])
    cached(tree, pool, [1, 1, 2, 2, 5, 5])
    held = tree.match([1, 1, 2, 2, 3, 3]).pages
    pool.release(held[:2])  # as one that has pages of its own for the beginning
    assert tree.evictable == 2
    looked = []
    monkeypatch.setattr(tree, "_loose_tail", looked.append)
    assert [tree.evictable for _ in range(100)] == [2] * 100
    assert not looked
    monkeypatch.undo()
    pool.release(held[2:])
    assert tree.evictable == 5
    tree.check_integrity()


def test_integrity_check_sees_a_wrong_count():
    pool = PagePool(4, SIZE)
    tree = PrefixTree(pool, SIZE)
    cached(tree, pool, [1, 1])
    pool.watch = None
    tree.match([1, 1])
    with pytest.raises(Internal, match="recounted 0"):
        tree.check_integrity()


def test_a_pool_has_one_tree():
    pool = PagePool(4, SIZE)
    PrefixTree(pool, SIZE)
    with pytest.raises(ValueError, match="already"):
        PrefixTree(pool, SIZE)


def test_a_tail_shorter_than_a_page_is_ignored():
    pool = PagePool(4, SIZE)
    tree = PrefixTree(pool, SIZE)
    pages = pool.allocate(2)
    assert tree.insert([1, 1, 2], pages) == 1
    assert tree.match([1]).pages == []
    assert tree.match([1, 1, 2]).tokens == 2


def test_lesson_23_and_07_equal_hashes_are_not_equal_tokens():
    """-1 and -2 have one hash in CPython: found by tokens, not by hash."""
    assert hash((-1, -1)) == hash((-2, -2))
    pool = PagePool(4, SIZE)
    tree = PrefixTree(pool, SIZE)
    cached(tree, pool, [-1, -1])
    assert tree.peek([-2, -2]) == 0


def test_integrity_check_sees_a_page_freed_under_the_tree():
    pool = PagePool(4, SIZE)
    tree = PrefixTree(pool, SIZE)
    pages = cached(tree, pool, [1, 1])
    pool.release(pages)
    with pytest.raises(Internal):
        tree.check_integrity()


def test_page_sizes_must_agree():
    with pytest.raises(ValueError):
        PrefixTree(PagePool(4, 16), 8)


def test_a_full_pool_gives_back_more_than_is_missing_so_that_new_pages_lie_together():
    pool = PagePool(64, SIZE)
    tree = PrefixTree(pool, SIZE)
    for prompt in range(64):
        (page,) = pool.allocate(1, room=0)
        tree.insert([prompt] * SIZE, [page])
        pool.release([page])
    taken = allocate_evicting(pool, tree, 1, room=0)
    assert (len(taken), pool.free, tree.pages) == (1, 3, 60)


def test_of_tokens_without_pages_nothing_is_remembered():
    pool = PagePool(20, SIZE)
    tree = PrefixTree(pool, SIZE)
    assert tree.insert([1] * 8, pool.allocate(2)) == 2
    assert tree.peek([1] * 8) == 4
    tree.check_integrity()


@pytest.mark.parametrize("breaks", ["a page's node", "a lease"])
def test_integrity_check_sees_a_page_that_is_found_nowhere_or_is_free(breaks):
    pool = PagePool(20, SIZE)
    tree = PrefixTree(pool, SIZE)
    [page] = cached(tree, pool, [1] * 2)
    other = cached(tree, pool, [2] * 2)
    if breaks == "a lease":
        pool.release([page])
    else:
        tree._node_of[page] = tree._node_of[other[0]]
    with pytest.raises(Internal, match=r"another node|is free"):
        tree.check_integrity()


def test_a_prompt_finds_only_pages_that_came_with_its_salt() -> None:
    pool = PagePool(16, 2)
    tree = PrefixTree(pool, 2)
    prompt, other = [1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 9, 9]
    for salt in (7, 8):
        pages = pool.allocate(3)
        assert tree.insert(prompt, pages, salt) == 3
        pool.release(pages)
    assert [tree.peek(prompt, salt) for salt in (0, 7, 8, 9)] == [0, 6, 6, 0]
    assert tree.match([7, *prompt], 0).tokens == 0, "a salt is no token"
    pages = pool.allocate(3)
    assert tree.insert(other, pages, 7) == 1, "the node of one salt is cut, and not that of the other"
    pool.release(pages)
    assert (tree.peek(other, 7), tree.peek(other, 8), tree.peek(prompt, 7)) == (6, 4, 6)
    tree.check_integrity()
    assert sorted(salt for _, after, _, salt in tree.runs() if after is None) == [7, 8]
    pool.release(tree.match(prompt, 8).pages)
    assert tree.evict(4) == 4
    assert (tree.peek(prompt, 7), tree.peek(prompt, 8)) == (0, 6)
    tree.check_integrity()
