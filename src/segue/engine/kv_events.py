"""Changes of an instance's prefix cache: vLLM's KV events, and the messages to our frontends.

The first four are encoded as vLLM's are (`vllm/distributed/kv_events.py`; from 0.23 on an event is a map with
its `type`, the batch around it an array), so that routers made for vLLM can read them. A block is a page: the
hash of a page covers all tokens up to its end, and the salt of its requests (`Request.cache_salt`).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence

import msgspec
import xxhash


class BlockStored(msgspec.Struct, frozen=True, tag=True):
    """Pages of `block_size` tokens that follow one another, after the page `parent_block_hash` (None: first).
    `token_ids` are those of all of them. There is no LoRA here, and one tier of memory."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = "GPU"
    lora_name: str | None = None


class BlockRemoved(msgspec.Struct, frozen=True, tag=True):
    """Pages that are there no more."""

    block_hashes: list[int]
    medium: str | None = "GPU"


class AllBlocksCleared(msgspec.Struct, frozen=True, tag=True):
    """Nothing is there any more; what is said afterwards is."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(msgspec.Struct, frozen=True, array_like=True):
    """Events in the order in which they happened; `ts` in seconds since 1970."""

    ts: float
    events: list[KVEvent]
    data_parallel_rank: int | None = None


class FollowPrefixes(msgspec.Struct, frozen=True, tag=True):
    """Frontend → leader: say which pages your prefix cache holds, and from now on what changes."""


class Prefixes(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Leader → frontend: hashes of pages that are there now, and of those that are not any more. Number 0 is
    all that is there; each later one is a change, and follows its predecessor without a gap."""

    seq: int
    page_tokens: int
    stored: list[int] = []
    removed: list[int] = []
    #: before `stored`, everything went
    cleared: bool = False


def next_hash(parent: int | None, tokens: Sequence[int]) -> int:
    """The hash of the page with `tokens` after the page with hash `parent`: 64 bits, the same in every
    process."""
    return xxhash.xxh3_64_intdigest(array("q", tokens).tobytes(), parent or 0)


def page_hashes(prompt: Sequence[int], page_tokens: int, salt: int = 0) -> Iterator[int]:
    """The hashes of the whole pages of a prompt, in order; those of another `salt` are others."""
    parent: int | None = salt
    for start in range(0, len(prompt) - page_tokens + 1, page_tokens):
        parent = next_hash(parent, prompt[start : start + page_tokens])
        yield parent


def net(events: Iterable[KVEvent]) -> tuple[bool, list[int], list[int]]:
    """The net change of `events`: whether everything was removed first, added hashes, removed hashes."""
    cleared, there = False, dict[int, bool]()
    for event in events:
        if isinstance(event, AllBlocksCleared):
            cleared, there = True, {}
        else:
            there |= dict.fromkeys(event.block_hashes, isinstance(event, BlockStored))
    return cleared, [h for h, is_there in there.items() if is_there], [h for h, s in there.items() if not s]
