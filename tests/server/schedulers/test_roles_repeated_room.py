"""Two requests with one room: the second is the client's mistake, and the first does not notice."""

from __future__ import annotations

import pytest
from pair import FRONT, VOCAB, Node, Pair

from segue.engine.request import Request, SamplingParams
from segue.kv.errors import ErrorCode
from segue.kv.protocol.ticket import Ticket
from segue.lab.sim.sim_engine import reference
from segue.server.messages.control import Submit


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_room_in_use_is_an_invalid_request_and_not_a_bug(side: str) -> None:
    pair = Pair()
    sampling = pair.submit("first", [1, 2, 3], 4)
    pair.pump()
    node: Node = getattr(pair, side)
    ticket = Ticket(
        room=pair.rooms,
        attempt=0,
        prefill=pair.prefill.me,
        decode=pair.decode.me,
        budget_s=50.0,
    )
    request = Request(request_id="second", prompt=[4, 5], sampling=SamplingParams(max_tokens=2))
    node.scheduler.submit(FRONT, Submit(request, ticket), pair.clock.now())
    pair.run()
    [error] = [o.error for o in pair.outputs["second"] if o.error is not None]
    assert error.code is ErrorCode.INVALID_REQUEST
    assert "room of its own" in error.text
    assert pair.tokens("first") == reference([1, 2, 3], sampling, VOCAB, 4)
    pair.assert_at_rest()


def test_two_prompts_of_one_length_under_one_room_are_an_error_and_not_an_answer() -> None:
    pair = Pair()
    pair.submit("first", [1, 2, 3, 4, 5], 4, to=(True, False))
    pair.rooms -= 1
    pair.submit("second", [9, 8, 7, 6, 5], 4, to=(False, True))
    pair.run()
    assert pair.tokens("second") == []
    assert pair.errors("second") == [ErrorCode.METADATA_MISMATCH.value]
    pair.assert_at_rest()
