"""Simulated queues against known results."""

import random

import pytest
from msgspec.structs import replace

from segue_lab.advise.advice import weighted_percentile
from segue_lab.advise.costs import RowsPoint, StepTimes
from segue_lab.advise.queues import (
    HandOffWire,
    QueueRun,
    SimulatedTimes,
    WorkerKind,
    WorkerSplit,
    hand_off_times,
    simulate,
)
from segue_lab.advise.workload import AskedLoad, Lengths

#: A token of a prompt takes 1 ms, a forward 10 ms at least; attention is free.
STEPS = StepTimes(curve=(RowsPoint(10, 0.01), RowsPoint(1000, 1.0)), pair_s=0.0, context_s=0.0)
WIRE = HandOffWire(name="w", bytes_per_s=1e6, latency_s=0.002)
APART, UNIFIED = WorkerSplit(1, 1), WorkerSplit(unified=1)


def kind(**changes: float) -> WorkerKind:
    fields = {"chunk_tokens": 100, "max_batch": 64, "kv_tokens": 10**9, **changes}
    return WorkerKind(steps=STEPS, **fields)  # type: ignore[arg-type]


def load(prompt: str, output: str, **how: float) -> AskedLoad:
    return AskedLoad(
        prompt=Lengths.parse(prompt, "p"),
        output=Lengths.parse(output, "o"),
        **how,  # type: ignore[arg-type]
    )


def run(split: WorkerSplit, asked: AskedLoad, requests: int, **changes: float) -> SimulatedTimes:
    return simulate(kind(**changes), split, asked, requests, wire=WIRE, kv_token_bytes=100)


def test_one_request_alone_waits_for_its_chunks_and_then_for_one_forward_a_token() -> None:
    seen = run(UNIFIED, load("250", "4", concurrency=1), 1)
    assert seen.ttft_s == pytest.approx([0.25])
    assert [(pytest.approx(s), n) for s, n in seen.gaps] == [(0.01, 1)] * 3
    assert (seen.finished, seen.end_s) == (1, pytest.approx(0.28))


def test_apart_the_first_token_waits_for_the_last_chunk_on_the_wire() -> None:
    seen = run(APART, load("250", "4", concurrency=1), 1)
    # 250 tokens computed; of them the last 50 cross after the last forward, 100 bytes each at 1 MB/s.
    assert seen.ttft_s == pytest.approx([0.25 + 0.005 + 0.002])
    times = hand_off_times(kind(), WIRE, 250, 100)
    assert times == pytest.approx((0.025 + 0.002, 0.005 + 0.002))


def test_a_slow_wire_is_waited_for_in_whole() -> None:
    slow = HandOffWire(name="slow", bytes_per_s=100.0)
    times = hand_off_times(kind(), slow, 250, 100, state_bytes=50)
    assert times.wire_s == pytest.approx(250.5)
    # The first chunk leaves after 0.1 s, the last forward ends after 0.25.
    assert times.exposed_s == pytest.approx(250.5 - 0.15)
    seen = simulate(
        kind(), APART, load("250", "1", concurrency=1), 1, wire=slow, kv_token_bytes=100, state_bytes=50
    )
    assert seen.ttft_s == pytest.approx([0.25 + times.exposed_s])


def test_a_prompt_stands_between_the_tokens_of_others_on_a_unified_worker_only() -> None:
    asked = load("100", "50", concurrency=2)
    assert max(s for s, _ in run(UNIFIED, asked, 40).gaps) == pytest.approx(0.1)
    # Apart they wait for the forward that runs and for their own.
    assert max(s for s, _ in run(APART, asked, 40).gaps) <= 0.02 + 1e-9


def test_a_smaller_chunk_stands_there_for_less_time() -> None:
    asked = load("100", "50", concurrency=2)
    assert max(s for s, _ in run(UNIFIED, asked, 40, chunk_tokens=20).gaps) == pytest.approx(0.02)


def test_waiting_for_prefill_is_that_of_a_queue_with_random_arrivals() -> None:
    # Pollaczek and Khinchine: service of 0.1 s, load 0.7, mean wait 0.7 * 0.1 / (2 * 0.3).
    seen = run(UNIFIED, load("100", "1", rate=7.0), 20000)
    assert sum(seen.ttft_s) / len(seen.ttft_s) - 0.1 == pytest.approx(0.7 * 0.1 / 0.6, rel=0.1)


def test_short_prompts_share_a_forward() -> None:
    seen = run(UNIFIED, load("20", "1", concurrency=5), 5)
    assert seen.ttft_s == pytest.approx([0.02] + [0.02 + 0.08] * 4)  # the first began alone


def test_requests_in_flight_are_as_many_as_asked_for() -> None:
    # Little's law over a long run: in flight = throughput * time in the system.
    seen = run(APART, load("50", "20", concurrency=4), 2000)
    whole_s = sum(seen.ttft_s) + sum(s * n for s, n in seen.gaps)
    assert whole_s / seen.end_s == pytest.approx(4, rel=0.02)


def test_what_has_no_room_for_its_kv_waits_for_another_to_end() -> None:
    asked = load("100", "11", concurrency=2)
    roomy, tight = run(APART, asked, 2), run(APART, asked, 2, kv_tokens=200)
    assert tight.ttft_s[1] == pytest.approx(roomy.ttft_s[0] + 0.1 + tight.ttft_s[0])
    assert roomy.ttft_s[1] < tight.ttft_s[1]


def test_a_batch_has_no_more_sequences_than_allowed() -> None:
    asked = load("10", "20", concurrency=8)
    assert max(n for _, n in run(APART, asked, 40, max_batch=3).gaps) == 3
    assert max(n for _, n in run(APART, asked, 40).gaps) > 3


def test_every_request_ends_and_every_token_is_counted() -> None:
    for split in (UNIFIED, WorkerSplit(unified=3), APART, WorkerSplit(2, 3)):
        for how in ({"rate": 2.0}, {"concurrency": 7}):
            asked = load("1-300:3,900", "1-40", **how)
            seen = run(split, asked, 300)
            assert (seen.finished, len(seen.ttft_s)) == (300, 300)
            again = run(split, asked, 300)
            assert (again.ttft_s, again.gaps) == (seen.ttft_s, seen.gaps)
    fixed = run(APART, load("30", "7", rate=3.0), 200)
    assert sum(n for _, n in fixed.gaps) == 200 * 6


def test_time_beside_the_forwards_counts() -> None:
    seen = run(UNIFIED, load("100", "3", concurrency=1), 1, request_s=0.5, step_s=0.25)
    assert seen.ttft_s == pytest.approx([0.5 + 0.1 + 0.25])
    assert [s for s, _ in seen.gaps] == pytest.approx([0.26, 0.26])


def test_a_percentile_counts_each_value_as_often_as_it_was() -> None:
    values = [(3.0, 1), (1.0, 98), (2.0, 1)]
    assert [weighted_percentile(values, p) for p in (50, 98, 99, 100)] == [1.0, 1.0, 2.0, 3.0]
    assert weighted_percentile([], 50) == 0.0


def test_forwards_take_longer_and_shorter_as_often_as_measured() -> None:
    spread = replace(STEPS, spread=(0.5, 1.5), prompt_spread=(0.8, 1.2))
    asked = load("100", "101", concurrency=1)
    seen = simulate(replace(kind(), steps=spread), UNIFIED, asked, 100)
    assert {round(s, 6) for s in seen.ttft_s} == {0.08, 0.12}
    gaps = [round(s, 6) for s, n in seen.gaps for _ in range(n)]
    assert {s: gaps.count(s) for s in set(gaps)} == {
        0.005: pytest.approx(5000, rel=0.1),
        0.015: pytest.approx(5000, rel=0.1),
    }


def test_attention_takes_its_time_for_each_request_anew() -> None:
    steps = replace(STEPS, pair_s=1e-6, context_s=1e-4)
    seen = simulate(replace(kind(), steps=steps), UNIFIED, load("250", "4", concurrency=1), 3)
    assert seen.ttft_s == pytest.approx([0.25 + 1e-6 * (250 * 251 // 2)] * 3)
    assert [s for s, _ in seen.gaps] == pytest.approx(
        [0.01 + 1e-4 * tokens for tokens in (251, 252, 253)] * 3
    )


@pytest.mark.parametrize("split", [WorkerSplit(unified=2), WorkerSplit(2, 2)], ids=str)
def test_a_request_goes_to_the_worker_that_holds_least_and_one_that_has_ended_is_held_no_more(
    split: WorkerSplit,
) -> None:
    free = HandOffWire(name="free", bytes_per_s=1e15)
    run = QueueRun(kind(), split, free, 1, 0, random.Random(0))
    run.arrive(0.0, 100, 5000)
    for number in range(1, 7):
        run.arrive(float(number), 100, 4)
    seen = run.run()
    assert seen.ttft_s == pytest.approx([0.1] * 7), "each on a worker of its own, beside the long one"
    assert max(s for s, _ in seen.gaps) == pytest.approx(0.01)


def test_time_beside_a_forward_gives_the_wire_time_too() -> None:
    slow = HandOffWire(name="slow", bytes_per_s=100.0, latency_s=0.25)
    # 250 s on the wire from the end of the first forward; the third ends 1.15 s after that.
    assert hand_off_times(kind(step_s=0.5), slow, 250, 100).exposed_s == pytest.approx(250 - 1.15 + 0.25)


def test_another_seed_draws_other_lengths_and_the_same_the_same() -> None:
    asked = load("1-1000", "1", concurrency=1)
    first, second, again = (simulate(kind(), UNIFIED, asked, 5, seed=seed).ttft_s for seed in (1, 2, 1))
    assert first == again != second


def test_a_request_that_fills_the_memory_is_served_and_the_next_one_after_it() -> None:
    seen = run(UNIFIED, load("100", "10", concurrency=3), 3, kv_tokens=110)
    one_s = 0.1 + 9 * 0.01
    assert seen.ttft_s == pytest.approx([0.1, one_s + 0.1, 2 * one_s + 0.1])
    assert seen.finished == 3
