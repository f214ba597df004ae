"""The text of `segue advise` for advice with known figures."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from segue_lab.advise.advice import Advice, Expected, SplitResult
from segue_lab.advise.queues import WorkerSplit
from segue_lab.advise.workload import LatencyTargets
from segue_lab.commands.advise_text import candidates_table, frontier, headline


def seen(ttft_s: float, itl_s: float) -> Expected:
    return Expected(
        ttft_p50_s=ttft_s / 2, ttft_p99_s=ttft_s, itl_p50_s=itl_s / 2, itl_p99_s=itl_s, requests_per_s=2.5
    )


def result(at: tuple[float, float] | None, **more: Any) -> SplitResult:
    fields = {"split": WorkerSplit(2, 3), "chunk_tokens": 500, "saturates_per_s": 4.0, "carries_per_s": 3.25}
    expected = None if at is None else seen(*at)
    return SplitResult(**{**fields, "meets": at is not None, "expected": expected, **more})


@pytest.mark.parametrize(
    ("verdict", "split", "text"),
    [
        ("disaggregate", WorkerSplit(2, 3), "disaggregate: --prefill 2 --decode 3"),
        (
            "do not disaggregate",
            WorkerSplit(unified=1),
            "do not disaggregate: 1 unified worker, --chunk-tokens 64",
        ),
        (
            "do not disaggregate",
            WorkerSplit(unified=4),
            "do not disaggregate: 4 unified workers, --chunk-tokens 64",
        ),
        ("too few", None, "too few workers"),
        ("impossible", None, "no number of workers will do"),
    ],
)
def test_the_advice_in_one_line_is_what_to_type(verdict: Any, split: WorkerSplit | None, text: str) -> None:
    assert headline(Advice(verdict=verdict, split=split, reasons=(), chunk_tokens=64)) == text


def test_the_table_tells_what_each_split_gives_and_what_it_carries_only_where_it_meets_the_targets() -> None:
    out = io.StringIO()
    Console(file=out, width=200).print(
        candidates_table(
            [result((1.0, 0.05), on_frontier=True), result((2.0, 0.1), meets=False), result(None)]
        )
    )
    first, second, third = (
        [cell.strip() for cell in line.split("│")[1:-1]]
        for line in out.getvalue().splitlines()
        if "2 + 3" in line
    )
    assert first == ["a*", "2 + 3", "500", "500, 1000", "25.0, 50.0", "2.5", "3.25", "4"]
    assert (second[0], second[6]) == ("b", "no")
    assert third[3:7] == ["too much", "", "", "no"]


def test_a_plot_has_every_candidate_between_its_ends_and_there_is_none_of_one_alone() -> None:
    targets = LatencyTargets(ttft_s=0.5, itl_s=0.02)
    assert frontier([result((1.0, 0.05)), result(None), result((1.0, 0.0))], targets) == []
    plot = frontier([result((1.0, 0.05)), result((0.1, 0.01))], targets)
    rows = [line.partition("│")[2] for line in plot if "│" in line]
    assert (rows[0].rstrip()[-1], rows[-1][0]) == ("a", "b"), "the slower one is at the top right"
    assert sum(":" in row for row in rows) == len(rows)
    assert sum(row.count("·") > 50 for row in rows) == 1
    assert "50" in plot[1]
    assert plot[-1].split()[0] == "100"
