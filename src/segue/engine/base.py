"""What a role asks of an engine. Pure types: the simulator implements them without a model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from segue.core.request import SamplingParams, TokenLogprob
from segue.core.types import Span
from segue.layout.spec import PoolSpec


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What a role and a frontend need to know of the loaded model.

    `fingerprint` is a hash over configuration and weights (equal on both sides or no hand-off);
    `context_tokens` the longest sequence; `eos_token_ids` end a generation unless `ignore_eos`.
    """

    name: str
    fingerprint: str
    vocab_size: int
    context_tokens: int
    eos_token_ids: frozenset[int]
    dtype: str


@dataclass(frozen=True, slots=True)
class SequenceStep:
    """One sequence's part of a forward: `tokens` at positions `start …` of the sequence.

    `pages` are all pages of the sequence from token 0 on, with room for `start + len(tokens)`.
    With `sample`, the next token is drawn from the last position's logits.
    """

    seq_id: int
    tokens: Sequence[int]
    start: int
    pages: Sequence[int]
    sample: bool

    @property
    def span(self) -> Span:
        """The tokens whose KV the step writes."""
        return Span(self.start, self.start + len(self.tokens))


#: Told by a forward whose KV is complete in the pool: the ids of sequences.
OnStored = Callable[[Collection[int]], None]


@dataclass(frozen=True, slots=True)
class SequenceResult:
    """What a step gave for one sequence that asked for a sample (or for prompt logprobs).

    `token` is None where nothing was sampled. `prompt_logprobs` holds one entry per token in
    `tokens` of the step (the first token of a prompt has None), if the sequence asked for them.
    `error` is set when this sequence alone failed (a grammar that admits no token, say).
    """

    seq_id: int
    token: int | None = None
    logprob: TokenLogprob | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    error: str | None = None


class HostPages(Protocol):
    """KV of a retracted sequence, kept outside the pool."""

    @property
    def nbytes(self) -> int: ...


class Engine(Protocol):
    """One rank's model and pool. Called by the leader's thread only; `step` blocks."""

    info: ModelInfo
    spec: PoolSpec

    def open(
        self, seq_id: int, prompt: Sequence[int], sampling: SamplingParams, output: Sequence[int] = ()
    ) -> None:
        """Begin a sequence whose tokens so far are `prompt + output`; builds its sampler state
        (penalty counts, grammar). Raises InvalidRequest, e.g. for a schema that cannot be compiled."""
        ...

    def append(self, seq_id: int, token: int) -> None:
        """Tell the sampler a token that was drawn elsewhere (decode: the first token)."""
        ...

    def close(self, seq_id: int) -> None:
        """Forget a sequence. Unknown ids are ignored."""
        ...

    def step(self, steps: Sequence[SequenceStep], on_stored: OnStored | None = None) -> list[SequenceResult]:
        """Run one forward over all `steps`, write their KV into the pool and sample.
        Tokens sampled here are appended to the sampler's state of the sequence.

        `on_stored` may be called from within, once, when the KV of all layers is in the pool and final, with
        every sequence that the forward computes: it leaves while the forward goes on."""
        ...

    def copy_out(self, pages: Sequence[int]) -> HostPages:
        """Copy pages to memory outside the pool (retraction)."""
        ...

    def copy_in(self, host: HostPages, pages: Sequence[int]) -> None:
        """Copy what `copy_out` returned into `pages` (as many). ChecksumMismatch if it is not what it was."""
        ...
