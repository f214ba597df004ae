"""One sample: outputs to text and its end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import pytest

from segue.core.request import Output, Request, SamplingParams
from segue.core.types import FinishReason
from segue.frontend.generate import Sample
from segue.frontend.params import Text
from segue.frontend.tokenizer import ModelTokenizer


class Letters:
    """Token 0 is a, 1 is b, …"""

    def decode(self, ids: Sequence[int], *, skip_special: bool) -> str:
        return "".join(chr(ord("a") + number) for number in ids)


@pytest.mark.parametrize(("min_tokens", "text"), [(0, "a"), (2, "a"), (3, "abca"), (4, "abca"), (5, "abca")])
def test_a_stop_string_ends_the_text_from_the_last_of_min_tokens_on(min_tokens: int, text: str) -> None:
    params = SamplingParams(max_tokens=9, min_tokens=min_tokens)
    sample = Sample(
        Request(request_id="r", prompt=[1], sampling=params), Text(("b",)), cast(ModelTokenizer, Letters())
    )
    shown = ""
    for position, token in enumerate([0, 1, 2, 0, 1, 2]):
        piece = sample.feed(Output(request_id="r", position=position, token_ids=[token]))
        shown += piece.text
        if piece.finish is not None:
            break
    assert (shown, piece.finish, piece.stop_reason) == (text, FinishReason.STOP, "b")
