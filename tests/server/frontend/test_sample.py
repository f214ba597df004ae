"""One sample: outputs to text and its end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import pytest

from segue.engine.request import FinishReason, Output, Request, SamplingParams, TokenLogprob, Usage
from segue.server.frontend.generate import Meter, Sample
from segue.server.frontend.params import Text
from segue.server.frontend.tokenizer import ModelTokenizer
from segue.server.observe.metrics import Metrics


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


def letters(*stops: str, include: bool = False) -> Sample:
    request = Request(request_id="r", prompt=[1], sampling=SamplingParams(max_tokens=9))
    return Sample(request, Text(stops, include_stop=include), cast(ModelTokenizer, Letters()))


def test_what_comes_after_a_stop_string_is_neither_counted_nor_shown() -> None:
    sample = letters("bc")
    logprobs = [TokenLogprob(token, -1.0, []) for token in range(5)]
    piece = sample.feed(Output(request_id="r", token_ids=[0, 1, 2, 3, 4], logprobs=logprobs))
    assert (piece.text, piece.token_ids, piece.stop_reason) == ("a", [0, 1, 2], "bc")
    assert [lp.token for lp in piece.logprobs] == [0, 1, 2]
    assert sample.tokens == 3


@pytest.mark.parametrize(("include", "text"), [(False, "a"), (True, "ab")])
@pytest.mark.parametrize("stops", [(), ("never",)])
def test_the_token_that_ended_an_answer_is_text_only_if_that_is_asked_for(
    include: bool, text: str, stops: tuple[str, ...]
) -> None:
    sample = letters(*stops, include=include)
    ended = Output(request_id="r", token_ids=[0, 1], finish=FinishReason.STOP, stop_token=1)
    piece = sample.feed(ended)
    assert (piece.text, piece.token_ids, sample.tokens) == (text, [0, 1], 2)


def test_the_last_word_on_usage_and_times_counts() -> None:
    """A continuation on another worker reports usage again."""
    sample = letters()
    for position, cached in enumerate((1, 7)):
        usage, timeline = Usage(prefill_cached=cached), {"queue": float(cached)}
        sample.feed(Output(request_id="r", position=position, token_ids=[0], usage=usage, timeline=timeline))
    sample.feed(Output(request_id="r", position=2, token_ids=[0]))
    assert (sample.usage.prefill_cached, sample.timeline) == (7, {"queue": 7.0})


@pytest.mark.parametrize("begun", [True, False])
@pytest.mark.parametrize("complete", [True, False])
def test_a_sample_leaves_the_gauge_that_it_is_counted_in_and_only_a_complete_one_has_a_duration(
    begun: bool, complete: bool
) -> None:
    metrics, sample = Metrics(), letters()
    meter = Meter(metrics, lambda: 5.0, 1.0, ("chat", "segue", "m"))
    meter.enter()
    if begun:
        meter.arrived(sample, 1, None)
    meter.end(sample, complete=complete)
    value = metrics.registry.get_sample_value
    assert value("segue_generations_running") == value("segue_generations_waiting") == 0
    assert value("segue_e2e_seconds_count") == int(complete)


@pytest.mark.parametrize(("tokens", "each"), [(4, 2.0), (1, None)])
def test_times_of_an_inference_are_from_the_request_to_its_first_token_and_of_each_further_one(
    tokens: int, each: float | None
) -> None:
    metrics, sample = Metrics(), letters()
    clock = iter((3.0, 9.0))
    meter = Meter(metrics, clock.__next__, 1.0, ("chat", "segue", "m"))
    meter.enter()
    meter.arrived(sample, 1, None)
    sample.tokens = tokens
    meter.end(sample, complete=True)
    names = ("gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model")
    labels = dict(zip(names, ("chat", "segue", "m"), strict=True))
    value = metrics.registry.get_sample_value
    assert value("gen_ai_server_time_to_first_token_seconds_sum", labels) == 2.0
    assert value("gen_ai_server_time_per_output_token_seconds_sum", labels) == each


def test_a_stop_string_that_is_found_at_the_end_keeps_the_token_that_ended_the_answer() -> None:
    """It is counted as every such token is, although it is no text."""
    sample = letters("b")
    sample._detokenizer = Late()  # type: ignore[assignment]
    ended = Output(request_id="r", token_ids=[0, 1, 9], finish=FinishReason.STOP, stop_token=9)
    piece = sample.feed(ended)
    assert (piece.text, piece.stop_reason, piece.token_ids) == ("a", "b", [0, 1, 9])


class Late:
    """A detokenizer that holds everything back until the end."""

    def feed(self, ids: Sequence[int]) -> str:
        return ""

    def flush(self) -> str:
        return "ab"
