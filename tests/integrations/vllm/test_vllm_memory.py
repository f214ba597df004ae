"""vLLM's KV cache as a pool: the bytes that its views name, for tensors of each shape and layout."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from vllm_pair import make_caches

from segue.integrations.vllm.vllm_memory import CacheFacts, CachePool, cache_pool
from segue.integrations.vllm.vllm_shared_pool import SharedPoolMode
from segue.kv import ConfigError, MemoryKind

FACTS = CacheFacts(backend="FLASH_ATTN", blocks=6, block_size=4, head_size=8, dtype="float32")
BLOCKS, SIZE, DIM, HEADS = 6, 4, 8, 3


def floats_at(pool: CachePool, plane: int, page: int, token: int, head: int, count: int) -> torch.Tensor:
    """The numbers that a plane names, read from the memory itself."""
    spec = pool.spec.planes[plane]
    at = spec.offset + page * spec.page_stride + token * spec.token_stride + head * spec.head_stride
    region = np.frombuffer(pool.memory.buffers[spec.region], np.uint8)
    return torch.from_numpy(region[at : at + 4 * count].copy()).view(torch.float32)


def numbered(*shape: int) -> torch.Tensor:
    return torch.arange(float(np.prod(shape))).reshape(shape)


@pytest.mark.parametrize("layout", ["NHD", "HND", "blocks outermost"])
def test_token_rows_of_gpu_backends(layout: str) -> None:
    """`[blocks, heads, block_size, 2 * head_size]` in each physical order that vLLM has."""
    if layout == "NHD":
        caches = [numbered(BLOCKS, SIZE, HEADS, 2 * DIM).transpose(1, 2) for _ in range(2)]
    elif layout == "HND":
        caches = [numbered(BLOCKS, HEADS, SIZE, 2 * DIM) for _ in range(2)]
    else:
        whole = numbered(BLOCKS, 2, HEADS, SIZE, 2 * DIM)
        caches = [whole[:, 0], whole[:, 1]]
    pool = cache_pool({f"l{i}": cache for i, cache in enumerate(caches)}, FACTS)
    assert pool.unit_tokens == 1
    assert (pool.spec.page_tokens, pool.spec.shape.kv_heads, pool.spec.shape.k_dim) == (SIZE, HEADS, DIM)
    for layer, cache in enumerate(caches):
        for kind in (0, 1):
            wanted = cache[5, 2, 3, kind * DIM : (kind + 1) * DIM]
            assert torch.equal(floats_at(pool, 2 * layer + kind, 5, 3, 2, DIM), wanted)


@pytest.mark.parametrize("heads_axis", [False, True])
def test_a_latent_has_one_head(heads_axis: bool) -> None:
    cache = numbered(BLOCKS, 1, SIZE, DIM) if heads_axis else numbered(BLOCKS, SIZE, DIM)
    pool = cache_pool({"l0": cache}, replace(FACTS, backend="CPU_MLA"))
    assert (pool.spec.shape.kind, pool.spec.shape.v_dim) == ("mla", 0)
    assert torch.equal(floats_at(pool, 0, 2, 3, 0, DIM), cache.reshape(BLOCKS, SIZE, DIM)[2, 3])


def test_a_block_of_cpu_attn_is_one_unit_of_k_and_one_of_v() -> None:
    cache = numbered(BLOCKS, HEADS, SIZE, 2 * DIM)
    pool = cache_pool({"l0": cache}, replace(FACTS, backend="CPU_ATTN", isa="vec"))
    assert (pool.unit_tokens, pool.spec.page_tokens) == (SIZE, 1)
    block = cache[4, 1].reshape(2, SIZE * DIM)
    for kind in (0, 1):
        assert torch.equal(floats_at(pool, kind, 4, 0, 1, SIZE * DIM), block[kind])


def test_another_packing_of_blocks_is_another_dtype() -> None:
    """So that two such sides refuse each other when they meet."""
    caches = {"l0": numbered(BLOCKS, HEADS, SIZE, 2 * DIM)}
    facts = replace(FACTS, backend="CPU_ATTN", isa="vec")
    dtypes = {
        cache_pool(caches, facts).spec.shape.dtype,
        cache_pool(caches, replace(facts, isa="amx")).spec.shape.dtype,
        cache_pool(
            {"l0": numbered(BLOCKS, HEADS, 2, 4 * DIM)}, replace(facts, block_size=2, head_size=16)
        ).spec.shape.dtype,
    }
    assert len(dtypes) == 3


@pytest.mark.parametrize(
    ("cache", "facts", "sentence"),
    [
        (numbered(5, HEADS, SIZE, 2 * DIM), FACTS, "has 5 blocks, vLLM's block pool 6"),
        (numbered(BLOCKS, HEADS, SIZE, DIM), FACTS, "is not known"),
        (numbered(BLOCKS, HEADS, SIZE, DIM), replace(FACTS, backend="CPU_ATTN"), "is not known"),
        (
            numbered(BLOCKS, HEADS, 2 * DIM, SIZE).transpose(2, 3),
            replace(FACTS, backend="CPU_ATTN"),
            "is not known",
        ),
        (numbered(BLOCKS, 2, SIZE, DIM), replace(FACTS, backend="CPU_MLA"), "is not known"),
        (numbered(BLOCKS, HEADS, SIZE, 2 * DIM), replace(FACTS, backend="ROCM"), "ROCM is not described"),
    ],
)
def test_unknown_memory_is_refused(cache: torch.Tensor, facts: CacheFacts, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        cache_pool({"l0": cache}, facts)


def test_a_model_without_kv_is_refused() -> None:
    with pytest.raises(ConfigError, match="no KV cache"):
        cache_pool({}, FACTS)


def test_vllms_allocation_lies_in_a_memfd() -> None:
    caches, mode = make_caches(shared=True)
    assert mode.memory is not None
    assert mode.memory.only.kind is MemoryKind.SHARED
    caches["layers.1.attn"][3] = 7
    raw = np.frombuffer(mode.memory.buffer, np.float32)
    assert (raw == 7).sum() == caches["layers.1.attn"][3].numel()


def test_other_allocations_are_torchs() -> None:
    mode = SharedPoolMode()
    with mode:
        torch.zeros(4, dtype=torch.float32)
        torch.zeros((4, 4), dtype=torch.int8)
        torch.empty(4, dtype=torch.int8)
        torch.zeros(4, dtype=torch.int8, device="meta")
        assert mode.memory is None
        first = torch.zeros(100, dtype=torch.int8, device=torch.device("cpu"))
        second = torch.zeros(100, dtype=torch.int8)
    assert mode.memory is not None
    address = mode.memory.only.address
    assert (first.data_ptr(), first.nbytes) == (address, 100)
    assert second.data_ptr() != address
