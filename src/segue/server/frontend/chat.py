"""OpenAI's messages to what chat templates expect, and to a prompt."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from typing import Any

import msgspec

from segue.engine.request import Grammar
from segue.server.frontend.openai_types import ChatBody, Tool
from segue.server.frontend.problems import BadParam
from segue.server.frontend.tokenizer import ModelTokenizer
from segue.server.frontend.tools import FirstCall, ForcedParser, ToolParser, parser_for

MAX_MESSAGES = 10_000
MAX_TOOLS = 256
#: That an answer can be forced to make at once.
MAX_CALLS = 16

#: Variables that are the server's to set, not a client's.
_RESERVED = {
    "messages",
    "conversation",
    "tools",
    "documents",
    "chat_template",
    "tokenize",
    "add_generation_prompt",
    "continue_final_message",
    "return_dict",
    "return_tensors",
    "return_assistant_tokens_mask",
    "tokenizer_kwargs",
    "padding",
    "truncation",
    "max_length",
}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """How the tools of a request reach the model and how its calls come back."""

    tools: list[dict[str, Any]] | None = None
    form: ToolForm | None = None
    grammar: Grammar | None = None
    #: At most one call (`parallel_tool_calls: false`).
    single: bool = False

    def parser(self) -> ToolParser | None:
        """A fresh parser for one sample."""
        parser = self.form.make() if self.form else None
        return FirstCall(parser) if parser is not None and self.single else parser


@dataclass(frozen=True, slots=True)
class ToolForm:
    """The parser of tool calls: from the template, or forced by `tool_choice`."""

    template: str | None = None
    forced: bool = False
    name: str = ""

    def make(self) -> ToolParser | None:
        if self.forced:
            return ForcedParser("arguments" if self.name else "calls", self.name)
        return parser_for(self.template)


def check_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages as templates want them: text parts joined, arguments of calls as objects.

    Raises BadParam with the place named.
    """
    if not messages:
        raise BadParam("messages: there must be at least one message", "messages")
    if len(messages) > MAX_MESSAGES:
        raise BadParam(f"messages: at most {MAX_MESSAGES}, not {len(messages)}", "messages")
    return [_message(m, f"messages[{i}]") for i, m in enumerate(messages)]


def _message(message: dict[str, Any], where: str) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise BadParam(f"{where}.role: a role is needed, such as 'user'", f"{where}.role")
    out = dict(message)
    content = message.get("content")
    calls = message.get("tool_calls")
    if content is None:
        if not calls and role != "assistant":
            raise BadParam(f"{where}.content: text is needed", f"{where}.content")
        # Templates add strings; None would be printed as 'None' or raise.
        out["content"] = ""
    elif isinstance(content, list):
        out["content"] = _join_parts(content, f"{where}.content")
    elif not isinstance(content, str):
        raise BadParam(f"{where}.content: text or a list of parts, not {_kind(content)}", f"{where}.content")
    if calls is None:
        out.pop("tool_calls", None)
    else:
        out["tool_calls"] = _past_calls(calls, f"{where}.tool_calls")
    return out


def _join_parts(parts: list[Any], where: str) -> str:
    texts = []
    for i, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(part, str):
            texts.append(part)
        elif kind in ("text", "input_text", "output_text", "refusal"):
            text = part.get("text", part.get("refusal"))
            if not isinstance(text, str):
                raise BadParam(f"{where}[{i}].text: text is needed", f"{where}[{i}].text")
            texts.append(text)
        else:
            raise BadParam(
                f"{where}[{i}]: this model reads text, not {kind or _kind(part)!r}", f"{where}[{i}]"
            )
    return "".join(texts)


def _past_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise BadParam(f"{where}: a list of calls is needed", where)
    out = []
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadParam(f"{where}[{i}].function.name: a name is needed", f"{where}[{i}].function")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            # OpenAI sends JSON text; templates print objects. Other text stays as it was.
            with contextlib.suppress(ValueError, RecursionError):
                arguments = json.loads(arguments) if arguments else {}
        out.append({**call, "type": "function", "function": {**function, "arguments": arguments}})
    return out


def _kind(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "a boolean", int: "a number"}
    return names.get(type(value), "a number" if isinstance(value, float) else "null")


def tool_use(body: ChatBody, tokenizer: ModelTokenizer) -> ToolUse:
    """The meaning of `tools` and `tool_choice` for this model. Raises BadParam."""
    tools, choice = body.tools or [], body.tool_choice
    if len(tools) > MAX_TOOLS:
        raise BadParam(f"tools: at most {MAX_TOOLS}, not {len(tools)}", "tools")
    for i, tool in enumerate(tools):
        if tool.type != "function":
            raise BadParam(f"tools[{i}].type: only 'function' is known", f"tools[{i}].type")
    if choice == "none" or (not tools and choice in (None, "auto")):
        return ToolUse()
    if not tools:
        raise BadParam("tool_choice: there are no tools to choose from", "tool_choice")
    shown = [_shown(t) for t in tools]
    single = body.parallel_tool_calls is False
    if choice in (None, "auto"):
        template = tokenizer.chat_template(tools=True)
        return ToolUse(shown, ToolForm(template), single=single)
    if choice == "required":
        return ToolUse(shown, ToolForm(forced=True), _any_call(tools, 1 if single else MAX_CALLS))
    return _named(choice, tools, shown)


def _named(choice: object, tools: list[Tool], shown: list[dict[str, Any]]) -> ToolUse:
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise BadParam(
            "tool_choice: 'none', 'auto', 'required' or {'type': 'function', 'function': {'name': …}}",
            "tool_choice",
        )
    for tool in tools:
        if tool.function.name == name:
            schema = json.dumps(tool.function.parameters or {"type": "object"})
            return ToolUse(shown, ToolForm(forced=True, name=name), Grammar("json_schema", schema))
    raise BadParam(f"tool_choice: no tool is named {name!r}", "tool_choice")


def _shown(tool: Tool) -> dict[str, Any]:
    function = {k: v for k, v in msgspec.to_builtins(tool.function).items() if v is not None}
    # Templates read these two without asking whether they are there.
    return {"type": "function", "function": {"description": "", "parameters": {}, **function}}


def _any_call(tools: list[Tool], most: int) -> Grammar:
    """A list of one to `most` calls, each with the arguments of its own function."""
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": t.function.name},
                "arguments": t.function.parameters or {"type": "object"},
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for t in tools
    ]
    return Grammar(
        "json_schema",
        json.dumps({"type": "array", "minItems": 1, "maxItems": most, "items": {"anyOf": calls}}),
    )


def chat_prompt(
    tokenizer: ModelTokenizer,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    *,
    generation_prompt: bool | None = None,
    continue_final: bool = False,
    variables: dict[str, Any] | None = None,
    most: int,
) -> list[int]:
    """The prompt's token ids. Raises BadParam, and TooManyTokens for more than `most`."""
    reserved = _RESERVED.intersection(variables or {})
    if reserved:
        name = sorted(reserved)[0]
        raise BadParam(f"chat_template_kwargs: {name!r} cannot be set", "chat_template_kwargs")
    if continue_final and generation_prompt:
        raise BadParam(
            "continue_final_message and add_generation_prompt exclude each other", "continue_final_message"
        )
    text = tokenizer.render(
        check_messages(messages),
        tools,
        generation_prompt=not continue_final if generation_prompt is None else generation_prompt,
        continue_final=continue_final,
        variables=variables or {},
    )
    # The template writes the special tokens itself.
    return tokenizer.encode(text, special=False, most=most)
