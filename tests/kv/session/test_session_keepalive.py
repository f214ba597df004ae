"""When a peer is given up, on a clock that the test turns."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from hand_loop import HandLoop
from segue.kv.limits import Limits
from segue.kv.session.keepalive import Keepalive

LIMITS = Limits(keepalive_s=0.5, peer_silence_s=2.0)


class Watched:
    def __init__(self) -> None:
        self.loop = HandLoop()
        self.silences: list[float] = []
        self.pings: list[float] = []
        self.keepalive = Keepalive(
            cast("asyncio.AbstractEventLoop", self.loop), LIMITS, self.pinged, self.silent
        )
        self.start()

    def start(self) -> None:
        self.loop.timers.clear()
        self.keepalive.start()

    def pinged(self) -> None:
        self.pings.append(self.loop.now)
        self.keepalive.sent_at = self.loop.now

    def silent(self, seconds: float) -> None:
        self.silences.append(seconds)

    def until(self, end: float) -> None:
        """Run what is due up to `end`."""
        self.loop.advance(end - self.loop.now)


def test_a_peer_that_says_nothing_is_given_up_when_its_silence_is_over() -> None:
    watched = Watched()
    watched.until(101.99)
    assert watched.silences == []
    watched.start()
    watched.until(103.0)
    assert len(watched.silences) == 1


def test_a_clock_that_jumps_right_after_a_sign_does_not_end_the_session_before_the_next() -> None:
    """The sign after it comes a keepalive later, on the peer's clock, and has a way to go: found by the
    simulator (seed 2000225), whose clocks run at other rates."""
    watched = Watched()
    watched.until(100.2)
    watched.keepalive.heard_at = 100.2
    watched.loop.now += 30.0
    watched.until(130.2 + 0.56)
    assert watched.silences == []
    watched.keepalive.heard_at = watched.loop.now
    watched.until(132.0)
    assert watched.silences == []


@pytest.mark.parametrize("pause_s", [1.6, 1.9, 2.4, 30.0])
def test_our_own_pause_is_not_the_peers_silence_however_short(pause_s: float) -> None:
    """Together with what the peer had not said before, also one shorter than the silence is too long."""
    watched = Watched()
    watched.until(100.49)
    watched.loop.now += pause_s
    watched.until(watched.loop.now + 0.1)
    assert watched.silences == []
    watched.keepalive.heard_at = watched.loop.now
    watched.until(watched.loop.now + 1.9)
    assert watched.silences == []


def test_whoever_is_silent_after_a_jump_too_is_given_up_then() -> None:
    watched = Watched()
    watched.until(100.2)
    watched.loop.now += 30.0
    watched.until(130.2 + 2.1)
    assert len(watched.silences) == 1


def test_a_peer_is_given_up_in_time_also_when_our_next_word_is_due_later() -> None:
    watched = Watched()
    began = watched.keepalive.heard_at
    watched.loop.now = watched.keepalive.sent_at = began + LIMITS.peer_silence_s - 0.25
    watched.start()
    assert min(timer.at for timer in watched.loop.timers) == began + LIMITS.peer_silence_s


def test_something_is_said_when_nothing_was_for_so_long_and_not_before() -> None:
    watched = Watched()
    watched.until(101.1)
    assert watched.pings == [100.5, 101.0]
    watched.keepalive.sent_at = watched.keepalive.heard_at = 101.4  # a message of ours, and one of theirs
    watched.until(101.89)
    assert watched.pings == [100.5, 101.0]
    watched.until(102.5)
    assert watched.pings == [100.5, 101.0, pytest.approx(101.9), pytest.approx(102.4)]
    assert watched.silences == []
