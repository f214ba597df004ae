"""Hand-offs whose peer cannot be reached: they end with the reason, before their deadline."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext

import msgspec
import pytest
from kv_sides import (
    LIMITS,
    Side,
    ask,
    assert_at_rest,
    assert_fails,
    assert_handed_over,
    expect,
    receive,
    sides,
)

from ports import HeldPort
from segue.kv.errors import ErrorCode, ErrorInfo
from segue.kv.handles import KVReceiver, KVSender
from segue.kv.ids import KVPoll, LeaderId, Role, TransferId, new_incarnation, new_room

IMPATIENT = msgspec.structs.replace(LIMITS, connect_s=1.0)
#: Far beyond what any of these may take.
BUDGET_S = 120.0


@contextmanager
def an_address(*, silent: bool) -> Iterator[int]:
    """A port where nobody listens, or (`silent`) where connections are made and nothing is ever said."""
    held = HeldPort()
    with socket.create_server(("127.0.0.1", held.port)) if silent else nullcontext():
        yield held.port


def impatient(side: Side, peer: LeaderId) -> None:
    """Each failed try is reported to the hand-offs that wait for `peer`. (With a `connect_s` that is soon
    over, a process that stood still meanwhile would hear that nobody answered in time, which is another
    error.)"""
    ask(side, lambda: side.manager.plane._dialers[peer])._patience_s = 0.0


def failure(side: Side, handle: KVSender | KVReceiver) -> ErrorInfo:
    while handle.poll() is not KVPoll.FAILED:
        side.changes.get(timeout=60)
    assert handle.error is not None
    return handle.error


UNREACHABLE, TIMEOUT = ErrorCode.BOOTSTRAP_UNREACHABLE, ErrorCode.BOOTSTRAP_TIMEOUT


@pytest.mark.parametrize("at", ["nobody", "silent", -1, 0, 65536, 2**31, 2**63])
def test_a_peer_at_a_dead_address_ends_what_waits_for_it_before_its_deadline(at: str | int) -> None:
    """Also at a port that is none."""
    silent = at == "silent"
    decode, absent = Side(Role.DECODE, limits=IMPATIENT if silent else LIMITS), LeaderId(new_incarnation())
    with closing(decode), an_address(silent=silent) as port:
        decode.manager.start()
        decode.manager.add_peer(absent, "127.0.0.1", at if isinstance(at, int) else port)
        impatient(decode, absent)
        for _ in range(2):  # what is asked later hears of it too, and no sooner waits for ever
            transfer = TransferId(new_room(), 0, absent, decode.me)
            receiver = receive(decode.manager, transfer, 33, BUDGET_S)
            error = failure(decode, receiver)
            assert error.code in ({TIMEOUT, UNREACHABLE} if silent else {UNREACHABLE})
            assert error.retryable, "another prefill may serve the same request"
            assert (error.phase, error.room) == ("BOOTSTRAPPING", transfer.room)
            # By these a frontend tells whom to change.
            assert error.origin.startswith(f"decode {decode.me}")
            assert error.peer == f"prefill {absent}"
            assert error.elapsed_s < BUDGET_S / 2
            decode.wait_release(transfer)
            receiver.clear()
        assert_at_rest(decode)


def test_another_leader_at_the_address_of_the_one_that_is_looked_for_is_not_taken_for_it() -> None:
    """As after a restart."""
    with sides() as (prefill, decode):
        old = LeaderId(new_incarnation())
        decode.manager.add_peer(old, *prefill.manager.plane.address)
        impatient(decode, old)
        receiver = receive(decode.manager, TransferId(new_room(), 0, old, decode.me), 33, BUDGET_S)
        assert failure(decode, receiver).code is ErrorCode.PEER_RESTARTED
        assert_handed_over(prefill, decode, 33, 8)


def test_a_peer_that_comes_to_its_address_after_all_serves_the_next_hand_off() -> None:
    with an_address(silent=False) as port:
        decode, late = Side(Role.DECODE), Side(Role.PREFILL, port=port)
        with closing(decode), closing(late):
            decode.manager.start()
            decode.manager.add_peer(late.me, "127.0.0.1", port)
            impatient(decode, late.me)
            transfer = TransferId(new_room(), 0, late.me, decode.me)
            receiver = receive(decode.manager, transfer, 33, BUDGET_S)
            assert failure(decode, receiver).code is UNREACHABLE
            receiver.clear()
            late.manager.start()
            assert_handed_over_soon(late, decode)
            assert_at_rest(decode)
            assert_at_rest(late)


def assert_handed_over_soon(prefill: Side, decode: Side) -> None:
    """One hand-off, once the dialler has found `prefill`; what was opened between two knocks may fail."""
    for _ in range(5):
        transfer = TransferId(new_room(), 0, prefill.me, decode.me)
        receiver = receive(decode.manager, transfer, 5, BUDGET_S)
        while receiver.poll() is KVPoll.BOOTSTRAPPING:
            decode.changes.get(timeout=60)
        joined = receiver.poll() is KVPoll.WAITING_FOR_INPUT
        receiver.abort()
        decode.wait_release(transfer)
        receiver.clear()
        if joined:
            assert_handed_over(prefill, decode, 33, 8)
            return
    raise AssertionError("it was never found")


def test_a_decode_that_never_comes_ends_prefills_half_by_its_deadline() -> None:
    """Prefill dials nobody: all that it can know is that no destination came in time."""
    prefill = Side(Role.PREFILL)
    with closing(prefill):
        prefill.manager.start()
        transfer = TransferId(new_room(), 0, prefill.me, LeaderId(new_incarnation()))
        sender = expect(prefill.manager, transfer, 33, 0.3)
        assert_fails(TIMEOUT, "", {prefill: sender})
