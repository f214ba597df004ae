"""The spans of a request through frontend, prefill and decode: one tree below the client's span."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import msgspec
import pytest
from killable import Cluster, cluster, save_tokenizer
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from opentelemetry.semconv.attributes import (
    error_attributes,
    http_attributes,
    network_attributes,
    url_attributes,
)
from opentelemetry.trace import SpanKind, StatusCode
from packaging.version import Version

from segue.kv.ids import Role
from segue.server.observe.traces import Traces

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
#: The attributes of OpenTelemetry's semantic conventions, in the version that is installed.
CONVENTIONS = {
    value
    for module in (
        error_attributes,
        gen_ai_attributes,
        http_attributes,
        network_attributes,
        url_attributes,
    )
    for name, value in vars(module).items()
    if name.isupper() and isinstance(value, str)
}
PROMPT = {"prompt": list(range(3, 43)), "max_tokens": 4, "temperature": 0, "ignore_eos": True}


class Kept(SpanProcessor):
    """Spans in memory, and a wait for the next ones."""

    def __init__(self) -> None:
        self._spans: list[ReadableSpan] = []
        self._news = threading.Condition()

    def on_end(self, span: ReadableSpan) -> None:
        with self._news:
            self._spans.append(span)
            self._news.notify_all()

    def taken(self, *names: str) -> list[ReadableSpan]:
        """All spans once those with `names` have ended; the next call gives later ones."""

        def ended() -> bool:
            return Counter(names) <= Counter(span.name for span in self._spans)

        with self._news:
            assert self._news.wait_for(ended, 60), [span.name for span in self._spans]
            found, self._spans = self._spans, []
            return found


@pytest.fixture(scope="module")
def kept() -> Kept:
    return Kept()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, kept: Kept) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("traced")
    save_tokenizer(folder, 97)
    with cluster(folder, Role.PREFILL, Role.DECODE, spans=Traces({}, "segue-test", kept)) as running:
        yield running


def ask(made: Cluster, parent: str = PARENT, status: int = 200, **body: Any) -> None:
    content = json.dumps({"model": "tiny", **PROMPT, **body})
    answer = made.http.post("/v1/completions", content=content, headers={"traceparent": parent})
    assert answer.status_code == status, answer.text


def named(spans: list[ReadableSpan], name: str) -> ReadableSpan:
    [found] = [span for span in spans if span.name == name]
    return found


def above(spans: list[ReadableSpan], span: ReadableSpan) -> list[str]:
    """The names from the span above `span` up to the client's, which is none of ours."""
    by_id = {s.context.span_id: s for s in spans}
    names = []
    while (parent := span.parent) is not None and parent.span_id in by_id:
        span = by_id[parent.span_id]
        names.append(span.name)
    assert span.parent is not None
    assert f"{span.parent.span_id:016x}" == PARENT.split("-")[2]
    return names


def test_one_tree_leads_from_the_client_over_frontend_to_prefill_and_decode(
    made: Cluster, kept: Kept
) -> None:
    ask(made, stream=True, top_k=5)
    http = "POST /v1/completions"
    spans = kept.taken(http, "segue.prefill", "segue.decode")
    assert {f"{span.context.trace_id:032x}" for span in spans} == {PARENT.split("-")[1]}
    inference = "text_completion tiny"
    paths = {span.name: above(spans, span) for span in spans if span.name not in ("queue", "in_flight")}
    assert paths[http] == []
    assert paths["read"] == paths[inference] == [http]
    assert paths["segue.frontend"] == [inference, http]
    assert paths["place"] == paths["answer"] == ["segue.frontend", inference, http]
    assert paths["segue.prefill"] == paths["segue.decode"] == ["segue.frontend", inference, http]
    assert paths["prefill"] == ["segue.prefill", "segue.frontend", inference, http]
    assert paths["transfer"] == ["segue.decode", "segue.frontend", inference, http]
    assert "generate" not in paths, "the inference's span stands for this step"

    kinds = {span.name: span.kind for span in spans}
    assert kinds[http] is kinds["segue.prefill"] is kinds["segue.decode"] is SpanKind.SERVER
    assert kinds[inference] is kinds["segue.frontend"] is SpanKind.CLIENT
    assert kinds["transfer"] is SpanKind.INTERNAL

    said = dict(named(spans, http).attributes or {})
    assert said.pop("segue.request_id")
    assert said == {
        "http.request.method": "POST",
        "http.route": "/v1/completions",
        "http.response.status_code": 200,
        "url.path": "/v1/completions",
        "url.scheme": "http",
        "network.protocol.version": "1.1",
        "segue.where": "frontend http",
    }
    said = dict(named(spans, inference).attributes or {})
    assert 0 < said.pop("gen_ai.response.time_to_first_chunk") < 60  # type: ignore[operator]
    assert said == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "segue",
        "gen_ai.request.model": "tiny",
        "gen_ai.response.model": "tiny",
        "gen_ai.request.max_tokens": 4,
        "gen_ai.request.temperature": 0.0,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.top_k": 5.0,
        "gen_ai.request.stream": True,
        "gen_ai.usage.input_tokens": 40,
        "gen_ai.usage.output_tokens": 4,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.response.finish_reasons": ["length"],
    }
    for span in spans:
        if span.name != inference:
            assert not [name for name in span.attributes or {} if name.startswith("gen_ai.")], span.name


def test_samples_share_an_inference_and_have_spans_of_their_own(made: Cluster, kept: Kept) -> None:
    ask(made, n=2, frequency_penalty=0.5, presence_penalty=0.25, temperature=1, seed=1)
    spans = kept.taken("POST /v1/completions", *("segue.prefill", "segue.decode") * 2)
    samples = [span for span in spans if span.name == "segue.frontend"]
    assert len(samples) == 2
    for half in ("segue.prefill", "segue.decode"):
        parents = {span.parent.span_id for span in spans if span.name == half and span.parent}
        assert parents == {span.context.span_id for span in samples}
    said = dict(named(spans, "text_completion tiny").attributes or {})
    assert said["gen_ai.request.choice.count"] == 2
    assert said["gen_ai.response.finish_reasons"] == ["length", "length"]
    assert (said["gen_ai.usage.input_tokens"], said["gen_ai.usage.output_tokens"]) == (40, 8)
    assert said["gen_ai.request.frequency_penalty"] == 0.5
    assert said["gen_ai.request.presence_penalty"] == 0.25
    assert "gen_ai.request.stream" not in said


def test_an_error_of_the_client_fails_the_inference_and_not_the_server_s_span(
    made: Cluster, kept: Kept
) -> None:
    limits = made.fleet.limits
    made.fleet.limits = msgspec.structs.replace(limits, max_queue=1)
    try:
        ask(made, status=429, n=2)
    finally:
        made.fleet.limits = limits
    spans = kept.taken("POST /v1/completions")
    http, inference = named(spans, "POST /v1/completions"), named(spans, "text_completion tiny")
    assert http.status.status_code is StatusCode.UNSET
    assert (http.attributes or {})["http.response.status_code"] == 429
    assert "error.type" not in (http.attributes or {})
    assert inference.status.status_code is StatusCode.ERROR
    assert inference.status.description
    assert (inference.attributes or {})["error.type"] == "OUT_OF_CAPACITY"


def test_what_nobody_follows_leaves_no_span(made: Cluster, kept: Kept) -> None:
    ask(made, parent=PARENT[:-1] + "0")
    ask(made)
    spans = kept.taken("POST /v1/completions", "segue.prefill", "segue.decode")
    assert len([span for span in spans if span.name.startswith("POST")]) == 1


@pytest.mark.skipif(
    Version(version("opentelemetry-semantic-conventions")) < Version("0.66b0"),
    reason="this version of the conventions does not know all names yet",
)
def test_what_is_not_called_after_segue_is_a_name_of_the_conventions(made: Cluster, kept: Kept) -> None:
    ask(made, stream=True, top_k=5, frequency_penalty=0.5, presence_penalty=0.25, n=2)
    spans = kept.taken("POST /v1/completions")
    used = {name for span in spans for name in span.attributes or {} if not name.startswith("segue.")}
    assert len(used) > 15
    assert used <= CONVENTIONS
