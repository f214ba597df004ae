"""Statistics in vLLM's form: its log gets a line for each interval, `/metrics` the metrics `vllm:segue_*`."""

from __future__ import annotations

from typing import Any

from prometheus_client import Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from segue.integrations.vllm.vllm_table import HandoffFigures

_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)


class SegueStats(KVConnectorStats):
    """`HandoffFigures` as plain data, which vLLM carries from EngineCore to the API server."""

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        super().__init__(data or _plain(HandoffFigures(), 0))

    def reset(self) -> None:
        """Forget what was collected."""
        self.data = _plain(HandoffFigures(), 0)

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add later figures to these."""
        for code, count in other.data["outcomes"].items():
            self.data["outcomes"][code] = self.data["outcomes"].get(code, 0) + count
        for name in ("nbytes", "wire_s", "steps"):
            self.data[name] += other.data[name]
        for name in ("pinned", "quarantined"):
            self.data[name] = other.data[name]
        return self

    def reduce(self) -> dict[str, int | float]:
        """One line of vLLM's log."""
        seconds, nbytes = self.data["wire_s"], sum(self.data["nbytes"])
        ended = sum(self.data["outcomes"].values())
        good = self.data["outcomes"].get("OK", 0)
        return {
            "segue hand-offs": good,
            "failed": ended - good,
            "MB": round(nbytes / 1e6, 3),
            "mean ms": round(1000 * sum(seconds) / len(seconds), 3) if seconds else 0,
            "max ms": round(1000 * max(seconds), 3) if seconds else 0,
            "blocks pinned": self.data["pinned"],
            "in quarantine": self.data["quarantined"],
        }

    def is_empty(self) -> bool:
        """True if no step is in it. vLLM drops such stats, also where they would say that nothing is pinned
        any more."""
        return not self.data["steps"]


def _plain(figures: HandoffFigures, steps: int) -> dict[str, Any]:
    return {
        "steps": steps,
        "outcomes": dict(figures.outcomes),
        "nbytes": list(figures.nbytes),
        "wire_s": list(figures.wire_s),
        "pinned": figures.pinned,
        "quarantined": figures.quarantined,
    }


class StatsRecorder:
    """Turns the figures of each step into stats, or None where nothing has changed."""

    def __init__(self) -> None:
        self._last = (0, 0)

    def stats(self, figures: HandoffFigures) -> SegueStats | None:
        """The stats of one step."""
        now = (figures.pinned, figures.quarantined)
        if now == self._last and not figures.outcomes:
            return None
        self._last = now
        return SegueStats(data=_plain(figures, 1))


class SeguePromMetrics(KVConnectorPromMetrics):
    """`vllm:segue_handoffs_total{outcome}`, `vllm:segue_kv_bytes_total`, `vllm:segue_transfer_seconds`, and
    the gauges `vllm:segue_pinned_blocks` and `vllm:segue_quarantined_blocks`."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        counter, gauge, histogram = metric_types[Counter], metric_types[Gauge], metric_types[Histogram]
        self._outcomes = counter(
            name="vllm:segue_handoffs",
            documentation="Hand-offs of KV that ended, by error code; OK: succeeded.",
            labelnames=[*labelnames, "outcome"],
        )
        self._bytes = counter(
            name="vllm:segue_kv_bytes", documentation="Bytes of KV handed over.", labelnames=labelnames
        )
        self._seconds = histogram(
            name="vllm:segue_transfer_seconds",
            documentation="Seconds that the transfer of one hand-off's KV took.",
            buckets=_SECONDS,
            labelnames=labelnames,
        )
        self._pinned = gauge(
            name="vllm:segue_pinned_blocks",
            documentation="Blocks of the KV cache that hand-offs keep from being used again.",
            labelnames=labelnames,
        )
        self._quarantined = gauge(
            name="vllm:segue_quarantined_blocks",
            documentation="Pinned blocks of failed hand-offs that a peer may still touch.",
            labelnames=labelnames,
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """See KVConnectorPromMetrics."""
        labels = self.per_engine_labelvalues[engine_idx]
        for code, count in transfer_stats_data["outcomes"].items():
            self._outcomes.labels(*labels, code).inc(count)
        self._bytes.labels(*labels).inc(sum(transfer_stats_data["nbytes"]))
        for seconds in transfer_stats_data["wire_s"]:
            self._seconds.labels(*labels).observe(seconds)
        self._pinned.labels(*labels).set(transfer_stats_data["pinned"])
        self._quarantined.labels(*labels).set(transfer_stats_data["quarantined"])
