"""The process of one rank but the leader's: `python -m segue.server.instance.rank_process LINK_FD PART RANK
LOG_LEVEL LOG_FORMAT`.

Its main thread carries out the leader's orders (`engine.ranks.parallel_replica`), the thread of its link
what the hand-offs ask of its pool (`kv.ranks.rank_worker`). It dies with its leader, and signals that mean
the whole family are the leader's.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import logging
import os
import signal
import socket
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from segue.engine.ranks.rank_orders import RankMessage
from segue.kv import (
    DECODE_ERRORS,
    HOST,
    ErrorInfo,
    Internal,
    LeaderId,
    PoolSpec,
    RankLink,
    RankWorker,
    Role,
    SegueError,
    local_rank,
)
from segue.kv.session import tls_from_files, typed
from segue.server.instance.gc import frozen_imports
from segue.server.instance.kv_settings import kv_config
from segue.server.observe import logs
from segue.server.settings.commands import InstanceConfig
from segue.server.settings.shared_config import LogConfig

if TYPE_CHECKING:
    from segue.engine.cpu.cpu_forward import CpuForward

_PR_SET_PDEATHSIG = 1  # prctl.h of Linux


class HereWord(msgspec.Struct, frozen=True, tag=True):
    """The process runs, with all modules that it needs."""


class SetUpOrder(msgspec.Struct, frozen=True, tag=True):
    """Be rank `rank` of an instance with this configuration, whose pools take `pool_bytes` together; the
    ranks meet at `port` of loopback."""

    config: InstanceConfig
    rank: int
    pool_bytes: int
    port: int


class LoadedWord(msgspec.Struct, frozen=True, tag=True):
    """The rank has its part of the model with this fingerprint, and its pool."""

    fingerprint: str
    spec: PoolSpec


class CannotWord(msgspec.Struct, frozen=True, tag=True):
    """The process ends for this reason."""

    error: ErrorInfo


class ServeOrder(msgspec.Struct, frozen=True, tag=True):
    """Be a rank of this leader in this role, with these transports, and of no other leader any more."""

    me: LeaderId
    role: Role
    transports: list[str]


#: Messages over the link between a leader and the process of a rank, beside hand-offs.
Messages = HereWord | SetUpOrder | LoadedWord | CannotWord | RankMessage
#: How often the interpreter lets another thread run: the I/O thread of a rank must not wait 5 ms for one that
#: computes between two torch calls.
SWITCH_INTERVAL_S = 0.0005


def main(link_fd: int, part: str, rank: int, log: LogConfig) -> int:
    """Serve until the leader leaves; the exit status."""
    logs.configure(log, part, rank=rank)
    die_with_parent()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    link = RankLink(socket.socket(fileno=link_fd), "the leader", messages=Messages)
    try:
        _serve(link)
    except SegueError as error:
        logging.getLogger("segue.rank").error("this rank ends: %s", error)
        return 1
    finally:
        link.close()
    return 0


def die_with_parent() -> None:
    """Have the kernel end this process when the one that started it ends, even if this one is stopped."""
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before
        os._exit(1)


def load_options(config: InstanceConfig, pool_bytes: int) -> dict[str, Any]:
    """The keyword arguments that loading an engine and loading one rank's forward share."""
    engine = config.engine
    return {
        "dtype": engine.dtype,
        "pool_bytes": pool_bytes,
        "page_tokens": engine.page_tokens,
        "threads": engine.threads_per_worker or 1,
        "cache": engine.cache,
    }


class HandOffs:
    """Makes the hand-off side of rank `number` over `link`, with the KV of `forward`: once for each role of
    its leader."""

    def __init__(self, config: InstanceConfig, number: int, forward: CpuForward, link: RankLink) -> None:
        self._config = config
        self._number = number
        self._forward = forward
        self._link = link
        self._worker: RankWorker | None = None

    def serve(self, words: bytes) -> None:
        """Do what the `ServeOrder` says. Raises Internal for other words, and what `local_rank` and
        `RankWorker.start` do."""
        try:
            order = msgspec.msgpack.decode(words, type=ServeOrder)
        except DECODE_ERRORS as exc:
            raise Internal(f"the leader said something else where a role was due: {exc}") from exc
        self.close()
        config, pool = replace(self._config, role=order.role), self._forward.pool
        rank = local_rank(
            kv_config(
                config,
                order.me,
                model=self._forward.fingerprint,
                spec=pool.spec,
                transports=order.transports,
                tls=tls_from_files(config.tls, config.peer_host),
                rank=self._number,
            ),
            pool.memory,
            HOST,
            self._number,
        )
        # If the leader ends, the link wakes the main thread, too.
        self._worker = RankWorker(rank, self._link, lambda _: None)
        self._worker.start()
        # As its leader: what is here now stays, and no collection goes through it, at the end neither.
        gc.unfreeze()
        gc.collect()
        gc.freeze()

    def signal(self, number: int) -> None:
        """See `RankWorker.signal`."""
        if self._worker is not None:
            self._worker.signal(number)

    def close(self) -> None:
        """End the transports. Idempotent."""
        if self._worker is not None:
            self._worker.close()
            self._worker = None


def _serve(link: RankLink) -> None:
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    with frozen_imports():
        # Imports that take seconds come before the ranks wait for one another.
        importlib.import_module("transformers.modeling_utils")
        from segue.engine.cpu.cpu_forward import load_forward
        from segue.engine.ranks.collectives import join, meeting_point
        from segue.engine.ranks.parallel_replica import serve_rank

    link.post(HereWord())
    order = link.receive()
    if not isinstance(order, SetUpOrder):
        raise Internal(f"{link.name} said {order} where the configuration was due")
    config = order.config
    link.limits = config.limit.limits()
    try:
        place = join(config.size, order.rank, meeting_point(order.port))
        forward = load_forward(Path(config.model), **load_options(config, order.pool_bytes), place=place)
    except Exception as exc:
        error = typed(exc, "loading")
        link.post(CannotWord(error.info))
        raise error from exc
    link.post(LoadedWord(forward.fingerprint, forward.pool.spec))
    hand_offs = HandOffs(config, order.rank, forward, link)
    try:
        serve_rank(link, forward, hand_offs.serve, hand_offs.signal)
    finally:
        hand_offs.close()


if __name__ == "__main__":
    fd, name, number, level, form = sys.argv[1:]
    sys.exit(main(int(fd), name, int(number), LogConfig(log_level=level, log_format=form)))
