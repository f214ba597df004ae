"""The events of a stream are what `chunks` says, however they were put together."""

from __future__ import annotations

import json
from typing import Any, cast

import pytest

from segue.engine.request import Request, SamplingParams
from segue.kv.ids import FinishReason
from segue.server.frontend.answers import Answer, ChatAnswer, Choice, CompletionAnswer, Shape, TemplatedAnswer
from segue.server.frontend.generate import Piece, Sample
from segue.server.frontend.params import Text
from segue.server.frontend.tokenizer import ModelTokenizer

TEXTS = ["Paris", ' "quoted" \\ [-1] \0 \n', "é你\U0001f600</script>", "", '"\\u0000"', "[-1]", "the end"]
NO_TOKENIZER = cast(ModelTokenizer, None)


def answer(kind: type[TemplatedAnswer], samples: int = 2, **shape: Any) -> TemplatedAnswer:
    choices = [
        Choice(
            Sample(
                Request(request_id=f"r-{i}", prompt=[1, 2], sampling=SamplingParams()), Text(), NO_TOKENIZER
            )
        )
        for i in range(samples)
    ]
    return kind(Shape(id='an "id"', model="a [-1] model", created=7, **shape), choices, NO_TOKENIZER)


def pieces(index: int) -> list[Piece]:
    made = [Piece(text=text, token_ids=[i, 2**31 + index]) for i, text in enumerate(TEXTS)]
    made[-1].finish = FinishReason.STOP
    made[-1].stop_reason = "."
    return made


@pytest.mark.parametrize("usage", [True, False])
@pytest.mark.parametrize("token_ids", [True, False])
@pytest.mark.parametrize("kind", [ChatAnswer, CompletionAnswer])
def test_an_event_from_a_template_is_the_one_without(
    kind: type[TemplatedAnswer], token_ids: bool, usage: bool
) -> None:
    shape = {"token_ids": token_ids, "include_usage": usage, "timeline": True}
    fast, slow = answer(kind, **shape), answer(kind, **shape)
    both = zip(pieces(0), pieces(1), strict=True)
    for index, piece in (numbered for pair in both for numbered in enumerate(pair)):
        events = fast.events(index, piece)
        assert events == Answer.events(slow, index, piece)
        if piece.text:
            event = json.loads(events.removeprefix(b"data: "))["choices"][0]
            assert (event["delta"]["content"] if kind is ChatAnswer else event["text"]) == piece.text
    assert set(fast._templates) == {0, 1}
