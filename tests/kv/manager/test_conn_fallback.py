"""A pair whose shared memory cannot be mapped takes the next transport, says so, and hands KV over."""

from __future__ import annotations

import errno
import logging
import threading

import pytest
from kv_sides import Side, assert_at_rest, assert_handed_over, joined, sides

from segue.kv.errors import OutOfCapacity, PeerLost
from segue.kv.ids import RankId, Role
from segue.kv.session.api import PeerInfo, Session
from segue.kv.transport.base import PeerGone
from segue.kv.transport.shm.shm_host import ShmHost

BOTH = ("shm", "tcp")


def _over_tcp(side: Side) -> threading.Event:
    """Set once this side has a session whose KV goes over tcp."""
    there, opened = threading.Event(), side.manager.opened

    def watched(session: Session) -> None:
        opened(session)
        if side.manager._peers[session.peer.leader].transport == "tcp":
            there.set()

    side.manager.opened = watched  # type: ignore[method-assign]
    return there


def _full(_host: ShmHost, _fd: int, _nbytes: int) -> None:
    raise OSError(errno.ENOMEM, "Cannot allocate memory")


def test_a_pool_that_cannot_be_mapped_is_reached_over_tcp_and_the_log_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ShmHost, "map_pool", _full)
    caplog.set_level(logging.WARNING, "segue.kv")
    prefill = Side(Role.PREFILL, transports=BOTH)
    decodes = [Side(Role.DECODE, transports=BOTH) for _ in range(2)]
    with joined(prefill, *decodes):
        for decode in decodes:
            for _ in range(2):
                assert_handed_over(prefill, decode, 33, 8)
            assert_at_rest(decode)
        assert_at_rest(prefill)
        for side in (*decodes, prefill):
            assert {path.transport for path in side.manager.paths().values()} == {"tcp"}
    said = [r.getMessage() for r in caplog.records if "transport=shm, the next is tried" in r.getMessage()]
    assert len(said) == len(decodes)
    assert all("Cannot allocate memory" in text for text in said)


def test_the_end_of_a_path_of_an_earlier_session_costs_the_session_that_goes_over_another_nothing() -> None:
    """A pair has met over shm and then, without it, over tcp: the old path's end is no news."""
    with sides(transports=BOTH) as (prefill, decode):
        assert_handed_over(prefill, decode, 33, 8)
        there = _over_tcp(prefill)

        def meet_anew() -> None:
            error = prefill.manager.opening.withdraw("shm", OutOfCapacity("no room"))
            prefill.manager.plane.sessions[decode.me].close(error)

        prefill.manager.io.post(meet_anew)
        assert there.wait(60)
        assert_handed_over(prefill, decode, 33, 8)
        gone = PeerGone(RankId(decode.me), False, PeerLost("its socket was closed"))
        prefill.manager.moved(0, "shm", gone)
        assert_handed_over(prefill, decode, 33, 8)


def test_what_a_peer_was_told_decides_although_it_is_not_offered_any_more() -> None:
    """A session whose handshake had begun before: both sides take what both know of."""
    prefill, decode = Side(Role.PREFILL, transports=BOTH), Side(Role.DECODE, transports=BOTH)
    manager = prefill.manager
    told = manager.hello()
    error = OutOfCapacity("no room")
    assert manager.opening.withdraw("shm", error) is not error
    assert manager.hello() != told

    def joined(what: bytes) -> str:
        return manager.compatibility.check_peer(
            PeerInfo(decode.me, Role.DECODE, "there", decode.manager.hello(), what)
        ).names[0]

    assert (joined(told), joined(manager.hello())) == ("shm", "tcp")
    assert manager.opening.withdraw("shm", error) is not error, "by another peer, meanwhile"
    for side in (prefill, decode):
        side.close()


def test_where_nothing_else_is_offered_the_reason_itself_ends_the_session() -> None:
    prefill = Side(Role.PREFILL, transports=("shm",))
    error = OutOfCapacity("no room")
    told = prefill.manager.hello()
    assert prefill.manager.opening.withdraw("shm", error) is error
    assert prefill.manager.hello() == told
    prefill.close()
