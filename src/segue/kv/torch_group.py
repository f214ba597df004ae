"""The exchanges of symmetric ranks (`kv/agreement.py`) over torch.distributed, by Gloo."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import AllreduceOptions, ProcessGroupGloo, ReduceOp
from torch.distributed.distributed_c10d import PrefixStore, Store

from segue.kv.errors import PeerLost

#: Characters of a library's error text that go into ours.
_QUOTED = 300


class TorchGroup:
    """`size` ranks that meet in `store` under `name`, each of which makes this. Not torch's default group.

    An exchange that some rank does not enter within `timeout_s` raises PeerLost on the others, a rank whose
    process has ended does so at once. The group is of no use afterwards: every later call raises PeerLost at
    once, and the engine ends this replica. So `name` is never used twice in one store. Gloo proves nobody's
    identity: use a trusted network. Raises PeerLost if not all ranks come within `timeout_s`.
    """

    def __init__(self, store: Store, name: str, rank: int, size: int, timeout_s: float) -> None:
        self._who = f"rank {rank} of {size}"
        self._size = size
        self._timeout_s = timeout_s
        self._lost: PeerLost | None = None
        limit = timedelta(seconds=timeout_s)
        self._gloo: Any = None
        self._gloo = self._safely(lambda: ProcessGroupGloo(PrefixStore(name, store), rank, size, limit))

    def gather(self, row: Sequence[int]) -> list[list[int]]:
        """The rows of all ranks, in order of rank."""
        mine = torch.tensor(row, dtype=torch.int64)
        rows = [torch.empty_like(mine) for _ in range(self._size)]
        self._safely(lambda: self._gloo.allgather([rows], [mine]).wait())
        return [found.tolist() for found in rows]

    def least(self, row: Sequence[int]) -> list[int]:
        """The least of all ranks' rows at each place."""
        least = torch.tensor(row, dtype=torch.int64)
        options = AllreduceOptions()
        options.reduceOp = ReduceOp(ReduceOp.MIN)
        self._safely(lambda: self._gloo.allreduce([least], options).wait())
        found: list[int] = least.tolist()
        return found

    def close(self) -> None:
        """Leave the group. Others that wait for this rank see it at once. Idempotent."""
        self._lost = self._lost or PeerLost(f"{self._who} has left its group")
        self._gloo = None

    def _safely(self, call: Callable[[], Any]) -> Any:
        if self._lost is not None:
            raise PeerLost(str(self._lost))
        # Also what interrupts the call (a signal's exception) leaves this rank out of step with the others.
        self._lost = PeerLost(f"{self._who}: an exchange with the other ranks was interrupted")
        try:
            outcome = call()
        except RuntimeError as exc:  # all that Gloo ever raises
            self._lost = PeerLost(
                f"{self._who}: another rank is gone, or has not answered for {self._timeout_s:g} s; "
                f"no exchange of this group is possible any more ({str(exc)[:_QUOTED]})"
            )
            self.close()  # the connections too: so who waits for this rank hears of it now
            raise self._lost from exc
        self._lost = None
        return outcome
