"""The layers of one rank over its paged pool: what every rank of a replica computes, whoever samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import nn

from segue.core.errors import ConfigError, Internal
from segue.engine.base import HostPages
from segue.engine.cpu_attention import StepContext
from segue.engine.cpu_context import OtherRows
from segue.engine.cpu_fused import Head, fuse
from segue.engine.cpu_kernels import Kernels, make_kernels
from segue.engine.cpu_memory import keep_freed_memory
from segue.engine.families import LoadedModel, load_model
from segue.engine.group import ALONE, Place
from segue.engine.kvpool import HostKV, KVPool, make_pool
from segue.engine.model_fingerprint import fingerprint
from segue.engine.packing import Packed
from segue.engine.slicing import cut, part_of
from segue.transport.memory import Memory


class Forward(Protocol):
    """The forward of a whole replica, as the engine that samples asks for it."""

    @property
    def pool(self) -> KVPool:
        """The pool of the rank of this process."""
        ...

    def run(self, packed: Packed, stored: Callable[[], None]) -> torch.Tensor:
        """The final hidden state of each row of a step, `[rows, hidden]`, after the model's last norm.
        `stored` is called once, when the KV of all layers is in the pools of all ranks."""
        ...

    def copy_out(self, pages: Sequence[int]) -> HostPages:
        """See `Engine.copy_out`."""
        ...

    def copy_in(self, host: HostPages, pages: Sequence[int]) -> None:
        """See `Engine.copy_in`."""
        ...


class CpuForward:
    """`Forward` of the rank at `place` of the model with this `fingerprint`; `head` makes logits of what it
    returns, on the rank that samples."""

    def __init__(
        self,
        fingerprint: str,
        loaded: LoadedModel,
        head: Head | None,
        kernels: Kernels,
        pool: KVPool,
        place: Place,
    ) -> None:
        self.fingerprint = fingerprint
        self.loaded = loaded
        self.head = head
        self.pool = pool
        self.place = place
        self.windows = tuple(dict.fromkeys(loaded.windows))
        self._kernels = kernels
        self._norm = loaded.model.model.norm
        if place.pp is not None:
            loaded.model.model.norm = nn.Identity()  # of the last stage's rows, where they come back to

    def run(self, packed: Packed, stored: Callable[[], None]) -> torch.Tensor:
        """See `Forward.run`; of a replica of several ranks `stored` is about this one's pool alone, and what
        is returned is worth something on rank 0 only."""
        group = self.place.cp
        if group is None or packed.rows < group.size:  # too few to share out: every rank computes them
            return self._through_stages(packed, stored, None)
        others = OtherRows(packed, group, self.pool, self.windows)
        return others.joined(self._through_stages(others.own, stored, others))

    def _through_stages(
        self, packed: Packed, stored: Callable[[], None], others: OtherRows | None
    ) -> torch.Tensor:
        """Our layers, and before and after them those of the other stages: rows go around in a ring."""
        ring, stage = self.place.pp, self.place.coord.pp
        if ring is None:
            return self._layers(packed, stored, others, input_ids=packed.tokens)
        rows = self.pool.kv.new_empty(packed.rows, self.loaded.config.hidden_size)
        if stage > 0:
            given = ring.receive(rows, stage - 1).unsqueeze(0)
            hidden = self._layers(packed, stored, others, inputs_embeds=given)
            ring.send(hidden, (stage + 1) % ring.size)
            return hidden
        ring.send(self._layers(packed, _nothing, others, input_ids=packed.tokens), 1)
        stored()  # who waits here for the other stages holds none of them up
        returned: torch.Tensor = self._norm(ring.receive(rows, ring.size - 1))
        return returned

    def _layers(
        self, packed: Packed, stored: Callable[[], None], others: OtherRows | None, **rows: torch.Tensor
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

    def copy_out(self, pages: Sequence[int]) -> HostKV:
        """Copy pages to memory outside the pool (retraction)."""
        return self.pool.copy_out(pages)

    def copy_in(self, host: HostPages, pages: Sequence[int]) -> None:
        """Copy what `copy_out` of this rank returned into `pages` (as many)."""
        if not isinstance(host, HostKV):
            raise Internal(f"not pages of this engine: {type(host).__name__}")
        self.pool.copy_in(host, pages)


def _nothing() -> None:
    pass


def load_forward(
    folder: Path,
    *,
    dtype: str,
    pool_bytes: int,
    page_tokens: int = 16,
    threads: int = 1,
    memory: Memory | None = None,
    place: Place = ALONE,
) -> CpuForward:
    """Load the part of the model in `folder` that the rank at `place` computes, with its KV pool.

    The pools of all ranks of the replica take at most `pool_bytes` together. `threads` is the number of cores
    torch uses in this process. Raises ConfigError with what to change.
    """
    if threads < 1:
        raise ConfigError(f"--threads-per-worker must be at least 1, not {threads}")
    torch.set_num_threads(threads)
    keep_freed_memory()
    identity, size = fingerprint(folder), place.size
    with torch.inference_mode():
        whole = load_model(folder, dtype)
        loaded = cut(whole, size, place.coord)
        kernels = make_kernels(dtype, loaded.shape.k_dim, loaded.heads, loaded.part.heads, threads)
        head = fuse(loaded, kernels, place)
    parts = [part_of(whole.shape, whole.heads, size, size.coord(rank)) for rank in range(size.ranks)]
    pool = make_pool(loaded.shape, parts, place.coord, place.rank, pool_bytes, page_tokens, memory)
    return CpuForward(identity, loaded, head, kernels, pool, place)
