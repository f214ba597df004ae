"""The forward of one DP rank whose experts are shared out: each step is one of all ranks of its group."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from segue.engine.engine_api import HostPages
from segue.engine.forward import RankForward, Stored, raised_at_end
from segue.engine.kvpool import HostKV, KVPool
from segue.engine.packing import Packed
from segue.engine.ranks.dp_group import DpGroup


class DpForward:
    """`Forward` over `own`, this rank's layers; each step is one of `group`."""

    def __init__(self, own: RankForward, group: DpGroup) -> None:
        self._own = own
        self._group = group
        for experts in own.experts:
            experts.group = group

    @property
    def pool(self) -> KVPool:
        """See `Forward.pool`."""
        return self._own.pool

    def run(self, packed: Packed, stored: Stored) -> torch.Tensor:
        """See `Forward.run`."""
        with raised_at_end(stored) as safely, self._group.step(packed.rows):
            return self._own.run(packed, safely)

    def along(self) -> None:
        """See `Forward.along`."""
        with self._group.step(0):
            self._own.along()

    def copy_out(self, pages: Sequence[int], slot: int | None = None) -> HostKV:
        """See `Engine.copy_out`."""
        return self._own.copy_out(pages, slot)

    def copy_in(self, host: HostPages, pages: Sequence[int], slot: int | None = None) -> None:
        """See `Engine.copy_in`."""
        self._own.copy_in(host, pages, slot)
