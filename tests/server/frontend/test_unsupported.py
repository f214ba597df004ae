"""Fields of other servers: what would change the answer is built or refused by name; the rest is ignored."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from test_tool_calls import ASK, CALL, TOOLS

from conftest import FakeBackend, Running
from segue.engine.request import Request
from segue.server.frontend.messages_api import IGNORED_IN_MESSAGES, REFUSED_IN_MESSAGES, MessagesBody
from segue.server.frontend.native import REFUSED_IN_GENERATE, REFUSED_IN_SAMPLING_PARAMS
from segue.server.frontend.openai_types import (
    BodyReader,
    ChatBody,
    CompletionBody,
    GenerateFields,
    StreamOptions,
    TokenizeBody,
)
from segue.server.frontend.params import ModelCard
from segue.server.frontend.plan import Planner
from segue.server.frontend.problems import BadParam
from segue.server.frontend.responses_api import IGNORED_IN_RESPONSES, REFUSED_IN_RESPONSES, ResponsesBody
from segue.server.frontend.tokenizer import ModelTokenizer
from segue.server.frontend.unsupported import (
    IGNORED,
    REFUSED,
    REFUSED_IN_CHAT,
    REFUSED_IN_COMPLETIONS,
    REFUSED_IN_STREAM_OPTIONS,
    REFUSED_IN_STRUCTURED_OUTPUTS,
    REFUSED_IN_TOKENIZE,
)

DOCS = (Path(__file__).resolve().parents[3] / "docs" / "http.md").read_text()
CARD = ModelCard(name="tiny", context_tokens=512, vocab_size=330)
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "seed": 1}
TEXT: dict[str, Any] = {"prompt": "the answer", "seed": 1}

#: Something that each field could be asked for; true, where nothing else is said.
ASKED: dict[str, Any] = {
    "audio": {"voice": "alloy"},
    "function_call": {"name": "f"},
    "functions": [{"name": "f"}],
    "modalities": ["text", "audio"],
    "reasoning_effort": "low",
    "verbosity": "high",
    "web_search_options": {},
    "allowed_token_ids": [5],
    "bad_words": ["Paris"],
    "detokenize": False,
    "include_reasoning": False,
    "prompt_logprobs": 0,
    "spaces_between_special_tokens": False,
    "truncate_prompt_tokens": -1,
    "sampling_seed": 0,
    "best_of": 2,
    "top_logprobs": 0,
    "repeat_penalty": 1.1,
    "typical_p": 0.5,
    "top_n_sigma": 1.5,
    "num_beams": 4,
    "thinking_token_budget": 0,
}
REFUSALS = [
    *((ChatBody, CHAT, name, values) for name, values in {**REFUSED, **REFUSED_IN_CHAT}.items()),
    *((CompletionBody, TEXT, name, values) for name, values in {**REFUSED, **REFUSED_IN_COMPLETIONS}.items()),
    *((TokenizeBody, {"prompt": "x"}, name, values) for name, values in REFUSED_IN_TOKENIZE.items()),
]


def read(kind: Any, body: dict[str, Any]) -> Any:
    return BodyReader().read(json.dumps(body).encode(), kind)


@pytest.mark.parametrize(
    ("kind", "body", "name", "neutral"), REFUSALS, ids=[f"{k.__name__}-{n}" for k, _, n, _ in REFUSALS]
)
def test_a_field_that_is_not_built_is_refused_by_name_unless_it_asks_for_nothing(
    kind: Any, body: dict[str, Any], name: str, neutral: tuple[object, ...]
) -> None:
    with pytest.raises(BadParam, match=f"^{name}: not supported") as caught:
        read(kind, body | {name: ASKED.get(name, True)})
    assert caught.value.param == name
    for value in (None, *neutral):
        read(kind, body | {name: value})


@pytest.mark.parametrize("name", REFUSED_IN_STRUCTURED_OUTPUTS)
def test_structured_outputs_too(name: str) -> None:
    with pytest.raises(BadParam) as caught:
        read(ChatBody, CHAT | {"structured_outputs": {name: True}})
    assert caught.value.param == f"structured_outputs.{name}"
    read(ChatBody, CHAT | {"structured_outputs": {"regex": "a", name: None}})


def test_stream_options_too() -> None:
    with pytest.raises(BadParam) as caught:
        read(ChatBody, CHAT | {"stream_options": {"include_obfuscation": True}})
    assert caught.value.param == "stream_options.include_obfuscation"
    read(ChatBody, CHAT | {"stream": True, "stream_options": {"include_obfuscation": False}})


# ---- the page that says it ----------------------------------------------------------------------


def documented(row: str) -> set[str]:
    line = re.search(rf"^\| {re.escape(row)} \| ([^|]*) \|$", DOCS, re.MULTILINE)
    assert line, row
    return set(re.findall(r"`(\w+)`", line[1]))


def test_the_page_names_exactly_what_is_built_and_refused() -> None:
    both, fields = set(GenerateFields.__struct_fields__), set(StreamOptions.__struct_fields__)
    assert documented("supported in both") == both
    assert documented("supported in chat") == set(ChatBody.__struct_fields__) - both
    assert documented("supported in text completions") == set(CompletionBody.__struct_fields__) - both
    assert documented("refused by name") == set(REFUSED)
    assert documented("refused in chat") == set(REFUSED_IN_CHAT)
    assert documented("refused in text completions") == set(REFUSED_IN_COMPLETIONS)
    assert documented("supported in `stream_options`") == fields - set(REFUSED_IN_STREAM_OPTIONS)
    assert documented("refused in `stream_options`") == set(REFUSED_IN_STREAM_OPTIONS)
    assert documented("refused in `structured_outputs`") == set(REFUSED_IN_STRUCTURED_OUTPUTS)
    assert documented("refused in `/tokenize`") == set(REFUSED_IN_TOKENIZE)
    assert documented("refused in `/generate` (direct mode)") == set(REFUSED_IN_GENERATE)
    assert documented("refused in `sampling_params`") == set(REFUSED_IN_SAMPLING_PARAMS)


def test_the_page_names_the_fields_of_the_other_apis() -> None:
    def columns(row: str) -> list[set[str]]:
        line = re.search(rf"^\| {row} \| (.*) \| (.*) \|$", DOCS, re.MULTILINE)
        assert line, row
        return [set(re.findall(r"`(\w+)`", column)) for column in line.groups()]

    supported = [set(kind.__struct_fields__) for kind in (ResponsesBody, MessagesBody)]
    named = columns("supported")
    assert supported[0] == named[0] - {"disabled"}
    assert supported[1] == named[1] - {"user_id", "user"}
    assert columns("refused by name") == [set(REFUSED_IN_RESPONSES), set(REFUSED_IN_MESSAGES)]
    assert columns("ignored") == [set(IGNORED_IN_RESPONSES), set(IGNORED_IN_MESSAGES)]
    assert documented("ignored") == IGNORED


def test_no_field_is_of_two_kinds() -> None:
    chat = [documented(row) for row in ("supported in both", "supported in chat", "refused in chat")]
    text = [
        documented(row)
        for row in ("supported in both", "supported in text completions", "refused in text completions")
    ]
    for kinds in (chat, text):
        names = [n for kind in [*kinds, documented("refused by name"), documented("ignored")] for n in kind]
        assert len(names) == len(set(names))


def requests(tokenizer: ModelTokenizer, kind: Any, body: dict[str, Any]) -> list[Request]:
    plan = Planner(tokenizer, today=lambda: 0)
    made = plan.chat if kind is ChatBody else plan.completion
    return [sample.request for sample in made(read(kind, body), CARD, "id").samples]  # type: ignore[operator]


@pytest.mark.parametrize("value", [1, "x", True, ["a"], {"b": 2}, -5.5])
@pytest.mark.parametrize(("kind", "body"), [(ChatBody, CHAT), (CompletionBody, TEXT)])
def test_what_is_ignored_may_be_anything_and_changes_no_request(
    tokenizer: ModelTokenizer, kind: Any, body: dict[str, Any], value: object
) -> None:
    ignored = dict.fromkeys(sorted(documented("ignored")), value)
    assert requests(tokenizer, kind, body | ignored) == requests(tokenizer, kind, body)


@pytest.mark.parametrize(("kind", "body"), [(ChatBody, CHAT), (CompletionBody, TEXT)])
def test_what_routers_add_is_accepted(tokenizer: ModelTokenizer, kind: Any, body: dict[str, Any]) -> None:
    """Defaults that appear in bodies that routers have typed again."""
    added = {
        "ignore_eos": False,
        "no_stop_trim": False,
        "skip_special_tokens": True,
        "separate_reasoning": True,
        "stream_reasoning": True,
        "return_hidden_states": False,
        "continue_final_message": False,
        "lora_path": None,
        "session_params": None,
        "return_logprob": False,
        "bad_words": [],
        "logit_bias": None,
        "stop": None,
        "bootstrap_host": "10.0.0.1",
        "bootstrap_port": None,
        "bootstrap_room": 5,
    }
    assert requests(tokenizer, kind, body | added) == requests(tokenizer, kind, body)
    (request,) = requests(tokenizer, kind, body | {"ignore_eos": True, "max_completion_tokens": 7})
    assert request.sampling.ignore_eos
    assert request.sampling.max_tokens == 7


def test_sglangs_names_of_constraints_are_built(tokenizer: ModelTokenizer) -> None:
    for name, value, kind in (
        ("regex", "a+", "regex"),
        ("json_schema", '{"type": "integer"}', "json_schema"),
    ):
        (request,) = requests(tokenizer, ChatBody, CHAT | {name: value})
        assert request.sampling.grammar is not None
        assert (request.sampling.grammar.kind, request.sampling.grammar.text) == (kind, value)


# ---- through the door ---------------------------------------------------------------------------


def test_a_banned_word_is_not_answered(door: Running, backend: FakeBackend) -> None:
    answer = door.post("/v1/chat/completions", CHAT | {"bad_words": ["Paris"]})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "bad_words"
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert backend.requests == []


@pytest.mark.parametrize("stream", [False, True])
def test_one_tool_call_at_a_time(door: Running, backend: FakeBackend, stream: bool) -> None:
    backend.text = f"Two. {CALL}\n{CALL}"

    def calls(parallel: bool | None) -> int:
        body = {"messages": ASK, "tools": TOOLS, "parallel_tool_calls": parallel, "stream": stream}
        answer = door.post("/v1/chat/completions", body)
        assert answer.status_code == 200
        assert '"finish_reason":"tool_calls"' in answer.text
        return answer.text.count('"type":"function"')

    assert (calls(None), calls(True), calls(False)) == (2, 2, 1)


def test_a_forced_call_is_one_by_its_grammar(door: Running, backend: FakeBackend) -> None:
    body = {"messages": ASK, "tools": TOOLS, "tool_choice": "required", "max_tokens": 3}
    for parallel, most in ((True, 16), (False, 1)):
        door.post("/v1/chat/completions", body | {"parallel_tool_calls": parallel})
        grammar = backend.requests[-1].sampling.grammar
        assert grammar is not None
        assert json.loads(grammar.text)["maxItems"] == most


def test_tokenize_of_a_message_that_goes_on(door: Running) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "the"}]
    counts = [
        door.post("/tokenize", {"messages": messages, "continue_final_message": on}).json()["count"]
        for on in (False, True)
    ]
    assert counts[1] < counts[0]
