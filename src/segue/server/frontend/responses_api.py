"""OpenAI's `/v1/responses`, without state on the server: to a chat and back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import msgspec

from segue.kv import SegueError
from segue.server.frontend.answers import Answer, Json
from segue.server.frontend.block_answers import Block, BlockAnswer
from segue.server.frontend.dialects import named_event
from segue.server.frontend.openai_types import (
    ChatBody,
    FunctionTool,
    JsonSchemaFormat,
    Number,
    ResponseFormat,
    Tool,
)
from segue.server.frontend.problems import BadParam, body_of
from segue.server.frontend.unsupported import Refused


class ReasoningOptions(msgspec.Struct, frozen=True):
    """How much the model reasons. No summary is made; `summary` is ignored."""

    effort: str | None = None
    summary: str | None = None


class TextOptions(msgspec.Struct, frozen=True):
    """The form of the text."""

    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ResponsesTool(msgspec.Struct, frozen=True):
    """A tool; functions are the only kind that is built, and have a name."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ResponsesBody(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /v1/responses`. Fields after `user` are those of chat."""

    model: str | None = None
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    stream: bool | None = None
    tools: list[ResponsesTool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    max_output_tokens: int | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    truncation: str | None = None
    metadata: dict[str, Any] | None = None
    user: str | None = None
    top_k: int | None = None
    min_p: Number | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    repetition_penalty: Number | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    priority: int | None = None
    cache_salt: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


#: They need a server that keeps responses, or are not built.
REFUSED_IN_RESPONSES: Final[Refused] = {
    "background": (False,),
    "context_management": ([],),
    "conversation": (),
    "moderation": (),
    "previous_response_id": ("",),
    "prompt": (),
    "top_logprobs": (0,),
}
IGNORED_IN_RESPONSES: Final = frozenset(
    {
        *("background_options", "include", "max_tool_calls", "prompt_cache_key", "prompt_cache_options"),
        *("prompt_cache_retention", "safety_identifier", "service_tier", "store", "stream_options"),
    }
)
#: Fields that chat has under the same name.
_SAME: Final = (
    *("model", "stream", "parallel_tool_calls", "temperature", "top_p", "user", "top_k", "min_p", "seed"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "stop", "ignore_eos", "min_tokens"),
    *("priority", "cache_salt", "chat_template_kwargs"),
)


#: The names of a chat's fields in this API.
RESPONSES_NAMES: Final = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}


def chat_of_responses(body: ResponsesBody) -> ChatBody:
    """The chat that `body` asks for. Raises BadParam for what is not built."""
    if body.truncation not in (None, "disabled"):
        raise BadParam("truncation: a prompt is never cut; leave it out", "truncation")
    text = body.text or TextOptions()
    if text.verbosity not in (None, "medium"):
        raise BadParam("text.verbosity: not supported; leave it out", "text.verbosity")
    tools = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(body.tools or [])]
    return ChatBody(
        messages=_messages(body),
        max_completion_tokens=body.max_output_tokens,
        tools=tools or None,
        tool_choice=_tool_choice(body.tool_choice),
        response_format=_response_format(text.format),
        reasoning_effort=body.reasoning.effort if body.reasoning else None,
        **{name: getattr(body, name) for name in _SAME},
    )


def _tool(tool: ResponsesTool, where: str) -> Tool:
    if tool.type != "function":
        raise BadParam(f"{where}.type: only 'function' is known", f"{where}.type")
    if tool.name is None:
        raise BadParam(f"{where}.name: a function has a name", f"{where}.name")
    return Tool(FunctionTool(tool.name, tool.description, tool.parameters, tool.strict))


def _tool_choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    if isinstance(choice, dict) and choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if choice not in (None, "none", "auto", "required"):
        raise BadParam(
            "tool_choice: 'none', 'auto', 'required' or {'type': 'function', 'name': …}", "tool_choice"
        )
    return choice


def _response_format(form: dict[str, Any] | None) -> ResponseFormat | None:
    if form is None:
        return None
    kind, schema = form.get("type"), form.get("schema")
    if not isinstance(kind, str):
        raise BadParam("text.format.type: text, json_object or json_schema", "text.format.type")
    if kind == "json_schema" and not isinstance(schema, dict):
        raise BadParam("text.format.schema: a schema is needed", "text.format.schema")
    return ResponseFormat(kind, JsonSchemaFormat(schema=schema) if kind == "json_schema" else None)


def _messages(body: ResponsesBody) -> list[dict[str, Any]]:
    items = [{"role": "user", "content": body.input}] if isinstance(body.input, str) else body.input
    messages: list[dict[str, Any]] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    thought = ""
    for i, item in enumerate(items):
        where = f"input[{i}]"
        match item.get("type", "message"):
            case "message":
                role = "system" if item.get("role") == "developer" else item.get("role")
                content = item.get("content")
                message: dict[str, Any] = {"role": role, "content": content}
                if role == "system":
                    message["content"] = _text(content, f"{where}.content")
                    if len(messages) == 1 and messages[0]["role"] == "system":
                        # Templates read the first system message only.
                        message["content"] = f"{messages.pop()['content']}\n\n{message['content']}"
                messages.append(message | ({"reasoning_content": thought} if thought else {}))
                thought = ""
            case "function_call":
                call = {"id": item.get("call_id"), "type": "function", "function": _function(item)}
                if not messages or messages[-1]["role"] != "assistant":
                    messages.append({"role": "assistant", "content": None})
                    if thought:
                        messages[-1]["reasoning_content"] = thought
                    thought = ""
                messages[-1].setdefault("tool_calls", []).append(call)
            case "function_call_output":
                output = _text(item.get("output"), f"{where}.output")
                messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
            case "reasoning":
                thought += _text(item.get("content") or "", f"{where}.content")
            case kind:
                raise BadParam(f"{where}.type: {kind!r} is not supported; send the items themselves", where)
    return messages


def _function(item: dict[str, Any]) -> dict[str, Any]:
    return {"name": item.get("name"), "arguments": item.get("arguments")}


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadParam(f"{where}: text is needed", where)
    texts = []
    for part in content:
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            raise BadParam(f"{where}: this model reads text only", where)
        texts.append(part["text"])
    return "".join(texts)


class ResponsesAnswer(BlockAnswer):
    """The `response` object and its events."""

    def __init__(self, chat: Answer, body: ResponsesBody) -> None:
        super().__init__(chat)
        self._key = self.shape.id.removeprefix("chatcmpl-")
        self._sequence = 0
        sampling = self.choice.sample.request.sampling
        self._given: Json = {
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
            "store": False,
            "temperature": sampling.temperature,
            "text": {"format": (body.text and body.text.format) or {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_p": sampling.top_p,
            "truncation": "disabled",
            "user": body.user,
        }

    def begin(self) -> Iterator[Json]:
        yield self._event("response.created", response=self._response("in_progress"))
        yield self._event("response.in_progress", response=self._response("in_progress"))

    def opened(self, block: Block) -> Iterator[Json]:
        item = self._item(block, "in_progress")
        item["arguments" if block.kind == "call" else "content"] = "" if block.kind == "call" else []
        yield self._event("response.output_item.added", output_index=block.index, item=item)
        if block.kind == "text":
            yield self._of(block, "response.content_part.added", part=self._part(block))

    def extended(self, block: Block, text: str) -> Iterator[Json]:
        more: Json = {"logprobs": []} if block.kind == "text" else {}
        yield self._of(block, f"{_NAMES[block.kind]}.delta", delta=text, **more)

    def closed(self, block: Block) -> Iterator[Json]:
        if block.kind == "call":
            assert block.call is not None
            name = block.call.name
            yield self._of(block, f"{_NAMES['call']}.done", arguments=block.text, name=name)
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
        item: Json = {"id": f"{_PREFIXES[block.kind]}_{self._key}_{block.index}", "status": status}
        if block.call is not None:
            call = {"call_id": block.call.id, "name": block.call.name, "arguments": block.call.arguments}
            return {**item, "type": "function_call", **call}
        if block.kind == "thought":
            content = [{"type": "reasoning_text", "text": block.text}]
            return {**item, "type": "reasoning", "summary": [], "content": content}
        return {**item, "type": "message", "role": "assistant", "content": [self._part(block)]}

    def _part(self, block: Block) -> Json:
        return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}

    def _of(self, block: Block, kind: str, **more: Any) -> Json:
        """An event of a block."""
        where: Json = {
            "item_id": f"{_PREFIXES[block.kind]}_{self._key}_{block.index}",
            "output_index": block.index,
        }
        if block.kind != "call":
            where["content_index"] = 0
        return self._event(kind, **where, **more)

    def _event(self, kind: str, **more: Any) -> Json:
        event = {"type": kind, "sequence_number": self._sequence, **more}
        self._sequence += 1
        return event


_NAMES: Final = {
    "thought": "response.reasoning_text",
    "text": "response.output_text",
    "call": "response.function_call_arguments",
}
_PREFIXES: Final = {"thought": "rs", "text": "msg", "call": "fc"}
