"""A handler that breaks on a failed hand-off's proof: it is not run again, and nothing is freed by guess."""

from __future__ import annotations

from typing import Any

import pytest
from handoff_world import Case, kinds, pool_spec, receive

from segue.kv.errors import ErrorCode, Internal, PeerLost
from segue.kv.ids import Incarnation, LeaderId, RankId, Role, TransferId
from segue.kv.layout.planner import plan_pair
from segue.kv.limits import Limits
from segue.kv.protocol import events
from segue.kv.protocol.exchange import Exchange
from segue.kv.protocol.machine import Machine
from segue.kv.protocol.messages import Drained
from segue.kv.protocol.receiver import ReceiverMachine
from segue.kv.protocol.sender import SenderMachine

P, D = LeaderId(Incarnation("a" * 32)), LeaderId(Incarnation("d" * 32))
SPEC = pool_spec(8, 4)
TRANSFER = TransferId(1, 0, P, D)


def break_next(monkeypatch: pytest.MonkeyPatch, kind: type[Machine], event: type[Any]) -> list[int]:
    """The handler of `event` raises when it is called for the first time. How often it was called."""
    calls: list[int] = []
    table = {state: dict(row) for state, row in kind.TABLE.items()}
    for rows in table.values():
        if event in rows:
            normal, *after = rows[event]

            def broken(machine: Any, given: Any, normal: Any = normal) -> Any:
                calls.append(1)
                if len(calls) == 1:
                    raise RuntimeError("a bug")
                return normal(machine, given)

            rows[event] = (broken, *after)
    monkeypatch.setattr(kind, "TABLE", table)
    return calls


def published_receiver() -> Exchange:
    exchange = Exchange(Role.DECODE, D, "decode", Limits())
    exchange.handle(events.PeerUp(P, plan_pair([SPEC], [SPEC]), "fake"), 0.0)
    exchange.handle(receive(TRANSFER, 4, 100.0), 0.0)
    exchange.handle(events.Publish(TRANSFER.received_as, (0,), 0), 0.0)
    return exchange


def quarantined_receiver() -> Exchange:
    exchange = published_receiver()
    exchange.handle(events.EndRoom(TRANSFER.received_as, Internal("x").info), 0.0)
    exchange.handle(events.FenceDone(TRANSFER, 0, RankId(P), False), 0.0)
    assert exchange.quarantined_pages() == 1
    return exchange


PROOFS: list[tuple[type[Any], events.Event]] = [
    (events.FenceDone, events.FenceDone(TRANSFER, 0, RankId(P), True)),
    (Drained, events.Received(P, Drained(TRANSFER))),
    (events.PeerDown, events.PeerDown(P, PeerLost("dead").info, dead=True)),
]


@pytest.mark.parametrize(("kind", "proof"), PROOFS, ids=["fence", "drained", "death"])
def test_a_proof_whose_handler_broke_is_not_shown_again_and_the_pages_stay_in_quarantine(
    kind: type[Any], proof: events.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    exchange = quarantined_receiver()
    calls = break_next(monkeypatch, ReceiverMachine, kind)
    assert exchange.handle(proof, 1.0) == []
    assert len(calls) == 1
    assert exchange.counters["internal_errors"] == 1
    exchange.handle(events.Tick(), 1e6)
    assert exchange.sizes()["quarantined"] == 1, "it can be seen"
    assert exchange.quarantined_pages() == 1
    exchange.check_integrity()


@pytest.mark.parametrize(("kind", "proof"), PROOFS[:2], ids=["fence", "drained"])
@pytest.mark.parametrize("other", range(3))
def test_another_proof_still_frees_the_pages(
    kind: type[Any], proof: events.Event, other: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    exchange = quarantined_receiver()
    break_next(monkeypatch, ReceiverMachine, kind)
    exchange.handle(proof, 1.0)
    assert kinds(exchange.handle(PROOFS[other][1], 2.0)) == ["Release"]
    assert exchange.sizes()["transfers"] == exchange.sizes()["quarantined"] == 0


def test_a_death_whose_handler_broke_on_a_live_hand_off_ends_it_and_proves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    exchange = published_receiver()
    break_next(monkeypatch, ReceiverMachine, events.PeerDown)
    effects = exchange.handle(events.PeerDown(P, PeerLost("dead").info, dead=True), 1.0)
    assert events.Fence(TRANSFER, 0, RankId(P), exchange.machines[TRANSFER].epoch) in effects
    assert [e.error.code for e in effects if isinstance(e, events.Phase) and e.error] == [ErrorCode.INTERNAL]
    assert exchange.handle(events.FenceDone(TRANSFER, 0, RankId(P), False), 1.0) == []
    assert exchange.quarantined_pages() == 1
    exchange.check_integrity()


def test_a_sender_whose_fence_handler_broke_keeps_its_pages_and_can_be_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    w = Case().in_flight()
    w.abort(w.prefill, w.s)
    break_next(monkeypatch, SenderMachine, events.FenceDone)
    assert w.tell(w.prefill, w.fence_done(w.prefill)) == []
    assert w.s.releases == 0
    assert w.prefill.exchange.sizes()["quarantined"] == 1
    assert w.prefill.exchange.quarantined_pages() == len(w.s.pages)
