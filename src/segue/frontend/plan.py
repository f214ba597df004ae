"""From a decoded body to samples that can be submitted and an answer that can be filled."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from segue.core.request import RankHints, Request, SamplingParams
from segue.frontend.answers import Answer, ChatAnswer, Choice, CompletionAnswer, Shape
from segue.frontend.chat import ToolUse, chat_prompt, tool_use
from segue.frontend.generate import Sample
from segue.frontend.openai_types import ChatBody, CompletionBody, GenerateFields
from segue.frontend.params import (
    MAX_SAMPLES,
    ModelCard,
    Text,
    asked_tokens,
    check_prompt,
    grammar_of,
    rank_hints,
    samples,
    sampling,
    text_options,
)
from segue.frontend.problems import BadParam
from segue.frontend.tokenizer import ModelTokenizer

_DEFAULT_COMPLETION_TOKENS = 16


@dataclass(slots=True)
class Plan:
    """What to run and how to answer."""

    answer: Answer
    stream: bool
    include_usage: bool

    @property
    def samples(self) -> list[Sample]:
        return [choice.sample for choice in self.answer.choices]


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
        grammar = grammar_of(body)
        if use.grammar is not None and grammar is not None:
            raise BadParam(
                "tool_choice: a forced call and another constraint exclude each other", "tool_choice"
            )
        prompt = chat_prompt(
            self.tokenizer,
            body.messages,
            use.tools,
            generation_prompt=body.add_generation_prompt,
            continue_final=bool(body.continue_final_message),
            variables=body.chat_template_kwargs,
        )
        check_prompt(prompt, card, "messages")
        max_tokens, max_tokens_param = asked_tokens(body)
        params = sampling(
            body,
            card,
            prompt_tokens=len(prompt),
            max_tokens=max_tokens,
            max_tokens_param=max_tokens_param,
            default_max_tokens=None,
            logprobs=logprobs,
            grammar=grammar or use.grammar,
        )
        text = text_options(body)
        ranks = rank_hints(body)
        choices = [
            self._chat_choice(call_id, prompt, params, text, use, ranks, i) for i in range(samples(body))
        ]
        shape = _shape(body, card, f"chatcmpl-{call_id}", int(self.today()), logprobs is not None)
        answer = ChatAnswer(shape, choices, self.tokenizer)
        return Plan(answer, bool(body.stream), shape.include_usage)

    def _chat_choice(
        self,
        call_id: str,
        prompt: list[int],
        params: SamplingParams,
        text: Text,
        use: ToolUse,
        ranks: RankHints,
        i: int,
    ) -> Choice:
        parser = use.parser()
        if parser is not None and parser.keep_special:
            text = Text(text.stops, text.include_stop, skip_special=False)
        return Choice(self._sample(call_id, prompt, params, text, ranks, i), parser=parser)

    def completion(self, body: CompletionBody, card: ModelCard, call_id: str) -> Plan:
        """Raises BadParam for what is wrong in `body`."""
        if body.suffix:
            raise BadParam("suffix: this model does not fill in the middle", "suffix")
        n = samples(body)
        if body.best_of is not None and body.best_of != n:
            raise BadParam("best_of: not supported; leave it out or set it to n", "best_of")
        prompts = self._prompts(body)
        if len(prompts) * n > MAX_SAMPLES:
            raise BadParam(
                f"{len(prompts)} prompts with {n} samples each: at most {MAX_SAMPLES} in all", "prompt"
            )
        max_tokens, max_tokens_param = asked_tokens(body)
        echo_only = bool(body.echo) and max_tokens == 0
        grammar = grammar_of(body)
        text, ranks = text_options(body), rank_hints(body)
        choices = []
        for p, prompt in enumerate(prompts):
            check_prompt(prompt, card, "prompt")
            params = sampling(
                body,
                card,
                prompt_tokens=len(prompt),
                max_tokens=1 if echo_only else max_tokens,
                max_tokens_param=max_tokens_param,
                default_max_tokens=_DEFAULT_COMPLETION_TOKENS,
                logprobs=body.logprobs,
                prompt_logprobs=body.logprobs if body.echo else None,
                grammar=grammar,
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
        return Plan(answer, bool(body.stream), shape.include_usage)

    def _sample(
        self, call_id: str, prompt: list[int], params: SamplingParams, text: Text, ranks: RankHints, i: int
    ) -> Sample:
        # A client may send one X-Request-ID twice; a request's id is never used twice.
        request_id = f"{call_id}-{next(self._serial)}"
        if i:
            params = msgspec.structs.replace(params, seed=(params.seed + i) & (2**63 - 1))
        request = Request(request_id=request_id, prompt=prompt, sampling=params, ranks=ranks)
        return Sample(request, text, self.tokenizer)

    def _prompts(self, body: CompletionBody) -> list[list[int]]:
        """The prompts as token ids: one string, strings, one list of ids, or lists of ids."""
        special = body.add_special_tokens is not False
        if isinstance(body.prompt, str):
            return [self._encode(body.prompt, special)]
        items: list[Any] = list(body.prompt)
        if not items:
            raise BadParam("prompt: the prompt is empty", "prompt")
        kind = type(items[0])
        if any(type(item) is not kind for item in items):
            raise BadParam("prompt: strings, token ids or lists of token ids, not a mixture", "prompt")
        if kind is int:
            return [items]
        # Before the work of encoding, not after it.
        if len(items) > MAX_SAMPLES:
            raise BadParam(f"prompt: at most {MAX_SAMPLES} prompts, not {len(items)}", "prompt")
        if kind is list:
            return items
        return [self._encode(item, special) for item in items]

    def _encode(self, text: str, special: bool) -> list[int]:
        if not text:
            raise BadParam("prompt: the prompt is empty", "prompt")
        return self.tokenizer.encode(text, special=special)

    def _echo(self, body: CompletionBody, prompts: list[list[int]]) -> list[str]:
        if isinstance(body.prompt, str):
            return [body.prompt]
        return [
            item if isinstance(item, str) else self.tokenizer.decode(ids, skip_special=False)
            for item, ids in zip(
                body.prompt if len(body.prompt) == len(prompts) else prompts, prompts, strict=True
            )
        ]


def _chat_logprobs(body: ChatBody) -> int | None:
    if body.top_logprobs and not body.logprobs:
        raise BadParam("top_logprobs: set logprobs to true as well", "top_logprobs")
    if body.top_logprobs is not None and not 0 <= body.top_logprobs <= 20:
        raise BadParam(f"top_logprobs: from 0 to 20, not {body.top_logprobs}", "top_logprobs")
    return (body.top_logprobs or 0) if body.logprobs else None


def _shape(body: GenerateFields, card: ModelCard, answer_id: str, created: int, logprobs: bool) -> Shape:
    options = body.stream_options
    if options is not None and options.include_usage is not None and not body.stream:
        raise BadParam("stream_options: only with stream", "stream_options")
    return Shape(
        id=answer_id,
        model=card.name,
        created=created,
        logprobs=logprobs,
        include_usage=bool(body.stream and options is not None and options.include_usage),
        token_ids=bool(body.return_token_ids),
        timeline=bool(body.return_timeline),
    )
