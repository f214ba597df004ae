"""From two layouts to the byte ranges that move KV from one into the other, or a typed refusal.

`plan_pair` runs once per session and decides which source rank writes to which target rank;
`PairPlan.blocks` runs once per chunk and pair and does only integer arithmetic.

Each rank holds a box of the model: some neighbouring layers of some neighbouring KV heads
(`kv.layout.sides`). A pair is a source box and a target box that share something, and moves what they
share: so the sides' parallel sizes need not be equal, nor divide one another.

Several ranks of a side may hold the same box. One of these sources sends. One of these targets receives, and
passes the bytes on to the others (`PairPlan.relays`): each byte crosses the wire once. Sources that differ in
nothing but their place in context parallelism share out the tokens of each chunk (`PairPlan.share`).

A state that each sequence keeps beside its KV (`KVShape.state`) is one slot at one rank of either side: such
models have one rank on each. It moves with the last chunk, as one block.
"""

from __future__ import annotations

import hashlib
import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from segue.kv.errors import LayoutMismatch
from segue.kv.ids import Span
from segue.kv.layout.blocks import CopyBlock
from segue.kv.layout.content import Content, LayerSample, Part, canonical_content, page_runs, part_of
from segue.kv.layout.pairs import PairLayout
from segue.kv.layout.sides import Boxes, boxes_of
from segue.kv.layout.spec import KVShape, PoolSpec

#: Changes whenever the meaning of a plan changes, so that two versions never agree by accident.
PLAN_VERSION = 4

#: Ranks that one replica may declare.
MAX_RANKS = 1024

_HASH_KEY = b"segue plan"
_SHARE = struct.Struct("<QQQ")


@dataclass(frozen=True, slots=True)
class PairPlan:
    """How one replica's pools are copied into another's.

    `pairs` is the exact set of (source rank, target rank) indices that write over the wire, `relays` that of
    (source rank, target rank, other target rank): what the first two have moved is passed on to the third.
    Together they reach each target rank that shares something with a source rank; all of them must
    report. `digest` is a hash over both layouts. Page ids mean the same in every rank's pool of a side.
    """

    sources: tuple[PoolSpec, ...]
    targets: tuple[PoolSpec, ...]
    pairs: tuple[tuple[int, int], ...]
    relays: tuple[tuple[int, int, int], ...]
    digest: bytes
    _layouts: dict[tuple[int, int, int, Span | None], PairLayout] = field(
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
    def layers(self) -> int:
        """Layers of the model that have KV."""
        return self.sources[0].shape.layers

    @property
    def target_pages(self) -> int:
        """Page ids below this one exist in every target rank's pool."""
        return min(spec.pages for spec in self.targets)

    @property
    def target_slots(self) -> int:
        """Slots of state of the target; 0 where the model has no state."""
        return self.targets[0].slots

    def chunk_bytes(self, source: int, target: int, tokens: int, final: bool) -> int:
        """Bytes that a chunk of `tokens` tokens moves between these two ranks; the last one has the state."""
        state_bytes = self.targets[target].shape.state_bytes if final else 0
        return tokens * self._layout(source, target, target).token_bytes + state_bytes

    def share(self, source: int, span: Span) -> Span:
        """The tokens of the chunk `span` that `source` sends: all of them, or with context parallelism
        neighbouring source pages, as many as each other place of it, up to one."""
        parts = 1 + max(spec.coord.cp for spec in self.sources)
        if parts == 1:
            return span
        part, page = self.sources[source].coord.cp, self.source_page_tokens
        first = span.start // page
        pages = -(-span.end // page) - first
        start, end = ((first + pages * n // parts) * page for n in (part, part + 1))
        return Span(max(start, span.start), max(span.start, min(end, span.end)))

    def passed_on(self, source: int, target: int) -> list[int]:
        """The ranks to which `target` passes on what comes from `source`."""
        return [other for s, t, other in self.relays if (s, t) == (source, target)]

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
        layers: Span | None = None,
    ) -> list[CopyBlock]:
        """The byte ranges that move the KV of `span`, or of these `layers` of it, from rank `source` to rank
        `target`.

        `src_pages` hold the prompt from token 0 on, `dst_pages` from `dst_first_token` on (the
        first token of a page). As few blocks as page ids and strides allow: of layer-major pools one per run
        of pages that is contiguous on both sides (two if K and V of a token differ in size). Raises
        LayoutMismatch for a pair outside the plan, pages that do not hold `span`, or ids outside a pool.
        """
        layout = self._layout(source, target, target, layers)
        if len(span) == 0:
            return []
        src_runs = page_runs(src_pages, self.sources[source], 0, span, "source")
        dst_runs = page_runs(dst_pages, self.targets[target], dst_first_token, span, "destination")
        return layout.blocks(span, src_runs, dst_runs)

    def state_block(self, source: int, target: int, src_slot: int, dst_slot: int) -> CopyBlock:
        """The byte range that moves the state of a sequence. Raises LayoutMismatch for a slot that a pool
        does not have."""
        src, dst = self.sources[source], self.targets[target]
        return CopyBlock(src.slot_offset(src_slot), dst.slot_offset(dst_slot), 1, src.shape.state_bytes)

    def relay_blocks(
        self, source: int, target: int, other: int, span: Span, pages: Sequence[int], first_token: int
    ) -> list[CopyBlock]:
        """The byte ranges that move from rank `target` to rank `other`, both of them targets, what of `span`
        came from `source`; `pages` hold the prompt from `first_token` on, in either. As `blocks`."""
        layout = self._layout(source, target, other)
        runs = [page_runs(pages, self.targets[t], first_token, span, "destination") for t in (target, other)]
        return layout.blocks(span, *runs)

    def source_content(
        self,
        source: int,
        target: int,
        span: Span,
        pages: Sequence[int],
        sample: LayerSample,
        slot: int | None = None,
    ) -> Content:
        """The content of `span`, and of the state in `slot`, that this pair moves, as it lies in the source's
        pool; arguments as in `blocks`."""
        part = self._layout(source, target, target).part
        return canonical_content(self.sources[source], part, span, pages, 0, sample, "source", slot)

    def target_content(
        self,
        source: int,
        target: int,
        span: Span,
        pages: Sequence[int],
        first_token: int,
        sample: LayerSample,
        slot: int | None = None,
    ) -> Content:
        """The same bytes in the same order, as they lie in the pool of a target that they have reached."""
        part, spec = _shared(self.sources[source], self.targets[target]), self.targets[target]
        return canonical_content(spec, part, span, pages, first_token, sample, "destination", slot)

    def _layout(self, source: int, target: int, to: int, layers: Span | None = None) -> PairLayout:
        """How a pair shares KV, or these layers of it, or (`to` another rank than `target`) how that is
        passed on; worked out when it is first asked for."""
        layout = self._layouts.get((source, target, to, layers))
        if layout is None:
            if (source, target) not in self.pairs or (
                to != target and (source, target, to) not in self.relays
            ):
                raise LayoutMismatch(
                    f"source rank {source} and target rank {target} are not a pair of the plan: {self.pairs}"
                )
            src = self.sources[source] if to == target else self.targets[target]
            shared = _shared(self.sources[source], self.targets[target])
            if layers is not None:
                shared = shared.of_layers(layers)
            layout = PairLayout(src, self.targets[to], shared)
            self._layouts[source, target, to, layers] = layout
        return layout


def plan_pair(sources: Sequence[PoolSpec], targets: Sequence[PoolSpec]) -> PairPlan:
    """The pairs of a rank of `sources` and a rank of `targets` that it writes to.

    Raises LayoutMismatch with a sentence that names the ranks and what to change. Both sides need the same
    model and dtype; parallel sizes, page sizes and page counts may differ.
    """
    _check_count("prefill", sources)
    _check_count("decode", targets)
    # First of all, since what follows is work in proportion to a shape that a peer has declared.
    _check_shapes(sources[0].shape, targets[0].shape)
    pairs, relays = _routes(boxes_of("prefill", sources), boxes_of("decode", targets))
    return PairPlan(
        tuple(sources), tuple(targets), tuple(pairs), tuple(relays), _layout_digest(sources, targets)
    )


def _routes(sources: Boxes, targets: Boxes) -> tuple[list[tuple[int, int]], list[tuple[int, int, int]]]:
    """The writes between ranks, and the relays among targets. Among ranks with the same box the one with the
    fewest tasks takes part."""
    sent: Counter[int] = Counter()
    received: Counter[int] = Counter()
    pairs, relays = [], []
    for box, [wanting] in targets.items():
        for other, places in sources.items():
            shared = other.shared(box)
            if shared is None:
                continue
            for holders in places:
                source = min(holders, key=lambda rank: (sent[rank], rank))
                target = min(wanting, key=lambda rank: (received[rank], rank))
                sent[source] += shared.layers * shared.heads
                received[target] += shared.layers * shared.heads
                pairs.append((source, target))
                relays += [(source, target, rank) for rank in wanting if rank != target]
    return sorted(pairs), sorted(relays)


def _shared(src: PoolSpec, dst: PoolSpec) -> Part:
    shared = part_of(src).shared(part_of(dst))
    if shared is None:
        raise LayoutMismatch(f"ranks that share nothing: {src} and {dst}")
    return shared


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
    if ranks[0].slots and len(ranks) > 1:
        raise LayoutMismatch(
            f"{name} declares {len(ranks)} ranks of a model that keeps a state beside its KV, which is not "
            "shared out over ranks: start it with --tp 1 --pp 1 --cp 1"
        )
