"""Lengths and loads as they are typed."""

import random

import pytest

from segue.kv.errors import ConfigError
from segue_lab.advise.workload import AskedLoad, Lengths


@pytest.mark.parametrize(
    ("text", "mean", "longest"),
    [
        ("512", 512, 512),
        ("1000,8", 504, 1000),
        ("100-300", 200, 300),
        ("100-300:3,1000:1", 400, 1000),
        (" 8 , 16:0.5", 32 / 3, 16),
    ],
)
def test_lengths_are_one_a_range_or_several_with_weights(text: str, mean: float, longest: int) -> None:
    lengths = Lengths.parse(text, "--input-tokens")
    assert (lengths.mean, lengths.longest) == (pytest.approx(mean), longest)
    drawn = [lengths.draw(random.Random(seed)) for seed in range(3000)]
    assert sum(drawn) / len(drawn) == pytest.approx(mean, rel=0.05)
    assert max(drawn) <= longest


@pytest.mark.parametrize(
    "text", ["", "x", "0", "5-3", "512:0", "1,,2", "-4", "1e3", "99999999", "5:x", "1" * 500]
)
def test_other_lengths_are_refused_with_the_flag_and_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--input-tokens must be a length \(512\), a range"):
        Lengths.parse(text, "--input-tokens")


def test_a_load_is_a_rate_or_a_number_in_flight() -> None:
    lengths = Lengths.parse("8", "")
    for both in ({}, {"rate": 1.0, "concurrency": 1}):
        with pytest.raises(ConfigError, match="--rate or --concurrency"):
            AskedLoad(prompt=lengths, output=lengths, **both)


def test_so_many_parts_and_no_more() -> None:
    assert Lengths.parse(",".join(["8"] * 64), "--input-tokens").mean == 8
    with pytest.raises(ConfigError, match="--input-tokens may have 64 parts, not 65"):
        Lengths.parse(",".join(["8"] * 65), "--input-tokens")
