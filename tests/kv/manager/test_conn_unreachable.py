"""Hand-offs whose peer cannot be reached: they end with the reason, before their deadline."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import msgspec
import pytest
from test_manager import LIMITS, Side, ask, assert_at_rest, assert_handed_over, expect, receive

from ports import HeldPort
from segue.kv.errors import ErrorCode, ErrorInfo
from segue.kv.handles import KVReceiver, KVSender
from segue.kv.ids import KVPoll, LeaderId, Role, TransferId, new_room

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


@pytest.mark.parametrize(
    ("silent", "codes"),
    [
        (False, {ErrorCode.BOOTSTRAP_UNREACHABLE}),
        (True, {ErrorCode.BOOTSTRAP_TIMEOUT, ErrorCode.BOOTSTRAP_UNREACHABLE}),
    ],
)
def test_a_peer_at_a_dead_address_ends_what_waits_for_it_before_its_deadline(
    silent: bool, codes: set[ErrorCode]
) -> None:
    decode = Side(Role.DECODE, limits=IMPATIENT if silent else LIMITS)
    absent = Side(Role.PREFILL)
    try:
        decode.manager.start()
        with an_address(silent=silent) as port:
            decode.manager.add_peer(absent.me, "127.0.0.1", port)
            impatient(decode, absent.me)
            for _ in range(2):  # what is asked later hears of it too, and no sooner waits for ever
                transfer = TransferId(new_room(), 0, absent.me, decode.me)
                receiver = receive(decode.manager, transfer, 33, BUDGET_S)
                error = failure(decode, receiver)
                assert error.code in codes
                assert error.retryable, "another prefill may serve the same request"
                assert (error.phase, error.room) == ("BOOTSTRAPPING", transfer.room)
                # By these a frontend tells whom to change.
                assert error.origin.startswith(f"decode {decode.me}")
                assert error.peer == f"prefill {absent.me}"
                assert error.elapsed_s < BUDGET_S / 2
                decode.wait_release(transfer)
                receiver.clear()
            assert_at_rest(decode)
    finally:
        decode.close()
        absent.close()


def test_a_peer_that_comes_to_its_address_after_all_serves_the_next_hand_off() -> None:
    with an_address(silent=False) as port:
        _comes_after_all(port)


def _comes_after_all(port: int) -> None:
    decode, late = Side(Role.DECODE), Side(Role.PREFILL, port=port)
    try:
        decode.manager.start()
        decode.manager.add_peer(late.me, "127.0.0.1", port)
        impatient(decode, late.me)
        transfer = TransferId(new_room(), 0, late.me, decode.me)
        receiver = receive(decode.manager, transfer, 33, BUDGET_S)
        assert failure(decode, receiver).code is ErrorCode.BOOTSTRAP_UNREACHABLE
        receiver.clear()
        late.manager.start()
        assert_handed_over_soon(late, decode)
        assert_at_rest(decode)
        assert_at_rest(late)
    finally:
        decode.close()
        late.close()


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
    prefill, absent = Side(Role.PREFILL), Side(Role.DECODE)
    try:
        prefill.manager.start()
        transfer = TransferId(new_room(), 0, prefill.me, absent.me)
        sender = expect(prefill.manager, transfer, 33, 0.3)
        error = failure(prefill, sender)
        assert error.code is ErrorCode.BOOTSTRAP_TIMEOUT
        prefill.wait_release(transfer)
        sender.clear()
        assert_at_rest(prefill)
    finally:
        prefill.close()
        absent.close()
