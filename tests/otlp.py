"""A collector of OTLP traces on loopback."""

from __future__ import annotations

import gzip
import http.server
import queue
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from ports import answering


class Collector(http.server.BaseHTTPRequestHandler):
    """Takes what an OTLP exporter posts."""

    got: queue.Queue[ExportTraceServiceRequest]

    def do_POST(self) -> None:
        data = self.rfile.read(int(self.headers["content-length"]))
        if self.headers.get("content-encoding") == "gzip":
            data = gzip.decompress(data)
        assert self.path == "/v1/traces"
        self.got.put(ExportTraceServiceRequest.FromString(data))
        self.send_response(200)
        self.send_header("content-type", "application/x-protobuf")
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Keep requests off the test's output."""


@contextmanager
def collecting() -> Iterator[tuple[str, queue.Queue[ExportTraceServiceRequest]]]:
    """Its address, and what it gets."""
    handler = type("OneCollector", (Collector,), {"got": queue.Queue()})
    with answering(handler) as url:
        yield url, handler.got
