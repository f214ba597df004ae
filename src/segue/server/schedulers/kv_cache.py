"""The KV pages of an instance: its pool, and over it the tree of prefixes that lie complete in it.

Some models keep a state of fixed size beside the KV (`KVShape.state`). A request of such a model also has a
slot for as long as it has pages. The slots are a pool like that of the pages. KV is worth nothing there
without the state at its end, which nobody has kept: nothing goes into the tree.
"""

from __future__ import annotations

from collections.abc import Sequence

from segue.engine.pages import PagePool
from segue.engine.prefix import PrefixTree, allocate_evicting
from segue.server.schedulers.request_state import RequestState


class KVCache:
    """See the module's text. A request's pages, cached or new, are one share each in the pool. `slots` is
    None for a model without a state, else its leases, by slot."""

    def __init__(self, pool: PagePool, slots: int = 0) -> None:
        self.pool = pool
        self.slots = PagePool(slots, 1) if slots else None
        self.tree = PrefixTree(pool, pool.page_tokens)

    @property
    def reusable(self) -> bool:
        """Whether what one request has computed may serve another."""
        return self.slots is None

    @property
    def has_slot(self) -> bool:
        """Whether `take_slot` would succeed now."""
        return self.slots is None or self.slots.free > 0

    def take_slot(self) -> int | None:
        """A slot for the state of a sequence; None where the model keeps none. Raises OutOfCapacity."""
        return None if self.slots is None else self.slots.allocate(1)[0]

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
        """The pages of a request, and its slot, are no longer its own."""
        self.pool.release(state.pages)
        state.pages = []
        if self.slots is not None and state.slot is not None:
            self.slots.release([state.slot])
            state.slot = None

    def quarantine(self, pages: Sequence[int], slot: int | None) -> None:
        """Their owner is gone, and a peer may still write there."""
        self.pool.quarantine(pages)
        if self.slots is not None and slot is not None:
            self.slots.quarantine([slot])

    def unquarantine(self, pages: Sequence[int], slot: int | None) -> None:
        """Nobody writes there any more: they are free."""
        self.pool.unquarantine(pages)
        if self.slots is not None and slot is not None:
            self.slots.unquarantine([slot])

    def remember(self, state: RequestState, tokens: int) -> None:
        """Offer the whole pages of the request's first `tokens` tokens to the prefix tree."""
        if not self.reusable:
            return
        whole = tokens // self.pool.page_tokens
        sequence = (state.prompt + state.output)[: whole * self.pool.page_tokens]
        self.tree.insert(sequence, state.pages[:whole], state.request.cache_salt)

    def check_integrity(self, *, at_rest: bool) -> None:
        """Raise AssertionError or Internal with what is wrong, if anything is."""
        self.pool.check_integrity()
        self.tree.check_integrity()
        if self.slots is not None:
            self.slots.check_integrity()
        if at_rest:
            used, held = self.pool.used, self.tree.pages
            assert used == held, f"{used} pages used at rest, {held} of them by the tree"
            loose = self.tree.evictable
            assert loose == held, f"of {held} pages in the tree {held - loose} are shared at rest with nobody"
            assert self.pool.quarantined == 0, f"{self.pool.quarantined} pages quarantined at rest"
            if (slots := self.slots) is not None:
                assert slots.free == slots.total, f"{slots.total - slots.free} slots held at rest"
