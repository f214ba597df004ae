"""The frontend in front of nobody: its backend answers each request with the words of one sentence."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import uvloop

from segue.core.errors import ErrorInfo, SegueError, Starting
from segue.core.limits import Limits
from segue.core.request import Output, Request
from segue.core.types import FinishReason
from segue.frontend.app import OpenAIServer, OpenAIServerSettings, build_app
from segue.frontend.http_server import HttpServer, bind
from segue.frontend.tokenizer import ModelTokenizer
from segue.observe.metrics import Metrics

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "frontend"))

#: Called before each token of a request, with the token's index: the pace of the answers.
Pace = Callable[[Request, int], Awaitable[None]]


class ScriptedBackend:
    """`Backend` without workers: exactly `max_tokens` tokens, one an output."""

    context_tokens = 4096
    can_serve = proven = True

    def __init__(self, words: list[int], pace: Pace) -> None:
        self._words = words
        self._pace = pace

    def start(self) -> None:
        """Nobody is looked for."""

    def drain(self) -> None:
        """Nothing is refused."""

    async def close(self) -> None:
        """Nothing is held."""

    async def changed(self) -> None:
        """Never returns."""
        await asyncio.Event().wait()

    def lacking(self) -> SegueError:
        """Never asked, since `can_serve` is true."""
        return Starting("never")

    def sizes(self) -> dict[str, int]:
        """Nothing is held."""
        return {}

    def cancel(self, request_id: str, reason: ErrorInfo) -> None:
        """Who reads the outputs has stopped reading them."""

    async def submit(self, request: Request, *, budget_s: float) -> AsyncIterator[Output]:
        """The outputs of `request`."""
        last = request.sampling.max_tokens - 1
        for i in range(last + 1):
            await self._pace(request, i)
            yield Output(
                request_id=request.request_id,
                position=i,
                token_ids=[self._words[i % len(self._words)]],
                finish=FinishReason.LENGTH if i == last else None,
            )


def serve(pipe: Connection, folder: str, pace: Pace, state: Callable[[HttpServer], Any]) -> None:
    """Send the port over `pipe`, then answer whatever comes with `state`, until "stop"."""
    from conftest import make_tokenizer

    make_tokenizer().save_pretrained(folder)
    tokenizer = ModelTokenizer.load(folder)
    words = list(tokenizer.encode(" the answer is Paris and there", special=False))

    async def main() -> None:
        settings = OpenAIServerSettings(model="tiny", context_tokens=4096, vocab_size=400, limits=Limits())
        door = OpenAIServer(ScriptedBackend(words, pace), tokenizer, settings, Metrics())
        http = HttpServer(build_app(door), bind("127.0.0.1", 0), drain_s=1)
        http.start()
        pipe.send(http.address[1])
        while await asyncio.to_thread(pipe.recv) != "stop":
            pipe.send(state(http))
        await http.stop()
        door.close()

    uvloop.run(main())
