"""Instances that cost almost nothing: their leaders for our frontend, their HTTP doors for other routers.

Both give the same answers at the same moments: all streams get a token together each `STEP_S`, as from the
steps of one engine, and the first token at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import httptools
import uvloop

from segue.engine.request import FinishReason, Output
from segue.kv.errors import SegueError
from segue.kv.ids import LeaderId, Role, new_incarnation
from segue.kv.limits import Limits
from segue.kv.session.api import Session
from segue.kv.session.node import SessionNode
from segue.server.messages.control import Cancel, ControlMessage, Load, Outputs, Submit
from segue.server.registry.client import RegistryClient
from segue.server.registry.registry_records import InstanceRecord, ReplicaRecord
from segue.server.registry.registry_server import serve as serve_registry

STEP_S = 0.008
#: Each token that is given: ` answer` in the tokenizer of tests/frontend.
TOKEN = 292
LIMITS = Limits()

#: What routers ask at start, and what prefill answers to its leg; each reads of it what it knows.
_SMALL = {
    "status": "ok",
    "served_model_name": "tiny",
    "dp_size": 1,
    "tp_size": 1,
    "data": [{"id": "tiny", "object": "model"}],
    "kv_transfer_params": {"of": "prefill"},
    "choices": [],
    "text": "",
    "meta_info": {"id": "x"},
}


class Engine:
    """The open streams. `step` gives a stream's next token, and whether that was the last."""

    def __init__(self) -> None:
        self.steps: dict[object, Callable[[], bool]] = {}
        self.ends_of_step: list[Callable[[], None]] = []
        self._timer: asyncio.TimerHandle | None = None

    def open(self, name: object, step: Callable[[], bool]) -> None:
        """Give its first token now, and the others with everybody's."""
        if not step():
            self.steps[name] = step
        self._flush()
        if self.steps and self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(STEP_S, self._step)

    def _step(self) -> None:
        for name, step in list(self.steps.items()):
            if step():
                self.steps.pop(name, None)
        self._flush()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(STEP_S, self._step) if self.steps else None

    def _flush(self) -> None:
        for end in self.ends_of_step:
            end()


class Leader:
    """The leader that our frontend connects to. Prefill's sends nothing, as in a successful request."""

    def __init__(self, role: Role, engine: Engine) -> None:
        self._engine = engine
        self._role = role
        self._waiting: dict[Session, list[Output]] = {}
        engine.ends_of_step.append(self._send)
        self.node = SessionNode(
            me=LeaderId(new_incarnation()),
            role=role,
            secret=None,
            handlers=dict.fromkeys(Role, self),
            message_type=ControlMessage,
            limits=LIMITS,
        )

    async def record(self) -> InstanceRecord:
        """Listen, and how the registry names it."""
        host, port = await self.node.listen("127.0.0.1", 0)
        return InstanceRecord(
            incarnation=self.node.me.incarnation,
            role=self._role,
            model="m",
            served_model="tiny",
            context_tokens=4096,
            replicas=[ReplicaRecord(dp_rank=0, host=host, port=port)],
        )

    def hello(self) -> bytes:
        return b""

    def accept(self, peer: object) -> None: ...

    def closed(self, session: Session, error: SegueError) -> None: ...

    def opened(self, session: Session) -> None:
        session.send(Load(dp_rank=0, running=0, waiting=0, tokens=0, pages_free=9, pages_total=9))

    def received(self, session: Session, message: object) -> None:
        if isinstance(message, Cancel):
            self._engine.steps.pop(message.request_id, None)
        elif isinstance(message, Submit) and self._role is Role.DECODE:
            request = message.request
            at = iter(range(request.sampling.max_tokens))
            last = request.sampling.max_tokens - 1

            def step() -> bool:
                i = next(at)
                finish = FinishReason.LENGTH if i == last else None
                output = Output(request_id=request.request_id, position=i, token_ids=[TOKEN], finish=finish)
                self._waiting.setdefault(session, []).append(output)
                return i == last

            self._engine.open(request.request_id, step)

    def _send(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for session, outputs in waiting.items():
            session.send(Outputs(outputs))


class Door(asyncio.Protocol):
    """The HTTP endpoint that other routers post to; `engine` is None at prefill's."""

    def __init__(self, engine: Engine | None) -> None:
        self._engine = engine

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._parser = httptools.HttpRequestParser(self)
        self._body = b""

    def connection_lost(self, exc: Exception | None) -> None:
        if self._engine is not None:
            self._engine.steps.pop(self, None)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._transport.close()  # sglang-router asks whether this is gRPC

    def on_url(self, url: bytes) -> None:
        self._url, self._body = url, b""

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        body = json.loads(self._body) if self._body else {}
        if self._engine is None or self._parser.get_method() == b"GET" or "max_tokens" not in body:
            loads = self._url.startswith(b"/get_load")
            small = [{"dp_rank": 0, "num_reqs": 0, "num_waiting_reqs": 0, "num_tokens": 0}]
            self._whole(small if loads else _SMALL)
        elif not body.get("stream"):
            assert body["max_tokens"] == 1, "of more than one token there are streams only"
            self._whole(_event([TOKEN], "length") | {"usage": _USAGE})
        else:
            self._stream(body["max_tokens"])

    def _whole(self, answer: object) -> None:
        raw = json.dumps(answer).encode()
        head = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: "
        self._transport.write(head.encode() + b"%d\r\n\r\n" % len(raw) + raw)

    def _stream(self, max_tokens: int) -> None:
        at = iter(range(max_tokens))
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        middle = b"data: " + json.dumps(_event([TOKEN], None)).encode() + b"\n\n"
        last = b"data: " + json.dumps(_event([TOKEN], "length")).encode() + b"\n\n"

        def step() -> bool:
            i = next(at)
            ends = i == max_tokens - 1
            raw = last if ends else middle
            done = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n" if ends else b""
            self._transport.write((head if i == 0 else b"") + b"%x\r\n" % len(raw) + raw + b"\r\n" + done)
            return ends

        assert self._engine is not None
        self._engine.open(self, step)


_USAGE = {"prompt_tokens": 64, "completion_tokens": 1, "total_tokens": 65}


def _event(token_ids: list[int], finish: str | None) -> dict[str, Any]:
    """One event of a stream, or a whole answer, with what our frontend's has."""
    choice = {
        "index": 0,
        "text": " answer",
        "logprobs": None,
        "finish_reason": finish,
        "token_ids": token_ids,
    }
    name = "cmpl-0123456789abcdef0123456789abcdef"
    return {
        "id": name,
        "object": "text_completion",
        "created": 1790000000,
        "model": "tiny",
        "choices": [choice],
    }


def serve(pipe: Connection) -> None:
    """Send the ports of the registry, of prefill's door and of decode's over `pipe`; serve until it says
    something."""

    async def main() -> None:
        loop, engine = asyncio.get_running_loop(), Engine()
        registry = await serve_registry("127.0.0.1", 0, secret=None, limits=LIMITS)
        leaders = [Leader(role, engine) for role in (Role.PREFILL, Role.DECODE)]
        clients, keeping = [], []
        for leader in leaders:
            clients.append(RegistryClient(f"http://127.0.0.1:{registry.port}", secret=None, limits=LIMITS))
            await clients[-1].register(await leader.record())
            keeping.append(asyncio.create_task(clients[-1].keep_alive()))
        doors = [
            await loop.create_server(lambda made=made: Door(made), "127.0.0.1", 0)  # type: ignore[misc]
            for made in (None, engine)
        ]
        pipe.send([registry.port, *(door.sockets[0].getsockname()[1] for door in doors)])
        await asyncio.to_thread(pipe.recv)
        for task in keeping:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        for leader in leaders:
            await leader.node.close()
        for client in clients:
            await client.aclose()
        await registry.close()

    uvloop.run(main())
