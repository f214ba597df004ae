"""What a scheduler and the leader's loop ask of an engine. Pure types: the simulator implements them without
a model."""

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


class StepHandle(Protocol):
    """A forward that was launched and not yet collected."""

    @property
    def ready(self) -> bool:
        """Whether `collect` has nobody to wait for: a device has ended, or `collect` computes it itself."""
        ...


@dataclass(frozen=True, slots=True)
class StepOnCall:
    """The handle of an engine that computes on its caller's thread, within `collect`."""

    steps: Sequence[SequenceStep]
    on_stored: OnStored
    ready: bool = True


class HostPages(Protocol):
    """KV of a retracted sequence, kept outside the pool."""

    @property
    def nbytes(self) -> int: ...


class Engine(Protocol):
    """One rank's model and pool. Called by the leader's thread only.

    One forward at a time: `launch`, then `collect`. An engine with a device returns from `launch` at once and
    computes meanwhile; one without computes within `collect`, so that what its caller has to do first is
    done before. In between, the other methods may be called, for sequences and pages that the forward does
    not have.
    """

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

    def launch(
        self, steps: Sequence[SequenceStep], on_stored: OnStored, on_ready: Callable[[], None]
    ) -> StepHandle:
        """Begin one forward over all `steps`: write their KV into the pool and sample.

        `on_stored` may be called once, when the KV of all layers is in the pool and final, with every
        sequence that the forward computes: it leaves while the forward goes on. If the handle is ready at
        once, that is within `collect`; else it is before the handle is ready, from any thread. `on_ready` is
        called once, from any thread, when a handle that was not ready is."""
        ...

    def collect(self, handle: StepHandle) -> list[SequenceResult]:
        """The results of the forward; waits for it. Tokens sampled are appended to the sampler's state of
        their sequence. Whether it returns or raises, the forward no longer reads or writes the pool."""
        ...

    def copy_out(self, pages: Sequence[int]) -> HostPages:
        """Copy pages to memory outside the pool (retraction)."""
        ...

    def copy_in(self, host: HostPages, pages: Sequence[int]) -> None:
        """Copy what `copy_out` returned into `pages` (as many). ChecksumMismatch if it is not what it was."""
        ...


def run_step(
    engine: Engine, steps: Sequence[SequenceStep], on_stored: OnStored = lambda _seq_ids: None
) -> list[SequenceResult]:
    """One forward from its launch to its results, for a caller that has nothing else to do."""
    return engine.collect(engine.launch(steps, on_stored, lambda: None))
