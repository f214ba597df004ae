"""The resources of one process, and those that must be zero at rest."""

from __future__ import annotations

import mmap
import os

from segue.server.observe.integrity_report import busy, process_facts


def test_what_must_be_gone_at_rest_is_told_and_what_may_stay_is_not() -> None:
    tables = {"requests": 2, "peers": 3, "ended": 4, "deadlines": 5, "rooms": 0, "door_legs": 1}
    assert busy(tables) == {"requests": 2, "door_legs": 1}
    assert busy({"peers": 9}) == {}


def test_a_region_counts_once_however_often_it_is_mapped_and_only_ours_do() -> None:
    descriptors, segments, rss_bytes = process_facts()
    assert rss_bytes > 2**20
    fds = [os.memfd_create(name) for name in ("segue-a", "segue-b", "somebody")]
    maps = []
    for fd in fds:
        os.ftruncate(fd, 3 * mmap.PAGESIZE)
        maps += [mmap.mmap(fd, mmap.PAGESIZE, offset=part * mmap.PAGESIZE) for part in (0, 2)]
    after = process_facts()
    assert after[1] == segments + 2
    assert after[0] >= descriptors + 3
    for one in maps:
        one.close()
    for fd in fds:
        os.close(fd)
    assert process_facts()[:2] == (descriptors, segments)
