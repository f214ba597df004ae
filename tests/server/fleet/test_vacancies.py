"""The `Retry-After` of refused clients."""

from __future__ import annotations

import pytest

from segue.kv.errors import Draining, OutOfCapacity
from segue.server.fleet.retry_after import LONGEST_S, RetryAfter


def told(vacancies: RetryAfter, now: float) -> int:
    return vacancies.refused(OutOfCapacity("full"), now).retry_after_s


def test_each_refused_client_is_told_of_a_place_of_its_own() -> None:
    vacancies = RetryAfter(lambda: 4)
    for _ in range(8):
        vacancies.served(6.0)
    # One of four ends every 1.5 seconds.
    assert [told(vacancies, 100.0) for _ in range(4)] == [2, 3, 5, 6]
    # Half of these places have come, the others are still somebody's.
    assert told(vacancies, 103.0) == 5
    # Later all of them have.
    assert told(vacancies, 1000.0) == 2


def test_nobody_is_sent_away_for_longer_than_a_minute_or_less_than_a_second() -> None:
    slow, quick, new = RetryAfter(lambda: 1), RetryAfter(lambda: 1000), RetryAfter(lambda: 0)
    slow.served(50.0)
    quick.served(0.1)
    assert [told(slow, 0.0) for _ in range(3)] == [50, LONGEST_S, LONGEST_S]
    assert [told(quick, 0.0) for _ in range(3)] == [1, 1, 1]
    assert told(new, 0.0) == 1


def test_what_many_were_promised_is_forgotten_within_a_minute() -> None:
    vacancies = RetryAfter(lambda: 1)
    vacancies.served(5.0)
    assert {told(vacancies, 0.0) for _ in range(1000)} == {*range(5, LONGEST_S + 1, 5)}
    assert told(vacancies, LONGEST_S) == 5


def test_the_mean_follows_what_requests_take_now_and_not_one_of_them() -> None:
    vacancies = RetryAfter(lambda: 1)
    vacancies.served(2.0)
    vacancies.served(34.0)
    assert told(vacancies, 0.0) == 4
    for _ in range(200):
        vacancies.served(20.0)
    assert told(vacancies, 1000.0) == pytest.approx(20)


def test_other_errors_promise_no_place() -> None:
    vacancies = RetryAfter(lambda: 1)
    vacancies.served(30.0)
    assert vacancies.refused(Draining("leaving"), 0.0).retry_after_s == 1
    assert told(vacancies, 0.0) == 30
