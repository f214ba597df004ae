"""Turns a decoded body into samples to submit and an answer to fill."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from segue.engine.request import RankHints, Request, SamplingParams
from segue.server.frontend.answers import Answer, ChatAnswer, Choice, CompletionAnswer, Shape
from segue.server.frontend.chat import ReplyForm, chat_prompt, effort_variables, reply_form, tool_use
from segue.server.frontend.detokenize import decode_in_pieces
from segue.server.frontend.generate import Sample
from segue.server.frontend.params import (
    ModelCard,
    Text,
    asked_tokens,
    check_kept_logprobs,
    check_prompt,
    constraint_of,
    most_tokens,
    rank_hints,
    samples,
    sampling,
    text_options,
    too_long,
)
from segue.server.frontend.problems import BadParam
from segue.server.frontend.request_fields import MAX_SAMPLES, ChatBody, CompletionBody, GenerateFields
from segue.server.frontend.request_memory import SAMPLE_BYTES, TOKEN_BYTES, decoded_bytes
from segue.server.frontend.tokenizer import ModelTokenizer, TooManyTokens

_DEFAULT_COMPLETION_TOKENS = 16


@dataclass(slots=True)
class Plan:
    """The generations to run and the form of the answer. `ignored` names fields of the body that have no
    effect. `tools_bytes` is about what the tools take by which calls are read, also those that no template
    shows."""

    answer: Answer
    stream: bool
    include_usage: bool
    ignored: Sequence[str] = ()
    tools_bytes: int = 0

    @property
    def samples(self) -> list[Sample]:
        return [choice.sample for choice in self.answer.choices]

    @property
    def held_bytes(self) -> int:
        """About what it keeps in memory. Samples of one prompt share its ids."""
        requests = [sample.request for sample in self.samples]
        tokens = sum(len(prompt) for prompt in {id(r.prompt): r.prompt for r in requests}.values())
        grammars = {id(r.sampling.grammar): r.sampling.grammar for r in requests}.values()
        texts = self.answer.repeated_bytes + sum(len(grammar.text) for grammar in grammars if grammar)
        kept = SAMPLE_BYTES * len(requests) + TOKEN_BYTES * tokens + 4 * texts
        return kept + self.answer.kept_bytes + self.tools_bytes


def at_most(plan: Plan, tokens: int) -> Plan:
    """`plan` with answers of at most so many tokens."""
    for sample in plan.samples:
        sampling = sample.request.sampling
        sampling = msgspec.structs.replace(sampling, max_tokens=min(tokens, sampling.max_tokens))
        sample.request = msgspec.structs.replace(sample.request, sampling=sampling)
    return plan


@dataclass(slots=True)
class Planner:
    """Makes plans for one model. Pure but for the clock's date; used from worker threads too."""

    tokenizer: ModelTokenizer
    today: Callable[[], float] = time.time
    _serial: itertools.count[int] = field(default_factory=itertools.count)

    def chat(self, body: ChatBody, card: ModelCard, call_id: str) -> Plan:
        """Raises BadParam for what is wrong in `body`."""
        logprobs = _chat_logprobs(body)
        use = tool_use(body, self.tokenizer)
        template = self.tokenizer.chat_template(tools=use.tools is not None)
        ignored = ["tools.strict"] if use.loose else []
        if use.tools is not None and not self.tokenizer.form(tools=True).tools:
            ignored.append("tools")
        variables = effort_variables(body, template)
        if variables is None:
            ignored.append("reasoning_effort")
        constraint = constraint_of(body)
        if use.grammar is not None and constraint is not None:
            raise BadParam(
                "tool_choice: a forced call and another constraint exclude each other", "tool_choice"
            )
        try:
            prompt = chat_prompt(
                self.tokenizer,
                body.messages,
                use.tools,
                generation_prompt=body.add_generation_prompt,
                continue_final=bool(body.continue_final_message),
                variables=(variables or {}) | (body.chat_template_kwargs or {}),
                most=card.context_tokens - 1,
            )
        except TooManyTokens as found:
            raise too_long(found, card, "messages") from None
        check_prompt(prompt.ids, card, "messages")
        max_tokens, max_tokens_param = asked_tokens(body)
        n = samples(body)
        form = reply_form(body, use, prompt, template, self.tokenizer)
        params = sampling(
            body,
            card,
            prompt_tokens=len(prompt.ids),
            max_tokens=max_tokens,
            max_tokens_param=max_tokens_param,
            # Without a number of tokens an answer ends where it may keep no more log-probabilities.
            default_max_tokens=None if logprobs is None or body.stream else most_tokens(n, logprobs),
            logprobs=logprobs,
            grammar=constraint.grammar if constraint else use.grammar,
            reasoning=form.reasoning,
        )
        text = text_options(body)
        ranks = rank_hints(body)
        choices = [self._chat_choice(call_id, prompt.ids, params, text, form, ranks, i) for i in range(n)]
        shape = _shape(body, card, f"chatcmpl-{call_id}", int(self.today()), logprobs is not None)
        plan = _planned(ChatAnswer(shape, choices, self.tokenizer), body, shape)
        plan.ignored = [*ignored, *use.left_out, *(constraint.left_out if constraint else ())]
        if use.tools is not None and not use.forced:
            plan.tools_bytes = decoded_bytes(msgspec.json.encode(use.tools), sys.maxsize)
        return plan

    def _chat_choice(
        self,
        call_id: str,
        prompt: list[int],
        params: SamplingParams,
        text: Text,
        form: ReplyForm,
        ranks: RankHints,
        i: int,
    ) -> Choice:
        parser, thought_end = form.make(), None
        if parser is not None:
            thought_end = self.tokenizer.token_id(parser.thought_end)
            if any(self.tokenizer.is_special(mark) for mark in parser.marks):
                text = Text(text.stops, text.include_stop, skip_special=False)
        sample = self._sample(call_id, prompt, params, text, ranks, i)
        return Choice(sample, parser=parser, thought_end=thought_end)

    def completion(
        self, body: CompletionBody, card: ModelCard, call_id: str, *, keeps_streamed: bool = False
    ) -> Plan:
        """Raises BadParam for what is wrong in `body`. `keeps_streamed`: a stream keeps what it has said."""
        if body.suffix:
            raise BadParam("suffix: this model does not fill in the middle", "suffix")
        n = samples(body)
        if body.best_of is not None and body.best_of != n:
            raise BadParam("best_of: not supported; leave it out or set it to n", "best_of")
        sample_count(body)
        given = _given_prompts(body)
        max_tokens, max_tokens_param = asked_tokens(body)
        echo_only = bool(body.echo) and max_tokens == 0
        constraint = constraint_of(body)
        text, ranks = text_options(body), rank_hints(body)
        special = body.add_special_tokens is not False
        prompts: list[list[int]] = []
        choices = []
        # Each is checked before the next one is encoded.
        for p, item in enumerate(given):
            prompt = self._encode(item, card, special) if isinstance(item, str) else item
            check_prompt(prompt, card, "prompt")
            prompts.append(prompt)
            params = sampling(
                body,
                card,
                prompt_tokens=len(prompt),
                max_tokens=1 if echo_only else max_tokens,
                max_tokens_param=max_tokens_param,
                default_max_tokens=_DEFAULT_COMPLETION_TOKENS,
                logprobs=body.logprobs,
                prompt_logprobs=body.logprobs if body.echo else None,
                grammar=constraint.grammar if constraint else None,
            )
            choices += [
                Choice(self._sample(call_id, prompt, params, text, ranks, i), prompt=p) for i in range(n)
            ]
        shape = _shape(body, card, f"cmpl-{call_id}", int(self.today()), body.logprobs is not None)
        answer = CompletionAnswer(
            shape,
            choices,
            self.tokenizer,
            echo=self._echo(body, prompts) if body.echo else None,
            echo_only=echo_only,
        )
        plan = _planned(answer, body, shape, keeps_streamed=keeps_streamed)
        plan.ignored = constraint.left_out if constraint else ()
        return plan

    def _sample(
        self, call_id: str, prompt: list[int], params: SamplingParams, text: Text, ranks: RankHints, i: int
    ) -> Sample:
        # A client may send one X-Request-ID twice; a request's id is never used twice.
        request_id = f"{call_id}-{next(self._serial)}"
        if i:
            params = msgspec.structs.replace(params, seed=(params.seed + i) & (2**63 - 1))
        request = Request(request_id=request_id, prompt=prompt, sampling=params, ranks=ranks)
        return Sample(request, text, self.tokenizer)

    def _encode(self, text: str, card: ModelCard, special: bool) -> list[int]:
        if not text:
            raise BadParam("prompt: the prompt is empty", "prompt")
        try:
            return self.tokenizer.encode(text, special=special, most=card.context_tokens - 1)
        except TooManyTokens as found:
            raise too_long(found, card, "prompt") from None

    def _echo(self, body: CompletionBody, prompts: list[list[int]]) -> list[str]:
        if isinstance(body.prompt, str):
            return [body.prompt]
        return [
            item
            if isinstance(item, str)
            else "".join(decode_in_pieces(self.tokenizer, ids, skip_special=False))
            for item, ids in zip(
                body.prompt if len(body.prompt) == len(prompts) else prompts, prompts, strict=True
            )
        ]


def sample_count(body: GenerateFields) -> int:
    """How many samples the plan for `body` has. Raises BadParam for what can have none."""
    n = samples(body)
    if not isinstance(body, CompletionBody):
        return n
    prompts = len(_given_prompts(body))
    if prompts * n > MAX_SAMPLES:
        raise BadParam(f"{prompts} prompts with {n} samples each: at most {MAX_SAMPLES} in all", "prompt")
    return prompts * n


def _given_prompts(body: CompletionBody) -> list[str | list[int]]:
    """The prompts, each a text or token ids: one string, strings, one list of ids, or lists of ids."""
    if isinstance(body.prompt, str):
        return [body.prompt]
    items: list[Any] = list(body.prompt)
    if not items:
        raise BadParam("prompt: the prompt is empty", "prompt")
    kind = type(items[0])
    if any(type(item) is not kind for item in items):
        raise BadParam("prompt: strings, token ids or lists of token ids, not a mixture", "prompt")
    if kind is int:
        return [items]
    if len(items) > MAX_SAMPLES:
        raise BadParam(f"prompt: at most {MAX_SAMPLES} prompts, not {len(items)}", "prompt")
    return items


def _planned(answer: Answer, body: GenerateFields, shape: Shape, *, keeps_streamed: bool = False) -> Plan:
    plan = Plan(answer, bool(body.stream), shape.include_usage)
    requests = [sample.request for sample in plan.samples]
    check_kept_logprobs(requests, stream=plan.stream, keeps_streamed=keeps_streamed)
    return plan


def _chat_logprobs(body: ChatBody) -> int | None:
    if body.top_logprobs and not body.logprobs:
        raise BadParam("top_logprobs: set logprobs to true as well", "top_logprobs")
    return (body.top_logprobs or 0) if body.logprobs else None


def _shape(body: GenerateFields, card: ModelCard, answer_id: str, created: int, logprobs: bool) -> Shape:
    options = body.stream_options
    asked = options is not None and (
        options.include_usage is not None or options.continuous_usage_stats is not None
    )
    if asked and not body.stream:
        raise BadParam("stream_options: only with stream", "stream_options")
    include_usage = bool(options is not None and options.include_usage)
    return Shape(
        id=answer_id,
        model=card.name,
        created=created,
        logprobs=logprobs,
        include_usage=include_usage,
        continuous_usage=bool(include_usage and options is not None and options.continuous_usage_stats),
        token_ids=bool(body.return_token_ids),
        timeline=bool(body.return_timeline),
    )
