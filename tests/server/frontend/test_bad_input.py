"""Everything a client can get wrong: a typed 4xx that names the parameter, and a healthy server after."""

import asyncio
import threading
from typing import Any

import pytest
from frontend_rig import CONTEXT, DEADLINE_S, FakeBackend, Running, serve

from segue.kv.errors import OutOfCapacity
from segue.kv.limits import Limits
from segue.server.frontend.tokenizer import ModelTokenizer

HI = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
#: What the types say, what fields say of one another, and one field that is not built. `test_plans` has the
#: range of each field.
BAD = [
    (CHAT, {"messages": HI, "bad_words": ["Paris"]}, "bad_words"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": "hi"}, "messages"),
    (CHAT, {"messages": [1]}, "messages[0]"),
    (CHAT, {"messages": [{"content": "hi"}]}, "messages[0].role"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content"),
    (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
    (CHAT, {"messages": [{"role": "wizard", "content": "hi"}]}, "messages"),
    (CHAT, {"messages": HI, "max_tokens": 10**30}, "max_tokens"),
    (CHAT, {"messages": HI, "max_tokens": "5"}, "max_tokens"),
    (CHAT, {"messages": HI, "priority": "high"}, "priority"),
    (CHAT, {"messages": HI, "max_tokens": True}, "max_tokens"),
    (CHAT, {"messages": HI, "max_completion_tokens": 0}, "max_completion_tokens"),
    (CHAT, {"messages": HI, "top_logprobs": 3}, "top_logprobs"),
    (CHAT, {"messages": HI, "temperature": "hot"}, "temperature"),
    (CHAT, {"messages": HI, "logit_bias": {"x": 1}}, "logit_bias"),
    (CHAT, {"messages": HI, "stop": 5}, "stop"),
    (CHAT, {"messages": HI, "stream": "yes"}, "stream"),
    (CHAT, {"messages": HI, "stream_options": {"include_usage": True}}, "stream_options"),
    (CHAT, {"messages": HI, "stream_options": {"continuous_usage_stats": True}}, "stream_options"),
    (
        CHAT,
        {"messages": HI, "stream_options": {"continuous_usage_stats": "yes"}},
        "stream_options.continuous_usage_stats",
    ),
    (CHAT, {"messages": HI, "response_format": {"type": "xml"}}, "response_format.type"),
    (CHAT, {"messages": HI, "response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    (CHAT, {"messages": HI, "guided_json": "{", "n": 1}, "guided_json"),
    (CHAT, {"messages": HI, "guided_json": {}, "guided_regex": "a"}, "guided_regex"),
    (CHAT, {"messages": HI, "tool_choice": "required"}, "tool_choice"),
    (CHAT, {"messages": HI, "tools": [TOOL], "tool_choice": "f"}, "tool_choice"),
    (
        CHAT,
        {"messages": HI, "tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
        "tool_choice",
    ),
    (CHAT, {"messages": HI, "tools": [{"type": "function"}]}, "tools[0]"),
    (CHAT, {"messages": HI, "chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs"),
    (TEXT, {"prompt": ""}, "prompt"),
    (TEXT, {"prompt": []}, "prompt"),
    (TEXT, {"prompt": [[]]}, "prompt"),
    (TEXT, {"prompt": ["a", 1]}, "prompt"),
    (TEXT, {"prompt": ["a", ""]}, "prompt"),
    (TEXT, {"prompt": [-1]}, "prompt"),
    (TEXT, {"prompt": [10**6]}, "prompt"),
    (TEXT, {"prompt": [2**80]}, "prompt"),
    (TEXT, {"prompt": {"a": 1}}, "prompt"),
    (TEXT, {"prompt": ["a"] * 1000}, "prompt"),
    (TEXT, {}, None),
    (TEXT, {"prompt": "a", "suffix": "b"}, "suffix"),
    (TEXT, {"prompt": "a", "best_of": 3}, "best_of"),
    (TEXT, {"prompt": "a", "max_tokens": 0}, "max_tokens"),
    ("/tokenize", {}, "prompt"),
    ("/tokenize", {"prompt": 5}, "prompt"),
    ("/detokenize", {"tokens": "x"}, "tokens"),
]


@pytest.mark.parametrize(("path", "body", "param"), BAD)
def test_a_wrong_parameter_is_named(
    door: Running, backend: FakeBackend, path: str, body: dict[str, Any], param: str | None
) -> None:
    answer = door.post(path, body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert error["message"]
    assert backend.requests == []
    assert door.post(CHAT, {"messages": HI}).status_code == 200


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"[]", "wrong shape"),
        (b'{"messages": [{"role": "user", "content": "\xff\xfe"}]}', "UTF-8"),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "JSON"),
        (b'{"messages": ' + b"[" * 50_000, ""),
        (
            b'{"messages": [{"role": "user", "content": "a", "x": ' + b"[" * 9000 + b"]" * 9000 + b"}]}",
            "levels",
        ),
        (b'{"messages": [{"role": "user", "content": "a"}], "temperature": NaN}', "JSON"),
        (b'{"messages": [{"role": "user", "content": "a"}], "temperature": 1e999}', "temperature"),
        (b"\x00" * 100, "JSON"),
    ],
)
def test_a_body_that_is_none(door: Running, raw: bytes, text: str) -> None:
    answer = door.post(CHAT, raw)
    assert answer.status_code == 400
    assert text in answer.json()["error"]["message"]
    assert door.post(CHAT, {"messages": HI}).status_code == 200


def test_nested_just_within_what_json_allows(door: Running) -> None:
    for depth in (100, 400, 900):
        raw = b'{"messages": [{"role": "user", "content": "a", "x": ' + b"[" * depth + b"]" * depth + b"}]}"
        assert door.post(CHAT, raw).status_code in (200, 400)
    assert door.http.get("/health").status_code == 200


def test_a_prompt_longer_than_the_context_names_both_numbers(door: Running) -> None:
    answer = door.post(TEXT, {"prompt": [5] * (CONTEXT + 7)})
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert error["code"] == "context_length_exceeded"
    assert str(CONTEXT) in error["message"]
    assert str(CONTEXT + 7) in error["message"]
    answer = door.post(TEXT, {"prompt": [5] * (CONTEXT - 5), "max_tokens": 6})
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert door.post(TEXT, {"prompt": [5] * (CONTEXT - 5), "max_tokens": 5}).status_code == 200
    assert door.post(TEXT, {"prompt": [5] * (CONTEXT - 5)}).status_code == 200, "a default is clamped"


@pytest.mark.parametrize("also", [{}, {"max_tokens": 1}, {"max_tokens": 0, "echo": True}])
def test_a_prompt_that_fills_the_context_leaves_no_place_for_an_answer(
    door: Running, also: dict[str, Any]
) -> None:
    answer = door.post(TEXT, {"prompt": [5] * CONTEXT, **also})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert door.post(TEXT, {"prompt": [5] * (CONTEXT - 1), **also}).status_code == 200


def test_a_body_of_ten_megabytes_is_413(door: Running) -> None:
    body = {"messages": [{"role": "user", "content": "x" * 10 * 2**20}]}
    answer = door.post(CHAT, body)
    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "REQUEST_TOO_LARGE"
    assert door.post(CHAT, {"messages": HI}).status_code == 200


def test_unknown_fields_and_content_types_are_tolerated(door: Running) -> None:
    body = {"messages": HI, "surprise": {"a": [1, None]}, "temperature": None, "stop": None}
    assert door.post(CHAT, body, headers={"content-type": "text/plain"}).status_code == 200


def test_an_unknown_model_is_404(door: Running) -> None:
    for name in ("default", "", "x" * 10_000):
        answer = door.post(CHAT, {"model": name, "messages": HI})
        assert answer.status_code == 404
        assert answer.json()["error"]["param"] == "model"


def test_a_client_sets_neither_the_template_nor_what_it_is_shown_nor_how_it_is_run(
    door: Running, backend: FakeBackend
) -> None:
    names = ["messages", "conversation", "tools", "documents", "chat_template", "tokenize", "return_dict"]
    names += ["add_generation_prompt", "continue_final_message", "tokenizer_kwargs", "return_tensors"]
    names += ["return_assistant_tokens_mask", "padding", "truncation", "max_length"]
    for name in names:
        for path in (CHAT, "/tokenize"):
            answer = door.post(path, {"messages": HI, "chat_template_kwargs": {"mood": "x", name: "x"}})
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, "chat_template_kwargs"), name
            assert repr(name) in error["message"]
    assert backend.requests == []
    assert door.post(CHAT, {"messages": HI, "chat_template_kwargs": {"mood": "x"}}).status_code == 200


def test_a_prompt_in_a_thread_gives_its_place_back_however_it_ends(
    backend: FakeBackend, tokenizer: ModelTokenizer
) -> None:
    began, go = threading.Event(), threading.Event()

    def work() -> None:
        began.set()
        go.wait(DEADLINE_S)

    async def leave(door: Running) -> None:
        prompt = asyncio.ensure_future(door.door.off_loop(1, work))
        assert await asyncio.to_thread(began.wait, DEADLINE_S)
        with pytest.raises(OutOfCapacity, match="too many prompts"):
            await door.door.off_loop(1, work)
        prompt.cancel()
        with pytest.raises(asyncio.CancelledError):
            await prompt

    limits = Limits(max_queue=1, drain_s=2)
    with serve(backend, tokenizer, inline_bytes=0, limits=limits) as door:
        for _ in range(2):
            assert door.post(TEXT, {"prompt": [5] * (CONTEXT + 7)}).status_code == 400
        try:
            asyncio.run_coroutine_threadsafe(leave(door), door.loop).result(DEADLINE_S)
        finally:
            go.set()
        for _ in range(2):
            assert door.post(CHAT, {"messages": HI}).status_code == 200
