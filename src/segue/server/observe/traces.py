"""Records of requests as OpenTelemetry spans, exported over OTLP/HTTP. Off unless the environment says so.

Settings are OpenTelemetry's own variables. Spans are made when a record is: nothing is held while a request
runs, and the exporter's bounded queue and thread do the rest.
"""

from __future__ import annotations

import importlib.util
import logging
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from segue.kv import ConfigError
from segue.server.messages.records import RequestRecord
from segue.server.observe.logs import about

if TYPE_CHECKING:
    from opentelemetry.trace import SpanContext

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
    """The spans of one process. `on_record` and `context` may be called on any thread; neither waits."""

    def __init__(self, environ: Mapping[str, str], service: str) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        named = environ.get("OTEL_SERVICE_NAME") or "service.name=" in environ.get(
            "OTEL_RESOURCE_ATTRIBUTES", ""
        )
        self._resource = Resource.create({} if named else {"service.name": service})
        self._provider = TracerProvider(resource=self._resource, shutdown_on_exit=False)
        self._ids = self._provider.id_generator
        self._processor = BatchSpanProcessor(OTLPSpanExporter())

    def close(self) -> None:
        """Export what is left, and stop."""
        self._processor.force_flush(_FLUSH_MS)
        self._processor.shutdown()  # type: ignore[no-untyped-call]

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

    def on_record(self, record: RequestRecord) -> None:
        """Export a record's span and those of its steps, if its trace is followed."""
        try:
            self._hear(record)
        except Exception:  # the boundary: what is told of a request must not change its end
            log.exception("the spans of a request were not made", extra=about(record.request_id))

    def _hear(self, record: RequestRecord) -> None:
        known = record.span or record.traceparent
        if not known:
            return
        mine = _context(record.span) if record.span else self._below(_context(known))
        if not mine.trace_flags.sampled:
            return
        # Records are on the monotonic clock, spans on that of the wall.
        offset_ns = time.time_ns() - time.monotonic_ns()
        start_ns = int(record.began * _NS) + offset_ns
        end_ns = start_ns + int(record.seconds * _NS)
        for step, end_s in record.timed():
            times = start_ns + int(step.at_s * _NS), start_ns + int(end_s * _NS)
            said = {"segue.text": step.text} if step.text else {}
            self._export(step.name.split()[0], self._below(mine), mine, times, said)
        about: dict[str, str | int] = {f"segue.{name}": count for name, count in record.facts.items()}
        about |= {"segue.request_id": record.request_id, "segue.where": record.where}
        if record.room:
            about |= {"segue.room": str(record.room), "segue.attempt": record.attempt}
        if record.error is not None:
            about |= {"error.type": record.error.code.value, "segue.error": record.error.text}
        above = _context(record.traceparent) if record.traceparent else None
        http, failed = record.role == "http", record.error is not None
        # Instances have names and numbers, which are in segue.where: names of spans are few.
        self._export(
            f"segue.{record.role}", mine, above, (start_ns, end_ns), about, server=http, failed=failed
        )

    def _below(self, above: SpanContext) -> SpanContext:
        from opentelemetry.trace import SpanContext

        return SpanContext(above.trace_id, self._ids.generate_span_id(), False, above.trace_flags)

    def _export(
        self,
        name: str,
        context: SpanContext,
        above: SpanContext | None,
        times_ns: tuple[int, int],
        about: Mapping[str, str | int],
        *,
        server: bool = False,
        failed: bool = False,
    ) -> None:
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.trace import SpanKind, Status, StatusCode

        span = ReadableSpan(
            name,
            context,
            above,
            self._resource,
            dict(about),
            kind=SpanKind.SERVER if server else SpanKind.INTERNAL,
            status=Status(StatusCode.ERROR if failed else StatusCode.UNSET),
            start_time=times_ns[0],
            end_time=times_ns[1],
        )
        self._processor.on_end(span)


def _context(traceparent: str) -> SpanContext:
    from opentelemetry.trace import SpanContext, TraceFlags

    _, trace_id, span_id, flags = traceparent.split("-")
    return SpanContext(int(trace_id, 16), int(span_id, 16), True, TraceFlags(int(flags, 16)))
