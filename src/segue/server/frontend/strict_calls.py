"""A grammar for the calls that a model decides to make itself, where a tool is `strict`.

The text is free. The grammar binds from the mark that opens a call: the arguments of a strict tool follow
its schema, the arguments of another tool are any object. The chat template shows the form of a call, as
`frontend.tools` reads it. There is no grammar for calls that are not JSON (LFM2, Qwen-Coder, GLM) or have no
mark of their own (Llama, Python).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Final

import msgspec

from segue.engine.request import MAX_GRAMMAR_BYTES, CallGrammar, FormedCall, Grammar
from segue.server.frontend.openai_types import Tool


@dataclass(frozen=True, slots=True)
class _CallForm:
    """The texts around a block of calls, as in `CallGrammar`. The name stands between two texts of a call."""

    open: tuple[str, ...]
    before_name: tuple[str, ...]
    after_name: tuple[str, ...]
    after: tuple[str, ...] = ()
    between: tuple[str, ...] | None = None
    close: tuple[str, ...] = ()


def call_grammar(tools: list[Tool], template: str | None) -> Grammar | None:
    """The grammar of answers that may call `tools`. None if the form of the model's calls is unknown, or the
    schemas together are too long."""
    form = _form(template or "")
    if form is None:
        return None
    calls = []
    for tool in tools:
        name = json.dumps(tool.function.name, ensure_ascii=False)[1:-1]
        schema = tool.function.parameters if tool.function.strict else None
        before = [*form.before_name, name, *form.after_name]
        calls.append(FormedCall(before, schema or {"type": "object"}, list(form.after)))
    between = None if form.between is None else list(form.between)
    text = msgspec.json.encode(CallGrammar(list(form.open), calls, between, list(form.close)))
    return Grammar("tool_calls", text.decode()) if len(text) <= MAX_GRAMMAR_BYTES else None


def _form(template: str) -> _CallForm | None:
    """The form of the calls in a chat template, in the order of `tools.parser_for`."""
    if "<|tool_list_start|>" in template or "<|tool_call_start|>" in template:
        return None
    if "<｜tool▁calls▁begin｜>" in template:
        return _deepseek(fenced="```json" in template)
    if "<tool_call>" in template:
        other = "<function=" in template or "<arg_key>" in template
        return None if other else _HERMES
    if "[TOOL_CALLS]" in template:
        return (
            _MISTRAL if "[ARGS]" in template else _mistral_list(" " if "[TOOL_CALLS] [" in template else "")
        )
    return None


_HERMES: Final = _CallForm(
    open=("<tool_call>",),
    before_name=('\n{"name": "',),
    after_name=('", "arguments": ',),
    after=("}\n",),
    close=("</tool_call>",),
)
_MISTRAL: Final = _CallForm(open=("[TOOL_CALLS]",), before_name=(), after_name=("[ARGS]",))


def _mistral_list(space: str) -> _CallForm:
    return _CallForm(
        open=("[TOOL_CALLS]", f"{space}["),
        before_name=('{"name": "',),
        after_name=('", "arguments": ',),
        after=("}",),
        between=(", ",),
        close=("]",),
    )


def _deepseek(*, fenced: bool) -> _CallForm:
    """V3 writes a kind and a fence; V3.1 the name and the arguments alone."""
    begin, sep = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"
    return _CallForm(
        open=("<｜tool▁calls▁begin｜>",),
        before_name=(begin, "function", sep) if fenced else (begin,),
        after_name=("\n```json\n",) if fenced else (sep,),
        after=(*(("\n```",) if fenced else ()), "<｜tool▁call▁end｜>"),
        between=("\n",) if fenced else (),
        close=("<｜tool▁calls▁end｜>",),
    )
