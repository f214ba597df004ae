"""A decoder under test, and hypothesis strategies that change the values and bytes of valid messages."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from fuzz_types import ANYTHING
from hypothesis import strategies as st

Draw = Callable[[st.SearchStrategy[Any]], Any]
#: Changes a message by what it draws.
Change = Callable[[Draw, bytes], bytes]

#: msgpack never uses this byte: targets take several messages with it between them.
SEPARATOR = b"\xc1"
MAX_BYTES = 256 * 1024


@dataclass(frozen=True)
class Target:
    """One decoder of bytes from outside.

    `run` returns what became of a message, as short text, or raises a SegueError; anything else that it
    raises is a finding. `seeds` are valid messages, `value_change` changes the value behind the bytes of
    one, and `found` are inputs that broke the decoder once.
    """

    name: str
    seeds: Callable[[], list[bytes]]
    run: Callable[[bytes], str]
    value_change: Change | None = None
    found: Sequence[bytes] = ()


NUMBERS = (-1, 127, 2**15, 2**31 - 1, 2**31, 2**63, 2**64 - 1, -(2**31), -(2**63))
FLOATS = (-0.0, 0.1, -1e300, 2.0**64, float("inf"), float("-inf"), float("nan"))
TEXTS = ("\ud7ff", "-", "0x10", "1e9", "true", "null", "NaN", "%s%n", '"', "[", "a" * 5000)
_ODD: st.SearchStrategy[Any] = ANYTHING | st.sampled_from((*NUMBERS, *FLOATS, *TEXTS))
_MANY = st.sampled_from((2, 3, 500))
_PIECES = (
    st.binary(max_size=16)
    | st.sampled_from(NUMBERS).map(lambda n: (n % 2**64).to_bytes(8, "little"))
    | st.sampled_from((b"\0" * 4, b"\xff" * 4, b"7" * 60, b"\r\n"))
    | st.sampled_from((b"[", b'{"a":', b"\x91")).map(lambda opening: opening * 3000)
)


def changed_value(draw: Draw, value: Any, odd: st.SearchStrategy[Any]) -> Any:
    """`value` with one node dropped, renamed, repeated, or replaced by one of `odd`."""
    if not isinstance(value, dict | list) or not value or draw(st.integers(0, 9)) == 0:
        return draw(odd)
    at = draw(st.integers(0, len(value) - 1))
    pairs = list(value.items()) if isinstance(value, dict) else list(enumerate(value))
    key, node = pairs[at]
    match draw(st.sampled_from(("inside", "inside", "inside", "drop", "other"))):
        case "drop":
            pairs[at : at + 1] = []
        case "other" if isinstance(value, dict):
            pairs[at] = draw(st.text(max_size=8)), node
        case "other":
            # Long runs of small nodes only: repetitions of repetitions would fill the memory.
            pairs[at : at + 1] = [(key, node)] * (2 if isinstance(node, dict | list) else draw(_MANY))
        case _:
            pairs[at] = key, changed_value(draw, node, odd)
    return dict(pairs) if isinstance(value, dict) else [node for _, node in pairs]


def changed_msgpack(draw: Draw, data: bytes) -> bytes:
    """Change the value of one of the messages of `data`."""
    parts = data.split(SEPARATOR)
    at = draw(st.integers(0, len(parts) - 1))
    try:
        value = changed_value(draw, msgspec.msgpack.decode(parts[at]), _ODD | st.binary(max_size=300))
        parts[at] = msgspec.msgpack.encode(value)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return changed_bytes(draw, data, data)
    return SEPARATOR.join(parts)


def changed_json(draw: Draw, data: bytes) -> bytes:
    """Change the value behind JSON; writes NaN and Infinity too."""
    try:
        value = changed_value(draw, json.loads(data), _ODD)
    except (ValueError, RecursionError):
        return changed_bytes(draw, data, data)
    return json.dumps(value, ensure_ascii=draw(st.booleans())).encode("utf-8", "surrogatepass")


def changed_bytes(draw: Draw, data: bytes, other: bytes) -> bytes:
    """Replace, cut, repeat or flip a piece of `data`, or splice it with `other`."""
    at = draw(st.integers(0, len(data)))
    end = min(len(data), at + draw(st.sampled_from((0, 1, 1, 2, 4, 8, 64))))
    match draw(st.sampled_from(("flip", "replace", "cut", "repeat", "splice"))):
        case "flip" if at < len(data):
            return data[:at] + bytes([data[at] ^ 1 << draw(st.integers(0, 7))]) + data[at + 1 :]
        case "cut":
            return data[:at]
        case "repeat":
            return data[:end] + data[at:end] * draw(st.sampled_from((1, 3, 50))) + data[end:]
        case "splice":
            return data[:at] + other[draw(st.integers(0, len(other))) :]
        case _:
            return data[:at] + draw(_PIECES) + data[end:]


@st.composite
def changed(draw: Draw, messages: st.SearchStrategy[bytes], value_change: Change | None) -> bytes:
    """Messages as they are, and with up to three changes."""
    data: bytes = draw(messages)
    for _ in range(draw(st.integers(0, 3))):
        if value_change is not None and draw(st.booleans()):
            data = value_change(draw, data)
        else:
            data = changed_bytes(draw, data, draw(messages))
    return data[:MAX_BYTES]
