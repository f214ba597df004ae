"""The door's side of a request: every answer's status and headers, what is recorded, what waits and ends."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest
from frontend_rig import DEADLINE_S, FakeBackend, Running, Told, Wire, cycle_over, http_post, serve
from test_http import chat, events

from segue.engine.request import Output, Request, SamplingParams
from segue.kv.errors import (
    DeadlineExceeded,
    OutOfCapacity,
    RequestTooLarge,
    SegueError,
    TransferFailed,
)
from segue.server.frontend.frontend_process import keep_proving, model_bounds
from segue.server.frontend.generate import Meter, Piece, Sample, generate
from segue.server.frontend.http_call import HttpCall
from segue.server.frontend.params import Text
from segue.server.frontend.request_memory import MemoryBudget, RequestMemory
from segue.server.frontend.tokenizer import ModelTokenizer
from segue.server.frontend.trace_context import TraceContext
from segue.server.http.http_exchange import EXCHANGE, HttpExchange
from segue.server.observe.metrics import Metrics

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
BODIES = {CHAT: chat(max_tokens=3), TEXT: {"prompt": "the", "max_tokens": 3}}
INFERENCE = ("chat", "segue", "tiny")
LEAVES = [leaf for leaf in SegueError.__subclasses__() if leaf.__name__ != "ConfigError"]
KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    408: "invalid_request_error",
    409: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    499: "request_cancelled",
    500: "server_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


@pytest.fixture(scope="module")
def shared(tokenizer: ModelTokenizer) -> Iterator[Running]:
    with serve(FakeBackend(tokenizer), tokenizer) as running:
        yield running


@pytest.mark.parametrize("leaf", LEAVES, ids=[leaf.__name__ for leaf in LEAVES])
def test_every_error_has_its_own_status_body_and_headers(shared: Running, leaf: type[SegueError]) -> None:
    backend: Any = shared.door.backend
    for retry_after_s in (1, 23):
        backend.refuse = leaf("what went wrong")
        backend.refuse.retry_after_s = retry_after_s
        answer = shared.post(CHAT, chat(stream=True), headers={"X-Request-ID": "mine"})
        assert answer.status_code == leaf.status
        error = answer.json()["error"]
        assert (error["type"], error["code"], error["message"]) == (
            KINDS[leaf.status],
            leaf.code.value,
            "what went wrong",
        )
        again = str(retry_after_s) if leaf.status in (429, 503) else None
        assert answer.headers.get("retry-after") == again
        assert (answer.headers.get("connection") == "close") is (leaf.status in (408, 413))
        assert answer.headers["x-request-id"] == "mine"
        assert answer.headers["content-type"] == "application/json"
    backend.refuse = None


@pytest.mark.parametrize("path", BODIES)
def test_a_stream_says_what_it_is_and_proxies_are_told_to_hold_nothing_back(
    shared: Running, path: str
) -> None:
    body = BODIES[path] | {"stream": True}
    answer = shared.post(path, body, headers={"X-Request-ID": "mine"})
    headers = {
        name: answer.headers.get(name) for name in ("x-request-id", "cache-control", "x-accel-buffering")
    }
    assert headers == {"x-request-id": "mine", "cache-control": "no-cache", "x-accel-buffering": "no"}
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert all(event["choices"] for event in events(answer.text)), "nobody has asked for the usage"
    asked = shared.post(path, body | {"stream_options": {"include_usage": True}})
    *_, last = events(asked.text)
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 3)
    assert shared.post(path, BODIES[path], headers={"X-Request-ID": "mine"}).headers["x-request-id"] == "mine"


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "PATCH"])
def test_only_a_post_generates_and_what_is_allowed_is_said(shared: Running, method: str, path: str) -> None:
    backend: Any = shared.door.backend
    before = len(backend.requests)
    answer = shared.http.request(method, path, json=BODIES[path])
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert len(backend.requests) == before


def test_ready_is_both_somebody_there_and_proof_in_the_answer_and_in_the_metric(
    door: Running, backend: FakeBackend
) -> None:
    for can_serve, proven in ((True, True), (True, False), (False, True), (False, False)):
        backend.can_serve, backend.proven = can_serve, proven
        ready = can_serve and proven
        answer = door.http.get("/ready")
        assert (answer.status_code, answer.json()["ready"]) == (200 if ready else 503, ready)
        assert answer.headers.get("retry-after") == (None if ready else "1")
        assert f"segue_ready {float(ready)}" in door.http.get("/metrics").text


def test_token_ids_and_texts_at_their_edges(door: Running) -> None:
    """The vocabulary has 330 ids, of which the tokenizer knows fewer."""
    assert door.post("/detokenize", {"tokens": [329]}).status_code == 200
    for token in (330, -1):
        assert door.post("/detokenize", {"tokens": [token]}).status_code == 400
    ids = door.post("/tokenize", {"prompt": "the<|im_end|>"}).json()["tokens"]
    assert door.post("/detokenize", {"tokens": ids}).json() == {"prompt": "the<|im_end|>"}
    asked: list[bool] = []
    encode = door.door.tokenizer.encode

    class Noting:
        def encode(self, text: str, *, special: bool, most: int) -> list[int]:
            asked.append(special)
            return encode(text, special=special, most=most)

    tokenizer, door.door.tokenizer = door.door.tokenizer, Noting()  # type: ignore[assignment]
    for special in (None, True, False):
        door.post("/tokenize", {"prompt": "the", "add_special_tokens": special})
    door.door.tokenizer = tokenizer
    assert asked == [True, True, False]


def test_the_bounds_are_the_model_s_own_word(model_folder: Any, tokenizer: ModelTokenizer) -> None:
    assert model_bounds(model_folder, tokenizer) == (512, 330)


# ---- what is recorded --------------------------------------------------------------------------------


def test_each_request_that_was_planned_is_recorded_with_how_it_ended(
    door: Running, backend: FakeBackend
) -> None:
    def recorded(name: str) -> list[Any]:
        found: list[Any] = door.on_loop(lambda: door.door.records.find(name))
        return found

    door.post(CHAT, chat(), headers={"X-Request-ID": "well"})
    backend.error_at, backend.error = 2, TransferFailed("broke")
    door.post(CHAT, chat(stream=True), headers={"X-Request-ID": "streamed"})
    backend.error_at = 0
    door.post(CHAT, chat(), headers={"X-Request-ID": "badly"})
    backend.error_at = None
    door.post(CHAT, chat(n=0), headers={"X-Request-ID": "refused"})
    for name, status, code in (
        ("well", 200, None),
        ("streamed", 200, "TRANSFER_FAILED"),
        ("badly", 503, "TRANSFER_FAILED"),
    ):
        [record] = recorded(name)
        assert (record.where, record.facts["status"]) == ("frontend http", status)
        assert (record.error and record.error.code.value) == code
        assert [step.name for step in record.steps] == ["read chat", "generate"]
        assert 0 <= record.steps[1].at_s <= record.seconds
    assert recorded("refused") == [], "nothing was to be run"


def test_a_span_of_our_own_is_what_all_samples_are_told_and_the_record_has_both(
    door: Running, backend: FakeBackend
) -> None:
    parent = f"00-{'a' * 32}-{'b' * 16}-01"
    child, span = (f"00-{'a' * 32}-{digit * 16}-01" for digit in "cd")
    door.door.trace = lambda said: TraceContext(said, child, span)
    door.post(CHAT, chat(n=3), headers={"traceparent": parent, "X-Request-ID": "own"})
    assert [request.traceparent for request in backend.requests] == [child] * 3
    [record] = door.on_loop(lambda: door.door.records.find("own"))
    assert (record.traceparent, record.span) == (parent, span)
    assert (record.inner.span, record.inner.name) == (child, "chat tiny")


# ---- times and waits ---------------------------------------------------------------------------------


def test_what_a_body_took_to_come_is_no_time_for_its_answer(shared: Running) -> None:
    budget_s = shared.door.settings.limits.request_budget_s
    now = time.monotonic()
    assert budget_s - 100 - DEADLINE_S < shared.door.budget_s(now - 100) <= budget_s - 100
    with pytest.raises(DeadlineExceeded, match="before it was placed"):
        shared.door.budget_s(now - budget_s)


def test_a_drain_waits_for_every_request_and_not_for_the_first(door: Running, backend: FakeBackend) -> None:
    backend.hang_at = 0
    with socket.create_connection(("127.0.0.1", door.port)) as sock:
        sock.sendall(http_post(CHAT, chat()))
        assert backend.reached.wait(DEADLINE_S)
        waiting = asyncio.run_coroutine_threadsafe(door.door.idle(), door.loop)
        assert door.post(CHAT, chat(n=0)).status_code == 400
        assert door.on_loop(lambda: door.door.calls) == 1
        assert not waiting.done()
    waiting.result(DEADLINE_S)


# ---- bodies ------------------------------------------------------------------------------------------


def test_bodies_that_come_at_once_share_one_bound() -> None:
    budget = MemoryBudget(10)
    first, second = RequestMemory(budget), RequestMemory(budget)
    first.add(6)
    with pytest.raises(OutOfCapacity):
        second.add(5)
    second.add(4)
    first.set(0)
    second.set(10)
    assert (first.nbytes, second.nbytes, budget.used_bytes) == (0, 10, 10)


def test_a_body_without_an_end_is_read_for_a_while_and_not_held() -> None:
    budget, read = MemoryBudget(100), 0
    held = RequestMemory(budget)

    async def receive() -> dict[str, Any]:
        nonlocal read
        read += 10
        assert budget.used_bytes <= 20
        return {"type": "http.request", "body": b"x" * 10, "more_body": True}

    async def main() -> None:
        exchange = HttpExchange(cycle_over(Wire()))
        call = HttpCall({"headers": [], EXCHANGE: lambda: exchange}, receive)
        with pytest.raises(RequestTooLarge):
            await call.body(20, held, timeout_s=DEADLINE_S)

    asyncio.run(main())
    assert (read, budget.used_bytes) == (170, 0), "eight times what is allowed, and a piece"


# ---- samples -----------------------------------------------------------------------------------------


class Pieces:
    """A backend that gives each request some outputs, and then waits for ever."""

    def __init__(self, *outputs: Output) -> None:
        self.outputs = outputs
        self.cancelled: list[str] = []
        self.completed: list[str] = []

    def submit(self, request: Request, *, budget_s: float) -> Told:
        async def run() -> Any:
            for output in self.outputs:
                yield output
            await asyncio.Event().wait()

        return Told(run())

    def complete(self, request_id: str) -> None:
        self.completed.append(request_id)

    def cancel(self, request_id: str, reason: object) -> None:
        self.cancelled.append(request_id)


def test_a_stop_string_ends_the_work_also_where_the_client_is_behind(tokenizer: ModelTokenizer) -> None:
    ids = tokenizer.encode("the answer is", special=False)
    sample = Sample(
        Request(request_id="r", prompt=[1], sampling=SamplingParams()), Text(stops=("answer",)), tokenizer
    )
    backend = Pieces(Output(request_id="r", token_ids=ids))
    taken: list[Piece] = []

    async def never() -> None:
        await asyncio.Event().wait()

    def take(index: int, piece: Piece) -> Any:
        taken.append(piece)
        return never

    metrics = Metrics()

    async def main() -> None:
        meter = Meter(metrics, time.monotonic, 0.0, INFERENCE)
        async with asyncio.timeout(DEADLINE_S):
            await generate(backend, [sample], meter, take, budget_s=1)  # type: ignore[arg-type]

    asyncio.run(main())
    assert (backend.completed, backend.cancelled) == (["r"], [])
    assert metrics.registry.get_sample_value("segue_e2e_seconds_count") == 1, "it has ended well"
    assert (taken[0].text, taken[0].stop_reason) == ("the ", "answer")
    assert sample.tokens == len(taken[0].token_ids) < len(ids), "what came after it is not billed"


def test_a_bug_in_one_sample_ends_the_work_of_all(tokenizer: ModelTokenizer) -> None:
    backend = Pieces(Output(request_id="r", token_ids=[5]))
    samples = [
        Sample(Request(request_id=f"r{i}", prompt=[1], sampling=SamplingParams()), Text(), tokenizer)
        for i in range(3)
    ]

    def take(index: int, piece: Piece) -> None:
        if index == 1:
            raise ZeroDivisionError

    async def main() -> None:
        meter = Meter(Metrics(), time.monotonic, 0.0, INFERENCE)
        with pytest.raises(ZeroDivisionError):
            await generate(backend, samples, meter, take, budget_s=1)  # type: ignore[arg-type]
        assert sorted(backend.cancelled) == ["r0", "r1", "r2"], "by the time that the request is answered"

    asyncio.run(main())


# ---- the canary --------------------------------------------------------------------------------------


class Failing(FakeBackend):
    """A fleet of which nothing is proven, and on which every canary fails."""

    def submit(self, request: Request, *, budget_s: float) -> Told:
        self.requests.append(request)
        raise TransferFailed("broke")


def test_a_canary_that_fails_is_sent_again_after_a_pause_and_is_another_request(
    tokenizer: ModelTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 4:
            raise asyncio.CancelledError

    monkeypatch.setattr("segue.server.frontend.frontend_process.asyncio.sleep", sleep)
    backend = Failing(tokenizer, proven=False)
    with contextlib.suppress(asyncio.CancelledError):
        asyncio.run(keep_proving(backend, [5, 6]))
    assert pauses == [0.2, 0.4, 0.8, 1.6]
    assert len({request.request_id for request in backend.requests}) == len(backend.requests) == 4
    for request in backend.requests:
        params = request.sampling
        assert (params.max_tokens, params.min_tokens, params.ignore_eos) == (2, 2, True), "decode's own too"
