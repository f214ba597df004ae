"""The exchanges of symmetric ranks (`conn/agreement.py`) over torch.distributed, by Gloo."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from segue.core.errors import ErrorInfo, PeerLost

#: Characters of a library's error text that go into ours.
_QUOTED = 300


class TorchGroup:
    """A Gloo group of its own for `ranks` of the default group (None: all), each of which makes this.

    An exchange that some rank does not enter within `timeout_s` raises PeerLost on the others, a rank whose
    process has ended does so at once. The group is of no use afterwards: every later call raises PeerLost at
    once, and the engine ends this replica. For that reason it is a group of its own, and because torch's
    default timeout is 30 minutes. Gloo proves nobody's identity: use a trusted network.
    """

    def __init__(self, timeout_s: float, ranks: Sequence[int] | None = None) -> None:
        self._timeout_s = timeout_s
        self._lost: ErrorInfo | None = None
        self._group = dist.new_group(
            None if ranks is None else list(ranks),
            timeout=timedelta(seconds=timeout_s),
            backend="gloo",
            use_local_synchronization=True,
        )
        self._size = dist.get_world_size(self._group)
        self._rank = dist.get_rank(self._group)

    def gather(self, row: Sequence[int]) -> list[list[int]]:
        """The rows of all ranks, in order of rank."""
        mine = torch.tensor(row, dtype=torch.int64)
        rows = [torch.empty_like(mine) for _ in range(self._size)]
        self._exchange(lambda: dist.all_gather(rows, mine, group=self._group))
        return [found.tolist() for found in rows]

    def least(self, row: Sequence[int]) -> list[int]:
        """The least of all ranks' rows at each place."""
        least = torch.tensor(row, dtype=torch.int64)
        self._exchange(lambda: dist.all_reduce(least, dist.ReduceOp.MIN, group=self._group))
        found: list[int] = least.tolist()
        return found

    def close(self) -> None:
        """Leave the group. Others that wait for this rank see it at once."""
        dist.destroy_process_group(self._group)

    def _exchange(self, run: Callable[[], object]) -> None:
        if self._lost is not None:
            raise self._lost.exception()
        who = f"rank {self._rank} of {self._size}"
        # Also what interrupts the call (a signal's exception) leaves this rank out of step with the others.
        self._lost = PeerLost(f"{who}: an exchange with the other ranks was interrupted").info
        try:
            run()
        except RuntimeError as exc:  # whatever Gloo says: it has no types
            self._lost = PeerLost(
                f"{who}: another rank is gone, or has not answered for {self._timeout_s:g} s; "
                f"no exchange of this group is possible any more ({str(exc)[:_QUOTED]})"
            ).info
            raise self._lost.exception() from exc
        self._lost = None
