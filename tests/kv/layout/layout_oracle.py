"""Pools of any strides, and an oracle that finds each layer, K and V, head and token in them by itself."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import pairwise, product

import msgspec
from hypothesis import strategies as st

from segue.kv.ids import RankCoord, Span
from segue.kv.layout.blocks import CopyBlock
from segue.kv.layout.content import LayerSample, Part, checksum
from segue.kv.layout.planner import plan_pair
from segue.kv.layout.spec import KVShape, PlaneSpec, PoolSpec, region_starts
from segue.kv.transport.memory.ranges import check

#: Tokens of a page.
SIZES = st.sampled_from([1, 2, 3, 4, 16, 64])
Key = tuple[int, bool, int, int]  # layer, value, token, head: as in the whole model


def kv(layers: int = 3, heads: int = 4, k_dim: int = 2, v_dim: int = 2, item_bytes: int = 2) -> KVShape:
    kind = "mha" if v_dim else "mla"
    return KVShape(
        kind=kind,  # type: ignore[arg-type]
        layers=layers,
        kv_heads=heads if v_dim else 1,
        k_dim=k_dim,
        v_dim=v_dim,
        dtype="x",
        item_bytes=item_bytes,
    )


def rank(shape: KVShape, pages: int, page_tokens: int, **changes: object) -> PoolSpec:
    values = {"layer_count": shape.layers, "head_count": shape.kv_heads} | changes
    return PoolSpec(shape=shape, pages=pages, page_tokens=page_tokens, **values)  # type: ignore[arg-type]


def split(kv: KVShape, tp: int, pp: int, pages: int, page_tokens: int, cp: int = 1) -> list[PoolSpec]:
    """A replica of `tp * cp * pp` ranks, whether that divides the model or not. With more tp ranks than KV
    heads several hold the same one, and those of each place of `cp` hold all."""
    return [
        PoolSpec(
            shape=kv,
            coord=RankCoord(pp=p, cp=c, tp=t),
            pages=pages,
            page_tokens=page_tokens,
            layer_start=kv.layers * p // pp,
            layer_count=kv.layers * (p + 1) // pp - kv.layers * p // pp,
            head_start=kv.kv_heads * t // tp,
            head_count=max(1, kv.kv_heads * (t + 1) // tp - kv.kv_heads * t // tp),
        )
        for p in range(pp)
        for c in range(cp)
        for t in range(tp)
    ]


def laid_out(spec: PoolSpec, rng: random.Random) -> PoolSpec:
    """The same pool, its planes somewhere: axes in any order, gaps between all things, K and V together or
    apart, layers in one region or in several."""
    shape, pad = spec.shape, rng.choice((0, 0, 3))
    together = shape.k_dim == shape.v_dim and rng.random() < 0.6
    counts = {"page": spec.pages, "token": spec.page_tokens, "head": spec.head_count}
    if together:
        counts["kv"] = 2
    order = rng.choice([["head", "token", "page"], ["token", "head", "page"], ["page", "head", "token"]])
    if together:
        order.insert(rng.randrange(len(order) + 1), "kv")
    per_region = rng.randint(1, spec.layer_count)
    sizes: list[int] = []
    planes: list[PlaneSpec] = []
    at = 0
    for layer in range(spec.layer_count):
        if layer % per_region == 0:
            sizes.append(0)
            at = rng.randrange(5)
        for value in range(1 if together else spec.kinds):
            extent = (shape.v_dim if value else shape.k_dim) * shape.item_bytes
            strides: dict[str, int] = {}
            for axis in order:
                strides[axis] = extent + rng.randint(0, pad)
                extent += strides[axis] * (counts[axis] - 1)
            inner = (strides["page"], strides["token"], strides["head"])
            planes.append(PlaneSpec(len(sizes) - 1, at, *inner))
            if together:
                planes.append(PlaneSpec(len(sizes) - 1, at + strides["kv"], *inner))
            at += extent + rng.randint(0, pad)
        sizes[-1] = at + rng.randrange(3)
    return msgspec.structs.replace(spec, regions=tuple(sizes), planes=tuple(planes))


@dataclass
class Pool:
    """A rank's memory, random where the prompt is not, in which the oracle finds each element by the words of
    `PlaneSpec` alone."""

    spec: PoolSpec
    pages: list[int]
    first_token: int
    memory: bytearray

    @classmethod
    def of(cls, spec: PoolSpec, rng: random.Random, first_token: int, tokens: int) -> Pool:
        count = -(-(tokens - first_token) // spec.page_tokens)
        ids = list(range(spec.pages))
        if rng.random() < 0.5:
            rng.shuffle(ids)
        start = rng.randint(0, spec.pages - count)
        return cls(spec, ids[start : start + count], first_token, bytearray(rng.randbytes(spec.nbytes)))

    def where(self, key: Key) -> tuple[int, int]:
        """Offset and bytes of one head of one token."""
        layer, value, token, head = key
        spec = self.spec
        page, inside = divmod(token - self.first_token, spec.page_tokens)
        width = (spec.shape.v_dim if value else spec.shape.k_dim) * spec.shape.item_bytes
        layer, head = layer - spec.layer_start, head - spec.head_start
        if not spec.planes:
            slot = self.pages[page] * spec.page_tokens + inside
            return spec.offset(layer, value, slot) + head * width, width
        plane = spec.planes[layer * spec.kinds + value]
        at = plane.offset + self.pages[page] * plane.page_stride + inside * plane.token_stride
        return region_starts(spec.regions)[plane.region] + at + head * plane.head_stride, width

    def holds(self, key: Key) -> bool:
        """Whether this rank has the layer and the head, and the token is behind the prefix's whole pages."""
        layer, _, token, head = key
        return (
            0 <= layer - self.spec.layer_start < self.spec.layer_count
            and 0 <= head - self.spec.head_start < self.spec.head_count
            and token >= self.first_token
        )

    def put(self, data: dict[Key, bytes]) -> None:
        for key, item in data.items():
            at, width = self.where(key)
            self.memory[at : at + width] = item

    def get(self, key: Key) -> bytes:
        at, width = self.where(key)
        return bytes(self.memory[at : at + width])

    @property
    def regions(self) -> list[memoryview]:
        sizes = self.spec.regions or (self.spec.nbytes,)
        view = memoryview(self.memory)
        return [view[at : at + n] for at, n in zip(region_starts(sizes), sizes, strict=True)]


def keys_of(part: Part, kinds: int, span: Span) -> list[Key]:
    """In canonical order."""
    return [
        (layer, bool(value), token, head)
        for layer in range(part.layer_start, part.layer_start + part.layers)
        for value in range(kinds)
        for token in range(span.start, span.end)
        for head in range(part.head_start, part.head_start + part.heads)
    ]


def shapes(rng: random.Random) -> KVShape:
    if rng.random() < 0.2:
        return kv(layers=rng.randint(1, 4), v_dim=0, k_dim=rng.randint(1, 3))
    k_dim = rng.randint(1, 3)
    return kv(rng.randint(1, 4), rng.randint(1, 4), k_dim, k_dim if rng.random() < 0.8 else rng.randint(1, 3))


def copy(blocks: list[CopyBlock], src: bytearray, dst: bytearray) -> list[int]:
    """Carry the blocks out; the destination's offsets that were written, each as often as it was."""
    written = []
    check(blocks, len(src), len(dst))  # as every transport does
    for b in blocks:
        for a, to, nbytes in b.ranges():
            dst[to : to + nbytes] = src[a : a + nbytes]
            written += range(to, to + nbytes)
    return written


def carry_out(
    sources: list[PoolSpec],
    targets: list[PoolSpec],
    rng: random.Random,
    prompt: int,
    prefix: int,
    src_pages: list[int],
    dst_pages: list[int],
) -> None:
    """Move a prompt by the plan of two replicas, chunk by chunk and layers by layers; look at every byte of
    every destination, and at the checksums of both sides."""
    plan, shape = plan_pair(sources, targets), sources[0].shape
    first = prefix // targets[0].page_tokens * targets[0].page_tokens
    everything = keys_of(Part(0, shape.layers, 0, shape.kv_heads), sources[0].kinds, Span(0, prompt))
    data = {
        key: rng.randbytes((shape.v_dim if key[1] else shape.k_dim) * shape.item_bytes) for key in everything
    }
    src = [Pool(spec, src_pages, 0, bytearray(spec.nbytes)) for spec in sources]
    dst = [Pool(spec, dst_pages, first, bytearray(rng.randbytes(spec.nbytes))) for spec in targets]
    for pool in src:
        pool.put({key: item for key, item in data.items() if pool.holds(key)})
    before, written, wire = [bytes(pool.memory) for pool in dst], [list[int]() for _ in dst], 0
    cuts = sorted({prefix, prompt, *(rng.randint(prefix, prompt) for _ in range(2))})
    layers = sorted({0, shape.layers, rng.randint(0, shape.layers)})
    sample = LayerSample(rng.randint(1, 3), rng.randrange(9))
    for (source, target), (start, end) in product(plan.pairs, pairwise(cuts)):
        span = plan.share(source, Span(start, end))
        blocks = [
            block
            for some in pairwise(layers)
            for block in plan.blocks(source, target, span, src_pages, dst_pages, first, Span(*some))
        ]
        wire += len(span) * plan.chunk_bytes(source, target, 1, False)
        assert sum(block.nbytes for block in blocks) == len(span) * plan.chunk_bytes(source, target, 1, False)
        written[target] += copy(blocks, src[source].memory, dst[target].memory)
        sent = plan.source_content(source, target, span, src_pages, sample)
        landed = plan.target_content(source, target, span, dst_pages, first, sample)
        assert checksum(src[source].regions, sent) == checksum(dst[target].regions, landed)
        for other in plan.passed_on(source, target) if len(span) else ():
            blocks = plan.relay_blocks(source, target, other, span, dst_pages, first)
            written[other] += copy(blocks, dst[target].memory, dst[other].memory)
    assert wire == (prompt - prefix) * shape.token_bytes, "as little as can be"
    for pool, was, offsets in zip(dst, before, written, strict=True):
        mine = [key for key in data if pool.holds(key) and key[2] >= prefix]
        assert all(pool.get(key) == data[key] for key in mine)
        wanted = [at + i for at, width in map(pool.where, mine) for i in range(width)]
        assert sorted(offsets) == sorted(wanted), "each byte once, nothing else at all"
        assert all(was[at] == pool.memory[at] for at in set(range(len(was))) - set(wanted))
