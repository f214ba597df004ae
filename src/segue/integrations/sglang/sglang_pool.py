"""SGLang's KV pool and its metadata slots as `KVArgs` describes them: addresses and sizes. No copies.

One page of SGLang is one unit of a hand-off, so that the order of heads and tokens within a page does not
matter: both sides need the same page size and the same bytes in a page, which their pools' descriptions say.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from segue.kv import ConfigError, KVShape, Limits, Memory, MetadataMismatch, PlaneSpec, PoolSpec, Region

#: Tokens of the smallest page that is advised: neighbouring pages are moved as one run, but each scattered
#: page is a row of its own in every buffer.
ADVISED_PAGE_TOKENS = 16


@dataclass(frozen=True, slots=True)
class SglangPool:
    """The pool of one scheduler rank. One token of `spec` is a page of `page_tokens` tokens."""

    spec: PoolSpec
    memory: Memory
    page_tokens: int

    def units(self, tokens: int) -> int:
        """Pages of so many tokens."""
        return -(-tokens // self.page_tokens)


def page_pool(args: Any, *, mla: bool, region: Callable[[int, int], Region] = Region) -> SglangPool:
    """The pool that `args` (a `KVArgs`) describes: with `mla` one buffer for each layer, else K of all layers
    and then V of all layers. `region` describes the memory of so many bytes at an address.

    Raises ConfigError, with what to change, for a pool that is not described here.
    """
    states = [getattr(state, "value", str(state)) for state in args.state_types]
    if states:
        raise ConfigError(
            f"the segue backend does not hand over a state beside the KV ({', '.join(states)}): serve a "
            "model with full attention in all layers"
        )
    if args.num_draft_entries:
        raise ConfigError(
            f"{args.num_draft_entries} buffers are a draft model's: start without speculative decoding"
        )
    items, sizes = list(args.kv_item_lens), list(args.kv_data_lens)
    if not items or not len(items) == len(sizes) == len(args.kv_data_ptrs):
        raise ConfigError(f"KVArgs has {len(items)} item lengths for {len(args.kv_data_ptrs)} KV buffers")
    pages = {size // item for size, item in zip(sizes, items, strict=True)}
    if len(pages) != 1:
        raise ConfigError(
            f"the KV buffers have different numbers of pages, {sorted(pages)}: layers of several kinds are "
            "not handed over"
        )
    shape, order = _shape(args, items, mla)
    count = pages.pop()
    spec = PoolSpec(
        shape=shape,
        page_tokens=1,
        pages=count,
        layer_count=shape.layers,
        head_count=1,
        regions=tuple(sizes),
        planes=tuple(PlaneSpec(at, 0, items[at], items[at], items[at]) for at in order),
    )
    regions = [region(address, size) for address, size in zip(args.kv_data_ptrs, sizes, strict=True)]
    return SglangPool(spec, Memory(regions), args.page_size)


def _shape(args: Any, items: list[int], mla: bool) -> tuple[KVShape, list[int]]:
    """The shape, and the buffer of each plane."""
    layers, odd = (len(items), 0) if mla else divmod(len(items), 2)
    kinds = [items] if mla else [items[:layers], items[layers:]]
    if odd or any(len(set(kind)) != 1 for kind in kinds):
        raise ConfigError(
            f"layers with pages of different sizes ({sorted(set(items))} bytes) are not handed over: serve a "
            "model whose layers are alike"
        )
    layout = getattr(args, "kv_layout", None) or "default"
    shape = KVShape(
        kind="mla" if mla else "mha",
        layers=layers,
        kv_heads=1,
        k_dim=items[0],
        v_dim=0 if mla else items[-1],
        dtype=f"{args.kv_cache_dtype_str}:{layout}:page{args.page_size}",
        item_bytes=1,
    )
    order = (
        list(range(layers))
        if mla
        else [at for pair in zip(range(layers), range(layers, 2 * layers), strict=True) for at in pair]
    )
    return shape, order


class MetadataSlots:
    """SGLang's `MetadataBuffers`: buffers of host memory with one item for each slot. The items of a slot go
    to decode as the metadata of its request.

    Raises ConfigError if a slot is larger than a hand-off carries.
    """

    def __init__(self, pointers: Sequence[int], sizes: Sequence[int], items: Sequence[int]) -> None:
        self._buffers = list(zip(pointers, items, strict=True))
        self.slots = min((size // item for size, item in zip(sizes, items, strict=True)), default=0)
        self.slot_bytes = sum(items)
        limit = Limits().max_metadata_bytes
        if self.slot_bytes > limit:
            raise ConfigError(
                f"a metadata slot has {self.slot_bytes} bytes, at most {limit} are handed over: start "
                "without SGLANG_ENABLE_DISAGG_SAMPLING_MASK"
            )

    def read(self, slot: int) -> bytes:
        """The bytes of a slot. Raises IndexError for one that does not exist."""
        self._check(slot)
        return b"".join(ctypes.string_at(at + slot * item, item) for at, item in self._buffers)

    def write(self, slot: int, content: bytes) -> None:
        """Fill a slot with the other side's `content`. Raises MetadataMismatch if the sizes differ."""
        self._check(slot)
        if len(content) != self.slot_bytes:
            raise MetadataMismatch(
                f"{len(content)} bytes of metadata for a slot of {self.slot_bytes}: start both sides with "
                "the same settings"
            )
        at = 0
        for address, item in self._buffers:
            ctypes.memmove(address + slot * item, content[at : at + item], item)
            at += item

    def _check(self, slot: int) -> None:
        if not 0 <= slot < self.slots:
            raise IndexError(f"metadata slot {slot} of {self.slots}")
