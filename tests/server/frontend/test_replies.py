"""Reasoning, calls and text in what a model says: the same parts, however its text is cut."""

import json
import time
from typing import Any

import msgspec
import pytest
from frontend_rig import CHATML, FakeBackend, Running, make_tokenizer, serve
from hypothesis import given, settings
from hypothesis import strategies as st
from test_tool_calls import ASK, CALL, TOOLS

from segue.engine.request import Reasoning
from segue.server.frontend.call_families import family_of
from segue.server.frontend.chat import ChatPrompt, ReplyForm, ToolUse
from segue.server.frontend.reply_parts import Part, ReplyParser, Thought, ToolCall
from segue.server.frontend.response_template import ResponseForm
from segue.server.frontend.tokenizer import ModelTokenizer
from segue.server.frontend.tools import ForcedParser

SCHEMA = {
    "days": {"type": "integer"},
    "city": {"type": "string"},
    "near": {"anyOf": [{"type": "null"}, {"type": "array"}]},
    "warm": {"type": "boolean"},
}
SHOWN: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": SCHEMA}}}
]
#: As transformers has it for Qwen 3, and with XML as for Qwen 3.5.
RESPONSE: dict[str, Any] = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
            "close_pattern": r"</function>\s*</tool_call>",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>"},
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"close_pattern": r"\s*(?:<\|im_end\|>)", "content": "text"},
    },
}
HEAD = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
XML = (
    "<tool_call>\n<function=f>\n<parameter=days>\n3\n</parameter>\n<parameter=city>\nParis\nFrance\n</parameter>"
    "\n<parameter=near>\n[1]\n</parameter>\n<parameter=warm>\nTrue\n</parameter>\n</function>\n</tool_call>"
)
TYPED = {"days": 3, "city": "Paris\nFrance", "near": [1], "warm": True}


def parser(
    template: str | None, prompt: str = "", *, response: bool = False, tools: bool = True
) -> ReplyParser:
    use = ToolUse(SHOWN if tools else None)
    own = ResponseForm(RESPONSE) if response else None
    form = ReplyForm(ChatPrompt(prompt, []), use, template, family_of(template), own)
    made = form.make()
    assert made is not None
    return made


def read(made: ReplyParser, pieces: list[str]) -> tuple[str, str, list[tuple[str, str]]]:
    """The reasoning, the text and the calls; their order is checked by their places in the text."""
    parts: list[Part] = [part for piece in pieces for part in made.feed(piece)] + made.finish()
    return (
        "".join(p.text for p in parts if isinstance(p, Thought)),
        "|".join(text for text in _texts(parts)),
        [(p.name, p.arguments) for p in parts if isinstance(p, ToolCall)],
    )


def _texts(parts: list[Part]) -> list[str]:
    """The text before, between and after calls and thoughts."""
    texts = [""]
    for part in parts:
        if isinstance(part, str):
            texts[-1] += part
        elif isinstance(part, ToolCall):
            texts.append("")
    return texts


FRAGMENTS = st.sampled_from(
    [
        *(
            "<think>",
            "</think>",
            "[THINK]",
            "[/THINK]",
            "<tool_call>",
            "</tool_call>",
            "[TOOL_CALLS]",
            "[ARGS]",
        ),
        *("<|tool_call_start|>", "<|tool_call_end|>", "<|python_tag|>", "<|im_end|>", "<function=f>"),
        *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<tool", "</", "<", "[", "]", "f(city='x')"),
        *(XML, CALL, '{"name": "f", "parameters": {}}', "</function>", "<parameter=days>", "</parameter>"),
        *(" ", "\n", "\n\n", " " * 70, " " * 300, "word", "a < b"),
    ]
)


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(
    begun=st.booleans(),
    text=st.lists(FRAGMENTS, max_size=12).map("".join),
    data=st.data(),
)
def test_the_parts_do_not_depend_on_where_the_text_is_cut(
    begun: bool, text: str, data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    prompt = HEAD + ("<think>\n" if begun else "")
    made = [parser(None, prompt, response=True) for _ in range(3)]
    whole = read(made[0], [text])
    assert read(made[1], pieces) == whole
    assert read(made[2], list(text)) == whole


@pytest.mark.parametrize("response", [False, True])
@pytest.mark.parametrize(
    ("prompt", "text", "expected"),
    [
        ("", "<think>\nOne.\n\nTwo.\n</think>\n\nThree. ", ("One.\n\nTwo.", "Three. ", [])),
        ("<think>\n", "One.\n</think>\n\nThree.", ("One.", "Three.", [])),
        ("<think>\n", "cut in the", ("cut in the", "", [])),
        ("<think>\n\n</think>\n\n", "Three.", ("", "Three.", [])),
        ("", "<think></think>Three.", ("", "Three.", [])),
        ("", f"<think>Hm.</think>\n\nNow:\n{XML}\n{XML}", ("Hm.", "Now:||", ["f", "f"])),
        ("", "a </think> b", ("", "a </think> b", [])),
        ("", "<tool_call>\n<function=f>\nnonsense", ("", "<tool_call>\n<function=f>\nnonsense", [])),
    ],
)
def test_reasoning_and_calls(prompt: str, text: str, expected: Any, response: bool) -> None:
    thoughts, texts, calls = read(parser("</think><tool_call>", HEAD + prompt, response=response), [text])
    if not (response and text.endswith("nonsense")):  # its parser takes what it finds in a region
        assert (thoughts, texts.rstrip() if response else texts, [name for name, _ in calls]) == (
            expected[0],
            expected[1].rstrip() if response else expected[1],
            expected[2],
        )
    for _, arguments in calls:
        assert json.loads(arguments) == (TYPED if not text.endswith("nonsense") else {})


@pytest.mark.parametrize(
    ("said", "thoughts", "argument"),
    [
        (f"<think>I ask.\n{XML}", "I ask.", TYPED),
        (f"<think>I ask.\n{XML}\n</think>", "I ask.", TYPED),
        (
            XML.replace("France", "</parameter> </tool_call>"),
            "",
            TYPED | {"city": "Paris\n</parameter> </tool_call>"},
        ),
        (XML.replace("\nFrance\n</parameter>", ""), "", TYPED | {"city": "Paris"}),
    ],
)
def test_a_response_template_of_a_known_family_has_its_calls_read_as_tolerantly(
    said: str, thoughts: str, argument: dict[str, Any]
) -> None:
    for pieces in ([said], list(said)):
        found = read(parser(None, HEAD, response=True), pieces)
        assert (found[0], [(name, json.loads(a)) for name, a in found[2]]) == (thoughts, [("f", argument)])


def test_a_model_that_writes_about_the_marks_writes_text() -> None:
    text = "Write <think> first, then </think>."
    assert read(parser("</think>"), [text]) == ("", text, [])


def test_calls_are_text_where_no_tools_were_given() -> None:
    for response in (False, True):
        made = parser("</think><tool_call>", HEAD, response=response, tools=False)
        assert read(made, ["So: ", XML])[1].split() == ["So:", *XML.split()]


@pytest.mark.slow
def test_a_delimiter_that_never_comes_holds_back_little_and_takes_linear_time() -> None:
    """A template's pattern may begin with any white space."""

    def seconds(count: int) -> float:
        made = parser(None, HEAD, response=True)
        held = 0
        began = time.thread_time()
        for piece in [" word<to", " " * 64, "x", " " * 400] * count:
            held += len(piece) - sum(len(part) for part in made.feed(piece) if isinstance(part, str))
            assert held < 500
        return time.thread_time() - began

    seconds(10)
    assert min(seconds(160) for _ in range(3)) < 20 * min(seconds(20) for _ in range(3))


def test_an_answer_that_the_client_has_begun_is_read_in_linear_time() -> None:
    def seconds(count: int) -> float:
        began = time.thread_time()
        parser(None, HEAD + "<think></think>" * count, response=True)
        return time.thread_time() - began

    seconds(10)
    assert min(seconds(800) for _ in range(3)) < 20 * min(seconds(100) for _ in range(3))


HALF_A_PAIR, TOO_LARGE = '{"a": "\\ud83d"}', '{"a": 1e999}'


@pytest.mark.parametrize("arguments", [HALF_A_PAIR, TOO_LARGE])
@pytest.mark.parametrize(
    ("template", "before", "after"),
    [
        ("<tool_call>", '<tool_call>{"name": "f", "arguments": ', "}</tool_call>"),
        ("[TOOL_CALLS]", "[TOOL_CALLS]f[ARGS]", ""),
        ("[TOOL_CALLS]", '[TOOL_CALLS][{"name": "f", "arguments": ', "}]"),
        ("<|python_tag|>", '{"name": "f", "parameters": ', "}"),
        ("[func_name1(", "[f(x=", ")]"),
        (
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>",
            "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        ),
        ("forced", '[{"name": "f", "arguments": ', "}]"),
    ],
)
def test_a_call_that_json_cannot_say_is_text_and_no_failure(
    template: str, before: str, after: str, arguments: str
) -> None:
    """A model may write half a pair of surrogates, or a number that no float holds."""
    said = before + arguments + after
    made = ForcedParser("calls") if template == "forced" else parser(template)
    thoughts, texts, calls = read(made, [said])
    msgspec.json.encode([thoughts, texts, calls])
    assert texts == said or [name for name, _ in calls] == ["f"]
    if calls and arguments == HALF_A_PAIR:
        assert "\\ud83d" in calls[0][1]


@pytest.mark.parametrize("name", ['"\\ud83d"', '"\\x"'])
def test_a_call_whose_name_is_no_text_is_none(name: str) -> None:
    said = f'{{"name": {name}, "arguments": {{}}}}'
    assert read(parser("<tool_call>"), [f"<tool_call>{said}</tool_call>"])[2] == []
    assert read(ForcedParser("calls"), [f"[{said}"]) == ("", "", [])


@pytest.mark.parametrize("response", [False, True])
@pytest.mark.parametrize(
    ("kind", "value"), [("number", "NaN"), ("number", "1e999"), ("array", "[1e999]"), (5, "1"), ([5], "1")]
)
def test_a_value_in_xml_that_its_schema_does_not_take_stays_text(
    kind: object, value: str, response: bool
) -> None:
    tools = [
        {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": kind}}}}}
    ]
    form = ResponseForm(RESPONSE) if response else None
    made = ReplyForm(ChatPrompt(HEAD, []), ToolUse(tools), None, family_of("<tool_call>"), form).make()
    assert made is not None
    said = f"<tool_call><function=f><parameter=a>{value}</parameter></function></tool_call>"
    assert read(made, [said])[2] == [("f", json.dumps({"a": value}))]


# ---- through the server -------------------------------------------------------------------------

THINKING = CHATML + "{% if reasoning_effort %}{{ reasoning_effort }}{% endif %}{# <think></think> #}"
SAID = f"<think>\nIt is in France.\n</think>\n\nI ask. {CALL}"


@pytest.fixture(scope="module")
def thinker() -> ModelTokenizer:
    return ModelTokenizer(make_tokenizer(THINKING))


def whole_and_streamed(running: Running, **asked: Any) -> tuple[Any, dict[str, Any]]:
    body: dict[str, Any] = {"model": "tiny", "messages": ASK, "tools": TOOLS, **asked}
    answer = running.post("/v1/chat/completions", body).json()
    chunks = list(
        running.openai().chat.completions.create(
            **{k: v for k, v in body.items() if k != "include_reasoning"},
            stream=True,
            stream_options={"include_usage": True},
            extra_body={k: v for k, v in body.items() if k == "include_reasoning"},
        )
    )
    joined: dict[str, Any] = {"content": "", "reasoning_content": "", "arguments": "", "finish": None}
    for chunk in chunks[:-1]:
        choice = chunk.choices[0]
        joined["content"] += choice.delta.content or ""
        joined["reasoning_content"] += getattr(choice.delta, "reasoning_content", None) or ""
        for call in choice.delta.tool_calls or []:
            joined["arguments"] += (call.function and call.function.arguments) or ""
        joined["finish"] = choice.finish_reason or joined["finish"]
    joined["usage"] = json.loads(chunks[-1].model_dump_json(exclude_unset=True))["usage"]
    return answer, joined


def test_an_answer_and_a_stream_have_the_same_reasoning_text_calls_and_usage(thinker: ModelTokenizer) -> None:
    backend = FakeBackend(thinker, text=SAID, step=3)
    with serve(backend, thinker) as running:
        answer, streamed = whole_and_streamed(running)
        message = answer["choices"][0]["message"]
        assert message["reasoning_content"] == streamed["reasoning_content"] == "It is in France."
        assert message["content"] == streamed["content"] == "I ask."
        assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"city": "Paris"}
        assert json.loads(streamed["arguments"]) == {"city": "Paris"}
        assert answer["choices"][0]["finish_reason"] == streamed["finish"] == "tool_calls"
        assert answer["usage"] == streamed["usage"]
        thought = len(thinker.encode(SAID[: SAID.index("</think>") + 8], special=False))
        counted = answer["usage"]["completion_tokens_details"]["reasoning_tokens"]
        assert thought <= counted <= thought + 3
        hidden, streamed = whole_and_streamed(running, include_reasoning=False)
        assert "reasoning_content" not in hidden["choices"][0]["message"]
        assert (streamed["reasoning_content"], streamed["content"]) == ("", "I ask.")
        assert hidden["usage"] == answer["usage"]


def test_reasoning_that_max_tokens_cuts_is_no_text(thinker: ModelTokenizer) -> None:
    with serve(FakeBackend(thinker, text=SAID), thinker) as running:
        answer, streamed = whole_and_streamed(running, max_tokens=12)
        choice = answer["choices"][0]
        assert choice["message"]["content"] is None
        assert SAID.startswith("<think>\n" + choice["message"]["reasoning_content"])
        assert choice["finish_reason"] == streamed["finish"] == "length"
        assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 12}


def test_an_effort_reaches_the_template_or_is_named(
    thinker: ModelTokenizer, tokenizer: ModelTokenizer
) -> None:
    body: dict[str, Any] = {"messages": ASK, "max_tokens": 2}
    backend = FakeBackend(thinker)
    with serve(backend, thinker) as running:
        assert running.post("/v1/chat/completions", body | {"reasoning_effort": "high"}).status_code == 200
        assert thinker.decode(backend.requests[-1].prompt, skip_special=False).endswith("high")
        wrong = running.post("/v1/chat/completions", body | {"reasoning_effort": "much"})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "reasoning_effort")
    with serve(FakeBackend(tokenizer), tokenizer) as running:
        for effort, named in (("none", None), ("medium", None), ("low", "reasoning_effort"), (None, None)):
            answer = running.post("/v1/chat/completions", body | {"reasoning_effort": effort})
            assert (answer.status_code, answer.headers.get("x-segue-unknown-fields")) == (200, named), effort
    switched = ModelTokenizer(make_tokenizer(CHATML + "{{ enable_thinking }}"))
    backend = FakeBackend(switched)
    with serve(backend, switched) as running:
        for effort, end in (("none", "False"), ("low", "True")):
            running.post("/v1/chat/completions", body | {"reasoning_effort": effort})
            assert switched.decode(backend.requests[-1].prompt, skip_special=False).endswith(end)


ASK_JSON: dict[str, Any] = {"response_format": {"type": "json_object"}}
FORCED: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required"}


@pytest.mark.parametrize("asked", [ASK_JSON, FORCED])
@pytest.mark.parametrize(
    ("end", "said", "begun"),
    [
        ("", "<think>\nHm.\n</think>\n\n", False),
        ("", "", False),
        ("<think>\n", "Hm.\n</think>\n\n", True),
        ("<think>\n\n</think>\n\n", "", None),
    ],
)
def test_a_constrained_answer_may_reason_first(
    asked: dict[str, Any], end: str, said: str, begun: bool | None
) -> None:
    made = make_tokenizer(
        CHATML + "{# <think></think> #}{% if add_generation_prompt %}" + end + "{% endif %}"
    )
    made.add_tokens(["<think>", "</think>"])
    own, text = ModelTokenizer(made), '[{"name": "weather", "arguments": {}}]'
    backend = FakeBackend(own, text=said + text, step=2)
    with serve(backend, own) as running:
        answer, streamed = whole_and_streamed(running, **({"tools": None} | asked))
    message = answer["choices"][0]["message"]
    assert message.get("reasoning_content") == ("Hm." if said else None)
    assert streamed["reasoning_content"] == ("Hm." if said else "")
    if asked is FORCED:
        assert message["tool_calls"][0]["function"] == {"name": "weather", "arguments": "{}"}
    else:
        assert (message["content"], streamed["content"]) == (text, text)
    marks = [own.token_id("<think>"), own.token_id("</think>")]
    for request in backend.requests:
        found = request.sampling.reasoning
        assert found == (None if begun is None else Reasoning(marks[0], marks[1], begun))


def test_a_constrained_answer_does_not_reason_where_the_reasoning_is_to_stay_in_the_text() -> None:
    made = make_tokenizer(CHATML + "{# <think></think> #}")
    made.add_tokens(["<think>", "</think>"])
    own = ModelTokenizer(made)
    backend = FakeBackend(own, text="{}")
    with serve(backend, own) as running:
        for more in ({"separate_reasoning": False}, {"response_format": {"type": "text"}}):
            assert (
                running.post("/v1/chat/completions", {"messages": ASK} | ASK_JSON | more).status_code == 200
            )
        # The form of the calls that the model makes itself leaves it its text.
        function = {**TOOLS[0]["function"], "strict": True}
        calls = {"tools": [{"type": "function", "function": function}], "separate_reasoning": False}
        assert running.post("/v1/chat/completions", {"messages": ASK} | calls).status_code == 200
    marks = Reasoning(*(own.token_id(mark) or 0 for mark in ("<think>", "</think>")))
    assert [request.sampling.reasoning for request in backend.requests] == [None, None, marks]
    assert backend.requests[-1].sampling.grammar is not None


def test_marks_of_several_tokens_leave_all_of_an_answer_to_its_grammar(thinker: ModelTokenizer) -> None:
    with serve(FakeBackend(thinker, text="<think>a</think>"), thinker) as running:
        body: dict[str, Any] = {"messages": ASK, "guided_regex": ".*"}
        message = running.post("/v1/chat/completions", body).json()["choices"][0]["message"]
        assert message == {"role": "assistant", "content": "<think>a</think>"}


def test_a_models_own_response_template_comes_first_and_one_that_is_wrong_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    hf = make_tokenizer()
    hf.response_template = RESPONSE
    own = ModelTokenizer(hf)
    with serve(FakeBackend(own, text=f"<think>Hm.</think>So.\n{XML}"), own) as running:
        body: dict[str, Any] = {"messages": ASK, "tools": SHOWN}
        choice = running.post("/v1/chat/completions", body).json()["choices"][0]
        assert choice["finish_reason"] == "tool_calls"
        assert (choice["message"]["reasoning_content"], choice["message"]["content"]) == ("Hm.", "So.")
        assert json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"]) == TYPED
        raw = running.post("/v1/chat/completions", body | {"separate_reasoning": False}).json()
        assert raw["choices"][0]["message"]["content"] == "<think>Hm.</think>So."
    hf.response_template = {"version": 9}
    assert ModelTokenizer(hf).response is None
    assert "event=response_template_refused" in caplog.text
