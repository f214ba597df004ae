"""Operations that numba lacks: addresses, prefetching, wide vectors, 16-bit floats, a fast exponential."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic, register_jitable

#: How float arithmetic may be rearranged. Not everything that "fast" allows: NaN must stay NaN, so
#: that a broken model is seen as one.
OPTIONS: dict[str, Any] = {
    "fastmath": {"reassoc", "contract", "arcp", "nsz"},
    "error_model": "numpy",
    "nogil": True,
}
#: numpy has no bfloat16, numba no float16: both are integers here, told apart by their sign.
ITEMS: dict[str, Any] = {"bfloat16": np.uint16, "float16": np.int16, "float32": np.float32}
ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
_WORD = ir.IntType(32)


@intrinsic
def pointer(_typing: Any, address: Any) -> Any:
    """An address as a pointer."""

    def build(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(address), build


@intrinsic
def prefetch(_typing: Any, address: Any) -> Any:
    """Ask for the cache line at `address`."""

    def build(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, _WORD, _WORD, _WORD])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        read, keep, data = (_WORD(value) for value in (0, 3, 1))
        builder.call(function, [builder.inttoptr(args[0], cgutils.voidptr_t), read, keep, data])
        return context.get_dummy_value()

    return types.void(address), build


@intrinsic
def whole_vectors(_typing: Any) -> Any:
    """Lets the function that calls it use the widest vectors; LLVM prefers half of them on
    processors of which early ones slowed down. (`AttributeSet.add` knows no attribute with a value.)"""

    def build(context: Any, builder: Any, _signature: Any, _args: Any) -> Any:
        set.add(builder.function.attributes, '"prefer-vector-width"="512"')
        builder.function.attributes.add("noinline")
        return context.get_dummy_value()

    return types.void(), build


@intrinsic
def wide(_typing: Any, item: Any) -> Any:
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
def exp(x: Any) -> Any:
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
inlined = numba.njit(inline="always", **OPTIONS)


@register_jitable
def items(address: Any, count: Any, item: Any) -> Any:
    """An array of `count` items of the type `item` at `address`."""
    return numba.carray(pointer(address), (count,), dtype=item)


@register_jitable
def floats(address: Any, count: Any) -> Any:
    """An array of `count` float32 at `address`."""
    return numba.carray(pointer(address), (count,), dtype=np.float32)


@register_jitable
def indices(address: Any, count: Any) -> Any:
    """An array of `count` int32 at `address`."""
    return numba.carray(pointer(address), (count,), dtype=np.int32)


#: How a float32 is rounded to an item. (Plain functions: numba's cache knows intrinsics by process.)
ROUNDED: dict[str, Any] = {"bfloat16": _bfloat, "float16": _half, "float32": _float}
