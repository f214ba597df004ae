"""The page pool against a plain model, and its placement policy."""

import subprocess
import sys

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from segue.engine.pages import PagePool, runs
from segue.kv.errors import Internal, OutOfCapacity


class PoolMachine(RuleBasedStateMachine):
    """Leases and holds per page in plain lists; the pool must agree after every step."""

    owned = Bundle("owned")
    held = Bundle("held")

    @initialize(pages=st.integers(1, 60))
    def start(self, pages):
        self.pool = PagePool(pages, 16)
        self.leases = [0] * pages
        self.holds = [0] * pages

    def free_pages(self):
        return [p for p in range(self.pool.total) if not self.leases[p] and not self.holds[p]]

    @rule(
        target=owned,
        n=st.integers(0, 30),
        room=st.none() | st.integers(0, 30),
        after=st.none() | st.integers(0, 70),
    )
    def allocate(self, n, room, after):
        free = self.free_pages()
        if n > len(free):
            with pytest.raises(OutOfCapacity):
                self.pool.allocate(n, after, room)
            return ()
        pages = self.pool.allocate(n, after, room)
        assert len(pages) == len(set(pages)) == n
        assert set(pages) <= set(free)
        if after is not None and n and after + 1 in free and after not in free:
            assert pages[0] == after + 1
        longest = max((count for _, count in runs(free)), default=0)
        if after is None and n <= longest:
            assert len(runs(pages)) <= 1
        for page in pages:
            self.leases[page] = 1
        return tuple(pages)

    @rule(target=owned, pages=owned)
    def share(self, pages):
        if any(not self.leases[p] for p in pages):
            with pytest.raises(Internal):
                self.pool.share(pages)
            return ()
        self.pool.share(pages)
        for page in pages:
            self.leases[page] += 1
        return pages

    @rule(pages=consumes(owned))
    def release(self, pages):
        self.pool.release(pages)
        for page in pages:
            self.leases[page] -= 1

    @rule(target=held, pages=consumes(owned))
    def quarantine(self, pages):
        self.pool.quarantine(pages)
        for page in pages:
            self.leases[page] -= 1
            self.holds[page] += 1
        return pages

    @rule(pages=consumes(held))
    def unquarantine(self, pages):
        self.pool.unquarantine(pages)
        for page in pages:
            self.holds[page] -= 1

    @rule(pages=st.lists(st.integers(-2, 70), min_size=1, max_size=6), verb=st.sampled_from(["r", "q", "u"]))
    def refuse(self, pages, verb):
        """A list that asks too much of any page is refused whole."""
        counts = self.holds if verb == "u" else self.leases
        if all(0 <= p < self.pool.total and pages.count(p) <= counts[p] for p in pages):
            return
        call = {"r": self.pool.release, "q": self.pool.quarantine, "u": self.pool.unquarantine}[verb]
        with pytest.raises(Internal):
            call(pages)

    @invariant()
    def agrees(self):
        self.pool.check_integrity()
        used = sum(1 for lease in self.leases if lease)
        quarantined = sum(1 for a, b in zip(self.leases, self.holds, strict=True) if b and not a)
        assert (self.pool.used, self.pool.quarantined) == (used, quarantined)
        assert self.pool.free + self.pool.used + self.pool.quarantined == self.pool.total
        for page, (lease, hold) in enumerate(zip(self.leases, self.holds, strict=True)):
            assert self.pool.references(page) == lease + hold


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_a_sequence_grows_in_place():
    pool = PagePool(1000, 16)
    first = pool.allocate(10, room=20)
    pool.allocate(10, room=20)
    grown = list(first)
    for _ in range(20):
        grown += pool.allocate(1, after=grown[-1])
    assert len(runs(grown)) == 1


def test_a_new_sequence_leaves_room_behind_a_running_one_without_being_told():
    pool = PagePool(1000, 16)
    pages = [pool.allocate(10) for _ in range(8)]
    for _ in range(30):
        for sequence in pages:
            sequence += pool.allocate(1, after=sequence[-1])
    assert sum(len(runs(sequence)) for sequence in pages) <= 10


def test_a_split_allocation_uses_the_fewest_runs():
    pool = PagePool(100, 16)
    everything = pool.allocate(100)
    pool.release(everything[0:10])
    pool.release(everything[20:40])
    pool.release(everything[50:55])
    pages = pool.allocate(28)
    assert len(runs(pages)) == 2


def test_a_quarantined_page_is_not_given_out_until_its_fence():
    pool = PagePool(4, 16)
    pages = pool.allocate(4)
    pool.quarantine(pages[:2])
    pool.release(pages[2:])
    assert (pool.free, pool.used, pool.quarantined) == (2, 0, 2)
    with pytest.raises(OutOfCapacity):
        pool.allocate(3)
    with pytest.raises(Internal):
        pool.share(pages[:1])
    pool.unquarantine(pages[:2])
    assert len(pool.allocate(4)) == 4


def test_lesson_06_a_page_with_a_late_writer_is_not_free_though_its_last_owner_released_it():
    pool = PagePool(1, 16)
    page = pool.allocate(1)
    pool.share(page)
    pool.quarantine(page)
    pool.release(page)
    assert (pool.free, pool.quarantined) == (0, 1)


def test_a_page_that_two_late_writers_may_reach_is_one_page():
    pool = PagePool(2, 16)
    page = pool.allocate(1)
    pool.share(page)
    pool.quarantine(page * 2)
    assert (pool.free, pool.quarantined) == (1, 1)
    pool.unquarantine(page * 2)
    assert (pool.free, pool.quarantined) == (2, 0)
    pool.check_integrity()


def test_releasing_twice_changes_nothing():
    pool = PagePool(4, 16)
    a, b = pool.allocate(2)
    pool.release([a])
    with pytest.raises(Internal):
        pool.release([b, a])
    assert (pool.free, pool.used) == (3, 1)
    pool.check_integrity()


def test_integrity_check_sees_a_lost_lease():
    pool = PagePool(8, 16)
    pool.allocate(3)
    pool._counts[pool.allocate(1)[0]] = 0
    with pytest.raises(Internal):
        pool.check_integrity()


def test_pages_and_prefix_import_no_torch():
    code = "import sys, segue.engine.pages, segue.engine.prefix; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
