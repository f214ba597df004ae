"""Tensors between the ranks of one replica: sums, and rows from one rank to the next.

Collectives carry tensors and never decisions. Tensors go over Gloo: a rank that dies is an error
at the others within milliseconds, one that stands still after the group's timeout; after an error the group
is lost, and nothing is tried again. Gloo proves nobody's identity: it listens on loopback only, for all ranks
of a replica are on one host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import (  # type: ignore[attr-defined]  # its stubs do not name what it exports
    PrefixStore,
    ProcessGroupGloo,
    Store,
    TCPStore,
)

from segue.engine.parallel import ParallelSize
from segue.kv import PeerLost, RankCoord

#: The longest time for one layer of a chunk on the slowest rank.
TIMEOUT_S = 30.0
#: The longest time for a chunk in all stages. A stage that has died is noticed at once. The leader notices
#: one that stands still, and kills all (`server.instance.rank_workers`).
STAGE_S = 600.0
_HOST = "127.0.0.1"


class TensorGroup:
    """Some ranks that compute together; blocks until all of `size` have come. Every error is PeerLost.

    `name` tells it from the other groups that meet in `store`.
    """

    def __init__(self, store: Store, name: str, rank: int, size: int, timeout_s: float = TIMEOUT_S) -> None:
        self.name = name
        self.rank = rank
        self.size = size
        self._store = PrefixStore(name, store)
        self._limit = timedelta(seconds=timeout_s)
        self._gloo = self._safely("meeting", self._over_gloo)

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' `x`, in `x` itself, which is returned; the same bits on every rank."""
        self._carry("a sum", lambda group: group.allreduce([x]))
        return x

    def send(self, x: torch.Tensor, to: int) -> None:
        """Give `x` to the rank `to`, which receives it. It may still compute what is before it."""
        self._carry("a send", lambda group: group.send([x], to, 0), timedelta(seconds=STAGE_S))

    def receive(self, x: torch.Tensor, sender: int) -> torch.Tensor:
        """`x`, filled by what the rank `sender` sends, once it has computed that."""
        self._carry("a receive", lambda group: group.recv([x], sender, 0), timedelta(seconds=STAGE_S))
        return x

    def gather(self, x: torch.Tensor, rows: Sequence[int]) -> list[torch.Tensor]:
        """The rows of every rank, of which rank `i` has `rows[i]` and this one `x`."""
        parts = [x.new_empty(max(rows), x.shape[1]) for _ in rows]  # Gloo takes equal sizes only
        own = parts[self.rank].clone()
        own[: x.shape[0]] = x
        self._carry("a gather", lambda group: group.allgather([parts], [own]))
        return [part[:count] for part, count in zip(parts, rows, strict=True)]

    def close(self) -> None:
        """End our connections: who waits for this rank sees it at once. Nothing may follow."""
        self._gloo = None

    def _carry(self, what: str, call: Callable[[Any], Any], limit: timedelta | None = None) -> None:
        """Wait for what `call` asks of Gloo, which by itself takes `self._limit`."""

        def wait() -> None:
            # No name for what is waited for: an error would keep it, and it keeps the connections.
            call(self._gloo).wait(*(() if limit is None else (limit,)))

        self._safely(what, wait)

    def _over_gloo(self) -> Any:
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = self._limit
        options._devices = [ProcessGroupGloo.create_device(hostname=_HOST)]
        return ProcessGroupGloo(self._store, self.rank, self.size, options)

    def _safely(self, what: str, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except RuntimeError as exc:  # all that Gloo ever raises
            # Behind a place in Gloo's sources, and before its advice.
            why = str(exc).rpartition("] ")[2].partition(". This is")[0]
            raise PeerLost(f"{what} of {self.size} ranks ({self.name}) failed: {why}") from exc


@dataclass(frozen=True, slots=True)
class Place:
    """The rank's number in its replica, and the groups that it computes with; None along an axis of size
    one."""

    size: ParallelSize
    rank: int
    tp: TensorGroup | None = None
    pp: TensorGroup | None = None
    cp: TensorGroup | None = None

    @property
    def coord(self) -> RankCoord:
        """Its place along each axis."""
        return self.size.coord(self.rank)


#: The only rank of its replica.
ALONE = Place(ParallelSize(), 0)


def join(size: ParallelSize, rank: int, store: Store, timeout_s: float = TIMEOUT_S) -> Place:
    """Meet the other ranks of the replica, which all do so now. Raises PeerLost after `timeout_s`."""
    at = size.coord(rank)

    def group(axis: str, index: int, count: int, others: str) -> TensorGroup | None:
        return TensorGroup(store, f"{axis} at {others}", index, count, timeout_s) if count > 1 else None

    return Place(
        size,
        rank,
        tp=group("tp", at.tp, size.tp, f"pp {at.pp} cp {at.cp}"),
        pp=group("pp", at.pp, size.pp, f"cp {at.cp} tp {at.tp}"),
        cp=group("cp", at.cp, size.cp, f"pp {at.pp} tp {at.tp}"),
    )


def meeting_point(port: int | None = None, timeout_s: float = TIMEOUT_S) -> TCPStore:
    """The store in which ranks exchange their addresses: the leader's own (see its `port`), or the one at
    `port`."""
    try:
        return TCPStore(
            _HOST, port or 0, None, port is None, timedelta(seconds=timeout_s), wait_for_workers=False
        )
    except RuntimeError as exc:
        raise PeerLost(f"the ranks' meeting point at {_HOST}:{port or 0} cannot be used: {exc}") from exc
