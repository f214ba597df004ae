"""Chooses tokens from logits, with OpenAI's and vLLM's meaning of every sampling parameter.

Order (vLLM's): grammar mask, `min_tokens`, logit bias, repetition, frequency and presence penalty; then
greedy, or temperature, `min_p`, `top_k`, `top_p` and the draw. Log-probabilities are those of the
model's own distribution, before any of this.

The draw is an exponential race: token i arrives at time E_i / p_i, the first one is chosen, with E_i an
exponential variate that depends on (seed, position, i) and nothing else. So batch composition, role,
retraction and retry never change the random numbers. Float noise in p between batch shapes remains, and the
race is robust against it. Two runs with distributions p, q draw different tokens with probability at most 2 d
/ (1 + d), where d is their total variation distance. No scheme without communication is better (Bavarian et
al., "Optimality of Correlated Sampling Strategies", 2020; Daliri et al., "Coupling without Communication",
2024). One uniform number against the cumulative sum has no such bound: noise shifts all later boundaries, so
every token between may change.

A greedy batch is one argmax. Otherwise each row is worked alone: its 49,152 floats fit the L2 cache, and
each pass over it is one SIMD loop, so there is nothing to gain from wider passes.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from segue.engine.engine_api import SequenceResult
from segue.engine.request import Grammar, Reasoning, SamplingParams, TokenLogprob
from segue.kv import Internal, InvalidRequest

MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 300
MAX_STOP_TOKENS = 256
#: below this a temperature means greedy, as in vLLM: dividing by it would overflow float32
GREEDY_TEMPERATURE = 1e-5
_PROMPT_CHUNK_ROWS = 64

Floats = NDArray[np.float32]
Ids = NDArray[np.intp]


class GrammarState(Protocol):
    """The state of one sequence in its grammar."""

    def admitted(self) -> NDArray[np.bool_]:
        """One flag per token of the vocabulary. Raises InvalidRequest if the grammar is stuck."""
        ...

    def accept(self, token: int) -> None:
        """Advance by a token. A token that the grammar refuses makes `admitted` raise."""
        ...


class _AfterReasoning:
    """A grammar that binds after the reasoning before it. The state depends on the tokens alone, as the
    grammar's does."""

    def __init__(self, grammar: GrammarState, marks: Reasoning, vocab_size: int) -> None:
        self._grammar = grammar
        self._marks = marks
        self._vocab_size = vocab_size
        self._thinks = marks.begun
        #: the next token may begin reasoning
        self._may_begin = not marks.begun

    def admitted(self) -> NDArray[np.bool_]:
        """See `GrammarState.admitted`."""
        if self._thinks:
            return np.ones(self._vocab_size, np.bool_)
        admitted = self._grammar.admitted()
        if self._may_begin:
            admitted[self._marks.start] = True
        return admitted

    def accept(self, token: int) -> None:
        """See `GrammarState.accept`."""
        may_begin, self._may_begin = self._may_begin, False
        if self._thinks:
            self._thinks = token != self._marks.end
        elif may_begin and token == self._marks.start:
            self._thinks = True
        else:
            self._grammar.accept(token)


class GrammarSource(Protocol):
    """Makes grammar states; `engine.grammar.GrammarCompiler` is the real one."""

    def open(self, grammar: Grammar) -> GrammarState:
        """A fresh state. Raises InvalidRequest with the reason if `grammar` cannot be compiled."""
        ...


def check_sampling(sampling: SamplingParams, vocab_size: int) -> None:
    """Refuse values out of range, with one sentence that says what is allowed (InvalidRequest)."""
    s = sampling
    _within("temperature", s.temperature, 0.0, math.inf)
    _within("top_p", s.top_p, 0.0, 1.0)
    if s.top_p == 0.0:
        raise InvalidRequest("top_p must be greater than 0 and at most 1, not 0.")
    _within("min_p", s.min_p, 0.0, 1.0)
    _within("presence_penalty", s.presence_penalty, -2.0, 2.0)
    _within("frequency_penalty", s.frequency_penalty, -2.0, 2.0)
    _within("repetition_penalty", s.repetition_penalty, 0.01, 100.0)
    _within("top_k", s.top_k, 0, math.inf)
    _within("max_tokens", s.max_tokens, 1, math.inf)
    _within("min_tokens", s.min_tokens, 0, math.inf)
    if s.min_tokens > s.max_tokens:
        raise InvalidRequest(f"min_tokens ({s.min_tokens}) must not exceed max_tokens ({s.max_tokens}).")
    _within("seed", s.seed, -(2**63), 2**64 - 1)
    if s.logprobs is not None:
        _within("logprobs", s.logprobs, 0, MAX_LOGPROBS)
    if s.prompt_logprobs is not None:
        _within("prompt_logprobs", s.prompt_logprobs, 0, MAX_LOGPROBS)
    if len(s.logit_bias) > MAX_LOGIT_BIAS:
        raise InvalidRequest(f"logit_bias may name {MAX_LOGIT_BIAS} tokens at most, not {len(s.logit_bias)}.")
    if s.reasoning is not None:
        for token in (s.reasoning.start, s.reasoning.end):
            _known("reasoning", token, vocab_size)
    for token, bias in s.logit_bias.items():
        _known("logit_bias", token, vocab_size)
        _within(f"logit_bias of token {token}", bias, -100.0, 100.0)
    if len(s.stop_token_ids) > MAX_STOP_TOKENS:
        raise InvalidRequest(
            f"stop_token_ids may name {MAX_STOP_TOKENS} tokens at most, not {len(s.stop_token_ids)}."
        )
    for token in s.stop_token_ids:
        _known("stop_token_ids", token, vocab_size)


def _within(name: str, value: float, low: float, high: float) -> None:
    if low <= value <= high and not math.isinf(value):
        return
    if math.isinf(high):
        raise InvalidRequest(f"{name} must be a finite number of at least {low:g}, not {value}.")
    raise InvalidRequest(f"{name} must be between {low} and {high}, not {value}.")


def _known(name: str, token: int, vocab_size: int) -> None:
    if not 0 <= token < vocab_size:
        raise InvalidRequest(f"{name} names token {token}, but the vocabulary ends at {vocab_size - 1}.")


class _NoChoiceError(Exception):
    """This sequence alone cannot get a token; the text says why."""


class _Sequence:
    """Sampler state of one sequence: what was said so far, as far as the parameters need it."""

    __slots__ = ("bias", "counts", "grammar", "greedy", "length", "outputs", "plain", "s", "seen", "stops")

    def __init__(self, sampling: SamplingParams, prompt: Sequence[int], vocab_size: int) -> None:
        s = self.s = sampling
        self.length = len(prompt)
        self.outputs = 0
        self.grammar: GrammarState | None = None
        self.greedy = s.temperature < GREEDY_TEMPERATURE
        #: how often each token was said; None where no penalty asks for it
        self.counts: Floats | None = None
        self.seen: NDArray[np.bool_] | None = None
        self.stops: Ids | None = None
        self.bias: tuple[Ids, Floats] | None = None
        if s.presence_penalty or s.frequency_penalty:
            self.counts = np.zeros(vocab_size, np.float32)
        if s.repetition_penalty != 1.0:
            self.seen = np.zeros(vocab_size, np.bool_)
            self.seen[np.asarray(prompt, np.intp)] = True
        if s.logit_bias:
            self.bias = (
                np.fromiter(s.logit_bias.keys(), np.intp),
                np.fromiter(s.logit_bias.values(), np.float32),
            )
        #: greedy and nothing else: the batch-wide argmax is the answer
        self.plain = (
            self.greedy
            and s.logprobs is None
            and s.grammar is None
            and s.min_tokens == 0
            and self.counts is None
            and self.seen is None
            and self.bias is None
        )

    def append(self, token: int) -> None:
        self.length += 1
        self.outputs += 1
        if self.plain:
            return
        if self.counts is not None:
            self.counts[token] += 1
        if self.seen is not None:
            self.seen[token] = True
        if self.grammar is not None:
            self.grammar.accept(token)


class Sampler:
    """Sampler states of all open sequences of one rank. While `sample` runs, other sequences may be opened,
    told a token and closed."""

    def __init__(
        self, vocab_size: int, eos_token_ids: Iterable[int], grammars: GrammarSource | None = None
    ) -> None:
        self._vocab_size = vocab_size
        self._eos = frozenset(eos_token_ids)
        self._grammars = grammars
        self._sequences: dict[int, _Sequence] = {}
        self._race = _Race(vocab_size)
        self._weights = np.empty(vocab_size, np.float32)

    def __len__(self) -> int:
        """Open sequences."""
        return len(self._sequences)

    def open(
        self, seq_id: int, prompt: Sequence[int], sampling: SamplingParams, output: Sequence[int] = ()
    ) -> None:
        """Begin a sequence whose tokens so far are `prompt + output`.

        InvalidRequest for parameters out of range, or a grammar that cannot be compiled; Internal
        if `seq_id` is open. Nothing is kept then.
        """
        if seq_id in self._sequences:
            raise Internal(f"sequence {seq_id} is open already")
        check_sampling(sampling, self._vocab_size)
        for token in (*prompt, *output) if sampling.repetition_penalty != 1.0 else output:
            _known("the prompt", token, self._vocab_size)
        sequence = _Sequence(sampling, prompt, self._vocab_size)
        if sampling.min_tokens:
            stops = self._eos | set(sampling.stop_token_ids)
            sequence.stops = np.array(sorted(stops), np.intp)
        if sampling.grammar is not None:
            if self._grammars is None:
                raise InvalidRequest("This instance has no grammar support, so no output format can be set.")
            sequence.grammar = self._grammars.open(sampling.grammar)
            if sampling.reasoning is not None:
                sequence.grammar = _AfterReasoning(sequence.grammar, sampling.reasoning, self._vocab_size)
        for token in output:
            sequence.append(token)
        self._sequences[seq_id] = sequence

    def append(self, seq_id: int, token: int) -> None:
        """Tell a token that was drawn elsewhere. Internal for an unknown sequence or token."""
        if not 0 <= token < self._vocab_size:
            raise Internal(f"token {token} is outside the vocabulary of {self._vocab_size}")
        self._get(seq_id).append(token)

    def close(self, seq_id: int) -> None:
        """Forget a sequence. Unknown ids are ignored."""
        self._sequences.pop(seq_id, None)

    def position(self, seq_id: int) -> int:
        """The index, in prompt + output, of the token that the next `sample` draws."""
        return self._get(seq_id).length

    def _get(self, seq_id: int) -> _Sequence:
        sequence = self._sequences.get(seq_id)
        if sequence is None:
            raise Internal(f"sequence {seq_id} is not open in the sampler")
        return sequence

    # --- a step -------------------------------------------------------------------------------

    def sample(self, seq_ids: Sequence[int], logits: torch.Tensor) -> list[SequenceResult]:
        """Draw one token for each of `seq_ids` from its row of `logits` [n, vocab] and append it.

        A sequence that cannot get one (non-finite logits, a stuck grammar) has `error` set and is
        left as it was; the others are not touched by it.
        """
        if logits.shape != (len(seq_ids), self._vocab_size):
            raise Internal(f"logits of {len(seq_ids)} sequences have shape {tuple(logits.shape)}")
        if not seq_ids:
            return []
        sequences = [self._get(seq_id) for seq_id in seq_ids]
        logits = logits.detach()
        if logits.device.type != "cpu" and all(sequence.plain for sequence in sequences):
            rows = None  # only the winners leave the accelerator
            top = logits.max(dim=-1)
            tokens: list[int] = top.indices.tolist()
            finite: list[bool] = top.values.isfinite().tolist()
        else:
            rows = logits.to("cpu", torch.float32).numpy()
            best = rows.argmax(axis=-1)  # the first NaN wins, so the winner's value shows any
            tokens = best.tolist()
            finite = np.isfinite(rows[np.arange(len(sequences)), best]).tolist()
        results: list[SequenceResult] = []
        for at, (seq_id, sequence) in enumerate(zip(seq_ids, sequences, strict=True)):
            if not finite[at]:
                results.append(SequenceResult(seq_id, error="the model gave logits that are not finite"))
                continue
            token = tokens[at]
            logprob = None
            if rows is not None and not sequence.plain:
                try:
                    token = self._choose(sequence, rows[at], token)
                except _NoChoiceError as none:
                    results.append(SequenceResult(seq_id, error=str(none), refused=True))
                    continue
                if sequence.s.logprobs is not None:
                    logprob = _logprobs(rows[at : at + 1], [token], sequence.s.logprobs)[0]
            sequence.append(token)
            results.append(SequenceResult(seq_id, token, logprob))
        return results

    def prompt_logprobs(
        self, seq_id: int, logits: torch.Tensor, next_tokens: Sequence[int]
    ) -> list[TokenLogprob]:
        """The log-probability of `next_tokens[i]` after the prefix whose logits are `logits[i]` [t, vocab].

        With as many alternatives as the sequence's `prompt_logprobs`. Internal for non-finite logits.
        """
        if logits.shape != (len(next_tokens), self._vocab_size):
            raise Internal(f"logits of {len(next_tokens)} prompt tokens have shape {tuple(logits.shape)}")
        wanted = self._get(seq_id).s.prompt_logprobs or 0
        found: list[TokenLogprob] = []
        for at in range(0, len(next_tokens), _PROMPT_CHUNK_ROWS):
            rows = logits[at : at + _PROMPT_CHUNK_ROWS].detach().to("cpu", torch.float32).numpy()
            if not np.isfinite(rows.max(axis=-1)).all():
                raise Internal("the model gave logits that are not finite")
            found += _logprobs(rows, next_tokens[at : at + _PROMPT_CHUNK_ROWS], wanted)
        return found

    # --- one sequence -------------------------------------------------------------------------

    def _choose(self, sequence: _Sequence, row: Floats, best: int) -> int:
        """The next token of `sequence`; `best` is the argmax of its raw logits `row`."""
        shaped = self._shape(sequence, row)
        if shaped is not row:
            best = int(shaped.argmax())
            if not math.isfinite(shaped[best]):
                raise _NoChoiceError("no token is left that the request's settings admit")
        if sequence.greedy:
            return best
        weights = self._weights
        np.subtract(shaped, shaped[best], out=weights)
        # A tiny temperature may overflow to -inf here, and exp(-inf) is the 0 it should be.
        with np.errstate(over="ignore"):
            np.divide(weights, np.float32(sequence.s.temperature), out=weights)
        torch.exp_(torch.from_numpy(weights))  # twice as fast as numpy's
        key = _key(sequence.s.seed, sequence.length)
        return self._race.winner(weights, candidates(weights, sequence.s), key)

    def _shape(self, sequence: _Sequence, row: Floats) -> Floats:
        """`row` after everything that changes logits; `row` itself if nothing does."""
        s = sequence.s
        stops = sequence.stops if sequence.outputs < s.min_tokens else None
        grammar, bias, counts, seen = sequence.grammar, sequence.bias, sequence.counts, sequence.seen
        if stops is None and grammar is None and bias is None and counts is None and seen is None:
            return row
        row = row.copy()
        if grammar is not None:
            stops = self._mask(grammar, row, stops)
        if stops is not None:
            row[stops] = -np.inf
        if bias is not None:
            row[bias[0]] += bias[1]
        if seen is not None:
            ids = np.flatnonzero(seen)
            said = row[ids]
            penalty = np.float32(s.repetition_penalty)
            row[ids] = np.where(said > 0, said / penalty, said * penalty)
        if counts is not None:
            ids = np.flatnonzero(counts)
            row[ids] -= np.float32(s.frequency_penalty) * counts[ids] + np.float32(s.presence_penalty)
        return row

    def _mask(self, grammar: GrammarState, row: Floats, stops: Ids | None) -> Ids | None:
        """Ban in `row` what the grammar does not admit; returns the stops that are still to be banned.

        Where the grammar admits only stops (it is finished) they stay: `min_tokens` gives way.
        """
        try:
            admitted = grammar.admitted()
        except InvalidRequest as stuck:
            raise _NoChoiceError(str(stuck)) from stuck
        if not admitted.any():
            raise _NoChoiceError("the output format admits no token here; change the format")
        row[~admitted] = -np.inf
        if stops is not None:
            admitted[stops] = False
            if not admitted.any():
                return None
        return stops


# --- the draw ---------------------------------------------------------------------------------


def _key(seed: int, position: int) -> int:
    """64 bits from (seed, position) alone; the same on every machine."""
    return xxhash.xxh3_64_intdigest(struct.pack("<QQ", seed % 2**64, position))


class _Race:
    """E_i of the exponential race, by a counter-based hash of (key, token id), and the race itself."""

    def __init__(self, vocab_size: int) -> None:
        self._ids = np.arange(vocab_size, dtype=np.uint32)
        self._hash = np.empty(vocab_size, np.uint32)
        self._shift = np.empty(vocab_size, np.uint32)
        self._times = np.empty(vocab_size, np.float32)

    def winner(self, weights: Floats, ids: Ids | None, key: int) -> int:
        """The token drawn from `weights` (not normalised; > 0 somewhere), among `ids` if given."""
        if ids is None:
            times = self.times(self._ids, key)
            np.divide(weights, times, out=times)
            return int(times.argmax())
        times = self.times(self._ids[ids], key)
        return int(ids[(weights[ids] / times).argmax()])

    def times(self, ids: NDArray[np.uint32], key: int) -> Floats:
        """One exponential variate per id; valid until the next call."""
        h, shifted, times = self._hash[: len(ids)], self._shift[: len(ids)], self._times[: len(ids)]
        # Two rounds of a 32-bit mixer (C. Wellons, "Prospecting for hash functions"), keyed before each.
        np.add(ids, np.uint32(key >> 32), out=h)
        for multiplier, key_word in ((0x7FEB352D, key & 0xFFFFFFFF), (0x21F0AAAD, key >> 32)):
            h ^= np.right_shift(h, 16, out=shifted)
            h *= np.uint32(multiplier)
            h ^= np.right_shift(h, 15, out=shifted)
            h *= np.uint32(0x846CA68B)
            h ^= np.right_shift(h, 16, out=shifted)
            h += np.uint32(key_word)
        # A uniform v near 0 makes a small time, and small times win: float32 is finest there. The
        # upper bound keeps log1p(-v) finite.
        times[:] = h
        times += np.float32(0.5)
        times *= np.float32(2.0**-32)
        np.minimum(times, np.float32(1 - 2.0**-24), out=times)
        np.negative(times, out=times)
        torch.log1p_(torch.from_numpy(times))
        return np.negative(times, out=times)


def candidates(weights: Floats, s: SamplingParams) -> Ids | None:
    """The token ids, ascending, that `min_p`, then `top_k`, then `top_p` leave; None for all of them.

    `weights` are probabilities times a constant, the largest is 1. Tokens as likely as the last one kept are
    kept too, so that the order of equal ones cannot matter. Only the few likely tokens are sorted:
    a cut is lowered until it certainly holds all that will be kept.
    """
    k = s.top_k if s.top_k < len(weights) else 0
    if not k and s.top_p >= 1.0:
        return _at_least(weights, s.min_p) if s.min_p else None
    total = 0.0
    if not k:
        kept = weights[weights >= s.min_p] if s.min_p else weights
        total = float(kept.sum(dtype=np.float64))
    for cut in (1e-2, 1e-4, 1e-6):
        ids = _at_least(weights, max(cut, s.min_p))
        if len(ids) >= k if k else float(weights[ids].sum(dtype=np.float64)) >= s.top_p * total:
            break
        if cut <= s.min_p:
            break
    else:
        ids = _at_least(weights, s.min_p)
    values = weights[ids].astype(np.float64)
    ranked = np.sort(values)[::-1]
    if k and k < len(ranked):
        ranked = ranked[: np.count_nonzero(values >= ranked[k - 1])]
    if s.top_p < 1.0:
        above = np.cumsum(ranked) - ranked
        mass = s.top_p * (float(ranked.sum()) if k else total)
        ranked = ranked[: max(1, np.count_nonzero(above < mass))]
    return _at_least(weights, float(ranked[-1]))


def _at_least(weights: Floats, low: float) -> Ids:
    """Ids of the tokens with a weight of at least `low`, and more than 0."""
    return np.flatnonzero(weights >= low if low else weights > 0)


def _logprobs(rows: Floats, tokens: Sequence[int], wanted: int) -> list[TokenLogprob]:
    """Log-probabilities of `tokens` under the raw logits `rows` [n, vocab], with `wanted` alternatives."""
    top = rows.max(axis=-1, keepdims=True)
    shifted = torch.from_numpy(rows - top)
    if wanted:
        best = torch.topk(shifted, min(wanted, shifted.shape[-1]), dim=-1)
        ids, values = best.indices.tolist(), best.values.double().tolist()
    chosen = shifted.gather(1, torch.as_tensor(list(tokens))[:, None])[:, 0].double().tolist()
    sums = shifted.exp_().numpy().sum(axis=-1, dtype=np.float64).tolist()
    found = []
    for at, token in enumerate(tokens):
        norm = math.log(sums[at])
        pairs: list[tuple[int, float]] = []
        if wanted:
            pairs = [(i, v - norm) for i, v in zip(ids[at], values[at], strict=True) if math.isfinite(v)]
            pairs.sort(key=lambda pair: (-pair[1], pair[0]))
        found.append(TokenLogprob(int(token), chosen[at] - norm, pairs))
    return found
