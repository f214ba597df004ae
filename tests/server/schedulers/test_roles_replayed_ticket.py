"""A ticket places one request: whoever shows it again is refused, and the first one does not notice."""

from __future__ import annotations

import msgspec
import pytest
from pair import FRONT, VOCAB, Node, Pair

from segue.engine.request import Request, SamplingParams
from segue.kv.errors import AbortedByClient, ErrorCode
from segue.kv.ids import Incarnation
from segue.server.messages.control import Submit
from segue.server.messages.ticket import Ticket, sign_ticket
from segue_lab.sim.sim_engine import reference

SECRET = b"a secret of the tests"
LEFT = AbortedByClient("it left").info


def ticket(pair: Pair, room: int, *, budget_s: float = 100.0, origin: Incarnation = FRONT) -> Ticket:
    return sign_ticket(pair.ticket(room, budget_s=budget_s), SECRET, origin)


def signed_pair() -> Pair:
    pair = Pair()
    for node in (pair.prefill, pair.decode):
        node.scheduler.admission.secret = SECRET
    return pair


def submit(pair: Pair, node: Node, name: str, prompt: list[int], shown: Ticket) -> None:
    request = Request(request_id=name, prompt=prompt, sampling=SamplingParams(max_tokens=3, seed=1))
    node.scheduler.submit(FRONT, Submit(request, shown), pair.clock.now())


def both(pair: Pair, name: str, prompt: list[int], shown: Ticket) -> None:
    for node in (pair.prefill, pair.decode):
        submit(pair, node, name, prompt, shown)


@pytest.mark.parametrize("when", ["during", "after"])
def test_a_replayed_ticket_is_refused_and_the_first_request_goes_on(when: str) -> None:
    pair = signed_pair()
    shown = ticket(pair, 7)
    both(pair, "first", [1, 2, 3], shown)
    pair.pump() if when == "during" else pair.run()
    both(pair, "again", [9, 9, 9], shown)
    pair.run()
    assert set(pair.errors("again")) == {ErrorCode.INVALID_REQUEST.value}
    assert len(pair.outputs["again"]) == 2  # each side said no, once, and nothing else
    assert "used already" in str(pair.outputs["again"][0].error)
    expected = reference([1, 2, 3], SamplingParams(max_tokens=3, seed=1), VOCAB, 3)
    assert pair.tokens("first") == expected


def test_a_ticket_in_the_session_of_another_frontend_is_refused() -> None:
    pair = signed_pair()
    both(pair, "stolen", [1, 2, 3], ticket(pair, 7, origin=Incarnation("e" * 32)))
    pair.run()
    assert set(pair.errors("stolen")) == {ErrorCode.UNAUTHORIZED.value}


def test_a_retry_is_another_attempt_in_a_room_of_its_own() -> None:
    pair = signed_pair()
    first = ticket(pair, 7)
    submit(pair, pair.prefill, "a", [1, 2, 3], first)
    pair.prefill.scheduler.cancel(FRONT, "a", LEFT, pair.clock.now())
    both(
        pair, "a~1", [1, 2, 3], sign_ticket(msgspec.structs.replace(first, room=8, attempt=1), SECRET, FRONT)
    )
    pair.run()
    assert len(pair.tokens("a~1")) == 3


def test_what_is_remembered_of_tickets_dies_with_them() -> None:
    pair = signed_pair()
    for room in range(1, 6):
        both(pair, f"r{room}", [1, 2, 3], ticket(pair, room, budget_s=10.0))
        pair.run()
    assert len(pair.decode.scheduler.admission._spent) == 5
    pair.clock.advance(11.0)
    both(pair, "late", [1, 2, 3], ticket(pair, 99, budget_s=10.0))
    pair.run()
    assert len(pair.decode.scheduler.admission._spent) == len(pair.prefill.scheduler.admission._spent) == 1
