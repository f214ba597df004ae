"""The alarm of a leader: one timer, for the nearest deadline."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest

from hand_loop import HandLoop
from segue.kv.alarm import Alarm


def due(loop: HandLoop) -> list[float]:
    """In how many seconds its timers fire."""
    return [timer.at - loop.now for timer in loop.timers]


def made(ring: Callable[[], object] = lambda: None) -> tuple[HandLoop, Alarm]:
    loop = HandLoop()
    return loop, Alarm(SimpleNamespace(loop=loop), ring)  # type: ignore[arg-type]


def test_the_alarm_is_set_for_the_nearest_deadline_and_anew_for_each_nearer_one() -> None:
    rung = list[int]()
    loop, alarm = made(lambda: rung.append(1))
    alarm.set(None, 0.0)
    assert loop.timers == []
    alarm.set(10.0, 4.0)
    [timer] = loop.timers
    alarm.set(12.0, 4.0)
    alarm.set(10.0, 5.0)
    assert (loop.timers, due(loop)) == ([timer], [6.0])
    alarm.set(9.0, 5.0)
    assert due(loop) == [4.0]
    alarm.set(None, 5.0)
    assert loop.timers == [], "there is nothing to wait for any more"
    alarm.set(20.0, 5.0)
    assert due(loop) == [15.0]
    loop.advance(15.0)
    assert rung == [1]
    alarm.set(20.0, 21.0)
    assert due(loop) == [0.0], "what is due already rings at once"


@pytest.mark.parametrize("deadline", [5.0, 15.0])
def test_an_alarm_that_has_rung_is_set_again(deadline: float) -> None:
    loop, alarm = made()
    alarm.set(10.0, 0.0)
    loop.advance(10.0)
    alarm.set(deadline, 0.0)
    assert due(loop) == [deadline]


def test_the_next_deadline_is_waited_for_although_it_is_set_while_the_alarm_rings() -> None:
    loop, alarm = made(lambda: alarm.set(15.0, 10.0))
    alarm.set(10.0, 0.0)
    loop.advance(10.0)
    assert due(loop) == [5.0]
    [timer] = loop.timers
    alarm.set(15.0, 10.0)
    assert loop.timers == [timer]
    alarm.set(None, 10.0)
    assert loop.timers == []
