"""The layers of one rank over its paged pool: what every rank of a replica computes, whoever samples."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from segue.engine.cpu.cpu_attention import StepContext
from segue.engine.cpu.cpu_context import OtherRows
from segue.engine.cpu.cpu_fused import fuse
from segue.engine.cpu.cpu_kernels import Kernels, make_kernels
from segue.engine.cpu.cpu_products import Head
from segue.engine.engine_api import HostPages
from segue.engine.forward import Stored
from segue.engine.kvpool import HostKV, KVPool, make_pool
from segue.engine.models.model_fingerprint import fingerprint
from segue.engine.models.model_loading import LoadedModel, load_model
from segue.engine.models.progress import step
from segue.engine.packing import Packed
from segue.engine.ranks.collectives import ALONE, Place
from segue.engine.ranks.experts import SharedExperts, share_experts
from segue.engine.ranks.slicing import cut, part_of
from segue.engine.replica_engine import ReplicaEngine, make_engine
from segue.engine.sampler import Sampler
from segue.kv import ConfigError, Internal, Memory

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h of glibc
_KEEP_BYTES = 2**30


class CpuForward:
    """`RankForward` over torch on the CPU."""

    def __init__(
        self,
        fingerprint: str,
        loaded: LoadedModel,
        head: Head | None,
        kernels: Kernels,
        pool: KVPool,
        place: Place,
        experts: Sequence[SharedExperts] = (),
    ) -> None:
        self.fingerprint = fingerprint
        self.loaded = loaded
        self.head = head
        self.pool = pool
        self.place = place
        self.experts = experts
        self._kernels = kernels
        self._norm = loaded.model.model.norm
        if place.pp is not None:
            loaded.model.model.norm = nn.Identity()  # the first stage normalises the last stage's rows

    def run(self, packed: Packed, stored: Stored) -> torch.Tensor:
        """See `RankForward`."""
        group = self.place.cp
        if group is None or packed.rows < group.size:  # too few to share out: every rank computes them
            return self._through_stages(packed, stored, None)
        others = OtherRows(packed, group, self.pool)
        return others.joined(self._through_stages(others.own, stored, others))

    def _through_stages(self, packed: Packed, stored: Stored, others: OtherRows | None) -> torch.Tensor:
        """Our layers, and before and after them those of the other stages: rows go around in a ring."""
        ring, stage = self.place.pp, self.place.coord.pp
        if ring is None:
            return self._layers(packed, stored, others, input_ids=packed.tokens)
        rows = self.pool.kv.new_empty(packed.rows, self.loaded.config.hidden_size)
        if stage > 0:
            given = ring.receive(rows, stage - 1).unsqueeze(0)
            # Layers of a stage are no first layers of the model: it says only when all of its own are stored.
            hidden = self._layers(packed, _nothing, others, inputs_embeds=given)
            ring.send(hidden, (stage + 1) % ring.size)
            stored()
            return hidden
        ring.send(self._layers(packed, _nothing, others, input_ids=packed.tokens), 1)
        stored()  # a wait here for the other stages delays none of them
        returned: torch.Tensor = self._norm(ring.receive(rows, ring.size - 1))
        return returned

    def _layers(
        self, packed: Packed, stored: Stored, others: OtherRows | None, **rows: torch.Tensor
    ) -> torch.Tensor:
        loaded = self.loaded
        output = loaded.model.model(
            **rows,
            position_ids=packed.positions,
            use_cache=False,
            segue_step=StepContext(
                packed, self.pool, self._kernels, loaded.config.hidden_size, loaded.heads, stored, others
            ),
        )
        hidden: torch.Tensor = output.last_hidden_state
        return hidden.view(-1, hidden.shape[-1])

    def along(self) -> None:
        """See `Forward.along`."""
        for experts in self.experts:
            experts.along()

    def copy_out(self, pages: Sequence[int], slot: int | None = None) -> HostKV:
        """Copy pages, and a slot, to memory outside the pool (retraction)."""
        return self.pool.copy_out(pages, slot)

    def copy_in(self, host: HostPages, pages: Sequence[int], slot: int | None = None) -> None:
        """Copy what `copy_out` of this rank returned into `pages` (as many) and `slot`."""
        if not isinstance(host, HostKV):
            raise Internal(f"not pages of this engine: {type(host).__name__}")
        self.pool.copy_in(host, pages, slot)


def _nothing(layers: int | None = None) -> None:
    pass


def _keep_freed_memory() -> None:
    """Let malloc keep what a step frees, for the next step.

    By default glibc gives blocks of megabytes (activations, logits) back to the kernel, and each
    step pays for their page faults again. Other C libraries are left as they are.
    """
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, _KEEP_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, _KEEP_BYTES)


def load_forward(
    folder: Path,
    *,
    dtype: str,
    pool_bytes: int,
    page_tokens: int = 16,
    threads: int = 1,
    memory: Memory | None = None,
    place: Place = ALONE,
    dp_rank: int = 0,
    dp_size: int = 1,
    cache: str | Path | None = None,
) -> CpuForward:
    """Load the part of the model in `folder` that the rank at `place` computes, with its KV pool.

    The pools of all ranks of the replica take at most `pool_bytes` together; this rank's is in `memory`
    if given, else in a new memfd. `threads` is the number of cores torch uses in this process. With a
    `dp_size` of more than 1 so many DP ranks share out the experts, and this is `dp_rank`. `cache` is
    segue's cache folder if not the default one. Raises ConfigError with what to change.
    """
    if threads < 1:
        raise ConfigError(f"--threads-per-worker must be at least 1, not {threads}")
    torch.set_num_threads(threads)
    _keep_freed_memory()
    identity, size = fingerprint(folder), place.size
    with torch.inference_mode():
        weights = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        with step("weights_loading", f"model={folder.name} gib={weights / 2**30:.2f} dtype={dtype}"):
            whole = load_model(folder, dtype, in_parts=size.ranks > 1)
        loaded = cut(whole, size, place.coord)
        experts = share_experts(loaded, dp_rank, dp_size) if dp_size > 1 else []
        kernels = make_kernels(dtype, loaded.shape.k_dim, loaded.heads, loaded.part.heads, threads, cache)
        head = fuse(loaded, kernels, place)
    parts = [part_of(whole.shape, whole.heads, size, size.coord(rank)) for rank in range(size.ranks)]
    with step("kv_pool", f"gib={pool_bytes / 2**30:.2f} ranks={size.ranks}"):
        pool = make_pool(loaded.shape, parts, place.coord, place.rank, pool_bytes, page_tokens, memory)
    return CpuForward(identity, loaded, head, kernels, pool, place, experts)


def load_engine(folder: Path, *, sampler: Sampler | None = None, **options: Any) -> ReplicaEngine:
    """The engine of the model in `folder` on one rank: `load_forward` with `options`, and `make_engine` with
    `sampler`."""
    own = load_forward(folder, **options)
    return make_engine(folder, own, own, sampler)
