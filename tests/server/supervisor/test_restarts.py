"""When a child is started again: a table of pauses, and a window of time in which it served."""

from __future__ import annotations

import pytest

from segue.server.supervisor.restarts import PAUSES_S, WINDOW_S, Restarts


def test_the_first_restart_is_at_once_and_each_further_one_waits_longer_up_to_a_limit() -> None:
    restarts = Restarts()
    assert [restarts.ended(1.0) for _ in PAUSES_S] == list(PAUSES_S)
    assert PAUSES_S[0] == 0.0
    assert list(PAUSES_S) == sorted(PAUSES_S)
    assert restarts.ended(1.0) is None
    assert restarts.ended(1.0) is None, "it stays given up"


def test_a_child_that_never_gets_ready_reaches_the_limit_however_long_it_loads() -> None:
    restarts = Restarts()
    assert [restarts.ended(0.0) for _ in range(len(PAUSES_S) + 1)] == [*PAUSES_S, None]


def test_after_a_window_of_service_an_end_is_the_first_again() -> None:
    restarts = Restarts()
    for _ in range(3 * len(PAUSES_S)):
        assert restarts.ended(WINDOW_S) == 0.0


@pytest.mark.parametrize("served_s", [WINDOW_S / len(PAUSES_S), WINDOW_S / (len(PAUSES_S) + 1)])
def test_ends_that_come_evenly_are_borne_if_at_most_so_many_fall_into_one_window(served_s: float) -> None:
    restarts = Restarts()
    pauses = [restarts.ended(served_s) for _ in range(4 * len(PAUSES_S))]
    assert (None in pauses) is (served_s < WINDOW_S / len(PAUSES_S))
