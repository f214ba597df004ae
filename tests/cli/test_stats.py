"""Percentiles as numpy computes them, and what a summary says of samples that are known."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from segue.lab.bench.stats import RequestTimes, distribution, good, percentile, summary

FLOATS = st.floats(-1e6, 1e6)


@given(st.lists(FLOATS, min_size=1, max_size=60), st.sampled_from([0.0, 1.0, 50.0, 90.0, 99.0, 100.0]))
def test_percentile_is_numpys(values: list[float], percent: float) -> None:
    assert percentile(values, percent) == pytest.approx(
        float(np.percentile(values, percent)), rel=1e-9, abs=1e-6
    )


def test_no_values_have_no_percentile() -> None:
    with pytest.raises(ValueError, match="no values"):
        percentile([], 50)
    assert distribution([]) is None


def test_times_of_one_sample() -> None:
    sample = RequestTimes([0.5, 0.6, 0.9], end_s=1.0, tokens=5)
    assert sample.ttft_s == 0.5
    assert sample.gaps_s == pytest.approx([0.1, 0.3])
    assert sample.tpot_s == pytest.approx(0.1)  # five tokens in three events: four gaps in 0.4 s
    assert RequestTimes([0.5], tokens=1).tpot_s is None


def test_summary_counts_what_was_asked_and_what_came() -> None:
    samples = [
        RequestTimes([0.1, 0.2], 0.2, tokens=2, prompt_tokens=10, timeline={"queue": 0.01}),
        RequestTimes([0.3, 0.4], 0.4, tokens=2, prompt_tokens=10, timeline={"queue": 0.03}),
        RequestTimes([], 0.1, error="http_429"),
        RequestTimes([0.1], 0.2, tokens=1, error="cut_off"),
    ]
    result = summary(samples, 2.0, slo_ttft_ms=200.0)
    assert (result["requests"], result["completed"]) == (4, 2)
    assert result["errors"] == {"http_429": 1, "cut_off": 1}
    assert (result["requests_per_s"], result["output_tokens_per_s"]) == (1.0, 2.0)
    assert (result["prompt_tokens"], result["output_tokens"]) == (20, 4)
    assert "goodput" not in summary(samples, 2.0)
    assert summary(samples, 2.0, slo_itl_ms=150.0)["goodput"]["good"] == 2  # type: ignore[index]
    assert result["ttft_ms"] == pytest.approx(
        {"n": 2, "mean": 200, "p50": 200, "p90": 280, "p99": 298, "max": 300}
    )
    assert result["goodput"]["share"] == 0.25
    assert result["goodput"]["requests_per_s"] == 0.5
    assert result["ttft_split_ms"]["queue"]["p50"] == pytest.approx(20.0)


def test_goodput_takes_both_objectives() -> None:
    sample = RequestTimes([0.1, 0.15, 0.25], 0.3, tokens=3)
    assert good(sample, None, None)
    assert good(sample, 100.0, 101.0)
    assert not good(sample, 99.0, None)
    assert not good(sample, None, 90.0)
    assert not good(RequestTimes(error="timeout"), None, None)
    assert good(RequestTimes([0.1], 0.1, tokens=1), 100.0, 1.0)  # one token has no gaps to miss
