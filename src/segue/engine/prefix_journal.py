"""A prefix tree's pages by their hashes, and what has happened to them since somebody asked last. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from segue.engine.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent, next_hash
from segue.engine.prefix import PrefixTree


class PrefixJournal:
    """Hears of every page that `tree` takes and gives back, from now on. One thread only, the tree's.

    At most `max_blocks` blocks wait to be taken. Beyond that they are dropped, and what is taken next is
    everything anew.
    """

    def __init__(self, tree: PrefixTree, page_tokens: int, max_blocks: int = 65536) -> None:
        self._tree = tree
        self._page_tokens = page_tokens
        self._max_blocks = max_blocks
        self._hash_of: dict[int, int] = {}
        self._events: list[KVEvent] = []
        self._blocks = 0
        self._dropped = False
        for run in tree.runs():
            self._hash(*run)
        tree.journal = self

    @property
    def pending(self) -> bool:
        """Something has happened."""
        return self._dropped or bool(self._events)

    def take(self) -> list[KVEvent]:
        """The events since the last call, in order."""
        events = [AllBlocksCleared(), *self.whole()] if self._dropped else self._events
        self._events, self._blocks, self._dropped = [], 0, False
        return events

    def whole(self) -> list[KVEvent]:
        """All that is there, each page after its parent."""
        found: list[KVEvent] = []
        for pages, after, tokens, _ in self._tree.runs():
            hashes = [self._hash_of[page] for page in pages]
            parent = None if after is None else self._hash_of[after]
            found.append(BlockStored(hashes, parent, list(tokens), self._page_tokens))
        return found

    # ---- what the tree says ---------------------------------------------------------------------

    def stored(self, pages: Sequence[int], after: int | None, tokens: Sequence[int], salt: int) -> None:
        """The tree has taken `pages`, which hold `tokens` and follow the page `after`, or begin a prompt of
        `salt`."""
        hashes = self._hash(pages, after, tokens, salt)
        parent = None if after is None else self._hash_of[after]
        self._add(BlockStored(hashes, parent, list(tokens), self._page_tokens), len(pages))

    def removed(self, pages: Sequence[int]) -> None:
        """The tree has given `pages` back."""
        self._add(BlockRemoved([self._hash_of.pop(page) for page in pages]), len(pages))

    def cleared(self) -> None:
        """The tree is empty."""
        self._hash_of.clear()
        # Events that were not taken describe blocks that are gone.
        self._events, self._blocks = [AllBlocksCleared()], 1

    def _hash(self, pages: Sequence[int], after: int | None, tokens: Sequence[int], salt: int) -> list[int]:
        size, hashes = self._page_tokens, list[int]()
        parent = salt if after is None else self._hash_of[after]
        for index, page in enumerate(pages):
            parent = self._hash_of[page] = next_hash(parent, tokens[index * size : (index + 1) * size])
            hashes.append(parent)
        return hashes

    def _add(self, event: KVEvent, blocks: int) -> None:
        if self._dropped:
            return
        self._events.append(event)
        self._blocks += blocks
        if self._blocks > self._max_blocks:
            self._events, self._dropped = [], True
