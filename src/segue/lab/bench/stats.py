"""Numbers of a measurement, pure: percentiles, goodput, the split of the time to first token."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

PERCENTILES = (50.0, 90.0, 99.0)


@dataclass(slots=True)
class RequestTimes:
    """One request. Times are seconds since the moment it was due; `token_s` has one entry per
    event that carried tokens, `tokens` counts the tokens of the output."""

    token_s: list[float] = field(default_factory=list)
    end_s: float = 0.0
    tokens: int = 0
    prompt_tokens: int = 0
    error: str = ""
    timeline: dict[str, float] = field(default_factory=dict)

    @property
    def ttft_s(self) -> float:
        """Time to the first token."""
        return self.token_s[0]

    @property
    def gaps_s(self) -> list[float]:
        """Inter-token latencies: the times between neighbouring events that carried tokens."""
        return [b - a for a, b in zip(self.token_s, self.token_s[1:], strict=False)]

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; None for an output of one token."""
        return (self.token_s[-1] - self.token_s[0]) / (self.tokens - 1) if self.tokens > 1 else None


def percentile(values: Sequence[float], percent: float) -> float:
    """The `percent`-th percentile with linear interpolation between closest ranks (the default of
    numpy). A ValueError for no values."""
    if not values:
        raise ValueError("no values have no percentile")
    ordered = sorted(values)
    rank = (len(ordered) - 1) * percent / 100.0
    low = math.floor(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


def distribution(values: Sequence[float], scale: float = 1.0) -> dict[str, float] | None:
    """Count, mean and percentiles of `values` times `scale`; None for no values."""
    if not values:
        return None
    result = {"n": float(len(values)), "mean": scale * math.fsum(values) / len(values)}
    result |= {f"p{percent:g}": scale * percentile(values, percent) for percent in PERCENTILES}
    result["max"] = scale * max(values)
    return result


def good(sample: RequestTimes, slo_ttft_ms: float | None, slo_itl_ms: float | None) -> bool:
    """The request met both objectives: its first token, and the p99 of its own gaps."""
    if sample.error:
        return False
    if slo_ttft_ms is not None and sample.ttft_s * 1e3 > slo_ttft_ms:
        return False
    gaps = sample.gaps_s
    return slo_itl_ms is None or not gaps or percentile(gaps, 99.0) * 1e3 <= slo_itl_ms


def summary(
    samples: Sequence[RequestTimes],
    duration_s: float,
    slo_ttft_ms: float | None = None,
    slo_itl_ms: float | None = None,
) -> dict[str, object]:
    """The summary of a measurement of `duration_s` seconds; latencies in milliseconds."""
    done = [s for s in samples if not s.error]
    result: dict[str, object] = {
        "requests": len(samples),
        "completed": len(done),
        "errors": dict(Counter(s.error for s in samples if s.error).most_common()),
        "duration_s": duration_s,
        "prompt_tokens": sum(s.prompt_tokens for s in done),
        "output_tokens": sum(s.tokens for s in done),
        "requests_per_s": len(done) / duration_s,
        "output_tokens_per_s": sum(s.tokens for s in done) / duration_s,
        "ttft_ms": distribution([s.ttft_s for s in done], 1e3),
        "itl_ms": distribution([gap for s in done for gap in s.gaps_s], 1e3),
        "tpot_ms": distribution([t for s in done if (t := s.tpot_s) is not None], 1e3),
        "e2e_ms": distribution([s.end_s for s in done], 1e3),
    }
    if slo_ttft_ms is not None or slo_itl_ms is not None:
        met = sum(good(s, slo_ttft_ms, slo_itl_ms) for s in samples)
        result["goodput"] = {
            "slo_ttft_ms": slo_ttft_ms,
            "slo_itl_ms": slo_itl_ms,
            "good": met,
            "share": met / len(samples) if samples else 0.0,
            "requests_per_s": met / duration_s,
        }
    parts = sorted({name for s in done for name in s.timeline})
    if parts:
        result["ttft_split_ms"] = {
            name: distribution([s.timeline[name] for s in done if name in s.timeline], 1e3) for name in parts
        }
    return result
