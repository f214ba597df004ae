"""Anthropic's `/v1/messages`: to a chat and back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

from segue.server.frontend.answers import Json
from segue.server.frontend.block_answers import Block, BlockAnswer
from segue.server.frontend.body_reader import names_in, same_fields
from segue.server.frontend.past_messages import text_of, texts_of
from segue.server.frontend.problems import BadParam
from segue.server.frontend.request_fields import (
    AnthropicTool,
    AnthropicToolChoice,
    BodyPart,
    ChatBody,
    FunctionTool,
    JsonSchemaFormat,
    MessagesBody,
    OutputOptions,
    ResponseFormat,
    Tool,
    TranslatedChat,
)

#: The names of a chat's fields in this API.
MESSAGES_NAMES: Final = names_in(BodyPart.MESSAGES, BodyPart.CHAT) | {
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
}


def chat_of_messages(body: MessagesBody) -> TranslatedChat:
    """The chat that `body` asks for, without its `max_tokens`. Raises BadParam for what is not built."""
    messages: list[dict[str, Any]] = []
    if body.system:
        messages.append({"role": "system", "content": texts_of(body.system, "system")})
    for i, message in enumerate(body.messages):
        messages += _chat_messages(message, f"messages[{i}]")
    choice, thinking = body.tool_choice, body.thinking
    output = body.output_config or OutputOptions()
    variables = None if thinking is None else {"enable_thinking": thinking.type != "disabled"}
    user = (body.metadata or {}).get("user_id")
    tools = body.tools or []
    chat = ChatBody(
        **same_fields(body, BodyPart.MESSAGES, BodyPart.CHAT),
        messages=messages,
        tools=[_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools) if _own(tool)] or None,
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
    return TranslatedChat(chat, [f"tools.{tool.type}" for tool in tools if not _own(tool)])


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
            case "thinking":
                thoughts.append(_thought(block, at))
            case "redacted_thinking":
                pass
            case "tool_use":
                function = {"name": block.get("name"), "arguments": block.get("input")}
                calls.append({"id": block.get("id"), "type": "function", "function": function})
            case "tool_result":
                found = texts_of(block.get("content") or "", f"{at}.content", past=True)
                results.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": found})
            case _:
                # Blocks of server tools are shown as they are.
                texts.append(text_of(block, at, past=True))
    said: list[dict[str, Any]] = []
    if texts or calls or thoughts:
        said = [{"role": role, "content": texts}]
        if thoughts:
            said[0]["reasoning_content"] = "".join(thoughts)
        if calls:
            said[0]["tool_calls"] = calls
    return results + said


def _thought(block: dict[str, Any], where: str) -> str:
    text = block.get("thinking")
    if not isinstance(text, str):
        raise BadParam(f"{where}.thinking: text is needed", f"{where}.thinking")
    return text


def _own(tool: AnthropicTool) -> bool:
    """Whether it is a function of the client."""
    return tool.type in (None, "custom")


def _tool(tool: AnthropicTool, where: str) -> Tool:
    if tool.name is None:
        raise BadParam(f"{where}.name: a function has a name", f"{where}.name")
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
    """The `message` object and its events. Nothing of the body is repeated in it."""

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
