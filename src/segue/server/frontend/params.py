"""Turns a client's parameters into those of the engine: ranges checked, limits applied, defaults filled in.

Everything is checked before anything runs (lesson 20: one bad parameter ended a whole server elsewhere).
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from segue.engine.request import Grammar, RankHints, Reasoning, Request, SamplingParams
from segue.server.frontend.openai_types import GenerateFields, Number
from segue.server.frontend.problems import BadParam
from segue.server.frontend.sampling_defaults import OPENAI, SamplingDefaults

MAX_SAMPLES = 128
MAX_LOGPROBS = 20
MAX_STOPS = 16
MAX_STOP_CHARS = 1000
MAX_STOP_IDS = 128
MAX_LOGIT_BIAS = 1024
MAX_GRAMMAR_CHARS = 100_000
#: Log-probabilities that one answer may keep, of all samples: some 55 MiB as JSON.
MAX_KEPT_LOGPROBS = 2**20
#: Bytes of prompts that one answer may repeat, in all its samples.
MAX_REPEATED_BYTES = 8 * 2**20
MAX_CACHE_SALT = 1000
_SEED_MASK = 2**63 - 1


@dataclass(frozen=True, slots=True)
class ModelCard:
    """The frontend's view of the model: its public name, its limits, and its sampling defaults."""

    name: str
    context_tokens: int
    vocab_size: int
    defaults: SamplingDefaults = OPENAI


@dataclass(frozen=True, slots=True)
class Text:
    """The frontend's own processing of tokens."""

    stops: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special: bool = True


def asked_tokens(body: GenerateFields) -> tuple[int | None, str]:
    """How many tokens were asked for, and by which field: the newer name wins."""
    if body.max_completion_tokens is not None:
        return body.max_completion_tokens, "max_completion_tokens"
    return body.max_tokens, "max_tokens"


def samples(body: GenerateFields) -> int:
    """`n`, checked."""
    n = 1 if body.n is None else body.n
    if not 1 <= n <= MAX_SAMPLES:
        raise BadParam(f"n: from 1 to {MAX_SAMPLES}, not {n}", "n")
    return n


def header_rank(text: str) -> int:
    """The DP rank in a header `X-Data-Parallel-Rank`, which comes before the body's."""
    if not text.isdecimal() or len(text) > 5:
        raise BadParam(f"X-Data-Parallel-Rank: a rank from 0 on, not {text[:20]!r}", "routed_dp_rank")
    return int(text)


def rank_hints(body: GenerateFields) -> RankHints:
    """The DP ranks that the client asks for; whether they exist, the placement knows."""
    for name in ("routed_dp_rank", "data_parallel_rank", "disagg_prefill_dp_rank"):
        rank = getattr(body, name)
        if rank is not None and not 0 <= rank < 2**16:
            raise BadParam(f"{name}: a rank from 0 on, not {rank}", name)
    routed = body.routed_dp_rank
    return RankHints(
        routed_dp_rank=body.data_parallel_rank if routed is None else routed,
        disagg_prefill_dp_rank=body.disagg_prefill_dp_rank,
        force_query_prefill_dp_rank=bool(body.force_query_prefill_dp_rank),
    )


def waiting_order(body: GenerateFields, tenant: str, *, trusted: bool) -> tuple[int, str]:
    """Priority and tenant of a request; `tenant` is the one of its API key, if the server has several.

    The fields of a `trusted` client count: its priority, and a digest of its `user` if its key names no
    tenant. Other clients would choose their own place among all.
    """
    priority = body.priority or 0
    if not -(2**31) <= priority < 2**31:
        raise BadParam(f"priority: a number of 32 bits, lower is earlier, not {priority}", "priority")
    if not trusted:
        return 0, tenant
    if not tenant and body.user:
        tenant = hashlib.sha256(body.user.encode()).hexdigest()[:12]
    return priority, tenant


def cache_salt(body: GenerateFields, domain: str) -> int:
    """The number that separates cached prefixes: 0 for the common ones, else a number of the API key's
    `domain` and of the body's `cache_salt`."""
    salt = body.cache_salt or ""
    if len(salt) > MAX_CACHE_SALT:
        raise BadParam(f"cache_salt: at most {MAX_CACHE_SALT} characters, not {len(salt)}", "cache_salt")
    if not domain and not salt:
        return 0
    # The domain has no zero byte, so no salt makes one domain another.
    words = f"{domain}\0{salt}".encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(words, digest_size=8).digest(), "little") >> 1 or 1


def text_options(body: GenerateFields) -> Text:
    """Stop strings and how tokens become text, checked."""
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    if len(stops) > MAX_STOPS:
        raise BadParam(f"stop: at most {MAX_STOPS} strings, not {len(stops)}", "stop")
    for stop in stops:
        if not 1 <= len(stop) <= MAX_STOP_CHARS:
            raise BadParam(f"stop: 1 to {MAX_STOP_CHARS} characters each, not {len(stop)}", "stop")
    return Text(
        stops=tuple(stops),
        include_stop=bool(body.include_stop_str_in_output),
        skip_special=body.skip_special_tokens is not False,
    )


def too_long(tokens: object, card: ModelCard, param: str) -> BadParam:
    """The refusal of a prompt that has `tokens`: a number, or words for one."""
    return BadParam(
        f"the prompt has {tokens} tokens and the model's context {card.context_tokens}, "
        "of which at least one must be left for the answer",
        param,
        "context_length_exceeded",
    )


def check_prompt(prompt: list[int], card: ModelCard, param: str) -> None:
    """Raises BadParam for an empty prompt, ids outside the vocabulary, or one longer than the context."""
    if not prompt:
        raise BadParam(f"{param}: the prompt is empty", param)
    if len(prompt) >= card.context_tokens:
        raise too_long(len(prompt), card, param)
    if max(prompt) >= card.vocab_size or min(prompt) < 0:
        bad = next(t for t in prompt if not 0 <= t < card.vocab_size)
        raise BadParam(f"{param}: token {bad} is not in the vocabulary of {card.vocab_size}", param)


def sampling(
    body: GenerateFields,
    card: ModelCard,
    *,
    prompt_tokens: int,
    max_tokens: int | None,
    max_tokens_param: str = "max_tokens",
    default_max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
    grammar: Grammar | None = None,
    reasoning: Reasoning | None = None,
) -> SamplingParams:
    """The sampling of one prompt. `default_max_tokens` None means: what the context leaves."""
    room = card.context_tokens - prompt_tokens
    if max_tokens is None:
        max_tokens = room if default_max_tokens is None else min(room, default_max_tokens)
    elif max_tokens < 1:
        raise BadParam(f"{max_tokens_param}: at least 1, not {max_tokens}", max_tokens_param)
    elif max_tokens > room:
        raise BadParam(
            f"the prompt has {prompt_tokens} tokens and {max_tokens} more were asked for, "
            f"but the model's context is {card.context_tokens}",
            max_tokens_param,
            "context_length_exceeded",
        )
    min_tokens = _within("min_tokens", body.min_tokens, 0, max_tokens, 0)
    defaults = card.defaults
    top_k = _within("top_k", body.top_k, -1, card.vocab_size, defaults.top_k)
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=int(min_tokens),
        temperature=_within("temperature", body.temperature, 0.0, 2.0, defaults.temperature),
        top_p=_within("top_p", body.top_p, 0.0, 1.0, defaults.top_p, open_low=True),
        top_k=max(0, int(top_k)),
        min_p=_within("min_p", body.min_p, 0.0, 1.0, defaults.min_p),
        presence_penalty=_within("presence_penalty", body.presence_penalty, -2.0, 2.0, 0.0),
        frequency_penalty=_within("frequency_penalty", body.frequency_penalty, -2.0, 2.0, 0.0),
        repetition_penalty=_within(
            "repetition_penalty",
            body.repetition_penalty,
            0.0,
            10.0,
            defaults.repetition_penalty,
            open_low=True,
        ),
        logit_bias=_logit_bias(body.logit_bias, card),
        seed=secrets.randbits(63) if body.seed is None else body.seed & _SEED_MASK,
        stop_token_ids=_stop_ids(body.stop_token_ids, card),
        ignore_eos=bool(body.ignore_eos),
        logprobs=_logprobs("logprobs", logprobs),
        prompt_logprobs=_logprobs("logprobs", prompt_logprobs),
        grammar=grammar,
        reasoning=reasoning,
    )


def most_tokens(n: int, logprobs: int) -> int:
    """Tokens of each of `n` samples whose log-probabilities an answer may keep."""
    return MAX_KEPT_LOGPROBS // (n * (1 + logprobs))


def check_kept_logprobs(requests: Sequence[Request], *, whole: bool) -> None:
    """Raises BadParam for more log-probabilities than an answer may keep: those of prompts, which come at
    once, and with `whole` those of all tokens."""
    kept = 0
    for request in requests:
        asked = request.sampling
        if asked.prompt_logprobs is not None:
            kept += len(request.prompt) * (1 + asked.prompt_logprobs)
        if whole and asked.logprobs is not None:
            kept += asked.max_tokens * (1 + asked.logprobs)
    if kept > MAX_KEPT_LOGPROBS:
        raise BadParam(
            f"logprobs: up to {kept} log-probabilities in one answer, of at most {MAX_KEPT_LOGPROBS}; "
            "lower n, max_tokens or the number of alternatives, or set stream",
            "logprobs",
        )


def check_repeated(nbytes: int) -> None:
    """Raises BadParam if an answer would repeat so many bytes of prompts."""
    if nbytes > MAX_REPEATED_BYTES:
        raise BadParam(
            f"n: the samples would repeat {nbytes} bytes of prompts, of at most {MAX_REPEATED_BYTES}; "
            "lower n, or leave out echo and return_token_ids",
            "n",
        )


def grammar_of(body: GenerateFields) -> Grammar | None:
    """The constraint on the output, from whichever field carries it. At most one may."""
    found: list[tuple[str, Grammar]] = []
    form = body.response_format
    if form is not None:
        if form.type == "json_object":
            found.append(("response_format", Grammar("json_object")))
        elif form.type == "json_schema":
            if form.json_schema is None or form.json_schema.schema is None:
                raise BadParam(
                    "response_format.json_schema.schema: a schema is needed", "response_format.json_schema"
                )
            found.append(("response_format", _schema("response_format", form.json_schema.schema)))
        elif form.type != "text":
            raise BadParam(
                f"response_format.type: text, json_object or json_schema, not {form.type!r}",
                "response_format.type",
            )
    other = body.structured_outputs
    for param, json_schema, regex, choice, lark in (
        ("guided_json", body.guided_json, None, None, None),
        ("guided_regex", None, body.guided_regex, None, None),
        ("guided_choice", None, None, body.guided_choice, None),
        ("guided_grammar", None, None, None, body.guided_grammar),
        ("regex", None, body.regex, None, None),
        ("json_schema", body.json_schema, None, None, None),
        *([("structured_outputs", other.json, other.regex, other.choice, other.grammar)] if other else []),
    ):
        if json_schema is not None:
            found.append((param, _schema(param, json_schema)))
        if regex is not None:
            found.append((param, Grammar("regex", regex)))
        if choice is not None:
            if not choice:
                raise BadParam(f"{param}: at least one choice is needed", param)
            found.append((param, Grammar("regex", "|".join(f"({re.escape(c)})" for c in choice))))
        if lark is not None:
            found.append((param, Grammar("lark", lark)))
    if other is not None and other.json_object:
        found.append(("structured_outputs", Grammar("json_object")))
    if len(found) > 1:
        raise BadParam(f"only one constraint on the output, not {len(found)}", found[1][0])
    for param, grammar in found:
        if len(grammar.text) > MAX_GRAMMAR_CHARS:
            raise BadParam(f"{param}: at most {MAX_GRAMMAR_CHARS} characters", param)
    return found[0][1] if found else None


def _schema(param: str, schema: str | bool | dict[str, Any]) -> Grammar:
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise BadParam(f"{param}: not JSON: {error}", param) from None
    if schema is False:
        raise BadParam(f"{param}: the JSON schema false admits no output", param)
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise BadParam(f"{param}: a JSON schema is an object, true or false", param)
    try:
        return Grammar("json_schema", json.dumps(schema))
    except RecursionError:
        raise BadParam(f"{param}: nested too deeply", param) from None


def _within(
    name: str, value: Number | None, low: float, high: float, default: float, *, open_low: bool = False
) -> float:
    """`value` if it lies in [low, high] (or (low, high]), the default if there is none."""
    if value is None:
        return default
    value = _number(name, value)
    if not low <= value <= high or (open_low and value == low):
        bound = f"above {low:g} and at most {high:g}" if open_low else f"from {low:g} to {high:g}"
        raise BadParam(f"{name}: {bound}, not {value:g}", name)
    return value


def _number(name: str, value: Number) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadParam(f"{name}: a number is needed", name)
    try:
        return float(value)
    except OverflowError:
        raise BadParam(f"{name}: out of range", name) from None


def _logprobs(name: str, value: int | None) -> int | None:
    if value is not None and not 0 <= value <= MAX_LOGPROBS:
        raise BadParam(f"{name}: from 0 to {MAX_LOGPROBS} alternatives, not {value}", name)
    return value


def _logit_bias(bias: dict[int, Number] | None, card: ModelCard) -> dict[int, float]:
    if not bias:
        return {}
    if len(bias) > MAX_LOGIT_BIAS:
        raise BadParam(f"logit_bias: at most {MAX_LOGIT_BIAS} tokens, not {len(bias)}", "logit_bias")
    for token, value in bias.items():
        if not 0 <= token < card.vocab_size:
            raise BadParam(f"logit_bias: token {token} is not in the vocabulary", "logit_bias")
        if not -100 <= _number("logit_bias", value) <= 100:
            raise BadParam(f"logit_bias: from -100 to 100, not {value:g}", "logit_bias")
    return {token: float(value) for token, value in bias.items()}


def _stop_ids(ids: list[int] | None, card: ModelCard) -> list[int]:
    if not ids:
        return []
    if len(ids) > MAX_STOP_IDS:
        raise BadParam(f"stop_token_ids: at most {MAX_STOP_IDS}, not {len(ids)}", "stop_token_ids")
    for token in ids:
        if not 0 <= token < card.vocab_size:
            raise BadParam(f"stop_token_ids: token {token} is not in the vocabulary", "stop_token_ids")
    return ids
