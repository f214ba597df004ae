"""Fixtures of the HTTP server's tests: a tiny tokenizer and a backend without workers."""

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx2 as httpx
import msgspec
import openai
import pytest
import uvloop
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from jumps import Jumps
from segue.engine.request import FinishReason, Output, Request, TokenLogprob, Usage, Wait
from segue.kv.errors import Draining, ErrorInfo, SegueError, Starting
from segue.kv.limits import Limits
from segue.server.frontend.app import OpenAIServer, OpenAIServerSettings, build_app
from segue.server.frontend.http_server import HttpServer, bind
from segue.server.frontend.keys import ApiKeys
from segue.server.frontend.tokenizer import ModelTokenizer
from segue.server.observe.metrics import Metrics

CHATML = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools> answer with <tool_call>\n{% endif %}"
    "{% for m in messages %}"
    "{% if m.role not in ['system', 'user', 'assistant', 'tool'] %}"
    "{{ raise_exception('no role ' + m.role) }}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CONTEXT = 512
#: When a test is given up.
DEADLINE_S = 60.0


def make_tokenizer(template: str | None = CHATML) -> PreTrainedTokenizerFast:
    """Byte-level BPE over a few words: most characters are one token, and é or 你 are several."""
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        show_progress=False,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>", "[TOOL_CALLS]", "<|python_tag|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tok.train_from_iterator(["the capital of France is Paris and the answer is there"] * 4, trainer)
    hf = PreTrainedTokenizerFast(tokenizer_object=tok, eos_token="<|im_end|>", bos_token="<|endoftext|>")
    hf.chat_template = template
    return hf


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_tokenizer().save_pretrained(folder)
    (folder / "config.json").write_text(f'{{"max_position_embeddings": {CONTEXT}, "vocab_size": 330}}')
    return folder


@pytest.fixture(scope="session")
def tokenizer(model_folder: Path) -> ModelTokenizer:
    return ModelTokenizer.load(model_folder)


def http_post(path: str, body: Any, nbytes: int | None = None) -> bytes:
    """A POST as bytes; its head says that the body has `nbytes`."""
    raw = body if isinstance(body, bytes) else msgspec.json.encode(body)
    length = len(raw) if nbytes is None else nbytes
    return f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {length}\r\n\r\n".encode() + raw


class Wire:
    """A connection's transport: what was written, and whether it was cut."""

    def __init__(self) -> None:
        self.said = b""
        self.aborted = False
        self.closed = False

    def write(self, data: bytes) -> None:
        self.said += data

    def abort(self) -> None:
        self.aborted = True

    def close(self) -> None:
        self.closed = True

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


def cycle_over(wire: Wire, *, keep_alive: bool = True) -> RequestResponseCycle:
    """uvicorn's state of one request whose answer goes to `wire`."""
    log = logging.getLogger("uvicorn.error")
    return RequestResponseCycle(
        scope={"type": "http", "method": "POST", "headers": []},  # type: ignore[typeddict-item]
        transport=wire,  # type: ignore[arg-type]
        flow=FlowControl(wire),  # type: ignore[arg-type]
        logger=log,
        access_logger=log,
        access_log=False,
        default_headers=[(b"date", b"today")],
        message_event=asyncio.Event(),
        expect_100_continue=False,
        keep_alive=keep_alive,
        on_response=lambda: None,
    )


class Told:
    """`segue.server.frontend.backend.Generation` of what an iterator gives."""

    def __init__(self, outputs: AsyncIterator[Output]) -> None:
        self._outputs = outputs

    async def deliver(self, take: Callable[[Output], Wait | None]) -> None:
        async with contextlib.aclosing(self._outputs) as outputs:  # type: ignore[type-var]
            async for output in outputs:
                wait = take(output)
                if wait is not None:
                    await wait()


@dataclass
class FakeBackend:
    """Answers each request with `script(request)`, one token per output unless told otherwise."""

    tokenizer: ModelTokenizer
    text: str = "Paris is the answer"
    error_at: int | None = None
    error: SegueError | None = None
    refuse: SegueError | None = None
    gap_at: int | None = None
    hang_at: int | None = None
    endless: bool = False
    step: int = 1
    context_tokens: int | None = None
    can_serve: bool = True
    proven: bool = True
    requests: list[Request] = field(default_factory=list)
    cancelled: list[tuple[str, ErrorInfo]] = field(default_factory=list)
    completed: list[str] = field(default_factory=list)
    open: set[str] = field(default_factory=set)
    sent: int = 0
    reached: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)

    async def changed(self) -> None:
        await asyncio.Event().wait()

    def lacking(self) -> SegueError:
        return Starting("segue is starting and nobody can serve yet")

    def sizes(self) -> dict[str, int]:
        return {"streams": len(self.open)}

    def submit(self, request: Request, *, budget_s: float) -> Told:
        assert 0 < budget_s <= 600
        if self.refuse is not None:
            raise self.refuse
        self.requests.append(request)
        self.open.add(request.request_id)
        return Told(self._run(request))

    async def _run(self, request: Request) -> AsyncIterator[Output]:
        s = request.sampling
        ids = self.tokenizer.encode(self.text, special=False)
        eos = self.tokenizer.encode("<|im_end|>", special=False)[0]
        ids = [*ids, eos]
        if self.endless or s.ignore_eos:
            ids = (ids[:-1] * (s.max_tokens // len(ids) + 2))[: s.max_tokens]
        finish = FinishReason.STOP if len(ids) <= s.max_tokens and ids[-1] == eos else FinishReason.LENGTH
        ids = ids[: s.max_tokens]
        usage = Usage(
            prompt_tokens=len(request.prompt),
            decode_cached=1,
            computed=len(request.prompt) - 1,
            output_tokens=len(ids),
        )
        prompt_logprobs = None
        if s.prompt_logprobs is not None:
            prompt_logprobs = [None, *(TokenLogprob(t, -2.0, [(t, -2.0)]) for t in request.prompt[1:])]
        for at in range(0, len(ids), self.step):
            if self.error_at is not None and at >= self.error_at:
                assert self.error is not None
                self.open.discard(request.request_id)
                raise self.error.info.exception()
            if self.hang_at is not None and at >= self.hang_at:
                self.reached.set()
                await asyncio.Event().wait()
            some = ids[at : at + self.step]
            last = at + self.step >= len(ids)
            logprobs = []
            if s.logprobs is not None:
                logprobs = [
                    TokenLogprob(t, -0.5, [(t, -0.5), (7, float("-inf"))][: s.logprobs]) for t in some
                ]
            self.sent += 1
            if last:
                self.open.discard(request.request_id)
            yield Output(
                request_id=request.request_id,
                position=at + (1 if self.gap_at is not None and at >= self.gap_at else 0),
                token_ids=some,
                logprobs=logprobs,
                prompt_logprobs=prompt_logprobs if at == 0 else None,
                finish=finish if last else None,
                stop_token=eos if last and finish is FinishReason.STOP else None,
                usage=usage if last else None,
                timeline={"queue": 0.001, "prefill": 0.01, "wire": 0.002} if at == 0 else {},
            )
            await asyncio.sleep(0)

    def complete(self, request_id: str) -> None:
        self.open.discard(request_id)
        self.completed.append(request_id)
        self.ended.set()

    def cancel(self, request_id: str, reason: ErrorInfo) -> None:
        self.open.discard(request_id)
        self.cancelled.append((request_id, reason))
        self.ended.set()


class Running:
    """An HTTP server on a loopback port, its event loop in a thread, so that ordinary clients can be used."""

    def __init__(
        self, door: OpenAIServer, server: HttpServer, url: str, loop: asyncio.AbstractEventLoop
    ) -> None:
        self.door = door
        self.server = server
        self.url = url
        self.loop = loop
        self.http = httpx.Client(base_url=url, timeout=DEADLINE_S)
        #: what is closed with it: a client that is left to the garbage collector may leave its socket behind
        self.clients = contextlib.ExitStack()
        #: the clock of the loop, of a server that was served with one
        self.jumps: Jumps | None = None

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    def post(self, path: str, body: Any = None, **kw: Any) -> httpx.Response:
        if body is not None:
            kw["content"] = body if isinstance(body, bytes) else msgspec.json.encode(body)
        return self.http.post(path, **kw)

    def openai(self, api_key: str = "none") -> openai.OpenAI:
        """The real client of it."""
        made = openai.OpenAI(base_url=f"{self.url}/v1", api_key=api_key, max_retries=0)
        return self.clients.enter_context(made)

    def metric(self, name: str, **labels: str) -> float:
        """Read on the server's loop: a client may have its answer before the same turn has counted it."""
        return self.on_loop(lambda: self.door.metrics.registry.get_sample_value(name, labels)) or 0.0

    def on_loop(self, work: Callable[[], Any]) -> Any:
        async def call() -> Any:
            return work()

        return asyncio.run_coroutine_threadsafe(call(), self.loop).result(DEADLINE_S)

    def over(self, seconds: float) -> None:
        """The server has read what it was sent, and then so much time passes for it at once."""
        for _ in range(20):  # each turn accepts, makes and reads of what is there
            self.on_loop(lambda: None)
        assert self.jumps is not None
        self.on_loop(partial(self.jumps.over, seconds))


@contextlib.contextmanager
def serve(
    backend: Any, tokenizer: ModelTokenizer, *, jumping: bool = False, **settings: Any
) -> Iterator[Running]:
    """`jumping`: on asyncio's own loop, whose clock the test moves on (`Running.over`). `dashboard`, if any,
    makes one out of the metrics."""
    started: threading.Event = threading.Event()
    box: dict[str, Any] = {}

    async def main() -> None:
        box["jumps"] = Jumps() if jumping else None
        limits = settings.pop("limits", Limits(max_body_bytes=2**20, drain_s=2))
        guard, keys = (
            settings.pop("guard", None),
            ApiKeys(settings.pop("keys", ()), operators=settings.pop("operators", ())),
        )
        make_dashboard = settings.pop("dashboard", None)
        door = OpenAIServer(
            backend,
            tokenizer,
            OpenAIServerSettings(
                model="tiny", context_tokens=CONTEXT, vocab_size=330, limits=limits, **settings
            ),
            Metrics(),
        )
        dashboard = make_dashboard(door.metrics) if make_dashboard is not None else None
        more = () if dashboard is None else dashboard.routes()
        sock = bind("127.0.0.1", 0)
        server = HttpServer(build_app(door, keys, more), sock, drain_s=2, guard=guard)
        server.start()
        stop = asyncio.Event()
        box.update(
            door=door, server=server, address=server.address, loop=asyncio.get_running_loop(), stop=stop
        )
        started.set()
        await stop.wait()
        if dashboard is not None:
            await dashboard.close()
        await server.stop()
        door.close()

    def run() -> None:
        try:
            (asyncio.run if jumping else uvloop.run)(main())
        except BaseException as error:
            box["error"] = error
            started.set()
            raise

    thread = threading.Thread(target=run, name="door")
    thread.start()
    assert started.wait(DEADLINE_S)
    assert "error" not in box, box["error"]
    host, port = box["address"]
    running = Running(box["door"], box["server"], f"http://{host}:{port}", box["loop"])
    running.jumps = box["jumps"]
    try:
        yield running
    finally:
        running.clients.close()
        running.http.close()
        box["loop"].call_soon_threadsafe(box["stop"].set)
        thread.join(DEADLINE_S)
        assert not thread.is_alive()


@pytest.fixture
def backend(tokenizer: ModelTokenizer) -> FakeBackend:
    return FakeBackend(tokenizer)


@pytest.fixture
def door(backend: FakeBackend, tokenizer: ModelTokenizer) -> Iterator[Running]:
    with serve(backend, tokenizer) as running:
        yield running


__all__ = [
    "CHATML",
    "CONTEXT",
    "Draining",
    "FakeBackend",
    "Running",
    "Told",
    "Wire",
    "cycle_over",
    "http_post",
    "make_tokenizer",
    "serve",
]
