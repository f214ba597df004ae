"""How a session is kept open, in virtual time: when the peer is dialled again, and when who waits is told."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from turn_loop import TurnLoop

from segue.kv.backoff import Uniform
from segue.kv.errors import BootstrapUnreachable, Internal, PeerRefused, SegueError
from segue.kv.session.api import Session
from segue.kv.session.dialer import Dialer

PATIENCE_S = 5.0


class Kept:
    """A session until `lose`."""

    def __init__(self, loop: TurnLoop) -> None:
        self.end: asyncio.Future[None] = loop.create_future()

    async def ended(self) -> None:
        await asyncio.shield(self.end)


class Peer:
    """The dialled peer: present, or an error for every caller."""

    def __init__(self, error: SegueError | None, uniform: Uniform = lambda _low, high: high) -> None:
        self.loop = TurnLoop()
        self.error = error
        self.ends_at_once = False
        self.session: Kept | None = None
        self.asked: list[float] = []
        self.told: list[tuple[float, SegueError]] = []
        self.dialer = Dialer(
            self.connect,
            "the peer",
            refused=lambda error: self.told.append((self.loop.now, error)),
            patience_s=PATIENCE_S,
            uniform=uniform,
        )
        self.loop.enter(self.dialer.start, self.loop)

    async def connect(self) -> Session:
        self.asked.append(self.loop.now)
        if self.error is not None:
            raise self.error
        self.session = Kept(self.loop)
        if self.ends_at_once:
            self.session.end.set_result(None)
        return cast(Session, self.session)

    def lose(self, error: SegueError | None) -> None:
        assert self.session is not None
        self.error, session = error, self.session
        self.session = None
        session.end.set_result(None)

    def wait(self, seconds: float) -> None:
        until = self.loop.now + seconds
        while self.loop.now < until:
            self.loop.turn(0.05)
            self.loop.settle()


def away() -> Any:
    return BootstrapUnreachable("nobody is there")


def test_who_waits_for_a_peer_that_is_away_is_told_once_patience_is_over_and_at_each_try_after_it() -> None:
    peer = Peer(away())
    peer.wait(PATIENCE_S - 0.1)
    assert len(peer.asked) > 3
    assert not peer.told
    peer.wait(30.0)
    assert [at for at, _ in peer.told] == [at for at in peer.asked if at >= PATIENCE_S]
    assert len(peer.told) > 3


def test_those_who_lost_one_peer_together_do_not_all_dial_it_in_one_moment() -> None:
    peers = [Peer(away(), uniform) for uniform in (lambda low, _high: low, lambda _low, high: high)]
    for peer in peers:
        peer.wait(5.0)
    first, second = (peer.asked for peer in peers)
    assert all(at < 0.75 * later for at, later in zip(first[3:6], second[3:6], strict=True))


def test_a_peer_that_ends_each_session_at_once_is_dialled_with_pauses() -> None:
    peer = Peer(None)
    peer.ends_at_once = True
    peer.wait(1.0)
    assert 5 < len(peer.asked) < 15


def test_a_bug_does_not_end_the_dialling() -> None:
    peer = Peer(KeyError("a bug"))  # type: ignore[arg-type]
    peer.wait(1.0)
    assert {type(error) for _, error in peer.told} == {Internal}
    peer.error = None
    peer.wait(10.0)
    assert peer.session is not None


def test_a_refusal_that_time_does_not_heal_is_told_at_once() -> None:
    peer = Peer(PeerRefused("another model"))
    peer.wait(0.05)
    assert [error for _, error in peer.told] == [peer.error]


@pytest.mark.parametrize("before_s", [0.0, 60.0])
def test_patience_and_pauses_begin_anew_when_a_session_is_lost(before_s: float) -> None:
    peer = Peer(away())
    peer.wait(before_s)
    peer.error = None
    peer.wait(60.0)
    assert peer.session is not None
    peer.asked.clear()
    peer.told.clear()
    lost_at = peer.loop.now
    peer.lose(away())
    peer.wait(PATIENCE_S - 0.2)
    assert not peer.told, "it may be back any moment"
    assert len(peer.asked) > 3, "the pauses are short again"
    peer.wait(10.0)
    assert peer.told
    assert peer.told[0][0] >= lost_at + PATIENCE_S


def test_what_keeps_a_session_from_being_opened_is_said_once_until_it_is_something_else(
    caplog: pytest.LogCaptureFixture,
) -> None:
    peer = Peer(away())

    def said() -> list[str]:
        found = [record.getMessage() for record in caplog.records]
        caplog.clear()
        return found

    peer.wait(20.0)
    assert len(peer.asked) > 3
    assert said() == ["cannot join the peer: nobody is there"]
    peer.error = PeerRefused("another model")
    peer.wait(20.0)
    assert said() == ["cannot join the peer: another model"]
    peer.error = None
    peer.wait(20.0)
    peer.lose(PeerRefused("another model"))
    peer.wait(20.0)
    assert said() == ["cannot join the peer: another model"], "there was a session meanwhile"


def test_a_dialer_that_was_stopped_dials_no_more_and_leaves_its_session_alone() -> None:
    peer = Peer(None)
    peer.wait(0.1)
    assert peer.session is not None
    peer.loop.enter(peer.dialer.stop)
    peer.wait(1.0)
    assert not peer.session.end.done()
    peer.lose(None)
    peer.wait(20.0)
    assert len(peer.asked) == 1
