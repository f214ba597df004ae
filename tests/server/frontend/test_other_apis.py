"""`/v1/responses` and `/v1/messages`: bodies to chats, and through the server with the official clients."""

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import msgspec
import openai
import pytest
from frontend_rig import CONTEXT, FakeBackend, Running, make_tokenizer, serve
from test_replies import THINKING
from test_tool_calls import ASK, CALL, TOOLS

from segue.kv.errors import OutOfCapacity
from segue.server.frontend.body_reader import read_body
from segue.server.frontend.messages_api import chat_of_messages
from segue.server.frontend.problems import BadParam
from segue.server.frontend.request_fields import MessagesBody, ResponsesBody
from segue.server.frontend.responses_api import chat_of_responses
from segue.server.frontend.tokenizer import ModelTokenizer

SAID = f"<think>\nIt is in France.\n</think>\n\nI ask. {CALL}\n{CALL}"
SCHEMA = TOOLS[0]["function"]["parameters"]
RESPONSE_TOOLS: Any = [{"type": "function", "name": "weather", "parameters": SCHEMA, "strict": False}]
MESSAGE_TOOLS: Any = [{"name": "weather", "description": "The weather", "input_schema": SCHEMA}]


@pytest.fixture(scope="module")
def thinker() -> ModelTokenizer:
    return ModelTokenizer(make_tokenizer(THINKING))


@pytest.fixture
def spoken(thinker: ModelTokenizer) -> FakeBackend:
    return FakeBackend(thinker, text=SAID, step=2)


@pytest.fixture
def running(spoken: FakeBackend, thinker: ModelTokenizer) -> Iterator[Running]:
    with serve(spoken, thinker) as found:
        yield found


def claude(running: Running, key: str = "none") -> anthropic.Anthropic:
    made = anthropic.Anthropic(base_url=running.url, api_key=key, max_retries=0)
    return running.clients.enter_context(made)


def chat(kind: Any, body: dict[str, Any]) -> dict[str, Any]:
    read = chat_of_responses if kind is ResponsesBody else chat_of_messages
    made = read(read_body(msgspec.json.encode(body), kind))  # type: ignore[operator]
    return {k: v for k, v in msgspec.to_builtins(made.chat).items() if v is not None}


# ---- bodies -------------------------------------------------------------------------------------


def test_a_response_of_items_is_a_chat() -> None:
    items = [
        {"role": "developer", "content": "Be brief."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "weather?"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I ask."}]},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Paris"}'},
        {"type": "function_call", "call_id": "c2", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "sun"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "rain"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "And?"}]},
        {"type": "function_call", "call_id": "c3", "name": "weather", "arguments": "{}"},
        {"type": "message", "role": "user", "content": "And now?"},
    ]
    body = {
        "model": "tiny",
        "instructions": "You help.",
        "input": items,
        "tools": RESPONSE_TOOLS,
        "tool_choice": {"type": "function", "name": "weather"},
        "parallel_tool_calls": False,
        "max_output_tokens": 7,
        "reasoning": {"effort": "low"},
        "text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}}},
        "seed": 5,
        "store": True,
    }
    made = chat(ResponsesBody, body)
    system, developer, user, said, *results, again, last = made["messages"]
    assert system == {"role": "system", "content": "You help."}
    assert developer == {"role": "developer", "content": ["Be brief."]}
    assert (again["reasoning_content"], again["tool_calls"][0]["id"]) == ("And?", "c3")
    assert last == {"role": "user", "content": ["And now?"]}
    assert made["parallel_tool_calls"] is False
    assert user["content"] == ["weather?"]
    assert said["reasoning_content"] == "Hm."
    assert [call["id"] for call in said["tool_calls"]] == ["c1", "c2"]
    assert [(r["role"], r["tool_call_id"], r["content"]) for r in results] == [
        ("tool", "c1", ["sun"]),
        ("tool", "c2", ["rain"]),
    ]
    assert made["tools"][0]["function"]["name"] == "weather"
    assert made["tool_choice"] == {"type": "function", "function": {"name": "weather"}}
    assert (made["max_completion_tokens"], made["reasoning_effort"], made["seed"]) == (7, "low", 5)
    assert made["response_format"]["json_schema"]["schema"] == {"type": "object"}


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"input": [{"type": "function_call_output", "output": 5}]}, "input[0].output"),
        ({"input": [{"type": "mesage", "role": "user", "content": "hi"}]}, "input[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        (
            {"tools": [{"type": "namespace", "name": "x", "tools": [{"type": "custom"}]}]},
            "tools[0].tools[0].name",
        ),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"input": [{"type": "reasoning", "content": 5}]}, "input[0].content"),
        ({"input": [{"role": "system"}]}, "input[0].content"),
        ({"truncation": "auto"}, "truncation"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
    ],
)
def test_a_response_that_cannot_be_is_refused_by_name(wrong: dict[str, Any], param: str) -> None:
    with pytest.raises(BadParam) as caught:
        chat(ResponsesBody, {"input": "hi"} | wrong)
    assert caught.value.param == param


def test_messages_of_blocks_are_a_chat() -> None:
    body = {
        "model": "tiny",
        "max_tokens": 9,
        "system": [
            {"type": "text", "text": "You help.", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": "Be brief."},
        ],
        "messages": [
            {"role": "user", "content": "weather?"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm.", "signature": ""},
                    {"type": "text", "text": "I ask."},
                    {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Paris"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "t1",
                        "content": [{"type": "text", "text": "sun"}],
                    },
                    {"type": "text", "text": "And now?"},
                ],
            },
        ],
        "stop_sequences": ["END"],
        "tools": MESSAGE_TOOLS,
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}, "effort": "low"},
        "metadata": {"user_id": "u"},
    }
    made = chat(MessagesBody, body)
    system, _, said, result, user = made["messages"]
    assert system == {"role": "system", "content": ["You help.", "Be brief."]}
    assert made["response_format"]["json_schema"]["schema"] == SCHEMA
    assert made["reasoning_effort"] == "low"
    omitted = {"thinking": {"type": "enabled", "display": "omitted"}}
    assert (made["include_reasoning"], chat(MessagesBody, body | omitted)["include_reasoning"]) == (
        True,
        False,
    )
    assert (said["content"], said["reasoning_content"]) == (["I ask."], "Hm.")
    assert said["tool_calls"][0]["function"]["arguments"] == {"city": "Paris"}
    assert result == {"role": "tool", "tool_call_id": "t1", "content": ["sun"]}
    assert user == {"role": "user", "content": ["And now?"]}
    assert (made["stop"], made["tool_choice"], made["parallel_tool_calls"]) == (["END"], "required", False)
    assert made["chat_template_kwargs"] == {"enable_thinking": True}
    assert (made["user"], made["continue_final_message"]) == ("u", False)
    begun = {"messages": [*body["messages"], {"role": "assistant", "content": "It is"}]}
    assert chat(MessagesBody, body | begun)["continue_final_message"]
    hidden = chat(MessagesBody, body | {"thinking": {"type": "disabled"}})
    assert (hidden["include_reasoning"], hidden["chat_template_kwargs"]) == (
        False,
        {"enable_thinking": False},
    )


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "tool", "content": ""}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"system": [{"type": "image"}]}, "system[0]"),
        ({"tools": [{"type": "custom"}]}, "tools[0].name"),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "tool_result", "content": [{"type": "image"}]}]}
                ]
            },
            "messages[0].content[0].content[0]",
        ),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"output_config": {"format": {"type": "text"}}}, "output_config.format"),
    ],
)
def test_messages_that_cannot_be_are_refused_by_name(wrong: dict[str, Any], param: str) -> None:
    with pytest.raises(BadParam) as caught:
        chat(MessagesBody, {"messages": ASK} | wrong)
    assert caught.value.param == param


# ---- bodies of agents ---------------------------------------------------------------------------

PATCH: Any = {
    "type": "custom",
    "name": "patch",
    "description": "d",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /a+/"},
}
NAMESPACE: Any = {"type": "namespace", "name": "mcp__x", "tools": RESPONSE_TOOLS}
TWO: Any = [*RESPONSE_TOOLS, {**RESPONSE_TOOLS[0], "name": "other"}]
#: Additions to a short body: the names that the answer lists, texts of the prompt, texts that are not in it.
CODEX: list[tuple[dict[str, Any], str, list[str], list[str]]] = [
    (
        {"tools": [*RESPONSE_TOOLS, {"type": "web_search", "external_web_access": False}]},
        "tools.web_search",
        [],
        [],
    ),
    (
        {"tools": [{"type": "local_shell"}, {"type": "image_generation"}]},
        "tools.local_shell",
        [],
        ["local_shell"],
    ),
    (
        {"tools": [{"type": "tool_search", "execution": "client", "parameters": {}}]},
        "tools.tool_search",
        [],
        [],
    ),
    ({"tools": [PATCH]}, "", ['"name": "patch"', "start: /a+/", '"input"'], []),
    ({"tools": [NAMESPACE]}, "", ['"name": "mcp__x__weather"'], []),
    ({"text": {"verbosity": "low"}, "context_management": [{"type": "compaction"}]}, "", [], []),
    ({"reasoning": {"effort": "high", "summary": "auto"}}, "reasoning.effort", [], []),
    (
        {"tools": TWO, "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [TWO[1]]}},
        "",
        ['"name": "other"'],
        ['"name": "weather"'],
    ),
    (
        {
            "input": [
                {"type": "custom_tool_call", "call_id": "c", "name": "patch", "input": "*** Begin"},
                {"type": "custom_tool_call_output", "call_id": "c", "output": "ok"},
                {"type": "local_shell_call", "call_id": "d", "action": {"type": "exec", "command": ["ls"]}},
                {"type": "local_shell_call_output", "call_id": "d", "output": "files"},
                {
                    "type": "function_call",
                    "call_id": "e",
                    "namespace": "mcp__x",
                    "name": "weather",
                    "arguments": "",
                },
                {"type": "function_call_output", "call_id": "e", "output": {"temp": 5}},
                {"role": "assistant", "content": None},
                {"role": "user", "content": ""},
                {"type": "web_search_call", "id": "w", "action": {"query": "x"}},
                {"type": "compaction", "encrypted_content": "secret"},
                {"type": "reasoning", "summary": [], "content": None, "encrypted_content": "secret"},
                *ASK,
            ]
        },
        "input.web_search_call, input.compaction",
        ['"patch"', "*** Begin", "ok", '"local_shell"', '"ls"', "files", '"mcp__x__weather"', '{"temp": 5}'],
        ["secret"],
    ),
]
SEARCHED: Any = [
    {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "sun"}},
    {
        "type": "web_search_tool_result",
        "tool_use_id": "s",
        "content": [{"type": "web_search_result", "url": "http://x", "encrypted_content": "secret"}],
    },
    {"type": "text", "text": "It shines."},
]
CLAUDE_CODE: list[tuple[dict[str, Any], str, list[str], list[str]]] = [
    (
        {"tools": [*MESSAGE_TOOLS, {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}]},
        "tools.web_search_20250305",
        ['"name": "weather"'],
        ["web_search"],
    ),
    ({"tools": [{"type": "mcp_toolset", "mcp_server_name": "x"}]}, "tools.mcp_toolset", [], []),
    ({"output_config": {"effort": "high"}}, "output_config.effort", [], []),
    ({"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}}, "", [], []),
    (
        {"messages": [*ASK, {"role": "assistant", "content": SEARCHED}, *ASK]},
        "",
        ["server_tool_use", "http://x", "It shines."],
        ["secret"],
    ),
    (
        {
            "messages": [
                *ASK,
                {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}}]},
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "tool_result",
                            "tool_use_id": "t",
                            "content": [{"type": "tool_reference", "tool_name": "weather"}],
                        }
                    ],
                },
                {"role": "system", "content": "A reminder."},
            ]
        },
        "",
        ['{"type": "tool_reference", "tool_name": "weather"}', "A reminder."],
        [],
    ),
]


@pytest.mark.parametrize(
    ("path", "change", "named", "shown", "hidden"),
    [("/v1/responses", *row) for row in CODEX] + [("/v1/messages", *row) for row in CLAUDE_CODE],
)
def test_bodies_of_agents_are_answered_and_what_has_no_meaning_is_named(
    door: Running,
    backend: FakeBackend,
    path: str,
    change: dict[str, Any],
    named: str,
    shown: list[str],
    hidden: list[str],
) -> None:
    short = {"input": "hi", "messages": ASK, "max_tokens": 5}
    names = ("messages", "max_tokens") if path.endswith("messages") else ("input",)
    answer = door.post(path, {name: short[name] for name in names} | change)
    assert answer.status_code == 200, answer.text
    assert named in answer.headers.get("x-segue-unknown-fields", "")
    prompt = door.door.tokenizer.decode(backend.requests[0].prompt, skip_special=False)
    for text in shown:
        assert text in prompt
    for text in hidden:
        assert text not in prompt


# ---- Responses ----------------------------------------------------------------------------------


def test_calls_of_custom_tools_and_of_namespaces_come_back_as_such(
    door: Running, backend: FakeBackend
) -> None:
    """With the real client, whole and streamed; and their items may be sent again."""
    backend.context_tokens = 2000
    backend.text = (
        '<tool_call>{"name": "patch", "arguments": {"input": "*** Begin\\n"}}</tool_call>'
        '<tool_call>{"name": "mcp__x__weather", "arguments": {"city": "Paris"}}</tool_call>'
    )
    client = door.openai()
    asked: dict[str, Any] = {"model": "tiny", "input": "hi", "tools": [{**PATCH, "format": None}, NAMESPACE]}
    custom, function = client.responses.create(**asked).output
    assert custom.type == "custom_tool_call"
    assert (custom.name, custom.input) == ("patch", "*** Begin\n")
    assert function.type == "function_call"
    assert (function.name, function.namespace, json.loads(function.arguments)) == (
        "weather",
        "mcp__x",
        {"city": "Paris"},
    )
    events = list(client.responses.create(**asked, stream=True))
    added, done = (
        [e.item for e in events if e.type == f"response.output_item.{step}"] for step in ("added", "done")
    )
    assert [item.type for item in added] == ["custom_tool_call", "function_call"]
    assert [getattr(item, name) for item, name in zip(added, ("input", "arguments"), strict=True)] == ["", ""]
    [delta] = [e for e in events if e.type == "response.custom_tool_call_input.delta"]
    [whole] = [e for e in events if e.type == "response.custom_tool_call_input.done"]
    assert delta.delta == whole.input == done[0].input == "*** Begin\n"
    assert delta.item_id == whole.item_id == done[0].id
    items = [item.model_dump(exclude_none=True) for item in done]
    results = [{"type": f"{i['type']}_output", "call_id": i["call_id"], "output": "ok"} for i in items]
    assert client.responses.create(model="tiny", input=[*ASK, *items, *results]).status == "completed"


@pytest.mark.parametrize("arguments", ['{"input": 5}', '"text"', '{"input": "cut'])
def test_a_call_of_a_custom_tool_whose_arguments_are_another_has_them_as_its_text(
    door: Running, backend: FakeBackend, arguments: str
) -> None:
    backend.text = arguments
    choice = {"type": "custom", "name": "patch"}
    answer = door.post("/v1/responses", {"input": "hi", "tools": [PATCH], "tool_choice": choice})
    [item] = answer.json()["output"]
    assert (item["type"], item["input"]) == ("custom_tool_call", arguments)


def test_a_response_has_reasoning_text_and_calls_and_its_stream_the_same(running: Running) -> None:
    client = running.openai()
    asked: dict[str, Any] = {"model": "tiny", "input": "weather?", "tools": RESPONSE_TOOLS}
    whole = client.responses.create(**asked)
    assert whole.status == "completed"
    assert [item.type for item in whole.output] == ["reasoning", "message", "function_call", "function_call"]
    assert whole.output_text == "I ask."
    assert whole.usage is not None
    assert whole.usage.output_tokens_details.reasoning_tokens > 0
    with client.responses.stream(**asked) as stream:
        events = list(stream)
        streamed = stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    done = [e.arguments for e in events if e.type == "response.function_call_arguments.done"]
    assert [json.loads(arguments) for arguments in done] == 2 * [{"city": "Paris"}]
    assert (whole.temperature, whole.top_p) == (1.0, 1.0), "those that the server uses"
    assert {e.type for e in events} >= {
        "response.created",
        "response.output_item.added",
        "response.output_text.delta",
        "response.function_call_arguments.done",
        "response.reasoning_text.delta",
        "response.completed",
    }

    def shown(response: Any) -> list[dict[str, Any]]:
        items = json.loads(response.model_dump_json())["output"]
        for item in items:
            for name in ("id", "call_id", "parsed_arguments"):
                item.pop(name, None)
            for part in item.get("content") or []:
                part.pop("parsed", None)
        return items

    assert shown(streamed) == shown(whole)
    assert streamed.usage == whole.usage
    (call, _) = (item for item in whole.output if item.type == "function_call")
    assert json.loads(call.arguments) == {"city": "Paris"}


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_that_is_cut_says_so(running: Running, stream: bool) -> None:
    body = {"model": "tiny", "input": "hi", "max_output_tokens": 30, "stream": stream}
    answer = running.post("/v1/responses", body)
    if stream:
        *_, last = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]
        assert (last["type"], answer.text.count("[DONE]")) == ("response.incomplete", 0)
        found = last["response"]
    else:
        found = answer.json()
    assert (found["status"], found["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert found["output"][-1]["status"] == "incomplete"


def test_a_stream_of_a_response_that_fails_ends_with_the_reason(
    running: Running, spoken: FakeBackend
) -> None:
    spoken.error_at, spoken.error = 6, OutOfCapacity("full")
    events = list(running.openai().responses.create(model="tiny", input="hi", stream=True))
    assert events[-1].type == "response.failed"
    assert events[-1].response.status == "failed"
    assert events[-1].response.error is not None
    assert "full" in events[-1].response.error.message
    spoken.error_at = 0
    with pytest.raises(openai.RateLimitError):
        running.openai().responses.create(model="tiny", input="hi", stream=True)


# ---- Messages -----------------------------------------------------------------------------------


def test_a_message_has_blocks_and_its_stream_the_same(running: Running) -> None:
    client = claude(running)
    asked: dict[str, Any] = {
        "model": "tiny",
        "max_tokens": 250,
        "system": "You help.",
        "messages": ASK,
        "tools": MESSAGE_TOOLS,
    }
    whole = client.messages.create(**asked)
    assert [block.type for block in whole.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert whole.stop_reason == "tool_use"
    use = whole.content[-1]
    assert use.type == "tool_use"
    assert use.input == {"city": "Paris"}
    with client.messages.stream(**asked) as stream:
        assert "".join(stream.text_stream) == "I ask."
        streamed = stream.get_final_message()

    def shown(message: Any) -> list[dict[str, Any]]:
        return [
            {k: v for k, v in block.items() if k != "id"}
            for block in json.loads(message.model_dump_json())["content"]
        ]

    assert shown(streamed) == shown(whole)
    assert streamed.stop_reason == "tool_use"
    assert streamed.usage.output_tokens == whole.usage.output_tokens
    assert (whole.usage.cache_read_input_tokens, streamed.usage.cache_read_input_tokens) == (1, 1)
    counted = client.messages.count_tokens(**{k: v for k, v in asked.items() if k != "max_tokens"})
    assert counted.input_tokens == whole.usage.input_tokens + 1


@pytest.mark.parametrize(
    ("more", "reason", "sequence"),
    [
        ({"max_tokens": 40}, "max_tokens", None),
        ({"max_tokens": 300, "stop_sequences": ["ask"]}, "stop_sequence", "ask"),
        ({"max_tokens": 300}, "end_turn", None),
        # The grammar's text is whatever the backend says; the call has no JSON, and the reason says why.
        (
            {"max_tokens": 5, "tools": MESSAGE_TOOLS, "tool_choice": {"type": "tool", "name": "weather"}},
            "max_tokens",
            None,
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_why_a_message_ends(
    running: Running, more: dict[str, Any], reason: str, sequence: str | None, stream: bool
) -> None:
    client = claude(running)
    asked: dict[str, Any] = {"model": "tiny", "messages": ASK, **more}
    if stream:
        with client.messages.stream(**asked) as streaming:
            found = streaming.get_final_message() if "tools" not in more else None
        if found is None:
            raw = running.post("/v1/messages", asked | {"stream": True}).text
            assert '"stop_reason":"max_tokens"' in raw
            assert '"type":"tool_use"' in raw
            return
    else:
        found = client.messages.create(**asked)
    assert (found.stop_reason, found.stop_sequence) == (reason, sequence)


def test_errors_have_the_form_of_their_api(running: Running, spoken: FakeBackend) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        claude(running).messages.create(model="other", max_tokens=5, messages=ASK)
    body: Any = missing.value.body
    assert (body["type"], body["error"]["type"]) == ("error", "not_found_error")
    wrong = running.post("/v1/messages", {"messages": ASK})
    assert (wrong.status_code, wrong.json()["error"]["type"]) == (400, "invalid_request_error")
    assert "max_tokens" in wrong.json()["error"]["message"]
    for method, path, status, kind in (
        ("GET", "/v1/messages", 405, "invalid_request_error"),
        ("POST", "/v1/messages/batches", 404, "not_found_error"),
    ):
        answer = running.http.request(method, path)
        assert (answer.status_code, answer.json()["type"]) == (status, "error")
        assert answer.json()["error"]["type"] == kind
        assert answer.json()["request_id"] == answer.headers["x-request-id"]
    assert running.http.post("/v1/nothing").json()["error"]["code"] == "NOT_FOUND"
    spoken.error_at, spoken.error = 6, OutOfCapacity("full")
    with (
        pytest.raises(anthropic.APIStatusError, match="full"),
        claude(running).messages.stream(model="tiny", max_tokens=300, messages=ASK) as stream,
    ):
        stream.get_final_message()


@pytest.mark.parametrize(
    ("path", "wrong", "name"),
    [
        ("/v1/responses", {"input": [{"role": "user", "content": 5}]}, "input"),
        ("/v1/responses", {"input": "a" * 3000}, "input"),
        ("/v1/responses", {"max_output_tokens": 100_000}, "max_output_tokens"),
        ("/v1/responses", {"max_output_tokens": 0}, "max_output_tokens"),
        ("/v1/responses", {"text": {"format": {"type": "xml"}}}, "text.format"),
        ("/v1/responses", {"reasoning": {"effort": "much"}}, "reasoning.effort"),
        ("/v1/responses", {"tool_choice": "some"}, "tool_choice"),
        ("/v1/messages", {"stop_sequences": [""]}, "stop_sequences"),
        ("/v1/messages", {"output_config": {"effort": "much"}}, "output_config.effort"),
        ("/v1/messages", {"max_tokens": 0}, "max_tokens"),
    ],
)
def test_errors_call_a_field_as_its_api_does(
    running: Running, path: str, wrong: dict[str, Any], name: str
) -> None:
    right = {"input": "hi"} if path.endswith("responses") else {"messages": ASK, "max_tokens": 5}
    answer = running.post(path, right | wrong)
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert name in (error["param"] if path.endswith("responses") else error["message"])
    assert not any(
        other in error["message"] for other in ("max_completion_tokens", "response_format", "messages[")
    )


def test_only_a_reference_is_told_to_be_sent_as_the_items_themselves(running: Running) -> None:
    items = [{"type": "item_reference", "id": "x"}, {"type": "web_search_call", "id": "x"}]
    asked = [{"input": [{"role": "user", "content": "hi"}, item]} for item in items]
    said = [running.post("/v1/responses", body).text for body in asked]
    assert ["send the items themselves" in text for text in said] == [True, False]


def test_more_tokens_than_fit_are_those_that_fit_in_messages(running: Running, spoken: FakeBackend) -> None:
    """Clients such as Claude Code ask for 32,000 tokens whatever the model's context is."""
    answer = running.post("/v1/messages", {"messages": ASK, "max_tokens": 32_000})
    assert (answer.status_code, answer.json()["stop_reason"]) == (200, "end_turn")
    [request] = spoken.requests
    assert request.sampling.max_tokens == CONTEXT - len(request.prompt)
    running.post("/v1/messages", {"messages": ASK, "max_tokens": 7})
    assert spoken.requests[-1].sampling.max_tokens == 7


def test_the_key_of_anthropics_clients_is_taken(thinker: ModelTokenizer, spoken: FakeBackend) -> None:
    with serve(spoken, thinker, keys=["right"]) as running:
        assert claude(running, "right").messages.create(model="tiny", max_tokens=5, messages=ASK).id
        with pytest.raises(anthropic.AuthenticationError) as caught:
            claude(running, "wrong").messages.create(model="tiny", max_tokens=5, messages=ASK)
        body: Any = caught.value.body
        assert body["error"]["type"] == "authentication_error"


# ---- names that nobody knows --------------------------------------------------------------------


def test_unknown_names_are_listed_in_a_header(running: Running) -> None:
    body: dict[str, Any] = {"model": "tiny", "messages": ASK, "temprature": 0, "store": True, "x\r\ny": 1}
    for stream in (False, True):
        answer = running.post("/v1/chat/completions", body | {"stream": stream})
        assert answer.status_code == 200
        assert answer.headers["x-segue-unknown-fields"] == "temprature, xy"
    for path in ("/v1/responses", "/v1/messages"):
        answer = running.post(path, {"input": "x", "messages": ASK, "max_tokens": 2, "nothing": 1})
        assert "nothing" in answer.headers["x-segue-unknown-fields"]
    for path, inner, name in (
        (
            "/v1/chat/completions",
            {"response_format": {"type": "text", "nothing": 1}},
            "response_format.nothing",
        ),
        (
            "/v1/completions",
            {"prompt": "x", "stream_options": {"nothing": 1}, "stream": True},
            "stream_options.nothing",
        ),
        ("/v1/responses", {"reasoning": {"nothing": 1}}, "reasoning.nothing"),
        ("/v1/responses", {"tools": [{"type": "function", "name": "f", "nothing": 1}]}, "tools.nothing"),
        ("/v1/messages", {"output_config": {"nothing": 1}}, "output_config.nothing"),
        (
            "/v1/chat/completions",
            {"tools": 2 * [{"type": "function", "function": {"name": "f", "nothing": 1}}]},
            "tools.function.nothing",
        ),
        (
            "/v1/messages",
            {"tools": [{"name": "f", "nothing": 1, "cache_control": {"type": "ephemeral"}}]},
            "tools.nothing",
        ),
    ):
        # What another API needs is an unknown field of this one.
        right = {"input": "x", "messages": ASK, "max_tokens": 2}
        listed = running.post(path, right | inner).headers["x-segue-unknown-fields"]
        assert listed.split(", ").count(name) == 1
        assert "cache_control" not in listed
    strict = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]
    for choice in ("auto", "required", "none"):
        asked = {"messages": ASK, "tools": strict, "tool_choice": choice}
        assert "x-segue-unknown-fields" not in running.post("/v1/chat/completions", asked).headers
    many = body | {f"n{i}": i for i in range(100)}
    assert len(running.post("/v1/chat/completions", many).headers["x-segue-unknown-fields"]) < 400
    assert "x-segue-unknown-fields" not in running.post("/v1/chat/completions", {"messages": ASK}).headers
