"""Compares every split of a number of workers with as many unified ones. Pure."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec
from msgspec.structs import replace

from segue.kv import ConfigError
from segue_lab.advise.costs import pairs
from segue_lab.advise.queues import HandOffWire, SimulatedTimes, WorkerKind, WorkerSplit, simulate
from segue_lab.advise.workload import AskedLoad, LatencyTargets

MAX_WORKERS = 64
#: Splits of one number of workers that are computed at most: those that carry most.
MAX_SPLITS = 9
#: Requests of one simulation: enough for a p99, and for several lifetimes of a request.
_REQUESTS = (400, 4000)
_LIFETIMES = 6
_DRAWS = 500
_BISECTIONS = 7
#: Smaller chunks that unified workers might use: a prompt stands between two tokens of others for less time.
_CHUNK_PARTS = (4, 16)
_LEAST_CHUNK = 32
#: A load this near to where the queues grow without end is not computed: it would depend on how long one
#: looks.
_FULL = 0.97
#: Disaggregation has to carry this much more than unified workers, which are simpler to run.
_GAIN = 1.05


class Expected(msgspec.Struct, frozen=True, kw_only=True):
    """Predicted figures of requests: time to first token, time between tokens (seconds), finished requests
    per second."""

    ttft_p50_s: float
    ttft_p99_s: float
    itl_p50_s: float
    itl_p99_s: float
    requests_per_s: float


class SplitResult(msgspec.Struct, frozen=True, kw_only=True):
    """One split, with so many prompt tokens in a forward at most. `saturates_per_s`: requests a second at
    which its queues grow without end. `expected` at the asked load, None if that is too much. `meets`: the
    targets at that load. `carries_per_s`: the most requests a second within the targets (of a closed loop:
    those of that loop). `on_frontier`: no other candidate is better in one of the latencies and at least as
    good in the other."""

    split: WorkerSplit
    chunk_tokens: int
    saturates_per_s: float
    expected: Expected | None
    meets: bool
    carries_per_s: float
    on_frontier: bool = False


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    """`verdict`: prefill and decode apart (`disaggregate`), or not; `too few` workers for the load or the
    targets; or `impossible` with any number. `split` is what to run, in chunks of so many tokens; None with
    the last two."""

    verdict: Literal["disaggregate", "do not disaggregate", "too few", "impossible"]
    split: WorkerSplit | None
    reasons: tuple[str, ...]
    chunk_tokens: int | None = None
    candidates: tuple[SplitResult, ...] = ()


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """All that the advice depends on. `wire` is what splits hand over by; `kv_token_bytes` and `state_bytes`
    are what they hand over."""

    kind: WorkerKind
    load: AskedLoad
    targets: LatencyTargets
    wire: HandOffWire
    kv_token_bytes: int
    state_bytes: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        longest = self.load.prompt.longest + self.load.output.longest
        if longest > self.kind.kv_tokens:
            raise ConfigError(
                f"a sequence of {longest} tokens needs more KV than one worker holds "
                f"({self.kind.kv_tokens} tokens); give shorter --input-tokens or --output-tokens, "
                "or more --kv-gib"
            )


# ---- what one split does -----------------------------------------------------------------------------


def expect(question: Question, split: WorkerSplit, requests: int, load: AskedLoad | None = None) -> Expected:
    """Predict the first `requests` requests of the load."""
    seen = simulate(
        question.kind,
        split,
        load or question.load,
        requests,
        wire=question.wire,
        kv_token_bytes=question.kv_token_bytes,
        state_bytes=question.state_bytes,
        seed=question.seed,
    )
    return summed(seen)


def summed(seen: SimulatedTimes) -> Expected:
    """Percentiles of what was simulated; times between tokens are 0 where no output has two."""
    waits = [(seconds, 1) for seconds in seen.ttft_s]
    return Expected(
        ttft_p50_s=weighted_percentile(waits, 50),
        ttft_p99_s=weighted_percentile(waits, 99),
        itl_p50_s=weighted_percentile(seen.gaps, 50),
        itl_p99_s=weighted_percentile(seen.gaps, 99),
        requests_per_s=seen.finished / seen.end_s if seen.end_s else 0.0,
    )


def weighted_percentile(values: Iterable[tuple[float, int]], percent: float) -> float:
    """The smallest value that `percent` of all are not above; each value stands for so many. 0 for none."""
    ordered = sorted(values)
    wanted, below = sum(count for _, count in ordered) * percent / 100.0, 0
    for value, count in ordered:
        below += count
        if below >= wanted:
            return value
    return 0.0


class _Means:
    """Means over the lengths of a load, by drawing them."""

    def __init__(self, load: AskedLoad, seed: int) -> None:
        rng = random.Random(f"{seed}/means")
        prompts = [load.prompt.draw(rng) for _ in range(_DRAWS)]
        self.prompt = load.prompt.mean
        self.output = load.output.mean
        self.pairs = sum(pairs(0, tokens) for tokens in prompts) / _DRAWS
        #: mean length of a sequence while it generates, in tokens
        self.context = self.prompt + self.output / 2


def saturation(question: Question, split: WorkerSplit) -> float:
    """Requests a second at which the queues of `split` grow without end: its slower role's."""
    means = _Means(question.load, question.seed)
    if split.unified:
        return split.unified * _unified_rate(question, means)
    return min(split.prefill * _prefill_rate(question, means), split.decode * _decode_rate(question, means))


def _prompt_s(question: Question, means: _Means) -> float:
    """Seconds of a prompt in forwards that are full."""
    kind = question.kind
    full_s = kind.steps.products(kind.chunk_tokens) + kind.step_s
    return full_s * means.prompt / kind.chunk_tokens + kind.steps.pair_s * means.pairs


def _prefill_rate(question: Question, means: _Means) -> float:
    """Prompts a second of one worker: it computes them, and its wire carries them."""
    wire_s = (means.prompt * question.kv_token_bytes + question.state_bytes) / question.wire.bytes_per_s
    return 1.0 / max(_prompt_s(question, means), wire_s)


def _batches(kind: WorkerKind, means: _Means) -> list[int]:
    most = max(1, min(kind.max_batch, int(kind.kv_tokens / (means.prompt + means.output))))
    return sorted({*(2**power for power in range(most.bit_length())), most})


def _decode_rate(question: Question, means: _Means) -> float:
    """Little's law: `batch` sequences, each there for as many forwards as it generates tokens after the
    first."""
    kind, forwards = question.kind, means.output - 1
    if forwards <= 0:
        return float("inf")
    return max(
        batch / (forwards * (kind.steps.of(0, 0, batch, batch * means.context) + kind.step_s))
        for batch in _batches(kind, means)
    )


def _unified_rate(question: Question, means: _Means) -> float:
    """As decode, and each forward computes also as many prompt tokens as keep the batch full."""
    kind, forwards = question.kind, means.output - 1
    if forwards <= 0:
        return 1.0 / _prompt_s(question, means)
    rates = []
    for wanted in _batches(kind, means):
        # The batch takes its share of a full forward's tokens.
        batch = min(wanted, kind.chunk_tokens / (1 + means.prompt / forwards))
        tokens = batch * means.prompt / forwards
        rows_s = kind.steps.products(tokens + batch) + kind.step_s
        work_s = kind.steps.pair_s * means.pairs * tokens / means.prompt
        work_s += kind.steps.context_s * batch * means.context
        rates.append(batch / (forwards * (rows_s + work_s)))
    return max(rates)


def _requests(question: Question, rate: float, means: _Means) -> int:
    kind = question.kind
    batch = _batches(kind, means)[-1]
    lifetime_s = means.output * kind.steps.of(0, 0, batch, batch * means.context)
    low, high = _REQUESTS
    return max(low, min(high, round(_LIFETIMES * rate * lifetime_s)))


def meets(expected: Expected | None, targets: LatencyTargets) -> bool:
    """Whether the p99 of both latencies are within the targets."""
    if expected is None:
        return False
    ttft_s, itl_s = targets.ttft_s, targets.itl_s
    return (ttft_s is None or expected.ttft_p99_s <= ttft_s) and (
        itl_s is None or expected.itl_p99_s <= itl_s
    )


def candidate(question: Question, split: WorkerSplit) -> SplitResult:
    """`split` at the asked load, without what it could carry (`_carrying`)."""
    load, saturates = question.load, saturation(question, split)
    expected = None
    if load.rate is None:
        expected = expect(question, split, max(_REQUESTS[0], 8 * (load.concurrency or 0)))
    elif load.rate <= _FULL * saturates:
        means = _Means(load, question.seed)
        expected = expect(question, split, _requests(question, load.rate, means))
    met = meets(expected, question.targets)
    carries = expected.requests_per_s if met and expected is not None and load.rate is None else 0.0
    return SplitResult(
        split=split,
        chunk_tokens=question.kind.chunk_tokens,
        saturates_per_s=saturates,
        expected=expected,
        meets=met,
        carries_per_s=carries,
    )


def _carrying(question: Question, found: SplitResult) -> SplitResult:
    """`found` with the most requests a second that it carries within the targets; of an open loop."""
    load = question.load
    if load.rate is None or not found.meets:
        return found
    if not question.targets.any:
        return replace(found, carries_per_s=found.saturates_per_s)
    question = _in_chunks(question, found.chunk_tokens)
    low, high = load.rate, found.saturates_per_s * _FULL
    means = _Means(load, question.seed)
    for _ in range(_BISECTIONS):
        rate = (low + high) / 2
        at = expect(question, found.split, _requests(question, rate, means), replace(load, rate=rate))
        low, high = (rate, high) if meets(at, question.targets) else (low, rate)
    return replace(found, carries_per_s=low)


# ---- the choice --------------------------------------------------------------------------------------


def candidates(question: Question, workers: int) -> list[SplitResult]:
    """As many unified workers, with smaller chunks too, and the splits into prefill and decode that carry
    most."""
    whole = question.kind.chunk_tokens
    chunks = {whole, *(part for by in _CHUNK_PARTS if (part := whole // by) >= _LEAST_CHUNK)}
    together = [
        candidate(_in_chunks(question, tokens), WorkerSplit(unified=workers))
        for tokens in sorted(chunks, reverse=True)
    ]
    means = _Means(question.load, question.seed)
    prefill, decode = _prefill_rate(question, means), _decode_rate(question, means)
    apart = [WorkerSplit(count, workers - count) for count in range(1, workers)]
    apart.sort(key=lambda split: -min(split.prefill * prefill, split.decode * decode))
    kept = sorted(apart[:MAX_SPLITS], key=lambda split: split.prefill)
    return together + [candidate(question, split) for split in kept]


def _in_chunks(question: Question, tokens: int) -> Question:
    return replace(question, kind=replace(question.kind, chunk_tokens=tokens))


def with_frontier(found: Sequence[SplitResult]) -> tuple[SplitResult, ...]:
    """`found`, with `on_frontier` for each one that no other beats."""

    def beaten(one: Expected) -> bool:
        mine = (one.ttft_p99_s, one.itl_p99_s)
        return any(
            (other := (c.expected.ttft_p99_s, c.expected.itl_p99_s)) != mine
            and other[0] <= mine[0]
            and other[1] <= mine[1]
            for c in found
            if c.expected is not None
        )

    return tuple(replace(c, on_frontier=c.expected is not None and not beaten(c.expected)) for c in found)


def advise(question: Question, workers: int | None = None) -> Advice:
    """The advice for exactly `workers` workers, or else for the fewest that meet the targets."""
    if (floor := _floor(question)) is not None:
        return Advice(verdict="impossible", split=None, reasons=(floor,))
    found: list[SplitResult] = []
    for count in [workers] if workers else range(1, MAX_WORKERS + 1):
        found = candidates(question, count)
        if any(c.meets for c in found):
            return choice_of(question, with_frontier([_carrying(question, c) for c in found]))
    text = f"no split of {workers or MAX_WORKERS} workers meets the targets at this load"
    if all(c.expected is None for c in found):
        most = max(c.saturates_per_s for c in found)
        text = f"the load is more than {workers or MAX_WORKERS} workers carry: at most {most:.3g} requests/s"
    return Advice(verdict="too few", split=None, reasons=(text,), candidates=with_frontier(found))


def _floor(question: Question) -> str | None:
    """Why no number of workers meets the targets: a request alone on idle workers does not. Else None."""
    targets = question.targets
    if not targets.any:
        return None
    alone = replace(question.load, rate=None, concurrency=1)
    told = []
    for split in (WorkerSplit(unified=1), WorkerSplit(1, 1)):
        expected = expect(question, split, _REQUESTS[0], alone)
        if meets(expected, targets):
            return None
        told.append(expected)
    ttft_s, itl_s = min(e.ttft_p99_s for e in told), min(e.itl_p99_s for e in told)
    return (
        f"even one request alone has its first token after {ttft_s * 1e3:.3g} ms and {itl_s * 1e3:.3g} ms "
        "between tokens (p99): more workers do not help, faster ones do (more ranks each), or a smaller model"
    )


def choice_of(question: Question, found: tuple[SplitResult, ...]) -> Advice:
    """The advice among `found`: the best split against the best unified workers."""
    unified = _best(question, (c for c in found if c.split.unified))
    apart = _best(question, (c for c in found if not c.split.unified))
    assert unified is not None
    told, better = _compared(question, unified, apart)
    best = apart if better and apart is not None else unified
    return Advice(
        verdict="disaggregate" if better else "do not disaggregate",
        split=best.split,
        chunk_tokens=best.chunk_tokens,
        reasons=told,
        candidates=found,
    )


def _best(question: Question, found: Iterable[SplitResult]) -> SplitResult | None:
    """The one that carries most; of equal ones that farthest below the targets, or least above them."""

    def order(c: SplitResult) -> tuple[bool, float, float]:
        return c.meets, c.carries_per_s, -_part_of_targets(c.expected, question.targets)

    return max(found, key=order, default=None)


def _part_of_targets(expected: Expected | None, targets: LatencyTargets) -> float:
    """The latencies as parts of their targets, the larger of the two; without targets the time to the first
    token in seconds."""
    if expected is None:
        return float("inf")
    if not targets.any:
        return expected.ttft_p99_s
    pairs_of = ((expected.ttft_p99_s, targets.ttft_s), (expected.itl_p99_s, targets.itl_s))
    return max(seen / wanted for seen, wanted in pairs_of if wanted is not None)


def _compared(
    question: Question, unified: SplitResult, apart: SplitResult | None
) -> tuple[tuple[str, ...], bool]:
    """Why one of the two is better, and whether it is prefill and decode apart."""
    if apart is None:
        return ("one worker is enough, and prefill and decode apart need two",), False
    if not apart.meets:
        return ("as many unified workers meet the targets at this load, and no split does",), False
    if not unified.meets:
        return (_lack(question, unified),), True
    gain = apart.carries_per_s / unified.carries_per_s
    within = " within the targets" if question.targets.any else ""
    told = (
        f"{apart.split} carries {apart.carries_per_s:.3g} requests/s{within}, {_named(unified)} "
        f"{unified.carries_per_s:.3g}: {gain:.2f} of it"
    )
    if gain >= _GAIN or question.targets.itl_s is not None:
        return (told,), gain >= _GAIN
    hint = "to keep other prompts out of the time between two tokens is what disaggregation is for"
    return (told, f"no target for that time was given (--slo-itl-ms): {hint}"), False


def _named(unified: SplitResult) -> str:
    return f"{unified.split} (chunks of {unified.chunk_tokens})"


def _lack(question: Question, unified: SplitResult) -> str:
    """Why as many unified workers do not do."""
    expected, targets = unified.expected, question.targets
    if expected is None:
        return f"{_named(unified)} saturate at {unified.saturates_per_s:.3g} requests/s"
    said = []
    if targets.itl_s is not None and expected.itl_p99_s > targets.itl_s:
        said.append(f"{expected.itl_p99_s * 1e3:.3g} ms between tokens")
    if targets.ttft_s is not None and expected.ttft_p99_s > targets.ttft_s:
        said.append(f"{expected.ttft_p99_s * 1e3:.3g} ms to the first token")
    return f"{_named(unified)} would have {' and '.join(said)} (p99)"
