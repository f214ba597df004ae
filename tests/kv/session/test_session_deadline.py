"""A deadline that moves: it passes once, when it is due, and needs few timers."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from hand_loop import HandLoop
from segue.kv.session.deadline import Deadline


class Loop(HandLoop):
    """It counts the timers that are asked of it."""

    made = 0

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def call_at(self, when: float, call: Callable[..., None], *args: object) -> Any:
        self.made += 1
        return super().call_at(when, call, *args)

    def stand_still_to(self, now: float) -> None:
        self.stand_still(now - self.now)

    def pass_to(self, now: float) -> None:
        self.advance(now - self.now)


def made() -> tuple[Any, Deadline, list[float]]:
    loop, passed = Loop(), list[float]()
    return loop, Deadline(loop, lambda: passed.append(loop.now)), passed  # type: ignore[arg-type]


def test_it_passes_once_at_its_last_time() -> None:
    loop, deadline, passed = made()
    deadline.set(5.0)
    deadline.set(9.0)
    loop.pass_to(8.0)
    assert deadline.is_set
    assert not passed
    deadline.set(12.0)
    deadline.set(11.0)
    loop.pass_to(20.0)
    assert passed == [11.0]
    assert not deadline.is_set


def test_an_earlier_time_comes_in_time() -> None:
    loop, deadline, passed = made()
    deadline.set(75.0)
    deadline.set(10.0)
    loop.pass_to(75.0)
    assert passed == [10.0]


def test_one_that_is_lifted_in_time_makes_no_timer_of_its_own() -> None:
    loop, deadline, passed = made()
    for request in range(100):
        deadline.set(10.0 + request * 0.01)
        deadline.lift()
    loop.pass_to(1000.0)
    assert not passed
    assert loop.made == 1


def test_who_could_not_be_heard_as_we_stood_still_is_not_late_yet() -> None:
    loop, deadline, passed = made()
    deadline.set(5.0)
    loop.stand_still_to(20.0)
    assert deadline.is_set, "what has come meanwhile has not been read"
    deadline.lift()
    loop.pass_to(30.0)
    assert passed == []
    deadline.set(40.0)
    loop.stand_still_to(60.0)
    loop.stand_still_to(80.0)
    assert passed == [80.0], "once"
    deadline.set(90.0)
    loop.stand_still_to(90.5)
    assert passed == [80.0, 90.5], "no timer comes to the point"


def test_nothing_is_left_of_one_that_was_closed() -> None:
    loop, deadline, passed = made()
    deadline.set(5.0)
    deadline.close()
    assert not loop.timers
    loop.pass_to(10.0)
    assert not passed


def test_who_has_closed_one_is_not_kept_by_it() -> None:
    class Owner:
        def late(self) -> None: ...

    owner = Owner()
    deadline, known = Deadline(Loop(), owner.late), weakref.ref(owner)  # type: ignore[arg-type]
    deadline.close()
    del owner
    assert known() is None, "without the garbage collector"
