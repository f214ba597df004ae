"""The table of request fields: what would change the answer is built or refused by name, the rest is ignored;
and docs/http.md has the table."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
from frontend_rig import FakeBackend, Running
from test_tool_calls import ASK, CALL, TOOLS

from segue.engine.request import Request
from segue.server.frontend.body_reader import USED_FIELDS, read_body
from segue.server.frontend.params import ModelCard
from segue.server.frontend.plan import Planner
from segue.server.frontend.problems import BadParam
from segue.server.frontend.request_fields import (
    OTHER_FIELDS,
    BodyPart,
    ChatBody,
    CompletionBody,
    Ignored,
    MessagesBody,
    NativeBody,
    Refused,
    ResponsesBody,
    TokenizeBody,
)
from segue.server.frontend.tokenizer import ModelTokenizer

ROOT = Path(__file__).resolve().parents[3]
CARD = ModelCard(name="tiny", context_tokens=512, vocab_size=330)
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "seed": 1}
TEXT: dict[str, Any] = {"prompt": "the answer", "seed": 1}

#: A body of each API, and the object in it that has the API's fields.
BODIES: dict[BodyPart, tuple[type, dict[str, Any], str]] = {
    BodyPart.CHAT: (ChatBody, CHAT, ""),
    BodyPart.COMPLETIONS: (CompletionBody, TEXT, ""),
    BodyPart.RESPONSES: (ResponsesBody, {"input": "hi"}, ""),
    BodyPart.MESSAGES: (MessagesBody, {"messages": CHAT["messages"]}, ""),
    BodyPart.GENERATE: (NativeBody, {"text": "hi"}, ""),
    BodyPart.SAMPLING_PARAMS: (NativeBody, {"text": "hi"}, "sampling_params"),
    BodyPart.STREAM_OPTIONS: (ChatBody, {**CHAT, "stream": True}, "stream_options"),
    BodyPart.STRUCTURED_OUTPUTS: (ChatBody, CHAT, "structured_outputs"),
    BodyPart.TOKENIZE: (TokenizeBody, {"prompt": "x"}, ""),
}
#: Something that each field could be asked for; true, where nothing else is said.
ASKED: dict[str, Any] = {
    "detokenize": False,
    "include_reasoning": False,
    "spaces_between_special_tokens": False,
}


@pytest.mark.parametrize(
    "row", [row for row in OTHER_FIELDS if isinstance(row, Refused)], ids=lambda row: row.name
)
def test_a_field_that_is_not_built_is_refused_by_name_unless_it_asks_for_nothing(row: Refused) -> None:
    for api in row.where:
        kind, body, within = BODIES[api]

        def read(value: object, kind: Any = kind, body: Any = body, within: str = within) -> None:
            field = {row.name: value}
            read_body(json.dumps(body | ({within: field} if within else field)).encode(), kind)

        place = f"{within}.{row.name}" if within else row.name
        with pytest.raises(BadParam, match=rf"^{place}: not supported; (leave it out|use \w+)") as caught:
            read(ASKED.get(row.name, ["x", {"y": 1.5}]))
        assert caught.value.param == place
        for value in (None, *row.neutral):
            read(value)


def test_values_that_ask_for_something_are_not_taken_for_nothing() -> None:
    for field, value in (
        ("prompt_logprobs", 0),
        ("sampling_seed", 0),
        ("web_search_options", {}),
        ("thinking_token_budget", 0),
        ("truncate_prompt_tokens", -1),
        ("best_of", 2),
        ("repeat_penalty", 1.1),
        ("num_beams", 4),
        ("modalities", ["text", "audio"]),
    ):
        with pytest.raises(BadParam, match=f"^{field}: not supported"):
            read_body(json.dumps(CHAT | {field: value}).encode(), ChatBody)


def test_no_field_of_an_api_has_two_rows() -> None:
    for api in BodyPart:
        names = [row.names[api] for row in USED_FIELDS if api in row.names]
        names += [row.name for row in OTHER_FIELDS if api in row.where]
        assert len(names) == len(set(names)), api


def test_the_page_has_the_tables_that_the_code_makes() -> None:
    tables = runpy.run_path(str(ROOT / "tools" / "fields_page.py"))["tables"]()
    page = (ROOT / "docs" / "http.md").read_text()
    written = dict(re.findall(r"^### (\w+ fields)\n\n(\|.*?)(?=\n\n)", page, re.M | re.S))
    assert written == tables, "put the output of python tools/fields_page.py into docs/http.md"


def requests(tokenizer: ModelTokenizer, kind: Any, body: dict[str, Any]) -> list[Request]:
    plan = Planner(tokenizer, today=lambda: 0)
    made = plan.chat if kind is ChatBody else plan.completion
    return [sample.request for sample in made(read_body(json.dumps(body).encode(), kind), CARD, "id").samples]  # type: ignore[operator]


@pytest.mark.parametrize("value", [1, "x", True, ["a"], {"b": 2}, -5.5])
@pytest.mark.parametrize(("kind", "body"), [(ChatBody, CHAT), (CompletionBody, TEXT)])
def test_what_is_ignored_may_be_anything_and_changes_no_request(
    tokenizer: ModelTokenizer, kind: Any, body: dict[str, Any], value: object
) -> None:
    ignored = {
        row.name: value for row in OTHER_FIELDS if isinstance(row, Ignored) and BodyPart.CHAT in row.where
    }
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


# ---- through the door ---------------------------------------------------------------------------


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
