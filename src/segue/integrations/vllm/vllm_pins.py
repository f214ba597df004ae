"""Blocks of vLLM's pool that a peer may read or write: vLLM must not give them to another request. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol


class BlockPool(Protocol):
    """The used part of vLLM's `BlockPool`: `touch` adds one to the reference count of blocks, `free_blocks`
    takes one away and frees a block at 0."""

    @property
    def blocks(self) -> Sequence[Any]:
        """All blocks, by id."""

    def get_num_free_blocks(self) -> int:
        """The number of blocks that no request holds."""

    def touch(self, blocks: Sequence[Any]) -> None:
        """Hold blocks."""

    def free_blocks(self, ordered_blocks: Iterable[Any]) -> None:
        """Let blocks go; the first one is used again first."""


class BlockPins:
    """One reference to each block of each hand-off, from its first order until its release."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._held: dict[int, dict[int, None]] = {}

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, handoff: int, blocks: Iterable[int]) -> None:
        """Pin those of `blocks` that this hand-off has not pinned yet. Their owner must hold them now."""
        held = self._held.setdefault(handoff, {})
        fresh = [block for block in dict.fromkeys(blocks) if block not in held]
        held.update(dict.fromkeys(fresh))
        self._pool.touch([self._pool.blocks[block] for block in fresh])

    def release(self, handoff: int) -> bool:
        """Let go all blocks of a hand-off; False if it holds none. The prompt's end is used again first, as
        vLLM does it: its beginning is more often a prefix of others."""
        held = self._held.pop(handoff, None)
        if held is None:
            return False
        self._pool.free_blocks([self._pool.blocks[block] for block in reversed(held)])
        return True

    def blocks(self) -> int:
        """The number of references held."""
        return sum(map(len, self._held.values()))

    def blocks_of(self, handoff: int) -> int:
        """The number of references that one hand-off holds."""
        return len(self._held.get(handoff, ()))
