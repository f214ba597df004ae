"""The KV pages of an instance: its pool, and over it the tree of prefixes that lie complete in it."""

from __future__ import annotations

from segue.engine.pages import PagePool
from segue.engine.prefix import PrefixTree, allocate_evicting
from segue.roles.request_state import RequestState


class KVCache:
    """See the module's text. A request's pages, cached or new, are one share each in the pool."""

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        self.tree = PrefixTree(pool, pool.page_tokens)

    @property
    def available(self) -> int:
        """Pages that are free, or would be if nothing were cached."""
        return self.pool.free + self.tree.evictable

    def take(self, count: int, *, after: int | None = None, room: int = 0) -> list[int] | None:
        """`count` pages, emptying unused parts of the prefix tree if need be; None if there are too few."""
        if not self.has(count):
            return None
        return allocate_evicting(self.pool, self.tree, count, after, room)

    def has(self, count: int) -> bool:
        """Whether `take(count)` would succeed now."""
        return count <= self.pool.free or count <= self.available

    def release(self, state: RequestState) -> None:
        """The pages of a request are no longer its own."""
        self.pool.release(state.pages)
        state.pages = []

    def remember(self, state: RequestState, tokens: int) -> None:
        """Offer the whole pages of the request's first `tokens` tokens to the prefix tree."""
        whole = tokens // self.pool.page_tokens
        sequence = (state.prompt + state.output)[: whole * self.pool.page_tokens]
        self.tree.insert(sequence, state.pages[:whole])

    def check_integrity(self, *, at_rest: bool) -> None:
        """Raise AssertionError or Internal with what is wrong, if anything is."""
        self.pool.check_integrity()
        self.tree.check_integrity()
        if at_rest:
            used, held = self.pool.used, self.tree.pages
            assert used == held, f"{used} pages used at rest, {held} of them by the tree"
            loose = self.tree.evictable
            assert loose == held, f"of {held} pages in the tree {held - loose} are shared at rest with nobody"
            assert self.pool.quarantined == 0, f"{self.pool.quarantined} pages quarantined at rest"
