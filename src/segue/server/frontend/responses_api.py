"""OpenAI's `/v1/responses`, without state on the server: to a chat and back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from segue.kv import SegueError
from segue.server.frontend.answers import Answer, Json
from segue.server.frontend.block_answers import Block, BlockAnswer
from segue.server.frontend.body_reader import names_in, same_fields
from segue.server.frontend.dialects import named_event
from segue.server.frontend.past_messages import texts_of
from segue.server.frontend.problems import BadParam, body_of, unparsable
from segue.server.frontend.request_fields import (
    BodyPart,
    ChatBody,
    FunctionTool,
    JsonSchemaFormat,
    ResponseFormat,
    ResponsesBody,
    ResponsesTool,
    Tool,
    TranslatedChat,
)

#: The names of a chat's fields in this API.
RESPONSES_NAMES: Final = names_in(BodyPart.RESPONSES, BodyPart.CHAT) | {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}


@dataclass(frozen=True, slots=True)
class _Called:
    """How an answer names a call of one function: `custom` ones have a text in place of arguments."""

    name: str
    namespace: str | None = None
    custom: bool = False


def chat_of_responses(body: ResponsesBody) -> TranslatedChat:
    """The chat that `body` asks for. Raises BadParam for what is not built."""
    if body.truncation not in (None, "disabled"):
        raise BadParam("truncation: a prompt is never cut; leave it out", "truncation")
    messages, left_out = _messages(body)
    left_out += [f"tools.{tool.type}" for tool in body.tools or [] if tool.type not in _OFFERED]
    chat = ChatBody(
        messages=messages,
        tools=[tool for tool, _ in _offered(body.tools or [])] or None,
        tool_choice=_tool_choice(body.tool_choice),
        response_format=_response_format(body.text.format if body.text else None),
        reasoning_effort=body.reasoning.effort if body.reasoning else None,
        **same_fields(body, BodyPart.RESPONSES, BodyPart.CHAT),
    )
    return TranslatedChat(chat, left_out)


_OFFERED: Final = ("function", "custom", "namespace")


def _offered(
    tools: list[ResponsesTool], within: str = "tools", namespace: str | None = None
) -> Iterator[tuple[Tool, _Called]]:
    """The tools that are functions for the model, and what answers call them."""
    for i, tool in enumerate(tools):
        where, parameters = f"{within}[{i}]", tool.parameters
        if tool.type not in _OFFERED:
            continue
        if tool.name is None:
            raise BadParam(f"{where}.name: a {tool.type} has a name", f"{where}.name")
        if tool.type == "namespace" and namespace is None:
            try:
                inner = msgspec.convert(tool.tools or [], list[ResponsesTool])
            except msgspec.ValidationError as error:
                raise unparsable(error) from None
            yield from _offered(inner, f"{where}.tools", tool.name)
            continue
        description = tool.description
        if tool.type == "custom":
            parameters = _ONE_TEXT
            # Its grammar is for the model to read.
            description = "\n".join(t for t in (description, (tool.format or {}).get("definition")) if t)
        function = FunctionTool(_shown_name(tool.name, namespace), description, parameters, tool.strict)
        yield Tool(function), _Called(tool.name, namespace, tool.type == "custom")


#: The parameters of a custom tool.
_ONE_TEXT: Final = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}


def _shown_name(name: str, namespace: object) -> str:
    """The name of a function for the model: those of two namespaces may be equal."""
    if not isinstance(namespace, str):
        return name
    return f"{namespace.removesuffix('__')}__{name}"


def _tool_choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    if isinstance(choice, dict):
        if choice.get("type") in ("function", "custom"):
            return _chosen(choice)
        if choice.get("type") == "allowed_tools" and isinstance(tools := choice.get("tools"), list):
            allowed = [_chosen(tool) for tool in tools if isinstance(tool, dict)]
            return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": allowed}}
    if choice not in (None, "none", "auto", "required"):
        raise BadParam(
            "tool_choice: 'none', 'auto', 'required', {'type': 'function', 'name': …} or "
            "{'type': 'allowed_tools', 'mode': …, 'tools': …}",
            "tool_choice",
        )
    return choice


def _chosen(choice: dict[str, Any]) -> dict[str, Any]:
    name = choice.get("name")
    shown = _shown_name(name, choice.get("namespace")) if isinstance(name, str) else None
    return {"type": "function", "function": {"name": shown}}


def _response_format(form: dict[str, Any] | None) -> ResponseFormat | None:
    if form is None:
        return None
    kind, schema = form.get("type"), form.get("schema")
    if not isinstance(kind, str):
        raise BadParam("text.format.type: text, json_object or json_schema", "text.format.type")
    if kind == "json_schema" and not isinstance(schema, dict):
        raise BadParam("text.format.schema: a schema is needed", "text.format.schema")
    return ResponseFormat(kind, JsonSchemaFormat(schema=schema) if kind == "json_schema" else None)


def _messages(body: ResponsesBody) -> tuple[list[dict[str, Any]], list[str]]:
    """The messages of a chat, and the kinds of the items that are left out: those of tools that a server ran,
    and of other servers' records."""
    items = [{"role": "user", "content": body.input}] if isinstance(body.input, str) else body.input
    messages: list[dict[str, Any]] = []
    left_out: list[str] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    thought = ""
    for i, item in enumerate(items):
        where, kind = f"input[{i}]", str(item.get("type", "message"))
        call_id = item.get("call_id") or (item.get("id") if kind == "function_call" else None)
        if kind == "message":
            role = item.get("role")
            past = role == "assistant"
            given = (item.get("content") or "") if past else item.get("content")
            content = texts_of(given, f"{where}.content", past=past)
            messages.append(
                {"role": role, "content": content} | ({"reasoning_content": thought} if thought else {})
            )
            thought = ""
        elif kind.endswith("_output"):
            output = item.get("output", item.get("tools", "")) or ""
            texts = texts_of([output] if isinstance(output, dict) else output, f"{where}.output", past=True)
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": texts})
        elif kind.endswith("_call") and call_id is not None:
            call = {"id": call_id, "type": "function", "function": _function(item, kind)}
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": None})
                if thought:
                    messages[-1]["reasoning_content"] = thought
                thought = ""
            messages[-1].setdefault("tool_calls", []).append(call)
        elif kind == "reasoning":
            thought += "\n".join(texts_of(item.get("content") or "", f"{where}.content"))
        elif kind == "item_reference" or "role" in item:
            raise BadParam(f"{where}.type: {kind!r} is not supported; send the items themselves", where)
        else:
            left_out.append(f"input.{kind}")
    return messages, left_out


def _function(item: dict[str, Any], kind: str) -> dict[str, Any]:
    """The function and the arguments of a call; those of built-in tools have the name of their kind."""
    name = item.get("name", None if kind == "function_call" else kind.removesuffix("_call"))
    if kind == "custom_tool_call":
        arguments: Any = {"input": item.get("input")}
    else:
        arguments = item.get("arguments", item.get("action", item.get("operation")))
    shown = _shown_name(name, item.get("namespace")) if isinstance(name, str) else name
    return {"name": shown, "arguments": arguments}


class ResponsesAnswer(BlockAnswer):
    """The `response` object and its events."""

    def __init__(self, chat: Answer, body: ResponsesBody) -> None:
        super().__init__(chat)
        self._key = self.shape.id.removeprefix("chatcmpl-")
        self._sequence = 0
        self._called = {tool.function.name: called for tool, called in _offered(body.tools or [])}
        sampling, chosen = (
            self.choice.sample.request.sampling,
            same_fields(body, BodyPart.RESPONSES, BodyPart.CHAT),
        )
        given: Json = {
            "instructions": body.instructions,
            "max_output_tokens": chosen["max_completion_tokens"],
            "metadata": body.metadata or {},
            "parallel_tool_calls": chosen["parallel_tool_calls"] is not False,
            "previous_response_id": None,
            "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
            "store": False,
            "temperature": sampling.temperature,
            "text": {"format": (body.text and body.text.format) or {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_p": sampling.top_p,
            "truncation": "disabled",
            "user": chosen["user"],
        }
        #: The client's fields that each `response` object repeats: encoded once.
        self._given = {name: msgspec.Raw(msgspec.json.encode(value)) for name, value in given.items()}

    @property
    def kept_bytes(self) -> int:
        return 2 * sum(map(len, self._given.values()))  # with the last event, or the whole answer

    def begin(self) -> Iterator[Json]:
        yield self._event("response.created", response=self._response("in_progress"))
        yield self._event("response.in_progress", response=self._response("in_progress"))

    def opened(self, block: Block) -> Iterator[Json]:
        item = self._item(block, "in_progress")
        kind = self._kind(block)
        item[_GROWS.get(kind, "content")] = "" if kind in _GROWS else []
        yield self._event("response.output_item.added", output_index=block.index, item=item)
        if block.kind == "text":
            yield self._of(block, "response.content_part.added", part=self._part(block))

    def extended(self, block: Block, text: str) -> Iterator[Json]:
        kind = self._kind(block)
        more: Json = {"logprobs": []} if kind == "text" else {}
        yield self._of(
            block, f"{_NAMES[kind]}.delta", delta=_input(text) if kind == "custom" else text, **more
        )

    def closed(self, block: Block) -> Iterator[Json]:
        kind = self._kind(block)
        if block.call is not None:
            item = self._item(block)
            shown = {name: item[name] for name in (_GROWS[kind], "name")}
            yield self._of(block, f"{_NAMES[kind]}.done", **shown)
        elif block.kind == "thought":
            yield self._of(block, f"{_NAMES['thought']}.done", text=block.text)
        else:
            yield self._of(block, f"{_NAMES['text']}.done", text=block.text, logprobs=[])
            yield self._of(block, "response.content_part.done", part=self._part(block))
        yield self._event("response.output_item.done", output_index=block.index, item=self._item(block))

    def end(self) -> Iterator[Json]:
        whole = self.whole()
        yield self._event(f"response.{whole['status']}", response=whole)

    def failed(self, error: SegueError) -> bytes:
        """The last event of a stream that has failed."""
        found: Any = body_of(error)["error"]
        response = self._response("failed")
        response["error"] = {"code": "server_error", "message": found["message"]}
        return named_event(self._event("response.failed", response=response))

    def whole(self) -> Json:
        response = self._response("incomplete" if self.cut else "completed")
        if self.cut:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        usage = self.usage()
        response["usage"] = {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self.choice.reasoning_tokens},
            "total_tokens": usage["total_tokens"],
        }
        return response

    def _response(self, status: str) -> Json:
        shape = self.shape
        return {
            "id": f"resp_{self._key}",
            "object": "response",
            "created_at": shape.created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": shape.model,
            "output": [self._item(block) for block in self.blocks],
            "usage": None,
            **self._given,
        }

    def _item(self, block: Block, status: str = "") -> Json:
        status = status or ("completed" if block.closed else "incomplete")
        kind = self._kind(block)
        item: Json = {"id": self._item_id(block), "status": status}
        if block.call is not None:
            called = self._called.get(block.call.name, _Called(block.call.name))
            call = {"call_id": block.call.id, "name": called.name}
            if called.namespace is not None:
                call["namespace"] = called.namespace
            if kind == "custom":
                return {**item, "type": "custom_tool_call", **call, "input": _input(block.call.arguments)}
            return {**item, "type": "function_call", **call, "arguments": block.call.arguments}
        if block.kind == "thought":
            content = [{"type": "reasoning_text", "text": block.text}]
            return {**item, "type": "reasoning", "summary": [], "content": content}
        return {**item, "type": "message", "role": "assistant", "content": [self._part(block)]}

    def _kind(self, block: Block) -> str:
        """The kind of a block here: a call of a custom tool is `custom`."""
        called = self._called.get(block.call.name) if block.call is not None else None
        return "custom" if called is not None and called.custom else block.kind

    def _item_id(self, block: Block) -> str:
        return f"{_PREFIXES[self._kind(block)]}_{self._key}_{block.index}"

    def _part(self, block: Block) -> Json:
        return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}

    def _of(self, block: Block, kind: str, **more: Any) -> Json:
        """An event of a block."""
        where: Json = {"item_id": self._item_id(block), "output_index": block.index}
        if block.kind != "call":
            where["content_index"] = 0
        return self._event(kind, **where, **more)

    def _event(self, kind: str, **more: Any) -> Json:
        event = {"type": kind, "sequence_number": self._sequence, **more}
        self._sequence += 1
        return event


def _input(arguments: str) -> str:
    """The text of a call of a custom tool. Arguments of another form, and those of a call that was cut, are
    its text."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    text = value.get("input") if isinstance(value, dict) else None
    return text if isinstance(text, str) else arguments


_NAMES: Final = {
    "thought": "response.reasoning_text",
    "text": "response.output_text",
    "call": "response.function_call_arguments",
    "custom": "response.custom_tool_call_input",
}
_PREFIXES: Final = {"thought": "rs", "text": "msg", "call": "fc", "custom": "ctc"}
#: The field of a call's item that its events fill.
_GROWS: Final = {"call": "arguments", "custom": "input"}
