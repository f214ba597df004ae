"""The KV pool of one rank as tensors over shared memory, laid out exactly as `PoolSpec.offset` says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import xxhash

from segue.engine.pool_size import state_slots
from segue.kv import (
    ChecksumMismatch,
    ConfigError,
    InvalidRequest,
    KVShape,
    Memory,
    PoolSpec,
    RankCoord,
    allocate,
)
from segue.kv.layout.content import Part
from segue.kv.layout.spec import STATE_ALIGN

DTYPES: dict[str, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}


@dataclass(frozen=True, slots=True)
class HostKV:
    """KV outside the pool, `[layers, planes, pages, items of a page]`, the bytes of the state (none, of most
    models), and the hash of both from when copied."""

    data: torch.Tensor
    state: torch.Tensor
    digest: int

    @property
    def pages(self) -> int:
        return self.data.shape[2]

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + self.state.nbytes


class KVPool:
    """Views of the pool that attention reads and writes.

    `kv` is `[layers, planes, slots, kv_heads, head_dim]`: plane 0 is K, plane 1 is V; with latent attention
    (kind "mla") there is plane 0 alone, which is both. A slot is `page * page_tokens + token in page`.
    `by_page` is the same memory as `[layers, planes, pages, items of a page]`. `layer_at` are the addresses
    of each layer's K and V. `states` has each tensor of the state, `[slots, layers, *shape]`.
    """

    def __init__(self, spec: PoolSpec, memory: Memory) -> None:
        shape = spec.shape
        if shape.kind == "mha" and shape.k_dim != shape.v_dim:
            raise ConfigError("the engine's pool holds K and V of equal sizes only")
        if spec.planes:
            raise ConfigError("the engine's own pool is layer-major; it computes in no other")
        memory.check_pool(spec)
        self.spec = spec
        self.memory = memory
        items = spec.pages * spec.page_bytes // shape.item_bytes
        flat = torch.frombuffer(memory.buffer, dtype=DTYPES[shape.dtype], count=items)
        slots = spec.pages * spec.page_tokens
        self.kv = flat.view(spec.layer_count, spec.kinds, slots, spec.head_count, shape.k_dim)
        self.by_page = flat.view(spec.layer_count, spec.kinds, spec.pages, -1)
        self.layer_at = [(planes[0].data_ptr(), planes[-1].data_ptr()) for planes in self.kv]
        self.layer_pages = self.by_page.unbind(0)
        #: the slots as bytes, `[slots, bytes]`
        self.by_slot = torch.empty((0, 0), dtype=torch.uint8)
        self.states: list[torch.Tensor] = []
        if spec.slots:
            self._view_slots()

    def run(self, slot: int, count: int) -> tuple[torch.Tensor, ...]:
        """K, V, K, V, … of each layer for the tokens in `count` slots from `slot` on: views
        `[1, kv_heads, tokens, head_dim]`."""
        found = self.kv[:, :, slot : slot + count].transpose(2, 3).unsqueeze(2).flatten(0, 1).unbind(0)
        return found if self.spec.kinds == 2 else tuple(latent for latent in found for _ in range(2))

    def _view_slots(self) -> None:
        shape, slots = self.spec.shape, self.spec.slots
        at, count = self.spec.slots_at, slots * shape.state_bytes
        flat = torch.frombuffer(self.memory.buffer, dtype=torch.uint8, count=count, offset=at)
        self.by_slot = flat.view(slots, shape.state_bytes)
        for tensor, start in zip(shape.state, shape.state_offsets, strict=True):
            items = self.by_slot[:, start : start + tensor.nbytes].view(DTYPES[tensor.dtype])
            self.states.append(items.view(slots, tensor.layers, *tensor.shape))

    def clear(self, slots: Sequence[int]) -> None:
        """Sequences begin in these slots: they hold zeros from now on."""
        for slot in slots:
            self.by_slot[slot].zero_()

    def copy_out(self, pages: Sequence[int], slot: int | None = None) -> HostKV:
        """Copy `pages` of all layers, and `slot`, to memory of their own."""
        data = self.by_page.index_select(2, self._index(pages))
        state = self.by_slot[self._slots(slot)].clone()
        return HostKV(data, state, _digest(data, state))

    def copy_in(self, host: HostKV, pages: Sequence[int], slot: int | None = None) -> None:
        """Copy what `copy_out` returned into `pages` (as many) and `slot`. ChecksumMismatch if it has
        changed."""
        if len(pages) != host.pages:
            raise InvalidRequest(f"{host.pages} pages cannot be copied into {len(pages)}")
        if _digest(host.data, host.state) != host.digest:
            raise ChecksumMismatch("KV changed in host memory", phase="copy_in")
        self.by_page.index_copy_(2, self._index(pages), host.data)
        self.by_slot[self._slots(slot)] = host.state

    def _slots(self, slot: int | None) -> slice:
        """The part of `by_slot` with the state of a sequence; empty for a model without one."""
        if (slot is None) != (self.spec.slots == 0) or (slot or 0) not in range(max(1, self.spec.slots)):
            raise InvalidRequest(f"slot {slot} in a pool of {self.spec.slots} slots")
        return slice(0) if slot is None else slice(slot, slot + 1)

    def _index(self, pages: Sequence[int]) -> torch.Tensor:
        wrong = [page for page in pages if not 0 <= page < self.spec.pages]
        if wrong or len(set(pages)) != len(pages):
            raise InvalidRequest(f"not distinct pages of a pool of {self.spec.pages}: {list(pages)[:8]} …")
        return torch.tensor(pages, dtype=torch.int64)


def _digest(*parts: torch.Tensor) -> int:
    found = xxhash.xxh3_64()
    for part in parts:
        found.update(part.view(torch.uint8).numpy().data)
    return found.intdigest()


def make_pool(
    shape: KVShape,
    parts: Sequence[Part],
    coord: RankCoord,
    index: int,
    pool_bytes: int,
    page_tokens: int,
    memory: Memory | None,
) -> KVPool:
    """The pool of rank `index` of a replica whose ranks hold `parts`: as many whole pages as fit into
    `pool_bytes` in all of them together (or into `memory`, if given), the same number in each. A model with a
    state also has slots (`state_slots`).

    Raises ConfigError when not even one
    page fits, OutOfCapacity when the host lacks the memory.
    """
    if page_tokens < 1:
        raise ConfigError(f"--page-tokens must be at least 1, not {page_tokens}")
    if memory is not None:
        pool_bytes = min(pool_bytes, memory.nbytes)
    item_bytes = page_tokens * (shape.k_dim + shape.v_dim) * shape.item_bytes
    page_bytes = sum(part.layers * part.heads for part in parts) * item_bytes
    slots = state_slots(pool_bytes, shape.state_bytes)
    pages = pool_bytes // page_bytes
    if slots:
        pages = (pool_bytes - slots * shape.state_bytes - STATE_ALIGN) // page_bytes
    if pages < 1:
        raise ConfigError(f"a KV pool of {pool_bytes} bytes holds no page of {page_bytes}; raise --kv-gib")
    part = parts[index]
    spec = PoolSpec(
        shape=shape,
        coord=coord,
        page_tokens=page_tokens,
        pages=pages,
        layer_start=part.layer_start,
        layer_count=part.layers,
        head_start=part.head_start,
        head_count=part.heads,
        slots=slots,
    )
    return KVPool(spec, memory if memory is not None else allocate(spec.nbytes))
