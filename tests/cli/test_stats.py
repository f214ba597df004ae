"""What a summary says of samples that are known."""

import pytest

from segue.cli.bench.stats import RequestTimes, detailed, distribution, good, summary


def test_no_values_have_no_distribution() -> None:
    assert set(distribution([]).values()) == {None}


def test_times_of_one_sample() -> None:
    sample = RequestTimes([0.5, 0.6, 0.9], end_s=1.0, tokens=5)
    assert sample.ttft_s == 0.5
    assert sample.gaps_s == pytest.approx([0.1, 0.3])
    assert sample.tpot_s == pytest.approx(0.1)  # five tokens in three events: four gaps in 0.4 s
    assert RequestTimes([0.5], tokens=1).tpot_s is None


SAMPLES = [
    RequestTimes([0.1, 0.2], 0.2, tokens=2, prompt_tokens=10, timeline={"queue": 0.01}),
    RequestTimes([0.3, 0.4], 0.4, tokens=2, prompt_tokens=10, timeline={"queue": 0.03}, start_s=0.1),
    RequestTimes([], 0.1, error="http_429", start_s=0.3, queue_s=0.2),
    RequestTimes([0.1], 0.2, tokens=1, error="cut_off", start_s=1.5),
]


def test_summary_counts_what_was_asked_and_what_came() -> None:
    result = summary(SAMPLES, 2.0, slo_ttft_ms=200.0)
    assert (result["completed"], result["failed"]) == (2, 2)
    assert result["error_kinds"] == {"http_429": 1, "cut_off": 1}
    assert (result["request_throughput"], result["output_throughput"]) == (1.0, 2.0)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (20, 4)
    assert result["total_token_throughput"] == 12.0
    assert (result["max_output_tokens_per_s"], result["max_concurrent_requests"]) == (4.0, 2)
    assert summary(SAMPLES, 2.0)["request_goodput"] is None
    assert summary(SAMPLES, 2.0, slo_itl_ms=150.0)["request_goodput"] == 1.0
    assert result["request_goodput"] == 0.5
    ttft = {"mean": 200, "median": 200, "std": 100, "p90": 280, "p99": 298, "max": 300}
    assert {word: result[f"{word}_ttft_ms"] for word in ttft} == pytest.approx(ttft)
    split = result["ttft_split_ms"]
    assert isinstance(split, dict)
    assert split["queue"]["median"] == pytest.approx(20.0)


def test_the_names_are_those_of_vllm_bench_serve() -> None:
    """Of vLLM 0.32.0's `vllm/benchmarks/serve.py`: what `--save-result` and `--save-detailed` write."""
    plain = {"duration", "completed", "failed", "total_input_tokens", "total_output_tokens"}
    plain |= {"request_throughput", "request_goodput", "output_throughput", "total_token_throughput"}
    plain |= {"max_output_tokens_per_s", "max_concurrent_requests"}
    plain |= {f"{word}_{name}_ms" for word in ("mean", "median", "std", "p99") for name in NAMES}
    assert plain <= summary(SAMPLES, 2.0).keys()
    each = detailed(SAMPLES)
    assert each.keys() >= {"input_lens", "output_lens", "ttfts", "itls", "start_times", "errors"}
    assert {len(values) for values in each.values() if isinstance(values, list)} == {len(SAMPLES)}
    assert each["queue_times"] == [0, 0, 0.2, 0]


NAMES = ("ttft", "tpot", "itl", "e2el")


def test_goodput_takes_both_objectives() -> None:
    sample = RequestTimes([0.1, 0.15, 0.25], 0.3, tokens=3)
    assert good(sample, None, None)
    assert good(sample, 100.0, 101.0)
    assert not good(sample, 99.0, None)
    assert not good(sample, None, 90.0)
    assert not good(RequestTimes(error="timeout"), None, None)
    assert good(RequestTimes([0.1], 0.1, tokens=1), 100.0, 1.0)  # one token has no gaps to miss
