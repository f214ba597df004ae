"""Records of requests as OpenTelemetry spans, exported over OTLP/HTTP. Off unless the environment says so.

Settings are OpenTelemetry's own variables. Spans are made when a record is: nothing is held while a request
runs, and the exporter's bounded queue and thread do the rest.

Names and attributes of an HTTP request and of its inference are those of OpenTelemetry's semantic conventions
(`http.*`, `gen_ai.*`); the rest begins with `segue.`. Workers do not repeat the tokens of an inference under
its names, so that a sum over all spans is right.
"""

from __future__ import annotations

import importlib.util
import logging
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from segue.kv import ConfigError
from segue.server.messages.records import Attribute, RequestRecord
from segue.server.observe.logs import about

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor
    from opentelemetry.trace import SpanContext, SpanKind

log = logging.getLogger("segue.traces")

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
#: The wait for the last spans to leave, in milliseconds.
_FLUSH_MS = 3000
_NS = 10**9


def traces(environ: Mapping[str, str], service: str) -> Traces | None:
    """The exporter of this process' spans; None unless an OTLP endpoint or the exporter `otlp` is set. The
    process is named `service` unless the environment has a name. Raises ConfigError for unsupported exporters
    and protocols."""
    exporters = environ.get("OTEL_TRACES_EXPORTER", "").strip()
    asked = any(environ.get(name, "").strip() for name in _ENDPOINTS) or exporters == "otlp"
    if not asked or exporters == "none" or environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return None
    if exporters not in ("", "otlp"):
        raise ConfigError(f"OTEL_TRACES_EXPORTER {exporters!r} is not here: otlp and none are")
    for name in _PROTOCOLS:
        if environ.get(name, "http/protobuf").strip() != "http/protobuf":
            raise ConfigError(f"{name} {environ[name]!r} is not here: http/protobuf is")
    if importlib.util.find_spec("opentelemetry") is None:
        raise ConfigError("OTEL_* asks for traces, which need the otel extra: pip install 'segue[otel]'")
    return Traces(environ, service)


class Traces:
    """The spans of one process, for `processor` (None: the exporter of the environment). `on_record`,
    `context` and `below` may be called on any thread; none waits."""

    def __init__(
        self, environ: Mapping[str, str], service: str, processor: SpanProcessor | None = None
    ) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider

        named = environ.get("OTEL_SERVICE_NAME") or "service.name=" in environ.get(
            "OTEL_RESOURCE_ATTRIBUTES", ""
        )
        self._resource = Resource.create({} if named else {"service.name": service})
        self._provider = TracerProvider(resource=self._resource, shutdown_on_exit=False)
        self._ids = self._provider.id_generator
        self._processor = _exporting() if processor is None else processor

    def close(self) -> None:
        """Export what is left, and stop."""
        self._processor.force_flush(_FLUSH_MS)
        self._processor.shutdown()

    def context(self, parent: str) -> str:
        """The `traceparent` of a new span under `parent`, or of a new trace; the sampler of the environment
        says whether it is followed."""
        from opentelemetry.sdk.trace.sampling import Decision
        from opentelemetry.trace import NonRecordingSpan, set_span_in_context

        above = _context(parent) if parent else None
        within = None if above is None else set_span_in_context(NonRecordingSpan(above))
        trace_id = self._ids.generate_trace_id() if above is None else above.trace_id
        decision = self._provider.sampler.should_sample(within, trace_id, "segue.http").decision
        flags = int(decision is Decision.RECORD_AND_SAMPLE)
        return f"00-{trace_id:032x}-{self._ids.generate_span_id():016x}-{flags:02x}"

    def below(self, parent: str) -> str:
        """The `traceparent` of a new span under `parent`, followed if that is."""
        return f"{parent[:36]}{self._ids.generate_span_id():016x}{parent[52:]}"

    def on_record(self, record: RequestRecord) -> None:
        """Export a record's span and those of its steps, if its trace is followed."""
        try:
            self._export_record(record)
        except Exception:  # the boundary: a fault of traces must not change the end of a request
            log.exception("the spans of a request were not made", extra=about(record.request_id))

    def _export_record(self, record: RequestRecord) -> None:
        known = record.span or record.traceparent
        if not known:
            return
        context = _context(record.span) if record.span else self._new(_context(known))
        if not context.trace_flags.sampled:
            return
        from opentelemetry.trace import SpanKind

        # Records are on the monotonic clock, spans on that of the wall.
        offset_ns = time.time_ns() - time.monotonic_ns()
        start_ns = int(record.began * _NS) + offset_ns
        end_ns = start_ns + int(record.seconds * _NS)
        inner = record.inner
        for step, end_s in record.timed():
            if inner is None or step.at_s < inner.at_s:
                times = start_ns + int(step.at_s * _NS), start_ns + int(end_s * _NS)
                text: dict[str, Attribute] = {"segue.text": step.text} if step.text else {}
                self._export(step.name.split()[0], self._new(context), context, times, text)
        failure = None if record.error is None else record.error.text
        failed: dict[str, Attribute] = {} if record.error is None else {"error.type": record.error.code.value}
        if inner is not None:
            times = start_ns + int(inner.at_s * _NS), end_ns
            found = {**inner.attributes, **failed}
            self._export(inner.name, _context(inner.span), context, times, found, SpanKind.CLIENT, failure)
        own: dict[str, Attribute] = {**record.attributes}
        own |= {f"segue.{name}": count for name, count in record.facts.items() if name != "status"}
        own |= {"segue.request_id": record.request_id, "segue.where": record.where}
        if record.room:
            own |= {"segue.room": str(record.room), "segue.attempt": record.attempt}
        above = _context(record.traceparent) if record.traceparent else None
        kind = SpanKind.CLIENT if record.role == "frontend" else SpanKind.SERVER
        if "http.response.status_code" in own and 400 <= record.facts["status"] < 500:
            failure = None  # by the conventions a 4xx is no failure of the server's span
        else:
            own |= failed
        self._export(_name(record), context, above, (start_ns, end_ns), own, kind, failure)

    def _new(self, above: SpanContext) -> SpanContext:
        from opentelemetry.trace import SpanContext

        return SpanContext(above.trace_id, self._ids.generate_span_id(), False, above.trace_flags)

    def _export(
        self,
        name: str,
        context: SpanContext,
        above: SpanContext | None,
        times_ns: tuple[int, int],
        attributes: Mapping[str, Attribute],
        kind: SpanKind | None = None,
        failure: str | None = None,
    ) -> None:
        """Without a `kind` it is an internal span; with a `failure` its status is an error."""
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.trace import SpanKind, Status, StatusCode

        span = ReadableSpan(
            name,
            context,
            above,
            self._resource,
            dict(attributes),
            kind=SpanKind.INTERNAL if kind is None else kind,
            status=Status(StatusCode.UNSET if failure is None else StatusCode.ERROR, failure),
            start_time=times_ns[0],
            end_time=times_ns[1],
        )
        self._processor.on_end(span)


def _exporting() -> SpanProcessor:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    return BatchSpanProcessor(OTLPSpanExporter())


def _name(record: RequestRecord) -> str:
    """Instances have names and numbers, which are in segue.where: names of spans are few."""
    if record.role == "http" and record.attributes:
        return f"{record.attributes['http.request.method']} {record.attributes['http.route']}"
    return f"segue.{record.role}"


def _context(traceparent: str) -> SpanContext:
    from opentelemetry.trace import SpanContext, TraceFlags

    _, trace_id, span_id, flags = traceparent.split("-")
    return SpanContext(int(trace_id, 16), int(span_id, 16), True, TraceFlags(int(flags, 16)))
