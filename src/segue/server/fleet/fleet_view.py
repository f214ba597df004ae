"""The values that `/dashboard` and `segue top` show: counts of one frontend, and their change in a window.

Pure: the caller says what time it is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import msgspec
from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Sample

from segue.kv import ErrorCode, Role, meaning_of
from segue.server.fleet.operator import Row, pairs
from segue.server.fleet.replica import Replica
from segue.server.messages.records import RequestRecord
from segue.server.observe.metrics import Metrics
from segue.server.schedulers.request_figures import Buckets

PATH = "/dashboard"
#: Time between two looks.
LOOK_S = 1.0
#: Seconds over which rates and percentiles are taken.
WINDOW_S = 30.0
#: Requests and errors that are listed.
MAX_LATEST = 24
QUANTILES = (0.5, 0.9, 0.99)


class Percentiles(msgspec.Struct, frozen=True):
    """Milliseconds that half, nine tenths and 99 of 100 of `count` values do not exceed, within the buckets
    of a histogram."""

    p50: float
    p90: float
    p99: float
    count: int


class ReplicaView(msgspec.Struct, frozen=True, kw_only=True):
    """One replica. `pages` are its KV pages by state, `here` the requests that this frontend has there."""

    name: str
    role: Role
    address: str
    state: str
    running: int = 0
    waiting: int = 0
    here: int = 0
    pages: dict[str, int] = {}


class LinkView(msgspec.Struct, frozen=True, kw_only=True):
    """The hand-offs of one prefill to one decode replica."""

    prefill: str
    decode: str
    transport: str
    bytes_per_s: float
    nbytes: int
    succeeded: int
    failed: int


class RequestView(msgspec.Struct, frozen=True, kw_only=True):
    """One HTTP request that has ended `ago_s` seconds ago, or a generation that goes on (None)."""

    request_id: str
    ago_s: float | None
    seconds: float
    what: str
    code: str = ""
    text: str = ""


class ErrorView(msgspec.Struct, frozen=True):
    """The number of requests that ended with `code` since the start, its meaning, and the text of the
    latest."""

    code: str
    count: int
    meaning: str
    text: str


class FleetView(msgspec.Struct, frozen=True, kw_only=True):
    """One look. Rates and times are of the last `window_s` seconds and of this frontend; a time is None
    without a value in them. `trouble` says why the links are old."""

    model: str
    frontend: str
    frontends: list[str]
    version: str
    uptime_s: float
    ready: bool
    reason: str
    answering: int
    window_s: float
    requests_per_s: float
    tokens_per_s: float
    ttft_ms: Percentiles | None
    itl_ms: Percentiles | None
    ttft_parts_ms: dict[str, float]
    replicas: list[ReplicaView]
    links: list[LinkView]
    requests: list[RequestView]
    errors: list[ErrorView]
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class Distribution:
    """The counts of a histogram: values not above each bound (seconds), in all."""

    bounds: tuple[float, ...]
    counts: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Counts since the start, at one moment: `parts` are seconds and number of each part of the time to the
    first token, `outcomes` requests by error code or `ok`."""

    at_s: float
    ttft: Distribution
    itl: Distribution
    parts: dict[str, tuple[float, float]]
    tokens: float
    outcomes: dict[str, int]


def totals(metrics: Metrics, now: float) -> Totals:
    """The counts of `metrics` as they are."""
    outcomes: dict[str, int] = {}
    for sample in _samples(metrics.requests.collect()):
        if sample.name == "segue_requests_total":
            outcome = sample.labels["outcome"]
            outcomes[outcome] = outcomes.get(outcome, 0) + int(sample.value)
    tokens = [s.value for s in _samples(metrics.output_tokens.collect()) if s.name.endswith("_total")]
    return Totals(
        at_s=now,
        ttft=_distribution(metrics.ttft.labels()),
        itl=_distribution(metrics.itl.labels()),
        parts={phase: (each.total, sum(each.counts)) for (phase,), each in metrics.handoff.series.items()},
        tokens=sum(tokens),
        outcomes=outcomes,
    )


def _samples(found: Iterable[Metric]) -> Iterator[Sample]:
    for metric in found:
        yield from metric.samples


def _distribution(buckets: Buckets) -> Distribution:
    return Distribution(tuple(buckets.bounds), tuple(accumulate(buckets.counts)))


class Window:
    """The totals of the last `WINDOW_S` seconds, oldest first."""

    def __init__(self) -> None:
        self._kept: deque[Totals] = deque()

    def add(self, now: Totals) -> Change:
        """Keep `now`; the change since the oldest that is kept."""
        self._kept.append(now)
        while len(self._kept) > 2 and self._kept[1].at_s <= now.at_s - WINDOW_S:
            self._kept.popleft()
        return Change(self._kept[0], now)


@dataclass(frozen=True, slots=True)
class Change:
    """The change between two totals."""

    first: Totals
    last: Totals

    @property
    def seconds(self) -> float:
        """The time between them."""
        return self.last.at_s - self.first.at_s

    def rate(self, first: float, last: float) -> float:
        """The change of a count in a second."""
        return (last - first) / self.seconds if self.seconds > 0 else 0.0

    @property
    def parts_ms(self) -> dict[str, float]:
        """The mean of each part of the time to the first token; none without a first token."""
        found = {}
        for phase, (seconds, count) in self.last.parts.items():
            before_s, before = self.first.parts[phase]
            if count > before:
                found[phase] = (seconds - before_s) / (count - before) * 1e3
        return found


def percentiles(first: Distribution, last: Distribution) -> Percentiles | None:
    """Percentiles of the values that came between two looks at a histogram; None without any. Within a bucket
    values are taken as evenly spread, and above the last bound as that bound."""
    counts = [after - before for before, after in zip(first.counts, last.counts, strict=True)]
    total = counts[-1]
    if total <= 0:
        return None
    found = []
    for quantile in QUANTILES:
        wanted = quantile * total
        at = next(i for i, count in enumerate(counts) if count >= wanted)
        low_s, below = (last.bounds[at - 1], counts[at - 1]) if at else (0.0, 0.0)
        high_s = last.bounds[at] if at < len(counts) - 1 else low_s
        share = (wanted - below) / (counts[at] - below)
        found.append((low_s + share * (high_s - low_s)) * 1e3)
    return Percentiles(found[0], found[1], found[2], int(total))


def replica_views(replicas: Iterable[Replica]) -> list[ReplicaView]:
    """The replicas, by role and name."""
    return sorted(map(_replica, replicas), key=lambda view: (view.role.value, view.name))


def _replica(replica: Replica) -> ReplicaView:
    load, where = replica.load, replica.where
    if replica.session is None:
        state = "no session"
    elif where.draining or (load is not None and load.draining):
        state = "drained" if load is not None and load.drained else "draining"
    else:
        state = "serving" if replica.listed else "left the registry"
    return ReplicaView(
        name=str(replica.leader),
        role=replica.role,
        address=f"{where.host}:{where.port}",
        state=state,
        running=0 if load is None else load.running,
        waiting=0 if load is None else load.waiting,
        here=len(replica.running),
        pages={} if load is None else load.pages,
    )


def link_views(rows: Sequence[Row]) -> list[LinkView]:
    """The pairs that leaders have told an operator of."""
    return [
        LinkView(
            prefill=prefill,
            decode=decode,
            transport=pair.transport,
            bytes_per_s=pair.bytes_per_s,
            nbytes=pair.nbytes,
            succeeded=pair.succeeded,
            failed=pair.failed,
        )
        for (prefill, decode), pair in sorted(pairs(rows).items())
    ]


def request_views(
    live: Sequence[RequestRecord], ended: Sequence[RequestRecord], now: float
) -> list[RequestView]:
    """Generations that go on, then requests that have ended, the latest first."""
    going = [
        RequestView(
            request_id=record.request_id,
            ago_s=None,
            seconds=record.seconds,
            what=f"{record.facts['prompt_tokens']} tokens in, {record.facts['output_tokens']} out",
        )
        for record in live
    ]
    done = [
        RequestView(
            request_id=record.request_id,
            ago_s=max(0.0, now - record.began - record.seconds),
            seconds=record.seconds,
            what=f"HTTP {record.facts['status']}",
            code="" if record.error is None else record.error.code.value,
            text="" if record.error is None else record.error.text,
        )
        for record in ended
    ]
    return (going + done)[:MAX_LATEST]


def error_views(outcomes: dict[str, int], requests: Sequence[RequestView]) -> list[ErrorView]:
    """Errors since the start, the most frequent first."""
    told = {view.code: view.text for view in reversed(requests) if view.code}
    counts = sorted(outcomes.items(), key=lambda item: -item[1])
    return [
        ErrorView(code, count, meaning_of(ErrorCode(code)), told.get(code, ""))
        for code, count in counts
        if code != "ok" and count
    ]
