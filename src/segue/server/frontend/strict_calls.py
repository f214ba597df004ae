"""A grammar for the calls that a model decides to make itself, where a tool is `strict`.

The text is free. The grammar binds from the mark that opens a call: the arguments of a strict tool follow
its schema, the arguments of another tool are any object. The chat template shows the form of a call, as
`call_families` has it. There is no grammar for calls that are not JSON or have no mark of their own.
"""

from __future__ import annotations

import json

import msgspec

from segue.engine.request import MAX_GRAMMAR_BYTES, CallGrammar, FormedCall, Grammar
from segue.server.frontend.call_families import family_of
from segue.server.frontend.request_fields import Tool


def call_grammar(tools: list[Tool], template: str | None) -> Grammar | None:
    """The grammar of answers that may call `tools`. None if the form of the model's calls is unknown, or the
    schemas together are too long."""
    family = family_of(template)
    form = None if family is None else family.form(template or "")
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
