"""The loops between matrix products for which torch has no single operation, compiled by numba.

A decode step streams all weights through the caches, so what runs between two products runs cold:
twenty small tensor operations a layer cost far more there than their arithmetic. Here they are three:
norm; rotary embedding with the write into the pool; attention of single rows over paged KV (Kwon et
al., PagedAttention, 2023; softmax in blocks after Milakov and Gimelshein, 2018).

Kernels take addresses (`Tensor.data_ptr()`): unpacking a dozen arrays would cost as much as a norm.
Their caller vouches that everything is contiguous and that pages and positions were checked
(`packing.check`). Arithmetic is float32; each result is rounded once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numba
import numpy as np
from numba import float64, int64, void

from segue.engine.cpu.cpu_numba import (
    ITEM_BYTES,
    ITEMS,
    OPTIONS,
    ROUNDED,
    exp,
    floats,
    indices,
    inlined,
    items,
    pointer,
    prefetch,
    whole_vectors,
    wide,
)
from segue.engine.cpu.kernel_cache import Source, compile_kernels
from segue.kv import ConfigError
from segue.kv.model_weights import cache_folder

#: Tokens whose scores are held at once; with their K and V they fit into the first-level cache.
BLOCK_TOKENS = 128
#: Bytes that one prefetch brings: a cache line.
LINE_BYTES = 64


class Kernels(NamedTuple):
    """The compiled loops of one model; `make_kernels` documents their arguments."""

    norm: Callable[..., None]
    rotary: Callable[..., None]
    attend: Callable[..., None]


@functools.lru_cache(maxsize=16)
def make_kernels(
    dtype: str, head_dim: int, heads: int, kv_heads: int, threads: int, cache: str | Path | None = None
) -> Kernels:
    """The kernels for heads of one size. Compiling takes some seconds; `cache` (default: segue's cache
    folder) keeps the result.

    `norm(x, out, weight, rows, size, eps)`: root mean square norm of rows `[rows, size]`; `weight` is
    float32 `[size]`.

    `rotary(qkv, rows, cos, sin, head_norm, eps, k_pool, v_pool, slots)`: rotates the heads of q and k in
    place in `qkv` `[rows, heads + 2 kv_heads, head_dim]` by `cos` and `sin` `[rows, head_dim]`, after a
    norm of each head if `head_norm` (float32 `[heads + kv_heads, head_dim]`) is not 0, and writes k
    and v to the slots `slots` (int64 `[rows]`) of one layer's pool.

    `attend(qkv, out, k_pool, v_pool, at, ends, pages, first_page, count, page_tokens, window, scale)`:
    for each of `count` single rows, at `at` (int32) in `qkv` and in `out` `[rows, heads, head_dim]`,
    attention over the tokens before `ends` (int32) that lie in the pages from `pages[first_page]` on
    (int32); over the last `window` of them if it is not 0.

    Raises ConfigError for a type that is none of bfloat16, float16 and float32.
    """
    if dtype not in ITEMS:
        raise ConfigError(f"--dtype must be one of {', '.join(ITEMS)}, not {dtype}")
    parallel = {**OPTIONS, "parallel": threads > 1}
    size = f"{dtype}_{head_dim}_{heads}_{kv_heads}"
    sources = (
        Source(f"norm_{dtype}", _norm(dtype), void(*[int64] * 5, float64)),
        Source(
            f"rotary_{size}",
            _rotary(dtype, head_dim, heads, kv_heads),
            void(*[int64] * 5, float64, *[int64] * 3),
        ),
        Source(
            f"attend_{size}_{threads}",
            _attend(dtype, head_dim, heads, kv_heads, threads),
            void(*[int64] * 11, float64),
        ),
    )
    return Kernels(*compile_kernels(sources, parallel, Path(cache or cache_folder())))


def _norm(dtype: str) -> Callable[..., None]:
    item, item_bytes, rounded = ITEMS[dtype], ITEM_BYTES[dtype], ROUNDED[dtype]

    def norm(x: int, out: int, weight: int, rows: int, size: int, eps: float) -> None:
        weights = floats(weight, size)
        for row in numba.prange(rows):
            whole_vectors()
            source = items(x + row * size * item_bytes, size, item)
            target = items(out + row * size * item_bytes, size, item)
            squares = np.float32(0.0)
            for i in range(size):
                squares += wide(source[i]) * wide(source[i])
            scale = np.float32(1.0) / np.sqrt(squares / np.float32(size) + np.float32(eps))
            for i in range(size):
                target[i] = rounded(wide(source[i]) * scale * weights[i])

    return norm


@inlined
def _norm_head(low: Any, high: Any, half: int, weight: int, eps: float, rounded: Any) -> None:
    weights = floats(weight, 2 * half)
    squares = np.float32(0.0)
    for i in range(half):
        squares += wide(low[i]) * wide(low[i]) + wide(high[i]) * wide(high[i])
    scale = np.float32(1.0) / np.sqrt(squares / np.float32(2 * half) + np.float32(eps))
    for i in range(half):
        low[i] = rounded(wide(low[i]) * scale * weights[i])
        high[i] = rounded(wide(high[i]) * scale * weights[half + i])


def _rotary(dtype: str, dim: int, heads: int, kv_heads: int) -> Callable[..., None]:
    item, item_bytes, rounded = ITEMS[dtype], ITEM_BYTES[dtype], ROUNDED[dtype]
    turned, half, head_bytes, kv_items = heads + kv_heads, dim // 2, dim * item_bytes, kv_heads * dim
    row_bytes, slot_bytes = (turned + kv_heads) * head_bytes, kv_heads * head_bytes

    def rotary(
        qkv: int,
        rows: int,
        cos: int,
        sin: int,
        head_norm: int,
        eps: float,
        k_pool: int,
        v_pool: int,
        slots: int,
    ) -> None:
        for row in numba.prange(rows):
            whole_vectors()
            at = qkv + row * row_bytes
            c = items(cos + row * head_bytes, dim, item)
            s = items(sin + row * head_bytes, dim, item)
            for head in range(turned):
                low = items(at + head * head_bytes, half, item)
                high = items(at + head * head_bytes + half * item_bytes, half, item)
                if head_norm != 0:
                    _norm_head(low, high, half, head_norm + head * dim * 4, eps, rounded)
                for i in range(half):
                    a, b = wide(low[i]), wide(high[i])
                    low[i] = rounded(a * wide(c[i]) - b * wide(s[i]))
                    high[i] = rounded(b * wide(c[half + i]) + a * wide(s[half + i]))
            slot = numba.carray(pointer(slots + row * 8), (1,), dtype=np.int64)[0]
            keys = items(at + heads * head_bytes, kv_items, item)
            values = items(at + turned * head_bytes, kv_items, item)
            to_k = items(k_pool + slot * slot_bytes, kv_items, item)
            to_v = items(v_pool + slot * slot_bytes, kv_items, item)
            for i in range(kv_items):
                to_k[i] = keys[i]
                to_v[i] = values[i]

    return rotary


@inlined
def _score_page(
    queries: int,
    keys: int,
    ahead: int,
    tokens: int,
    skip: int,
    kvs: int,
    scores: int,
    width: int,
    item: Any,
    dim: int,
    group: int,
    head_bytes: int,
    slot_bytes: int,
) -> None:
    """Scores of a page's tokens (`keys`) into columns of `scores`, `-inf` for the first `skip`."""
    for token in range(tokens):
        for line in range(kvs * head_bytes // LINE_BYTES):
            prefetch(ahead + token * slot_bytes + line * LINE_BYTES)
        for kv in range(kvs):
            k = items(keys + token * slot_bytes + kv * head_bytes, dim, item)
            for g in range(group):
                query = floats(queries + (kv * group + g) * dim * 4, dim)
                product = np.float32(0.0)
                for d in range(dim):
                    product += query[d] * wide(k[d])
                cell = floats(scores + ((kv * group + g) * width + token) * 4, 1)
                cell[0] = product if token >= skip else np.float32(-np.inf)


@inlined
def _soften(
    scores: int, tokens: int, width: int, tops: Any, totals: Any, sums: int, served: int, dim: int
) -> None:
    """Scores to weights relative to the largest so far; what was summed before is scaled alike."""
    for head in range(served):
        row = floats(scores + head * width * 4, tokens)
        top = tops[head]
        for i in range(tokens):
            top = max(top, row[i])
        total = np.float32(0.0)
        for i in range(tokens):
            row[i] = exp(row[i] - top)
            total += row[i]
        before = exp(tops[head] - top)
        totals[head] = totals[head] * before + total
        tops[head] = top
        summed = floats(sums + head * dim * 4, dim)
        for d in range(dim):
            summed[d] *= before


@inlined
def _weigh_page(
    values: int,
    ahead: int,
    tokens: int,
    kvs: int,
    scores: int,
    width: int,
    sums: int,
    item: Any,
    dim: int,
    group: int,
    head_bytes: int,
    slot_bytes: int,
) -> None:
    """Add a page's V, weighted, to the sums: four tokens in one pass over the sums."""
    fours = tokens // 4 * 4
    for token in range(0, fours, 4):
        for near in range(token, token + 4):
            for line in range(kvs * head_bytes // LINE_BYTES):
                prefetch(ahead + near * slot_bytes + line * LINE_BYTES)
        for kv in range(kvs):
            at = values + token * slot_bytes + kv * head_bytes
            v0 = items(at, dim, item)
            v1 = items(at + slot_bytes, dim, item)
            v2 = items(at + 2 * slot_bytes, dim, item)
            v3 = items(at + 3 * slot_bytes, dim, item)
            for g in range(group):
                w = floats(scores + ((kv * group + g) * width + token) * 4, 4)
                w0, w1, w2, w3 = w[0], w[1], w[2], w[3]
                summed = floats(sums + (kv * group + g) * dim * 4, dim)
                for d in range(dim):
                    first = w0 * wide(v0[d]) + w1 * wide(v1[d])
                    summed[d] += first + (w2 * wide(v2[d]) + w3 * wide(v3[d]))
    for token in range(fours, tokens):
        for kv in range(kvs):
            v = items(values + token * slot_bytes + kv * head_bytes, dim, item)
            for g in range(group):
                weight = floats(scores + ((kv * group + g) * width + token) * 4, 1)[0]
                summed = floats(sums + (kv * group + g) * dim * 4, dim)
                for d in range(dim):
                    summed[d] += weight * wide(v[d])


@inlined
def _attend_row(
    q: int,
    out: int,
    k: int,
    v: int,
    pages: int,
    low: int,
    end: int,
    page_tokens: int,
    scale: float,
    kvs: int,
    item: Any,
    dim: int,
    group: int,
    head_bytes: int,
    slot_bytes: int,
    rounded: Any,
) -> None:
    """One row over tokens `[low, end)`, for the `kvs` KV heads that `q`, `out`, `k`, `v` begin with."""
    served = kvs * group
    block_pages = max(1, BLOCK_TOKENS // page_tokens)
    width = block_pages * page_tokens
    page_bytes = page_tokens * slot_bytes
    # One array, read to the very end: numba frees an array after the last use of its *name*, whatever still
    # goes through its address, and another thread would be given memory that is in use here.
    room = np.empty(served * (2 * dim + width), np.float32)
    sums, queries = room[: served * dim], room[served * dim : 2 * served * dim]
    sums_at = room.ctypes.data
    queries_at = sums_at + served * dim * 4
    scores_at = queries_at + served * dim * 4
    tops, totals = np.full(served, -np.inf, np.float32), np.zeros(served, np.float32)
    source, target = items(q, served * dim, item), items(out, served * dim, item)
    for i in range(served * dim):
        sums[i] = np.float32(0.0)
        queries[i] = wide(source[i]) * np.float32(scale)
    page_count = (end + page_tokens - 1) // page_tokens
    page_of = indices(pages, page_count)
    for begin in range(low // page_tokens, page_count, block_pages):
        stop = min(begin + block_pages, page_count)
        for page in range(begin, stop):
            # the page read after this one: the block's next K, then its first V
            if page + 1 < stop:
                ahead = k + page_of[page + 1] * page_bytes
            else:
                ahead = v + page_of[begin] * page_bytes
            at, column = k + page_of[page] * page_bytes, scores_at + (page - begin) * page_tokens * 4
            held = min(page_tokens, end - page * page_tokens)
            skip = low - page * page_tokens
            _score_page(
                queries_at,
                at,
                ahead,
                held,
                skip,
                kvs,
                column,
                width,
                item,
                dim,
                group,
                head_bytes,
                slot_bytes,
            )
        block_tokens = min(stop * page_tokens, end) - begin * page_tokens
        _soften(scores_at, block_tokens, width, tops, totals, sums_at, served, dim)
        for page in range(begin, stop):
            # the block's next V, then the next block's first K
            if page + 1 < stop:
                ahead = v + page_of[page + 1] * page_bytes
            else:
                ahead = k + page_of[min(page + 1, page_count - 1)] * page_bytes
            at, column = v + page_of[page] * page_bytes, scores_at + (page - begin) * page_tokens * 4
            held = min(page_tokens, end - page * page_tokens)
            _weigh_page(
                at, ahead, held, kvs, column, width, sums_at, item, dim, group, head_bytes, slot_bytes
            )
    for head in range(served):
        share = np.float32(1.0) / totals[head]
        for d in range(dim):
            target[head * dim + d] = rounded(sums[head * dim + d] * share)


def _attend(dtype: str, dim: int, heads: int, kv_heads: int, threads: int) -> Callable[..., None]:
    item, item_bytes, rounded = ITEMS[dtype], ITEM_BYTES[dtype], ROUNDED[dtype]
    group, head_bytes, slot_bytes = heads // kv_heads, dim * item_bytes, kv_heads * dim * item_bytes

    def attend(
        qkv: int,
        out: int,
        k_pool: int,
        v_pool: int,
        at: int,
        ends: int,
        pages: int,
        first_page: int,
        count: int,
        page_tokens: int,
        window: int,
        scale: float,
    ) -> None:
        rows, end_of, first_of = indices(at, count), indices(ends, count), indices(first_page, count)
        # one thread reads all heads of a token together; several share the rows, then a row's heads
        shares = min(kv_heads, max(1, (threads + count - 1) // count))
        for job in numba.prange(count * shares):
            whole_vectors()
            index, share = job // shares, job % shares
            end, row = np.int64(end_of[index]), np.int64(rows[index])
            first, last = share * kv_heads // shares, (share + 1) * kv_heads // shares
            _attend_row(
                qkv + (row * (heads + 2 * kv_heads) + first * group) * head_bytes,
                out + (row * heads + first * group) * head_bytes,
                k_pool + first * head_bytes,
                v_pool + first * head_bytes,
                pages + np.int64(first_of[index]) * 4,
                max(end - window, 0) if window > 0 else 0,
                end,
                page_tokens,
                scale,
                last - first,
                item,
                dim,
                group,
                head_bytes,
                slot_bytes,
                rounded,
            )

    return attend
