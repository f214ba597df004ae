"""Two requests with one room: the second is the client's mistake, and the first does not notice."""

from __future__ import annotations

import pytest
from pair import Pair

from segue.kv.errors import ErrorCode


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_room_in_use_is_an_invalid_request_and_not_a_bug(side: str) -> None:
    pair = Pair()
    wanted = pair.submit("first", [1, 2, 3], 4)
    pair.pump()
    pair.rooms -= 1
    pair.submit("second", [4, 5], 2, to=(side == "prefill", side == "decode"))
    pair.run()
    [error] = [o.error for o in pair.outputs["second"] if o.error is not None]
    assert error.code is ErrorCode.INVALID_REQUEST
    assert "room of its own" in error.text
    assert pair.tokens("first") == wanted


def test_two_prompts_of_one_length_under_one_room_are_an_error_and_not_an_answer() -> None:
    pair = Pair()
    pair.submit("first", [1, 2, 3, 4, 5], 4, to=(True, False))
    pair.rooms -= 1
    pair.submit("second", [9, 8, 7, 6, 5], 4, to=(False, True))
    pair.run()
    assert pair.tokens("second") == []
    assert pair.errors("second") == [ErrorCode.METADATA_MISMATCH.value]
