"""The check at the end of every end-to-end test can fail: it sees one segment, descriptor or session."""

from __future__ import annotations

import subprocess
import sys

import psutil
import pytest
from holdings import REGISTRY_MORE, REGISTRY_WAITS, State, faults
from leftovers import strangers


def deployment() -> dict[str, State]:
    """One prefill and one decode instance on shm, as they answered in a run."""

    def node(role: str, sessions: list[str], descriptors: int, segments: int) -> State:
        return {
            "role": role,
            "at_rest": True,
            "problems": [],
            "tables": {},
            "sessions": sessions,
            "pages": {"quarantined": 0},
            "descriptors": descriptors,
            "segments": segments,
        }

    return {
        "frontend": node("frontend", [], 23, 0),
        "prefill-0": node("prefill", ["f", "d"], 34, 4),
        "decode-0": node("decode", ["f", "p"], 32, 2),
    }


@pytest.mark.parametrize("name", ["frontend", "prefill-0", "decode-0"])
@pytest.mark.parametrize("what", ["segments", "descriptors"])
def test_one_leaked_thing_is_seen(name: str, what: str) -> None:
    states, least = deployment(), dict[str, int]()
    assert faults(states, "shm", least) == []
    if what == "descriptors":
        # These may be connections to the registry.
        states[name][what] += REGISTRY_MORE + REGISTRY_WAITS[states[name]["role"]]
        assert faults(states, "shm", least) == []
    states[name][what] += 1
    [found] = faults(states, "shm", least)
    assert found.startswith(name)


def test_what_a_dead_peer_leaves_behind_is_seen() -> None:
    states, least = deployment(), dict[str, int]()
    assert faults(states, "shm", least) == []
    del states["decode-0"]
    states["prefill-0"]["sessions"].remove("d")
    found = faults(states, "shm", least)
    assert len(found) == 2, found
    assert "maps 4 shared segments instead of 2" in found[0]
    assert "has 33 descriptors beside its peers', it had 28" in found[1]
    states["prefill-0"] |= {"segments": 2, "descriptors": 29}
    assert faults(states, "shm", least) == []


def test_nothing_is_learned_of_a_node_whose_path_is_not_there_yet() -> None:
    """A deployment of a slow machine, asked while it starts: what it holds then is not all that it may."""
    states, least = deployment(), dict[str, int]()
    states["prefill-0"] |= {"segments": 2, "descriptors": 29}
    assert faults(states, "shm", least) == ["prefill-0 maps 2 shared segments instead of 4"]
    states["prefill-0"] |= {"segments": 4, "descriptors": 34}
    assert faults(states, "shm", least) == []
    states["prefill-0"]["descriptors"] += 4
    assert len(faults(states, "shm", least)) == 1


def test_a_process_that_a_test_leaves_behind_is_seen() -> None:
    command = [sys.executable, "-c", "print(flush=True); input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as left:
        assert left.stdout is not None
        left.stdout.readline()  # its environment is there once it runs
        assert psutil.Process(left.pid) in strangers(within_s=0)
        left.communicate(b"\n")
    assert strangers(within_s=0) == []
