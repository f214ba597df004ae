"""A generation's request and outputs, between frontend, roles and engine.

Pure msgspec structs; they travel on the control channel as they are.
"""

from __future__ import annotations

import enum
from collections.abc import Awaitable, Callable
from typing import Any, Literal

import msgspec

from segue.kv import DpRanks, ErrorInfo

#: From who takes outputs and whose client is behind: to be awaited before the next output.
Wait = Callable[[], Awaitable[None]]


class FinishReason(enum.StrEnum):
    """Why a generation ended without an error."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    ABORT = "abort"


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """The natural log-probability `logprob` of one chosen `token` (its id), and the most likely alternatives
    `top` as pairs of both, best first."""

    token: int
    logprob: float
    top: list[tuple[int, float]] = []


#: The longest text of a `Grammar` that an instance takes.
MAX_GRAMMAR_BYTES = 64 * 2**10


class Grammar(msgspec.Struct, frozen=True):
    """A constraint on the output text: a JSON schema, any JSON object, a regex or a choice; or free text in
    which calls have a form (`text` is the JSON of a `CallGrammar`)."""

    kind: Literal["json_schema", "json_object", "regex", "lark", "tool_calls"]
    text: str = ""


class FormedCall(msgspec.Struct, frozen=True, omit_defaults=True):
    """One call that a model may make: JSON that follows `schema`, between texts. A text that is a special
    token of the model stands alone in its list."""

    before: list[str]
    schema: dict[str, Any]
    after: list[str] = []


class CallGrammar(msgspec.Struct, frozen=True, omit_defaults=True):
    """Free text with blocks of calls. `open[0]` begins a block, wherever it stands in the text: from there on
    the output is one of `calls`, then `close`. With `between` a block may have several calls, which
    `between` separates."""

    open: list[str]
    calls: list[FormedCall]
    between: list[str] | None = None
    close: list[str] = []


class Reasoning(msgspec.Struct, frozen=True, omit_defaults=True):
    """The tokens around reasoning that may come before the text of a grammar. `begun`: the prompt ends within
    the reasoning; else the answer's first token may begin it."""

    start: int
    end: int
    begun: bool = False


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How tokens are chosen and when generation ends. Meanings are OpenAI's and vLLM's.

    `temperature == 0` is greedy. `top_k == 0` and `top_p == 1` are off. `logprobs` is None (none)
    or the number of alternatives per token; `prompt_logprobs` the same for the prompt. Random
    numbers are keyed by `(seed, position)`, so every way to run a request draws the same ones;
    the frontend fills `seed` in when the client gives none. `grammar` binds after `reasoning`, if the model
    begins any.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    seed: int = 0
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None
    reasoning: Reasoning | None = None


class RankHints(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """DP ranks that a client asks for, by SGLang's names. None: whoever places the request chooses.

    `routed_dp_rank` is the rank of the instance that answers, `disagg_prefill_dp_rank` that of prefill. With
    `force_query_prefill_dp_rank` decode is not told the rank of prefill, but asks the registry for it.
    """

    routed_dp_rank: int | None = None
    disagg_prefill_dp_rank: int | None = None
    force_query_prefill_dp_rank: bool = False

    def looked_for(self, dp: DpRanks, room: int) -> int | None:
        """The DP rank of a prefill instance with `dp` on which decode looks for `room` by itself; None if it
        asks the registry. Raises DpRankOutOfRange for a hint that names no rank."""
        return dp.inferred(room, self.disagg_prefill_dp_rank, force_query=self.force_query_prefill_dp_rank)


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One generation of one prompt. `request_id` is unique in a frontend's incarnation.

    `output` are tokens that this generation has given already, on instances that are gone: it goes on
    after them as if it had never stopped. They are apart from the prompt because penalties,
    `min_tokens`, `max_tokens` and grammars count them. Fewer than `max_tokens`. `traceparent` (W3C) names the
    span that this generation belongs to. Where it has to wait, lower `priority` is earlier; requests of equal
    priority are served by turns among `tenant`s (an API key or a user, by a name that tells nothing of it).
    Cached prefixes are found only by requests with the same `cache_salt`, of 63 bits.
    """

    request_id: str
    prompt: list[int]
    sampling: SamplingParams
    output: list[int] = []
    ranks: RankHints = RankHints()
    traceparent: str = ""
    priority: int = 0
    tenant: str = ""
    cache_salt: int = 0


class Usage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Conservation: prompt_tokens = decode_cached + prefill_cached + computed.

    The prompt alone: the `output` of a continued request counts in `output_tokens` only.
    """

    prompt_tokens: int = 0
    decode_cached: int = 0
    prefill_cached: int = 0
    computed: int = 0
    output_tokens: int = 0


class Output(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A step's result for one request. `finish` or `error` is set exactly once, in the last one.

    `position` is the index of `token_ids[0]` in the whole output (the request's `output` comes before
    it), so that a repeated or lost output is seen. `timeline` comes with the first token: seconds spent
    in `queue`, `bootstrap`, `reserve`, `prefill`, `wire`, `commit`.
    """

    request_id: str
    position: int = 0
    token_ids: list[int] = []
    logprobs: list[TokenLogprob] = []
    prompt_logprobs: list[TokenLogprob | None] | None = None
    finish: FinishReason | None = None
    stop_token: int | None = None
    usage: Usage | None = None
    timeline: dict[str, float] = {}
    error: ErrorInfo | None = None
