"""OpenAI's messages to what chat templates expect, and to a prompt."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from segue.engine.request import Grammar, Reasoning
from segue.server.frontend.call_bodies import Properties, properties_of
from segue.server.frontend.openai_types import ChatBody, Tool
from segue.server.frontend.problems import BadParam
from segue.server.frontend.reasoning import ReasoningParser, WithoutThoughts, begun_by, thought_marks
from segue.server.frontend.reply_parts import ReplyParser
from segue.server.frontend.response_template import ResponseForm
from segue.server.frontend.strict_calls import call_grammar
from segue.server.frontend.tokenizer import ModelTokenizer
from segue.server.frontend.tools import FirstCall, ForcedParser, WithoutSpace, parser_for

MAX_MESSAGES = 10_000
MAX_TOOLS = 256
#: That an answer can be forced to make at once.
MAX_CALLS = 16

#: The values of `reasoning_effort`. Without a setting in the template, "medium" asks for nothing.
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")

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
    """The tools that the model is shown, and whether the answer must call one: `name`, or any (`forced`).
    `grammar` forces that call, or binds the calls that the model makes by itself."""

    tools: list[dict[str, Any]] | None = None
    grammar: Grammar | None = None
    forced: bool = False
    name: str = ""
    #: At most one call (`parallel_tool_calls: false`).
    single: bool = False
    #: A tool is `strict`, and nothing makes its calls follow its schema.
    loose: bool = False


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A chat as the model reads it: its text, and the token ids of that. `begun` is the beginning of the
    answer that the client has given."""

    text: str
    ids: list[int]
    begun: str = ""


@dataclass(frozen=True, slots=True)
class ReplyForm:
    """The form of the answers to one request. `make` gives a fresh parser for one sample.

    The model's response template (`response`) comes before the forms that its chat `template` is known by.
    With `plain` a grammar makes the answer: all of it is text, or the forced call, but for the `reasoning`
    before it.
    """

    prompt: ChatPrompt
    use: ToolUse
    template: str | None
    response: ResponseForm | None = None
    plain: bool = False
    thoughts: bool = True
    hidden: bool = False
    reasoning: Reasoning | None = None

    def make(self) -> ReplyParser | None:
        """A fresh parser, or None: all that the model says is text."""
        if self.use.forced or self.plain:
            return self._constrained()
        properties = None if self.use.tools is None else properties_of(self.use.tools)
        parser = self._parser(properties)
        if parser is None:
            return None
        if properties is not None:
            parser = WithoutSpace(parser)
        if self.use.single:
            parser = FirstCall(parser)
        return WithoutThoughts(parser) if self.hidden else parser

    def _constrained(self) -> ReplyParser | None:
        parser: ReplyParser | None = None
        if self.use.forced:
            parser = ForcedParser("arguments" if self.use.name else "calls", self.use.name)
            if self.use.single:
                parser = FirstCall(parser)
        marks = thought_marks(self.template)
        if self.reasoning is None or marks is None:
            return parser
        parser = ReasoningParser(marks, parser, begun=self.reasoning.begun)
        return WithoutThoughts(parser) if self.hidden else parser

    def _parser(self, properties: Properties | None) -> ReplyParser | None:
        if self.response is not None and self.thoughts:
            return self.response.parser(self.prompt.text, properties)
        calls = None if properties is None else parser_for(self.template, properties)
        marks = thought_marks(self.template) if self.thoughts else None
        if marks is None:
            return calls
        begun = begun_by(self.prompt.text, marks, self.prompt.begun)
        return ReasoningParser(marks, calls, begun=begun)


def reply_form(
    body: ChatBody, use: ToolUse, prompt: ChatPrompt, template: str | None, tokenizer: ModelTokenizer
) -> ReplyForm:
    """The form of the answers to `body`, whose prompt `template` made."""
    plain = _constrained(body)
    thoughts = body.separate_reasoning is not False
    # With reasoning in its text, a constrained answer would not be JSON.
    may_reason = thoughts if plain or use.forced else use.grammar is not None
    return ReplyForm(
        prompt,
        use,
        template,
        tokenizer.response,
        plain=plain,
        thoughts=thoughts,
        hidden=body.include_reasoning is False,
        reasoning=_before_grammar(template, prompt, tokenizer) if may_reason else None,
    )


def _before_grammar(template: str | None, prompt: ChatPrompt, tokenizer: ModelTokenizer) -> Reasoning | None:
    """The reasoning that may come before a constrained answer. None: the model does not reason, the prompt or
    the client has ended the reasoning, or a mark of it is not a single token."""
    marks = thought_marks(template)
    if marks is None or prompt.text.rstrip().endswith(marks[1]):
        return None
    begun = begun_by(prompt.text, marks, prompt.begun)
    start, end = map(tokenizer.token_id, marks)
    if start is None or end is None or (prompt.begun and not begun):
        return None
    return Reasoning(start, end, begun)


def _constrained(body: ChatBody) -> bool:
    if body.response_format is not None and body.response_format.type != "text":
        return True
    fields = (
        body.structured_outputs,
        body.guided_json,
        body.guided_regex,
        body.guided_choice,
        body.guided_grammar,
        body.regex,
        body.json_schema,
    )
    return any(field is not None for field in fields)


def effort_variables(body: ChatBody, template: str | None) -> dict[str, Any]:
    """The variables of a chat template that `reasoning_effort` sets. Raises BadParam where the template
    reads none."""
    effort = body.reasoning_effort
    if effort is None:
        return {}
    if effort not in EFFORTS:
        raise BadParam(f"reasoning_effort: one of {', '.join(EFFORTS)}", "reasoning_effort")
    source, found = template or "", dict[str, Any]()
    if "reasoning_effort" in source:
        found["reasoning_effort"] = effort
    if "enable_thinking" in source:
        found["enable_thinking"] = effort != "none"
    elif not found and effort == "none" and thought_marks(template) is None:
        return {}
    if not found and effort != "medium":
        raise BadParam(
            "reasoning_effort: this model's chat template has no such setting; leave it out",
            "reasoning_effort",
        )
    return found


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
    if isinstance(reasoning := out.pop("reasoning", None), str):
        # vLLM's name for it.
        out.setdefault("reasoning_content", reasoning)
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
    shown = [shown_tool(tool) for tool in tools]
    single = body.parallel_tool_calls is False
    if choice in (None, "auto"):
        # A constrained answer is no call.
        strict = any(tool.function.strict for tool in tools) and not _constrained(body)
        grammar = call_grammar(tools, tokenizer.chat_template(tools=True)) if strict else None
        return ToolUse(shown, grammar, single=single, loose=strict and grammar is None)
    if choice == "required":
        return ToolUse(shown, _any_call(tools, 1 if single else MAX_CALLS), forced=True, single=single)
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
            return ToolUse(shown, Grammar("json_schema", schema), forced=True, name=name)
    raise BadParam(f"tool_choice: no tool is named {name!r}", "tool_choice")


def shown_tool(tool: Tool) -> dict[str, Any]:
    """A tool as the chat template reads it."""
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
                "arguments": _moved(
                    t.function.parameters or {"type": "object"}, f"#/items/anyOf/{at}/properties/arguments"
                ),
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for at, t in enumerate(tools)
    ]
    return Grammar(
        "json_schema",
        json.dumps({"type": "array", "minItems": 1, "maxItems": most, "items": {"anyOf": calls}}),
    )


#: Keys of a JSON schema whose values are data, and those whose values are schemas by name.
_DATA: Final = frozenset({"const", "default", "enum", "examples"})
_BY_NAME: Final = frozenset({"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"})


def _moved(schema: dict[str, Any], place: str) -> dict[str, Any]:
    """A copy of `schema` for `place` in another one: its references to itself follow it there."""
    made: dict[str, Any] = json.loads(json.dumps(schema))
    nodes: list[tuple[object, bool]] = [] if "$id" in made else [(made, False)]
    while nodes:
        node, by_name = nodes.pop()
        if isinstance(node, list):
            nodes += [(item, False) for item in node]
        elif isinstance(node, dict):
            for key, value in node.items():
                if not by_name and key == "$ref" and isinstance(value, str) and value.startswith("#"):
                    node[key] = place + value[1:]
                elif by_name or key not in _DATA:
                    nodes.append((value, not by_name and key in _BY_NAME))
    return made


def chat_prompt(
    tokenizer: ModelTokenizer,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    *,
    generation_prompt: bool | None = None,
    continue_final: bool = False,
    variables: dict[str, Any] | None = None,
    most: int,
) -> ChatPrompt:
    """The prompt of a chat. Raises BadParam, and TooManyTokens for more than `most`."""
    reserved = _RESERVED.intersection(variables or {})
    if reserved:
        name = sorted(reserved)[0]
        raise BadParam(f"chat_template_kwargs: {name!r} cannot be set", "chat_template_kwargs")
    if continue_final and generation_prompt:
        raise BadParam(
            "continue_final_message and add_generation_prompt exclude each other", "continue_final_message"
        )
    checked = check_messages(messages)
    if "developer" not in (tokenizer.chat_template(tools=tools is not None) or ""):
        # OpenAI's newer name; a template that does not know it would leave the message out, or refuse it.
        checked = [m | {"role": "system"} if m["role"] == "developer" else m for m in checked]
    text = tokenizer.render(
        checked,
        tools,
        generation_prompt=not continue_final if generation_prompt is None else generation_prompt,
        continue_final=continue_final,
        variables=variables or {},
    )
    # The template writes the special tokens itself.
    ids = tokenizer.encode(text, special=False, most=most)
    return ChatPrompt(text, ids, checked[-1]["content"] if continue_final else "")
