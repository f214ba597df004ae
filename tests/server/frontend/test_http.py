"""The door as clients see it: shapes, statuses, streams."""

import asyncio
import json
import re
import socket
import struct
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from frontend_rig import CONTEXT, DEADLINE_S, FakeBackend, Running, http_post, serve
from opentelemetry.semconv._incubating.metrics import gen_ai_metrics
from opentelemetry.semconv.metrics import http_metrics

from segue.engine.request import RankHints
from segue.kv.errors import (
    ErrorCode,
    OutOfCapacity,
    TransferFailed,
)
from segue.kv.limits import Limits
from segue.server.frontend.tokenizer import ModelTokenizer
from segue.server.observe import logs

HI = [{"role": "user", "content": "hi"}]
#: Attributes of OpenTelemetry's metrics.
_HTTP = {
    "http.request.method",
    "http.route",
    "http.response.status_code",
    "url.scheme",
    "error.type",
}
_INFERENCE = {"gen_ai.operation.name", "gen_ai.provider.name", "gen_ai.request.model"}


def chat(**kw: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": HI, **kw}


def events(text: str) -> list[Any]:
    """The events of a stream; it must end properly."""
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


@pytest.fixture
def client(door: Running) -> openai.OpenAI:
    return door.openai()


# ---- the real client -------------------------------------------------------------------------------


def test_openai_client_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny",
        messages=HI,
        logprobs=True,
        top_logprobs=1,
        seed=3,  # type: ignore[arg-type]
    )
    choice = answer.choices[0]
    assert choice.message.content == "Paris is the answer"
    assert choice.finish_reason == "stop"
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    shown = choice.logprobs.content
    assert "".join(lp.token for lp in shown[:-1]) == "Paris is the answer"
    assert bytes(shown[0].bytes or []) == b"Pa"
    assert shown[0].top_logprobs[0].token == "Pa"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 6
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 1


def test_the_bytes_of_tokens_are_the_text_where_a_character_has_several(
    client: openai.OpenAI, backend: FakeBackend
) -> None:
    backend.text = "😊é"
    answer = client.chat.completions.create(model="tiny", messages=HI, logprobs=True)  # type: ignore[arg-type]
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    shown = (logprobs.content or [])[:-1]
    assert len(shown) > 2
    assert bytes(byte for token in shown for byte in token.bytes or []).decode() == "😊é"


def test_openai_client_completions_whole_and_streamed(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="tiny", prompt=["the", "there"], n=2, max_tokens=2, logprobs=1, echo=True
    )
    assert [c.index for c in answer.choices] == [0, 1, 2, 3]
    assert [c.text for c in answer.choices] == ["theParis", "theParis", "thereParis", "thereParis"]
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs == [None, -0.5, -0.5]
    assert logprobs.text_offset == [0, 3, 5]
    chunks = list(
        client.completions.create(
            model="tiny", prompt=["the", "there"], n=2, max_tokens=2, logprobs=1, echo=True, stream=True
        )
    )
    for i, whole in enumerate(answer.choices):
        mine = [c.choices[0] for c in chunks if c.choices[0].index == i]
        assert "".join(c.text for c in mine) == whole.text
        tokens = [t for c in mine if c.logprobs for t in c.logprobs.tokens or []]
        assert tokens == logprobs.tokens or i >= 2
        assert mine[-1].finish_reason == "length"


def test_openai_client_sees_typed_errors(client: openai.OpenAI, backend: FakeBackend) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-4", messages=HI)  # type: ignore[arg-type]
    assert missing.value.code == "model_not_found"
    for seconds in (1, 17):
        backend.refuse = OutOfCapacity("full")
        backend.refuse.retry_after_s = seconds
        with pytest.raises(openai.RateLimitError) as full:
            client.chat.completions.create(model="tiny", messages=HI)  # type: ignore[arg-type]
        assert full.value.response.headers["retry-after"] == str(seconds)
    backend.refuse = None
    backend.error_at, backend.error = 2, TransferFailed("the wire broke", origin="prefill 1 dp0")
    stream = client.chat.completions.create(model="tiny", messages=HI, stream=True)  # type: ignore[arg-type]
    with pytest.raises(openai.APIError, match="the wire broke"):
        list(stream)


def test_openai_client_lists_models(client: openai.OpenAI) -> None:
    assert [m.id for m in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other/one")


@pytest.mark.parametrize("content", ["hi", [{"type": "text", "text": "hi"}]], ids=["aiperf", "guidellm"])
def test_load_generators_streams(door: Running, content: Any) -> None:
    # What AIPerf 0.13.0 and GuideLLM 0.8.1 send: they count tokens by the usage of each event.
    body = {"model": "tiny", "stream": True, "ignore_eos": True}
    body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    said = {"messages": [{"role": "user", "content": content}], "max_completion_tokens": 4}
    for path, asked in (("chat/completions", said), ("completions", {"prompt": "hi", "max_tokens": 4})):
        answer = door.post(f"/v1/{path}", body | asked)
        assert answer.status_code == 200
        *chunks, last = events(answer.text)
        assert last["usage"]["completion_tokens"] == 4
        # The time to the first token is that of the first event with text; each later one is one token.
        texts = [
            c["choices"][0].get("text") or c["choices"][0].get("delta", {}).get("content") for c in chunks
        ]
        counts = [c["usage"]["completion_tokens"] for c, text in zip(chunks, texts, strict=True) if text]
        assert counts == sorted(set(counts))


# ---- what is sent to the workers -------------------------------------------------------------------


def test_samples_have_their_own_request_and_seed(door: Running, backend: FakeBackend) -> None:
    answer = door.post("/v1/chat/completions", chat(n=3, seed=41)).json()
    assert [c["index"] for c in answer["choices"]] == [0, 1, 2]
    assert sorted(r.sampling.seed for r in backend.requests) == [41, 42, 43]
    assert len({r.request_id for r in backend.requests}) == 3
    assert answer["usage"]["prompt_tokens"] == len(backend.requests[0].prompt)
    assert answer["usage"]["completion_tokens"] == 18


def test_fields_reach_the_sampler(door: Running, backend: FakeBackend) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    body = chat(
        temperature=0,
        top_p=0.5,
        top_k=-1,
        min_p=0.1,
        presence_penalty=1,
        frequency_penalty=-1,
        repetition_penalty=1.5,
        logit_bias={"5": 3},
        stop_token_ids=[9],
        min_tokens=1,
        ignore_eos=True,
        max_completion_tokens=4,
        max_tokens=99,
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
        user="u",
        metadata={"a": "b"},
        store=None,
        unknown_field={"x": [1]},
    )
    assert door.post("/v1/chat/completions", body).status_code == 200
    s = backend.requests[0].sampling
    assert (s.temperature, s.top_p, s.top_k, s.min_p) == (0, 0.5, 0, 0.1)
    assert (s.presence_penalty, s.frequency_penalty, s.repetition_penalty) == (1, -1, 1.5)
    assert (s.logit_bias, s.stop_token_ids, s.min_tokens, s.max_tokens) == ({5: 3}, [9], 1, 4)
    assert s.ignore_eos
    assert s.grammar is not None
    assert s.grammar.kind == "json_schema"
    assert json.loads(s.grammar.text) == schema


@pytest.mark.parametrize(
    ("extra", "header", "routed"),
    [
        ({"routed_dp_rank": 2, "data_parallel_rank": 5}, None, 2),
        ({"data_parallel_rank": 5}, None, 5),
        ({"routed_dp_rank": 2}, "3", 3),
        ({}, None, None),
    ],
)
def test_the_dp_ranks_that_a_client_asks_for(
    door: Running, backend: FakeBackend, extra: dict[str, Any], header: str | None, routed: int | None
) -> None:
    headers = {} if header is None else {"X-Data-Parallel-Rank": header}
    body = chat(disagg_prefill_dp_rank=1, force_query_prefill_dp_rank=True, **extra)
    assert door.post("/v1/chat/completions", body, headers=headers).status_code == 200
    assert backend.requests[0].ranks == RankHints(
        routed_dp_rank=routed, disagg_prefill_dp_rank=1, force_query_prefill_dp_rank=True
    )


@pytest.mark.parametrize(
    ("extra", "header"),
    [
        ({"routed_dp_rank": -1}, None),
        ({"disagg_prefill_dp_rank": "1"}, None),
        ({"data_parallel_rank": 2**40}, None),
        ({}, "one"),
        ({}, "-1"),
        ({}, ""),
    ],
)
def test_what_is_no_dp_rank_is_refused_by_name(
    door: Running, backend: FakeBackend, extra: dict[str, Any], header: str | None
) -> None:
    headers = {} if header is None else {"X-Data-Parallel-Rank": header}
    answer = door.post("/v1/chat/completions", chat(**extra), headers=headers)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == next(iter(extra), "routed_dp_rank")
    assert not backend.requests


def test_the_default_is_what_the_context_leaves(door: Running, backend: FakeBackend) -> None:
    door.post("/v1/chat/completions", chat())
    request = backend.requests[0]
    assert request.sampling.max_tokens == CONTEXT - len(request.prompt)
    assert request.sampling.temperature == 1.0
    door.post("/v1/completions", {"model": "tiny", "prompt": "the"})
    assert backend.requests[1].sampling.max_tokens == 16
    backend.context_tokens = 40  # what the workers themselves say
    door.post("/v1/chat/completions", chat())
    assert backend.requests[2].sampling.max_tokens == 40 - len(request.prompt)


def test_prompts_as_token_ids(door: Running, backend: FakeBackend) -> None:
    assert door.post("/v1/completions", {"prompt": [5, 6, 7]}).status_code == 200
    assert door.post("/v1/completions", {"prompt": [[5], [6, 7]]}).status_code == 200
    assert [r.prompt for r in backend.requests] == [[5, 6, 7], [5], [6, 7]]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("include", "text"), [(False, "Paris is the "), (True, "Paris is the ans")])
def test_a_stop_string_over_tokens_ends_both_text_and_work(
    door: Running, backend: FakeBackend, stream: bool, include: bool, text: str
) -> None:
    backend.text = "Paris is the ans wer"
    body = chat(stop=["ans", "never"], stream=stream, include_stop_str_in_output=include)
    answer = door.post("/v1/chat/completions", body)
    if stream:
        parts = [e["choices"][0] for e in events(answer.text)]
        got = "".join(p["delta"].get("content", "") for p in parts)
        last = parts[-1]
    else:
        last = answer.json()["choices"][0]
        got = last["message"]["content"]
    assert got == text
    assert (last["finish_reason"], last["stop_reason"]) == ("stop", "ans")
    assert (backend.completed, backend.cancelled) == ([backend.requests[0].request_id], [])
    assert (
        door.door.metrics.registry.get_sample_value("segue_aborts_total", {"reason": "stop_string"}) is None
    )


# ---- request ids, small endpoints ------------------------------------------------------------------


def test_request_ids(door: Running, backend: FakeBackend) -> None:
    assert (
        door.post("/v1/chat/completions", chat(), headers={"X-Request-ID": "abc-1"}).headers["x-request-id"]
        == "abc-1"
    )
    answer = door.post("/v1/chat/completions", chat(), headers={"X-Request-ID": 'a b"\t<~>' + "x" * 500})
    assert answer.headers["x-request-id"] == ("ab" + "x" * 500)[:128]
    made = [door.post("/v1/chat/completions", chat()).headers["x-request-id"] for _ in range(2)]
    assert len(made[0]) == 32
    assert made[0] != made[1]
    assert door.post("/nope", b"").headers["x-request-id"]
    ids = [r.request_id for r in backend.requests]
    assert len(set(ids)) == len(ids)


def test_small_endpoints(door: Running, backend: FakeBackend) -> None:
    assert door.http.get("/health").json() == {"status": "ok"}
    backend.can_serve = False
    assert "starting" in door.http.get("/ready").json()["reason"]
    assert "version" in door.http.get("/version").json()
    tokens = door.post("/tokenize", {"prompt": "the answer"}).json()
    assert tokens["count"] == len(tokens["tokens"]) == 2
    assert door.post("/detokenize", {"tokens": tokens["tokens"]}).json() == {"prompt": "the answer"}
    assert door.post("/tokenize", {"messages": HI}).json()["count"] > 2
    assert door.post("/detokenize", {"tokens": [10**6]}).status_code == 400
    assert door.http.get("/v1/chat/completions").status_code == 405
    assert door.http.get("/nope").json()["error"]["code"] == "NOT_FOUND"
    assert door.http.delete("/v1/models").json()["error"]["type"] == "invalid_request_error"


def test_lesson_24_every_metric_of_the_door_moves(door: Running, backend: FakeBackend) -> None:
    door.post("/v1/chat/completions", chat())
    backend.refuse = OutOfCapacity("full")
    door.post("/v1/chat/completions", chat())
    assert door.metric("segue_requests_total", endpoint="chat", outcome="ok") == 1
    assert door.metric("segue_requests_total", endpoint="chat", outcome="OUT_OF_CAPACITY") == 1
    assert door.metric("segue_rejected_total") == 1
    assert door.metric("segue_output_tokens_total") == 6
    assert door.metric("segue_prompt_tokens_total") == len(backend.requests[0].prompt)
    assert door.metric("segue_prompt_length_tokens_count") == 1
    assert door.metric("segue_cached_tokens_total", side="decode") == 1
    assert door.metric("segue_ttft_seconds_count") == 1
    assert door.metric("segue_itl_seconds_count") == 5
    assert door.metric("segue_e2e_seconds_count") == 1
    for phase in ("queue", "prefill", "wire"):
        assert door.metric("segue_handoff_seconds_count", phase=phase) == 1
    assert door.metric("segue_aborts_total", reason="error") == 1
    assert door.metric("segue_generations_running") == door.metric("segue_generations_waiting") == 0
    assert "segue_ready 1.0" in door.http.get("/metrics").text


def test_http_and_inference_have_the_metrics_of_opentelemetry_s_conventions(
    door: Running, backend: FakeBackend
) -> None:
    door.post("/v1/completions", {"prompt": "the", "max_tokens": 3})
    door.post("/v1/completions", {"prompt": "the", "max_tokens": 0})
    door.post("/tokenize", {"prompt": "the answer"})
    backend.refuse = TransferFailed("broken")
    door.post("/v1/completions", {"prompt": "the", "max_tokens": 3})
    names = {
        f"{name.replace('.', '_')}_seconds": {attribute.replace(".", "_") for attribute in attributes}
        for name, attributes in (
            (http_metrics.HTTP_SERVER_REQUEST_DURATION, _HTTP),
            (gen_ai_metrics.GEN_AI_SERVER_REQUEST_DURATION, {*_INFERENCE, "error.type"}),
            (gen_ai_metrics.GEN_AI_SERVER_TIME_TO_FIRST_TOKEN, _INFERENCE),
            (gen_ai_metrics.GEN_AI_SERVER_TIME_PER_OUTPUT_TOKEN, _INFERENCE),
        )
    }
    found: dict[str, list[list[str]]] = {name: [] for name in names}
    for family in door.on_loop(lambda: list(door.door.metrics.registry.collect())):
        for sample in family.samples if family.name in found else ():
            if sample.name.endswith("_count"):
                assert sample.labels.keys() == names[family.name]
                found[family.name].append([*sample.labels.values(), sample.value])
    completions = ["POST", "/v1/completions"]
    inference = ["text_completion", "segue", "tiny"]
    assert list(found.values()) == [
        [
            [*completions, "200", "http", "", 1],
            [*completions, "400", "http", "", 1],
            ["POST", "/tokenize", "200", "http", "", 1],
            [*completions, "503", "http", "TRANSFER_FAILED", 1],
        ],
        [[*inference, "", 1], [*inference, "TRANSFER_FAILED", 1]],
        [[*inference, 1]],
        [[*inference, 1]],
    ]


# ---- failures --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (OutOfCapacity("full"), 429),
        (TransferFailed("broke", origin="prefill 1 dp0", phase="TRANSFERRING"), 503),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_failure_before_the_first_token_has_an_honest_status(
    door: Running, backend: FakeBackend, error: Any, status: int, stream: bool
) -> None:
    backend.error_at, backend.error = 0, error
    answer = door.post("/v1/chat/completions", chat(stream=stream))
    assert answer.status_code == status
    body = answer.json()["error"]
    assert set(body) == {"message", "type", "param", "code"}
    assert body["code"] == error.info.code
    assert error.info.origin in body["message"]
    assert ("retry-after" in answer.headers) == (status in (429, 503))


def test_a_failure_in_a_stream_is_an_event_and_a_proper_end(door: Running, backend: FakeBackend) -> None:
    backend.error_at, backend.error = 2, TransferFailed("broke")
    answer = door.post("/v1/chat/completions", chat(stream=True))
    assert answer.status_code == 200
    *text, last = events(answer.text)
    assert "".join(e["choices"][0]["delta"]["content"] for e in text) == "Paris"
    assert last["error"]["code"] == "TRANSFER_FAILED"
    assert door.metric("segue_requests_total", endpoint="chat", outcome="TRANSFER_FAILED") == 1


def test_one_failed_sample_fails_the_request_and_ends_the_others(door: Running, backend: FakeBackend) -> None:
    backend.error_at, backend.error = 2, TransferFailed("broke")
    assert door.post("/v1/chat/completions", chat(n=4)).status_code == 503
    assert door.on_loop(lambda: set(backend.open)) == set()


@pytest.mark.parametrize("stream", [False, True])
def test_lesson_08_a_lost_output_is_an_error_and_not_a_shorter_answer(
    door: Running, backend: FakeBackend, stream: bool
) -> None:
    backend.gap_at = 2
    answer = door.post("/v1/chat/completions", chat(stream=stream))
    error = events(answer.text)[-1]["error"] if stream else answer.json()["error"]
    assert error["code"] == "INTERNAL"
    assert stream or answer.status_code == 500
    assert backend.cancelled


def test_a_bug_is_one_requests_error(door: Running, backend: FakeBackend) -> None:
    def broken(request: Any, *, budget_s: float) -> Any:
        raise ZeroDivisionError("a bug")

    backend.submit = broken  # type: ignore[method-assign]
    answer = door.post("/v1/chat/completions", chat())
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "INTERNAL")
    del backend.submit  # type: ignore[attr-defined]
    assert door.post("/v1/chat/completions", chat()).status_code == 200


def test_the_door_has_a_deadline_of_its_own(tokenizer: ModelTokenizer) -> None:
    backend = FakeBackend(tokenizer, hang_at=0)
    limits = Limits(request_budget_s=DEADLINE_S, drain_s=2)
    with serve(backend, tokenizer, jumping=True, limits=limits) as door, ThreadPoolExecutor(1) as client:
        asked = client.submit(door.post, "/v1/chat/completions", chat())
        assert backend.reached.wait(DEADLINE_S)
        door.over(DEADLINE_S + door.door.settings.grace_s)
        answer = asked.result()
        assert answer.status_code == 504
        assert backend.cancelled


# ---- clients that leave or do not read -------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_the_work(door: Running, backend: FakeBackend, stream: bool) -> None:
    backend.hang_at = 2
    asked = http_post("/v1/chat/completions", chat(stream=stream))
    with socket.create_connection(("127.0.0.1", door.port)) as sock:
        sock.sendall(asked.replace(b"host: x", b"host: x\r\nx-request-id: left"))
        assert backend.reached.wait(DEADLINE_S)
        assert door.metric("segue_output_tokens_total") == 2, "tokens count when they are sent"
    assert backend.ended.wait(DEADLINE_S)
    assert [r for r, _ in backend.cancelled] == [backend.requests[0].request_id]
    assert backend.cancelled[0][1].code is ErrorCode.ABORTED_BY_CLIENT
    asyncio.run_coroutine_threadsafe(door.door.idle(), door.loop).result(DEADLINE_S)
    outcome = {"endpoint": "chat", "outcome": "ABORTED_BY_CLIENT"}
    assert door.metric("segue_requests_total", **outcome) == 1
    assert door.metric("segue_aborts_total", reason="client") == 1
    assert door.metric("segue_output_tokens_total") == 2
    [record] = door.on_loop(lambda: door.door.records.find("left"))
    assert (record.facts["status"], record.error.code.value) == (499, "ABORTED_BY_CLIENT")


def test_a_client_that_does_not_read_is_bounded_and_then_cut(tokenizer: ModelTokenizer) -> None:
    backend = FakeBackend(tokenizer, endless=True, text="the answer " * 20)
    backend.context_tokens = 2_000_000
    with (
        serve(backend, tokenizer, stall_s=0.3) as door,
        socket.socket() as sock,
    ):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", door.port))
        sock.sendall(http_post("/v1/chat/completions", chat(stream=True, max_tokens=1_000_000)))
        assert backend.ended.wait(DEADLINE_S)
        # What was generated is what fits into socket buffers, not the million that was asked for.
        assert backend.sent < 200_000
        assert door.post("/v1/chat/completions", chat(max_tokens=3)).status_code == 200


def test_a_connection_that_is_reset_in_the_body_is_harmless(door: Running) -> None:
    sock = socket.create_connection(("127.0.0.1", door.port))
    sock.sendall(http_post("/v1/chat/completions", b"{", 100))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()
    assert door.post("/v1/chat/completions", chat()).status_code == 200


def test_the_log_names_each_request_in_one_style(
    door: Running, backend: FakeBackend, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "segue.frontend")

    def logged(path: str, status: int) -> str:
        body = {"messages": [{"role": "user", "content": "hi"}], "prompt": "a", "max_tokens": 2}
        assert door.post(path, body, headers={"x-request-id": "mine"}).status_code == status
        door.on_loop(lambda: None)
        [record] = caplog.records
        line = logs.TextFormatter("").format(record).split(" segue.frontend ")[1]
        caplog.clear()
        return line

    start, end = r"event=answered endpoint=%s status=%d seconds=\d+\.\d{3}", " request_id=mine"
    assert re.fullmatch(start % ("chat", 200) + end, logged("/v1/chat/completions", 200))
    backend.refuse = OutOfCapacity("full up")
    assert re.fullmatch(
        start % ("completions", 429) + " code=OUT_OF_CAPACITY reason='full up'" + end,
        logged("/v1/completions", 429),
    )
