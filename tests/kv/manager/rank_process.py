"""One rank of a leader in a process of its own, over a pool that the test can look into.

python rank_process.py LINK_FD|@INVITATION POOL_FD < configuration (msgpack)
"""

from __future__ import annotations

import mmap
import os
import socket
import sys
import threading

import msgspec

from segue.kv.config import HOST, KVConfig
from segue.kv.ids import LeaderId, Role
from segue.kv.layout.spec import PoolSpec
from segue.kv.limits import Limits
from segue.kv.ranks.local_rank import local_rank
from segue.kv.ranks.rank_link import RankLink
from segue.kv.ranks.rank_listener import connect_rank
from segue.kv.ranks.rank_worker import RankWorker
from segue.kv.transport.memory.pool_memory import Memory, Region, host_region


class Wanted(msgspec.Struct):
    """The test's orders for this rank."""

    index: int
    me: LeaderId
    role: Role
    spec: PoolSpec
    transport: str
    limits: Limits


def main() -> None:
    wanted = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Wanted)
    pool_fd = int(sys.argv[2])
    mapping = mmap.mmap(pool_fd, os.fstat(pool_fd).st_size)
    address = host_region(mapping).address
    memory = Memory([Region(address, len(mapping), fd=pool_fd, owner=mapping)])
    config = KVConfig(
        role=wanted.role,
        model="m",
        spec=wanted.spec,
        me=wanted.me,
        transports=[wanted.transport],
        limits=wanted.limits,
    )
    gone = threading.Event()
    rank = local_rank(config, memory, HOST, wanted.index)
    where = sys.argv[1]
    sock = (
        connect_rank(bytes.fromhex(where[1:]), wanted.index, 60)
        if where.startswith("@")
        else socket.socket(fileno=int(where))
    )
    link = RankLink(sock, "the leader", limits=wanted.limits)
    worker = RankWorker(rank, link, lambda _: gone.set())
    worker.start()
    gone.wait()
    worker.close()


if __name__ == "__main__":
    main()
