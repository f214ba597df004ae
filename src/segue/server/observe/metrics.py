"""The metrics of a frontend, and of an instance in direct mode; docs/metrics.md lists all. A `Metrics` owns
its registry; there are no globals.

Times are seconds. Label values come from closed sets (error codes, roles, replicas of the registry),
never from a client, so that the number of series is bounded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from segue.engine.request import Usage
from segue.kv import ErrorCode
from segue.server.messages.control import Load
from segue.server.schedulers.request_figures import FAST_S, SLOW_S, Buckets

#: Names in `Output.timeline`: the parts of the time to the first token.
PHASES = ("queue", "bootstrap", "reserve", "prefill", "wire", "commit")

_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)

#: Bounds that OpenTelemetry's semantic conventions give for their histograms, in seconds.
_HTTP_S = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
_INFERENCE_S = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
_FIRST_TOKEN_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
_EACH_TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5)
#: The labels of an inference, in the order of `Inference`.
_INFERENCE = ("gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model")
#: Their values.
Inference = tuple[str, str, str]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def histogram(
    name: str, text: str, labels: Sequence[str], series: Mapping[tuple[str, ...], Buckets]
) -> HistogramMetricFamily:
    """A histogram in prometheus' form; each series by the values of its labels."""
    found = HistogramMetricFamily(name, text, labels=labels)
    for values, buckets in series.items():
        names = map(floatToGoString, buckets.bounds)
        counted = list(zip(names, accumulate(buckets.counts), strict=True))
        found.add_metric(values, counted, buckets.total)
    return found


class QuickHistogram(Collector):
    """A histogram for what happens with every request or token: prometheus's own takes locks and a look at
    each bucket. Used on one thread."""

    def __init__(
        self,
        name: str,
        text: str,
        buckets: tuple[float, ...],
        registry: CollectorRegistry,
        labels: tuple[str, ...] = (),
    ) -> None:
        self._name = name
        self._text = text
        self._bounds = buckets
        self._labelnames = labels
        #: The values by those of the labels.
        self.series: dict[tuple[str, ...], Buckets] = {}
        if not labels:
            #: Record one more value of a histogram without labels.
            self.observe = self.labels().observe
        registry.register(self)

    def labels(self, *values: str) -> Buckets:
        """The series with these values of the labels."""
        found = self.series.get(values)
        if found is None:
            found = self.series[values] = Buckets(self._bounds)
        return found

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """The histogram in prometheus' form."""
        yield histogram(self._name, self._text, self._labelnames, self.series)


class Metrics:
    """The metrics of one process. Methods are cheap and may be called on the event loop."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, labels, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(name, text, labels, registry=registry)

        def quick(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> QuickHistogram:
            return QuickHistogram(name, text, buckets, registry, labels)

        self.requests = counter(
            "segue_requests",
            "HTTP requests by endpoint and outcome ('ok' or the error code)",
            "endpoint",
            "outcome",
        )
        self.rejected = counter("segue_rejected", "Requests answered 429 because a limit was reached")
        self.aborts = counter("segue_aborts", "Generations ended early, by reason", "reason")
        self.retries = counter(
            "segue_retries", "Generations placed again before their first token, by error code", "code"
        )
        self.placements = counter(
            "segue_placements",
            "Attempts by why their prompt's KV is handed over ('long', 'never', 'asked') or not ('short', "
            "'no_prefill', 'unified')",
            "reason",
        )
        self.continuations = counter(
            "segue_continuations",
            "Generations continued on other workers after tokens had been sent, by error code",
            "code",
        )
        self.placed_again_tokens = counter(
            "segue_placed_again_prompt_tokens",
            "Prompt tokens of generations that were placed again or continued, by whether their KV was still "
            "there ('kept') or had to be computed again ('computed')",
            "kv",
        )
        self.running = gauge("segue_generations_running", "Generations that have begun to answer")
        self.waiting = gauge("segue_generations_waiting", "Generations without their first token yet")
        self.prompt_tokens = counter(
            "segue_prompt_tokens", "Prompt tokens of generations that began to answer"
        )
        self.cached_tokens = counter(
            "segue_cached_tokens",
            "Prompt tokens that were not computed, by the side whose cache had them",
            "side",
        )
        self.output_tokens = counter(
            "segue_output_tokens", "Tokens generated, counted as they reach the frontend"
        )
        self.prompt_length = quick("segue_prompt_length_tokens", "Prompt length", _TOKENS)
        self.ttft = quick("segue_ttft_seconds", "Request received to first token", SLOW_S)
        self.itl = quick("segue_itl_seconds", "Between two outputs of a generation", FAST_S)
        self.e2e = quick("segue_e2e_seconds", "Request received to last token", SLOW_S)
        self.http = quick(
            "http_server_request_duration_seconds",
            "Duration of the requests that segue_requests counts, without those that showed no API key",
            _HTTP_S,
            "http_request_method",
            "http_route",
            "http_response_status_code",
            "url_scheme",
            "error_type",
        )
        self.inference = quick(
            "gen_ai_server_request_duration_seconds",
            "Request received to the end of its answer, of valid requests for tokens",
            _INFERENCE_S,
            *_INFERENCE,
            "error_type",
        )
        self.inference_first = quick(
            "gen_ai_server_time_to_first_token_seconds",
            "Request received to first token, of generations that succeeded",
            _FIRST_TOKEN_S,
            *_INFERENCE,
        )
        self.inference_each = quick(
            "gen_ai_server_time_per_output_token_seconds",
            "Mean time between two tokens of a generation that succeeded",
            _EACH_TOKEN_S,
            *_INFERENCE,
        )
        self.handoff = quick(
            "segue_handoff_seconds",
            "Parts of the time to first token, as the leaders measured them",
            FAST_S,
            "phase",
        )
        self.replicas = gauge("segue_replicas", "Replicas with an open session", "role")
        self.ready = gauge("segue_ready", "1 while a request can complete")
        replica = ("role", "replica")
        self.replica_running = gauge(
            "segue_replica_running", "Requests running, by the last report", *replica
        )
        self.replica_waiting = gauge(
            "segue_replica_waiting", "Requests waiting, by the last report", *replica
        )
        self.pages = gauge(
            "segue_pages", "KV pages of a replica by state (free, used, quarantined)", *replica, "state"
        )
        self.slots = gauge(
            "segue_slots",
            "Slots of a replica for the states of sequences, by state (free, used, quarantined); none for a "
            "model that keeps KV alone",
            *replica,
            "state",
        )
        self._handoff = {phase: self.handoff.labels(phase) for phase in PHASES}

    def finished(self, endpoint: str, code: ErrorCode | None) -> None:
        """One HTTP request of `endpoint` ended, well (None) or with `code`."""
        self.requests.labels(endpoint, "ok" if code is None else code.value).inc()
        if code is ErrorCode.OUT_OF_CAPACITY:
            self.rejected.inc()

    def placed_again(self, usage: Usage, *, kept: bool = False) -> None:
        """A generation that was placed again has its next token. `usage` says what its prompt cost; if
        prefill's half was `kept`, nothing was computed again."""
        again = 0 if kept else usage.computed
        self.placed_again_tokens.labels("kept").inc(usage.prompt_tokens - again)
        self.placed_again_tokens.labels("computed").inc(again)

    def timeline(self, timeline: dict[str, float]) -> None:
        """Record the parts of one first token; names outside `PHASES` are left out."""
        for phase, seconds in timeline.items():
            histogram = self._handoff.get(phase)
            if histogram is not None:
                histogram.observe(seconds)

    def load(self, role: str, replica: str, load: Load) -> None:
        """A replica's report."""
        self.replica_running.labels(role, replica).set(load.running)
        self.replica_waiting.labels(role, replica).set(load.waiting)
        for gauge, counts in ((self.pages, load.pages), (self.slots, load.slots)):
            for state, count in counts.items():
                gauge.labels(role, replica, state).set(count)

    def forget(self, role: str, replica: str) -> None:
        """The replica is gone: its series end, so that series are bounded by the live replicas."""
        for gauge in (self.replica_running, self.replica_waiting, self.pages, self.slots):
            gauge.remove_by_labels({"role": role, "replica": replica})

    def exposition(self) -> bytes:
        """The text for `GET /metrics`, of type `CONTENT_TYPE`."""
        return generate_latest(self.registry)
