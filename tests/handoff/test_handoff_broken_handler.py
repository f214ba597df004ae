"""A handler that breaks on the one proof of a failed hand-off must not keep its memory for ever."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from segue.core.errors import Internal, PeerLost
from segue.core.limits import Limits
from segue.core.types import Incarnation, LeaderId, Role, TransferId
from segue.handoff import events
from segue.handoff.exchange import Exchange
from segue.handoff.messages import PROTOCOL_VERSION, Drained, LeaderInfo
from segue.layout.spec import KVShape, PoolSpec

P, D = LeaderId(Incarnation("a" * 32)), LeaderId(Incarnation("d" * 32))
SHAPE = KVShape(layers=1, kv_heads=1, k_dim=1, v_dim=1, dtype="x", item_bytes=8)
SPEC = PoolSpec(shape=SHAPE, pages=8, page_tokens=4, layer_count=1, head_count=1)
INFO = LeaderInfo(
    protocol=PROTOCOL_VERSION, model="m", dp_size=1, ranks=[SPEC], endpoints={}, max_transfers=8
)
TRANSFER = TransferId(1, 0, P, D)


def break_once(exchange: Exchange) -> None:
    """The next step of any machine raises when it is called for the first time."""
    run = exchange._run

    def broken_run(
        machine: Any, now: float, out: list[Any], step: Callable[..., Any], *args: Any, **more: Any
    ) -> Any:
        calls = []

        def broken(*given: Any) -> Any:
            calls.append(1)
            if len(calls) == 1:
                raise RuntimeError("a bug")
            return step(*given)

        exchange._run = run  # type: ignore[method-assign]
        return run(machine, now, out, broken, *args, **more)

    exchange._run = broken_run  # type: ignore[method-assign, assignment]


def quarantined_receiver() -> Exchange:
    exchange = Exchange(Role.DECODE, D, "decode", Limits(), INFO)
    exchange.handle(events.PeerUp(P, INFO, "fake"), 0.0)
    exchange.handle(events.OpenReceiver(TRANSFER, 4, 100.0), 0.0)
    exchange.handle(events.Publish(TRANSFER, (0,), 0), 0.0)
    exchange.handle(events.AbortTransfer(TRANSFER, Internal("x").info), 0.0)
    exchange.handle(events.FenceDone(TRANSFER, False), 0.0)
    assert exchange.quarantined_pages() == 1
    return exchange


@pytest.mark.parametrize(
    "proof",
    [
        events.FenceDone(TRANSFER, True),
        events.Received(P, Drained(TRANSFER)),
        events.PeerDown(P, PeerLost("dead").info, dead=True),
    ],
    ids=["fence", "drained", "death"],
)
def test_a_proof_whose_handler_broke_still_ends_the_quarantine(proof: events.Event) -> None:
    exchange = quarantined_receiver()
    break_once(exchange)
    effects = exchange.handle(proof, 1.0)
    assert [e for e in effects if isinstance(e, events.Release)] == [events.Release(TRANSFER)]
    assert exchange.sizes()["transfers"] == 0
    assert exchange.counters["internal_errors"] == 1


def test_the_death_of_a_peer_also_counts_when_its_handler_broke_on_a_live_hand_off() -> None:
    exchange = Exchange(Role.DECODE, D, "decode", Limits(), INFO)
    exchange.handle(events.PeerUp(P, INFO, "fake"), 0.0)
    exchange.handle(events.OpenReceiver(TRANSFER, 4, 100.0), 0.0)
    exchange.handle(events.Publish(TRANSFER, (0,), 0), 0.0)
    break_once(exchange)
    effects = exchange.handle(events.PeerDown(P, PeerLost("dead").info, dead=True), 1.0)
    assert events.Fence(TRANSFER, exchange._machines[TRANSFER].epoch) in effects
    assert events.Release(TRANSFER) in exchange.handle(events.FenceDone(TRANSFER, False), 1.0)
    assert exchange.sizes()["transfers"] == 0
    exchange.check_integrity()
