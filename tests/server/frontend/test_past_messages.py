"""Past messages as clients send them back, and the prompts that templates of many families make of them."""

import json
from typing import Any

import pytest
from frontend_rig import CHATML, FakeBackend, make_tokenizer, serve
from test_tool_calls import ASK, CALL, TOOLS

from segue.server.frontend.past_messages import PastMessage, TemplateForm, checked
from segue.server.frontend.problems import BadParam
from segue.server.frontend.tokenizer import ModelTokenizer

# Templates in the style of model families: what they ask of messages, and how they show calls.

#: Qwen3-Coder, GLM: walks through the arguments.
WALKS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}"
    "[{{ c.function.name }}"
    "{% for k, v in c.function.arguments|items %} {{ k }}={{ v if v is string else v|tojson }}{% endfor %}]"
    "{% endfor %}{% endfor %}"
)
#: Hermes, Qwen: writes the arguments as JSON.
JSON = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}"
    "[{{ c.function.name }} "
    "{{ c.function.arguments|tojson }}]{% endfor %}{% endfor %}"
)
#: DeepSeek V3.1: joins the arguments as text.
JOINS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
    "{{ '[' + c.function.name + ' ' + c.function.arguments + ']' }}{% endfor %}{% endfor %}"
)
#: Prints the arguments: those of an object would be Python's.
PRINTS = JOINS.replace(" + c.function.arguments + ']'", " ~ c.function.arguments ~ ']'")
#: DeepSeek R1: shows calls only where the content is none.
NONE_CONTENT = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' and m.content is none %}"
    "{% for c in m.tool_calls %}{{ '[' + c.function.name + ' ' + c.function.arguments + ']' }}{% endfor %}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
#: Mistral 7B, Nemo: ids of nine letters and digits; system messages are not shown.
NINE = (
    "{% if tools %}{{ tools|tojson }}{% endif %}"
    "{% for m in messages %}{% if m.role == 'user' %}<user>{{ m.content }}"
    "{% elif m.tool_calls is defined %}<calls>{% for c in m.tool_calls %}{% if c.id|length != 9 %}"
    "{{ raise_exception('nine') }}{% endif %}"
    "[{{ c.id }} {{ c.function.name }} {{ c.function.arguments|tojson }}]"
    "{% endfor %}{% elif m.role == 'assistant' %}<assistant>{{ m.content }}{% elif m.role == 'tool' %}"
    "{% if m.tool_call_id|length != 9 %}{{ raise_exception('nine') }}{% endif %}"
    "<result {{ m.tool_call_id }}>{{ m.content }}{% endif %}{% endfor %}{# [TOOL_CALLS] #}"
)
#: Llama 3.1: a message with calls has exactly one.
ONE_CALL = (
    "{% for m in messages %}<{{ m.role }}>{% if 'tool_calls' in m %}{% if m.tool_calls|length != 1 %}"
    "{{ raise_exception('one call') }}{% endif %}[{{ m.tool_calls[0].function.name }} "
    "{{ m.tool_calls[0].function.arguments|tojson }}]{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
#: Qwen3: splits the content, which has to be a text.
SPLITS = JSON.replace("{{ m.content }}", "{{ (m.content.split('</think>')|last).lstrip() }}")
#: GLM-5: another form of results than a text has no text parts.
ASKS = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content or [] %}{{ part.output or '?' }}{% endfor %}{% endif %}{% endfor %}"
)
#: Qwen3.5: a system message comes first.
SYSTEM_FIRST = (
    "{% for m in messages %}"
    "{% if m.role == 'system' and not loop.first %}{{ raise_exception('first') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}"
)
#: Llama 2, gpt-oss: later system messages are not shown.
SYSTEM_ONCE = (
    "{% for m in messages %}{% if m.role != 'system' or loop.first %}<{{ m.role }}>{{ m.content }}{% endif %}"
    "{% endfor %}"
)
#: An older DeepSeek-R1: the last system message takes the place of the first one.
SYSTEM_LAST = (
    "{% set ns = namespace(text='') %}"
    "{% for m in messages if m.role == 'system' %}{% set ns.text = m.content %}{% endfor %}"
    "<system>{{ ns.text }}"
    "{% for m in messages if m.role != 'system' %}<{{ m.role }}>{{ m.content }}{% endfor %}"
)
#: Gemma 3: the first part of a first system message.
FIRST_PART = (
    "{% if messages[0].role == 'system' %}<system>{{ messages[0].content[0].text }}{% endif %}"
    "{% for m in messages if m.role != 'system' %}<{{ m.role }}>{{ m.content }}{% endfor %}"
)
#: Gemma: no system messages, no tools; roles alternate.
ALTERNATE = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('alternate') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}"
)
#: A template for media: reads parts alone.
PARTS = (
    "{% for m in messages %}<{{ m.role }}>{% for part in m.content %}"
    "{% if part.type == 'text' %}({{ part.text }}){% endif %}{% endfor %}{% endfor %}"
)
#: SmolLM2: any role, nothing of tools.
PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
CALLS_AS_TEXT = '<user>q<assistant>[{"name": "f", "arguments": {"a": "b"}}]<%s>sun'


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def user(*texts: str) -> dict[str, Any]:
    parts = [{"type": "text", "text": text} for text in texts]
    return {"role": "user", "content": texts[0] if len(texts) == 1 else parts}


def said(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def call(arguments: Any, call_id: Any = "call_1", name: str = "f") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def result(content: Any, call_id: Any = "call_1") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def turn(arguments: Any, content: Any = None) -> list[dict[str, Any]]:
    return [user("q"), said(content, tool_calls=[call(arguments)]), result("sun")]


#: a name, a template, messages as a client sends them, the prompt
ROWS: list[tuple[str, str, list[dict[str, Any]], str]] = [
    (
        "no calls in a list",
        ONE_CALL,
        [user("a"), said("b", tool_calls=[]), user("c")],
        "<user>a<assistant>b<user>c",
    ),
    ("null for calls", ONE_CALL, [user("a"), said("b", tool_calls=None)], "<user>a<assistant>b"),
    ("arguments as text, walked through", WALKS, turn('{"a": "b"}'), "<user>q<assistant>[f a=b]<tool>sun"),
    (
        "arguments as an object, walked through",
        WALKS,
        turn({"a": [1]}),
        "<user>q<assistant>[f a=[1]]<tool>sun",
    ),
    ("arguments as text, written as JSON", JSON, turn('{"a": 1}'), '<user>q<assistant>[f {"a": 1}]<tool>sun'),
    ("arguments encoded twice", JSON, turn('"{\\"a\\": 1}"'), '<user>q<assistant>[f {"a": 1}]<tool>sun'),
    ("no arguments", JSON, turn(""), "<user>q<assistant>[f {}]<tool>sun"),
    ("null for arguments", WALKS, turn(None), "<user>q<assistant>[f]<tool>sun"),
    ("a list for arguments", WALKS, turn("[1]"), "<user>q<assistant>[f arguments=[1]]<tool>sun"),
    ("a number for arguments", WALKS, turn(5), "<user>q<assistant>[f arguments=5]<tool>sun"),
    ("cut arguments", WALKS, turn('{"a": "b'), '<user>q<assistant>[f arguments={"a": "b]<tool>sun'),
    ("cut arguments, joined", JOINS, turn('{"a": "b'), '<user>q<assistant>[f {"a": "b]<tool>sun'),
    ("arguments as text, joined", JOINS, turn('{"a":1}'), '<user>q<assistant>[f {"a":1}]<tool>sun'),
    ("arguments as an object, joined", JOINS, turn({"a": "ü"}), '<user>q<assistant>[f {"a": "ü"}]<tool>sun'),
    ("arguments as an object, printed", PRINTS, turn({"a": 1}), '<user>q<assistant>[f {"a": 1}]<tool>sun'),
    ("null for arguments, joined", JOINS, turn(None), "<user>q<assistant>[f {}]<tool>sun"),
    ("calls without content", NONE_CONTENT, turn('{"a": 1}', ""), '<user>q<assistant>[f {"a": 1}]<tool>sun'),
    (
        "calls and content",
        NONE_CONTENT,
        turn("", "I ask."),
        "<user>q<assistant>I ask.<assistant>[f {}]<tool>sun",
    ),
    (
        "a text beside calls",
        ONE_CALL,
        turn("", "I ask."),
        "<user>q<assistant>I ask.<assistant>[f {}]<tool>sun",
    ),
    ("null for content", NONE_CONTENT, [user("q"), said(None)], "<user>q<assistant>"),
    ("null for content that is split", SPLITS, turn("{}"), "<user>q<assistant>[f {}]<tool>sun"),
    (
        "calls and no key for the content",
        SPLITS,
        [user("q"), {"role": "assistant", "tool_calls": [call("")]}],
        "<user>q<assistant>[f {}]",
    ),
    (
        "several texts of a result",
        ASKS,
        [user("q"), said("a"), result(user("15 degrees", "cloudy")["content"])],
        "<user>q<assistant>a<tool>15 degrees\ncloudy",
    ),
    ("calls that are not shown", PLAIN, turn('{"a": "b"}'), CALLS_AS_TEXT % "tool"),
    ("neither calls nor results", ALTERNATE, turn({"a": "b"}), CALLS_AS_TEXT % "user"),
    (
        "several calls where one is taken",
        ONE_CALL,
        [
            user("q"),
            said("", tool_calls=[call("{}"), call("", "2", "g")]),
            result("x", "2"),
            result("y"),
            user("r"),
        ],
        "<user>q<assistant>[f {}]<tool>y<assistant>[g {}]<tool>x<user>r",
    ),
    (
        "OpenAI's older form",
        JSON,
        [
            user("q"),
            said(None, function_call={"name": "f", "arguments": "{}"}),
            {"role": "function", "content": "y"},
        ],
        "<user>q<assistant>[f {}]<tool>y",
    ),
    (
        "a call of a custom tool",
        JSON,
        [
            user("q"),
            said("", tool_calls=[{"id": "1", "type": "custom", "custom": {"name": "p", "input": "x"}}]),
        ],
        '<user>q<assistant>[p {"input": "x"}]',
    ),
    ("later system messages", PLAIN, [system("a"), user("b"), system("c")], "<system>a<user>b<system>c"),
    ("later ones are refused", SYSTEM_FIRST, [system("a"), user("b"), system("c")], "<system>a\n\nc<user>b"),
    ("later ones are not shown", SYSTEM_ONCE, [system("a"), user("b"), system("c")], "<system>a\n\nc<user>b"),
    (
        "two at the beginning",
        SYSTEM_FIRST,
        [system("a"), {"role": "developer", "content": "b"}, user("c")],
        "<system>a\n\nb<user>c",
    ),
    ("later ones displace it", SYSTEM_LAST, [system("a"), user("b"), system("c")], "<system>a\n\nc<user>b"),
    ("a late first one", SYSTEM_FIRST, [user("b"), system("c"), user("d")], "<system>c<user>b<user>d"),
    (
        "a late developer",
        SYSTEM_FIRST,
        [user("b"), {"role": "developer", "content": "c"}, user("d")],
        "<system>c<user>b<user>d",
    ),
    (
        "none is shown",
        NINE,
        [system("a"), user("b"), said("c"), system("d")],
        "<user>a<user>b<assistant>c<user>d",
    ),
    (
        "none is taken and roles alternate",
        ALTERNATE,
        [system("a"), user("b"), said("c"), system("d"), user("e"), user("f")],
        "<user>a\n\nb<assistant>c<user>d\n\ne\n\nf",
    ),
    ("several texts", PLAIN, [user("one.", "two.")], "<user>one.\ntwo."),
    ("an empty text among them", PLAIN, [user("one.", "", "two.")], "<user>one.\ntwo."),
    ("several texts as parts", PARTS, [user("one.", "two."), said("x")], "<user>(one.\ntwo.)<assistant>(x)"),
    ("one part is read", FIRST_PART, [user("b") | {"role": "system"}, user("a", "b")], "<system>b<user>a\nb"),
    (
        "several texts where one part is read",
        FIRST_PART,
        [user("a", "b") | {"role": "system"}, user("c")],
        "<system>a\nb<user>c",
    ),
    ("a text as a part", PARTS, [system("s"), user("one.")], "<system>(s)<user>(one.)"),
    (
        "parts of a past answer",
        PLAIN,
        [
            user("q"),
            said([{"type": "thinking", "thinking": "Hm."}, "a", {"type": "refusal", "refusal": "no"}]),
        ],
        "<user>q<assistant>a\nno",
    ),
    (
        "a result of a kind that nobody knows",
        PLAIN,
        [user("q"), said("a"), result([{"type": "tool_reference", "tool_name": "f", "cache_control": {}}])],
        '<user>q<assistant>a<tool>{"type": "tool_reference", "tool_name": "f"}',
    ),
    ("no text of a tool", PLAIN, [user("q"), said("a"), result(None)], "<user>q<assistant>a<tool>"),
]


@pytest.mark.parametrize(
    ("template", "messages", "prompt"), [row[1:] for row in ROWS], ids=[row[0] for row in ROWS]
)
def test_a_template_gets_the_messages_in_the_form_that_it_takes(
    template: str, messages: list[dict[str, Any]], prompt: str
) -> None:
    tokenizer = ModelTokenizer(make_tokenizer(template))

    def render(shaped: list[dict[str, Any]]) -> str:
        return tokenizer.render(shaped, None, generation_prompt=True, continue_final=False, variables={})

    before = json.dumps(messages)
    text, last = tokenizer.form(tools=False).prompt(checked(messages), render)
    assert text == prompt
    assert text.rstrip(")").endswith(last)
    assert json.dumps(messages) == before, "what the client sent is not changed"


@pytest.mark.parametrize(
    "ids",
    [
        ("call_" + "1" * 24, "call_" + "2" * 24),
        ("a", "b"),
        (1, 2),
        ("abcdefghi", "abcdefgh1"),
        (None, None),
        ("", ""),
    ],
)
def test_ids_of_any_form_are_nine_letters_and_the_same_for_a_call_and_its_result(
    ids: tuple[Any, Any],
) -> None:
    messages = [
        user("q"),
        said("", tool_calls=[call("{}", ids[0]), call("{}", ids[1], "g")]),
        result("one", ids[0]),
        result("two", ids[1]),
    ]
    form = ModelTokenizer(make_tokenizer(NINE)).form(tools=False)
    _, asked, *results = form.shaped(checked(messages))
    shown = [made["id"] for made in asked["tool_calls"]]
    assert [found["tool_call_id"] for found in results] == shown
    assert [found["name"] for found in results] == ["f", "g"]
    assert len(set(shown)) == 2
    for given, short in zip(ids, shown, strict=True):
        assert len(short) == 9
        assert short.isalnum()
        assert short == given or given != "abcdefghi", "an id that the template takes stays"


def test_fields_that_are_null_or_of_no_call_are_not_shown_to_a_template() -> None:
    """SDKs dump nulls and fields of their own; templates ask for keys, and print whole calls."""
    dumped = {**call("{}"), "index": 0, "extra_content": {"x": 1}}
    dumped["function"]["parsed_arguments"] = {}
    message = said(
        "a", refusal=None, audio=None, function_call=None, reasoning="Hm.", name=None, tool_calls=[dumped]
    )
    [shaped] = TemplateForm().shaped(checked([message]))
    assert shaped == {
        "role": "assistant",
        "content": "a",
        "reasoning_content": "Hm.",
        "tool_calls": [{"id": "call_1", "type": "function", "function": {"name": "f", "arguments": {}}}],
    }


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "messages[0].content[0]"),
        ({"role": "user", "content": [{"type": "txt", "text": "a"}]}, "messages[0].content[0]"),
        ({"role": "tool", "content": [{"type": "input_image"}]}, "messages[0].content[0]"),
        ({"role": "assistant", "tool_calls": {"a": 1}}, "messages[0].tool_calls"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]},
            "messages[0].tool_calls[0].function",
        ),
    ],
)
def test_what_no_template_can_show_is_refused_with_its_place(message: dict[str, Any], param: str) -> None:
    with pytest.raises(BadParam) as caught:
        checked([message])
    assert caught.value.param == param


# ---- through the server -------------------------------------------------------------------------

ARGUMENTS: list[Any] = ['{"city": "Paris"}', '{"city": "Par', "", "[1]"]


def bodies(arguments: str) -> dict[str, dict[str, Any]]:
    """One conversation in the three APIs."""
    parts = ["first.", "second."]
    text = {"type": "text", "text": "I ask."}
    use = {"type": "tool_use", "id": "c1", "name": "weather", "input": arguments}
    return {
        "/v1/chat/completions": {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": t} for t in parts]},
                {"role": "assistant", "content": "I ask.", "tool_calls": [call(arguments, "c1", "weather")]},
                result("sun", "c1"),
                {"role": "system", "content": "Be brief."},
                user("And now?"),
            ]
        },
        "/v1/responses": {
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": t} for t in parts]},
                {"role": "assistant", "content": [{"type": "output_text", "text": "I ask."}]},
                {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": arguments},
                {"type": "function_call_output", "call_id": "c1", "output": "sun"},
                {"role": "developer", "content": "Be brief."},
                user("And now?"),
            ]
        },
        "/v1/messages": {
            "max_tokens": 5,
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": t} for t in parts]},
                {"role": "assistant", "content": [text, use]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "sun"}]},
                {"role": "system", "content": "Be brief."},
                user("And now?"),
            ],
        },
    }


@pytest.mark.parametrize(
    "template",
    [CHATML, WALKS, JSON, JOINS, NONE_CONTENT, NINE, ONE_CALL, SYSTEM_FIRST, SYSTEM_ONCE, ALTERNATE, PARTS],
)
def test_a_conversation_has_the_same_prompt_in_all_three_apis(template: str) -> None:
    tokenizer = ModelTokenizer(make_tokenizer(template))
    backend = FakeBackend(tokenizer)
    with serve(backend, tokenizer) as running:
        for arguments in ARGUMENTS:
            prompts = set()
            for path, body in bodies(arguments).items():
                answer = running.post(path, body)
                assert answer.status_code == 200, answer.text
                prompts.add(tokenizer.decode(backend.requests[-1].prompt, skip_special=False))
            [prompt] = prompts
            assert "first.\nsecond." in prompt
            for text in ("weather", "sun", "Be brief.", "And now?"):
                assert text in prompt


def test_an_agent_may_send_the_server_s_own_ids_to_a_template_that_takes_others() -> None:
    tokenizer = ModelTokenizer(make_tokenizer(NINE))
    backend = FakeBackend(tokenizer, text='[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "P"}}]')
    with serve(backend, tokenizer) as running:
        body: dict[str, Any] = {"messages": ASK, "tools": TOOLS}
        message = running.post("/v1/chat/completions", body).json()["choices"][0]["message"]
        body["messages"] = [*ASK, message, result("sun", message["tool_calls"][0]["id"])]
        assert running.post("/v1/chat/completions", body).status_code == 200


@pytest.mark.parametrize("template", [CHATML, JSON, JOINS])
def test_arguments_that_are_nested_deeply_are_shown_or_a_400(template: str) -> None:
    tokenizer = ModelTokenizer(make_tokenizer(template))
    backend = FakeBackend(tokenizer, context_tokens=10_000)
    with serve(backend, tokenizer) as running:
        for depth in (100, *range(900, 1000, 7), 4000):
            nested = '{"a":' * depth + "1" + "}" * depth
            for arguments in (nested, f"[{nested}]"):
                answer = running.post("/v1/chat/completions", {"messages": turn(arguments)})
                assert answer.status_code in (200, 400), answer.text


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ 100 // thinking_budget }}", "ZeroDivisionError"),
        ("{{ '%s %s' | format(1) }}", "TypeError"),
        ("{% for i in range(1000000000) %}{% endfor %}", "OverflowError"),
        ("{{ messages[9].content }}", "has no element 9"),
        ("{{ raise_exception('roles alternate') }}", "roles alternate"),
    ],
)
def test_whatever_ends_a_template_is_a_400_with_its_reason(template: str, reason: str) -> None:
    tokenizer = ModelTokenizer(make_tokenizer(template))
    with serve(FakeBackend(tokenizer), tokenizer) as running:
        body = {"messages": ASK, "chat_template_kwargs": {"thinking_budget": 0}}
        answer = running.post("/v1/chat/completions", body)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "messages")
        assert "the chat template refuses these messages" in error["message"]
        assert reason in error["message"]


@pytest.mark.parametrize("template", [PLAIN, JOINS, CHATML])
def test_tools_that_the_model_is_never_shown_are_named_in_every_api(
    template: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Clients that send tools with each chat go on; the header and the log say that no call can come."""
    tokenizer = ModelTokenizer(make_tokenizer(template))
    function = TOOLS[0]["function"]
    with serve(FakeBackend(tokenizer), tokenizer) as running:
        for path, body in (
            ("/v1/chat/completions", {"messages": ASK, "tools": TOOLS}),
            ("/v1/chat/completions", {"messages": ASK, "tools": TOOLS, "tool_choice": "required"}),
            ("/v1/responses", {"input": "hi", "tools": [{"type": "function", **function}]}),
            ("/v1/messages", {"messages": ASK, "max_tokens": 5, "tools": [{"name": "weather"}]}),
        ):
            answer = running.post(path, body)
            assert answer.status_code == 200
            assert answer.headers.get("x-segue-unknown-fields") == (None if template is CHATML else "tools")
        hidden = running.post(
            "/v1/chat/completions", {"messages": ASK, "tools": TOOLS, "tool_choice": "none"}
        )
        assert "x-segue-unknown-fields" not in hidden.headers
    assert caplog.text.count("event=tools_not_shown") == (template is not CHATML), "once"


def test_a_message_that_goes_on_is_one_in_every_form() -> None:
    """Also where neighbours had to be joined, and where the content is a list of parts."""
    for template in (PARTS, ALTERNATE):
        tokenizer = ModelTokenizer(make_tokenizer(template))
        backend = FakeBackend(tokenizer)
        with serve(backend, tokenizer) as running:
            body = {"messages": [user("a"), user("b"), said("It is")], "continue_final_message": True}
            assert running.post("/v1/chat/completions", body).status_code == 200
            prompt = tokenizer.decode(backend.requests[-1].prompt, skip_special=False)
            assert prompt.rstrip(")").endswith("It is")


def test_a_past_message_keeps_the_calls_of_both_when_neighbours_are_joined() -> None:
    alternate = ALTERNATE.replace(
        "<{{ m.role }}>",
        "<{{ m.role }}>{% for c in m.tool_calls or [] %}[{{ c.function.name "
        "}} {{ c.function.arguments|tojson }}]{% endfor %}",
    )
    tokenizer = ModelTokenizer(make_tokenizer(alternate))
    backend = FakeBackend(tokenizer, text=CALL)
    with serve(backend, tokenizer) as running:
        messages = [user("q"), said("I ask."), said(None, tool_calls=[call("{}")]), result("sun")]
        assert running.post("/v1/chat/completions", {"messages": messages}).status_code == 200
    prompt = tokenizer.decode(backend.requests[-1].prompt, skip_special=False)
    assert prompt.startswith("<user>q<assistant>")
    assert prompt.endswith("[f {}]I ask.<user>sun")
    assert PastMessage("user", ("a", "", "b")).text == "a\nb"
