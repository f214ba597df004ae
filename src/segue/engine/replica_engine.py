"""The engine of one replica: its open sequences, the checks of each step, its errors and the sampler, around
a forward that computes. It knows nothing of the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from segue.engine.engine_api import (
    Formats,
    HostPages,
    ModelInfo,
    OnStored,
    SequenceResult,
    SequenceStep,
    StepHandle,
)
from segue.engine.forward import Forward, OutputHead, RankForward
from segue.engine.models.folders import read_json
from segue.engine.models.progress import step
from segue.engine.packing import Packed, Segment, StepLimits, check, pack
from segue.engine.request import SamplingParams, TokenLogprob
from segue.engine.sampler import Sampler
from segue.kv import ConfigError, Internal, InvalidRequest, Memory, PoolSpec, SegueError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerFast

#: Rows of logits held at once while prompt log-probabilities are computed.
LOGPROB_ROWS = 128


@dataclass(slots=True)
class _OpenSequence:
    """The engine's own record of an open sequence.

    `last_hidden` is the final hidden state of the last prompt token computed so far, of which
    the next chunk's first token takes its log-probability; kept only if those were asked for.
    """

    prompt_tokens: int
    wants_prompt: bool
    computed: int = 0
    last_hidden: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class _Running:
    """The `StepHandle` of a forward on the engine's thread."""

    results: Future[list[SequenceResult]]

    @property
    def ready(self) -> bool:
        """See `StepHandle.ready`."""
        return self.results.done()


class ReplicaEngine:
    """`Engine` over a forward. Forwards run on a thread of its own, one after the other: what concerns other
    sequences need not wait for them. The KV of the layers that a step's `ready` names is told of while a
    forward computes the next ones."""

    def __init__(
        self,
        info: ModelInfo,
        forward: Forward,
        head: OutputHead,
        sampler: Sampler,
        formats: Formats | None = None,
    ) -> None:
        self.info = info
        self.formats = formats
        #: the KV and states of this rank
        self.pool = pool = forward.pool
        self.spec: PoolSpec = pool.spec
        self.memory: Memory = pool.memory
        self.sampler = sampler
        self._forward = forward
        self._head = head
        self._limits = StepLimits(
            vocab_size=info.vocab_size,
            context_tokens=info.context_tokens,
            pages=pool.spec.pages,
            page_tokens=pool.spec.page_tokens,
            slots=pool.spec.slots,
        )
        self._sequences: dict[int, _OpenSequence] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="segue-forward")

    def open(
        self, seq_id: int, prompt: Sequence[int], sampling: SamplingParams, output: Sequence[int] = ()
    ) -> None:
        """Begin a sequence. Raises InvalidRequest if it is open already or cannot be sampled."""
        if seq_id in self._sequences:
            raise InvalidRequest(f"sequence {seq_id} is open already")
        self.sampler.open(seq_id, prompt, sampling, output)
        self._sequences[seq_id] = _OpenSequence(len(prompt), sampling.prompt_logprobs is not None)

    def append(self, seq_id: int, token: int) -> None:
        """Tell the sampler a token that was drawn elsewhere."""
        self.sampler.append(seq_id, token)

    def close(self, seq_id: int) -> None:
        """Forget a sequence. Unknown ids are ignored."""
        if self._sequences.pop(seq_id, None) is not None:
            self.sampler.close(seq_id)

    def copy_out(self, pages: Sequence[int], slot: int | None = None) -> HostPages:
        """Copy pages, and a slot, to memory outside the pool (retraction)."""
        return self._forward.copy_out(pages, slot)

    def copy_in(self, host: HostPages, pages: Sequence[int], slot: int | None = None) -> None:
        """Copy what `copy_out` of this engine returned into `pages` (as many) and `slot`."""
        self._forward.copy_in(host, pages, slot)

    def launch(
        self, steps: Sequence[SequenceStep], on_stored: OnStored, on_ready: Callable[[], None]
    ) -> StepHandle:
        """See `Engine.launch`. A sequence that fails a check leaves the others alone."""
        results = self._thread.submit(self._compute, steps, on_stored)
        results.add_done_callback(lambda _: on_ready())
        return _Running(results)

    def collect(self, handle: StepHandle) -> list[SequenceResult]:
        """Results for sequences that sample, want prompt log-probabilities or failed."""
        if not isinstance(handle, _Running):
            raise Internal(f"not a step of this engine: {type(handle).__name__}")
        return handle.results.result()

    def _compute(self, steps: Sequence[SequenceStep], on_stored: OnStored) -> list[SequenceResult]:
        """On the engine's thread."""
        if not steps:
            with torch.inference_mode():
                self._forward.along()
            return []
        errors = check(steps, self._sequences, self._limits)
        results = [SequenceResult(steps[index].seq_id, error=text) for index, text in errors.items()]
        if len(errors) == len(steps):
            return results
        with torch.inference_mode():
            packed = pack(steps, errors, self._limits.page_tokens)
            packed = replace(packed, wanted=self._wanted(packed))
            stored = partial(_stored, on_stored, [segment.step for segment in packed.segments])
            hidden = self._forward.run(packed, stored)
            prompt = self._prompt_results(packed, hidden)
            results.extend(self._sample(packed, hidden, prompt))
        return results

    def _wanted(self, packed: Packed) -> torch.Tensor | None:
        """The rows of a step of which the final hidden state is looked at; None for all."""
        if any(self._sequences[segment.step.seq_id].wants_prompt for segment in packed.segments):
            return None
        rows = [segment.row + segment.rows - 1 for segment in packed.segments if segment.step.sample]
        return torch.tensor(rows, dtype=torch.int64) if len(rows) < packed.rows else None

    def _sample(
        self, packed: Packed, hidden: torch.Tensor, prompt: dict[int, SequenceResult]
    ) -> list[SequenceResult]:
        wanted = [
            segment
            for segment in packed.segments
            if segment.step.sample
            and (segment.step.seq_id not in prompt or prompt[segment.step.seq_id].error is None)
        ]
        results = dict(prompt)
        if wanted:
            rows = [segment.row + segment.rows - 1 for segment in wanted]
            chosen = hidden if len(rows) == hidden.shape[0] else hidden[rows]
            for result in self.sampler.sample([s.step.seq_id for s in wanted], self._head.logits(chosen)):
                before = prompt.get(result.seq_id)
                if before is not None:
                    result = replace(result, prompt_logprobs=before.prompt_logprobs)
                results[result.seq_id] = result
        return list(results.values())

    def _prompt_results(self, packed: Packed, hidden: torch.Tensor) -> dict[int, SequenceResult]:
        results: dict[int, SequenceResult] = {}
        for segment in packed.segments:
            seq_id = segment.step.seq_id
            state = self._sequences[seq_id]
            if state.wants_prompt and segment.start < state.prompt_tokens:
                try:
                    results[seq_id] = self._prompt_logprobs(segment, hidden)
                except SegueError as error:  # this sequence's alone, the others go on
                    results[seq_id] = SequenceResult(seq_id, error=str(error))
        return results

    def _prompt_logprobs(self, segment: Segment, hidden: torch.Tensor) -> SequenceResult:
        """Log-probabilities of the step's prompt tokens: each from the row before it."""
        step, state = segment.step, self._sequences[segment.step.seq_id]
        tokens = list(step.tokens[: state.prompt_tokens - step.start])
        if step.start != state.computed:
            text = "log-probabilities of a prompt need all of it computed, in order, without a prefix hit"
            return SequenceResult(step.seq_id, error=text)
        rows = hidden[segment.row : segment.row + len(tokens)]
        entries: list[TokenLogprob | None] = []
        before, targets = rows[:-1], tokens[1:]
        if state.last_hidden is None:
            entries.append(None)
        else:
            before, targets = torch.cat([state.last_hidden, before]), tokens
        for at in range(0, len(targets), LOGPROB_ROWS):
            part = slice(at, at + LOGPROB_ROWS)
            entries.extend(
                self.sampler.prompt_logprobs(step.seq_id, self._head.logits(before[part]), targets[part])
            )
        state.computed = step.start + len(tokens)
        state.last_hidden = rows[-1:].clone() if state.computed < state.prompt_tokens else None
        return SequenceResult(step.seq_id, prompt_logprobs=entries)


def _stored(on_stored: OnStored, steps: Sequence[SequenceStep], layers: int | None = None) -> None:
    """The KV of these steps is in the pool, or (`layers`) that of so many layers."""
    if layers is None:
        on_stored([step.seq_id for step in steps])
    elif any(upto == layers for step in steps for upto, _ in step.ready):
        on_stored([step.seq_id for step in steps], layers)


def make_engine(
    folder: Path,
    own: RankForward,
    forward: Forward,
    sampler: Sampler | None = None,
) -> ReplicaEngine:
    """The engine of the model in `folder` over `forward`, of which `own` is the part of this process.
    `sampler` replaces segue's own (tests and benchmarks of the forward alone)."""
    loaded = own.loaded
    if own.head is None:
        raise Internal(f"rank {own.place.rank} does not sample")
    vocab_size, formats = int(loaded.config.vocab_size), None
    with step("tokenizer"):
        tokenizer = _tokenizer(folder)
        ends = _end_tokens(folder, loaded.config, tokenizer)
        if sampler is None and tokenizer is not None:
            from segue.engine.grammar import GrammarCompiler

            # Made at start: the first request that needs it must not hold up a step.
            formats = GrammarCompiler(tokenizer, vocab_size, ends)
    info = ModelInfo(
        name=folder.name,
        fingerprint=own.fingerprint,
        vocab_size=vocab_size,
        context_tokens=loaded.context_tokens,
        eos_token_ids=ends,
        dtype=loaded.shape.dtype,
    )
    if sampler is None:
        sampler = Sampler(vocab_size, ends, formats)
    return ReplicaEngine(info, forward, own.head, sampler, formats)


def _tokenizer(folder: Path) -> PreTrainedTokenizerFast | None:
    """The model's tokenizer; None if the folder has none."""
    if not any((folder / name).exists() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        return None
    from transformers import AutoTokenizer

    try:
        tokenizer: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as exc:
        raise ConfigError(f"the tokenizer in {folder} cannot be loaded: {exc}") from exc
    return tokenizer


def _end_tokens(
    folder: Path, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerFast | None
) -> frozenset[int]:
    """The tokens that end an answer, whoever names them: generation_config.json, config.json, the tokenizer.
    A fine-tuned model may name the end of a turn in one of them only."""
    path = folder / "generation_config.json"
    generation = read_json(path, "") if path.exists() else {}
    named = [generation.get("eos_token_id"), config.eos_token_id, tokenizer and tokenizer.eos_token_id]
    lists = [ids if isinstance(ids, list) else [ids] for ids in named]
    return frozenset(i for ids in lists for i in ids if isinstance(i, int) and 0 <= i < config.vocab_size)
