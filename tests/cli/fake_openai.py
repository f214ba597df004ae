"""A small OpenAI server without a model: streams `max_tokens` chunks and remembers what it was asked."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route


class FakeOpenAI:
    """`fail` maps the number of a generation (from 0) to what goes wrong with it: a status, `cut`
    (the stream ends early), `error` (an error event) or `garbage`."""

    def __init__(self, *, owned_by: str = "somebody", can_tokenize: bool = True) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.fail: dict[int, int | str] = {}
        self.running = 0
        self.most_running = 0
        self._owned_by = owned_by
        self._can_tokenize = can_tokenize

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/v1/models", self.models),
                Route("/tokenize", self.tokenize, methods=["POST"]),
                Route("/v1/completions", self.generate, methods=["POST"]),
                Route("/v1/chat/completions", self.generate, methods=["POST"]),
            ]
        )

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": "tiny", "owned_by": self._owned_by}]})

    async def tokenize(self, request: Request) -> Response:
        if not self._can_tokenize:
            return JSONResponse({"detail": "Not Found"}, status_code=404)
        words = (await request.json())["prompt"].split()
        return JSONResponse({"tokens": [1000 + hash_of(w) for w in words]})

    async def generate(self, request: Request) -> Response:
        body = json.loads(await request.body())
        number = len(self.bodies)
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        what = self.fail.get(number)
        if isinstance(what, int):
            return JSONResponse({"error": {"message": "no"}}, status_code=what)
        return StreamingResponse(self.events(body, what, "messages" in body), media_type="text/event-stream")

    async def events(self, body: dict[str, Any], what: str | None, chat: bool) -> AsyncIterator[str]:
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            if chat:
                yield event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
            count = body["max_tokens"]
            for i in range(count):
                if i == 1 and what == "cut":
                    return
                if i == 1 and what == "error":
                    yield event({"error": {"message": "lost", "code": "PEER_LOST"}})
                    return
                if i == 1 and what == "garbage":
                    yield "data: {nonsense\n\n"
                    return
                finish = "length" if i == count - 1 else None
                # An empty text is a token, too: half a character, say.
                text = "" if i == 1 and not chat else "x"
                choice = {"delta": {"content": text}} if chat else {"text": text}
                yield event({"choices": [{"index": 0, **choice, "finish_reason": finish}]})
            if body.get("return_timeline"):
                yield event({"choices": [], "timeline": {"queue": 0.25, "wire": 0.5, "at_ready": 1e9}})
            prompt = body.get("prompt", [])
            usage = {"prompt_tokens": len(prompt), "completion_tokens": count, "total_tokens": 0}
            yield event({"choices": [], "usage": usage})
            yield "data: [DONE]\n\n"
        finally:
            self.running -= 1


def event(payload: dict[str, Any]) -> str:
    return f"data: {json.dumps(payload)}\n\n"


def hash_of(word: str) -> int:
    return int.from_bytes(word.encode()[:3], "big")


@contextlib.contextmanager
def running(fake: FakeOpenAI) -> Iterator[str]:
    """Serve `fake` on a free loopback port from another thread; gives its URL."""
    server = uvicorn.Server(uvicorn.Config(fake.app(), port=0, log_level="error", lifespan="off"))
    started = threading.Event()
    startup = server.startup

    async def tell(sockets: Any = None) -> None:
        await startup(sockets)
        started.set()

    server.startup = tell  # type: ignore[method-assign]
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        assert started.wait(60)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(60)
        assert not thread.is_alive()
