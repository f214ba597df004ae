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
from typing import Any, Final

import msgspec

from segue.engine.request import Grammar, RankHints, Reasoning, Request, SamplingParams
from segue.server.frontend.body_forms import check_levels
from segue.server.frontend.body_reader import RANGES, constraints_in
from segue.server.frontend.json_schemas import fitted
from segue.server.frontend.problems import BadParam
from segue.server.frontend.request_fields import BodyPart, Constrains, GenerateFields, Number, Range
from segue.server.frontend.sampling_defaults import OPENAI, SamplingDefaults

MAX_STOPS = 16
MAX_STOP_CHARS = 1000
MAX_GRAMMAR_CHARS = 100_000
#: Log-probabilities that one answer may keep, of all samples: some 55 MiB as JSON.
MAX_KEPT_LOGPROBS = 2**20
#: Bytes of prompts that one answer may repeat, in all its samples.
MAX_REPEATED_BYTES = 8 * 2**20
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
    """The samples of each prompt."""
    return 1 if body.n is None else body.n


def header_rank(text: str) -> int:
    """The DP rank in a header `X-Data-Parallel-Rank`, which comes before the body's."""
    if not text.isdecimal() or len(text) > 5:
        raise BadParam(f"X-Data-Parallel-Rank: a rank from 0 on, not {text[:20]!r}", "routed_dp_rank")
    return int(text)


def rank_hints(body: GenerateFields) -> RankHints:
    """The DP ranks that the client asks for; whether they exist, the placement knows."""
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
    if not trusted:
        return 0, tenant
    if not tenant and body.user:
        tenant = hashlib.sha256(body.user.encode()).hexdigest()[:12]
    return body.priority or 0, tenant


def cache_salt(body: GenerateFields, domain: str) -> int:
    """The number that separates cached prefixes: 0 for the common ones, else a number of the API key's
    `domain` and of the body's `cache_salt`."""
    salt = body.cache_salt or ""
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
    if body.min_tokens is not None:
        Range(0, max_tokens).check("min_tokens", body.min_tokens)
    if body.top_k is not None:
        Range(-1, card.vocab_size).check("top_k", body.top_k)
    return SamplingParams(
        **_numbers(body, card),
        max_tokens=max_tokens,
        logit_bias=_logit_bias(body.logit_bias, card),
        seed=secrets.randbits(63) if body.seed is None else body.seed & _SEED_MASK,
        stop_token_ids=_stop_ids(body.stop_token_ids, card),
        ignore_eos=bool(body.ignore_eos),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        grammar=grammar,
        reasoning=reasoning,
    )


def most_tokens(n: int, logprobs: int) -> int:
    """Tokens of each of `n` samples whose log-probabilities an answer may keep."""
    return MAX_KEPT_LOGPROBS // (n * (1 + logprobs))


def check_kept_logprobs(requests: Sequence[Request], *, stream: bool, keeps_streamed: bool = False) -> None:
    """Raises BadParam for more log-probabilities than an answer may keep: those of prompts, which come at
    once, and those of all tokens, unless it is a stream that does not keep them."""
    prompts = tokens = 0
    for request in requests:
        asked = request.sampling
        if asked.prompt_logprobs is not None:
            prompts += len(request.prompt) * (1 + asked.prompt_logprobs)
        if asked.logprobs is not None:
            tokens += asked.max_tokens * (1 + asked.logprobs)
    kept = prompts + (tokens if keeps_streamed or not stream else 0)
    if kept > MAX_KEPT_LOGPROBS:
        streams = not stream and not keeps_streamed and prompts <= MAX_KEPT_LOGPROBS
        raise BadParam(
            f"logprobs: up to {kept} log-probabilities in one answer, of at most {MAX_KEPT_LOGPROBS}; "
            f"lower n, max_tokens or the number of alternatives{', or set stream' if streams else ''}",
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


@dataclass(frozen=True, slots=True)
class Constraint:
    """A grammar, and the keywords of a JSON schema that it does not hold."""

    grammar: Grammar
    left_out: tuple[str, ...] = ()


def constraint_of(body: GenerateFields) -> Constraint | None:
    """The constraint on the output, from whichever field carries it. At most one may."""
    found: list[tuple[str, Constraint]] = []
    form = body.response_format
    if form is not None:
        if form.type == "json_object":
            found.append(("response_format", Constraint(Grammar("json_object"))))
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
    given = [(name, kind, getattr(body, name)) for name, kind in _CONSTRAINTS]
    if (inner := body.structured_outputs) is not None:
        given += [("structured_outputs", kind, getattr(inner, name)) for name, kind in _INNER_CONSTRAINTS]
    for param, kind, value in given:
        if value is not None and (value or kind is not Constrains.JSON_OBJECT):
            found.append((param, _constraint(param, kind, value)))
    if len(found) > 1:
        raise BadParam(f"only one constraint on the output, not {len(found)}", found[1][0])
    for param, constraint in found:
        if len(constraint.grammar.text) > MAX_GRAMMAR_CHARS:
            raise BadParam(f"{param}: at most {MAX_GRAMMAR_CHARS} characters", param)
    return found[0][1] if found else None


#: Fields of a body, and of its `structured_outputs`.
_CONSTRAINTS: Final = constraints_in(BodyPart.CHAT)
_INNER_CONSTRAINTS: Final = constraints_in(BodyPart.STRUCTURED_OUTPUTS)


def _constraint(param: str, kind: Constrains, value: Any) -> Constraint:
    if kind is Constrains.JSON_SCHEMA:
        return _schema(param, value)
    if kind is Constrains.CHOICE:
        if not value:
            raise BadParam(f"{param}: at least one choice is needed", param)
        return Constraint(Grammar("regex", "|".join(f"({re.escape(choice)})" for choice in value)))
    return Constraint(Grammar(kind.value, "" if kind is Constrains.JSON_OBJECT else value))


def constrained(body: GenerateFields) -> bool:
    """Whether the answer is not free text."""
    if body.response_format is not None and body.response_format.type != "text":
        return True
    return body.structured_outputs is not None or any(
        getattr(body, name) is not None for name, _ in _CONSTRAINTS
    )


def _schema(param: str, schema: str | bool | dict[str, Any]) -> Constraint:
    if isinstance(schema, str):
        check_levels(schema.encode(), param, param)
        try:
            schema = json.loads(schema)
        except ValueError as error:
            raise BadParam(f"{param}: not JSON: {error}", param) from None
    if schema is False:
        raise BadParam(f"{param}: the JSON schema false admits no output", param)
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise BadParam(f"{param}: a JSON schema is an object, true or false", param)
    try:
        made = fitted(schema)
        names = tuple(f"{param}.{keyword}" for keyword in made.left_out)
        return Constraint(Grammar("json_schema", json.dumps(made.schema)), names)
    except RecursionError:
        raise BadParam(f"{param}: nested too deeply", param) from None


#: The type of each field of `SamplingParams` that is a number of the table.
_NUMBERS: Final = {
    f.name: type(f.default) for f in msgspec.structs.fields(SamplingParams) if f.name in RANGES
}


def _numbers(body: GenerateFields, card: ModelCard) -> dict[str, Any]:
    found = {}
    for name, number in _NUMBERS.items():
        value = getattr(body, name)
        default = getattr(card.defaults, name, RANGES[name].default)
        found[name] = number(default if value is None else value)
    return {**found, "top_k": max(0, found["top_k"])}


def _logit_bias(bias: dict[int, Number] | None, card: ModelCard) -> dict[int, float]:
    for token, value in (bias or {}).items():
        if not 0 <= token < card.vocab_size:
            raise BadParam(f"logit_bias: token {token} is not in the vocabulary", "logit_bias")
        Range(-100, 100).check("logit_bias", value)
    return {token: float(value) for token, value in (bias or {}).items()}


def _stop_ids(ids: list[int] | None, card: ModelCard) -> list[int]:
    for token in ids or []:
        if not 0 <= token < card.vocab_size:
            raise BadParam(f"stop_token_ids: token {token} is not in the vocabulary", "stop_token_ids")
    return ids or []
