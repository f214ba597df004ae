"""The choice between splits whose figures are known: which is better, and why that is said."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from test_advise_choice import FAST, question

from segue_lab.advise.advice import (
    MAX_SPLITS,
    Expected,
    SplitResult,
    candidate,
    candidates,
    choice_of,
    expect,
    meets,
    saturation,
    with_frontier,
)
from segue_lab.advise.queues import WorkerSplit
from segue_lab.advise.workload import LatencyTargets

TWO, APART = WorkerSplit(unified=2), WorkerSplit(1, 1)


def seen(ttft_s: float, itl_s: float) -> Expected:
    return Expected(ttft_p50_s=0.0, ttft_p99_s=ttft_s, itl_p50_s=0.0, itl_p99_s=itl_s, requests_per_s=1.0)


def result(
    split: WorkerSplit,
    carries: float = 1.0,
    at: tuple[float, float] | None = (0.5, 0.05),
    *,
    met: bool = True,
    chunk_tokens: int = 500,
) -> SplitResult:
    return SplitResult(
        split=split,
        chunk_tokens=chunk_tokens,
        saturates_per_s=3.0,
        expected=None if at is None else seen(*at),
        meets=met,
        carries_per_s=carries,
    )


@pytest.mark.parametrize("ttft_s", [None, 0.9, 1.0, 1.1])
@pytest.mark.parametrize("itl_s", [None, 0.09, 0.1, 0.11])
def test_the_p99_of_both_latencies_count_and_a_target_may_just_be_reached(
    ttft_s: float | None, itl_s: float | None
) -> None:
    within = (ttft_s is None or ttft_s >= 1.0) and (itl_s is None or itl_s >= 0.1)
    targets = LatencyTargets(ttft_s=ttft_s, itl_s=itl_s)
    assert meets(seen(1.0, 0.1), targets) is within
    assert not meets(None, targets)
    assert targets.any is (ttft_s is not None or itl_s is not None)


BOTH = {"ttft_s": 1.0, "itl_s": 0.1}


@pytest.mark.parametrize(
    ("unified", "apart", "targets", "better", "said", "not_said"),
    [
        (result(TWO), None, BOTH, False, "apart need two", "carries"),
        (result(TWO), result(APART, 9.0, met=False), BOTH, False, "and no split does", "carries"),
        (
            result(TWO, 0, (0.5, 0.2), met=False),
            result(APART),
            BOTH,
            True,
            "200 ms between tokens",
            "first token",
        ),
        (
            result(TWO, 0, (2.0, 0.05), met=False),
            result(APART),
            BOTH,
            True,
            "ms to the first token",
            "between",
        ),
        (result(TWO, 0, None, met=False), result(APART), BOTH, True, "saturate at 3 requests/s", "p99"),
        (result(TWO, 2.0), result(APART, 2.1), BOTH, True, "1.05 of it", "is for"),
        (result(TWO, 2.0), result(APART, 2.09), BOTH, False, "within the targets", "is for"),
        (result(TWO, 2.0), result(APART, 1.0), {"ttft_s": 1.0}, False, "--slo-itl-ms", "of_it"),
        (result(TWO, 2.0), result(APART, 2.05), {}, False, "--slo-itl-ms", "within the targets"),
    ],
)
def test_prefill_and_decode_are_apart_where_that_carries_enough_more_and_the_reason_is_said(
    unified: SplitResult,
    apart: SplitResult | None,
    targets: dict[str, float],
    better: bool,
    said: str,
    not_said: str,
) -> None:
    asked = question(rate=1.0, **targets)
    advice = choice_of(asked, (unified,) if apart is None else (unified, apart))
    assert advice.verdict == ("disaggregate" if better else "do not disaggregate")
    assert advice.split == (APART if better else TWO)
    reasons = " ".join(advice.reasons)
    assert said in reasons
    assert not_said not in reasons


def test_of_several_the_one_that_meets_the_targets_carries_most_and_is_farthest_below_them() -> None:
    asked = question(rate=1.0, **BOTH)
    some = [
        result(TWO, 9.0, met=False, chunk_tokens=1),
        result(TWO, 2.0, (0.1, 0.01), chunk_tokens=2),
        result(TWO, 3.0, (0.9, 0.01), chunk_tokens=3),
        result(TWO, 3.0, (0.5, 0.08), chunk_tokens=4),  # at 0.8 of its worse target, the one before at 0.9
        result(TWO, 3.0, (0.1, 0.095), chunk_tokens=5),
    ]
    assert choice_of(asked, tuple(some)).chunk_tokens == 4
    without = question(rate=1.0)
    assert choice_of(without, tuple(some)).chunk_tokens == 5, "the first token's time alone"


def test_on_the_frontier_is_who_is_beaten_in_nothing_by_one_that_is_as_good_in_the_other() -> None:
    points = [(1.0, 1.0), (2.0, 0.5), (2.0, 1.0), (1.0, 1.0), (1.5, 0.5), (0.5, 3.0), None]
    found = with_frontier([result(TWO, at=at) for at in points])
    assert [c.on_frontier for c in found] == [True, False, False, True, True, True, False]


def test_unified_workers_may_use_smaller_chunks_and_of_the_splits_those_are_looked_at_that_carry_most() -> (
    None
):
    found = candidates(question(rate=1000.0), 16)  # too much for all: nothing is simulated
    assert [c.chunk_tokens for c in found if c.split.unified] == [500, 125], "31 are too few"
    apart = [c for c in found if not c.split.unified]
    assert len(apart) == MAX_SPLITS
    assert [c.split.prefill for c in apart] == sorted(c.split.prefill for c in apart)
    assert {c.split.workers for c in apart} == {16}
    asked = question(rate=1000.0)
    every = sorted(saturation(asked, WorkerSplit(n, 16 - n)) for n in range(1, 16))
    assert sorted(c.saturates_per_s for c in apart) == pytest.approx(every[-MAX_SPLITS:])
    assert [c.split for c in candidates(asked, 2) if not c.split.unified] == [APART]


def test_a_role_that_is_full_bounds_the_other_and_a_wire_that_is_full_its_prefill_worker() -> None:
    asked = question(rate=1.0)
    # A prompt of 500 tokens takes 0.5 s; 16 sequences have 19 forwards of 20 ms each.
    assert saturation(asked, WorkerSplit(3, 50)) == pytest.approx(6.0)
    assert saturation(asked, WorkerSplit(500, 2)) == pytest.approx(2 * 16 / (19 * 0.02))
    slow = replace(asked, wire=replace(FAST, bytes_per_s=5e5), state_bytes=250_000)
    assert saturation(slow, WorkerSplit(3, 50)) == pytest.approx(3 / 1.5)
    assert saturation(question(rate=1.0, output="1"), WorkerSplit(3, 1)) == pytest.approx(6.0)
    for kv_tokens, sequences in ((1040, 2), (1039, 1)):
        tight = question(rate=1.0, kv_tokens=kv_tokens)
        assert saturation(tight, WorkerSplit(500, 1)) == pytest.approx(sequences / (19 * 0.02))


def test_attention_over_what_was_generated_too_slows_those_who_generate() -> None:
    asked = question(rate=1.0)
    long = replace(asked, kind=replace(asked.kind, steps=replace(asked.kind.steps, context_s=1e-4)))
    each_s = 1e-4 * (500 + 20 / 2)
    assert saturation(long, WorkerSplit(500, 1)) == pytest.approx(16 / (19 * (0.02 + 16 * each_s)))
    # Unified, each forward computes the prompts of those who will take the places of those who end.
    rates = [
        batch / (19 * (max(0.02, batch * (1 + 500 / 19) * 1e-3) + batch * each_s))
        for batch in (1, 2, 4, 8, 16)
    ]
    assert saturation(long, WorkerSplit(unified=2)) == pytest.approx(2 * max(rates))


def test_a_load_at_the_very_edge_is_not_computed_and_one_below_it_is() -> None:
    edge = saturation(question(rate=1.0, output="1"), APART)
    assert edge == pytest.approx(2.0)
    for rate, computed in ((0.98 * edge, False), (0.9 * edge, True)):
        assert (candidate(question(rate=rate, output="1"), APART).expected is not None) is computed


def test_the_state_of_a_sequence_crosses_the_wire_with_its_last_chunk() -> None:
    asked = replace(question(concurrency=1, output="1"), state_bytes=10**8)
    assert expect(asked, APART, 3).ttft_p50_s == pytest.approx(0.5 + 0.0005 + 0.1 + 0.001)


def test_a_sequence_may_fill_a_worker_s_memory() -> None:
    assert question(rate=1.0, kv_tokens=520).kind.kv_tokens == 520
