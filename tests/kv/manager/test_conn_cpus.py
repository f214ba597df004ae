"""The CPUs that a manager's threads run on."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from kv_sides import assert_handed_over, sides

from segue.kv.errors import ConfigError
from segue.kv.threads import threads_on


def threads() -> dict[int, set[int]]:
    """The CPUs of each thread of this process."""
    found = {}
    for name in os.listdir("/proc/self/task"):
        try:
            found[int(name)] = os.sched_getaffinity(int(name))
        except ProcessLookupError:
            continue
    return found


@pytest.fixture
def all_cpus() -> Iterator[set[int]]:
    own = os.sched_getaffinity(0)
    if len(own) < 2:
        pytest.skip("one CPU: every thread runs there")
    yield own
    assert os.sched_getaffinity(0) == own


@pytest.mark.parametrize("transport", ["shm", "tcp", "staged_tcp"])
def test_all_threads_of_a_manager_run_where_it_was_made(transport: str, all_cpus: set[int]) -> None:
    """Those of its I/O, its transport, its copies and its checksums, also after a hand-off; no other one."""
    before, cpu = threads(), max(all_cpus)
    with ExitStack() as stack:
        with threads_on({cpu}):
            prefill, decode = stack.enter_context(sides(transport))
        assert os.sched_getaffinity(0) == all_cpus
        assert_handed_over(prefill, decode, tokens=40, chunk=16)
        after = threads()
        made = {thread: cpus for thread, cpus in after.items() if thread not in before}
        assert len(made) >= 4, "an I/O thread and one of the transport on each side"
        assert set(map(frozenset, made.values())) == {frozenset({cpu})}
        assert {thread: after[thread] for thread in before if thread in after} == {
            thread: cpus for thread, cpus in before.items() if thread in after
        }


def test_cpus_that_are_none_are_refused_and_nothing_changes(all_cpus: set[int]) -> None:
    wrong: list[list[int]] = [[], [4095], [-1], [2**40]]
    for cpus in wrong:
        with pytest.raises(ConfigError, match="cpus"), threads_on(cpus):
            raise AssertionError("it ran")
        assert os.sched_getaffinity(0) == all_cpus


def test_an_error_within_gives_the_cpus_back(all_cpus: set[int]) -> None:
    with pytest.raises(KeyError), threads_on({min(all_cpus)}):
        raise KeyError(os.sched_getaffinity(0) == {min(all_cpus)})
    assert os.sched_getaffinity(0) == all_cpus


def test_other_threads_keep_theirs(all_cpus: set[int]) -> None:
    asked, answer = threading.Event(), []
    other = threading.Thread(target=lambda: (asked.wait(60), answer.append(os.sched_getaffinity(0))))
    other.start()
    with threads_on({min(all_cpus)}):
        asked.set()
        other.join(60)
    assert answer == [all_cpus]
