"""vLLM's KV cache as a pool of `segue.kv`: views of its tensors by attention backend. No copies.

| backend | one block of one layer | unit of a hand-off |
|---|---|---|
| CPU_ATTN | `[heads, content]`: K as `[head_size, block_size]`, then V as `[block_size, head_size]` | a block, because a token of K is no dense row |
| FLASH_ATTN, TRITON_ATTN, FLASHINFER | `[heads, block_size, 2 * head_size]`, of any strides (NHD or HND): K and V of a token are dense rows | a token |
| CPU_MLA, TRITON_MLA | `[block_size, latent]` | a token |
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from segue.kv import ConfigError, KVShape, Memory, PoolSpec, RankCoord, pool_of

BLOCK_BACKENDS = frozenset({"CPU_ATTN"})
TOKEN_BACKENDS = frozenset({"FLASH_ATTN", "TRITON_ATTN", "FLASHINFER"})
LATENT_BACKENDS = frozenset({"CPU_MLA", "TRITON_MLA"})


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheFacts:
    """vLLM's KV cache: the attention `backend`, the number of `blocks` of `block_size` tokens, the KV's
    `dtype`, and how the backend packs a block on this processor (`isa`; empty if that does not depend on
    it). `tensor_rank` is the number of this worker among the `tensor_ranks` that have the KV heads."""

    backend: str
    blocks: int
    block_size: int
    head_size: int
    dtype: str
    isa: str = ""
    tensor_rank: int = 0
    tensor_ranks: int = 1


@dataclass(frozen=True, slots=True)
class CachePool:
    """The pool of a worker. Its pages are vLLM's blocks; one token of `spec` is `unit_tokens` of a prompt."""

    spec: PoolSpec
    memory: Memory
    unit_tokens: int


def cache_pool(caches: Mapping[str, Any], facts: CacheFacts, memory: Memory | None = None) -> CachePool:
    """The pool that `caches` (layer name to tensor, in the model's order) are; `memory` is what they lie in,
    where it was allocated here.

    Raises ConfigError for a backend or a tensor that is not described here.
    """
    if not caches:
        raise ConfigError("the model has no KV cache to hand over")
    for name, cache in caches.items():
        if cache.shape[0] != facts.blocks:
            raise ConfigError(
                f"the KV cache of {name} has {cache.shape[0]} blocks, vLLM's block pool {facts.blocks}: "
                f"{facts.backend} divides blocks of {facts.block_size} tokens; choose another --block-size"
            )
    if facts.backend in BLOCK_BACKENDS:
        return _by_blocks(caches, facts, memory)
    if facts.backend in TOKEN_BACKENDS:
        return _by_tokens(caches, facts, memory)
    if facts.backend in LATENT_BACKENDS:
        return _latents(caches, facts, memory)
    known = ", ".join(sorted(BLOCK_BACKENDS | TOKEN_BACKENDS | LATENT_BACKENDS))
    raise ConfigError(f"the KV cache of attention backend {facts.backend} is not described; known: {known}")


def _by_blocks(caches: Mapping[str, Any], facts: CacheFacts, memory: Memory | None) -> CachePool:
    size = facts.block_size * facts.head_size
    layers = []
    for name, cache in caches.items():
        blocks, heads, *rest = cache.shape
        dense = tuple(cache.stride()[2:]) == (2 * facts.head_size, 1)
        if rest != [facts.block_size, 2 * facts.head_size] or not dense:
            raise _unexpected(name, cache, f"[blocks, heads, {facts.block_size}, {2 * facts.head_size}]")
        start = cache.storage_offset()
        strides = (cache.stride(0), size, cache.stride(1), 1)
        layers.append(
            tuple(cache.as_strided((blocks, 1, heads, size), strides, start + i * size) for i in (0, 1))
        )
    # A block of another size, or packed for another processor, is not the same bytes: two such sides refuse
    # each other when they meet.
    dtype = f"{facts.dtype}:{facts.backend}:{facts.isa}:{facts.block_size}x{facts.head_size}"
    first = layers[0][0]
    shape = KVShape(
        layers=len(layers),
        kv_heads=first.shape[2] * facts.tensor_ranks,
        k_dim=size,
        v_dim=size,
        dtype=dtype,
        item_bytes=first.element_size(),
    )
    return _pool(shape, layers, memory, facts.block_size, facts)


def _by_tokens(caches: Mapping[str, Any], facts: CacheFacts, memory: Memory | None) -> CachePool:
    layers = []
    for name, cache in caches.items():
        if list(cache.shape[2:]) != [facts.block_size, 2 * facts.head_size]:
            raise _unexpected(name, cache, f"[blocks, heads, {facts.block_size}, {2 * facts.head_size}]")
        rows = cache.transpose(1, 2)
        layers.append(tuple(rows.narrow(-1, i * facts.head_size, facts.head_size) for i in (0, 1)))
    first = layers[0][0]
    shape = KVShape(
        layers=len(layers),
        kv_heads=first.shape[2] * facts.tensor_ranks,
        k_dim=facts.head_size,
        v_dim=facts.head_size,
        dtype=facts.dtype,
        item_bytes=first.element_size(),
    )
    return _pool(shape, layers, memory, 1, facts)


def _latents(caches: Mapping[str, Any], facts: CacheFacts, memory: Memory | None) -> CachePool:
    layers = []
    for name, cache in caches.items():
        rows = cache[:, 0] if len(cache.shape) == 4 and cache.shape[1] == 1 else cache
        if len(rows.shape) != 3 or list(rows.shape[1:]) != [facts.block_size, facts.head_size]:
            raise _unexpected(name, cache, f"[blocks, {facts.block_size}, {facts.head_size}]")
        layers.append((rows[:, :, None],))
    first = layers[0][0]
    shape = KVShape(
        kind="mla",
        layers=len(layers),
        kv_heads=1,
        k_dim=facts.head_size,
        v_dim=0,
        dtype=facts.dtype,
        item_bytes=first.element_size(),
    )
    return _pool(shape, layers, memory, 1, facts)


def _pool(
    shape: KVShape, layers: Sequence[Any], memory: Memory | None, unit: int, facts: CacheFacts
) -> CachePool:
    spec, found = pool_of(
        shape,
        layers,
        memory=memory,
        coord=RankCoord(tp=facts.tensor_rank),
        head_start=facts.tensor_rank * (shape.kv_heads // facts.tensor_ranks),
    )
    return CachePool(spec, found, unit)


def _unexpected(name: str, cache: Any, wanted: str) -> ConfigError:
    return ConfigError(
        f"the KV cache of {name} is {list(cache.shape)} with strides {list(cache.stride())} where {wanted} "
        "is expected: this version of vLLM is not known to the segue connector"
    )
