"""Pieces of text to OpenAI's answers: whole, and as the chunks of a stream."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from segue.engine.request import FinishReason, TokenLogprob
from segue.kv import SegueError
from segue.server.frontend.generate import Piece, Sample
from segue.server.frontend.reply_parts import Part, ReplyParser, Thought, ToolCall
from segue.server.frontend.tokenizer import ModelTokenizer

#: JSON has no infinity; this is what OpenAI and vLLM show for a token that could not be.
_LOWEST = -9999.0

Json = dict[str, Any]

_encode = msgspec.json.Encoder().encode

#: Bytes of a token id in JSON, with its comma.
_ID_BYTES: Final = 6
#: Stand in a template for what differs from event to event; no text of a model's name or an id is the same.
_ANY_TEXT: Final = "\0"
_ANY_TOKENS: Final = [-1]


@dataclass(frozen=True, slots=True)
class Shape:
    """Properties that all answers to one HTTP request share.

    `include_usage`: a stream ends with an event with the usage. `continuous_usage`: each event before it has
    the usage of its own sample so far.
    """

    id: str
    model: str
    created: int
    logprobs: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    token_ids: bool = False
    timeline: bool = False


@dataclass(slots=True)
class Choice:
    """One sample on its way to the client. `prompt` is the index of its prompt."""

    sample: Sample
    prompt: int = 0
    parser: ReplyParser | None = None
    #: the token that ends reasoning, if one does
    thought_end: int | None = None
    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    reasoning_tokens: int = 0
    #: tokens that may turn out to begin reasoning
    _undecided_tokens: int = 0
    token_ids: list[int] = field(default_factory=list)
    #: log-probabilities so far as items of JSON lists, by the list's name: encoded once, as they come
    logprobs: defaultdict[str, bytearray] = field(default_factory=lambda: defaultdict(bytearray))
    finish: FinishReason | None = None
    stop_reason: str | int | None = None
    begun: bool = False
    offset: int = 0

    def read(self, piece: Piece) -> list[Part]:
        """The parts that became certain with `piece`. Calls are kept, and tokens of reasoning counted."""
        parser = self.parser
        if parser is None:
            return [piece.text] if piece.text else []
        before = parser.thinking
        parts = parser.feed(piece.text)
        self._count_thoughts(
            piece.token_ids, parser, thought=before or any(isinstance(p, Thought) for p in parts)
        )
        if piece.finish is not None:
            parts = parts + parser.finish()
        self.calls += [part for part in parts if isinstance(part, ToolCall)]
        return parts

    def _count_thoughts(self, ids: list[int], parser: ReplyParser, *, thought: bool) -> None:
        """Count the tokens of reasoning among `ids`, after whose text `parser` has seen `thought` or not."""
        if parser.thinking or thought:
            ended = not parser.thinking and self.thought_end in ids
            count = ids.index(self.thought_end) + 1 if ended and self.thought_end is not None else len(ids)
            self.reasoning_tokens += self._undecided_tokens + count
            self._undecided_tokens = 0
        else:
            self._undecided_tokens = self._undecided_tokens + len(ids) if parser.undecided else 0

    def stopped_by(self, reason: str | int | None) -> str | int | None:
        """`reason` if the client has named it; None for the model's own end token, as in vLLM."""
        named = isinstance(reason, str) or reason in self.sample.request.sampling.stop_token_ids
        return reason if named else None

    @property
    def ended_by(self) -> FinishReason | None:
        """Why it ended, as chat answers say it."""
        called = self.finish is FinishReason.STOP and self.calls
        return FinishReason.TOOL_CALLS if called else self.finish


class Answer(ABC):
    """One HTTP request's answer. Use either `chunks` for each piece, or `add` for each and `whole`."""

    #: Also a stream keeps all that was said.
    keeps_streamed = False

    def __init__(self, shape: Shape, choices: Sequence[Choice], tokenizer: ModelTokenizer) -> None:
        self.shape = shape
        self.choices = choices
        self.tokenizer = tokenizer

    @property
    def repeated_bytes(self) -> int:
        """About how many bytes of prompts the samples of the answer repeat."""
        if not self.shape.token_ids:
            return 0
        return _ID_BYTES * sum(len(choice.sample.request.prompt) for choice in self.choices)

    @property
    def kept_bytes(self) -> int:
        """Bytes of the request's fields that it keeps, and sends, besides."""
        return 0

    @abstractmethod
    def chunks(self, index: int, piece: Piece) -> list[Json]:
        """The stream's events for one piece; often one, none if nothing can be shown yet."""

    @abstractmethod
    def whole(self) -> Json:
        """The complete answer."""

    @abstractmethod
    def shown_logprobs(self, choice: Choice, piece: Piece) -> dict[str, list[Any]]:
        """The log-probabilities in `piece` as a whole answer shows them, list by list."""

    @abstractmethod
    def usage_chunk(self) -> Json:
        """The event with the usage, the last before the end."""

    def events(self, index: int, piece: Piece) -> bytes:
        """`chunks`, as the stream carries them; empty if there are none."""
        return b"".join([b"data: %b\n\n" % _encode(chunk) for chunk in self.chunks(index, piece)])

    def usage_event(self) -> bytes:
        """`usage_chunk`, as the stream carries it."""
        return b"data: %b\n\n" % _encode(self.usage_chunk())

    def failed(self, error: SegueError) -> bytes | None:
        """The event of an error in its stream; None: that of its dialect."""
        return None

    def add(self, index: int, piece: Piece) -> None:
        """Remember a piece for `whole`."""
        choice = self.choices[index]
        for part in choice.read(piece):
            if isinstance(part, str):
                choice.texts.append(part)
            elif isinstance(part, Thought):
                choice.thoughts.append(part.text)
        if self.shape.token_ids:
            choice.token_ids += piece.token_ids
        if self.shape.logprobs:
            for name, items in self.shown_logprobs(choice, piece).items():
                append_items(choice.logprobs[name], items)
        if piece.finish is not None:
            choice.finish, choice.stop_reason = piece.finish, piece.stop_reason

    def usage(self) -> Json:
        """Tokens of all prompts, each counted once, and of all samples."""
        prompts = {c.prompt: c.sample for c in self.choices}
        prompt = sum(len(s.request.prompt) for s in prompts.values())
        cached = sum(s.usage.decode_cached + s.usage.prefill_cached for s in prompts.values())
        completion = sum(c.sample.tokens for c in self.choices)
        out = {**_counted(prompt, completion), "prompt_tokens_details": {"cached_tokens": cached}}
        if any(c.parser is not None and c.parser.thought_end for c in self.choices):
            reasoning = sum(c.reasoning_tokens for c in self.choices)
            out["completion_tokens_details"] = {"reasoning_tokens": reasoning}
        return out

    def frame(self, kind: str, choices: list[Json]) -> Json:
        shape = self.shape
        return {
            "id": shape.id,
            "object": kind,
            "created": shape.created,
            "model": shape.model,
            "choices": choices,
        }

    def event(self, kind: str, choice: Json, sample: Sample, finish: FinishReason | None) -> Json:
        out = self.frame(kind, [choice])
        if self.shape.include_usage:
            continuous = self.shape.continuous_usage
            out["usage"] = _counted(len(sample.request.prompt), sample.tokens) if continuous else None
        if self.shape.timeline and finish is not None:
            out["timeline"] = sample.timeline
        return out

    def extras(self, choice: Choice, token_ids: list[int], *, prompt: bool) -> Json:
        """The fields that `return_token_ids` adds to a choice."""
        if not self.shape.token_ids:
            return {}
        out: Json = {"token_ids": token_ids}
        if prompt:
            out["prompt_token_ids"] = choice.sample.request.prompt
        return out

    def complete(self, kind: str, choices: list[Json]) -> Json:
        out = self.frame(kind, choices)
        out["usage"] = self.usage()
        if self.shape.timeline:
            out["timeline"] = self.choices[0].sample.timeline
        return out


def append_items(items: bytearray, more: list[Any]) -> None:
    """Append `more` to the items of a JSON list."""
    if more:
        items += (b"," if items else b"") + _encode(more)[1:-1]


def _lists(items: Mapping[str, bytearray]) -> Json:
    return {name: msgspec.Raw(b"[" + each + b"]") for name, each in items.items()}


def _counted(prompt: int, completion: int) -> Json:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


class TemplatedAnswer(Answer):
    """An answer whose events within a sample differ in text and tokens only: these are put into the bytes of
    the first such event. Events with log-probabilities, tool calls or a usage are encoded whole."""

    def __init__(self, shape: Shape, choices: Sequence[Choice], tokenizer: ModelTokenizer) -> None:
        super().__init__(shape, choices, tokenizer)
        #: by sample: what stands before the text, between it and the tokens, and after them
        self._templates: dict[int, tuple[bytes, bytes, bytes]] = {}

    def events(self, index: int, piece: Piece) -> bytes:
        choice = self.choices[index]
        if (
            not piece.text
            or piece.finish is not None
            or piece.stop_reason is not None
            or not choice.begun
            or choice.parser is not None
            or self.shape.logprobs
            or self.shape.continuous_usage
        ):
            return super().events(index, piece)
        template = self._templates.get(index)
        if template is None:
            template = self._templates[index] = self._template(index)
        before, between, after = template
        if not self.shape.token_ids:
            return b"%b%b%b" % (before, _encode(piece.text), after)
        return b"%b%b%b%b%b" % (before, _encode(piece.text), between, _encode(piece.token_ids), after)

    def _template(self, index: int) -> tuple[bytes, bytes, bytes]:
        event = super().events(index, Piece(text=_ANY_TEXT, token_ids=_ANY_TOKENS))
        before, text, rest = event.partition(_encode(_ANY_TEXT))
        between, tokens, after = rest.rpartition(_encode(_ANY_TOKENS))
        assert text, "an event without its text"
        assert bool(tokens) is self.shape.token_ids
        return before, between, after


class ChatAnswer(TemplatedAnswer):
    """`chat.completion` and its chunks."""

    def chunks(self, index: int, piece: Piece) -> list[Json]:
        choice = self.choices[index]
        known = len(choice.calls)
        deltas = _deltas(choice.read(piece), known)
        choice.finish = piece.finish
        finish = choice.ended_by
        if not deltas:
            if finish is None and choice.begun and not self.shape.logprobs and not self.shape.token_ids:
                return []
            deltas = [{}]
        if not choice.begun:
            deltas[0] = {"role": "assistant", "content": "", **deltas[0]}
        out = []
        for i, delta in enumerate(deltas):
            last = i == len(deltas) - 1
            entry: Json = {
                "index": index,
                "delta": delta,
                "logprobs": self._logprobs(piece.logprobs) if last and self.shape.logprobs else None,
                "finish_reason": finish.value if last and finish else None,
            }
            if last:
                if (stop := choice.stopped_by(piece.stop_reason)) is not None:
                    entry["stop_reason"] = stop
                entry.update(self.extras(choice, piece.token_ids, prompt=not choice.begun))
            out.append(
                self.event("chat.completion.chunk", entry, choice.sample, piece.finish if last else None)
            )
        choice.begun = True
        return out

    def whole(self) -> Json:
        return self.complete("chat.completion", [self._choice(i, c) for i, c in enumerate(self.choices)])

    def _choice(self, index: int, choice: Choice) -> Json:
        content: str | None = "".join(choice.texts)
        if not content and (choice.calls or choice.thoughts):
            content = None
        message: Json = {"role": "assistant", "content": content}
        if choice.thoughts:
            message["reasoning_content"] = "".join(choice.thoughts)
        if choice.calls:
            message["tool_calls"] = [
                {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
                for c in choice.calls
            ]
        finish = choice.ended_by
        out: Json = {
            "index": index,
            "message": message,
            "logprobs": _lists(choice.logprobs) if self.shape.logprobs else None,
            "finish_reason": finish.value if finish else None,
            "stop_reason": choice.stopped_by(choice.stop_reason),
        }
        out.update(self.extras(choice, choice.token_ids, prompt=True))
        return out

    def shown_logprobs(self, choice: Choice, piece: Piece) -> dict[str, list[Any]]:
        """See `Answer.shown_logprobs`."""
        return self._logprobs(piece.logprobs)

    def usage_chunk(self) -> Json:
        return {**self.frame("chat.completion.chunk", []), "usage": self.usage()}

    def _logprobs(self, logprobs: list[TokenLogprob]) -> Json:
        return {
            "content": [
                {
                    **self._token(lp.token, lp.logprob),
                    "top_logprobs": [self._token(token, logprob) for token, logprob in lp.top],
                }
                for lp in logprobs
            ]
        }

    def _token(self, token: int, logprob: float) -> Json:
        raw = self.tokenizer.token_bytes(token)
        text = raw.decode("utf-8", "replace")
        return {"token": text, "logprob": max(logprob, _LOWEST), "bytes": list(raw)}


def _deltas(parts: list[Part], calls: int) -> list[Json]:
    """The deltas of a stream for `parts`, before which there were so many calls."""
    out: list[Json] = []
    for part in parts:
        if isinstance(part, str):
            out.append({"content": part})
        elif isinstance(part, Thought):
            out.append({"reasoning_content": part.text})
        else:
            head = {"index": calls, "id": part.id, "type": "function"}
            out.append({"tool_calls": [{**head, "function": {"name": part.name, "arguments": ""}}]})
            out.append({"tool_calls": [{"index": calls, "function": {"arguments": part.arguments}}]})
            calls += 1
    return out


class CompletionAnswer(TemplatedAnswer):
    """`text_completion`. `echo` holds each prompt's text where the prompt is to be repeated;
    with `echo_only` nothing but the prompt was asked for (`max_tokens: 0`)."""

    def __init__(
        self,
        shape: Shape,
        choices: Sequence[Choice],
        tokenizer: ModelTokenizer,
        *,
        echo: Sequence[str] | None = None,
        echo_only: bool = False,
    ) -> None:
        super().__init__(shape, choices, tokenizer)
        self._echo = echo
        self._echo_only = echo_only

    @property
    def repeated_bytes(self) -> int:
        """See `Answer.repeated_bytes`."""
        echoed = 0 if self._echo is None else sum(len(self._echo[choice.prompt]) for choice in self.choices)
        return super().repeated_bytes + echoed

    def events(self, index: int, piece: Piece) -> bytes:
        if self._echo_only:  # nothing of what is generated is shown: a template would have no text
            return Answer.events(self, index, piece)
        return super().events(index, piece)

    def chunks(self, index: int, piece: Piece) -> list[Json]:
        choice = self.choices[index]
        text, ids, logprobs = piece.text, piece.token_ids, list[TokenLogprob | None](piece.logprobs)
        if self._echo_only:
            text, ids, logprobs = "", [], []
        if self._echo is not None and not choice.begun:
            text = self._echo[choice.prompt] + text
            logprobs = [*(piece.prompt_logprobs or []), *logprobs]
            ids = [*choice.sample.request.prompt, *ids]
        silent = not text and piece.finish is None and not self.shape.logprobs
        if silent and choice.begun and not self.shape.token_ids:
            return []
        entry: Json = {
            "index": index,
            "text": text,
            "logprobs": self._logprobs(choice, ids, logprobs) if self.shape.logprobs else None,
            "finish_reason": piece.finish.value if piece.finish else None,
        }
        if (stop := choice.stopped_by(piece.stop_reason)) is not None:
            entry["stop_reason"] = stop
        shown = [] if self._echo_only else piece.token_ids
        entry.update(self.extras(choice, shown, prompt=not choice.begun))
        choice.begun = True
        return [self.event("text_completion", entry, choice.sample, piece.finish)]

    def whole(self) -> Json:
        return self.complete("text_completion", [self._choice(i, c) for i, c in enumerate(self.choices)])

    def _choice(self, index: int, choice: Choice) -> Json:
        text, token_ids = "".join(choice.texts), choice.token_ids
        if self._echo_only:
            text, token_ids = "", []
        if self._echo is not None:
            text = self._echo[choice.prompt] + text
        out: Json = {
            "index": index,
            "text": text,
            "logprobs": _lists(choice.logprobs) if self.shape.logprobs else None,
            "finish_reason": choice.finish.value if choice.finish else None,
            "stop_reason": choice.stopped_by(choice.stop_reason),
        }
        out.update(self.extras(choice, token_ids, prompt=True))
        return out

    def shown_logprobs(self, choice: Choice, piece: Piece) -> dict[str, list[Any]]:
        """See `Answer.shown_logprobs`. The log-probabilities of a repeated prompt are in its first piece."""
        logprobs = [] if self._echo_only else list[TokenLogprob | None](piece.logprobs)
        ids = [] if self._echo_only else [lp.token for lp in piece.logprobs]
        if self._echo is not None and piece.prompt_logprobs is not None:
            logprobs = [*piece.prompt_logprobs, *logprobs]
            ids = [*choice.sample.request.prompt, *ids]
        return self._logprobs(choice, ids, logprobs)

    def usage_chunk(self) -> Json:
        return {**self.frame("text_completion", []), "usage": self.usage()}

    def _logprobs(self, choice: Choice, ids: Sequence[int], logprobs: Sequence[TokenLogprob | None]) -> Json:
        """OpenAI's four parallel lists. The prompt's first token has no probability."""
        tokens: list[str] = []
        offsets: list[int] = []
        for token in ids[: len(logprobs)]:
            text = self.tokenizer.token_text(token)
            tokens.append(text)
            offsets.append(choice.offset)
            choice.offset += len(text)
        return {
            "tokens": tokens,
            "token_logprobs": [None if lp is None else max(lp.logprob, _LOWEST) for lp in logprobs],
            "top_logprobs": [
                None
                if lp is None
                else {self.tokenizer.token_text(t): max(logprob, _LOWEST) for t, logprob in lp.top}
                for lp in logprobs
            ],
            "text_offset": offsets,
        }
