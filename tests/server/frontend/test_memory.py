"""The memory of requests is counted, bounded and released; and no body takes the others' time."""

from __future__ import annotations

import asyncio
import gc
import json
import re
import select
import socket
import sys
import threading
import time
import tracemalloc
import weakref
from contextlib import ExitStack
from typing import Any

import msgspec
import pytest
from frontend_rig import CONTEXT, DEADLINE_S, FakeBackend, Running, http_post, make_tokenizer, serve

from segue.kv.limits import Limits
from segue.server.frontend import app
from segue.server.frontend import request_memory as memory
from segue.server.frontend.answers import CompletionAnswer
from segue.server.frontend.app import OpenAIServer
from segue.server.frontend.body_reader import BODIES, read_body
from segue.server.frontend.legs import legs_of
from segue.server.frontend.native import as_completion, native_plan, read_native
from segue.server.frontend.params import MAX_KEPT_LOGPROBS, ModelCard
from segue.server.frontend.plan import Planner
from segue.server.frontend.problems import BadParam
from segue.server.frontend.request_fields import (
    ChatBody,
    CompletionBody,
)
from segue.server.frontend.responses_api import ResponsesAnswer
from segue.server.frontend.tokenizer import ModelTokenizer

CHAT = "/v1/chat/completions"
MIB = 2**20
MOST = 32 * MIB


def waiting_posts(
    running: Running, backend: FakeBackend, raw: bytes, count: int, stack: ExitStack, path: str = CHAT
) -> None:
    """So many requests of the body `raw`, which wait for their tokens until `stack` is left."""
    for _ in range(count):
        backend.reached.clear()
        client = stack.enter_context(socket.create_connection(("127.0.0.1", running.port), DEADLINE_S))
        client.sendall(http_post(path, raw))
        assert backend.reached.wait(DEADLINE_S)


@pytest.mark.parametrize("reads", ["nothing", "all", "leaves"])
def test_an_answer_that_its_client_does_not_read_counts_until_it_is_read_or_cut(
    tokenizer: ModelTokenizer, reads: str
) -> None:
    asked = http_post("/tokenize", {"prompt": "\u00e9" * 410_000})
    limits = Limits(max_body_bytes=4 * MIB, drain_s=2)
    answered = threading.Event()
    with (
        serve(FakeBackend(tokenizer), tokenizer, jumping=True, limits=limits) as running,
        socket.socket() as client,
    ):
        running.door.metrics.finished = lambda *_: answered.set()  # type: ignore[method-assign]
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(DEADLINE_S)
        client.connect(("127.0.0.1", running.port))
        client.sendall(asked)
        assert answered.wait(DEADLINE_S)
        assert running.on_loop(lambda: running.door.memory.used_bytes) > MIB
        got = 0
        if reads == "leaves":
            client.close()
        elif reads == "nothing":
            running.over(31)
            running.over(31)
        else:
            head_bytes, _, begun = client.recv(MIB).partition(b"\r\n\r\n")
            size = int(re.findall(rb"(?i)content-length: (\d+)", head_bytes)[0])
            assert size > 3 * MIB
            got = len(begun)
            while got < size:
                got += len(client.recv(MIB))
        while running.on_loop(lambda: running.door.memory.used_bytes):
            pass
        if reads == "nothing":
            while piece := client.recv(MIB):
                got += len(piece)
            assert got < 3 * MIB, "it was not cut"


def body_of(nbytes: int, **more: Any) -> bytes:
    hi = [{"role": "user", "content": "hi"}]
    return msgspec.json.encode({"messages": hi, "user": "x" * nbytes, "metadata": "y" * nbytes, **more})


LONG = "x" * (MIB // 3)
#: Bodies of MiBs; those of Responses have fields that each of its events repeats.
LONG_BODIES: dict[str, dict[str, Any]] = {
    "chat": {"messages": [{"role": "user", "content": "hi"}], "user": LONG, "metadata": LONG},
    "messages": {
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 9,
        "metadata": {"user_id": LONG, "more": LONG},
    },
    "responses": {"input": "hi", "user": LONG, "metadata": {"more": LONG}},
    "responses, nothing repeated": {"input": "hi", "include": [LONG, LONG]},
}


@pytest.mark.parametrize("hang_at", [0, 2])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", LONG_BODIES)
def test_a_request_that_waits_keeps_no_more_than_it_counts(
    api: str, stream: bool, hang_at: int, tokenizer: ModelTokenizer
) -> None:
    """Messages and Responses kept body and decoded fields to the end, uncounted; 40 of 8 MiB took 640 MiB.
    Streams of Responses wait with two events that repeat fields, and that nobody reads."""
    path = {"chat": CHAT, "messages": "/v1/messages"}.get(api, "/v1/responses")
    backend, count = FakeBackend(tokenizer, hang_at=hang_at), 6
    with serve(backend, tokenizer) as running, ExitStack() as stack:
        raw = msgspec.json.encode(LONG_BODIES[api] | {"stream": stream})
        waiting_posts(running, backend, raw, 1, stack, path)  # what is made once
        before_used = running.on_loop(lambda: running.door.memory.used_bytes)
        tracemalloc.start()
        stack.callback(tracemalloc.stop)
        before, _ = tracemalloc.get_traced_memory()
        waiting_posts(running, backend, raw, count, stack, path)
        after, _ = tracemalloc.get_traced_memory()
        used = running.on_loop(lambda: running.door.memory.used_bytes) - before_used
        assert running.on_loop(lambda: running.door.calls) == count + 1
    assert after - before < used + len(raw) // 2
    if api != "responses":
        assert used < len(raw), "the body is gone"


#: A template that shows the names of tools, and not their parameters.
NAMES = (
    "{% for tool in tools or [] %}<tool_call>{{ tool.function.name }}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
)
PARAMETERS = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(8000)}}
TOOLS: dict[str, dict[str, Any]] = {
    CHAT: {"tools": [{"type": "function", "function": {"name": "f", "parameters": PARAMETERS}}]},
    "/v1/messages": {"max_tokens": 9, "tools": [{"name": "f", "input_schema": PARAMETERS}]},
}


@pytest.mark.parametrize("path", TOOLS)
def test_tools_that_a_template_does_not_show_count_while_calls_are_read_with_them(path: str) -> None:
    """They were held to the end, uncounted: eleven times the bytes of a body."""
    tokenizer = ModelTokenizer(make_tokenizer(NAMES))
    backend = FakeBackend(tokenizer, hang_at=0)
    raw = msgspec.json.encode({"messages": [{"role": "user", "content": "hi"}]} | TOOLS[path])
    with serve(backend, tokenizer) as running, ExitStack() as stack:
        waiting_posts(running, backend, raw, 1, stack, path)  # what is made once
        tracemalloc.start()
        stack.callback(tracemalloc.stop)
        before_used = running.on_loop(lambda: running.door.memory.used_bytes)
        before, _ = tracemalloc.get_traced_memory()
        waiting_posts(running, backend, raw, 2, stack, path)
        after, _ = tracemalloc.get_traced_memory()
        used = running.on_loop(lambda: running.door.memory.used_bytes) - before_used
    assert after - before < used + len(raw) // 2


def test_events_that_a_client_does_not_read_count(tokenizer: ModelTokenizer) -> None:
    body = {"input": "hi", "user": "x" * 6 * MIB, "stream": True}
    backend = FakeBackend(tokenizer, endless=True)
    limits = Limits(max_body_bytes=8 * MIB, drain_s=2)
    with serve(backend, tokenizer, limits=limits) as running, ExitStack() as stack:
        client = stack.enter_context(socket.socket())
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(DEADLINE_S)
        client.connect(("127.0.0.1", running.port))
        client.sendall(http_post("/v1/responses", body))
        until = time.monotonic() + DEADLINE_S
        # Its fields twice, and most of the two events that begin the stream.
        while running.on_loop(lambda: running.door.memory.used_bytes) < 18 * MIB or not backend.requests:
            assert time.monotonic() < until
        client.close()
        while running.on_loop(lambda: running.door.memory.used_bytes):
            assert time.monotonic() < until


@pytest.mark.parametrize("stream", [False, True])
def test_the_fields_that_a_response_repeats_are_encoded_in_a_thread(
    stream: bool, tokenizer: ModelTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    where: list[str] = []
    make = ResponsesAnswer.__init__

    def noted(answer: ResponsesAnswer, *given: Any) -> None:
        where.append(threading.current_thread().name)
        make(answer, *given)

    monkeypatch.setattr(ResponsesAnswer, "__init__", noted)
    with serve(FakeBackend(tokenizer), tokenizer) as running:
        raw = msgspec.json.encode(LONG_BODIES["responses"] | {"stream": stream})
        assert running.post("/v1/responses", raw).text.count(LONG) == (6 if stream else 2)
    assert [name.split("_")[0] for name in where] == ["tokenize"]


def test_what_a_client_that_left_had_asked_of_a_thread_is_not_kept_in_its_queue(
    tokenizer: ModelTokenizer,
) -> None:
    class Body:
        def read(self) -> None: ...

    free = threading.Event()

    async def left(door: OpenAIServer) -> weakref.ref[Body]:
        body = Body()
        kept = weakref.ref(body)
        asked = asyncio.create_task(door.off_loop(MIB, body.read))
        del body
        await asyncio.sleep(0)
        assert kept() is not None
        asked.cancel()
        await asyncio.wait({asked})
        return kept

    with serve(FakeBackend(tokenizer), tokenizer, tokenizer_threads=1) as running, ExitStack() as stack:
        stack.callback(free.set)
        busy = running.door.off_loop(MIB, lambda: free.wait(DEADLINE_S))
        asyncio.run_coroutine_threadsafe(busy, running.loop)
        kept = asyncio.run_coroutine_threadsafe(left(running.door), running.loop).result(DEADLINE_S)
        gc.collect()
        assert kept() is None


def test_an_answer_that_is_whole_is_never_refused_for_the_work_of_others(tokenizer: ModelTokenizer) -> None:
    free = threading.Event()
    limits = Limits(max_body_bytes=MIB, max_queue=1, drain_s=2)
    with serve(FakeBackend(tokenizer, endless=True), tokenizer, limits=limits, inline_bytes=1000) as running:
        asyncio.run_coroutine_threadsafe(
            running.door.off_loop(MIB, lambda: free.wait(DEADLINE_S)), running.loop
        )
        answer = running.post(CHAT, body_of(1, max_tokens=200))
        free.set()
    assert answer.status_code == 200, answer.text


def test_beyond_what_requests_may_keep_the_next_one_is_refused_and_none_of_the_others(
    tokenizer: ModelTokenizer,
) -> None:
    backend = FakeBackend(tokenizer, hang_at=0)
    with serve(backend, tokenizer) as running:
        budget = running.door.memory
        budget.limit_bytes = 4 * memory.SAMPLE_BYTES
        with ExitStack() as stack:
            waiting_posts(running, backend, body_of(10), 3, stack)
            answer = running.post(CHAT, body_of(10))
            assert answer.status_code == 429
            assert int(answer.headers["retry-after"]) >= 1
            assert running.on_loop(lambda: running.door.calls) == 3
        backend.hang_at = None
        while running.on_loop(lambda: running.door.calls):
            pass
        assert budget.used_bytes == 0
        assert running.post(CHAT, body_of(10)).status_code == 200
        assert budget.used_bytes == 0


def test_large_bodies_do_not_have_small_requests_refused(tokenizer: ModelTokenizer) -> None:
    backend = FakeBackend(tokenizer)
    with serve(backend, tokenizer) as running, ExitStack() as stack:
        budget = running.door.memory
        budget.limit_bytes = MIB
        sent = MIB - 4096  # of a body that never ends
        large = stack.enter_context(socket.create_connection(("127.0.0.1", running.port), DEADLINE_S))
        large.sendall(http_post(CHAT, b" " * sent, 2 * MIB))
        until = time.monotonic() + DEADLINE_S
        while budget.used_bytes < sent and not select.select([large], [], [], 0)[0]:
            assert time.monotonic() < until
        assert running.post(CHAT, body_of(10)).status_code == 200


def test_refused_bodies_are_let_go_without_the_garbage_collector(tokenizer: ModelTokenizer) -> None:
    raw = b" " * (MIB - 100)
    with serve(FakeBackend(tokenizer), tokenizer) as running, ExitStack() as stack:
        running.door.memory.limit_bytes = MIB
        assert running.post(CHAT, raw).status_code == 429
        gc.collect()
        gc.disable()
        stack.callback(gc.enable)
        tracemalloc.start()
        stack.callback(tracemalloc.stop)
        for _ in range(8):
            assert running.post(CHAT, raw).status_code == 429
        until = time.monotonic() + DEADLINE_S
        while running.on_loop(lambda: running.door.calls):
            assert time.monotonic() < until
        assert tracemalloc.get_traced_memory()[0] < MIB


@pytest.mark.parametrize(
    "content",
    [b"[]," * 150_000, b'{"a":1},' * 150_000, b"1," * 850_000, b"1.5," * 150_000, b"1e5," * 150_000],
    ids=["lists", "objects", "numbers", "fractions", "exponents"],
)
def test_a_body_of_more_values_than_can_be_decoded_at_once_is_refused_undecoded(
    content: bytes, tokenizer: ModelTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = Limits(max_body_bytes=4 * MIB, drain_s=2)
    with serve(FakeBackend(tokenizer), tokenizer, limits=limits) as running:
        monkeypatch.setattr(app, "read_body", None)
        answer = running.post(CHAT, b'{"messages":[' + content + b"1]}")
        assert answer.status_code == 413
        assert "when it is decoded" in answer.json()["error"]["message"]
        assert running.on_loop(lambda: running.door.memory.used_bytes) == 0


def test_a_longer_context_may_have_more_values(tokenizer: ModelTokenizer) -> None:
    raw, limits = body_of(0, stop_token_ids=[5] * 850_000), Limits(max_body_bytes=4 * MIB, drain_s=2)
    for context_tokens, status in ((CONTEXT, 413), (200_000, 400)):
        backend = FakeBackend(tokenizer, context_tokens=context_tokens)
        with serve(backend, tokenizer, limits=limits) as running:
            assert running.post(CHAT, raw).status_code == status


def test_a_long_text_has_few_values() -> None:
    prose = "One sentence, as people write them, has few commas: and many letters e. " * 10_000
    raw = body_of(0, prompt=prose)
    assert memory.decoded_bytes(raw, MOST) > len(raw)


@pytest.mark.parametrize("text", ["plain", "\u00e9", "\u4f60", "\U0001f600"])
@pytest.mark.parametrize("escaped", [False, True])
def test_what_decoding_takes_is_not_counted_as_less(text: str, escaped: bool) -> None:
    encode = msgspec.json.encode
    bodies: list[Any] = [
        [text * 10_000 + "\U0001f600"],
        [{"a": i} for i in range(2000)],
        [[]] * 1000,
        list(range(5000)),
    ]
    for body in bodies:
        raw = encode(body) if not escaped else json.dumps(body).encode()
        tracemalloc.start()
        try:
            made = msgspec.json.decode(raw)
            taken, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert made
        assert memory.decoded_bytes(raw, MOST) >= taken - 1000


def test_no_field_is_a_float_whose_slow_reading_anybody_could_ask_for() -> None:
    """msgspec needs a hundred times as long for 1.5e300 where a field is typed as a float."""
    for body in BODIES.values():
        assert "FloatType" not in repr(msgspec.inspect.type_info(body.kind)), body.kind


@pytest.mark.parametrize("number", ["1e999", "-1e999"])
def test_a_number_that_is_none_is_refused_where_it_stands(number: str) -> None:
    chat = b'{"messages":[{"role":"user","content":%s}]}' % number.encode()
    with pytest.raises(BadParam, match=r"content|range"):
        read_body(chat, ChatBody)
    with pytest.raises(BadParam, match="range"):
        read_native(b'{"text":"x","sampling_params":{"temperature":%s}}' % number.encode())
    with pytest.raises(BadParam, match="range"):
        legs_of(b'{"kv_transfer_params":{"a":%s}}' % number.encode())


@pytest.mark.parametrize("field", ["temperature", "top_p", "logit_bias"])
@pytest.mark.parametrize("value", ["hot", True, [1.0], {"a": 1}, 10**400, 1e300], ids=str)
def test_what_is_no_number_or_far_out_of_range_is_a_400_that_names_it(
    field: str, value: Any, door: Running
) -> None:
    given = {"1": value} if field == "logit_bias" else value
    raw = json.dumps({"messages": [{"role": "user", "content": "hi"}], field: given}).encode()
    answer = door.post(CHAT, raw)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith(field)


def test_a_number_of_thousands_of_digits_is_refused(door: Running) -> None:
    raw = b'{"messages":[{"role":"user","content":[%s]}]}' % (b"1" * 1000)
    answer = door.post(CHAT, raw)
    assert answer.status_code == 400
    assert "out of range" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("more", "fits"),
    [
        ({"n": 128, "max_tokens": 300, "top_logprobs": 20}, True),
        ({"n": 128, "max_tokens": 400, "top_logprobs": 20}, False),
        ({"n": 128, "max_tokens": 400, "top_logprobs": 20, "stream": True}, True),
        ({"n": 128, "max_tokens": 400, "top_logprobs": 0}, True),
    ],
    ids=str,
)
def test_more_log_probabilities_than_an_answer_keeps_are_refused_before_anything_runs(
    more: dict[str, Any], fits: bool, tokenizer: ModelTokenizer
) -> None:
    plan = Planner(tokenizer).chat
    raw = body_of(1, logprobs=True, **more)
    card = ModelCard(name="tiny", context_tokens=512, vocab_size=330)
    if fits:
        assert len(plan(read_body(raw, ChatBody), card, "id").samples) == 128
        return
    with pytest.raises(BadParam, match="lower n, max_tokens or the number of alternatives, or set stream"):
        plan(read_body(raw, ChatBody), card, "id")


@pytest.mark.parametrize("n", [1, 3, 128])
@pytest.mark.parametrize("top", [0, 5, 20])
@pytest.mark.parametrize("context", [512, 131_072, 2**22])
def test_who_names_no_number_of_tokens_gets_as_many_as_the_answer_may_keep(
    n: int, top: int, context: int, tokenizer: ModelTokenizer
) -> None:
    """A context of 131,072 tokens, none of which are asked for, with 20 alternatives was refused."""
    card = ModelCard(name="tiny", context_tokens=context, vocab_size=330)

    def most(**more: Any) -> int:
        raw = body_of(1, n=n, logprobs=True, top_logprobs=top, **more)
        request = Planner(tokenizer).chat(read_body(raw, ChatBody), card, "id").samples[0].request
        assert request.sampling.max_tokens + len(request.prompt) <= context
        return request.sampling.max_tokens

    room = most(stream=True)
    assert most() == min(room, MAX_KEPT_LOGPROBS // (n * (1 + top)))


def test_log_probabilities_of_prompts_come_at_once_and_are_bounded_in_streams_too(
    tokenizer: ModelTokenizer,
) -> None:
    body = CompletionBody(prompt=[[5] * 400] * 128, echo=True, logprobs=20, max_tokens=1, stream=True)
    card = ModelCard(name="tiny", context_tokens=512, vocab_size=330)
    for stream in (True, False):  # to stream would not help
        asked = msgspec.structs.replace(body, stream=stream)
        with pytest.raises(BadParam, match=r"log-probabilities .* or the number of alternatives$"):
            Planner(tokenizer).completion(asked, card, "id")


def test_sglang_s_streams_keep_what_they_have_said_and_are_bounded_as_whole_answers(
    tokenizer: ModelTokenizer,
) -> None:
    asked = {"text": "a", "stream": True, "return_logprob": True, "top_logprobs_num": 20}
    asked["sampling_params"] = {"n": 128, "max_new_tokens": 400}
    native = read_native(msgspec.json.encode(asked))
    card = ModelCard(name="tiny", context_tokens=512, vocab_size=330)
    with pytest.raises(BadParam, match="log-probabilities"):
        native_plan(Planner(tokenizer), native, as_completion(native), card, "id")


@pytest.mark.parametrize(
    ("body", "n", "fits"),
    [
        ({"prompt": "a" * 70_000, "echo": True}, 128, False),
        ({"prompt": "a" * 70_000, "echo": True}, 2, True),
        ({"prompt": [5] * 12_000, "return_token_ids": True}, 128, False),
        ({"prompt": [5] * 12_000, "return_token_ids": True, "stream": True}, 128, False),
        ({"prompt": [5] * 12_000, "return_token_ids": True}, 2, True),
        ({"prompt": [5] * 12_000}, 128, True),
    ],
    ids=["echo", "echo twice", "ids", "ids streamed", "ids twice", "neither"],
)
def test_the_samples_of_an_answer_repeat_a_bounded_part_of_their_prompts(
    body: dict[str, Any], n: int, fits: bool, tokenizer: ModelTokenizer
) -> None:
    """128 samples that repeat a prompt of 640 KB were 80 MiB that nobody counted, and stopped everybody."""
    backend = FakeBackend(tokenizer, context_tokens=100_000, hang_at=0)
    with serve(backend, tokenizer) as running, ExitStack() as stack:
        raw = msgspec.json.encode({**body, "n": n, "max_tokens": 1})
        if not fits:
            answer = running.post("/v1/completions", raw)
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == "n"
            assert "lower n" in answer.json()["error"]["message"]
            assert not backend.requests
            return
        client = stack.enter_context(socket.create_connection(("127.0.0.1", running.port), DEADLINE_S))
        client.sendall(http_post("/v1/completions", raw))
        assert backend.reached.wait(DEADLINE_S)
        used = running.on_loop(lambda: running.door.memory.used_bytes)
        assert used > (n * 60_000 if len(body) > 1 else 0), "what will be repeated counts"


def test_an_answer_that_repeats_long_prompts_is_encoded_in_a_thread(
    tokenizer: ModelTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    where: list[str] = []
    whole = CompletionAnswer.whole

    def noted(answer: CompletionAnswer) -> Any:
        where.append(threading.current_thread().name)
        return whole(answer)

    monkeypatch.setattr(CompletionAnswer, "whole", noted)
    with serve(FakeBackend(tokenizer), tokenizer) as running:
        for text, n in (("a", 1), ("a" * 400, 100)):
            asked = {"prompt": text, "n": n, "echo": True, "max_tokens": 0}
            assert running.post("/v1/completions", asked).status_code == 200
    assert [name.split("_")[0] for name in where] == ["door", "tokenize"]


def test_tokens_become_text_in_pieces_and_up_to_the_size_of_a_body(
    tokenizer: ModelTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A body of 5.7 MiB whose tokens are a text of 78 MiB stopped everybody for 8 seconds."""
    ids = tokenizer.encode("the capital of France is \u4f60\u597d \u00e9 " * 400, special=False)
    text, most = tokenizer.decode(ids, skip_special=False), 0
    decode = ModelTokenizer.decode

    def noted(self: ModelTokenizer, ids: Any, *, skip_special: bool) -> str:
        nonlocal most
        most = max(most, len(ids))
        return decode(self, ids, skip_special=skip_special)

    monkeypatch.setattr(ModelTokenizer, "decode", noted)
    with serve(FakeBackend(tokenizer), tokenizer, limits=Limits(max_body_bytes=40_000, drain_s=2)) as running:
        assert running.post("/detokenize", {"tokens": ids}).json() == {"prompt": text}
        longest = max(range(320), key=lambda token: len(tokenizer.token_text(token)))
        answer = running.post("/detokenize", {"tokens": [longest] * 8000})
        assert answer.status_code == 413
        assert "more than 40000 characters" in answer.json()["error"]["message"]
        assert running.on_loop(lambda: running.door.memory.used_bytes) == 0
    assert len(ids) > 2000
    assert most <= 512


def test_a_thread_gives_way_to_the_event_loop_soon(tokenizer: ModelTokenizer) -> None:
    before = sys.getswitchinterval()
    try:
        sys.setswitchinterval(0.005)
        with serve(FakeBackend(tokenizer), tokenizer):
            assert sys.getswitchinterval() <= 0.001
    finally:
        sys.setswitchinterval(before)


def test_an_answer_counts_while_it_grows_and_ends_where_memory_does(tokenizer: ModelTokenizer) -> None:
    with serve(FakeBackend(tokenizer, endless=True), tokenizer) as running:
        raw = body_of(1, logprobs=True, max_tokens=200)
        assert running.post(CHAT, raw).status_code == 200
        running.door.memory.limit_bytes = 2 * memory.SAMPLE_BYTES
        assert running.post(CHAT, raw).status_code == 429
        assert running.on_loop(lambda: running.door.memory.used_bytes) == 0
        assert running.post(CHAT, body_of(1, max_tokens=5)).status_code == 200
