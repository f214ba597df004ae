"""The table of request fields: each field of each API is one row.

The rows make the types that read bodies, the checks, `/openapi.json`, and the tables of docs/http.md
(`tools/fields_page.py`). There are two kinds of rows:

- A field that is used is an attribute of a body: its type, a sentence about it, and its checks (`Range`,
  `Most`) or its kind of constraint (`Constrains`). It also belongs to each further `BodyPart` that stands
  there, by another name to that of an `As`.
- `OTHER_FIELDS` has what is refused or ignored: a field there has no type.

Clients send null for fields that they do not set, so every field may be null (`X | None`). A field without a
row is ignored, and a header of the answer names it.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final

import msgspec

from segue.server.frontend.problems import BadParam

MAX_SAMPLES: Final = 128
MAX_LOGPROBS: Final = 20

#: A number, or anything else: its `Range` looks. msgspec needs 25 us for one such as 1.5e300 where a field is
#: a float; where it is untyped, `read_float` reads it in a hundredth of that.
Number = Any


class BodyPart(enum.Flag):
    """Where a field stands: the body of an API, or an object in it."""

    CHAT = enum.auto()
    COMPLETIONS = enum.auto()
    RESPONSES = enum.auto()
    MESSAGES = enum.auto()
    GENERATE = enum.auto()
    SAMPLING_PARAMS = enum.auto()
    STREAM_OPTIONS = enum.auto()
    STRUCTURED_OUTPUTS = enum.auto()
    TOKENIZE = enum.auto()
    DETOKENIZE = enum.auto()
    BOTH = CHAT | COMPLETIONS


@dataclass(frozen=True, slots=True)
class As:
    """The field has the name `name` in `part`, with the same meaning."""

    part: BodyPart
    name: str


@dataclass(frozen=True, slots=True)
class Range:
    """The numbers that a field may be: both ends included, but for `low` if `open_low`. With `each` it may be
    a list of them. `default` holds for who names none; that of a field of `SamplingDefaults` is there."""

    low: float
    high: float | None = None
    open_low: bool = False
    default: float | None = None
    each: bool = False

    def __str__(self) -> str:
        if self.high is None:
            return f"at least {self.low}"
        return (
            f"above {self.low} and at most {self.high}"
            if self.open_low
            else f"from {self.low} to {self.high}"
        )

    def check(self, name: str, value: object) -> None:
        """Raises BadParam unless `value`, which is not null, is such a number."""
        if self.each and isinstance(value, list):
            for one in value:
                self.check(name, one)
            return
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise BadParam(f"{name}: a number is needed", name)
        high = value if self.high is None else self.high
        if not self.low <= value <= high or (self.open_low and value == self.low):
            shown = f"{value:g}" if isinstance(value, float) else str(value)
            raise BadParam(f"{name}: {self}, not {shown[:40]}", name)


@dataclass(frozen=True, slots=True)
class Most:
    """The limit of the letters of a text, or of the entries of a list or an object."""

    most: int

    def __str__(self) -> str:
        return f"at most {self.most}"

    def check(self, name: str, value: Any) -> None:
        """Raises BadParam for a longer one."""
        if len(value) > self.most:
            kind = "characters" if isinstance(value, str) else "entries"
            raise BadParam(f"{name}: at most {self.most} {kind}, not {len(value)}", name)


class Constrains(enum.Enum):
    """The field is a constraint on the answer, of this kind."""

    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"
    REGEX = "regex"
    CHOICE = "choice"
    LARK = "lark"


#: The DP ranks of an instance.
_RANK: Final = Range(0, 2**16 - 1)
#: APIs that a field belongs to besides those of its body.
_R, _M, _G, _P = BodyPart.RESPONSES, BodyPart.MESSAGES, BodyPart.GENERATE, BodyPart.SAMPLING_PARAMS


# ---- objects in bodies --------------------------------------------------------------------------


class StreamOptions(msgspec.Struct, frozen=True):
    """`stream_options`."""

    include_usage: Annotated[bool | None, "the usage, in a last event of its own"] = None
    continuous_usage_stats: Annotated[
        bool | None, "with `include_usage`: each event has the usage of its sample so far"
    ] = None


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

    json: Annotated[
        str | bool | dict[str, Any] | None, "a JSON schema, or its text", Constrains.JSON_SCHEMA
    ] = None
    json_object: Annotated[bool | None, "any JSON object", Constrains.JSON_OBJECT] = None
    regex: Annotated[str | None, "a regular expression", Constrains.REGEX] = None
    choice: Annotated[list[str] | None, "one of these texts", Constrains.CHOICE] = None
    grammar: Annotated[str | None, "a grammar in Lark or GBNF", Constrains.LARK] = None


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


class ReasoningOptions(msgspec.Struct, frozen=True):
    """How much the model reasons. No summary is made; `summary` is ignored."""

    effort: str | None = None
    summary: str | None = None


class TextOptions(msgspec.Struct, frozen=True):
    """The form of the text. `verbosity` is ignored."""

    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ResponsesTool(msgspec.Struct, frozen=True):
    """A tool. A `function` and a `custom` tool (of one text, in a `format`) have a name, a `namespace` has
    such `tools`. Other kinds are for servers that run them, and are left out."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None


class AnthropicTool(msgspec.Struct, frozen=True):
    """A function; `input_schema` is a JSON schema. Tools of other types than `custom`, which Anthropic's
    models know or its servers run, are left out."""

    name: str | None = None
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


# ---- bodies -------------------------------------------------------------------------------------


class GenerateFields(msgspec.Struct, frozen=True, kw_only=True):
    """Fields that chat and text completions share; meanings are OpenAI's and vLLM's."""

    model: Annotated[str | None, "the served model's name; another one is a 404", _R, _M] = None
    stream: Annotated[bool | None, "the answer as server-sent events", _R, _M, _G] = None
    stream_options: Annotated[StreamOptions | None, "what a stream has besides"] = None
    max_tokens: Annotated[
        int | None,
        "the most tokens of an answer: 16 in text completions, else the rest of the context",
        As(_P, "max_new_tokens"),
    ] = None
    max_completion_tokens: Annotated[
        int | None, "the newer name of `max_tokens`; it wins", As(_R, "max_output_tokens")
    ] = None
    min_tokens: Annotated[
        int | None, "no end before so many tokens", Range(0, default=0), _R, As(_P, "min_new_tokens")
    ] = None
    temperature: Annotated[Number | None, "0: the likeliest token", Range(0, 2), _R, _M, _P] = None
    top_p: Annotated[
        Number | None, "the likeliest tokens of this probability together", Range(0, 1, True), _R, _M, _P
    ] = None
    top_k: Annotated[int | None, "so many of the likeliest tokens; 0 and -1: all", Range(-1), _R, _M, _P] = (
        None
    )
    min_p: Annotated[
        Number | None, "tokens of at least this share of the likeliest one's probability", Range(0, 1), _R, _P
    ] = None
    presence_penalty: Annotated[
        Number | None, "subtracted once from a token of the answer", Range(-2, 2, default=0), _R, _P
    ] = None
    frequency_penalty: Annotated[
        Number | None, "subtracted for each time that the answer has a token", Range(-2, 2, default=0), _R, _P
    ] = None
    repetition_penalty: Annotated[
        Number | None, "divides the score of tokens of prompt and answer", Range(0, 10, True), _R, _P
    ] = None
    logit_bias: Annotated[
        dict[int, Number] | None, "added to the scores of these token ids: -100 to 100", Most(1024), _P
    ] = None
    seed: Annotated[int | None, "the same seed draws the same tokens", _R, As(_P, "sampling_seed")] = None
    n: Annotated[int | None, "answers to each prompt", Range(1, MAX_SAMPLES, default=1), _P] = None
    stop: Annotated[
        str | list[str] | None,
        "texts that end the answer: 16 of at most 1,000 characters",
        _R,
        _P,
        As(_M, "stop_sequences"),
    ] = None
    stop_token_ids: Annotated[list[int] | None, "tokens that end the answer", Most(128), _P] = None
    ignore_eos: Annotated[bool | None, "the model's end token ends nothing", _R, _P] = None
    include_stop_str_in_output: Annotated[
        bool | None, "the answer has the text that ended it", As(_P, "no_stop_trim")
    ] = None
    skip_special_tokens: Annotated[bool | None, "false: the text has special tokens", _P] = None
    response_format: Annotated[ResponseFormat | None, "`json_object`, or a `json_schema`"] = None
    structured_outputs: Annotated[StructuredOutputs | None, "one constraint on the answer"] = None
    guided_json: Annotated[
        str | bool | dict[str, Any] | None, "a JSON schema, or its text", Constrains.JSON_SCHEMA
    ] = None
    guided_regex: Annotated[str | None, "a regular expression", Constrains.REGEX] = None
    guided_choice: Annotated[list[str] | None, "one of these texts", Constrains.CHOICE] = None
    guided_grammar: Annotated[str | None, "a grammar in Lark or GBNF", Constrains.LARK] = None
    regex: Annotated[str | None, "SGLang's name of `guided_regex`", Constrains.REGEX, _P] = None
    json_schema: Annotated[
        str | bool | dict[str, Any] | None, "SGLang's name of `guided_json`", Constrains.JSON_SCHEMA, _P
    ] = None
    priority: Annotated[
        int | None, "the place in the queue: lower is earlier", Range(-(2**31), 2**31 - 1, default=0), _R
    ] = None
    user: Annotated[str | None, "the tenant, if the API key names none", _R] = None
    cache_salt: Annotated[
        str | None, "only requests of the same salt share cached prefixes", Most(1000), _R, _G
    ] = None
    return_token_ids: Annotated[bool | None, "`token_ids` and `prompt_token_ids` in each choice"] = None
    return_timeline: Annotated[bool | None, "the `timeline` of the first token"] = None
    routed_dp_rank: Annotated[int | None, "the DP rank of the answering instance", _RANK, _G] = None
    data_parallel_rank: Annotated[int | None, "the older name of `routed_dp_rank`", _RANK, _G] = None
    disagg_prefill_dp_rank: Annotated[int | None, "the DP rank of prefill", _RANK, _G] = None
    force_query_prefill_dp_rank: Annotated[bool | None, "decode asks the registry for prefill's rank"] = None


class ChatBody(GenerateFields, frozen=True, kw_only=True):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[dict[str, Any]], "the conversation"]
    logprobs: Annotated[bool | None, "the log-probability of each token"] = None
    top_logprobs: Annotated[
        int | None, "so many alternatives to each token; needs `logprobs`", Range(0, MAX_LOGPROBS)
    ] = None
    tools: Annotated[list[Tool] | None, "functions that the model may call"] = None
    tool_choice: Annotated[
        str | dict[str, Any] | None, "`none`, `auto`, `required`, a function, or `allowed_tools`"
    ] = None
    parallel_tool_calls: Annotated[bool | None, "false: at most one call", _R] = None
    add_generation_prompt: Annotated[bool | None, "false: no beginning of an answer in the prompt"] = None
    continue_final_message: Annotated[bool | None, "the answer continues the last message"] = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, "variables of the model's chat template", _R] = (
        None
    )
    reasoning_effort: Annotated[str | None, "how much the model reasons, from `none` to `max`"] = None
    include_reasoning: Annotated[bool | None, "false: the answer leaves the reasoning out"] = None
    separate_reasoning: Annotated[bool | None, "false: the reasoning is part of the text"] = None


@dataclass(frozen=True, slots=True)
class TranslatedChat:
    """A body of another API as a chat. `left_out` names what of it has no meaning here."""

    chat: ChatBody
    left_out: Sequence[str] = ()


class CompletionBody(GenerateFields, frozen=True, kw_only=True):
    """`POST /v1/completions`."""

    prompt: Annotated[str | list[str | int | list[int]], "a text, texts, token ids, or lists of token ids"]
    logprobs: Annotated[
        int | None, "the log-probability of each token, with so many alternatives", Range(0, MAX_LOGPROBS)
    ] = None
    echo: Annotated[bool | None, "the answer begins with the prompt"] = None
    suffix: Annotated[str | None, "refused, unless it is empty: no model here fills in the middle"] = None
    best_of: Annotated[int | None, "refused, unless it is `n`"] = None
    add_special_tokens: Annotated[bool | None, "false: the prompt without the tokenizer's first token"] = None


class ResponsesBody(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /v1/responses`."""

    input: Annotated[str | list[dict[str, Any]], "a text, or items"]
    instructions: Annotated[str | None, "a system message before the input"] = None
    tools: Annotated[list[ResponsesTool] | None, "functions, custom tools, namespaces"] = None
    tool_choice: Annotated[
        str | dict[str, Any] | None, "`none`, `auto`, `required`, a function, or `allowed_tools`"
    ] = None
    text: Annotated[TextOptions | None, "`format`: as `response_format`"] = None
    reasoning: Annotated[ReasoningOptions | None, "`effort`: as `reasoning_effort`"] = None
    truncation: Annotated[str | None, "refused, unless it is `disabled`: a prompt is never cut"] = None
    metadata: Annotated[dict[str, Any] | None, "repeated in the answer"] = None


class MessagesBody(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /v1/messages`, and `/v1/messages/count_tokens` where `max_tokens` is not needed."""

    messages: Annotated[list[dict[str, Any]], "the conversation"]
    max_tokens: Annotated[int | None, "needed, except to count tokens; cut to what fits"] = None
    system: Annotated[str | list[dict[str, Any]] | None, "the system message"] = None
    tools: Annotated[list[AnthropicTool] | None, "functions of the client"] = None
    tool_choice: Annotated[AnthropicToolChoice | None, "`auto`, `any`, `tool` with a name, or `none`"] = None
    thinking: Annotated[ThinkingOptions | None, "sets `enable_thinking` of the chat template"] = None
    output_config: Annotated[OutputOptions | None, "`format`, and `effort`: as `reasoning_effort`"] = None
    metadata: Annotated[dict[str, Any] | None, "`user_id`: as `user`"] = None


class NativeSampling(msgspec.Struct, frozen=True, kw_only=True):
    """`sampling_params` of `/generate`, by SGLang's names: each is a field of text completions."""


class NativeBody(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /generate`: a text or token ids, or a list of either."""

    text: Annotated[str | list[str] | None, "a prompt, or prompts"] = None
    input_ids: Annotated[list[int | list[int]] | None, "the same as token ids"] = None
    sampling_params: Annotated[NativeSampling | None, "how tokens are chosen"] = None
    return_logprob: Annotated[bool | list[bool] | None, "log-probabilities: of all prompts, or of each"] = (
        None
    )
    logprob_start_len: Annotated[
        int | list[int] | None, "those of the prompt too, from this token on; -1: none", Range(-1, each=True)
    ] = None
    top_logprobs_num: Annotated[
        int | list[int] | None, "so many alternatives to each token", Range(0, MAX_LOGPROBS, each=True)
    ] = None
    return_text_in_logprobs: Annotated[bool | None, "each log-probability has its token's text"] = None
    rid: Annotated[str | list[str] | None, "the `id` in `meta_info`"] = None


class TokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /tokenize`: a prompt or messages."""

    model: Annotated[str | None, "the served model's name", BodyPart.DETOKENIZE] = None
    prompt: Annotated[str | None, "a text"] = None
    messages: Annotated[list[dict[str, Any]] | None, "a conversation"] = None
    tools: Annotated[list[Tool] | None, "as in chat"] = None
    add_special_tokens: Annotated[bool | None, "false: without the tokenizer's first token"] = None
    add_generation_prompt: Annotated[bool | None, "as in chat"] = None
    continue_final_message: Annotated[bool | None, "as in chat"] = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, "as in chat"] = None


class DetokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /detokenize`."""

    tokens: Annotated[list[int], "token ids"]


#: The APIs of a body's own fields.
HOMES: Final[dict[type[msgspec.Struct], BodyPart]] = {
    GenerateFields: BodyPart.BOTH,
    ChatBody: BodyPart.CHAT,
    CompletionBody: BodyPart.COMPLETIONS,
    ResponsesBody: BodyPart.RESPONSES,
    MessagesBody: BodyPart.MESSAGES,
    NativeBody: BodyPart.GENERATE,
    NativeSampling: BodyPart.SAMPLING_PARAMS,
    StreamOptions: BodyPart.STREAM_OPTIONS,
    StructuredOutputs: BodyPart.STRUCTURED_OUTPUTS,
    TokenizeBody: BodyPart.TOKENIZE,
    DetokenizeBody: BodyPart.DETOKENIZE,
}


# ---- what is not used ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Refused:
    """A field that would change the answer: a 400, except for null and for the values `neutral`, which ask
    for nothing. `instead` says what to do."""

    name: str
    where: BodyPart
    about: str
    neutral: tuple[object, ...] = (False, 0, "", [], {})
    instead: str = "leave it out"

    def check(self, name: str, value: object) -> None:
        """Raises BadParam if `value` asks for something."""
        if value not in self.neutral:
            raise BadParam(f"{name}: not supported; {self.instead}", name)


@dataclass(frozen=True, slots=True)
class Ignored:
    """A field that changes no token, and of which no answer says anything."""

    name: str
    where: BodyPart
    about: str


_B: Final = BodyPart.BOTH
OTHER_FIELDS: Final[tuple[Refused | Ignored, ...]] = (
    # OpenAI
    Refused("audio", _B, "answers are text"),
    Refused("background", _R, "nothing is kept after an answer", (False,)),
    Refused("conversation", _R, "nothing is kept after an answer", ()),
    Refused("function_call", _B, "the older name of `tool_choice`", ("none", "auto"), "use tool_choice"),
    Refused("functions", _B, "the older name of `tools`", instead="use tools"),
    Refused("include_obfuscation", BodyPart.STREAM_OPTIONS, "events have no padding", (False,)),
    Refused("modalities", _B, "answers are text", ([], ["text"])),
    Refused("moderation", _R, "there is no moderation", ()),
    Refused("previous_response_id", _R, "nothing is kept after an answer", ("",)),
    Refused("prompt", _R, "there are no stored prompts", ()),
    Refused("top_logprobs", _R, "the items have no log-probabilities", (0,)),
    Refused("web_search_options", _B, "the server searches nothing", ()),
    # Anthropic
    Refused("container", _M, "the server runs no code", ()),
    Refused("mcp_servers", _M, "the server connects to no tool", ([],)),
    Refused("prefill", _M, "end with a message of the assistant", ()),
    # chat and text completions differ
    Refused("add_special_tokens", BodyPart.CHAT, "the chat template writes them"),
    Refused("best_of", BodyPart.CHAT, "of text completions", (1,)),
    Refused("echo", BodyPart.CHAT, "of text completions"),
    Refused("suffix", BodyPart.CHAT, "of text completions"),
    Refused("include_reasoning", BodyPart.COMPLETIONS, "of chat", (True,)),
    Refused("reasoning_effort", BodyPart.COMPLETIONS, "of chat", ("none", "medium")),
    Refused("tools", BodyPart.COMPLETIONS, "of chat"),
    Refused("top_logprobs", BodyPart.COMPLETIONS, "of chat", (), "use logprobs"),
    # vLLM
    Refused("allowed_token_ids", _B, "an answer of these tokens only"),
    Refused("bad_words", _B, "an answer without these words"),
    Refused("chat_template", _B, "the template is the model's", ()),
    Refused("detokenize", _B, "an answer has its text", (True,)),
    Refused("documents", _B, "texts for the chat template"),
    Refused("guided_whitespace_pattern", _B, "white space in JSON", ()),
    Refused("logits_processors", _B, "code of the client"),
    Refused("logprob_token_ids", _B, "log-probabilities of these tokens"),
    Refused("prompt_embeds", _B, "a prompt as vectors"),
    Refused("prompt_logprobs", _B, "log-probabilities of the prompt", ()),
    Refused("repetition_detection", _B, "an end of answers that repeat themselves"),
    Refused("return_prompt_text", _B, "the prompt's text in the answer"),
    Refused("return_token_strs", BodyPart.TOKENIZE, "the text of each token"),
    Refused("return_tokens_as_token_ids", _B, "token ids in log-probabilities"),
    Refused("spaces_between_special_tokens", _B | _P, "the text has them", (True,)),
    Refused("structural_tag", _B | _P | BodyPart.STRUCTURED_OUTPUTS, "a constraint between tags"),
    Refused("disable_additional_properties", BodyPart.STRUCTURED_OUTPUTS, "say it in the schema"),
    Refused("disable_any_whitespace", BodyPart.STRUCTURED_OUTPUTS, "white space in JSON"),
    Refused("whitespace_pattern", BodyPart.STRUCTURED_OUTPUTS, "white space in JSON", ()),
    Refused("thinking_token_budget", _B, "a limit of the reasoning", ()),
    Refused("truncate_prompt_tokens", _B, "a prompt is never cut", ()),
    Refused("use_beam_search", _B, "tokens are sampled"),
    Refused("vllm_xargs", _B, "arguments of vLLM's plugins"),
    Refused("watermarking", _B, "a mark in the answer's words"),
    # SGLang
    Refused("custom_logit_processor", _B | _G, "code of the client"),
    Refused("custom_params", _B | _P, "arguments of `custom_logit_processor`"),
    Refused("ebnf", _B | _P, "a grammar", instead="use guided_grammar"),
    Refused("extra_key", _B, "a key of cached prefixes", instead="use cache_salt"),
    Refused("input_ids", _B, "the prompt as token ids", instead="use prompt of /v1/completions"),
    Refused("lora_path", _B | _G, "an adapter"),
    Refused("no_stop_trim", _B, "the answer has what ended it", instead="use include_stop_str_in_output"),
    Refused("return_cached_tokens_details", _B, "where cached tokens were"),
    Refused("return_hidden_states", _B | _G, "vectors in the answer"),
    Refused("return_logprob", _B, "log-probabilities", instead="use logprobs"),
    Refused("return_routed_experts", _B | _G, "the experts of each token"),
    Refused("sampling_seed", _B, "the seed", (), "use seed"),
    Refused("session_params", _B | _G, "nothing is kept after an answer"),
    Refused("stop_regex", _B | _P, "a pattern that ends the answer"),
    Refused("audio_data", _G, "this server reads text"),
    Refused("image_data", _G, "this server reads text"),
    Refused("video_data", _G, "this server reads text"),
    Refused("input_embeds", _G, "a prompt as vectors"),
    Refused("token_ids_logprob", _G, "log-probabilities of these tokens"),
    # samplers of others
    Refused("dry_multiplier", _B, "DRY: a penalty of repeated sequences"),
    Refused("dynatemp_range", _B, "a temperature that changes"),
    Refused("grammar", _B, "a grammar", instead="use guided_grammar"),
    Refused("mirostat_mode", _B, "Mirostat sampling"),
    Refused("no_repeat_ngram_size", _B, "no sequence of so many tokens twice"),
    Refused("num_beams", _B, "tokens are sampled", (1,)),
    Refused("repeat_penalty", _B, "the penalty of repeated tokens", (1,), "use repetition_penalty"),
    Refused("smoothing_factor", _B, "quadratic sampling"),
    Refused("top_a", _B, "Top-A sampling"),
    Refused("top_n_sigma", _B, "Top-nsigma sampling", (0, -1)),
    Refused("typical_p", _B, "typical sampling", (1,)),
    Refused("xtc_probability", _B, "XTC: the likeliest tokens left out"),
    Refused("adapter_id", _B, "an adapter"),
    Refused("decoder_input_details", _B, "log-probabilities of the prompt"),
    Refused("do_sample", _B, "`temperature` 0 is the likeliest token", (True,), "use temperature"),
    Refused("enable_thinking", BodyPart.CHAT, "whether the model reasons", (), "use chat_template_kwargs"),
    Refused("epsilon_cutoff", _B, "epsilon sampling"),
    Refused("eta_cutoff", _B, "eta sampling"),
    Refused("format", _B, "the form of the answer", (), "use response_format"),
    Refused("images", _B, "this server reads text"),
    Refused("max_new_tokens", _B, "the most tokens of an answer", (), "use max_tokens"),
    Refused("mirostat", _B, "Mirostat sampling"),
    Refused("n_predict", _B, "the most tokens of an answer", (-1,), "use max_tokens"),
    Refused("options", _B, "Ollama's fields", ({},), "use fields of the body itself"),
    Refused("random_seed", _B, "the seed", (), "use seed"),
    Refused("stop_sequences", _B, "texts that end the answer", ([],), "use stop"),
    Refused("tfs_z", _B, "tail-free sampling", (1,)),
    Refused("watermark", _B, "a mark in the answer's words"),
    Ignored("cache_prompt", _B, "prefixes are cached without it"),
    Ignored("details", _B, "figures of TGI's answers"),
    Ignored("dry_allowed_length", _B, "of `dry_multiplier`"),
    Ignored("dry_base", _B, "of `dry_multiplier`"),
    Ignored("dry_penalty_last_n", _B, "of `dry_multiplier`"),
    Ignored("dry_sequence_breakers", _B, "of `dry_multiplier`"),
    Ignored("dynatemp_exponent", _B, "of `dynatemp_range`"),
    Ignored("id_slot", _B, "a slot of llama.cpp"),
    Ignored("keep_alive", _B, "the model stays loaded"),
    Ignored("mirostat_eta", _B, "of `mirostat`"),
    Ignored("mirostat_tau", _B, "of `mirostat`"),
    Ignored("n_keep", _B, "a prompt is never cut"),
    Ignored("repeat_last_n", _B, "of `repeat_penalty`"),
    Ignored("timings_per_token", _B, "figures of llama.cpp's answers"),
    Ignored("xtc_threshold", _B, "of `xtc_probability`"),
    # accounting, caches and styles of OpenAI and Anthropic
    Ignored("background_options", _R, "there are no background answers"),
    Ignored("betas", _M, "a version of Anthropic's API"),
    Ignored("cache_control", _M, "prefixes are cached without it"),
    Ignored("context_management", _R | _M, "a prompt is never cut"),
    Ignored("diagnostics", _M, "for Anthropic's logs"),
    Ignored("include", _R, "further parts of the answer"),
    Ignored("inference_geo", _M, "there is one place"),
    Ignored("max_tool_calls", _R, "of tools that a server runs"),
    Ignored("metadata", _B, "for the client's accounting"),
    Ignored("prediction", _B, "a likely answer; it only makes OpenAI faster"),
    Ignored("prompt_cache_key", _B | _R, "prefixes are cached without it"),
    Ignored("prompt_cache_options", _R, "prefixes are cached without it"),
    Ignored("prompt_cache_retention", _B | _R, "the cache decides"),
    Ignored("safety_identifier", _B | _R, "for OpenAI's accounting"),
    Ignored("service_tier", _B | _R | _M, "there is one tier"),
    Ignored("speed", _M, "there is one speed"),
    Ignored("store", _B | _R, "nothing is kept after an answer"),
    Ignored("stream_options", _R, "every stream has its usage"),
    Ignored("user_profile_id", _M, "for Anthropic's accounting"),
    Ignored("verbosity", _B, "a style that the models here do not know"),
    Ignored("workspace_id", _M, "for Anthropic's accounting"),
    # routers; no address from a request is ever contacted
    Ignored("bootstrap_host", _B, "read in direct mode"),
    Ignored("bootstrap_port", _B, "read in direct mode"),
    Ignored("bootstrap_room", _B, "read in direct mode"),
    Ignored("ec_transfer_params", _B, "of encoders"),
    Ignored("kv_transfer_params", _B, "read in direct mode"),
    Ignored("request_id", _B, "the header `X-Request-ID` is the id"),
    Ignored("rid", _B, "the header `X-Request-ID` is the id"),
    Ignored("session_id", _B, "for routers"),
    # vLLM, SGLang
    Ignored("custom_labels", _B, "labels of metrics"),
    Ignored("early_stopping", _B, "of beam search"),
    Ignored("guided_decoding_backend", _B, "there is one"),
    Ignored("images_config", _B, "of images"),
    Ignored("length_penalty", _B, "of beam search"),
    Ignored("media_io_kwargs", _B, "of images and audio"),
    Ignored("mm_processor_kwargs", _B, "of images and audio"),
    Ignored("ngram_corpus_id", _B, "of speculative decoding"),
    Ignored("routed_experts_start_len", _B, "of `return_routed_experts`"),
    Ignored("stream_reasoning", _B, "a stream has the reasoning as it comes"),
    Ignored("truncation_side", _B, "a prompt is never cut"),
)
