"""Anthropic's `/v1/messages`: to a chat and back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

import msgspec

from segue.server.frontend.answers import Answer, Json
from segue.server.frontend.block_answers import Block, BlockAnswer
from segue.server.frontend.openai_types import (
    ChatBody,
    FunctionTool,
    JsonSchemaFormat,
    Number,
    ResponseFormat,
    Tool,
)
from segue.server.frontend.problems import BadParam
from segue.server.frontend.unsupported import Refused


class AnthropicTool(msgspec.Struct, frozen=True):
    """A function; `input_schema` is a JSON schema."""

    name: str
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    type: str | None = None
    strict: bool | None = None


class AnthropicToolChoice(msgspec.Struct, frozen=True):
    """`auto`, `any`, `tool` with a name, or `none`."""

    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingOptions(msgspec.Struct, frozen=True):
    """Whether the model reasons, and whether that is shown. `budget_tokens` is ignored."""

    type: str
    budget_tokens: int | None = None
    display: str | None = None


class OutputOptions(msgspec.Struct, frozen=True):
    """The form of the text, and how much the model reasons."""

    format: dict[str, Any] | None = None
    effort: str | None = None


class MessagesBody(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /v1/messages`, and `/v1/messages/count_tokens` where `max_tokens` is not needed."""

    model: str | None = None
    messages: list[dict[str, Any]]
    max_tokens: int | None = None
    system: str | list[dict[str, Any]] | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: int | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: ThinkingOptions | None = None
    output_config: OutputOptions | None = None
    metadata: dict[str, Any] | None = None


REFUSED_IN_MESSAGES: Final[Refused] = {
    "container": (),
    "context_management": ({},),
    "mcp_servers": ([],),
    "prefill": (),
}
IGNORED_IN_MESSAGES: Final = frozenset(
    {
        *("betas", "cache_control", "diagnostics", "inference_geo", "service_tier", "speed"),
        *("user_profile_id", "workspace_id"),
    }
)


#: The names of a chat's fields in this API.
MESSAGES_NAMES: Final = {
    "messages": "messages",
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
}


def chat_of_messages(body: MessagesBody) -> ChatBody:
    """The chat that `body` asks for, without its `max_tokens`. Raises BadParam for what is not built."""
    messages: list[dict[str, Any]] = []
    if body.system:
        messages.append({"role": "system", "content": _texts(body.system, "system")})
    for i, message in enumerate(body.messages):
        messages += _chat_messages(message, f"messages[{i}]")
    choice, thinking = body.tool_choice, body.thinking
    output = body.output_config or OutputOptions()
    variables = None if thinking is None else {"enable_thinking": thinking.type != "disabled"}
    user = (body.metadata or {}).get("user_id")
    return ChatBody(
        model=body.model,
        messages=messages,
        stop=body.stop_sequences,
        stream=body.stream,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        tools=[_tool(tool, f"tools[{i}]") for i, tool in enumerate(body.tools or [])] or None,
        tool_choice=_tool_choice(choice),
        parallel_tool_calls=False if choice is not None and choice.disable_parallel_tool_use else None,
        # An answer that the client has begun is continued.
        continue_final_message=bool(messages) and messages[-1]["role"] == "assistant",
        chat_template_kwargs=variables,
        include_reasoning=thinking is None or (thinking.type != "disabled" and thinking.display != "omitted"),
        reasoning_effort=output.effort,
        response_format=_response_format(output.format),
        user=user if isinstance(user, str) else None,
    )


def _chat_messages(message: dict[str, Any], where: str) -> list[dict[str, Any]]:
    """OpenAI's messages for one of Anthropic's: each result of a tool is a message of its own."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise BadParam(f"{where}.role: user or assistant", f"{where}.role")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list):
        raise BadParam(f"{where}.content: text or a list of blocks", f"{where}.content")
    texts, thoughts, calls, results = list[str](), list[str](), list[Json](), list[Json]()
    for i, block in enumerate(content):
        at = f"{where}.content[{i}]"
        match block.get("type") if isinstance(block, dict) else None:
            case "text":
                texts.append(_text(block, "text", at))
            case "thinking":
                thoughts.append(_text(block, "thinking", at))
            case "redacted_thinking":
                pass
            case "tool_use":
                arguments = json.dumps(block.get("input") or {}, ensure_ascii=False)
                function = {"name": block.get("name"), "arguments": arguments}
                calls.append({"id": block.get("id"), "type": "function", "function": function})
            case "tool_result":
                text = _texts(block.get("content") or "", f"{at}.content")
                results.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": text})
            case kind:
                raise BadParam(f"{at}.type: this model reads text, not {kind!r}", at)
    said: list[dict[str, Any]] = []
    if texts or calls or thoughts:
        said = [{"role": role, "content": "".join(texts)}]
        if thoughts:
            said[0]["reasoning_content"] = "".join(thoughts)
        if calls:
            said[0]["tool_calls"] = calls
    return results + said


def _text(block: dict[str, Any], name: str, where: str) -> str:
    text = block.get(name)
    if not isinstance(text, str):
        raise BadParam(f"{where}.{name}: text is needed", f"{where}.{name}")
    return text


def _texts(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadParam(f"{where}: text or a list of text blocks", where)
    texts = []
    for i, block in enumerate(content):
        if not isinstance(block, dict) or block.get("type") != "text":
            raise BadParam(f"{where}[{i}].type: this model reads text only", f"{where}[{i}]")
        texts.append(_text(block, "text", f"{where}[{i}]"))
    return "\n".join(texts)


def _tool(tool: AnthropicTool, where: str) -> Tool:
    if tool.type not in (None, "custom"):
        raise BadParam(f"{where}.type: only functions of the client are known", f"{where}.type")
    return Tool(FunctionTool(tool.name, tool.description, tool.input_schema, tool.strict))


def _tool_choice(choice: AnthropicToolChoice | None) -> str | dict[str, Any] | None:
    match choice.type if choice is not None else None:
        case None:
            return None
        case "auto" | "none" as mode:
            return mode
        case "any":
            return "required"
        case "tool":
            assert choice is not None
            return {"type": "function", "function": {"name": choice.name}}
    raise BadParam("tool_choice.type: auto, any, tool or none", "tool_choice.type")


def _response_format(form: dict[str, Any] | None) -> ResponseFormat | None:
    if form is None:
        return None
    if form.get("type") != "json_schema" or not isinstance(form.get("schema"), dict):
        raise BadParam("output_config.format: {'type': 'json_schema', 'schema': …}", "output_config.format")
    return ResponseFormat("json_schema", JsonSchemaFormat(schema=form["schema"]))


class MessagesAnswer(BlockAnswer):
    """The `message` object and its events. Nothing of `body` is repeated in it."""

    def __init__(self, chat: Answer, body: MessagesBody) -> None:
        super().__init__(chat)

    def begin(self) -> Iterator[Json]:
        message = self._message() | {"usage": self._counts()}
        yield {"type": "message_start", "message": message}

    def opened(self, block: Block) -> Iterator[Json]:
        yield {
            "type": "content_block_start",
            "index": block.index,
            "content_block": _content(block, empty=True),
        }

    def extended(self, block: Block, text: str) -> Iterator[Json]:
        kind, name = _DELTAS[block.kind]
        yield {"type": "content_block_delta", "index": block.index, "delta": {"type": kind, name: text}}

    def closed(self, block: Block) -> Iterator[Json]:
        yield {"type": "content_block_stop", "index": block.index}

    def end(self) -> Iterator[Json]:
        yield {"type": "message_delta", "delta": self._ending(), "usage": self._counts()}
        yield {"type": "message_stop"}

    def whole(self) -> Json:
        content = [_content(block) for block in self.blocks]
        return {**self._message(), "content": content, **self._ending(), "usage": self._counts()}

    def _message(self) -> Json:
        shape = self.shape
        return {
            "id": f"msg_{shape.id.removeprefix('chatcmpl-')}",
            "type": "message",
            "role": "assistant",
            "model": shape.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }

    def _ending(self) -> Json:
        choice = self.choice
        matched = choice.stop_reason if isinstance(choice.stop_reason, str) else None
        if self.cut:
            reason = "max_tokens"
        elif choice.calls:
            reason = "tool_use"
        else:
            reason = "end_turn" if matched is None else "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": matched if reason == "stop_sequence" else None}

    def _counts(self) -> Json:
        """Tokens so far. Anthropic counts cached tokens of the prompt apart from the others."""
        usage = self.usage()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - cached,
            "output_tokens": usage["completion_tokens"],
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
        }


_DELTAS: Final = {
    "thought": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "call": ("input_json_delta", "partial_json"),
}


def _content(block: Block, *, empty: bool = False) -> Json:
    if block.call is not None:
        given = {} if empty else _object(block.call.arguments)
        return {"type": "tool_use", "id": block.call.id, "name": block.call.name, "input": given}
    text = "" if empty else block.text
    if block.kind == "thought":
        return {"type": "thinking", "thinking": text, "signature": ""}
    return {"type": "text", "text": text}


def _object(arguments: str) -> Any:
    """The arguments as an object; a call that was cut has none (`stop_reason` is `max_tokens`)."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
