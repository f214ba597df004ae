"""The processes of a leader's other ranks: started before the model is loaded, dead at the latest with it.

Each has one link to the leader, for its orders (`engine.ranks.parallel_replica`) and for the hand-offs of
each of its roles (`kv.ranks.worker_rank`). Whichever shows first that one has ended or stands still: then all
are killed, the computing leader gets an error instead of an answer, and the replica is over.
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from segue.engine.engine_api import Engine, ExpertPeers
from segue.engine.models.model_registry import check_experts
from segue.kv import (
    Internal,
    LeaderId,
    Memory,
    Rank,
    RankLink,
    SegueError,
    WorkerRank,
    model_identity,
)
from segue.server.instance.rank_process import (
    CannotWord,
    HereWord,
    LoadedWord,
    Messages,
    ServeOrder,
    SetUpOrder,
    load_options,
)
from segue.server.settings.commands import InstanceConfig

if TYPE_CHECKING:
    from segue.engine.cpu.cpu_forward import CpuForward

log = logging.getLogger("segue.instance")

#: For a process to start and to import what it needs, and for it to load its part of the model.
START_S = 120.0
LOAD_S = 600.0
#: For a process whose leader leaves to leave, too.
LEAVE_S = 5.0


class RankProcess(NamedTuple):
    """One process, with our end of its link."""

    process: subprocess.Popen[bytes]
    link: RankLink


class Workers:
    """The ranks 1 … of one leader. `lost` is set by whoever serves: it is told once, on any thread, why the
    replica is over; by then no worker is left. `tell` says words to all of them, between two steps."""

    def __init__(self, count: int, config: InstanceConfig) -> None:
        self._lost: Callable[[SegueError], None] = _nobody
        #: the engine's, once it is loaded: see `RanksForward.tell`
        self.tell: Callable[[bytes], None] = _nobody
        self._error: SegueError | None = None
        self.all = [_started(rank, config) for rank in range(1, count + 1)]

    @property
    def links(self) -> list[RankLink]:
        """The links for orders, rank 1 first."""
        return [worker.link for worker in self.all]

    def set_up(self, config: InstanceConfig, pool_bytes: int, port: int) -> None:
        """Once all of them run, have them meet at `port` and load. Raises PeerLost."""
        until = time.monotonic() + START_S
        for rank, link in enumerate(self.links, 1):
            word = link.receive(max(0.0, until - time.monotonic()))
            if not isinstance(word, HereWord):
                raise Internal(f"rank {rank} said {word} where it had started")
        config = replace(config, secret=b"")  # the sessions are the leader's
        for rank, link in enumerate(self.links, 1):
            link.post(SetUpOrder(config, rank, pool_bytes, port))

    def loaded(self, own: CpuForward) -> int:
        """Wait until all have loaded what fits to the leader's part; the bytes of one page in all pools.
        Raises what kept one from it."""
        until = time.monotonic() + LOAD_S
        page_bytes = own.pool.spec.page_bytes
        for rank, link in enumerate(self.links, 1):
            word = link.receive(max(0.0, until - time.monotonic()))
            if isinstance(word, CannotWord):
                raise word.error.exception()
            if not isinstance(word, LoadedWord):
                raise Internal(f"rank {rank} said {word} where its model was due")
            if (word.fingerprint, word.spec.pages) != (own.fingerprint, own.pool.spec.pages):
                raise Internal(f"rank {rank} has loaded another model or pool than its leader: {word}")
            page_bytes += word.spec.page_bytes
        return page_bytes

    def serve(
        self,
        me: LeaderId,
        transports: Sequence[str],
        config: InstanceConfig,
        lost: Callable[[SegueError], None],
    ) -> list[Rank]:
        """Have them hand KV over as ranks of `me` in the role of `config`, and of no other leader any more;
        `lost` is told why the replica is over. Raises what kept one from it."""
        self._lost = _nobody  # the leader before
        for link in self.links:
            link.limits = config.limit.limits()
        self.tell(msgspec.msgpack.encode(ServeOrder(me, config.role, list(transports))))
        self._lost = lost
        if self._error is not None:  # nobody was told
            raise self._error
        return [WorkerRank(rank, link) for rank, link in enumerate(self.links, 1)]

    def fail(self, error: SegueError) -> None:
        """The replica is over: kill all of them, which wakes whoever waits for one, and say so. From any
        thread; only the first reason counts."""
        if self._error is None:
            self._error = error
            self.kill()
            self._lost(error)

    def close(self) -> None:
        """End all of them: by themselves in `LEAVE_S`, or else by force. Idempotent."""
        for worker in self.all:
            worker.link.close()
        until = time.monotonic() + LEAVE_S
        for worker in self.all:
            try:
                worker.process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                log.warning("killed a rank that did not leave pid=%d", worker.process.pid)
                worker.process.kill()
                worker.process.wait()

    def kill(self) -> None:
        """End all of them by force."""
        for worker in self.all:
            worker.process.kill()
        for worker in self.all:
            worker.process.wait()


def _nobody(_: object) -> None:
    """The receiver of answers before the replica serves: ignores them."""


def _started(rank: int, config: InstanceConfig) -> RankProcess:
    ours, theirs = socket.socketpair()
    log_words = (config.label, str(rank), config.log.log_level, config.log.log_format)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "segue.server.instance.rank_process", str(theirs.fileno()), *log_words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            env=os.environ | {"HF_HUB_OFFLINE": "1"},
        )
    log.info("started the process of rank %d pid=%d", rank, process.pid)
    link = RankLink(ours, f"the process of rank {rank}", limits=config.limit.limits(), messages=Messages)
    return RankProcess(process, link)


class OpenedReplica(NamedTuple):
    """The resources of one leader: its engine, the memory of its own pool, its other ranks, and the DP ranks
    that it computes every step with."""

    engine: Engine
    memory: Memory
    workers: Workers | None = None
    expert_peers: ExpertPeers | None = None


def open_replica(config: InstanceConfig) -> OpenedReplica:
    """Load the model on as many ranks as `config` says. Raises ConfigError, and PeerLost for a rank that has
    ended on the way."""
    pool_bytes = int((config.engine.kv_gib or 1.0) * 2**30)
    folder = Path(config.model)
    if config.dp_fds is not None:
        return _opened_together(config, config.dp_fds, pool_bytes, folder)
    if config.size.ranks == 1:
        from segue.engine.cpu.cpu_forward import load_engine

        engine = load_engine(folder, **load_options(config, pool_bytes))
        return OpenedReplica(engine, engine.memory)
    workers = Workers(config.size.ranks - 1, config)
    try:
        return OpenedReplica(*_loaded(config, pool_bytes, folder, workers), workers)
    except BaseException:
        workers.kill()  # nobody relies on one yet, and one that loads would leave later
        workers.close()
        raise


def _opened_together(config: InstanceConfig, fds: str, pool_bytes: int, folder: Path) -> OpenedReplica:
    """One of the DP ranks that split the experts; it waits until all have loaded."""
    check_experts(folder, config.dp)
    from segue.engine.cpu.cpu_forward import load_forward
    from segue.engine.ranks.dp_forward import DpForward
    from segue.engine.ranks.dp_group import DpGroup
    from segue.engine.replica_engine import make_engine

    rank = config.dp_rank or 0
    own = load_forward(folder, **load_options(config, pool_bytes), dp_rank=rank, dp_size=config.dp)
    links = [socket.socket(fileno=int(fd)) for fd in fds.split(",")]
    identity, limits = model_identity(own.fingerprint, config.engine.dtype), config.limit.limits()
    group = DpGroup(rank, config.dp, links, identity, limits=limits)
    group.meet()
    engine = make_engine(folder, own, DpForward(own, group))
    return OpenedReplica(engine, engine.memory, expert_peers=group)


def _loaded(config: InstanceConfig, pool_bytes: int, folder: Path, workers: Workers) -> tuple[Engine, Memory]:
    from segue.engine.cpu.cpu_forward import load_forward
    from segue.engine.ranks.collectives import join, meeting_point
    from segue.engine.ranks.parallel_replica import RanksForward
    from segue.engine.replica_engine import make_engine

    store = meeting_point()
    workers.set_up(config, pool_bytes, store.port)
    own = load_forward(folder, **load_options(config, pool_bytes), place=join(config.size, 0, store))
    forward = RanksForward(own, workers.links, workers.loaded(own), workers.fail)
    workers.tell = forward.tell
    engine = make_engine(folder, own, forward)
    return engine, engine.memory
