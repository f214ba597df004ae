"""Mutations of valid inputs: on their bytes, and on the values that msgpack or JSON bytes stand for."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import msgspec

NUMBERS = (0, 1, -1, 2, 127, 128, 255, 256, 2**15, 2**16, 2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**63)
NUMBERS += (2**64 - 1, -(2**31), -(2**63))
FLOATS = (0.0, -0.0, 1e-300, 1e300, -1e300, float("inf"), float("-inf"), float("nan"), 0.1, 2.0**64)
TEXTS = ("", "\0", "a" * 300, "é你🙂", "../../etc/passwd", "127.0.0.1", "%s%n", "\ud7ff", "-", "0x10", "1e9")
TEXTS += ("true", "null", "NaN", "\n", '"', "[", "{", "a" * 5000)
MAX_BYTES = 32 * 1024

Mutation = Callable[[random.Random, bytes, list[bytes]], bytes]


def _at(rng: random.Random, data: bytes) -> int:
    return rng.randrange(len(data) + 1)


def flip(rng: random.Random, data: bytes, pool: list[bytes]) -> bytes:
    if not data:
        return bytes([rng.randrange(256)])
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 8))):
        out[rng.randrange(len(out))] ^= 1 << rng.randrange(8)
    return bytes(out)


def overwrite(rng: random.Random, data: bytes, pool: list[bytes]) -> bytes:
    width = rng.choice((1, 2, 4, 8))
    value = rng.choice(NUMBERS) & (2 ** (8 * width) - 1)
    blob = value.to_bytes(width, rng.choice(("little", "big")))
    at = _at(rng, data)
    return data[:at] + blob + data[at + width :]


def insert(rng: random.Random, data: bytes, pool: list[bytes]) -> bytes:
    at = _at(rng, data)
    return data[:at] + rng.randbytes(rng.choice((1, 1, 2, 4, 16, 200))) + data[at:]


def delete(rng: random.Random, data: bytes, pool: list[bytes]) -> bytes:
    at = _at(rng, data)
    return data[:at] + data[at + rng.choice((1, 1, 2, 4, 16, 64)) :]


def cut(rng: random.Random, data: bytes, pool: list[bytes]) -> bytes:
    return data[: _at(rng, data)]


def repeat(rng: random.Random, data: bytes, pool: list[bytes]) -> bytes:
    a, b = sorted((_at(rng, data), _at(rng, data)))
    return data[:b] + data[a:b] * rng.choice((1, 1, 3, 50)) + data[b:]


def splice(rng: random.Random, data: bytes, pool: list[bytes]) -> bytes:
    other = rng.choice(pool)
    return data[: _at(rng, data)] + other[_at(rng, other) :]


BYTE_MUTATIONS: tuple[Mutation, ...] = (flip, flip, overwrite, insert, delete, cut, repeat, splice)


def _leaf(rng: random.Random, rich: bool) -> Any:
    kind = rng.randrange(7)
    if kind == 0:
        return rng.choice(NUMBERS)
    if kind == 1:
        return rng.choice(FLOATS) if rich else rng.choice((0.5, -1e300, 1e300))
    if kind == 2:
        return rng.choice(TEXTS)
    if kind == 3:
        return rng.choice((None, True, False))
    if kind == 4:
        return rng.randbytes(rng.choice((0, 1, 16, 32, 300))) if rich else ""
    if kind == 5:
        return [rng.choice(NUMBERS)] * rng.choice((0, 1, 3, 2000))
    return {rng.choice(TEXTS[:8]): rng.choice(NUMBERS)}


def _nest(value: Any, depth: int) -> Any:
    for _ in range(depth):
        value = [value]
    return value


def change(rng: random.Random, value: Any, rich: bool, depth: int = 0) -> Any:
    """`value` with one node changed."""
    inner = isinstance(value, dict | list) and len(value) > 0
    if inner and rng.random() < 0.85:
        if isinstance(value, dict):
            key = rng.choice(list(value))
            action = rng.random()
            rest = {k: v for k, v in value.items() if k != key}
            if action < 0.1:
                return rest
            if action < 0.17:
                return rest | {rng.choice(TEXTS[:9]): value[key]}
            return {k: change(rng, v, rich, depth + 1) if k == key else v for k, v in value.items()}
        at = rng.randrange(len(value))
        action = rng.random()
        if action < 0.1:
            return value[:at] + value[at + 1 :]
        if action < 0.2:
            # Long runs of small things only: repeated repetitions would fill this process' memory.
            many = 3 if isinstance(value[at], dict | list) else 500
            return value[:at] + [value[at]] * rng.choice((2, 3, many)) + value[at + 1 :]
        return [*value[:at], change(rng, value[at], rich, depth + 1), *value[at + 1 :]]
    if isinstance(value, bool) or value is None:
        return _leaf(rng, rich)
    if isinstance(value, int) and rng.random() < 0.7:
        return rng.choice((value + 1, value - 1, -value, value ^ (1 << rng.randrange(63)), *NUMBERS))
    if isinstance(value, float) and rng.random() < 0.7:
        return rng.choice(FLOATS) if rich else rng.choice((value * 2, -value, 1e300))
    if isinstance(value, str) and rng.random() < 0.5:
        return rng.choice((value[: len(value) // 2], value * 2, value + rng.choice(TEXTS), value.upper()))
    if isinstance(value, bytes) and rng.random() < 0.7:
        return rng.choice(BYTE_MUTATIONS[:6])(rng, value, [value])
    if rng.random() < 0.03:
        return _nest(value, rng.choice((50, 400, 3000)))
    return _leaf(rng, rich)


def msgpack(rng: random.Random, data: bytes, pool: list[bytes]) -> bytes:
    """A mutation of the value behind msgpack bytes."""
    try:
        value = msgspec.msgpack.decode(data)
        for _ in range(rng.choice((1, 1, 1, 2, 4))):
            value = change(rng, value, True)
        return msgspec.msgpack.encode(value)
    except (msgspec.MsgspecError, ValueError, RecursionError, OverflowError, TypeError):
        return rng.choice(BYTE_MUTATIONS)(rng, data, pool)


def as_json(rng: random.Random, data: bytes, pool: list[bytes]) -> bytes:
    """A mutation of the value behind JSON bytes; writes NaN and Infinity too."""
    try:
        value = json.loads(data)
        for _ in range(rng.choice((1, 1, 1, 2, 4))):
            value = change(rng, value, rng.random() < 0.2)
        return json.dumps(value, default=lambda blob: blob.hex(), ensure_ascii=rng.random() < 0.5).encode(
            "utf-8", "surrogatepass"
        )
    except (ValueError, RecursionError, TypeError):
        return rng.choice(BYTE_MUTATIONS)(rng, data, pool)


def mutated(rng: random.Random, pool: list[bytes], structured: Mutation | None) -> bytes:
    """One new input made of `pool`."""
    data = rng.choice(pool)
    for _ in range(rng.choice((1, 1, 2, 3))):
        use = structured if structured is not None and rng.random() < 0.6 else rng.choice(BYTE_MUTATIONS)
        data = use(rng, data, pool)[:MAX_BYTES]
    return data
