"""A collector of OTLP traces on loopback."""

from __future__ import annotations

import gzip
import http.server
import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


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
        """Not on the test's output."""


@contextmanager
def collecting() -> Iterator[tuple[str, queue.Queue[ExportTraceServiceRequest]]]:
    """Its address, and what it gets."""
    handler = type("OneCollector", (Collector,), {"got": queue.Queue()})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", handler.got
    finally:
        server.shutdown()
        thread.join(10)
        server.server_close()
