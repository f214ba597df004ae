"""The advice: the number of workers, and when prefill and decode should be unified."""

import pytest
from msgspec.structs import replace

from segue.kv.errors import ConfigError
from segue_lab.advise.advice import Advice, Question, advise, candidates, expect, saturation
from segue_lab.advise.costs import RowsPoint, StepTimes
from segue_lab.advise.queues import HandOffWire, WorkerKind, WorkerSplit
from segue_lab.advise.workload import AskedLoad, LatencyTargets, Lengths

#: A forward takes 20 ms for any few rows, and a prompt's token 1 ms.
STEPS = StepTimes(
    curve=(RowsPoint(1, 0.02), RowsPoint(20, 0.02), RowsPoint(1000, 1.0)), pair_s=0.0, context_s=0.0
)
FAST = HandOffWire(name="fast", bytes_per_s=1e9, latency_s=0.001)


def question(
    *,
    prompt: str = "500",
    output: str = "20",
    ttft_s: float | None = None,
    itl_s: float | None = None,
    wire: HandOffWire = FAST,
    kv_tokens: int = 10**6,
    **how: float,
) -> Question:
    return Question(
        kind=WorkerKind(steps=STEPS, chunk_tokens=500, max_batch=16, kv_tokens=kv_tokens),
        load=AskedLoad(
            prompt=Lengths.parse(prompt, ""),
            output=Lengths.parse(output, ""),
            **how,  # type: ignore[arg-type]
        ),
        targets=LatencyTargets(ttft_s=ttft_s, itl_s=itl_s),
        wire=wire,
        kv_token_bytes=1000,
    )


def told(advice: Advice) -> str:
    return " ".join(advice.reasons)


@pytest.mark.parametrize(
    "split", [WorkerSplit(1, 1), WorkerSplit(1, 2), WorkerSplit(2, 1), WorkerSplit(unified=2)]
)
@pytest.mark.parametrize("lengths", [("500", "20"), ("40", "100"), ("100-900:2,50", "5-35")])
def test_workers_are_full_where_a_crowd_of_requests_is_served_no_faster(
    split: WorkerSplit, lengths: tuple[str, str]
) -> None:
    asked = question(prompt=lengths[0], output=lengths[1], concurrency=20 * split.workers)
    served = expect(asked, split, 500)
    assert 0.8 < served.requests_per_s / saturation(asked, split) < 1.05


def test_steady_tokens_beside_long_prompts_need_prefill_and_decode_apart() -> None:
    advice = advise(question(rate=1.2, itl_s=0.045, ttft_s=6.0), 2)
    assert (advice.verdict, advice.split) == ("disaggregate", WorkerSplit(1, 1))
    assert "between tokens (p99)" in told(advice)


def test_without_a_target_between_tokens_throughput_decides_and_the_reason_says_so() -> None:
    advice = advise(question(rate=1.2), 2)
    assert advice.verdict == "do not disaggregate"
    assert advice.split == WorkerSplit(unified=2)
    assert "--slo-itl-ms" in told(advice)
    assert [c.split for c in advice.candidates if not c.split.unified] == [WorkerSplit(1, 1)]


def test_a_smaller_chunk_may_do_as_well() -> None:
    advice = advise(question(rate=0.5, itl_s=0.2, ttft_s=3.0, prompt="500", output="20"), 2)
    assert (advice.verdict, advice.chunk_tokens) == ("do not disaggregate", 125)


def test_a_slow_wire_speaks_against_it() -> None:
    slow = replace(FAST, bytes_per_s=1e5)  # five seconds a request
    asked = question(rate=1.2, itl_s=0.045, ttft_s=6.0, wire=slow)
    assert all(c.expected is None for c in candidates(asked, 2) if not c.split.unified)


def test_with_one_worker_there_is_nothing_to_divide() -> None:
    advice = advise(question(rate=0.2), 1)
    assert (advice.verdict, advice.split) == ("do not disaggregate", WorkerSplit(unified=1))
    assert "apart need two" in told(advice)


@pytest.mark.slow
def test_the_fewest_workers_that_meet_the_targets_are_found() -> None:
    found = [advise(question(rate=rate, itl_s=0.045, ttft_s=6.0)) for rate in (1.2, 4.0)]
    assert [a.verdict for a in found] == ["disaggregate"] * 2
    few, many = (a.split.workers for a in found if a.split is not None)
    assert few < many
    fewer = advise(question(rate=4.0, itl_s=0.045, ttft_s=6.0), many - 1)
    assert fewer.verdict == "too few"


def test_a_load_beyond_all_workers_is_too_much_and_the_most_is_named() -> None:
    advice = advise(question(rate=50.0), 2)
    assert (advice.verdict, advice.split) == ("too few", None)
    assert "more than 2 workers carry: at most 3." in told(advice)


@pytest.mark.parametrize("targets", [{"ttft_s": 0.4}, {"itl_s": 0.015}])
def test_what_one_request_alone_does_not_reach_is_impossible_with_any_number(
    targets: dict[str, float],
) -> None:
    advice = advise(question(rate=0.1, **targets))
    assert (advice.verdict, advice.split, advice.candidates) == ("impossible", None, ())
    assert "more workers do not help" in told(advice)


def test_a_closed_loop_is_compared_by_its_throughput() -> None:
    advice = advise(question(concurrency=4), 2)
    assert all(c.expected is not None for c in advice.candidates)
    best = max(advice.candidates, key=lambda c: c.carries_per_s)
    assert advice.split == best.split


@pytest.mark.slow
def test_what_is_carried_is_at_least_the_asked_load_and_keeps_the_targets() -> None:
    asked = question(rate=0.5, itl_s=0.045, ttft_s=3.0)
    best = next(c for c in advise(asked, 2).candidates if c.meets)
    assert 0.5 <= best.carries_per_s <= best.saturates_per_s
    more = replace(asked.load, rate=min(best.carries_per_s * 1.15, best.saturates_per_s * 0.97))
    at = expect(asked, best.split, 400, more)
    assert at.ttft_p99_s > 3.0 or at.itl_p99_s > 0.045


def test_nothing_on_the_frontier_is_beaten() -> None:
    found = advise(question(rate=1.2), 4).candidates
    edge = [c.expected for c in found if c.on_frontier]
    assert 0 < len(edge) < len(found)
    for c in found:
        if c.expected is not None and not c.on_frontier:
            assert any(
                e is not None
                and e.ttft_p99_s <= c.expected.ttft_p99_s
                and e.itl_p99_s <= c.expected.itl_p99_s
                for e in edge
            )


def test_a_sequence_longer_than_a_workers_memory_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"a sequence of 520 tokens needs more KV .* or more --kv-gib"):
        question(rate=1, kv_tokens=519)
