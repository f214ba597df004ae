"""Answers: what is streamed is what a whole answer says, in each form, and what is said once of several."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from segue.engine.request import FinishReason, Output, Request, SamplingParams, TokenLogprob, Usage
from segue.server.frontend.answers import Answer, ChatAnswer, Choice, CompletionAnswer, Shape
from segue.server.frontend.call_families import FAMILIES
from segue.server.frontend.generate import Piece, Sample
from segue.server.frontend.native import EVENT_BYTES, NativeAnswer, PromptLogprobs
from segue.server.frontend.params import Text
from segue.server.frontend.tokenizer import ModelTokenizer
from segue.server.frontend.tools import call_parser

PROMPTS = [[5, 6, 7], [8, 9]]
HERMES = next(family for family in FAMILIES if family.name.startswith("Hermes"))
#: Text that JSON escapes, or that looks like what an event's template is cut at.
ODD = ' "q" \\ [-1] \0 \n é\U0001f600</script> "\\u0000"'
CALL = '<tool_call>{"name": "%s", "arguments": {"city": "%s"}}</tool_call>'


def choices(tokenizer: ModelTokenizer, *, each: int = 2) -> list[Choice]:
    """`each` samples of each prompt; all have tokens that were cached on either side."""
    made = []
    for p, prompt in enumerate(PROMPTS):
        for i in range(each):
            params = SamplingParams(max_tokens=9, stop_token_ids=[7])
            sample = Sample(
                Request(request_id=f"r-{p}-{i}", prompt=prompt, sampling=params), Text(), tokenizer
            )
            sample.tokens, sample.usage = 3 + i, Usage(prefill_cached=1, decode_cached=p)
            sample.timeline = {"queue": 0.5 + p}
            made.append(Choice(sample, prompt=p))
    return made


def pieces(tokenizer: ModelTokenizer, index: int, *, echo: bool) -> list[Piece]:
    """The pieces of a sample: the last one has no text, and one in the middle neither."""
    prompt = PROMPTS[index // 2]
    made = []
    for at, token in enumerate((10 + index, 20, 30)):
        top = [(token, -0.5), (40, float("-inf"))]
        lp = TokenLogprob(token, float("-inf") if at == 1 else -0.25 * (index + 1), top)
        text = "" if at == 1 else f"{'ab'[at // 2]}{index} {ODD}"
        made.append(Piece(text=text, token_ids=[token], logprobs=[lp]))
    if echo:
        made[0].prompt_logprobs = [None, *(TokenLogprob(t, -1.0, [(t, -1.0)]) for t in prompt[1:])]
    finish = FinishReason.STOP if index % 2 else FinishReason.LENGTH
    made.append(Piece(finish=finish, stop_reason=(None, 7, None, 8)[index]))
    return made


def lists(entries: Sequence[Any]) -> dict[str, list[Any]]:
    """The logprobs of several entries as one."""
    out: dict[str, list[Any]] = {}
    for entry in entries:
        for name, values in (entry or {}).items():
            out.setdefault(name, []).extend(values)
    return out


def streamed(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The choice that a client puts together of the events of one sample."""
    finishes = [e["finish_reason"] for e in events if e["finish_reason"] is not None]
    assert len(finishes) == 1, "said once"
    assert events[-1]["finish_reason"] is not None, "and at the end"
    out: dict[str, Any] = {"finish_reason": finishes[0], "stop_reason": events[-1].get("stop_reason")}
    out["text"] = "".join(e["text"] if "text" in e else e["delta"].get("content") or "" for e in events)
    out["logprobs"] = lists([e["logprobs"] for e in events])
    if "token_ids" in events[0]:
        out["token_ids"] = [t for e in events for t in e["token_ids"]]
        assert ["prompt_token_ids" in e for e in events] == [True] + [False] * (len(events) - 1)
        out["prompt_token_ids"] = events[0]["prompt_token_ids"]
    return out


def wholly(choice: dict[str, Any]) -> dict[str, Any]:
    out = dict(choice)
    message = out.pop("message", None)
    if message is not None:
        out["text"] = message["content"]
    out["logprobs"] = lists([out["logprobs"]])
    return out


def chat(shape: Shape, tokenizer: ModelTokenizer) -> Answer:
    return ChatAnswer(shape, choices(tokenizer), tokenizer)


def text(shape: Shape, tokenizer: ModelTokenizer) -> Answer:
    return CompletionAnswer(shape, choices(tokenizer), tokenizer)


def echo(shape: Shape, tokenizer: ModelTokenizer) -> Answer:
    return CompletionAnswer(shape, choices(tokenizer), tokenizer, echo=["first", "second"])


def echo_only(shape: Shape, tokenizer: ModelTokenizer) -> Answer:
    return CompletionAnswer(shape, choices(tokenizer), tokenizer, echo=["first", "second"], echo_only=True)


@pytest.mark.parametrize("logprobs", [True, False])
@pytest.mark.parametrize("token_ids", [True, False])
@pytest.mark.parametrize("make", [chat, text, echo, echo_only])
def test_what_is_streamed_is_what_a_whole_answer_says(
    tokenizer: ModelTokenizer,
    make: Callable[[Shape, ModelTokenizer], Answer],
    token_ids: bool,
    logprobs: bool,
) -> None:
    shape = Shape("id", "tiny", 7, logprobs=logprobs, token_ids=token_ids, timeline=True)
    stream, whole = make(shape, tokenizer), make(shape, tokenizer)
    events: dict[int, list[dict[str, Any]]] = {}
    numbered = [pieces(tokenizer, index, echo=make in (echo, echo_only)) for index in range(4)]
    for at in range(len(numbered[0])):
        for index in range(4):
            raw = stream.events(index, numbered[index][at])
            whole.add(index, numbered[index][at])
            for line in raw.split(b"\n\n")[:-1]:
                event = json.loads(line.removeprefix(b"data: "))
                assert "usage" not in event, "a client that asks for none has one choice in each event"
                [choice] = event["choices"]
                events.setdefault(choice["index"], []).append(choice)
                assert ("timeline" in event) is (choice["finish_reason"] is not None)
    said = as_sent(whole.whole())
    for index, choice in enumerate(said["choices"]):
        assert choice["index"] == index
        together = streamed(events[index])
        expected = {name: value for name, value in wholly(choice).items() if name in together}
        assert together == expected
        prompt = PROMPTS[index // 2]
        body = "" if make is echo_only else f"a{index} {ODD}b{index} {ODD}"
        head = ["first", "second"][index // 2] if make in (echo, echo_only) else ""
        assert together["text"] == head + body
        if token_ids:
            assert together["prompt_token_ids"] == prompt
            assert together["token_ids"] == ([] if make is echo_only else [10 + index, 20, 30])
        if logprobs and make is not chat:
            values = together["logprobs"]["token_logprobs"]
            first = [None] + [-1.0] * (len(prompt) - 1) if head else []
            own = [] if make is echo_only else [-0.25 * (index + 1), -9999.0, -0.25 * (index + 1)]
            assert values == first + own
            shown = together["logprobs"]["tokens"]
            offsets = [len("".join(shown[:at])) for at in range(len(shown))]
            assert together["logprobs"]["text_offset"] == offsets
        if logprobs and make is chat:
            content = together["logprobs"]["content"]
            assert [lp["logprob"] for lp in content] == [-0.25 * (index + 1), -9999.0, -0.25 * (index + 1)]
            assert [lp["top_logprobs"][1]["logprob"] for lp in content] == [-9999.0] * 3
        assert together["finish_reason"] == ("stop" if index % 2 else "length")
        assert together["stop_reason"] == (7 if index == 1 else None), "8 ends every answer"


@pytest.mark.parametrize("make", [chat, text])
def test_the_prompt_of_several_samples_is_counted_once_and_what_was_cached_on_either_side(
    tokenizer: ModelTokenizer, make: Callable[[Shape, ModelTokenizer], Answer]
) -> None:
    answer = make(Shape("id", "tiny", 7, timeline=True, include_usage=True), tokenizer)
    usage = {
        "prompt_tokens": 5,
        "completion_tokens": 14,
        "total_tokens": 19,
        "prompt_tokens_details": {"cached_tokens": 3},
    }
    whole: Any = answer.whole()
    assert whole["usage"] == usage
    assert whole["timeline"] == {"queue": 0.5}
    last = json.loads(answer.usage_event().removeprefix(b"data: "))
    assert (last["usage"], last["choices"], last["id"], last["model"]) == (usage, [], "id", "tiny")
    first = answer.chunks(0, Piece(text="x"))[0]
    assert first["usage"] is None, "asked for: in each event but the last it is null"


@pytest.mark.parametrize("token_ids", [True, False])
@pytest.mark.parametrize("make", [chat, text])
def test_continuous_usage_counts_each_sample_so_far_in_each_event(
    tokenizer: ModelTokenizer, make: Callable[[Shape, ModelTokenizer], Answer], token_ids: bool
) -> None:
    shape = Shape("id", "tiny", 7, include_usage=True, continuous_usage=True, token_ids=token_ids)
    answer = make(shape, tokenizer)
    for choice in answer.choices:
        choice.sample.tokens = 0
    for at in range(4):
        for index, choice in enumerate(answer.choices):
            piece = choice.sample.feed(
                Output(
                    request_id="r",
                    position=2 * at,
                    token_ids=[10 + at, 20 + index],
                    finish=FinishReason.LENGTH if at == 3 else None,
                )
            )
            raw = answer.events(index, piece)
            assert raw or not piece.text
            for line in raw.split(b"\n\n")[:-1]:
                event = json.loads(line.removeprefix(b"data: "))
                prompt, sampled = len(PROMPTS[index // 2]), 2 * (at + 1)
                assert event["choices"][0]["index"] == index
                assert event["usage"] == {
                    "prompt_tokens": prompt,
                    "completion_tokens": sampled,
                    "total_tokens": prompt + sampled,
                }
    last = json.loads(answer.usage_event().removeprefix(b"data: "))
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 4 * 8)


@pytest.mark.parametrize("finish", [FinishReason.STOP, FinishReason.LENGTH])
@pytest.mark.parametrize("said", ["Two: ", ""])
@pytest.mark.parametrize("calls", [2, 0])
@pytest.mark.parametrize("joined", [False, True])
def test_each_of_several_calls_has_an_index_and_a_truncated_answer_is_said_to_be_one(
    tokenizer: ModelTokenizer, joined: bool, calls: int, said: str, finish: FinishReason
) -> None:
    texts = [said, *(CALL % (f"f{i}", "é" * i) for i in range(calls))]

    def made() -> ChatAnswer:
        found = choices(tokenizer)
        for choice in found:
            choice.parser = call_parser(HERMES, {})
        return ChatAnswer(Shape("id", "tiny", 7), found, tokenizer)

    stream, whole = made(), made()
    events = []
    last = Piece(text="".join(texts), finish=finish)  # calls, their text and the end at once
    apart = [*(Piece(text=t, token_ids=[1]) for t in texts), Piece(finish=finish)]
    for piece in [last] if joined else apart:
        lines = stream.events(2, piece).split(b"\n\n")[:-1]
        events += [json.loads(line.removeprefix(b"data: "))["choices"][0] for line in lines]
        whole.add(2, piece)
    choice: Any = whole.whole()["choices"][2]
    reason = "tool_calls" if calls and finish is FinishReason.STOP else finish.value
    assert choice["finish_reason"] == reason
    assert [e["finish_reason"] for e in events] == [None] * (len(events) - 1) + [reason]
    assert events[0]["delta"]["role"] == "assistant"
    assert sum("role" in e["delta"] for e in events) == 1
    assert "".join(e["delta"].get("content") or "" for e in events) == said
    together: dict[int, dict[str, str]] = {}
    for delta in (call for e in events for call in e["delta"].get("tool_calls", ())):
        entry = together.setdefault(delta["index"], {"arguments": ""})
        entry["arguments"] += delta["function"]["arguments"]
        entry |= {"id": delta["id"], "name": delta["function"]["name"]} if "id" in delta else {}
    expected = [{"name": f"f{i}", "arguments": {"city": "é" * i}} for i in range(calls)]
    assert list(together) == list(range(calls))
    for entry in together.values():
        assert entry.pop("id").startswith("call_")
    assert [e | {"arguments": json.loads(e["arguments"])} for e in together.values()] == expected
    functions = [call["function"] for call in choice["message"].get("tool_calls", ())]
    assert [f | {"arguments": json.loads(f["arguments"])} for f in functions] == expected
    if calls:
        assert choice["message"]["content"] == (said or None), "null beside calls, not empty"
    else:
        assert choice["message"]["content"] == said


def as_sent(body: Any) -> Any:
    return json.loads(msgspec.json.encode(body))


def native_stream(tokenizer: ModelTokenizer, tokens: int, top: int) -> tuple[list[bytes], Any]:
    """The events of a stream of so many tokens, and what a whole answer says."""
    shape = Shape("id", "tiny", 7, logprobs=top > 0, token_ids=True)
    logprobs = [PromptLogprobs(shown=top > 0, top=top)] * len(PROMPTS)
    stream, whole = (
        NativeAnswer(text(shape, tokenizer), "x", batch=False, logprobs=logprobs) for _ in range(2)
    )
    alternatives = [(i, -1.0 / (i + 3)) for i in range(top)]
    events = []
    for i in range(tokens):
        logprobs = [TokenLogprob(i, -0.5, alternatives)] if top else []
        piece = Piece(text='é"\n'[i % 3], token_ids=[i], logprobs=logprobs)
        if i == tokens - 1:
            piece.finish = FinishReason.LENGTH
        events.append(stream.events(0, piece))
        whole.add(0, piece)
    return [event for event in events if event], as_sent(whole.whole())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("asked", "with_text", "prompt_only", "wanted"),
    [
        (
            PromptLogprobs(True, 0, 1),
            False,
            False,
            {
                "input_token_logprobs": [[None, 72, None], [-1.0, 101, None], [-2.0, 108, None]],
                "input_top_logprobs": [None, [[-0.5, 7, None]], [[-0.25, 8, None]]],
                "output_token_logprobs": [[-3.0, 65, None]],
                "output_top_logprobs": [[[-0.125, 9, None]]],
            },
        ),
        (
            PromptLogprobs(True, 1, 0),
            True,
            False,
            {
                "input_token_logprobs": [[None, 101, "e"], [-2.0, 108, "l"]],
                "input_top_logprobs": [None, []],
                "output_token_logprobs": [[-3.0, 65, "A"]],
                "output_top_logprobs": [[]],
            },
        ),
        (
            PromptLogprobs(True, 2, 0),
            False,
            True,
            {
                "input_token_logprobs": [[None, 108, None]],
                "input_top_logprobs": [None],
                "output_token_logprobs": [],
                "output_top_logprobs": [],
            },
        ),
        (
            PromptLogprobs(True, -1, 0),
            False,
            False,
            {
                "input_token_logprobs": [],
                "input_top_logprobs": [],
                "output_token_logprobs": [[-3.0, 65, None]],
                "output_top_logprobs": [[]],
            },
        ),
        (PromptLogprobs(), False, False, {}),
    ],
)
def test_sglang_s_form_of_log_probabilities(
    asked: PromptLogprobs,
    with_text: bool,
    prompt_only: bool,
    wanted: dict[str, Any],
    stream: bool,
) -> None:
    """The first token that is shown has no probability; `max_new_tokens` 0 shows nothing that was made."""
    tokenizer: Any = SimpleNamespace(token_text=chr)
    plain = text(Shape("id", "tiny", 7, logprobs=True, token_ids=True), tokenizer)
    sample = plain.choices[0].sample
    sample.request = msgspec.structs.replace(sample.request, prompt=[72, 101, 108])
    sample.tokens = 1
    answer = NativeAnswer(
        plain,
        "x",
        batch=False,
        logprobs=[asked] * len(PROMPTS),
        with_text=with_text,
        prompt_only=prompt_only,
    )
    piece = Piece(
        text="A",
        token_ids=[65],
        logprobs=[TokenLogprob(65, -3.0, [(9, -0.125)])],
        prompt_logprobs=[None, TokenLogprob(101, -1.0, [(7, -0.5)]), TokenLogprob(108, -2.0, [(8, -0.25)])],
        finish=FinishReason.LENGTH,
    )
    if stream:
        said = json.loads(answer.events(0, piece).removeprefix(b"data: "))
    else:
        answer.add(0, piece)
        said = as_sent(answer.whole())
    meta = said["meta_info"]
    assert {name: meta[name] for name in meta if name.endswith("logprobs")} == wanted
    assert said["text"] == ("" if prompt_only else "A")
    assert len(said["output_ids"]) == meta["finish_reason"]["length"] == meta["completion_tokens"]


def test_of_a_stream_that_repeats_all_so_far_the_bytes_grow_as_its_tokens(tokenizer: ModelTokenizer) -> None:
    for tokens in (100, 1000, 4000):
        events, whole = native_stream(tokenizer, tokens, 20)
        said = [json.loads(event.removeprefix(b"data: ")) for event in (events[0], events[len(events) // 2])]
        for event in said:
            count = len(event["output_ids"])
            assert event["text"] == whole["text"][:count]
            assert event["output_ids"] == whole["output_ids"][:count]
            for name in ("output_token_logprobs", "output_top_logprobs"):
                assert event["meta_info"][name] == whole["meta_info"][name][:count]
        assert json.loads(events[-1].removeprefix(b"data: ")) == whole
        longest = len(events[-1])
        assert sum(map(len, events)) <= tokens * (EVENT_BYTES + 200) + 2 * longest
        assert len(events) >= tokens * EVENT_BYTES // (2 * longest)


def test_a_stream_of_ordinary_length_has_an_event_for_each_token(tokenizer: ModelTokenizer) -> None:
    assert len(native_stream(tokenizer, 2000, 0)[0]) == 2000
    assert len(native_stream(tokenizer, 60, 20)[0]) == 60


@pytest.mark.parametrize("rid", [None, "mine", ["one", "two"], ["one"]])
def test_sglang_s_form_says_all_so_far_in_each_event(
    tokenizer: ModelTokenizer, rid: str | list[str] | None
) -> None:
    shape = Shape("id", "tiny", 7, logprobs=True, token_ids=True)
    logprobs = [PromptLogprobs(shown=True, top=2)] * len(PROMPTS)
    made = [
        NativeAnswer(text(shape, tokenizer), rid or "call", batch=True, logprobs=logprobs) for _ in range(2)
    ]
    stream, whole = made
    last: dict[int, Any] = {}
    for index in range(4):
        for piece in pieces(tokenizer, index, echo=False):
            for event in stream.chunks(index, piece):
                last[index] = as_sent(event)
            whole.add(index, piece)
    found = as_sent(whole.whole())
    for index, one in enumerate(found):
        assert last[index] == one | {"index": index}
        prompt, sample = PROMPTS[index // 2], whole.choices[index].sample
        assert (one["text"], one["output_ids"]) == (f"a{index} {ODD}b{index} {ODD}", [10 + index, 20, 30])
        meta = one["meta_info"]
        name = rid if isinstance(rid, str) else None if rid is None else (*rid, "id")[index // 2]
        assert meta["id"] == (name or "call")
        assert (meta["prompt_tokens"], meta["completion_tokens"]) == (len(prompt), sample.tokens)
        assert meta["cached_tokens"] == 1 + index // 2
        length = {"type": "length", "length": sample.tokens}
        # As in SGLang, the token that ends every answer is told too.
        ended = {1: {"type": "stop", "matched": 7}, 3: {"type": "stop", "matched": 8}}.get(index, length)
        assert meta["finish_reason"] == ended
        value = -0.25 * (index + 1)
        assert meta["output_token_logprobs"][0] == [value, 10 + index, None]
        assert meta["output_top_logprobs"][0] == [[-0.5, 10 + index, None], [None, 40, None]]
        assert len(meta["output_token_logprobs"]) == len(meta["output_top_logprobs"]) == 3
    alone = NativeAnswer(text(shape, tokenizer), "x", batch=False, logprobs=logprobs)
    assert "index" not in alone.chunks(0, Piece(text="a", token_ids=[1]))[0]
    assert isinstance(alone.whole(), dict)
