"""Records as OpenTelemetry spans: what the environment asks for, and what a collector gets over loopback."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.trace import StatusCode

from otlp import ExportTraceServiceRequest, collecting
from segue.kv.errors import ConfigError, Internal
from segue.server.messages.records import Path, RequestRecord
from segue.server.observe.traces import Traces, traces

Queue = queue.Queue[ExportTraceServiceRequest]
PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Queue]:
    with collecting() as (url, got):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
        yield got


def made() -> Traces:
    found = traces(os.environ, "segue-test")
    assert found is not None
    return found


def spans(collector: Queue) -> tuple[dict[str, str], dict[str, Any]]:
    """The resource's attributes, and the spans by name, of an exporter that was closed."""
    resources = list(collector.get(timeout=60).resource_spans)
    while not collector.empty():  # it exports every few seconds, too
        resources += collector.get().resource_spans
    [about] = [{a.key: a.value.string_value for a in one.resource.attributes} for one in resources[:1]]
    return about, {span.name: span for one in resources for scope in one.scope_spans for span in scope.spans}


def record(**more: Any) -> RequestRecord:
    path = Path(100.0)
    path.enter("queue", 100.0)
    path.enter("transfer", 101.5, "how")
    return RequestRecord(
        request_id="r-0",
        where="decode-1 abc dp0",
        role="decode",
        began=100.0,
        seconds=3.0,
        steps=path.steps(),
        room=2**63 + 1,
        facts={"handed_bytes": 7},
        **more,
    )


def http_record(**more: Any) -> RequestRecord:
    about: dict[str, Any] = {"began": 1.0, "traceparent": PARENT} | more
    return RequestRecord(request_id="r", where="frontend http", role="http", seconds=1.0, **about)


def test_a_collector_gets_the_record_and_its_steps_below_the_clients_span(collector: Queue) -> None:
    exporter = made()
    exporter.on_record(record(traceparent=PARENT, error=Internal("broken").info))
    exporter.close()
    about, found = spans(collector)
    assert about["service.name"] == "segue-test"
    assert set(found) == {"segue.decode", "queue", "transfer"}
    top = found["segue.decode"]
    assert top.trace_id.hex() == PARENT.split("-")[1]
    assert top.parent_span_id.hex() == PARENT.split("-")[2]
    assert found["queue"].parent_span_id == found["transfer"].parent_span_id == top.span_id
    assert top.end_time_unix_nano - top.start_time_unix_nano == 3 * 10**9
    assert found["transfer"].start_time_unix_nano - top.start_time_unix_nano == 1.5 * 10**9
    assert found["transfer"].end_time_unix_nano == top.end_time_unix_nano
    said = {a.key: a.value for a in top.attributes}
    assert said["segue.request_id"].string_value == "r-0"
    assert said["segue.where"].string_value == "decode-1 abc dp0", "an attribute names the instance"
    assert said["segue.handed_bytes"].int_value == 7
    assert said["segue.room"].string_value == str(2**63 + 1)
    assert said["error.type"].string_value == "INTERNAL"
    assert top.status.code == 2


def test_a_span_of_our_own_stands_between_the_client_and_the_workers(collector: Queue) -> None:
    exporter = made()
    own, root = exporter.context(PARENT), exporter.context("")
    assert own.split("-")[1] == PARENT.split("-")[1]
    assert own.split("-")[2] != PARENT.split("-")[2]
    assert own.endswith("-01")
    assert root.endswith("-01")
    assert root.split("-")[1] != own.split("-")[1]
    exporter.on_record(http_record(span=own))
    exporter.close()
    _, found = spans(collector)
    assert found["segue.http"].span_id.hex() == own.split("-")[2]
    assert found["segue.http"].parent_span_id.hex() == PARENT.split("-")[2]


def test_what_is_not_sampled_or_not_traced_is_not_exported(
    collector: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    exporter = made()
    assert exporter.context(PARENT[:-1] + "0").endswith("-00")
    assert exporter.below(PARENT[:-1] + "0").endswith("-00")
    exporter.on_record(record(traceparent=PARENT[:-1] + "0"))
    exporter.on_record(record())
    exporter.on_record(record(traceparent="nonsense"))
    exporter.close()
    assert collector.empty()
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    exporter = made()
    assert exporter.context("").endswith("-00")
    exporter.close()


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"OTEL_SERVICE_NAME": "x"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://h:1", "OTEL_SDK_DISABLED": "true"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://h:1", "OTEL_TRACES_EXPORTER": "none"},
    ],
)
def test_it_is_off_unless_it_is_asked_for(environ: dict[str, str]) -> None:
    assert traces(environ, "x") is None


def test_what_is_not_here_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://h:1"}
    with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_PROTOCOL 'grpc' is not here"):
        traces({**endpoint, "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "x")
    for exporter in ("zipkin", "console", "otlp,console"):
        with pytest.raises(ConfigError, match=f"OTEL_TRACES_EXPORTER '{exporter}' is not here"):
            traces({**endpoint, "OTEL_TRACES_EXPORTER": exporter}, "x")
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"pip install 'segue\[otel\]'"):
        traces(endpoint, "x")


@pytest.mark.parametrize(
    "environ",
    [
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://h:1"},
        {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://h:1"},
        {"OTEL_TRACES_EXPORTER": " otlp "},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://h:1", "OTEL_TRACES_EXPORTER": "otlp"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://h:1", "OTEL_SDK_DISABLED": "false"},
        {"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": " http/protobuf "},
    ],
)
def test_an_endpoint_of_either_kind_or_the_exporter_by_name_asks_for_it(
    environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("segue.server.observe.traces.Traces", lambda _environ, service: service)
    assert traces(environ, "x") == "x"  # type: ignore[comparison-overlap]
    assert traces({**environ, "OTEL_SDK_DISABLED": " TRUE "}, "x") is None
    with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_TRACES_PROTOCOL 'grpc'"):
        traces({**environ, "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "grpc"}, "x")


def test_a_record_s_span_is_at_its_time_on_the_wall_and_its_steps_follow_one_another(
    collector: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    began = time.monotonic() - 60.0
    exporter = made()
    exporter.on_record(msgspec.structs.replace(record(traceparent=PARENT, attempt=2), began=began))
    exporter.on_record(http_record(began=began))
    exporter.close()
    about, found = spans(collector)
    assert about["service.name"] == "mine"
    top, step, next_step = (found[name] for name in ("segue.decode", "queue", "transfer"))
    assert 50 < time.time() - top.start_time_unix_nano / 1e9 < 120
    assert step.start_time_unix_nano == top.start_time_unix_nano
    assert step.end_time_unix_nano == next_step.start_time_unix_nano
    assert {a.key: a.value.int_value for a in top.attributes}["segue.attempt"] == 2
    assert [a.value.string_value for a in next_step.attributes] == ["how"]
    assert not step.attributes
    assert (top.status.code, top.kind, found["segue.http"].kind) == (0, 2, 2)
    assert len({span.span_id for span in found.values()}) == len(found) == 4


@pytest.mark.parametrize(
    ("status", "told", "failed"),
    [
        (503, {"http.response.status_code": 503}, True),
        (200, {"http.response.status_code": 200}, True),  # the stream broke
        (499, {}, True),  # the client left
        (429, {"http.response.status_code": 429}, False),
    ],
)
def test_a_server_s_span_fails_unless_its_status_is_the_client_s_error(
    status: int, told: dict[str, Any], failed: bool
) -> None:
    kept: list[ReadableSpan] = []
    processor = SpanProcessor()
    processor.on_end = kept.append  # type: ignore[method-assign]
    ended = http_record(
        facts={"status": status},
        attributes={"http.request.method": "POST", "http.route": "/v1/completions", **told},
        error=Internal("broken").info,
    )
    Traces({}, "segue-test", processor).on_record(ended)
    [span] = kept
    assert span.name == "POST /v1/completions"
    assert span.status.status_code is (StatusCode.ERROR if failed else StatusCode.UNSET)
    assert span.status.description == ("broken" if failed else None)
    assert (span.attributes or {}).get("error.type") == ("INTERNAL" if failed else None)


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        ({}, "segue-test"),
        ({"OTEL_SERVICE_NAME": "mine"}, "mine"),
        ({"OTEL_RESOURCE_ATTRIBUTES": "team=us,service.name=ours"}, "ours"),
        ({"OTEL_RESOURCE_ATTRIBUTES": "team=us"}, "segue-test"),
    ],
)
def test_the_service_is_called_what_the_environment_calls_it_and_nothing_runs_on_after_the_close(
    environ: dict[str, str], name: str, collector: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable, value in environ.items():
        monkeypatch.setenv(variable, value)
    before = set(threading.enumerate())
    exporter = made()
    assert exporter._resource.attributes["service.name"] == name
    exporter.close()
    assert set(threading.enumerate()) <= before
