"""The latencies of a measurement as a picture: bars of characters for a terminal, a PNG by matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from segue.cli.bench.stats import RequestTimes, latencies
from segue.kv import ConfigError

_BARS: Final = " ▁▂▃▄▅▆▇█"
LABELS: Final = {
    "ttft": "time to first token",
    "itl": "between tokens",
    "tpot": "per output token",
    "e2el": "end to end",
}


def histogram(values: Sequence[float], width: int) -> str:
    """One bar for each of `width` equal ranges from 0 to the largest value: how many of `values` it has.
    A range with any value has a visible bar."""
    top = max(values, default=0.0)
    if top <= 0:
        return " " * width
    counts = [0] * width
    for value in values:
        counts[min(width - 1, int(width * value / top))] += 1
    return "".join(_BARS[-(-count * (len(_BARS) - 1) // max(counts))] for count in counts)


def need_matplotlib() -> None:
    """Raise a ConfigError if matplotlib is not installed."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as exc:
        raise ConfigError(
            "--plot needs matplotlib, which is not installed: pip install 'segue[plot]'"
        ) from exc


def write_png(name: str, samples: Sequence[RequestTimes], title: str) -> None:
    """Two graphs: each request's first token and end over the run, and the distribution of each latency.
    Raises ConfigError."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 5), layout="constrained")
    over_time, distributions = figure.subplots(1, 2)
    done = [s for s in samples if not s.error]
    over_time.scatter([s.start_s for s in done], [s.ttft_s for s in done], s=9, label=LABELS["ttft"])
    over_time.scatter([s.start_s for s in done], [s.end_s for s in done], s=9, label=LABELS["e2el"])
    failed = [s for s in samples if s.error]
    over_time.scatter(
        [s.start_s for s in failed], [s.end_s for s in failed], s=30, marker="x", label="failed"
    )
    over_time.set(xlabel="sent, s since the beginning", ylabel="s", ylim=(0, None))
    over_time.legend()
    found = latencies(samples)
    for key, label in LABELS.items():
        values = sorted(1e3 * value for value in found[key])
        distributions.plot(values, [(at + 1) / len(values) for at in range(len(values))], label=label)
    distributions.set(xscale="log", xlabel="ms", ylabel="share of values", ylim=(0, 1))
    distributions.grid(visible=True, alpha=0.3)
    distributions.legend()
    figure.suptitle(title)
    try:
        figure.savefig(name, format="png", dpi=120)
    except OSError as exc:
        raise ConfigError(f"--plot {name} cannot be written: {exc.strerror}") from exc
