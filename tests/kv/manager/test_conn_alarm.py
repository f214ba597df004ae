"""The alarm of a leader: one timer, for the nearest deadline."""

from __future__ import annotations

from typing import Any

import pytest

from segue.kv.alarm import Alarm


class Timer:
    def __init__(self, delay: float, ring: Any) -> None:
        self.delay, self.ring = delay, ring
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class Loop:
    def __init__(self) -> None:
        self.loop = self
        self.timers: list[Timer] = []

    def call_later(self, delay: float, ring: Any) -> Timer:
        self.timers.append(Timer(delay, ring))
        return self.timers[-1]


def test_the_alarm_is_set_for_the_nearest_deadline_and_anew_for_each_nearer_one() -> None:
    loop, rung = Loop(), list[int]()
    alarm = Alarm(loop, lambda: rung.append(1))  # type: ignore[arg-type]
    alarm.set(None, 0.0)
    assert loop.timers == []
    alarm.set(10.0, 4.0)
    alarm.set(12.0, 4.0)
    alarm.set(10.0, 5.0)
    assert [timer.delay for timer in loop.timers] == [6.0]
    alarm.set(9.0, 5.0)
    assert [(timer.delay, timer.cancelled) for timer in loop.timers] == [(6.0, True), (4.0, False)]
    alarm.set(None, 5.0)
    assert loop.timers[1].cancelled, "there is nothing to wait for any more"
    alarm.set(20.0, 5.0)
    assert loop.timers[2].delay == 15.0
    loop.timers[2].ring()
    assert rung == [1]
    alarm.set(20.0, 21.0)
    assert loop.timers[3].delay == 0.0, "what is due already rings at once"
    assert len(loop.timers) == 4


@pytest.mark.parametrize("nearer", [True, False])
def test_an_alarm_that_has_rung_is_set_again(nearer: bool) -> None:
    loop = Loop()
    alarm = Alarm(loop, lambda: None)  # type: ignore[arg-type]
    alarm.set(10.0, 0.0)
    loop.timers[0].ring()
    alarm.set(5.0 if nearer else 15.0, 0.0)
    assert [timer.delay for timer in loop.timers] == [10.0, 5.0 if nearer else 15.0]


def test_the_next_deadline_is_waited_for_although_it_is_set_while_the_alarm_rings() -> None:
    loop = Loop()
    alarm = Alarm(loop, lambda: alarm.set(15.0, 10.0))  # type: ignore[arg-type]
    alarm.set(10.0, 0.0)
    loop.timers[0].ring()
    assert [timer.delay for timer in loop.timers] == [10.0, 5.0]
    alarm.set(15.0, 10.0)
    assert len(loop.timers) == 2
    alarm.set(None, 10.0)
    assert loop.timers[1].cancelled
