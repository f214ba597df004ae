"""One sample: outputs of the backend to pieces of text; and all samples of one request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from segue.engine.request import FinishReason, Output, Request, TokenLogprob, Usage, Wait
from segue.kv import AbortedByClient, ErrorCode, ErrorInfo, Internal
from segue.kv.session import awaited
from segue.server.frontend.backend import Generator
from segue.server.frontend.detokenize import Detokenizer, StopStrings
from segue.server.frontend.params import Text
from segue.server.frontend.request_memory import LOGPROB_BYTES, TOKEN_BYTES
from segue.server.frontend.tokenizer import ModelTokenizer
from segue.server.observe.metrics import Inference, Metrics


@dataclass(slots=True)
class Piece:
    """A decoded output. `finish` comes in the last piece of a sample."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] | None = None
    finish: FinishReason | None = None
    stop_reason: str | int | None = None

    @property
    def nbytes(self) -> int:
        """About what it takes in memory."""
        shown = [*self.logprobs, *(self.prompt_logprobs or ())]
        values = sum(1 + len(one.top) for one in shown if one is not None)
        return TOKEN_BYTES * len(self.token_ids) + 2 * len(self.text) + LOGPROB_BYTES * values


class Sample:
    """The state of one generation between the backend and the client. No I/O, no clock."""

    def __init__(self, request: Request, text: Text, tokenizer: ModelTokenizer) -> None:
        self.request = request
        self.tokens = 0
        self.usage = Usage()
        self.finish: FinishReason | None = None
        self.timeline: dict[str, float] = {}
        #: When its first token came, on the meter's clock; 0 before.
        self.first_at = 0.0
        self._detokenizer = Detokenizer(tokenizer, skip_special=text.skip_special)
        self._stops = StopStrings(text.stops, include=text.include_stop)
        self._keep_stop_token = text.include_stop

    def feed(self, output: Output) -> Piece:
        """The piece of `output`. Raises Internal if an output was lost or repeated on the way."""
        if output.token_ids and output.position != self.tokens:
            raise Internal(
                f"an output begins at token {output.position} where {self.tokens} was expected: one was "
                "lost or repeated",
                phase="stream",
            )
        if output.usage is not None:
            self.usage = output.usage
        if output.timeline:
            self.timeline = output.timeline
        piece = Piece(
            token_ids=output.token_ids,
            logprobs=output.logprobs,
            prompt_logprobs=output.prompt_logprobs,
            finish=output.finish,
            stop_reason=output.stop_token,
        )
        self._decode(output, piece)
        self.finish = piece.finish
        self.tokens += len(piece.token_ids)
        return piece

    def _decode(self, output: Output, piece: Piece) -> None:
        ids = output.token_ids
        shown = ids
        ended_by = output.stop_token if output.finish is FinishReason.STOP else None
        if ended_by is not None and not self._keep_stop_token and ids and ids[-1] == ended_by:
            # The token that ended the generation is counted and listed, but is not text.
            shown = ids[:-1]
        if not self._stops.watches:
            piece.text = self._detokenizer.feed(shown)
        else:
            # One by one, to know which token completed a stop string.
            minimum = self.request.sampling.min_tokens
            texts = []
            for i, token in enumerate(shown):
                new = self._detokenizer.feed((token,))
                if self.tokens + i + 1 < minimum:
                    texts.append(new)
                    continue
                texts.append(self._stops.feed(new))
                if self._stops.found():
                    self._cut(piece, i + 1)
                    break
            piece.text = "".join(texts)
        if piece.finish is not None and not self._stops.found():
            rest = self._stops.feed(self._detokenizer.flush())
            if self._stops.found():
                self._cut(piece, len(ids))
            piece.text += rest + self._stops.flush()

    def _cut(self, piece: Piece, count: int) -> None:
        piece.token_ids = piece.token_ids[:count]
        piece.logprobs = piece.logprobs[:count]
        piece.finish = FinishReason.STOP
        piece.stop_reason = self._stops.matched


class Meter:
    """The times and counts of one HTTP request's samples, as metrics; `inference` has its labels."""

    def __init__(
        self, metrics: Metrics, clock: Callable[[], float], started: float, inference: Inference
    ) -> None:
        self._metrics = metrics
        self._clock = clock
        self._started = started
        self._inference = inference

    @property
    def started(self) -> float:
        return self._started

    def arrived(self, sample: Sample, tokens: int, last: float | None) -> float:
        """`tokens` more of a sample are sent on, the previous ones at `last` (None: these are the first)."""
        self._metrics.output_tokens.inc(tokens)
        if last is None:
            return self._first(sample)
        now = self._clock()
        self._metrics.itl.observe(now - last)
        return now

    def _first(self, sample: Sample) -> float:
        m, now = self._metrics, self._clock()
        sample.first_at = now
        m.waiting.dec()
        m.running.inc()
        m.ttft.observe(now - self._started)
        prompt = len(sample.request.prompt)
        m.prompt_tokens.inc(prompt)
        m.prompt_length.observe(prompt)
        return now

    def end(self, sample: Sample, *, complete: bool) -> None:
        m, first_at = self._metrics, sample.first_at
        (m.running if first_at else m.waiting).dec()
        if sample.timeline:
            m.timeline(sample.timeline)
        if sample.usage.prefill_cached:
            m.cached_tokens.labels("prefill").inc(sample.usage.prefill_cached)
        if sample.usage.decode_cached:
            m.cached_tokens.labels("decode").inc(sample.usage.decode_cached)
        if complete:
            now, inference = self._clock(), self._inference
            m.e2e.observe(now - self._started)
            m.inference_first.labels(*inference).observe(first_at - self._started)
            if sample.tokens > 1:
                each_s = (now - first_at) / (sample.tokens - 1)
                m.inference_each.labels(*inference).observe(each_s)

    def enter(self) -> None:
        self._metrics.waiting.inc()

    def abort(self, reason: str) -> None:
        self._metrics.aborts.labels(reason).inc()


#: Takes a piece of the sample with this index; returns what `Generation.deliver` expects.
Take = Callable[[int, Piece], Wait | None]


class _Enough(Exception):
    """A stop string was found: what the workers still generate is not wanted."""


async def generate(
    backend: Generator, samples: Sequence[Sample], meter: Meter, take: Take, *, budget_s: float
) -> None:
    """Give the pieces of all samples to `take` as they come, each with its sample's index, until all have
    ended.

    One failure ends all of them: a client gets all samples or an error. However it is left, the backend holds
    nothing of them afterwards.
    """
    if len(samples) == 1:
        await _one(backend, samples[0], 0, meter, take, budget_s)
        return
    ones = [awaited(_one(backend, sample, i, meter, take, budget_s)) for i, sample in enumerate(samples)]
    try:
        await asyncio.gather(*ones)
    finally:
        for one in ones:
            one.cancel()
        await asyncio.gather(*ones, return_exceptions=True)


async def _one(
    backend: Generator, sample: Sample, index: int, meter: Meter, take: Take, budget_s: float
) -> None:
    request_id = sample.request.request_id
    reason: str | None = "client"
    last: float | None = None

    def arrived(output: Output) -> Wait | None:
        nonlocal reason, last
        piece = sample.feed(output)
        last = meter.arrived(sample, len(piece.token_ids), last)
        if piece.finish is not None:
            # The workers know of their own end; not of a stop string that we saw.
            reason = None if output.finish is not None else "stop_string"
        wait = take(index, piece)
        if reason == "stop_string":
            raise _Enough
        return wait

    meter.enter()
    try:
        await backend.submit(sample.request, budget_s=budget_s).deliver(arrived)
        if reason is not None:
            raise Internal("the outputs ended without an end", phase="stream")
    except _Enough:
        pass
    except AbortedByClient:
        raise
    except Exception:
        reason = "error"
        raise
    finally:
        if reason == "stop_string":
            backend.complete(request_id)
        elif reason is not None:
            text = "the client left" if reason == "client" else "the request failed"
            backend.cancel(request_id, ErrorInfo(code=ErrorCode.ABORTED_BY_CLIENT, text=text))
            meter.abort(reason)
        meter.end(sample, complete=reason in (None, "stop_string"))
