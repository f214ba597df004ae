"""Tool calls through the whole door, with the real client."""

import json
import time
from typing import Any

import msgspec
import openai
import pytest
from frontend_rig import CHATML, FakeBackend, Running, make_tokenizer, serve
from llguidance import LLMatcher

from segue.engine.request import CallGrammar
from segue.server.frontend.chat import tool_use
from segue.server.frontend.problems import BadParam
from segue.server.frontend.request_fields import ChatBody
from segue.server.frontend.tokenizer import ModelTokenizer

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
ASK: list[Any] = [{"role": "user", "content": "weather in Paris?"}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'


def client(door: Running) -> openai.OpenAI:
    return door.openai()


def test_a_call_comes_back_whole(door: Running, backend: FakeBackend) -> None:
    backend.text = CALL
    answer = client(door).chat.completions.create(model="tiny", messages=ASK, tools=TOOLS)
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    (call,) = choice.message.tool_calls or []
    assert call.type == "function"
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Paris"})
    prompt = door.door.tokenizer.decode(backend.requests[0].prompt, skip_special=False)
    assert '"name": "weather"' in prompt, "the template was given the tools"
    tokens = door.post("/tokenize", {"messages": ASK, "tools": TOOLS}).json()["tokens"]
    assert tokens == backend.requests[0].prompt


#: the end of a chat template, the mark of a call, the texts around the arguments of `weather`, those between
#: two calls of a block
FORMS: list[Any] = [
    ("<tool_call>", ["<tool_call>"], '\n{"name": "weather", "arguments": ', "}\n</tool_call>", None),
    ("[TOOL_CALLS][ARGS]", ["[TOOL_CALLS]"], "weather[ARGS]", "", None),
    ("[TOOL_CALLS] [{", ["[TOOL_CALLS]", " ["], '{"name": "weather", "arguments": ', "}]", [", "]),
    (
        "<｜tool▁calls▁begin｜> ```json",
        ["<｜tool▁calls▁begin｜>"],
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n",
        "\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        ["\n"],
    ),
    (
        "<｜tool▁calls▁begin｜>",
        ["<｜tool▁calls▁begin｜>"],
        "<｜tool▁call▁begin｜>weather<｜tool▁sep｜>",
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        [],
    ),
]
STRICT: list[Any] = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]
LONG = {"type": "function", "function": {"name": "x" * 70_000, "strict": True}}
OTHER: Any = {"type": "function", "function": {"name": "other", "parameters": {"required": ["x"]}}}


@pytest.mark.parametrize(("template", "mark", "before", "after", "between"), FORMS)
def test_the_calls_of_a_strict_tool_have_a_grammar_in_the_form_of_the_chat_template(
    template: str, mark: list[str], before: str, after: str, between: list[str] | None
) -> None:
    """And an answer in that form is read as a call."""
    own = ModelTokenizer(make_tokenizer(CHATML.replace("<tool_call>", "CALLS") + f"{{# {template} #}}"))
    backend = FakeBackend(own, text="".join(["I ask. ", *mark, before, '{"city": "Paris"}', after]))
    with serve(backend, own) as running:
        body = {"messages": ASK, "tools": [*STRICT, OTHER]}
        answer = running.post("/v1/chat/completions", body)
        assert "x-segue-unknown-fields" not in answer.headers
        [call] = answer.json()["choices"][0]["message"]["tool_calls"]
        assert call["function"] == {"name": "weather", "arguments": '{"city": "Paris"}'}
    grammar = backend.requests[0].sampling.grammar
    assert grammar is not None
    made = msgspec.json.decode(grammar.text, type=CallGrammar)
    strict, other = made.calls
    assert (made.open, made.between) == (mark, between)
    assert ("".join(strict.before), "".join([*strict.after, *made.close])) == (before, after)
    assert strict.schema == TOOLS[0]["function"]["parameters"]
    assert other.schema == {"type": "object"}, "it is not strict"


@pytest.mark.parametrize(
    ("template", "fields"),
    [
        ("<|python_tag|>", {}),
        ("<tool_call><function=", {}),
        ("<|tool_call_start|>", {}),
        ("<tool_call>", {"tools": [LONG]}),
    ],
)
def test_strict_is_listed_as_ignored_where_no_grammar_can_hold_it(
    template: str, fields: dict[str, Any]
) -> None:
    short = CHATML.replace("<tool_call>", "CALLS").replace("tools | tojson", "tools[0].function.name[:9]")
    own = ModelTokenizer(make_tokenizer(short + f"{{# {template} #}}"))
    backend = FakeBackend(own)
    with serve(backend, own) as running:
        answer = running.post("/v1/chat/completions", {"messages": ASK, "tools": STRICT} | fields)
        assert answer.headers["x-segue-unknown-fields"] == "tools.strict"
        assert backend.requests[0].sampling.grammar is None
        # A constrained answer is no call, so that nothing is ignored.
        form = {"response_format": {"type": "json_object"}}
        answer = running.post("/v1/chat/completions", {"messages": ASK, "tools": STRICT} | fields | form)
        assert "x-segue-unknown-fields" not in answer.headers


def test_none_shows_no_tools_and_finds_no_calls(door: Running, backend: FakeBackend) -> None:
    backend.text = CALL
    answer = client(door).chat.completions.create(model="tiny", messages=ASK, tools=TOOLS, tool_choice="none")
    assert answer.choices[0].message.content == CALL
    assert "weather</tools>" not in door.door.tokenizer.decode(backend.requests[0].prompt, skip_special=False)


@pytest.mark.parametrize(
    ("text", "choice", "content", "called"),
    [
        (CALL.removesuffix("\n</tool_call>"), "auto", "", True),  # without its end mark
        ('{"city": "Paris"}', {"type": "function", "function": {"name": "weather"}}, "", True),
        ('[{"name": "weather", "arguments": {"city": "Paris"}}]', "required", "", True),
        ("a < b <tool", "auto", "a < b <tool", False),  # it could have become a call's beginning
    ],
)
def test_what_is_known_only_at_the_end_comes_with_a_last_piece_that_has_no_text(
    door: Running, backend: FakeBackend, text: str, choice: Any, content: str, called: bool
) -> None:
    backend.text = text  # the stop token is an output of its own, and no text
    chunks = list(
        client(door).chat.completions.create(
            model="tiny", messages=ASK, tools=TOOLS, tool_choice=choice, stream=True
        )
    )
    deltas = [c.choices[0].delta for c in chunks]
    assert "".join(d.content or "" for d in deltas) == content
    functions = [t.function for d in deltas for t in d.tool_calls or [] if t.function]
    assert "".join(f.name or "" for f in functions) == ("weather" if called else "")
    arguments = "".join(f.arguments or "" for f in functions)
    assert (json.loads(arguments) if called else arguments) == ({"city": "Paris"} if called else "")
    assert chunks[-1].choices[0].finish_reason == ("tool_calls" if called else "stop")


def test_half_a_pair_of_surrogates_in_a_call_comes_back_and_may_be_sent_again() -> None:
    """A model that is cut within an emoji's escapes, and an agent that repeats what it was sent."""
    own = ModelTokenizer(make_tokenizer(CHATML))
    backend = FakeBackend(own, text=CALL.replace("Paris", "\\ud83d"))
    with serve(backend, own) as running:
        for stream in (False, True):
            body: dict[str, Any] = {"messages": ASK, "tools": TOOLS, "stream": stream}
            answer = running.post("/v1/chat/completions", body)
            assert (answer.status_code, "INTERNAL" in answer.text) == (200, False)
        message = running.post("/v1/chat/completions", {"messages": ASK, "tools": TOOLS}).json()["choices"][
            0
        ]["message"]
        assert "\\ud83d" in message["tool_calls"][0]["function"]["arguments"]
        again = running.post("/v1/chat/completions", {"messages": [*ASK, message, *ASK]})
        assert again.status_code == 200
        assert "\ufffd" in own.decode(backend.requests[-1].prompt, skip_special=False)


def test_references_within_a_tools_schema_hold_in_the_grammar_of_all_tools(
    door: Running, backend: FakeBackend
) -> None:
    """Schemas of pydantic have them for each class. `const` is data, and a property may be named `$ref`."""

    def tool(name: str, values: list[str]) -> dict[str, Any]:
        data = {"const": {"$ref": "#"}}
        properties = {"c": {"$ref": "#/$defs/C"}, "default": {"$ref": "#/$defs/C"}, "$ref": data}
        schema = {"properties": properties, "$defs": {"C": {"enum": values}}}
        return {"type": "function", "function": {"name": name, "parameters": schema}}

    tools = [tool("a", ["P"]), tool("b", ["R"])]
    body = {"messages": ASK, "tools": tools, "tool_choice": "required"}
    assert (answer := door.post("/v1/chat/completions", body)).status_code == 200, answer.text
    grammar = backend.requests[0].sampling.grammar
    assert grammar is not None
    assert LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(grammar.text)) == ""
    whole = json.loads(grammar.text)
    for call, values in zip(whole["items"]["anyOf"], (["P"], ["R"]), strict=True):
        properties = call["properties"]["arguments"]["properties"]
        for name in ("c", "default"):
            found = whole
            for step in properties[name]["$ref"].removeprefix("#/").split("/"):
                found = found[int(step) if isinstance(found, list) else step]
            assert found == {"enum": values}
        assert properties["$ref"] == {"const": {"$ref": "#"}}


LFM_MARKS = ["<|tool_call_start|>", "<|tool_call_end|>"]


@pytest.mark.parametrize(
    ("template", "special", "said"),
    [
        ("<think></think><tool_call>", [], f"<think>I must ask.\n{CALL}"),
        ("<think></think><tool_call>", [], f"<think>I must ask.\n{CALL}\n</think>"),
        # LFM2.5: its template shows no mark.
        ("", LFM_MARKS, '[weather(city="Paris")]'.join(LFM_MARKS)),
    ],
)
def test_a_call_within_the_reasoning_or_by_a_mark_of_the_vocabulary_ends_a_turn(
    template: str, special: list[str], said: str
) -> None:
    made = make_tokenizer(CHATML.replace("<tool_call>", "CALLS") + f"{{# {template} #}}")
    made.add_special_tokens({"additional_special_tokens": special})
    own = ModelTokenizer(made)
    with serve(FakeBackend(own, text=said, step=2), own) as running:
        asked: Any = {"model": "tiny", "messages": ASK, "tools": TOOLS}
        choice = running.post("/v1/chat/completions", asked).json()["choices"][0]
        chunks = list(running.openai().chat.completions.create(**asked, stream=True))
    message = choice["message"]
    assert (choice["finish_reason"], message["content"]) == ("tool_calls", None)
    assert message.get("reasoning_content") == ("I must ask." if template else None)
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"city": "Paris"}
    called = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or [] if call.function]
    assert json.loads("".join(c.function.arguments or "" for c in called if c.function)) == {"city": "Paris"}
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_the_names_of_allowed_tools_are_looked_up_and_not_gone_through(tokenizer: ModelTokenizer) -> None:
    """A body of 8 MiB with 50,000 tools, all of them allowed, took a minute."""

    def seconds(count: int) -> float:
        tools = [{"type": "function", "function": {"name": f"f{i}"}} for i in range(count)]
        allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": tools}}
        messages = [{"role": "user", "content": "hi"}]
        body = msgspec.convert({"messages": messages, "tools": tools, "tool_choice": allowed}, ChatBody)

        def once() -> float:
            began = time.thread_time()
            with pytest.raises(BadParam, match="at most 256"):
                tool_use(body, tokenizer)
            return time.thread_time() - began

        return min(once() for _ in range(3))

    assert seconds(32_000) < 32 * seconds(4_000), "about eight times, and not its square"
