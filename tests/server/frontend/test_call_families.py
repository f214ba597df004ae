"""Calls as models really write them, of each family: whole and in any pieces."""

import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from segue.server.frontend.call_bodies import tools_by_name
from segue.server.frontend.call_families import FAMILIES, CallFamily, family_of
from segue.server.frontend.reasoning import ReasoningParser
from segue.server.frontend.reply_parts import Part, ReplyParser, Thought, ToolCall
from segue.server.frontend.tools import ForcedParser, call_parser

TEXT, NUMBER = {"type": "string"}, {"type": "integer"}
PROPERTIES: dict[str, Any] = {
    "city": TEXT,
    "n": NUMBER,
    "tags": {"type": "array"},
    "from": TEXT,
    "from-city": TEXT,
    "m": {"$ref": "#/$defs/M"},
    "all": {"allOf": [{"$ref": "#/$defs/M"}, {"description": "d"}]},
    "level": {"enum": [1, 2]},
    "one": {"const": 1},
    "maybe": {"anyOf": [{"type": "number"}, {"type": "null"}]},
    "on": {"type": "boolean"},
}
NAMES = ("weather", "f", "get-weather", "mcp__my-server__get", "2fa", "class")
TOOLS = tools_by_name(
    [
        {
            "type": "function",
            "function": {
                "name": name,
                "parameters": {"properties": PROPERTIES, "$defs": {"M": {"type": "object"}}},
            },
        }
        for name in NAMES
    ]
)
LFM, DEEPSEEK, CODER, HERMES, MISTRAL, PYTHON, LLAMA = FAMILIES
PARIS = ("weather", {"city": "Paris"})


def made(family: CallFamily, *, thoughts: bool = False, begun: bool = False) -> ReplyParser:
    marks = ("<think>", "</think>")
    if thoughts and family.open:
        return call_parser(family, TOOLS, ReasoningParser(marks, None, begun=begun))
    parser = call_parser(family, TOOLS)
    return ReasoningParser(marks, parser, begun=begun) if thoughts else parser


def read(parser: ReplyParser, pieces: list[str]) -> tuple[str, str, list[tuple[str, Any]]]:
    """The reasoning, the text and the calls."""
    parts: list[Part] = [part for piece in pieces for part in parser.feed(piece)] + parser.finish()
    return (
        "".join(p.text for p in parts if isinstance(p, Thought)),
        "".join(p for p in parts if isinstance(p, str)),
        [(p.name, json.loads(p.arguments)) for p in parts if isinstance(p, ToolCall)],
    )


def coder(*pairs: tuple[str, str], name: str = "weather") -> str:
    inside = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in pairs)
    return f"<tool_call>\n<function={name}>\n{inside}</function>\n</tool_call>"


def deepseek(text: str) -> str:
    call = f"<｜tool▁call▁begin｜>weather<｜tool▁sep｜>{text}<｜tool▁call▁end｜>"
    return f"<｜tool▁calls▁begin｜>{call}<｜tool▁calls▁end｜>"


def hermes(arguments: str, name: str = "weather") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


MARKS = "[TOOL_CALLS] </tool_call> <tool_call> <｜tool▁call▁end｜> <|tool_call_end|> </think>"
IN_TEXT = ("weather", {"city": MARKS})
RAW = ("weather", {"city": "line\n\tnext"})
EXAMPLE = f"Write\n{coder(('city', 'Rome'), name='f')}\nfor Rome."
BARE = coder(("city", "Paris")).removeprefix("<tool_call>\n").removesuffix("\n</tool_call>")
CODE = 'print("</parameter></function></tool_call>", "<function=x>")\nx = "</parameter>"'
#: The family, what the model says, its text that is no call, and its calls.
ROWS: list[tuple[CallFamily, str, str, list[tuple[str, Any]]]] = [
    # marks within a text (k09)
    (HERMES, hermes(json.dumps({"city": MARKS}, ensure_ascii=False)), "", [IN_TEXT]),
    (DEEPSEEK, deepseek(json.dumps({"city": MARKS}, ensure_ascii=False)), "", [IN_TEXT]),
    (
        MISTRAL,
        f'[TOOL_CALLS] [{{"name": "weather", "arguments": {{"city": "{MARKS}"}}}}]',
        "",
        [IN_TEXT],
    ),
    (
        MISTRAL,
        f'[TOOL_CALLS]weather[ARGS]{{"city": "{MARKS}"}}[TOOL_CALLS]f[ARGS]{{}}',
        "",
        [IN_TEXT, ("f", {})],
    ),
    (LFM, f'<|tool_call_start|>[weather(city="{MARKS}")]<|tool_call_end|>ok', "ok", [IN_TEXT]),
    (
        LFM,
        '<|tool_call_start|>[weather(city="""a "b" <|tool_call_end|>""")]<|tool_call_end|>',
        "",
        [("weather", {"city": 'a "b" <|tool_call_end|>'})],
    ),
    (
        LFM,
        '<|tool_call_start|>[weather(city="""x")] <|tool_call_end|> y""")]<|tool_call_end|>',
        "",
        [("weather", {"city": 'x")] <|tool_call_end|> y'})],
    ),
    (HERMES, hermes('{"city": "\\\\\\"</tool_call>"}'), "", [("weather", {"city": '\\"</tool_call>'})]),
    # a text without its end: the marks say where calls are
    (
        HERMES,
        '<tool_call>{"name": "a"b"}</tool_call> and ' + hermes('{"city": "Paris"}'),
        '<tool_call>{"name": "a"b"}</tool_call> and ',
        [PARIS],
    ),
    (HERMES, f"Use <tool_call> so. {hermes('{}')}", "Use <tool_call> so. ", [("weather", {})]),
    (HERMES, f"{hermes('{}').removesuffix('</tool_call>')}{hermes('{}')}", "", [("weather", {})] * 2),
    # a mark before a call that is written again, or that begins no call
    (HERMES, f"<tool_call>\n{hermes('{}')}", "<tool_call>\n", [("weather", {})]),
    (CODER, f"<tool_call>\n{coder(('city', 'Paris'))}", "<tool_call>\n", [PARIS]),
    (LFM, f"<|tool_call_start|>{LFM.example}", "<|tool_call_start|>", [PARIS]),
    (HERMES, f'<tool_call>{{"name": …}} or {hermes("{}")}', '<tool_call>{"name": …} or ', [("weather", {})]),
    (
        HERMES,
        '<tool_call>{"name": …}</tool_call> or ' + hermes(json.dumps({"city": MARKS}, ensure_ascii=False)),
        '<tool_call>{"name": …}</tool_call> or ',
        [IN_TEXT],
    ),
    (
        MISTRAL,
        f'[TOOL_CALLS] or [TOOL_CALLS]f[ARGS]{{"city": "{MARKS}"}}',
        "[TOOL_CALLS] or ",
        [("f", {"city": MARKS})],
    ),
    # any number of marks within a text
    (
        HERMES,
        hermes(json.dumps({"city": MARKS * 50}, ensure_ascii=False)),
        "",
        [("weather", {"city": MARKS * 50})],
    ),
    (CODER, coder(("city", MARKS * 50)), "", [("weather", {"city": MARKS * 50})]),
    # XML of a family of JSON, without the mark that ends it
    (HERMES, coder(("city", "Paris")).removesuffix("\n</tool_call>") + "\nDone.", "Done.", [PARIS]),
    # parameters of XML (k10)
    (CODER, coder(("city", 'print("</parameter>")')), "", [("weather", {"city": 'print("</parameter>")'})]),
    (CODER, coder(("city", CODE), ("n", "3")), "", [("weather", {"city": CODE, "n": 3})]),
    (CODER, coder(("city", EXAMPLE)) + "ok", "ok", [("weather", {"city": EXAMPLE})]),
    (
        CODER,
        coder(("city", "a\n<parameter=other>\nb")),
        "",
        [("weather", {"city": "a\n<parameter=other>\nb"})],
    ),
    (
        CODER,
        coder(("city", "Paris"), ("n", "3")).replace("\n</parameter>", "", 1),
        "",
        [("weather", {"city": "Paris", "n": 3})],
    ),
    (CODER, coder(("city", "Paris")).replace("\n</parameter>", ""), "", [PARIS]),
    (CODER, coder(("city", "Paris")).replace("\n</function>", ""), "", [PARIS]),
    (CODER, coder(("city", "Paris")).replace("\n</parameter>\n</function>", ""), "", [PARIS]),
    (CODER, coder(("city", "Paris")).replace("\n</parameter>", "</parameter>"), "", [PARIS]),
    (CODER, coder(("city", "Paris")).replace("\n", ""), "", [PARIS]),
    (CODER, coder(("city", "\n")), "", [("weather", {"city": "\n"})]),
    (CODER, coder(("city", "")), "", [("weather", {"city": ""})]),
    (
        CODER,
        coder(("tags", "['a', True, {'b': None}]"), ("n", "3.0")),
        "",
        [("weather", {"tags": ["a", True, {"b": None}], "n": 3})],
    ),
    (
        CODER,
        coder(("m", "{'a': 1}"), ("all", '{"a": [1]}'), ("level", "2"), ("one", "1")),
        "",
        [("weather", {"m": {"a": 1}, "all": {"a": [1]}, "level": 2, "one": 1})],
    ),
    (
        CODER,
        coder(("maybe", "None"), ("on", "TRUE"), ("n", "soon")),
        "",
        [("weather", {"maybe": None, "on": True, "n": "soon"})],
    ),
    (CODER, coder(("maybe", "1e999"), ("n", "3.5")), "", [("weather", {"maybe": "1e999", "n": "3.5"})]),
    (
        CODER,
        "<tool_call>\n<function=weather>\n<parameter=city>\nPar",
        "<tool_call>\n<function=weather>\n<parameter=city>\nPar",
        [],
    ),
    (CODER, "<tool_call>\n<function=weather>\nnonsense", "<tool_call>\n<function=weather>\nnonsense", []),
    (CODER, hermes('{"city": "Paris"}'), "", [PARIS]),
    # the mark before a call is missing
    (CODER, "I look.\n\n" + BARE + "\n</tool_call>", "I look.\n\n", [PARIS]),
    (CODER, BARE, "", [PARIS]),
    (CODER, f"{BARE}\n{BARE}\nDone. </tool_call>", "Done. </tool_call>", [PARIS, PARIS]),
    (CODER, BARE + coder(("city", "Paris")) + BARE, "", [PARIS] * 3),
    (CODER, BARE.replace("\n</parameter>", "") + "\n</tool_call>ok", "ok", [PARIS]),
    *(
        (CODER, said, said, [])
        for said in (
            f"Write {BARE} in a line.",
            BARE.replace("weather", "unknown") + "\n</tool_call> ok",
            "<function=weather>\nnonsense\n</function>",
            "<function=weather>\n<parameter=city>\nPar",
            "\n<function",
        )
    ),
    # raw line breaks (k11)
    (HERMES, hermes('{"city": "line\n\tnext"}'), "", [RAW]),
    (DEEPSEEK, deepseek('{"city": "line\n\tnext"}'), "", [RAW]),
    (MISTRAL, '[TOOL_CALLS]weather[ARGS]{"city": "line\n\tnext"}', "", [RAW]),
    (LLAMA, '{"name": "weather", "parameters": {"city": "line\n\tnext"}}', "", [RAW]),
    (LFM, '<|tool_call_start|>[weather(city="line\n\tnext")]<|tool_call_end|>', "", [RAW]),
    (PYTHON, "[weather(city='line\n\tnext')]", "", [RAW]),
    # JSON and lists that are no call (k12)
    *(
        (LLAMA, said, said, [])
        for said in (
            '{"name": "Bob", "age": 3}',
            '{"name": "f", "age": 3}',
            '{"a": 1}',
            '{"name": 1}',
            "Plain {",
        )
    ),
    *(
        (PYTHON, said, said, [])
        for said in (
            "[print(x=1)]",
            "[1, 2]",
            "[]",
            "[f(x=1), g()]",
            "[weather(1)]",
            "[f(x=g())]",
            "[f(**{})]",
            "[f(x=1e999)]",
            "[f(x=b'')]",
            "[f(x='a",
            "[f(x={1: 2})]",
            "[f(x=[1 2])]",
        )
    ),
    (
        LLAMA,
        '<|python_tag|>{"name": "f", "parameters": {}}; {"name": "weather", "parameters": {"city": "Paris"}}',
        "",
        [("f", {}), PARIS],
    ),
    # text after calls that no mark ends: with a mark before them, or in Mistral's list
    (LLAMA, '<|python_tag|>{"name": "f", "parameters": {}};\n{"name": "f"} I used {f}.', "", [("f", {})] * 2),
    (LLAMA, '{"name": "f", "parameters": {}} is its form', '{"name": "f", "parameters": {}} is its form', []),
    (MISTRAL, '[TOOL_CALLS] [{"name": "f", "arguments": {}}]\n\nLet me [look].', "", [("f", {})]),
    (
        MISTRAL,
        '[TOOL_CALLS]f[ARGS]{}[TOOL_CALLS]weather[ARGS]{"city": "Paris"}\n\nI look.',
        "",
        [("f", {}), PARIS],
    ),
    (
        MISTRAL,
        '[TOOL_CALLS] {"name": "f", "arguments": {}}, {"name": "f", "argu',
        '[TOOL_CALLS] {"name": "f", "arguments": {}}, {"name": "f", "argu',
        [],
    ),
    # no arguments, as an empty text, null or nothing; and other names and forms of them
    *((HERMES, hermes(nothing, "f"), "", [("f", {})]) for nothing in ('""', '" "', "null", "{}")),
    (HERMES, '<tool_call>{"name": "f"}</tool_call>', "", [("f", {})]),
    (HERMES, hermes('{"city": "Paris"}').replace("arguments", "parameters"), "", [PARIS]),
    (MISTRAL, '[TOOL_CALLS]f[ARGS]""', "", [("f", {})]),
    (
        MISTRAL,
        '[TOOL_CALLS] [{"name": "weather", "arguments": "{\\"city\\": \\"Paris\\"}"}]',
        "",
        [PARIS],
    ),
    (DEEPSEEK, deepseek("null"), "", [("weather", {})]),
    # names that are no names of Python (k13)
    *(
        (
            family,
            f'{family.open}[{name}(city="Paris", from="a", from-city=\'b\')]{family.close}',
            "",
            [(name, {"city": "Paris", "from": "a", "from-city": "b"})],
        )
        for name in NAMES
        for family in (PYTHON, LFM)
    ),
    (
        PYTHON,
        """[f(x=1, y=-2.5, z=['é', true, None, (1, 2), ("a" 'b')], """
        """w={'k': r"\\d\\n", "e": "\\d\\x41\\u00e9\\n"},)]""",
        "",
        [
            (
                "f",
                {
                    "x": 1,
                    "y": -2.5,
                    "z": ["é", True, None, [1, 2], "ab"],
                    "w": {"k": "\\d\\n", "e": "\\dAé\n"},
                },
            )
        ],
    ),
    # several lines in one list (k28)
    (LFM, '<|tool_call_start|>[weather(city="Paris")\nf()]<|tool_call_end|>', "", [PARIS, ("f", {})]),
    (LFM, '<|tool_call_start|>weather(city="Paris")\n[f()]', "", [PARIS, ("f", {})]),
    # what is none stays text
    (HERMES, "a < b <tool", "a < b <tool", []),
    (HERMES, "<tool_call>nonsense</tool_call>!", "<tool_call>nonsense</tool_call>!", []),
    (MISTRAL, "no call here [TOOL", "no call here [TOOL", []),
    (MISTRAL, "[TOOL_CALLS] oops", "[TOOL_CALLS] oops", []),
    (DEEPSEEK, deepseek("oops"), deepseek("oops"), []),
    # text before, between and after
    (HERMES, f"I ask. {hermes('{}')}\n{hermes('{}', 'f')}.", "I ask. \n.", [("weather", {}), ("f", {})]),
    (MISTRAL, 'Well. [TOOL_CALLS]weather[ARGS]{"city": "Paris"}', "Well. ", [PARIS]),
    *((family, family.example, "", [PARIS]) for family in FAMILIES),
]


@pytest.mark.parametrize(("family", "said", "text", "calls"), ROWS)
@pytest.mark.parametrize("step", [1, 7, 10**6])
def test_the_calls_of_each_family(
    family: CallFamily, said: str, text: str, calls: list[tuple[str, Any]], step: int
) -> None:
    pieces = [said[at : at + step] for at in range(0, len(said), step)]
    assert read(made(family), pieces) == ("", text, calls)


@pytest.mark.parametrize("begun", [True, False])
@pytest.mark.parametrize("end", ["", "\n</think>\n", "\nwait"])
@pytest.mark.parametrize("family", [family for family in FAMILIES if family.open])
def test_a_call_within_the_reasoning_is_a_call(family: CallFamily, end: str, begun: bool) -> None:
    said = ("" if begun else "<think>") + f"I must <tool_call> ask. {family.example}{end}"
    if not family.close and end == "\nwait":
        end = ""  # a call to the end has no text after it
        said = said.removesuffix("\nwait")
    thought = "I must <tool_call> ask." + ("" if end != "\nwait" else " \nwait")
    for pieces in ([said], list(said)):
        assert read(made(family, thoughts=True, begun=begun), pieces) == (thought, "", [PARIS])


def test_reasoning_that_ends_within_a_broken_call_ends_there() -> None:
    said = '<think>so <tool_call>{"name": </think>{"a": 1}'
    parser = made(HERMES, thoughts=True)
    assert read(parser, [said]) == ('so <tool_call>{"name":', '{"a": 1}', [])


def test_a_family_is_known_by_its_template_or_by_its_mark_in_the_vocabulary() -> None:
    for family in FAMILIES:
        assert family_of(f"x {family.shown[-1]} y") is family
        if family.open:
            assert family_of("plain", lambda mark, own=family.open: mark == own) in (
                family,
                CODER,  # has the marks of Hermes
            )
    assert family_of('{{ tools }} "parameters"', lambda mark: mark == LFM.open) is LFM
    assert family_of('{{ tools }} "parameters"') is LLAMA
    assert family_of("{{ messages }}") is None
    assert family_of(None, lambda mark: True) is None


FRAGMENTS = st.sampled_from(
    [
        *(mark for family in FAMILIES for mark in (family.open, family.close, *family.more) if mark),
        *("<think>", "</think>", "<tool", "</", "<function=", "<function=f>", "</function>", "<parameter=n>"),
        *(
            "<parameter=",
            "</parameter>",
            "</param",
            "\n</parameter>",
            "\n<function=f>",
            "[",
            "]",
            "{",
            "}",
            "(",
        ),
        *(
            '"',
            "'",
            '"""',
            "\\",
            '\\"',
            ")",
            ",",
            "=",
            ":",
            " ",
            "\n",
            "f(city='x')",
            '{"name": "f"}',
            "é",
            "1e999",
        ),
        *(family.example for family in FAMILIES),
        *(
            coder(("n", "3")),
            " " * 70,
            "a < b",
            "```json\n",
            "<｜tool▁call▁begin｜>",
            "<｜tool▁sep｜>f",
            "f[ARGS]{}",
        ),
    ]
)


@settings(max_examples=250, deadline=None)
@given(
    family=st.sampled_from(FAMILIES),
    thoughts=st.booleans(),
    begun=st.booleans(),
    text=st.one_of(st.lists(FRAGMENTS, max_size=14).map("".join), st.text(max_size=40)),
    data=st.data(),
)
def test_the_parts_do_not_depend_on_the_pieces_and_no_text_raises(
    family: CallFamily, thoughts: bool, begun: bool, text: str, data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = read(made(family, thoughts=thoughts, begun=begun), [text])
    assert read(made(family, thoughts=thoughts, begun=begun), pieces) == whole
    assert read(made(family, thoughts=thoughts, begun=begun), list(text)) == whole
    if not thoughts and not whole[2] and family is not LLAMA:
        assert whole[1] == text, "a text without calls comes back as it was"


def seconds(family: CallFamily, said: str) -> float:
    """The least of three measurements."""
    took = []
    for _ in range(3):
        began = time.thread_time()
        read(made(family, thoughts=True, begun=True), [said[at : at + 5] for at in range(0, len(said), 5)])
        took.append(time.thread_time() - began)
    return min(took)


@pytest.mark.parametrize(
    ("family", "start", "one"),
    [
        (HERMES, '<tool_call>{"a": "', "word </tool_call> "),
        (HERMES, "<tool_call>{", '"a": \\"'),
        (HERMES, "", '<tool_call>{"'),
        (CODER, "<tool_call>\n<function=f>\n<parameter=city>\n", "word\n</parameter> "),
        (CODER, "<tool_call>\n<function=f>\n<parameter=city>\n", "\n<function=f>\n<parameter=n>"),
        (CODER, "", "\n<function=f>"),
        (CODER, "", "\n<function=f></function> x"),
        (CODER, "<tool_call>\n<function=f></function>", "\n"),
        (CODER, "<tool_call>\n<function=f>", "\n<parameter=n>\n1\n</parameter>" + " " * 50),
        (MISTRAL, "", "[TOOL_CALLS] ["),
        (DEEPSEEK, "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{} "),
        (LFM, "<|tool_call_start|>[", "f(a=['''x"),
        (PYTHON, "[", "f(a=(("),
        (LLAMA, "{", "word "),
        (LLAMA, " ", "  "),
    ],
)
def test_the_work_is_linear_in_the_text(family: CallFamily, start: str, one: str) -> None:
    """A token in a call of 128,000 tokens took 0.1 to 0.4 ms of the event loop."""
    few, many = (start + one * (count // len(one)) for count in (5_000, 40_000))
    assert seconds(family, many) < 20 * seconds(family, few), "eight times, and not its square"


@pytest.mark.parametrize(
    ("family", "before", "one", "after"),
    [
        (HERMES, "<tool_call>", '{"name": "f"};', "</tool_call>"),
        (HERMES, "<tool_call>[", '{"name": "f"},', '{"name": "f"}]</tool_call>'),
        (LLAMA, "", '{"name": "f"};', ""),
        (LFM, "<|tool_call_start|>[", "f(),", "]<|tool_call_end|>"),
        (CODER, "<tool_call>", "<function=f></function>", "</tool_call>"),
    ],
)
def test_a_text_of_hundreds_of_calls_is_none(family: CallFamily, before: str, one: str, after: str) -> None:
    """They are made at its end, all at once: 128,000 took seconds of the event loop."""
    assert read(made(family), [before + one * 300 + after]) == ("", before + one * 300 + after, [])
    assert read(made(family), [before + one * 100 + after])[2][:100] == [("f", {})] * 100


def test_the_types_of_a_parameter_whose_schema_refers_to_itself_are_found_at_once() -> None:
    """A schema of 30 such references took 2 s for each argument, a hundred a hundred times that."""
    again = [{"$ref": "#/$defs/again"}] * 1000
    schema = {
        "properties": {"n": {"$ref": "#/$defs/again"}},
        "$defs": {"again": {"anyOf": [{"type": "integer"}, *again]}},
    }
    parser = call_parser(CODER, {"f": schema})
    calls = read(parser, ["<tool_call><function=f><parameter=n>\n5\n</parameter></function></tool_call>"])[2]
    assert calls == [("f", {"n": 5})]


def test_the_work_for_a_forced_call_of_white_space_is_linear() -> None:
    """Models that must write JSON may write blanks until they are cut: 1 MB took minutes of the loop."""

    def seconds(count: int) -> float:
        def once() -> float:
            began = time.thread_time()
            assert read(ForcedParser("calls"), [" " * count])[1] == " " * count
            return time.thread_time() - began

        return min(once() for _ in range(3))

    assert seconds(32_000) < 32 * seconds(4_000), "about eight times, and not its square"
