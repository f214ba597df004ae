"""The forms of tool calls, one row for each family of models.

A new family is a row: how its chat template is known, the marks around its calls, and what reads the text
between them. `tests/server/frontend/test_call_families.py` reads each row's example.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from segue.server.frontend.call_bodies import (
    Read,
    certain_json_or_xml_calls,
    declared_json_calls,
    declared_python_calls,
    deepseek_calls,
    json_or_xml_calls,
    mistral_calls,
    python_calls,
)


@dataclass(frozen=True, slots=True)
class CallForm:
    """The texts around a block of calls, as in `CallGrammar`. The name stands between two texts of a call."""

    open: tuple[str, ...]
    before_name: tuple[str, ...]
    after_name: tuple[str, ...]
    after: tuple[str, ...] = ()
    between: tuple[str, ...] | None = None
    close: tuple[str, ...] = ()


def _no_form(template: str) -> CallForm | None:
    """Calls that are not JSON, or have no mark of their own, have no grammar."""
    return None


@dataclass(frozen=True, slots=True)
class CallFamily:
    """A form of calls."""

    name: str
    #: A chat template with one of these texts teaches the form.
    shown: tuple[str, ...]
    #: The mark before calls. Empty: the whole answer is calls, or text.
    open: str
    #: The mark after calls. Empty: the next `open`, or the end of the answer.
    close: str
    read: Read
    #: A call of `weather(city="Paris")`.
    example: str
    source: str
    #: The letters that calls begin with, after white space; empty: any.
    first: str = ""
    #: The reader of a text before a mark that may stand within the call; None: `read`.
    certain: Read | None = None
    #: A mark that begins a call without `open`: at the beginning of a line, for a tool of the request.
    bare: str = ""
    #: Other marks that the form has; at the beginning of a whole answer they are dropped.
    more: tuple[str, ...] = ()
    #: Less certain signs, all of them in one template; looked for after the vocabulary.
    hints: tuple[str, ...] = ()
    #: The form for a grammar of strict calls, by the chat template.
    form: Callable[[str], CallForm | None] = _no_form


def _hermes(template: str) -> CallForm | None:
    if "<function=" in template or "<arg_key>" in template:
        return None
    return CallForm(
        open=("<tool_call>",),
        before_name=('\n{"name": "',),
        after_name=('", "arguments": ',),
        after=("}\n",),
        close=("</tool_call>",),
    )


def _mistral(template: str) -> CallForm:
    if "[ARGS]" in template:
        return CallForm(open=("[TOOL_CALLS]",), before_name=(), after_name=("[ARGS]",))
    return CallForm(
        open=("[TOOL_CALLS]", " [" if "[TOOL_CALLS] [" in template else "["),
        before_name=('{"name": "',),
        after_name=('", "arguments": ',),
        after=("}",),
        between=(", ",),
        close=("]",),
    )


def _deepseek(template: str) -> CallForm:
    """V3 writes a kind and a fence; V3.1 the name and the arguments alone."""
    fenced = "```json" in template
    begin, sep = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"
    return CallForm(
        open=("<｜tool▁calls▁begin｜>",),
        before_name=(begin, "function", sep) if fenced else (begin,),
        after_name=("\n```json\n",) if fenced else (sep,),
        after=(*(("\n```",) if fenced else ()), "<｜tool▁call▁end｜>"),
        between=("\n",) if fenced else (),
        close=("<｜tool▁calls▁end｜>",),
    )


#: A template that shows two forms has the first one.
FAMILIES: Final = (
    CallFamily(
        name="LFM2, LFM2.5",
        shown=("<|tool_list_start|>", "<|tool_call_start|>"),
        open="<|tool_call_start|>",
        close="<|tool_call_end|>",
        read=python_calls,
        example='<|tool_call_start|>[weather(city="Paris")]<|tool_call_end|>',
        source="LiquidAI/LFM2-1.2B (the chat template, Tool use)",
    ),
    CallFamily(
        name="DeepSeek-V3, R1, V3.1",
        shown=("<｜tool▁calls▁begin｜>",),
        open="<｜tool▁calls▁begin｜>",
        close="<｜tool▁calls▁end｜>",
        read=deepseek_calls,
        example=(
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n"
            '```json\n{"city": "Paris"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
        ),
        source="deepseek-ai/DeepSeek-V3 (tokenizer_config.json)",
        form=_deepseek,
    ),
    CallFamily(
        name="Qwen3-Coder, Qwen3.5 (XML)",
        shown=("<function=",),
        open="<tool_call>",
        close="</tool_call>",
        read=json_or_xml_calls,
        example=(
            "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>"
        ),
        source="Qwen/Qwen3-Coder-30B-A3B-Instruct (chat_template.jinja)",
        bare="<function=",
        first="<{[",
        certain=certain_json_or_xml_calls,
    ),
    CallFamily(
        name="Hermes, Qwen2.5, Qwen3 (JSON)",
        shown=("<tool_call>",),
        open="<tool_call>",
        close="</tool_call>",
        read=json_or_xml_calls,
        example='<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>',
        source="NousResearch/Hermes-3-Llama-3.1-8B (Prompt Format for Function Calling)",
        first="<{[",
        certain=certain_json_or_xml_calls,
        form=_hermes,
    ),
    CallFamily(
        name="Mistral",
        shown=("[TOOL_CALLS]",),
        open="[TOOL_CALLS]",
        close="",
        read=mistral_calls,
        example='[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Paris"}}]',
        source="mistralai/Mistral-7B-Instruct-v0.3 (Function calling)",
        more=("[ARGS]", "[CALL_ID]"),
        form=_mistral,
    ),
    CallFamily(
        name="Llama 3.2 and 4 (Python)",
        shown=("[func_name1(",),
        open="",
        close="",
        read=declared_python_calls,
        example='[weather(city="Paris")]',
        source="meta-llama/Llama-3.2-1B-Instruct (zero-shot function calling)",
        first="[",
    ),
    CallFamily(
        name="Llama 3 (JSON)",
        shown=("<|python_tag|>",),
        open="",
        close="",
        read=declared_json_calls,
        example='{"name": "weather", "parameters": {"city": "Paris"}}',
        source="meta-llama/Llama-3.1-8B-Instruct (tokenizer_config.json)",
        first="{",
        more=("<|python_tag|>",),
        hints=('"parameters"', "tools"),
    ),
)


def family_of(template: str | None, in_vocabulary: Callable[[str], bool] | None = None) -> CallFamily | None:
    """The form of the calls of a model: the one that its chat template shows, else the one whose mark is a
    token of its vocabulary. None: it is not known to make any."""
    if template is None:
        return None
    for family in FAMILIES:
        if any(sign in template for sign in family.shown):
            return family
    for family in FAMILIES:
        if family.open and in_vocabulary is not None and in_vocabulary(family.open):
            return family
    return next((f for f in FAMILIES if f.hints and all(hint in template for hint in f.hints)), None)
