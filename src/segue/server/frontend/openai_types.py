"""The request bodies of clients. Wrong types are refused with the parameter named; unknown fields are
ignored, but not those that are known to change the answer (`unsupported`).

`X | None` everywhere: OpenAI's clients send nulls for what they do not set.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, get_args, get_type_hints

import msgspec

from segue.server.frontend.problems import unparsable
from segue.server.frontend.unsupported import (
    IGNORED,
    REFUSED,
    REFUSED_IN_CHAT,
    REFUSED_IN_COMPLETIONS,
    REFUSED_IN_STREAM_OPTIONS,
    REFUSED_IN_STRUCTURED_OUTPUTS,
    REFUSED_IN_TOKENIZE,
    Refused,
    refuse,
    with_refused,
)

#: A number, or anything else: `params` looks. msgspec needs 25 us for one such as 1.5e300 where a field is a
#: float; where it is untyped, `read_float` reads it in a hundredth of that.
Number = Any


def read_float(text: str) -> float:
    """A JSON number that is no integer. For decoders' `float_hook`."""
    value = float(text)
    if math.isinf(value):
        raise ValueError("Number out of range")
    return value


class StreamOptions(msgspec.Struct, frozen=True):
    """Usage in a stream: in a last event of its own; with `continuous_usage_stats` in every event too."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Any = None


class JsonSchemaFormat(msgspec.Struct, frozen=True):
    """A JSON schema and its name."""

    name: str | None = None
    schema: bool | dict[str, Any] | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, frozen=True):
    """The required form of the answer: text, json_object or json_schema."""

    type: str
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(msgspec.Struct, frozen=True):
    """vLLM's name for a constraint; at most one field is set."""

    json: str | bool | dict[str, Any] | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    disable_additional_properties: Any = None
    disable_any_whitespace: Any = None
    structural_tag: Any = None
    whitespace_pattern: Any = None


class FunctionTool(msgspec.Struct, frozen=True):
    """A function that the model may call; `parameters` is a JSON schema."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, frozen=True):
    """A tool; functions are the only kind."""

    function: FunctionTool
    type: str = "function"


class GenerateFields(msgspec.Struct, frozen=True, kw_only=True):
    """Fields that chat and text completions share; meanings are OpenAI's and vLLM's."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: int | None = None
    min_p: Number | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    repetition_penalty: Number | None = None
    logit_bias: dict[int, Number] | None = None
    seed: int | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | bool | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    regex: str | None = None
    json_schema: str | bool | dict[str, Any] | None = None
    max_completion_tokens: int | None = None
    priority: int | None = None
    user: str | None = None
    cache_salt: str | None = None
    return_token_ids: bool | None = None
    return_timeline: bool | None = None
    routed_dp_rank: int | None = None
    data_parallel_rank: int | None = None
    disagg_prefill_dp_rank: int | None = None
    force_query_prefill_dp_rank: bool | None = None


class ChatBody(GenerateFields, frozen=True, kw_only=True):
    """`POST /v1/chat/completions`."""

    messages: list[dict[str, Any]]
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None
    separate_reasoning: bool | None = None


class CompletionBody(GenerateFields, frozen=True, kw_only=True):
    """`POST /v1/completions`. `prompt`: a string, strings, token ids, or lists of token ids."""

    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None
    add_special_tokens: bool | None = None


class TokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /tokenize`: a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[Tool] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: list[int]


Body = TypeVar("Body", bound=msgspec.Struct)


#: Fields that each kind of body refuses by name.
_REFUSED: dict[type[msgspec.Struct], Refused] = {
    ChatBody: REFUSED | REFUSED_IN_CHAT,
    CompletionBody: REFUSED | REFUSED_IN_COMPLETIONS,
    TokenizeBody: REFUSED_IN_TOKENIZE,
    DetokenizeBody: {},
}


#: The fields that a kind of body refuses, and those that it ignores.
OtherFields = tuple[Refused, frozenset[str]]


@dataclass(frozen=True, slots=True)
class _Names:
    """The fields of an object, and those of the objects in them: `inner`, by the field's name."""

    known: frozenset[str]
    inner: Mapping[str, _Names]


def _names(kind: type[msgspec.Struct], ignored: frozenset[str]) -> _Names:
    """The names in a body of `kind`. `ignored` are known in its objects too."""
    inner = {}
    for name, hint in get_type_hints(kind).items():
        for part in _structs(hint):
            inner[name] = _names(part, ignored)
    return _Names(ignored.union(kind.__struct_fields__), inner)


def _structs(hint: Any) -> list[type[msgspec.Struct]]:
    """The structs in a type such as `list[Tool] | None`."""
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return [hint]
    return [found for part in get_args(hint) for found in _structs(part)]


class BodyReader:
    """Decoders made once. `read` raises BadParam for anything that is not a `kind`, or asks for what is not
    built. `more` are kinds of other APIs, with the fields that they refuse and those that they ignore."""

    def __init__(self, more: Mapping[type[msgspec.Struct], OtherFields] | None = None) -> None:
        more = more or {}
        self._refused = {**_REFUSED, **{kind: refused for kind, (refused, _) in more.items()}}
        types = {kind: with_refused(kind, refused) for kind, refused in self._refused.items()}
        self._decoders: dict[type, msgspec.json.Decoder[Any]] = {
            kind: msgspec.json.Decoder(found, float_hook=read_float) for kind, found in types.items()
        }
        self._known = {
            kind: _names(found, more[kind][1] if kind in more else IGNORED) for kind, found in types.items()
        }
        self._names = msgspec.json.Decoder(dict[str, msgspec.Raw])
        self._items = msgspec.json.Decoder(list[msgspec.Raw])

    @property
    def refused(self) -> Mapping[type[msgspec.Struct], Refused]:
        """The fields that each kind of body refuses by name."""
        return self._refused

    def unknown(self, raw: bytes, kind: type[msgspec.Struct]) -> list[str]:
        """The names in a body that are no fields of `kind` or of its objects, each once. `read` it before."""
        found: dict[str, None] = {}
        self._collect(raw, self._known[kind], "", found)
        return list(found)

    def _collect(self, raw: bytes, names: _Names, within: str, found: dict[str, None]) -> None:
        for name, value in self._names.decode(raw).items():
            if name not in names.known:
                found[within + name] = None
            elif name in names.inner:
                inner = bytes(value).lstrip()
                for one in self._items.decode(inner) if inner[:1] == b"[" else [value]:
                    if bytes(one).lstrip()[:1] == b"{":
                        self._collect(one, names.inner[name], f"{within}{name}.", found)

    def read(self, raw: bytes, kind: type[Body]) -> Body:
        try:
            body: Body = self._decoders[kind].decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise unparsable(error) from None
        refuse(body, self._refused[kind])
        if isinstance(body, GenerateFields):
            refuse(body.structured_outputs, REFUSED_IN_STRUCTURED_OUTPUTS, "structured_outputs.")
            refuse(body.stream_options, REFUSED_IN_STREAM_OPTIONS, "stream_options.")
        return body
