"""How long a forward takes: between measured ones, and by figures of hardware."""

import pytest

from segue.kv.errors import ConfigError
from segue_lab.advise.costs import (
    ForwardWork,
    Hardware,
    ModelCosts,
    RowsPoint,
    StepTimes,
    TimedForward,
    fit,
    fit_error,
    from_hardware,
    pairs,
)

LLAMA_8B = ModelCosts(
    name="8b",
    parameters=7.5e9,
    weight_bytes=16e9,
    pair_flops=4.0 * 32 * 32 * 128,
    kv_token_bytes=2**17,
    context_tokens=2**17,
)
KNOWN = StepTimes(
    curve=(RowsPoint(1, 0.03), RowsPoint(8, 0.04), RowsPoint(64, 0.1), RowsPoint(512, 0.8)),
    pair_s=2e-6,
    context_s=3e-6,
)


def chunk(tokens: int, start: int = 0) -> ForwardWork:
    return ForwardWork(prompt_tokens=tokens, pairs=pairs(start, tokens))


def decode(sequences: int, length: int) -> ForwardWork:
    return ForwardWork(sequences=sequences, context=sequences * length)


def test_pairs_are_those_of_causal_attention() -> None:
    for start, tokens in ((0, 1), (0, 5), (7, 3)):
        assert pairs(start, tokens) == sum(start + i + 1 for i in range(tokens))


def test_a_forward_between_two_points_is_on_their_line_and_the_last_line_goes_on() -> None:
    products = [KNOWN.products(rows) for rows in (1, 4.5, 8, 512, 960)]
    assert products == pytest.approx([0.03, 0.035, 0.04, 0.8, 1.5])
    assert KNOWN.products(0) == 0.03


def test_points_out_of_order_are_refused() -> None:
    for rows in ((2, 1), (1, 1)):
        with pytest.raises(ValueError, match="in order"):
            StepTimes(curve=tuple(RowsPoint(n, 0.1) for n in rows), pair_s=0, context_s=0)


def test_one_point_alone_is_the_time_of_every_forward() -> None:
    times = StepTimes(curve=(RowsPoint(8, 0.1),), pair_s=0, context_s=0)
    assert [times.products(rows) for rows in (1, 8, 9)] == [0.1] * 3


def test_a_fit_finds_the_times_that_its_forwards_had() -> None:
    works = [decode(1, 256), decode(8, 256), decode(8, 1024), chunk(64), chunk(512), chunk(512, 1024)]
    mixed = ForwardWork(prompt_tokens=504, pairs=pairs(0, 504), sequences=8, context=2048)
    timed = [TimedForward(work=w, samples=(KNOWN.seconds(w),)) for w in [*works, mixed]]
    found = fit(timed)
    assert (found.pair_s, found.context_s) == pytest.approx((2e-6, 3e-6))
    assert found.curve == tuple(RowsPoint(p.rows, pytest.approx(p.seconds)) for p in KNOWN.curve)
    assert fit_error(found, timed) == pytest.approx(0, abs=1e-9)
    slower = [*timed, TimedForward(work=mixed, samples=(2 * KNOWN.seconds(mixed),))]
    assert fit_error(found, slower) == pytest.approx(0.5)


def test_more_rows_never_take_less_time() -> None:
    works = [decode(8, 256), decode(8, 1024), chunk(64), chunk(64, 512), chunk(128)]
    timed = [TimedForward(work=w, samples=(KNOWN.seconds(w),)) for w in works]
    timed[-1] = TimedForward(work=works[-1], samples=(0.01,))
    assert [p.seconds for p in fit(timed).curve] == pytest.approx([0.04, 0.1, 0.1])


@pytest.mark.parametrize("missing", ["prompts", "sequences"])
def test_a_fit_needs_two_contexts_of_each_kind(missing: str) -> None:
    works = [decode(8, 256), chunk(64)]
    works += [decode(8, 1024)] if missing == "prompts" else [chunk(64, 512)]
    timed = [TimedForward(work=w, samples=(KNOWN.seconds(w),)) for w in works]
    with pytest.raises(ConfigError, match=f"as many {missing} with unequal contexts"):
        fit(timed)


def test_hardware_bounds_few_rows_by_memory_and_many_by_arithmetic() -> None:
    times = from_hardware(LLAMA_8B, Hardware(flops=500e12, memory_bytes_per_s=2e12))
    assert times.products(1) == pytest.approx(16e9 / 2e12)
    assert times.products(8) == pytest.approx(16e9 / 2e12)
    assert times.products(4096) == pytest.approx(2 * 7.5e9 * 4096 / 500e12)
    assert times.context_s == pytest.approx(2**17 / 2e12)


def test_more_rows_read_more_experts() -> None:
    model = ModelCosts(
        name="moe",
        parameters=1e9,
        weight_bytes=1e9,
        expert_bytes=64e9,
        experts=64,
        experts_per_token=2,
        kv_token_bytes=1,
        context_tokens=1,
    )
    assert model.read_bytes(1) == pytest.approx(1e9 + 2e9)
    assert model.read_bytes(1000) == pytest.approx(65e9)
    assert model.read_bytes(1) < model.read_bytes(8) < model.read_bytes(64)


def test_how_much_forwards_differ_is_kept_for_those_with_prompts_and_those_without() -> None:
    works = [decode(8, 256), decode(8, 1024), chunk(64), chunk(64, 512)]
    factors = {False: (0.9, 1.0, 1.4), True: (0.5, 1.0, 1.5)}
    timed = [
        TimedForward(work=w, samples=tuple(f * KNOWN.seconds(w) for f in factors[w.prompt_tokens > 0]))
        for w in works
    ]
    found = fit(timed)
    assert found.spread == pytest.approx([f / 1.1 for f in (0.9, 0.9, 1.0, 1.0, 1.4, 1.4)])
    assert found.prompt_spread == pytest.approx((0.5, 0.5, 1.0, 1.0, 1.5, 1.5))
    assert found.products(64) == pytest.approx(0.1)
    assert found.products(8) == pytest.approx(0.04 * 1.1)
    assert fit_error(found, timed) == pytest.approx(0, abs=1e-9)


def test_one_stall_is_spread_over_all_forwards() -> None:
    works = [decode(8, 256), decode(8, 1024), decode(16, 256), chunk(64), chunk(64, 512)]
    timed = [TimedForward(work=w, samples=(KNOWN.seconds(w),) * 9) for w in works]
    stalled = timed[0].samples[0] * 28
    timed[0] = TimedForward(work=works[0], samples=(*timed[0].samples[1:], stalled))
    found = fit(timed)
    assert found.products(8) == pytest.approx(KNOWN.products(8) * 2)
    assert found.products(16) == pytest.approx(KNOWN.products(16) * 2)
    assert found.products(64) == pytest.approx(KNOWN.products(64))


def timed(work: ForwardWork, seconds: float) -> TimedForward:
    return TimedForward(work=work, samples=(seconds,))


@pytest.mark.parametrize(
    ("seconds", "each_s"),
    [((1.0, 1.9, 1.6), 0.6 / (8 * 768)), ((1.0, 1.9, 0.9), 0.0)],
    ids=["a stall between", "none at all"],
)
def test_attention_is_the_difference_of_the_two_forwards_that_differ_most_and_never_less_than_nothing(
    seconds: tuple[float, float, float], each_s: float
) -> None:
    lengths = (256, 512, 1024)
    decodes = [timed(decode(8, length), each) for length, each in zip(lengths, seconds, strict=True)]
    chunks = [timed(chunk(64, start), 1.0) for start in (0, 64)]
    assert fit([*decodes, *chunks]).context_s == pytest.approx(each_s)
