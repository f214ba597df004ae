"""The exchanges of symmetric ranks (`kv/agreement.py`) over torch.distributed, by Gloo."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from segue.kv.errors import ConfigError, PeerLost

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

#: Characters of a library's error text that go into ours.
_QUOTED = 300


class TorchGroup:
    """The group of `size` symmetric ranks that `Agreement` works on, over torch.distributed and Gloo. Each
    rank makes one, with its number `rank` from 0, and they meet in `store` under `name`. Not torch's default
    group. Needs PyTorch (ConfigError without it).

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
        try:  # here: the library loads without torch
            import torch
            from torch import distributed
            from torch.distributed.distributed_c10d import PrefixStore
        except ImportError as exc:
            raise ConfigError(f"TorchGroup needs PyTorch, which cannot be imported: {exc}") from exc
        self._torch = torch
        self._gloo: Any = None
        self._gloo = self._safely(
            lambda: distributed.ProcessGroupGloo(PrefixStore(name, store), rank, size, limit)
        )

    def gather(self, row: Sequence[int]) -> list[list[int]]:
        """The rows of all ranks, in order of rank."""
        mine = self._torch.tensor(row, dtype=self._torch.int64)
        rows = [self._torch.empty_like(mine) for _ in range(self._size)]
        self._safely(lambda: self._gloo.allgather([rows], [mine]).wait())
        return [found.tolist() for found in rows]

    def least(self, row: Sequence[int]) -> list[int]:
        """The least of all ranks' rows at each place."""
        least = self._torch.tensor(row, dtype=self._torch.int64)
        options = self._torch.distributed.AllreduceOptions()
        options.reduceOp = self._torch.distributed.ReduceOp(self._torch.distributed.ReduceOp.MIN)
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
