"""Context parallelism: each rank computes some rows of a step, and all hold the KV of all of them.

In every layer the ranks exchange the K and V of their rows before they attend, so a rank's rows find what is
before them in the pool, as those of any later chunk do: attention knows nothing of it. Pages, prefixes and
hand-offs are those of one rank; time is divided, memory is not.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from segue.engine.engine_api import SequenceStep
from segue.engine.kvpool import KVPool
from segue.engine.packing import Packed, pack
from segue.engine.parallel import share
from segue.engine.ranks.collectives import TensorGroup


class OtherRows:
    """The rows of `whole` and who computes them; `own` is this rank's part, packed as a step of its own."""

    def __init__(self, whole: Packed, group: TensorGroup, pool: KVPool) -> None:
        self._group = group
        self._pool = pool
        self._shares = [share(whole.rows, rank, group.size) for rank in range(group.size)]
        self._slots = [whole.slots[part.start : part.stop] for part in self._shares]
        self.own = pack(_steps_of(whole, self._shares[group.rank]), {}, pool.spec.page_tokens)

    def fetch(self, layer: int, qkv: torch.Tensor) -> None:
        """Put the K and V of all other rows into `layer` of the pool; those of ours, rotated, end each row of
        `qkv`. (Of a latent, which is both, the last is enough.)"""
        planes, _, heads, dim = self._pool.kv[layer].shape
        ours = qkv.reshape(len(qkv), -1, dim)[:, -planes * heads :].flatten(1)
        for rank, rows in enumerate(self._gather(ours)):
            if rank != self._group.rank:
                by_plane = rows.view(-1, planes, heads, dim)
                for plane in range(planes):
                    self._pool.kv[layer, plane].index_copy_(0, self._slots[rank], by_plane[:, plane])

    def joined(self, hidden: torch.Tensor) -> torch.Tensor:
        """The final hidden states of all rows, in order."""
        return torch.cat(self._gather(hidden))

    def _gather(self, rows: torch.Tensor) -> list[torch.Tensor]:
        return self._group.gather(rows, [len(part) for part in self._shares])


def _steps_of(whole: Packed, rows: range) -> list[SequenceStep]:
    """The part of the steps of `whole` that falls to `rows`, as if all earlier rows had been computed."""
    steps = []
    for segment in whole.segments:
        first = max(segment.row, rows.start) - segment.row
        end = min(segment.row + segment.rows, rows.stop) - segment.row
        if first < end:
            step = segment.step
            steps.append(replace(step, tokens=step.tokens[first:end], start=step.start + first))
    return steps
