"""The resources that one process holds, as its `/integrity` route shows them: the same form for every node.

Numbers only: no prompt, no address, no secret.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import msgspec
import psutil

#: Tables that keep something at rest, each with its own bound: peers, and tombstones with their timers.
STANDING = frozenset({"peers", "ended", "deadlines"})


class NodeState(msgspec.Struct, frozen=True, kw_only=True):
    """A node at one moment.

    `at_rest`: no request holds anything. `problems`: what can never be right, in words; at rest that
    includes everything that is still held. `pages` count the pool (what only the prefix cache
    keeps is free), `tables` internal tables, `sessions` the first digits of the peers' incarnations.
    `segments` are shared-memory regions that this process maps, `descriptors` its open files.
    """

    role: str
    incarnation: str
    at_rest: bool
    problems: list[str]
    tables: dict[str, int]
    sessions: list[str]
    pages: dict[str, int] = {}
    descriptors: int = 0
    segments: int = 0
    rss_bytes: int = 0


def busy(tables: Mapping[str, int]) -> dict[str, int]:
    """The tables out of `tables` that must be empty at rest and are not."""
    return {name: count for name, count in tables.items() if count and name not in STANDING}


def process_facts() -> tuple[int, int, int]:
    """Open descriptors, mapped shared-memory regions and resident bytes of this process."""
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        # device and inode name a region, however often it is mapped
        regions = {tuple(line.split()[3:5]) for line in maps if "/memfd:segue" in line}
    return len(os.listdir("/proc/self/fd")), len(regions), int(psutil.Process().memory_info().rss)
