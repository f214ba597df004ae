"""The interface of an engine to a scheduler and the leader's loop. Pure types: the simulator implements them
without a model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from segue.engine.request import Grammar, SamplingParams, TokenLogprob
from segue.kv import ErrorInfo, Internal, InvalidRequest, PoolSpec, SegueError, Span


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The properties of the loaded model for roles and frontends.

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
    With `sample`, the next token is drawn from the last position's logits. `slot` holds the state after
    `start` tokens, if the model keeps one (nothing, with `start` 0), and after the step that after all of
    them. `ready` names the moments at which the KV of so many layers is complete on a rank, as (layers,
    number of a `segue.kv.ReadyEvent`): each rank in a process of its own signals them there.
    """

    seq_id: int
    tokens: Sequence[int]
    start: int
    pages: Sequence[int]
    sample: bool
    slot: int | None = None
    ready: tuple[tuple[int, int], ...] = ()

    @property
    def span(self) -> Span:
        """The tokens whose KV the step writes."""
        return Span(self.start, self.start + len(self.tokens))


class OnStored(Protocol):
    """Told by a forward the ids of its sequences when their KV is complete in the pool, or with `layers` that
    of the first so many layers."""

    def __call__(self, seq_ids: Collection[int], layers: int | None = None) -> None: ...


@dataclass(frozen=True, slots=True)
class SequenceResult:
    """The result of a step for one sequence that asked for a sample (or for prompt logprobs).

    `token` is None where nothing was sampled. `prompt_logprobs` holds one entry per token in
    `tokens` of the step (the first token of a prompt has None), if the sequence asked for them.
    `error` is set when this sequence alone failed; `refused` says that its own settings are the cause (a
    grammar that admits no token, say), not the engine.
    """

    seq_id: int
    token: int | None = None
    logprob: TokenLogprob | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    error: str | None = None
    refused: bool = False

    def failure(self, otherwise: str) -> ErrorInfo:
        """The error that ends this sequence's request; `otherwise` is its text if the engine gave none."""
        kind = InvalidRequest if self.refused else Internal
        return kind(self.error or otherwise).info


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


class Formats(Protocol):
    """Output formats that are compiled beside the leader's thread (`engine.grammar.GrammarCompiler`)."""

    def known(self, grammar: Grammar) -> bool:
        """Whether `Engine.open` has nothing to compile for `grammar`."""
        ...

    def prepare(self, grammar: Grammar, done: Callable[[], None], tenant: str = "") -> None:
        """Compile it and call `done`, on another thread; tenants take turns. OutOfCapacity if too many of
        `tenant` wait, or too many in all."""
        ...

    def settle(self, grammar: Grammar) -> None:
        """After `done`: take the result over, so that `grammar` is known."""
        ...

    def close(self) -> None:
        """End what compiles, and drop what waits for it."""
        ...


class HostPages(Protocol):
    """KV and state of a retracted sequence, kept outside the pool."""

    @property
    def nbytes(self) -> int: ...


class Engine(Protocol):
    """One rank's model and pool. Called by the leader's thread only.

    One forward at a time: `launch`, then `collect`. `launch` returns at once, and a device or another thread
    computes meanwhile; or nobody does, and `collect` computes. In between, the other methods may be called,
    for sequences and pages that the forward does not have.
    """

    info: ModelInfo
    spec: PoolSpec
    #: None for an engine whose `open` never computes for long.
    formats: Formats | None

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
        """Begin one forward over all `steps`: write their KV into the pool and sample. There are none only
        where other DP ranks wait for this one (`ExpertPeers.behind`).

        `on_stored` may be called once, when KV and state of all layers are in the pool and final, with every
        sequence that the forward computes: it leaves while the forward goes on. Before that it may be called
        with numbers of layers, each larger than the last. If the handle is ready at
        once, that is within `collect`; else it is before the handle is ready, from any thread. `on_ready` is
        called once, from any thread, when a handle that was not ready is."""
        ...

    def collect(self, handle: StepHandle) -> list[SequenceResult]:
        """The results of the forward; waits for it. Tokens sampled are appended to the sampler's state of
        their sequence. Whether it returns or raises, the forward no longer reads or writes the pool."""
        ...

    def copy_out(self, pages: Sequence[int], slot: int | None = None) -> HostPages:
        """Copy pages, and a slot, to memory outside the pool (retraction)."""
        ...

    def copy_in(self, host: HostPages, pages: Sequence[int], slot: int | None = None) -> None:
        """Copy what `copy_out` returned into `pages` (as many) and `slot`. ChecksumMismatch if it is not what
        it was."""
        ...


class ExpertPeers(Protocol):
    """The other DP ranks of an instance whose ranks compute every step together (`engine.ranks.dp_group`).

    Called by the leader's thread, but for `listen`, `stop_listening` and `close`."""

    @property
    def behind(self) -> bool:
        """The others are at a step that this rank has not begun; `Engine.launch` without `steps` does our
        part of it."""
        ...

    def done(self) -> bool:
        """Say that this rank drains and has nothing to compute any more; whether nobody has."""
        ...

    def listen(
        self, wake: Callable[[], None], leave: Callable[[], None], lost: Callable[[SegueError], None]
    ) -> None:
        """Hear the others from now on. From another thread are told: `wake` that `behind` or `done` may have
        changed, `leave` that another rank is done, and once `lost` why nothing can be computed any more.

        Once more for the next role of this process: what the listeners before were told is told again."""
        ...

    def stop_listening(self) -> None:
        """Tell and keep the listeners no longer: they belong to a role that has ended. The next listeners
        hear later events."""
        ...

    def close(self) -> None:
        """Leave; the others hear so. Idempotent."""
        ...


def run_step(
    engine: Engine, steps: Sequence[SequenceStep], on_stored: OnStored = lambda _seq_ids, layers=None: None
) -> list[SequenceResult]:
    """One forward from its launch to its results, for a caller that has nothing else to do."""
    return engine.collect(engine.launch(steps, on_stored, lambda: None))
