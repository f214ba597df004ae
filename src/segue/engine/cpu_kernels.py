"""The loops between matrix products for which torch has no single operation, compiled by numba.

A decode step streams all weights through the caches, so what runs between two products runs cold:
twenty small tensor operations a layer cost far more there than their arithmetic. Here they are three:
norm; rotary embedding with the write into the pool; attention of single rows over paged KV (Kwon et
al., PagedAttention, 2023; softmax in blocks after Milakov and Gimelshein, 2018).

Kernels take addresses (`Tensor.data_ptr()`): unpacking a dozen arrays would cost as much as a norm.
Their caller vouches that everything is contiguous and that pages and positions were checked
(`packing.check`). Arithmetic is float32; each result is rounded once. numba keeps what it compiled on
disk, by this file's date: all that the kernels use is therefore here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numba
import numpy as np
from llvmlite import ir
from numba import float64, int64, void
from numba.core import cgutils, types
from numba.extending import intrinsic, register_jitable

from segue.core.errors import ConfigError

#: How float arithmetic may be rearranged. Not everything that "fast" allows: NaN must stay NaN, so
#: that a broken model is seen as one.
_OPTIONS: dict[str, Any] = {
    "fastmath": {"reassoc", "contract", "arcp", "nsz"},
    "error_model": "numpy",
    "nogil": True,
}
#: Tokens whose scores are held at once; with their K and V they fit into the first-level cache.
BLOCK_TOKENS = 128
#: Bytes that one prefetch brings: a cache line.
LINE_BYTES = 64
#: numpy has no bfloat16, numba no float16: both are integers here, told apart by their sign.
_ITEMS: dict[str, Any] = {"bfloat16": np.uint16, "float16": np.int16, "float32": np.float32}
_WORD = ir.IntType(32)
_ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


class Kernels(NamedTuple):
    """The compiled loops of one model; `make_kernels` documents their arguments."""

    norm: Callable[..., None]
    turn: Callable[..., None]
    attend: Callable[..., None]


@functools.lru_cache(maxsize=16)
def make_kernels(dtype: str, head_dim: int, heads: int, kv_heads: int, threads: int) -> Kernels:
    """The kernels for heads of one size; compiling takes some seconds the first time on a machine.

    `norm(x, out, weight, rows, size, eps)`: root mean square norm of rows `[rows, size]`; `weight` is
    float32 `[size]`.

    `turn(qkv, rows, cos, sin, head_norm, eps, k_pool, v_pool, slots)`: rotates the heads of q and k in
    place in `qkv` `[rows, heads + 2 kv_heads, head_dim]` by `cos` and `sin` `[rows, head_dim]`, after a
    norm of each head if `head_norm` (float32 `[heads + kv_heads, head_dim]`) is not 0, and writes k
    and v to the slots `slots` (int64 `[rows]`) of one layer's pool.

    `attend(qkv, out, k_pool, v_pool, at, ends, pages, first_page, count, page_tokens, window, scale)`:
    for each of `count` single rows, at `at` (int32) in `qkv` and in `out` `[rows, heads, head_dim]`,
    attention over the tokens before `ends` (int32) that lie in the pages from `pages[first_page]` on
    (int32); over the last `window` of them if it is not 0.

    Raises ConfigError for a type that is none of bfloat16, float16 and float32.
    """
    if dtype not in _ITEMS:
        raise ConfigError(f"--dtype must be one of {', '.join(_ITEMS)}, not {dtype}")
    norm, turn = _norm(dtype), _turn(dtype, head_dim, heads, kv_heads)
    attend = _attend(dtype, head_dim, heads, kv_heads, threads)
    return Kernels(
        norm=_compile(norm, void(*[int64] * 5, float64), threads),
        turn=_compile(turn, void(*[int64] * 5, float64, *[int64] * 3), threads),
        attend=_compile(attend, void(*[int64] * 11, float64), threads),
    )


def _compile(function: Callable[..., None], signature: Any, threads: int) -> Callable[..., None]:
    options = {**_OPTIONS, "parallel": threads > 1}
    compiled: Callable[..., None]
    try:
        compiled = numba.njit(signature, **options, cache=True)(function)
    except RuntimeError:  # no folder that can be written to: compiled at every start, then
        compiled = numba.njit(signature, **options)(function)
    return compiled


# What numba's language lacks: addresses, prefetching, wide vectors, floats of 16 bits.


@intrinsic
def _pointer(_typing: Any, address: Any) -> Any:
    def build(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(address), build


@intrinsic
def _prefetch(_typing: Any, address: Any) -> Any:
    def build(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, _WORD, _WORD, _WORD])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        read, keep, data = (_WORD(value) for value in (0, 3, 1))
        builder.call(function, [builder.inttoptr(args[0], cgutils.voidptr_t), read, keep, data])
        return context.get_dummy_value()

    return types.void(address), build


@intrinsic
def _whole_vectors(_typing: Any) -> Any:
    """Lets the function that calls it use the widest vectors; LLVM prefers half of them on
    processors of which early ones slowed down. (`AttributeSet.add` knows no attribute with a value.)"""

    def build(context: Any, builder: Any, _signature: Any, _args: Any) -> Any:
        set.add(builder.function.attributes, '"prefer-vector-width"="512"')
        builder.function.attributes.add("noinline")
        return context.get_dummy_value()

    return types.void(), build


@intrinsic
def _wide(_typing: Any, item: Any) -> Any:
    """An item as float32."""

    def build(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        if item == types.uint16:
            bits = builder.shl(builder.zext(args[0], _WORD), _WORD(16))
            return builder.bitcast(bits, ir.FloatType())
        return _widened_half(builder, args[0]) if item == types.int16 else args[0]

    return types.float32(item), build


# float16 is converted by integer arithmetic: where a processor has no instruction for it, LLVM calls
# a function that is not there and ends the process.


def _widened_half(builder: Any, half: Any) -> Any:
    bits = builder.zext(half, _WORD)
    sign = builder.shl(builder.and_(bits, _WORD(0x8000)), _WORD(16))
    magnitude = builder.shl(builder.and_(bits, _WORD(0x7FFF)), _WORD(13))
    # The exponents' biases differ by 112; a product turns subnormal numbers into normal ones.
    rebias = builder.bitcast(_WORD((127 + 112) << 23), ir.FloatType())
    finite = builder.bitcast(builder.fmul(builder.bitcast(magnitude, ir.FloatType()), rebias), _WORD)
    endless = builder.icmp_unsigned(">=", magnitude, _WORD(0x7C00 << 13))
    wide = builder.select(endless, builder.or_(magnitude, _WORD(0x7F800000)), finite)
    return builder.bitcast(builder.or_(wide, sign), ir.FloatType())


@intrinsic
def _half_bits(_typing: Any, value: Any) -> Any:
    """The nearest float16, ties to even; NaN stays one."""

    def build(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        bits = builder.bitcast(args[0], _WORD)
        magnitude = builder.and_(bits, _WORD(0x7FFFFFFF))
        # 0.5 ends where float16's subnormal numbers do, so this sum is rounded as they are.
        half = builder.bitcast(_WORD(0x3F000000), ir.FloatType())
        sum_bits = builder.bitcast(builder.fadd(builder.bitcast(magnitude, ir.FloatType()), half), _WORD)
        small = builder.sub(sum_bits, _WORD(0x3F000000))
        rebiased = builder.sub(magnitude, _WORD(112 << 23))
        odd = builder.and_(builder.lshr(rebiased, _WORD(13)), _WORD(1))
        normal = builder.lshr(builder.add(builder.add(rebiased, _WORD(0xFFF)), odd), _WORD(13))
        too_large = builder.icmp_unsigned(">=", magnitude, _WORD(0x47800000))
        nan = builder.icmp_unsigned(">", magnitude, _WORD(0x7F800000))
        found = builder.select(builder.icmp_unsigned("<", magnitude, _WORD(0x38800000)), small, normal)
        found = builder.select(too_large, _WORD(0x7C00), found)
        found = builder.select(nan, _WORD(0x7E00), found)
        sign = builder.and_(builder.lshr(bits, _WORD(16)), _WORD(0x8000))
        return builder.trunc(builder.or_(found, sign), ir.IntType(16))

    return types.int16(types.float32), build


@register_jitable
def _half(value: Any) -> Any:
    return _half_bits(value)


@register_jitable
def _float(value: Any) -> Any:
    return value


@register_jitable
def _bfloat(value: Any) -> Any:
    """The nearest bfloat16, ties to even; NaN stays one."""
    bits = np.float32(value).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.uint16(rounded) if value == value else np.uint16(0x7FC0)


@register_jitable
def _exp(x: Any) -> Any:
    """e^x for x <= 0 within 3e-7 (e^-87 below -87): a power of two times a polynomial."""
    y = max(np.float32(x), np.float32(-87.0)) * np.float32(1.4426950408889634)
    whole = np.floor(y + np.float32(0.5))
    f = y - whole
    p = np.float32(1.535336188319500e-4)
    p = p * f + np.float32(1.339887440266574e-3)
    p = p * f + np.float32(9.618437357674640e-3)
    p = p * f + np.float32(5.550332471162809e-2)
    p = p * f + np.float32(2.402264791363012e-1)
    p = p * f + np.float32(6.931472028550421e-1)
    p = p * f + np.float32(1.0)
    return p * np.int32((np.int32(whole) + np.int32(127)) << np.int32(23)).view(np.float32)


#: Helpers become part of the kernel that calls them, so that its sizes are constants in them.
_inlined = numba.njit(inline="always", **_OPTIONS)


@register_jitable
def _items(address: Any, count: Any, item: Any) -> Any:
    return numba.carray(_pointer(address), (count,), dtype=item)


@register_jitable
def _floats(address: Any, count: Any) -> Any:
    return numba.carray(_pointer(address), (count,), dtype=np.float32)


@register_jitable
def _indices(address: Any, count: Any) -> Any:
    return numba.carray(_pointer(address), (count,), dtype=np.int32)


#: How a float32 is rounded to an item. (Plain functions: numba's cache knows intrinsics by process.)
_ROUNDED: dict[str, Any] = {"bfloat16": _bfloat, "float16": _half, "float32": _float}


def _norm(dtype: str) -> Callable[..., None]:
    item, item_bytes, rounded = _ITEMS[dtype], _ITEM_BYTES[dtype], _ROUNDED[dtype]

    def norm(x: int, out: int, weight: int, rows: int, size: int, eps: float) -> None:
        weights = _floats(weight, size)
        for row in numba.prange(rows):
            _whole_vectors()
            source = _items(x + row * size * item_bytes, size, item)
            target = _items(out + row * size * item_bytes, size, item)
            squares = np.float32(0.0)
            for i in range(size):
                squares += _wide(source[i]) * _wide(source[i])
            scale = np.float32(1.0) / np.sqrt(squares / np.float32(size) + np.float32(eps))
            for i in range(size):
                target[i] = rounded(_wide(source[i]) * scale * weights[i])

    return norm


@_inlined
def _norm_head(low: Any, high: Any, half: int, weight: int, eps: float, rounded: Any) -> None:
    weights = _floats(weight, 2 * half)
    squares = np.float32(0.0)
    for i in range(half):
        squares += _wide(low[i]) * _wide(low[i]) + _wide(high[i]) * _wide(high[i])
    scale = np.float32(1.0) / np.sqrt(squares / np.float32(2 * half) + np.float32(eps))
    for i in range(half):
        low[i] = rounded(_wide(low[i]) * scale * weights[i])
        high[i] = rounded(_wide(high[i]) * scale * weights[half + i])


def _turn(dtype: str, dim: int, heads: int, kv_heads: int) -> Callable[..., None]:
    item, item_bytes, rounded = _ITEMS[dtype], _ITEM_BYTES[dtype], _ROUNDED[dtype]
    turned, half, head_bytes, kv_items = heads + kv_heads, dim // 2, dim * item_bytes, kv_heads * dim
    row_bytes, slot_bytes = (turned + kv_heads) * head_bytes, kv_heads * head_bytes

    def turn(
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
            _whole_vectors()
            at = qkv + row * row_bytes
            c = _items(cos + row * head_bytes, dim, item)
            s = _items(sin + row * head_bytes, dim, item)
            for head in range(turned):
                low = _items(at + head * head_bytes, half, item)
                high = _items(at + head * head_bytes + half * item_bytes, half, item)
                if head_norm != 0:
                    _norm_head(low, high, half, head_norm + head * dim * 4, eps, rounded)
                for i in range(half):
                    a, b = _wide(low[i]), _wide(high[i])
                    low[i] = rounded(a * _wide(c[i]) - b * _wide(s[i]))
                    high[i] = rounded(b * _wide(c[half + i]) + a * _wide(s[half + i]))
            slot = numba.carray(_pointer(slots + row * 8), (1,), dtype=np.int64)[0]
            keys = _items(at + heads * head_bytes, kv_items, item)
            values = _items(at + turned * head_bytes, kv_items, item)
            to_k = _items(k_pool + slot * slot_bytes, kv_items, item)
            to_v = _items(v_pool + slot * slot_bytes, kv_items, item)
            for i in range(kv_items):
                to_k[i] = keys[i]
                to_v[i] = values[i]

    return turn


@_inlined
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
            _prefetch(ahead + token * slot_bytes + line * LINE_BYTES)
        for kv in range(kvs):
            k = _items(keys + token * slot_bytes + kv * head_bytes, dim, item)
            for g in range(group):
                query = _floats(queries + (kv * group + g) * dim * 4, dim)
                product = np.float32(0.0)
                for d in range(dim):
                    product += query[d] * _wide(k[d])
                cell = _floats(scores + ((kv * group + g) * width + token) * 4, 1)
                cell[0] = product if token >= skip else np.float32(-np.inf)


@_inlined
def _soften(
    scores: int, tokens: int, width: int, tops: Any, totals: Any, sums: int, served: int, dim: int
) -> None:
    """Scores to weights relative to the largest so far; what was summed before is scaled alike."""
    for head in range(served):
        row = _floats(scores + head * width * 4, tokens)
        top = tops[head]
        for i in range(tokens):
            top = max(top, row[i])
        total = np.float32(0.0)
        for i in range(tokens):
            row[i] = _exp(row[i] - top)
            total += row[i]
        before = _exp(tops[head] - top)
        totals[head] = totals[head] * before + total
        tops[head] = top
        summed = _floats(sums + head * dim * 4, dim)
        for d in range(dim):
            summed[d] *= before


@_inlined
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
                _prefetch(ahead + near * slot_bytes + line * LINE_BYTES)
        for kv in range(kvs):
            at = values + token * slot_bytes + kv * head_bytes
            v0 = _items(at, dim, item)
            v1 = _items(at + slot_bytes, dim, item)
            v2 = _items(at + 2 * slot_bytes, dim, item)
            v3 = _items(at + 3 * slot_bytes, dim, item)
            for g in range(group):
                w = _floats(scores + ((kv * group + g) * width + token) * 4, 4)
                w0, w1, w2, w3 = w[0], w[1], w[2], w[3]
                summed = _floats(sums + (kv * group + g) * dim * 4, dim)
                for d in range(dim):
                    first = w0 * _wide(v0[d]) + w1 * _wide(v1[d])
                    summed[d] += first + (w2 * _wide(v2[d]) + w3 * _wide(v3[d]))
    for token in range(fours, tokens):
        for kv in range(kvs):
            v = _items(values + token * slot_bytes + kv * head_bytes, dim, item)
            for g in range(group):
                weight = _floats(scores + ((kv * group + g) * width + token) * 4, 1)[0]
                summed = _floats(sums + (kv * group + g) * dim * 4, dim)
                for d in range(dim):
                    summed[d] += weight * _wide(v[d])


@_inlined
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
    source, target = _items(q, served * dim, item), _items(out, served * dim, item)
    for i in range(served * dim):
        sums[i] = np.float32(0.0)
        queries[i] = _wide(source[i]) * np.float32(scale)
    page_count = (end + page_tokens - 1) // page_tokens
    page_of = _indices(pages, page_count)
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
    item, item_bytes, rounded = _ITEMS[dtype], _ITEM_BYTES[dtype], _ROUNDED[dtype]
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
        rows, end_of, first_of = _indices(at, count), _indices(ends, count), _indices(first_page, count)
        # one thread reads all heads of a token together; several share the rows, then a row's heads
        shares = min(kv_heads, max(1, (threads + count - 1) // count))
        for job in numba.prange(count * shares):
            _whole_vectors()
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
