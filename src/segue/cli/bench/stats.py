"""Numbers of a measurement, pure: percentiles, goodput, the split of the time to first token."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import numpy as np

PERCENTILES = (90.0, 99.0)


@dataclass(slots=True)
class RequestTimes:
    """One request. Times are seconds since it was sent, `start_s` later than the measurement and `queue_s`
    later than it was due. `token_s` has one entry per event that carried tokens, `tokens` counts the tokens
    of the output."""

    token_s: list[float] = field(default_factory=list)
    end_s: float = 0.0
    tokens: int = 0
    prompt_tokens: int = 0
    error: str = ""
    timeline: dict[str, float] = field(default_factory=dict)
    start_s: float = 0.0
    queue_s: float = 0.0

    @property
    def ttft_s(self) -> float:
        """Time to the first token."""
        return self.token_s[0]

    @property
    def gaps_s(self) -> list[float]:
        """Inter-token latencies: the times between neighbouring events that carried tokens."""
        return [b - a for a, b in pairwise(self.token_s)]

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; None for an output of one token."""
        return (self.token_s[-1] - self.token_s[0]) / (self.tokens - 1) if self.tokens > 1 else None


def distribution(values: Sequence[float], scale: float = 1.0) -> dict[str, float | None]:
    """Mean, median, standard deviation, percentiles and maximum of `values` times `scale`; all None for no
    values."""
    named = {"median": 50.0, **{f"p{percent:g}": percent for percent in PERCENTILES}}
    if not values:
        return dict.fromkeys(("mean", "median", "std", *named, "max"))
    scaled = scale * np.asarray(values)
    result: dict[str, float | None] = {
        "mean": float(scaled.mean()),
        "median": None,
        "std": float(scaled.std()),
    }
    result |= dict(zip(named, np.percentile(scaled, list(named.values())).tolist(), strict=True))
    result["max"] = float(scaled.max())
    return result


def good(sample: RequestTimes, slo_ttft_ms: float | None, slo_itl_ms: float | None) -> bool:
    """The request met both objectives: its first token, and the p99 of its own gaps."""
    if sample.error:
        return False
    if slo_ttft_ms is not None and sample.ttft_s * 1e3 > slo_ttft_ms:
        return False
    gaps = sample.gaps_s
    return slo_itl_ms is None or not gaps or float(np.percentile(gaps, 99.0)) * 1e3 <= slo_itl_ms


def latencies(samples: Sequence[RequestTimes]) -> dict[str, list[float]]:
    """The values in seconds of each latency of the requests that completed, by vLLM's short name."""
    done = [s for s in samples if not s.error]
    return {
        "ttft": [s.ttft_s for s in done],
        "itl": [gap for s in done for gap in s.gaps_s],
        "tpot": [t for s in done if (t := s.tpot_s) is not None],
        "e2el": [s.end_s for s in done],
        "client_queue_time": [s.queue_s for s in done],
    }


def summary(
    samples: Sequence[RequestTimes],
    duration_s: float,
    slo_ttft_ms: float | None = None,
    slo_itl_ms: float | None = None,
) -> dict[str, object]:
    """The summary of a measurement of `duration_s` seconds, under the names of `vllm bench serve`;
    `error_kinds`, `max_…_ms` and `ttft_split_ms` are segue's."""
    done = [s for s in samples if not s.error]
    prompt, output = sum(s.prompt_tokens for s in done), sum(s.tokens for s in done)
    slo = slo_ttft_ms is not None or slo_itl_ms is not None
    met = sum(good(s, slo_ttft_ms, slo_itl_ms) for s in samples)
    result: dict[str, object] = {
        "duration": duration_s,
        "completed": len(done),
        "failed": len(samples) - len(done),
        "error_kinds": dict(Counter(s.error for s in samples if s.error).most_common()),
        "total_input_tokens": prompt,
        "total_output_tokens": output,
        "request_throughput": len(done) / duration_s,
        "request_goodput": met / duration_s if slo else None,
        "output_throughput": output / duration_s,
        "total_token_throughput": (prompt + output) / duration_s,
        "max_output_tokens_per_s": _busiest_second(done),
        "max_concurrent_requests": _most_at_once(done),
    }
    for name, values in latencies(samples).items():
        result |= {f"{word}_{name}_ms": value for word, value in distribution(values, 1e3).items()}
    parts = sorted({name for s in done for name in s.timeline})
    if parts:
        result["ttft_split_ms"] = {
            name: distribution([s.timeline[name] for s in done if name in s.timeline], 1e3) for name in parts
        }
    return result


def _busiest_second(samples: Sequence[RequestTimes]) -> float:
    """Tokens of the busiest whole second since the beginning; each event counts as many as the mean."""
    seconds: Counter[int] = Counter()
    for s in samples:
        seconds.update(int(s.start_s + at) for at in s.token_s)
    events = sum(seconds.values())
    return max(seconds.values()) * sum(s.tokens for s in samples) / events if events else 0.0


def _most_at_once(samples: Sequence[RequestTimes]) -> int:
    changes = sorted([(s.start_s + s.end_s, -1) for s in samples] + [(s.start_s, 1) for s in samples])
    return max(accumulate(change for _, change in changes), default=0)


def detailed(samples: Sequence[RequestTimes]) -> dict[str, object]:
    """The times of each request, under the names of `vllm bench serve --save-detailed`."""
    return {
        "input_lens": [s.prompt_tokens for s in samples],
        "output_lens": [s.tokens for s in samples],
        "start_times": [s.start_s for s in samples],
        "ttfts": [s.token_s[0] if s.token_s else 0.0 for s in samples],
        "itls": [s.gaps_s for s in samples],
        "latencies": [s.end_s for s in samples],
        "queue_times": [s.queue_s for s in samples],
        "errors": [s.error for s in samples],
    }
