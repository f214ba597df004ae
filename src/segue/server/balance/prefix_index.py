"""The pages of prompts in the prefix caches of replicas, as the replicas report them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from segue.engine.kv_events import Prefixes, page_hashes
from segue.kv import LeaderId


@dataclass(slots=True)
class _Held:
    page_tokens: int
    seq: int = 0
    blocks: set[int] = field(default_factory=set)


class PrefixIndex:
    """The pages of each replica that is followed. All together at most `max_blocks` (about 90 bytes each);
    what is beyond is not known, and so not found."""

    def __init__(self, max_blocks: int = 2**20) -> None:
        self._max_blocks = max_blocks
        self._held: dict[LeaderId, _Held] = {}
        self.blocks = 0

    def heard(self, leader: LeaderId, message: Prefixes) -> bool:
        """Take what `leader` says. False if something before it was lost: nothing is known of it then, and
        it is to be asked for everything."""
        held = self._held.get(leader)
        if message.seq and (held is None or message.seq != held.seq + 1):
            self.forget(leader)
            return False
        if held is None or message.seq == 0:
            self.forget(leader)
            held = self._held[leader] = _Held(message.page_tokens)
        before, held.seq = len(held.blocks), message.seq
        if message.cleared:
            held.blocks.clear()
        held.blocks.difference_update(message.removed)
        self.blocks += len(held.blocks) - before
        before = len(held.blocks)
        held.blocks.update(message.stored[: max(0, self._max_blocks - self.blocks)])
        self.blocks += len(held.blocks) - before
        return True

    def forget(self, leader: LeaderId) -> None:
        """Stop following a replica."""
        if (held := self._held.pop(leader, None)) is not None:
            self.blocks -= len(held.blocks)

    def cached(
        self, leaders: Iterable[LeaderId], prompt: Sequence[int], salt: int = 0
    ) -> dict[LeaderId, int]:
        """How many tokens at the beginning of `prompt` each of those that are known holds under `salt`."""
        found: dict[LeaderId, int] = {}
        by_size: dict[int, dict[LeaderId, set[int]]] = {}
        for leader in leaders:
            if (held := self._held.get(leader)) is not None:
                found[leader] = 0
                by_size.setdefault(held.page_tokens, {})[leader] = held.blocks
        for size, going_on in by_size.items():
            for pages, block in enumerate(page_hashes(prompt, size, salt), start=1):
                for leader in [leader for leader, blocks in going_on.items() if block not in blocks]:
                    del going_on[leader]
                if not going_on:
                    break
                found |= dict.fromkeys(going_on, pages * size)
        return found
