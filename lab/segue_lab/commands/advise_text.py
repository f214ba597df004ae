"""The output of `segue advise`: the advice, a table, a plot and the transports."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.table import Table

from segue.cli.terminal import Console
from segue_lab.advise.advice import Advice, SplitResult
from segue_lab.advise.workload import LatencyTargets
from segue_lab.commands.advise_report import UNLIMITED_TOKENS, AdviseReport

_PLOT_COLUMNS, _PLOT_ROWS = 60, 14
_LEGEND = (
    "TTFT: time to first token, ITL: time between tokens; p50, p99.\n"
    "*: no other is better in one p99 and as good in the other.\n"
    "carries: most requests/s within the targets.\n"
    "full at: requests/s at which a queue grows without end."
)
_MARKS = "abcdefghijklmnopqrstuvwxyz"


def show(report: AdviseReport, console: Console) -> None:
    """The report for people."""
    question, advice = report.question, report.advice
    console.print(headline(advice), style="bold", highlight=False, soft_wrap=True)
    for reason in advice.reasons:
        console.print(f"  {reason}", highlight=False, soft_wrap=True)
    if advice.candidates:
        console.print(candidates_table(advice.candidates))
        console.print(_LEGEND, highlight=False)
        if plot := frontier(advice.candidates, question.targets):
            console.print("\n".join(plot), highlight=False)
    kv = f"KV of a request: {report.kv_bytes_per_request / 1e6:.3g} MB"
    table = Table("transport", "GB/s", "wire ms", "of them after the last forward", title=kv)
    for row in report.wires:
        name = f"{row.name} (taken)" if row.name == report.transport else row.name
        table.add_row(name, f"{row.gb_per_s:.3g}", f"{row.wire_ms:.3g}", f"{row.exposed_ms:.3g}")
    console.print(table)
    if report.fit_error is not None:
        console.print(f"the calculation misses measured forwards by at most {report.fit_error:.0%}")
    if question.kind.kv_tokens >= UNLIMITED_TOKENS:
        load = question.load
        tokens = question.kind.max_batch * (load.prompt.mean + load.output.mean)
        most = tokens * question.kv_token_bytes / 2**30
        console.print(f"memory for KV was not limited (--kv-gib): a full batch holds {most:.3g} GiB")


def headline(advice: Advice) -> str:
    """The advice in one line."""
    split, chunk = advice.split, advice.chunk_tokens
    if split is None:
        return "no number of workers will do" if advice.verdict == "impossible" else "too few workers"
    if advice.verdict == "disaggregate":
        return f"disaggregate: --prefill {split.prefill} --decode {split.decode}"
    count = "1 unified worker" if split.unified == 1 else f"{split.unified} unified workers"
    return f"do not disaggregate: {count}, --chunk-tokens {chunk}"


def candidates_table(candidates: Sequence[SplitResult]) -> Table:
    """A row for each of `candidates`."""
    table = Table("", "workers", "chunk", "TTFT ms", "ITL ms", "req/s", "carries", "full at")
    for mark, found in zip(_MARKS, candidates, strict=False):
        star = "*" if found.on_frontier else ""
        expected = found.expected
        seen = ["too much", "", ""]
        if expected is not None:
            ttft = f"{expected.ttft_p50_s * 1e3:.0f}, {expected.ttft_p99_s * 1e3:.0f}"
            itl = f"{expected.itl_p50_s * 1e3:.1f}, {expected.itl_p99_s * 1e3:.1f}"
            seen = [ttft, itl, f"{expected.requests_per_s:.3g}"]
        carries = f"{found.carries_per_s:.3g}" if found.meets else "no"
        table.add_row(
            mark + star,
            str(found.split),
            str(found.chunk_tokens),
            *seen,
            carries,
            f"{found.saturates_per_s:.3g}",
        )
    return table


def frontier(candidates: Sequence[SplitResult], targets: LatencyTargets) -> list[str]:
    """A plot of both p99 in milliseconds, on logarithmic scales; colons and dots are the targets. Empty for
    fewer than two candidates."""
    points = [
        (mark, c.expected.ttft_p99_s * 1e3, c.expected.itl_p99_s * 1e3)
        for mark, c in zip(_MARKS, candidates, strict=False)
        if c.expected is not None and min(c.expected.ttft_p99_s, c.expected.itl_p99_s) > 0
    ]
    if len(points) < 2:
        return []
    wanted_x = [] if targets.ttft_s is None else [targets.ttft_s * 1e3]
    wanted_y = [] if targets.itl_s is None else [targets.itl_s * 1e3]
    xs, ys = (
        _Scale([p[1] for p in points] + wanted_x, _PLOT_COLUMNS),
        _Scale([p[2] for p in points] + wanted_y, _PLOT_ROWS),
    )
    grid = [[" "] * _PLOT_COLUMNS for _ in range(_PLOT_ROWS)]
    for value in wanted_y:
        grid[ys.at(value)] = ["·"] * _PLOT_COLUMNS
    for value in wanted_x:
        for line in grid:
            line[xs.at(value)] = ":"
    for mark, x, y in reversed(points):
        grid[ys.at(y)][xs.at(x)] = mark
    lines = [f"{'between tokens, p99 ms':>24}"]
    for index in range(_PLOT_ROWS - 1, -1, -1):
        label = f"{ys.high:.4g}" if index == _PLOT_ROWS - 1 else f"{ys.low:.4g}" if index == 0 else ""
        lines.append(f"{label:>9} │{''.join(grid[index])}")
    lines.append(f"{'':>9} └{'─' * _PLOT_COLUMNS}")
    ends = f"{xs.low:.4g}", f"{xs.high:.4g}"
    middle = "first token, p99 ms".center(_PLOT_COLUMNS - len(ends[0]) - len(ends[1]))
    lines.append(f"{'':>11}{ends[0]}{middle}{ends[1]}")
    return lines


class _Scale:
    """Places of values on a logarithmic axis of `cells` cells."""

    def __init__(self, values: Sequence[float], cells: int) -> None:
        self.low, self.high, self._cells = min(values), max(values), cells

    def at(self, value: float) -> int:
        if self.high <= self.low:
            return 0
        part = math.log(value / self.low) / math.log(self.high / self.low)
        return round(part * (self._cells - 1))
