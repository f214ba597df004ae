"""From two layouts to the byte ranges that move KV from one into the other, or a typed refusal.

`plan_pair` runs once per session and decides which source rank writes to which target rank;
`PairPlan.blocks` runs once per chunk and pair and does only integer arithmetic.

Each rank holds a box of the model: some neighbouring layers of some neighbouring KV heads (`layout.sides`). A
pair is a source box and a target box that share something, and moves what they share: so the sides' parallel
sizes need not be equal, nor divide one another. Of ranks that hold the same box one takes part in a pair.
"""

from __future__ import annotations

import hashlib
import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from segue.core.errors import LayoutMismatch
from segue.core.types import Span
from segue.layout.blocks import CopyBlock
from segue.layout.content import Content, Sample, canonical_content, page_runs, part_of
from segue.layout.pairs import PairLayout
from segue.layout.sides import Boxes, boxes_of
from segue.layout.spec import KVShape, PoolSpec

#: Changes whenever the meaning of a plan changes, so that two versions never agree by accident.
PLAN_VERSION = 3

#: Ranks that one replica may declare.
MAX_RANKS = 1024

_HASH_KEY = b"segue plan"
_SHARE = struct.Struct("<QQQ")


@dataclass(frozen=True, slots=True)
class PairPlan:
    """How one replica's pools are copied into another's.

    `pairs` is the exact set of (source rank, target rank) indices that must report; `digest` is a
    hash over both layouts. Page ids mean the same in every rank's pool of a side.
    """

    sources: tuple[PoolSpec, ...]
    targets: tuple[PoolSpec, ...]
    pairs: tuple[tuple[int, int], ...]
    digest: bytes
    _layouts: dict[tuple[int, int], PairLayout] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @property
    def source_page_tokens(self) -> int:
        """Tokens of a page on the source side."""
        return self.sources[0].page_tokens

    @property
    def target_page_tokens(self) -> int:
        """Tokens of a page on the target side."""
        return self.targets[0].page_tokens

    @property
    def target_pages(self) -> int:
        """Page ids below this one exist in every target rank's pool."""
        return min(spec.pages for spec in self.targets)

    def pair_token_bytes(self, source: int, target: int) -> int:
        """Bytes that one token moves between these two ranks."""
        return self._layout(source, target).token_bytes

    def hash(self, prompt_tokens: int, prefix_tokens: int, pages: int) -> int:
        """`plan_hash` of these layouts, without hashing them again."""
        return _share_hash(self.digest, prompt_tokens, prefix_tokens, pages)

    def blocks(
        self,
        source: int,
        target: int,
        span: Span,
        src_pages: Sequence[int],
        dst_pages: Sequence[int],
        dst_first_token: int,
    ) -> list[CopyBlock]:
        """The byte ranges that move the KV of `span` from rank `source` to rank `target`.

        `src_pages` hold the prompt from token 0 on, `dst_pages` from `dst_first_token` on (the
        first token of a page). As few blocks as page ids and strides allow: of layer-major pools one per run
        of pages that is contiguous on both sides (two if K and V of a token differ in size). Raises
        LayoutMismatch for a pair outside the plan, pages that do not hold `span`, or ids outside a pool.
        """
        layout = self._layout(source, target)
        if len(span) == 0:
            return []
        src_runs = page_runs(src_pages, self.sources[source], 0, span, "source")
        dst_runs = page_runs(dst_pages, self.targets[target], dst_first_token, span, "destination")
        out: list[CopyBlock] = []
        i = j = 0
        token, end = span.start, span.end
        while token < end:
            src_token, src_slot, src_tokens = src_runs[i]
            dst_token, dst_slot, dst_tokens = dst_runs[j]
            src_end, dst_end = src_token + src_tokens, dst_token + dst_tokens
            stop = min(src_end, dst_end, end)
            layout.emit(out, src_slot + token - src_token, dst_slot + token - dst_token, stop - token)
            i += stop == src_end
            j += stop == dst_end
            token = stop
        return out

    def source_content(
        self, source: int, target: int, span: Span, pages: Sequence[int], sample: Sample
    ) -> Content:
        """What of `span` this pair moves, as it lies in the source's pool; arguments as in `blocks`."""
        part = self._layout(source, target).part
        return canonical_content(self.sources[source], part, span, pages, 0, sample, "source")

    def target_content(
        self,
        source: int,
        target: int,
        span: Span,
        pages: Sequence[int],
        first_token: int,
        sample: Sample,
    ) -> Content:
        """The same bytes in the same order, as they lie in the target's pool once they have landed."""
        part = self._layout(source, target).part
        return canonical_content(self.targets[target], part, span, pages, first_token, sample, "destination")

    def _layout(self, source: int, target: int) -> PairLayout:
        """How these two ranks share KV; worked out when it is first asked for."""
        layout = self._layouts.get((source, target))
        if layout is None:
            if (source, target) not in self.pairs:
                raise LayoutMismatch(
                    f"source rank {source} and target rank {target} are not a pair of the plan: {self.pairs}"
                )
            src, dst = self.sources[source], self.targets[target]
            shared = part_of(src).shared(part_of(dst))
            assert shared is not None
            layout = self._layouts[source, target] = PairLayout(src, dst, shared)
        return layout


def plan_pair(sources: Sequence[PoolSpec], targets: Sequence[PoolSpec]) -> PairPlan:
    """Which rank of `sources` writes to which rank of `targets`.

    Raises LayoutMismatch with a sentence that names the ranks and what to change. Both sides need the same
    model and dtype; parallel sizes, page sizes and page counts may differ.
    """
    _check_count("prefill", sources)
    _check_count("decode", targets)
    # First of all, since what follows is work in proportion to a shape that a peer has declared.
    _check_shapes(sources[0].shape, targets[0].shape)
    pairs = _pairs(boxes_of("prefill", sources), boxes_of("decode", targets))
    return PairPlan(tuple(sources), tuple(targets), tuple(pairs), _layout_digest(sources, targets))


def _pairs(sources: Boxes, targets: Boxes) -> list[tuple[int, int]]:
    """Who writes to whom. Of ranks that hold the same box the one that has least to send takes part."""
    sent: Counter[int] = Counter()
    pairs = []
    for box, holders in targets.items():
        for target in holders:
            for other, ranks in sources.items():
                shared = other.shared(box)
                if shared is not None:
                    source = min(ranks, key=lambda rank: (sent[rank], rank))
                    sent[source] += shared.layers * shared.heads
                    pairs.append((source, target))
    return sorted(pairs)


def plan_hash(
    sources: Sequence[PoolSpec],
    targets: Sequence[PoolSpec],
    prompt_tokens: int,
    prefix_tokens: int,
    pages: int,
) -> int:
    """An unsigned 64-bit hash of everything both sides must agree on before a byte moves.

    Keyed BLAKE2b over a canonical encoding: equal in every process, on every host and run.
    """
    return _share_hash(_layout_digest(sources, targets), prompt_tokens, prefix_tokens, pages)


def _layout_digest(sources: Sequence[PoolSpec], targets: Sequence[PoolSpec]) -> bytes:
    data = msgspec.msgpack.encode((PLAN_VERSION, list(sources), list(targets)))
    return hashlib.blake2b(data, digest_size=16, key=_HASH_KEY).digest()


def _share_hash(digest: bytes, prompt_tokens: int, prefix_tokens: int, pages: int) -> int:
    data = digest + _SHARE.pack(prompt_tokens, prefix_tokens, pages)
    return int.from_bytes(hashlib.blake2b(data, digest_size=8, key=_HASH_KEY).digest(), "little")


def _check_shapes(prefill: KVShape, decode: KVShape) -> None:
    if prefill == decode:
        return
    names = [n for n in KVShape.__struct_fields__ if getattr(prefill, n) != getattr(decode, n)]
    what = ", ".join(f"{n} ({getattr(prefill, n)} on prefill, {getattr(decode, n)} on decode)" for n in names)
    flags = "--dtype" if set(names) <= {"dtype", "item_bytes"} else "--model and --dtype"
    raise LayoutMismatch(f"the KV of the two sides differs in {what}; start both with the same {flags}")


def _check_count(name: str, ranks: Sequence[PoolSpec]) -> None:
    if not ranks:
        raise LayoutMismatch(f"{name} declares no ranks; each leader must declare one pool per rank")
    if len(ranks) > MAX_RANKS:
        raise LayoutMismatch(f"{name} declares {len(ranks)} ranks; a replica has at most {MAX_RANKS}")
