"""Hypothesis strategies for the values of msgspec types, as they are encoded: maps, lists, numbers.

Every field has its declared type, and any value of it: bounds that a constructor checks are not known here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from hypothesis import strategies as st
from msgspec import inspect as types

Strategy = st.SearchStrategy[Any]

NUMBERS = st.sampled_from((0, 1, 2, 7, 255, 2**16, 2**31, 2**32 - 1, 2**53, 2**63 - 1))
SIGNED = st.sampled_from((-1, -(2**31), -(2**63)))
TEXTS = st.sampled_from(("", "m", "r0", "0", "127.0.0.1", "../x", "\0", "é你🙂", "a" * 300)) | st.text(
    max_size=8
)
ANYTHING = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)


class Types:
    """Strategies for one wire format. `known` replaces the strategy of a class, `fields` that of every
    field of a name; with `text_only` (JSON) there is no NaN, no infinity, and bytes are base64."""

    def __init__(
        self,
        *,
        known: Mapping[type, Strategy] | None = None,
        fields: Mapping[str, Strategy] | None = None,
        text_only: bool = False,
    ) -> None:
        self._known = dict(known or {})
        self._fields = dict(fields or {})
        self._text_only = text_only
        self._structs: dict[type, Strategy] = {}

    def of(self, wanted: Any) -> Strategy:
        """Any value of the type `wanted`."""
        return self._make(types.type_info(wanted))

    def encoded(self, wanted: Any) -> st.SearchStrategy[bytes]:
        """The same as bytes."""
        encode: Callable[[Any], bytes] = msgspec.json.encode if self._text_only else msgspec.msgpack.encode
        return self.of(wanted).map(encode)

    def _make(self, t: types.Type) -> Strategy:
        match t:
            case types.AnyType():
                return ANYTHING
            case types.NoneType():
                return st.none()
            case types.BoolType():
                return st.booleans()
            case types.IntType():
                return NUMBERS | SIGNED | st.integers(-3, 300)
            case types.FloatType():
                extremes = (0.0, -0.0, 0.5, 1e-300, 1e300, -1.0)
                odd = () if self._text_only else (math.nan, math.inf, -math.inf)
                return st.sampled_from((*extremes, *odd)) | st.floats(0, 2)
            case types.StrType():
                return TEXTS
            case types.BytesType():
                return st.sampled_from((b"", b"s" * 16, b"n" * 32)) | st.binary(max_size=40)
            case types.EnumType():
                return st.sampled_from([member.value for member in t.cls])
            case types.LiteralType():
                return st.sampled_from(t.values)
            case types.ListType() | types.VarTupleType():
                return st.lists(self._make(t.item_type), max_size=4)
            case types.TupleType():
                return st.tuples(*map(self._make, t.item_types))
            case types.DictType():
                return st.dictionaries(self._make(t.key_type), self._make(t.value_type), max_size=3)
            case types.UnionType():
                return st.one_of(*map(self._make, t.types))
            case types.StructType():
                return self._struct(t)
            case _:
                raise TypeError(f"no strategy for {type(t).__name__}: add one")

    def _struct(self, t: types.StructType) -> Strategy:
        if t.cls in self._known:
            return self._known[t.cls]
        if t.cls not in self._structs:
            self._structs[t.cls] = st.deferred(lambda: self._fields_of(t))
        return self._structs[t.cls]

    def _fields_of(self, t: types.StructType) -> Strategy:
        made = {
            f.encode_name: self._fields[f.name] if f.name in self._fields else self._make(f.type)
            for f in t.fields
        }
        if t.array_like:
            head = [] if t.tag is None else [st.just(t.tag)]
            return st.tuples(*head, *made.values())
        must = {f.encode_name: made[f.encode_name] for f in t.fields if f.required}
        if t.tag_field is not None:
            must[t.tag_field] = st.just(t.tag)
        return st.fixed_dictionaries(must, optional={k: v for k, v in made.items() if k not in must})
