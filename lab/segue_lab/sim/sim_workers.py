"""Ranks as workers of their own: production's two ends of their link, over a simulated socket pair.

Both ends run in the node's process; what they say takes its time, comes in order, and may stand still.
"""

from __future__ import annotations

import random
from typing import Any

from segue.kv.errors import SegueError
from segue.kv.ranks.local_rank import LocalRank
from segue.kv.ranks.rank_link import RankLink
from segue.kv.ranks.rank_worker import RankWorker
from segue.kv.ranks.worker_rank import WorkerRank
from segue_lab.sim.node_views import KVView
from segue_lab.sim.sim_threads import SimThread
from segue_lab.sim.world import Injected


class PipeEnd:
    """One end of a socket pair: asyncio's transport once a loop has it."""

    other: PipeEnd

    def __init__(self, node: KVView, rng: random.Random) -> None:
        self._node = node
        self._rng = rng
        self._protocol: Any = None
        self._unread = bytearray()
        self._under_way = 0
        #: messages sent here arrive no earlier
        self.not_before = 0.0
        self._closed = False

    def adopted(self, protocol: Any) -> Any:
        """A loop reads from now on."""
        self._protocol = protocol
        protocol.connection_made(self)
        if self._unread:
            protocol.data_received(bytes(self._unread))
        return protocol

    def write(self, data: bytes) -> None:
        """Say something."""
        if self.other._protocol is None:  # it is there already when a loop looks
            self.other._unread += data
            return
        self._under_way += len(data)
        self._later(self._arrived, data)

    def is_closing(self) -> bool:
        """Nothing can be said any more."""
        return self._closed

    def get_write_buffer_size(self) -> int:
        """Bytes that were written and not read."""
        return self._under_way

    def close(self) -> None:
        """End both ends, the other one after what was said."""
        if self._closed:
            return
        self._closed = True
        self._later(self.other._ended)
        self._node.after(0.0, self._protocol.connection_lost, None)

    def abort(self) -> None:
        """End at once."""
        self.close()

    def _arrived(self, data: bytes) -> None:
        self._under_way -= len(data)
        if not self.other._closed:
            self.other._protocol.data_received(data)

    def _ended(self) -> None:
        if not self._closed:
            self._closed = True
            self._protocol.connection_lost(None)

    def _later(self, call: Any, *args: Any) -> None:
        node = self._node
        took_s = node.world_timing.hop_s * (1 + self._rng.random())
        at = self.not_before = max(self.not_before, node.world.now + took_s)
        node.world.at(at, node, node.loop.enter, call, *args)


class SimWorkerRank(WorkerRank):
    """Production's, with the worker at the other end."""

    def __init__(self, node: KVView, index: int, rank: LocalRank) -> None:
        rng = node.world.rng(f"worker {index} of {node.name}")
        self.ours, self.theirs = PipeEnd(node, rng), PipeEnd(node, rng)
        self.ours.other, self.theirs.other = self.theirs, self.ours
        self._node, self._rank = node, rank
        theirs = RankLink(self.theirs, "the leader", limits=node.limits, io=node.io)  # type: ignore[arg-type]
        self.worker = RankWorker(rank, theirs, self._leader_gone)
        self.worker.start()
        name = f"the process of rank {index}"
        super().__init__(index, RankLink(self.ours, name, limits=node.limits, io=node.io))  # type: ignore[arg-type]

    def fail_next(self, name: str) -> None:
        """The next call of this name of the rank raises, in the worker."""
        normal = getattr(self._rank, name)

        def broken(*_args: Any) -> None:
            setattr(self._rank, name, normal)
            self._node.state.counts[f"exception in a worker: {name}"] += 1
            self._node.failed_at = self._node.world.now
            raise Injected(f"injected into {name} of a worker")

        setattr(self._rank, name, broken)

    def stand_still(self, seconds: float) -> None:
        """The worker neither hears nor says anything for a while."""
        until = self._node.world.now + seconds
        for end in (self.ours, self.theirs):
            end.not_before = max(end.not_before, until)

    def close(self) -> None:
        """End the link, on a thread that may wait. Without one the process ends right now, because its
        address is taken, and the link with it."""
        if SimThread.current is not None:
            super().close()

    def leave(self) -> None:
        """The worker ends its transports, and then its process. On a thread that may wait."""
        self._rank.close()
        # Its pool is gone with it: what still lands there is nobody's.
        self._node.ended_ranks.add(self._index)
        self.worker.close()

    def _leader_gone(self, _error: SegueError) -> None:
        """Its process ends with the leader's."""
