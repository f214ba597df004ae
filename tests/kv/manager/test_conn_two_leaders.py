"""Two leaders of one incarnation (an instance with two data-parallel ranks): two peers, each with a manager,
a port, a path and hand-offs of its own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from kv_sides import PAGE, PAGES, Side, ask, assert_at_rest, assert_handed_over, published

from segue.kv.errors import ErrorCode
from segue.kv.handles import KVReceiver, KVSender
from segue.kv.ids import KVPoll, LeaderId, Role, Span, TransferId, new_incarnation
from segue.kv.protocol.room_ranks import DpRanks

TOKENS = 3 * PAGE
Half = tuple[TransferId, KVSender, KVReceiver]


@contextmanager
def two_and_one(transport: str, pair: Role) -> Iterator[tuple[list[Side], Side]]:
    """Two leaders with the role `pair` in one incarnation, and one of the other role that has met both."""
    incarnation = new_incarnation()
    two = [
        Side(pair, transport=transport, me=LeaderId(incarnation, rank), dp=DpRanks(size=2)) for rank in (0, 1)
    ]
    one = Side(Role.DECODE if pair is Role.PREFILL else Role.PREFILL, transport=transport)
    try:
        for side in (*two, one):
            side.manager.start()
        for side in two:
            prefill, decode = (side, one) if pair is Role.PREFILL else (one, side)
            decode.manager.add_peer(prefill.me, *prefill.manager.plane.address)
        yield two, one
    finally:
        for side in (*two, one):
            side.close()


def finish(half: Half, prefill: Side, decode: Side, pages: range) -> None:
    _transfer, sender, receiver = half
    sender.send(Span(0, TOKENS), pages, b"7")
    decode.wait(receiver, KVPoll.SUCCESS)
    prefill.wait(sender, KVPoll.SUCCESS)


def kv_of(side: Side, first_page: int) -> list[bytes]:
    """The bytes of the prompt's pages, layer by layer."""
    spec, slots = side.spec, range(first_page * PAGE, first_page * PAGE + TOKENS)
    return [
        bytes(side.memory.buffer[at : at + spec.k_token_bytes])
        for layer in range(spec.layer_count)
        for value in (False, True)
        for at in (spec.offset(layer, value, slot) for slot in slots)
    ]


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("pair", [Role.PREFILL, Role.DECODE])
def test_both_hand_over_at_the_same_time_and_each_pool_gets_its_own_bytes(transport: str, pair: Role) -> None:
    with two_and_one(transport, pair) as (two, one):
        pairs = [(side, one) if pair is Role.PREFILL else (one, side) for side in two]
        for side in {prefill for prefill, _ in pairs}:
            side.memory.buffer[: side.spec.nbytes] = os.urandom(side.spec.nbytes)
        # Where both have the same pool they need pages of their own there.
        begun = [published(prefill, decode, TOKENS, 4 * rank) for rank, (prefill, decode) in enumerate(pairs)]
        assert len({transfer for transfer, _, _ in begun}) == 2
        assert set(ask(one, lambda: list(one.manager.plane.sessions))) == {side.me for side in two}
        for rank, (half, (prefill, decode)) in enumerate(zip(begun, pairs, strict=True)):
            source = 8 + 4 * rank if pair is Role.DECODE else 4
            finish(half, prefill, decode, range(source, source + TOKENS // PAGE))
            assert kv_of(decode, 4 * rank) == kv_of(prefill, source)
        for (_, sender, receiver), (prefill, _) in zip(begun, pairs, strict=True):
            while not sender.released:
                prefill.changes.get(timeout=60)
            sender.clear()
            receiver.clear()
        for side in (*two, one):
            assert_at_rest(side)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("pair", [Role.PREFILL, Role.DECODE])
@pytest.mark.parametrize("dies", [0, 1])
def test_one_dies_and_only_its_own_hand_offs_fail(transport: str, pair: Role, dies: int) -> None:
    with two_and_one(transport, pair) as (two, one):
        pairs = [(side, one) if pair is Role.PREFILL else (one, side) for side in two]
        begun = [published(prefill, decode, TOKENS, 4 * rank) for rank, (prefill, decode) in enumerate(pairs)]
        two[dies].manager.close()
        lost, survives = begun[dies], begun[1 - dies]
        handle = lost[2] if pair is Role.PREFILL else lost[1]
        while not handle.poll().terminal:
            one.changes.get(timeout=60)
        assert handle.error is not None
        assert handle.error.code in (ErrorCode.PEER_LOST, ErrorCode.DRAINING)
        assert handle.error.peer == f"{pair} {two[dies].me}"
        assert not survives[1].poll().terminal
        assert not survives[2].poll().terminal
        assert list(ask(one, lambda: list(one.manager.plane.sessions))) == [two[1 - dies].me]
        finish(survives, *pairs[1 - dies], range(8, 8 + TOKENS // PAGE))
        assert_handed_over(*pairs[1 - dies], TOKENS, PAGES)
