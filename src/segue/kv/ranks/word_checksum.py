"""`words-64`: a checksum in integer arithmetic alone, so that a device computes it where the KV lies.

The canonical bytes of a content (`kv.layout.content`) are cut into words of 8 bytes (fewer where a head has
no multiple of that; both sides have the same heads). Each word is mixed with its position, and the sum of
all, modulo 2^64, with the number of bytes, is the checksum. So pieces may be summed in any order, and
scattered pages are gathered piece by piece. The same lines run over numpy and torch; int64 wraps around in
both.

A host reads no value before the end: `WordChecksum.sums` is then one number on each device.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cached_property
from types import ModuleType
from typing import Any

import numpy as np

from segue.kv.errors import ConfigError, Internal
from segue.kv.layout.content import Content
from segue.kv.layout.spec import Plane
from segue.kv.transport.memory.device_tensors import flat_tensor, torch_module, why_no_tensors
from segue.kv.transport.memory.pool_memory import Memory, MemoryKind

#: Bytes gathered at once: on a host what a cache holds, on a device what keeps it busy.
HOST_PIECE_BYTES = 2**18
DEVICE_PIECE_BYTES = 2**24
_WORD = 8
_MASK = 2**64 - 1


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


_STEP = _signed(0x9E3779B97F4A7C15)
_MIX = _signed(0xFF51AFD7ED558CCD), _signed(0xC4CEB9FE1A85EC53)

#: An array of numpy or a tensor of torch.
Array = Any


class WordChecksum:
    """Sums contents of one `memory`: the first regions with numpy, those of devices with torch. Raises
    ConfigError where that is impossible (`why_no_tensors`)."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        if why := why_no_tensors(memory):
            raise ConfigError(why)

    @cached_property
    def _flat(self) -> list[Array]:
        """The bytes of each region, one after the other, where they lie."""
        return [
            flat_tensor(region)
            if region.kind is MemoryKind.DEVICE
            else np.frombuffer(region.buffer, np.uint8, region.nbytes)
            for region in self._memory.regions
        ]

    def checksum(self, content: Content) -> int:
        """An unsigned 64-bit number. Waits for the devices. Raises Internal for a content that lies outside
        its region."""
        total = sum(int(part[0]) for part in self.sums(content).values())
        return _mixed_int((total + content.nbytes * _STEP) & _MASK)

    def sums(self, content: Content) -> dict[str, Array]:
        """By device, the sum of the words that lie there; nothing is waited for."""
        found: dict[str, Array] = {}
        unit = math.gcd(_WORD, *(plane.head_bytes for plane in content.planes))
        position = 0
        for plane in content.planes:
            index, offset = self._place(plane.offset)
            for rows in self._rows(index, plane._replace(offset=offset), content):
                position = self._add(found, index, rows, unit, position)
        if content.state is not None:
            at, nbytes = content.state
            index, offset = self._place(at)
            flat = self._flat[index]
            if offset + nbytes > len(flat):
                raise Internal(f"a state at byte {at} lies outside its region")
            for start in range(offset, offset + nbytes, self._piece_bytes(index)):
                end = min(start + self._piece_bytes(index), offset + nbytes)
                position = self._add(found, index, flat[start:end], _WORD, position)
        return found

    def _place(self, offset: int) -> tuple[int, int]:
        """The region of an offset, and the offset in it."""
        at, inside = self._memory.places(np.array([offset], np.uint64))
        return int(at[0]), int(inside[0])

    def _piece_bytes(self, index: int) -> int:
        host = self._memory.regions[index].kind is not MemoryKind.DEVICE
        return HOST_PIECE_BYTES if host else DEVICE_PIECE_BYTES

    def _rows(self, index: int, plane: Plane, content: Content) -> Iterator[Array]:
        """The tokens of a plane in canonical order, gathered piece by piece."""
        flat, size = self._flat[index], content.page_tokens
        slots = np.concatenate([np.arange(slot, slot + tokens) for slot, tokens in content.runs])
        pages = int(slots.max()) // size + 1
        shape = (pages, size, plane.heads, plane.head_bytes)
        strides = (plane.page_stride, plane.token_stride, plane.head_stride, 1)
        end = plane.offset + sum(s * (n - 1) for s, n in zip(strides, shape, strict=True)) + 1
        if end > len(flat):
            raise Internal(f"content up to byte {end} lies outside a region of {len(flat)} bytes")
        lib = _library(flat)
        if lib is np:
            view = np.ndarray(shape, np.uint8, flat, plane.offset, strides)
        else:
            start = int(flat.storage_offset()) + plane.offset
            view = flat.as_strided(shape, strides, start)
        many = max(1, self._piece_bytes(index) // plane.row_bytes)
        for first in range(0, len(slots), many):
            page, token = np.divmod(slots[first : first + many], size)
            if lib is not np:
                page, token = (
                    lib.from_numpy(each).to(flat.device, non_blocking=True) for each in (page, token)
                )
            yield view[page, token]

    def _add(self, found: dict[str, Array], index: int, rows: Array, unit: int, position: int) -> int:
        """Add the words of `rows`, the first of which is number `position`; the number of the next."""
        lib = _library(rows)
        kind = getattr(lib, f"int{unit * 8}")
        if lib is np:
            words = np.ascontiguousarray(rows).reshape(-1).view(kind).astype(np.int64)
            numbers = np.arange(position + 1, position + 1 + len(words), dtype=np.int64)
        else:
            words = rows.contiguous().reshape(-1).view(kind).to(lib.int64)
            numbers = lib.arange(position + 1, position + 1 + len(words), dtype=lib.int64, device=rows.device)
        if unit < _WORD:
            words = words & ((1 << unit * 8) - 1)
        sums = _mixed(words ^ (numbers * _STEP)).sum()[None]  # a scalar of numpy would warn
        device = self._memory.regions[index].device
        found[device] = sums if device not in found else found[device] + sums
        return position + len(words)


def _mixed(words: Array) -> Array:
    """A permutation of 64 bits (the finalizer of MurmurHash3), without unsigned numbers."""
    words = (words ^ ((words >> 33) & (2**31 - 1))) * _MIX[0]
    words = (words ^ ((words >> 33) & (2**31 - 1))) * _MIX[1]
    return words ^ ((words >> 33) & (2**31 - 1))


def _mixed_int(value: int) -> int:
    for factor in _MIX:
        value = ((value ^ (value >> 33)) * factor) & _MASK
    return value ^ (value >> 33)


def _library(array: Array) -> ModuleType:
    return np if isinstance(array, np.ndarray) else torch_module()
