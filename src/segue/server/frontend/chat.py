"""A chat to a prompt: its variables, its tools, and the form of the answers to it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from segue.engine.request import Grammar, Reasoning
from segue.server.frontend.call_bodies import Tools, tools_by_name
from segue.server.frontend.call_families import CallFamily, family_of
from segue.server.frontend.json_schemas import BY_NAME, DATA, fitted
from segue.server.frontend.params import constrained
from segue.server.frontend.past_messages import checked
from segue.server.frontend.problems import BadParam
from segue.server.frontend.reasoning import ReasoningParser, WithoutThoughts, begun_by, thought_marks
from segue.server.frontend.reply_parts import ReplyParser
from segue.server.frontend.request_fields import ChatBody, FunctionTool, Tool
from segue.server.frontend.response_template import ResponseForm
from segue.server.frontend.strict_calls import call_grammar
from segue.server.frontend.tokenizer import ModelTokenizer
from segue.server.frontend.tools import FirstCall, ForcedParser, WithoutSpace, call_parser

MAX_TOOLS = 256
#: That an answer can be forced to make at once.
MAX_CALLS = 16

#: The values of `reasoning_effort`. Without a setting in the template, "medium" asks for nothing.
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")

#: Variables that are the server's to set, not a client's.
_RESERVED = {
    "messages",
    "conversation",
    "conversations",
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
    #: Keywords of the tools' schemas that `grammar` does not hold.
    left_out: tuple[str, ...] = ()


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
    family: CallFamily | None = None
    response: ResponseForm | None = None
    plain: bool = False
    thoughts: bool = True
    hidden: bool = False
    reasoning: Reasoning | None = None

    def make(self) -> ReplyParser | None:
        """A fresh parser, or None: all that the model says is text."""
        if self.use.forced or self.plain:
            return self._constrained()
        tools = None if self.use.tools is None else tools_by_name(self.use.tools)
        parser = self._parser(tools)
        if parser is None:
            return None
        if tools is not None:
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

    def _parser(self, tools: Tools | None) -> ReplyParser | None:
        if self.response is not None and self.thoughts:
            return self.response.parser(self.prompt.text, tools)
        marks = thought_marks(self.template) if self.thoughts else None
        family = None if tools is None else self.family
        if family is None or tools is None:
            return None if marks is None else self._reasoning(marks, None)
        if marks is None:
            return call_parser(family, tools)
        if family.open:
            return call_parser(family, tools, self._reasoning(marks, None))
        return self._reasoning(marks, call_parser(family, tools))

    def _reasoning(self, marks: tuple[str, str], inner: ReplyParser | None) -> ReplyParser:
        begun = begun_by(self.prompt.text, marks, self.prompt.begun)
        return ReasoningParser(marks, inner, begun=begun)


def reply_form(
    body: ChatBody, use: ToolUse, prompt: ChatPrompt, template: str | None, tokenizer: ModelTokenizer
) -> ReplyForm:
    """The form of the answers to `body`, whose prompt `template` made."""
    plain = constrained(body)
    thoughts = body.separate_reasoning is not False
    # With reasoning in its text, a constrained answer would not be JSON.
    may_reason = thoughts if plain or use.forced else use.grammar is not None
    return ReplyForm(
        prompt,
        use,
        template,
        family_of(template, lambda mark: tokenizer.token_id(mark) is not None),
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


def effort_variables(body: ChatBody, template: str | None) -> dict[str, Any] | None:
    """The variables of a chat template that `reasoning_effort` sets. None: the template reads none of them,
    and the effort is ignored."""
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
    return found if found or effort == "medium" else None


def tool_use(body: ChatBody, tokenizer: ModelTokenizer) -> ToolUse:
    """The meaning of `tools` and `tool_choice` for this model. Raises BadParam."""
    tools, choice = body.tools or [], body.tool_choice
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        tools, choice = _allowed(choice.get("allowed_tools"), tools)
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
        strict = any(tool.function.strict for tool in tools) and not constrained(body)
        if not strict:
            return ToolUse(shown, single=single)
        bound, left_out = _bound(tools, lambda function: bool(function.strict))
        grammar = call_grammar(bound, tokenizer.chat_template(tools=True))
        loose = grammar is None
        return ToolUse(shown, grammar, single=single, loose=loose, left_out=() if loose else left_out)
    if choice == "required":
        bound, left_out = _bound(tools, lambda function: True)
        grammar = _any_call(bound, 1 if single else MAX_CALLS)
        return ToolUse(shown, grammar, forced=True, single=single, left_out=left_out)
    return _named(choice, tools, shown)


def _allowed(allowed: object, tools: list[Tool]) -> tuple[list[Tool], str]:
    """The tools that `tool_choice` leaves, and how it chooses from them."""
    mode, named = (allowed.get("mode"), allowed.get("tools")) if isinstance(allowed, dict) else (None, None)
    if mode not in ("auto", "required") or not isinstance(named, list):
        raise BadParam(
            "tool_choice: allowed_tools has a mode, 'auto' or 'required', and tools",
            "tool_choice",
        )
    functions = [tool.get("function") for tool in named if isinstance(tool, dict)]
    names = {str(function.get("name")) for function in functions if isinstance(function, dict)}
    return [tool for tool in tools if tool.function.name in names], mode


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
            [bound], left_out = _bound([tool], lambda function: True)
            schema = json.dumps(bound.function.parameters or {"type": "object"})
            grammar = Grammar("json_schema", schema)
            return ToolUse(shown, grammar, forced=True, name=name, left_out=left_out)
    raise BadParam(f"tool_choice: no tool is named {name!r}", "tool_choice")


def _bound(tools: list[Tool], binds: Callable[[FunctionTool], bool]) -> tuple[list[Tool], tuple[str, ...]]:
    """`tools` for a grammar, which `binds` the arguments of some, and the keywords that it does not hold."""
    made: list[Tool] = []
    left_out: dict[str, None] = {}
    for tool in tools:
        function = tool.function
        if binds(function) and function.parameters:
            fit = fitted(function.parameters)
            left_out |= dict.fromkeys(f"tools.{keyword}" for keyword in fit.left_out)
            tool = msgspec.structs.replace(
                tool, function=msgspec.structs.replace(function, parameters=fit.schema)
            )
        made.append(tool)
    return made, tuple(left_out)


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
                elif by_name or key not in DATA:
                    nodes.append((value, not by_name and key in BY_NAME))
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

    def render(shaped: list[dict[str, Any]]) -> str:
        return tokenizer.render(
            shaped,
            tools,
            generation_prompt=not continue_final if generation_prompt is None else generation_prompt,
            continue_final=continue_final,
            variables=variables or {},
        )

    form = tokenizer.form(tools=tools is not None)
    try:
        text, last = form.prompt(checked(messages), render)
    except RecursionError:
        raise BadParam("messages: nested too deeply", "messages") from None
    # The template writes the special tokens itself.
    ids = tokenizer.encode(text, special=False, most=most)
    return ChatPrompt(text, ids, last if continue_final else "")
