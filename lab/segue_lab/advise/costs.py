"""How long one forward of one worker takes: from figures of its hardware, or from measured forwards. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from statistics import fmean, median
from typing import Annotated

import msgspec

from segue.kv import ConfigError

_Count = Annotated[int, msgspec.Meta(ge=0, le=10**12)]
_Seconds = Annotated[float, msgspec.Meta(ge=0, le=10**6)]
_Taken = Annotated[float, msgspec.Meta(gt=0, le=10**6)]

#: Rows at which the time by hardware figures is taken; between two of them it is a line.
_ROWS = tuple(2**power for power in range(17))


def pairs(start: int, tokens: int) -> int:
    """How many pairs of a prompt's token and one that it attends to there are in a chunk: `tokens` tokens
    after `start` earlier ones."""
    return tokens * start + tokens * (tokens + 1) // 2


class ForwardWork(msgspec.Struct, frozen=True, kw_only=True):
    """The work of one forward: `prompt_tokens` in all chunks, and their `pairs`; `sequences` that generate
    one token each, and the sum of their lengths, `context`."""

    prompt_tokens: _Count = 0
    pairs: _Count = 0
    sequences: _Count = 0
    context: _Count = 0

    @property
    def rows(self) -> int:
        """Tokens that pass through the matrix products."""
        return self.prompt_tokens + self.sequences


class TimedForward(msgspec.Struct, frozen=True, kw_only=True):
    """A forward that was measured, each time in seconds."""

    work: ForwardWork
    samples: Annotated[tuple[_Taken, ...], msgspec.Meta(min_length=1, max_length=10_000)]

    @property
    def seconds(self) -> float:
        """The median: one stall in a few samples says nothing of this forward in particular."""
        return median(self.samples)


class RowsPoint(msgspec.Struct, frozen=True):
    """A forward of `rows` rows takes `seconds`, attention apart."""

    rows: _Count
    seconds: _Seconds


class StepTimes(msgspec.Struct, frozen=True, kw_only=True):
    """The time of any forward, in seconds, in the mean: a curve over its rows (a line between two points,
    the first one's time before them, the last line continued after them), plus attention: `pair_s` for each
    pair of a prompt, `context_s` for each token of a generating sequence's context.

    A single forward takes longer or shorter: by a factor of `prompt_spread` if it computes prompts, else of
    `spread`; all of either as likely, none: 1.
    """

    curve: Annotated[tuple[RowsPoint, ...], msgspec.Meta(min_length=1, max_length=1000)]
    pair_s: _Seconds
    context_s: _Seconds
    spread: Annotated[tuple[_Taken, ...], msgspec.Meta(max_length=10_000)] = ()
    prompt_spread: Annotated[tuple[_Taken, ...], msgspec.Meta(max_length=10_000)] = ()

    def __post_init__(self) -> None:
        rows = [point.rows for point in self.curve]
        if rows != sorted(set(rows)):
            raise ValueError("the points of the curve must be in order of their rows")

    def seconds(self, work: ForwardWork) -> float:
        """How long a forward takes."""
        return self.of(work.prompt_tokens, work.pairs, work.sequences, work.context)

    def of(self, prompt_tokens: int, pairs: float, sequences: int, context: float) -> float:
        """The same, without an object for the work."""
        return self.products(prompt_tokens + sequences) + self.pair_s * pairs + self.context_s * context

    def products(self, rows: float) -> float:
        """The part of a forward that depends on its rows alone."""
        curve = self.curve
        after = bisect_right(curve, rows, key=_rows)
        if after == 0 or len(curve) == 1:
            return curve[0].seconds
        low, high = curve[min(after, len(curve) - 1) - 1], curve[min(after, len(curve) - 1)]
        slope = (high.seconds - low.seconds) / (high.rows - low.rows)
        return low.seconds + slope * (rows - low.rows)


def _rows(point: RowsPoint) -> int:
    return point.rows


class ModelCosts(msgspec.Struct, frozen=True, kw_only=True):
    """The costs of a model. `parameters` are multiplied for each row; `weight_bytes` are read in each
    forward, and of `expert_bytes` the part that `experts_per_token` of `experts` hit; `pair_flops` is
    attention of one token to another over all layers; `kv_token_bytes` and `state_bytes` (of a sequence) are
    handed over; a sequence has at most `context_tokens`."""

    name: str
    parameters: float
    weight_bytes: float
    expert_bytes: float = 0.0
    experts: int = 0
    experts_per_token: int = 0
    pair_flops: float = 0.0
    kv_token_bytes: int
    state_bytes: int = 0
    context_tokens: int

    def read_bytes(self, rows: int) -> float:
        """Bytes of weights that a forward of `rows` rows reads: each row draws its experts by chance."""
        if not self.experts:
            return self.weight_bytes
        missed = (1.0 - self.experts_per_token / self.experts) ** rows
        return self.weight_bytes + self.expert_bytes * (1.0 - missed)


class Hardware(msgspec.Struct, frozen=True, kw_only=True):
    """The reached speed of one worker (all its ranks together): floating point operations and bytes of memory
    per second."""

    flops: float
    memory_bytes_per_s: float


def from_hardware(model: ModelCosts, hardware: Hardware) -> StepTimes:
    """A roofline: the products take as long as the slower of computing them and reading the weights."""

    def products(rows: int) -> float:
        compute = 2.0 * model.parameters * rows / hardware.flops
        return max(compute, model.read_bytes(rows) / hardware.memory_bytes_per_s)

    ridge = model.weight_bytes / hardware.memory_bytes_per_s * hardware.flops / (2.0 * model.parameters)
    rows = sorted({*_ROWS, max(1, min(_ROWS[-1], round(ridge)))})
    return StepTimes(
        curve=tuple(RowsPoint(n, products(n)) for n in rows),
        pair_s=model.pair_flops / hardware.flops,
        context_s=max(model.kv_token_bytes / hardware.memory_bytes_per_s, model.pair_flops / hardware.flops),
    )


def fit(timed: Sequence[TimedForward]) -> StepTimes:
    """The step times that measured forwards show.

    A forward's mean is its median times how much longer than their medians all forwards take in the mean,
    those with prompts and those without apart. Attention is the difference between two forwards that differ
    in nothing else, those that differ most. The rest of each forward is a point of the curve; forwards with
    both prompts and generating sequences only check it (`fit_error`). Raises ConfigError if there is no such
    pair.
    """
    prompts = [t for t in timed if not t.work.sequences]
    decodes = [t for t in timed if not t.work.prompt_tokens]
    prompt_spread, spread = _factors(prompts), _factors(decodes)
    prompt_mean, mean = fmean(prompt_spread), fmean(spread)
    chunks = [(t.work, t.seconds * prompt_mean) for t in prompts]
    tokens = [(t.work, t.seconds * mean) for t in decodes]
    pair_s = _difference([(work.rows, work.pairs, seconds) for work, seconds in chunks], "prompts")
    context_s = _difference([(work.rows, work.context, seconds) for work, seconds in tokens], "sequences")
    rest: dict[int, list[float]] = {}
    for work, seconds in [*tokens, *chunks]:
        left = seconds - pair_s * work.pairs - context_s * work.context
        rest.setdefault(work.rows, []).append(max(0.0, left))
    curve, highest = [], 0.0
    for rows in sorted(rest):
        highest = max(highest, fmean(rest[rows]))  # more rows never take less time
        curve.append(RowsPoint(rows, highest))
    return StepTimes(
        curve=tuple(curve),
        pair_s=pair_s,
        context_s=context_s,
        spread=tuple(factor / mean for factor in spread),
        prompt_spread=tuple(factor / prompt_mean for factor in prompt_spread),
    )


def _factors(timed: Sequence[TimedForward]) -> tuple[float, ...]:
    """By what factors forwards differ from their medians."""
    return tuple(sorted(sample / t.seconds for t in timed for sample in t.samples))


def _difference(points: Sequence[tuple[int, int, float]], what: str) -> float:
    """Seconds for each unit of attention, of points (rows, units, seconds)."""
    found = [
        (b[1] - a[1], (b[2] - a[2]) / (b[1] - a[1]))
        for a in points
        for b in points
        if a[0] == b[0] and a[1] < b[1]
    ]
    if not found:
        raise ConfigError(f"the measurement has no two forwards of as many {what} with unequal contexts")
    return max(0.0, max(found)[1])


def fit_error(times: StepTimes, timed: Sequence[TimedForward]) -> float:
    """The largest part by which the mean of a measured forward is missed (0.1: by 10 %)."""
    prompts = [t for t in timed if not t.work.sequences]
    decodes = [t for t in timed if not t.work.prompt_tokens]
    factor = {True: fmean(_factors(prompts)), False: fmean(_factors(decodes))}
    means = ((t, t.seconds * factor[t.work.prompt_tokens > 0]) for t in timed)
    return max(abs(times.seconds(t.work) / mean_s - 1.0) for t, mean_s in means)
