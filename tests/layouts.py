"""Parallel layouts of small models, and the bytes that each rank of one must hold."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from segue.kv.ids import RankCoord, Span
from segue.kv.layout.spec import KVShape, PlaneSpec, PoolSpec

Bytes = npt.NDArray[np.uint8]


def _shape(kind: str, heads: int, k_dim: int, v_dim: int) -> KVShape:
    stored = "mla" if kind == "mla" else "mha"
    return KVShape(
        kind=stored, layers=5, kv_heads=heads, k_dim=k_dim, v_dim=v_dim, dtype="bfloat16", item_bytes=2
    )


#: Models of few bytes: layers and heads that the parallel sizes do not divide, and fewer heads than ranks.
SHAPES = {
    "mha": _shape("mha", 8, 2, 1),
    "gqa": _shape("gqa", 3, 2, 2),
    "mqa": _shape("mqa", 1, 2, 2),
    "mla": _shape("mla", 1, 5, 0),
}


class Sizes(NamedTuple):
    """The parallel sizes of a side and its tokens of a page."""

    tp: int
    pp: int = 1
    cp: int = 1
    page: int = 16

    def __str__(self) -> str:
        return f"tp{self.tp}-pp{self.pp}-cp{self.cp}-page{self.page}"

    @functools.cache  # noqa: B019 - few, and as long as the tests
    def ranks(self, kind: str, pages: int) -> list[PoolSpec]:
        """The pools of all ranks. Sizes that do not divide give neighbours that differ by one; with more `tp`
        than KV heads several ranks hold the same one."""
        kv = SHAPES[kind]
        layers = [kv.layers * p // self.pp for p in range(self.pp + 1)]
        heads = [(kv.kv_heads * t // self.tp, kv.kv_heads * (t + 1) // self.tp) for t in range(self.tp)]
        return [
            PoolSpec(
                shape=kv,
                coord=RankCoord(pp=p, cp=c, tp=t),
                page_tokens=self.page,
                pages=pages,
                layer_start=layers[p],
                layer_count=layers[p + 1] - layers[p],
                head_start=first,
                head_count=max(1, behind - first),
            )
            for p in range(self.pp)
            for c in range(self.cp)
            for t, (first, behind) in enumerate(heads)
        ]


#: The prompt that is handed over.
TOKENS = 70


def page_ids(sizes: Sizes, first_token: int) -> list[int]:
    """Where the prompt lies from `first_token` on: two runs, and a hole before, between and behind them."""
    count = -(-TOKENS // sizes.page) - first_token // sizes.page
    half = count // 2
    return [*range(half + 2, count + 2), *range(1, half + 1)]


@functools.cache
def content(kind: str, value: bool, tokens: int) -> Bytes:
    """K (or V) of a prompt in the whole model: random bytes of [layer, token, head]."""
    kv = SHAPES[kind]
    width = (kv.v_dim if value else kv.k_dim) * kv.item_bytes
    rng = np.random.default_rng(tokens * 2 + value)
    return rng.integers(0, 256, (kv.layers, tokens, kv.kv_heads, width), np.uint8)


def image(
    kind: str, spec: PoolSpec, pages: Sequence[int], first_token: int, span: Span, tokens: int
) -> Bytes:
    """The layer-major pool of a rank that holds `span` of a prompt of `tokens` in `pages`, which begin at
    `first_token`; zero elsewhere."""
    pool = np.zeros(spec.nbytes, np.uint8)
    at = np.arange(span.start, span.end) - first_token
    slots = np.array(pages)[at // spec.page_tokens] * spec.page_tokens + at % spec.page_tokens
    heads = slice(spec.head_start, spec.head_start + spec.head_count)
    for layer in range(spec.layer_count):
        for value in (False, True)[: spec.kinds]:
            wanted = content(kind, value, tokens)[spec.layer_start + layer, span.start : span.end, heads]
            shape = (spec.pages * spec.page_tokens, *wanted.shape[1:])
            plane = np.ndarray(shape, np.uint8, pool.data, spec.offset(layer, value, 0))
            plane[slots] = wanted
    return pool


def laid_out(spec: PoolSpec, order: str) -> PoolSpec:
    """The same pool in one region with its axes in this order, the outermost first: `L`ayers, `K` and V,
    pages (`N`), tokens of a page (`B`), `H`eads. Layer-major where there is none."""
    if not order:
        return spec
    sizes = {"L": spec.layer_count, "K": 2, "N": spec.pages, "B": spec.page_tokens, "H": spec.head_count}
    strides, extent = {}, spec.shape.k_dim * spec.shape.item_bytes
    for axis in reversed(order):
        strides[axis] = extent
        extent *= sizes[axis]
    planes = tuple(
        PlaneSpec(0, layer * strides["L"] + value * strides["K"], strides["N"], strides["B"], strides["H"])
        for layer, value in product(range(spec.layer_count), (0, 1))
    )
    return msgspec.structs.replace(spec, regions=(extent,), planes=planes)
