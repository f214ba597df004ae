"""The frontend in front of nobody: its backend answers each request with the words of one sentence."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from multiprocessing.connection import Connection
from typing import Any

import uvloop

from segue.engine.request import FinishReason, Output, Request, Wait
from segue.kv.errors import ErrorInfo, SegueError, Starting
from segue.kv.limits import Limits
from segue.server.frontend.app import OpenAIServer, OpenAIServerSettings, build_app
from segue.server.frontend.http_server import HttpServer, bind
from segue.server.frontend.tokenizer import ModelTokenizer
from segue.server.messages.records import Path as Steps
from segue.server.messages.records import Records, RequestRecord
from segue.server.observe.metrics import Metrics

#: Called before each token of a request, with the token's index: the pace of the answers.
Pace = Callable[[Request, int], Awaitable[None]]


class Script:
    """`Generation` of what an iterator gives."""

    def __init__(self, outputs: AsyncIterator[Output]) -> None:
        self._outputs = outputs

    async def deliver(self, take: Callable[[Output], Wait | None]) -> None:
        """See `Generation.deliver`."""
        async for output in self._outputs:
            wait = take(output)
            if wait is not None:
                await wait()


class ScriptedBackend:
    """`Backend` without workers: exactly `max_tokens` tokens, one an output."""

    context_tokens = 4096
    can_serve = proven = True

    def __init__(self, words: list[int], pace: Pace, records: Records | None = None) -> None:
        self._words = words
        self._pace = pace
        self._records = records

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

    def complete(self, request_id: str) -> None:
        """As `cancel`."""

    def cancel(self, request_id: str, reason: ErrorInfo) -> None:
        """The reader of the outputs has stopped."""

    def submit(self, request: Request, *, budget_s: float) -> Script:
        """The scripted answer to `request`."""
        return Script(self._outputs(request, budget_s))

    async def _outputs(self, request: Request, budget_s: float) -> AsyncIterator[Output]:
        last = request.sampling.max_tokens - 1
        path = self._began(budget_s) if self._records is not None else None
        answered = False
        for i in range(last + 1):
            await self._pace(request, i)
            if path is not None and not answered:
                answered = True
                path.enter("answer", asyncio.get_running_loop().time())
            if path is not None and i == last:
                self._ended(request, path)
            yield Output(
                request_id=request.request_id,
                position=i,
                token_ids=[self._words[i % len(self._words)]],
                finish=FinishReason.LENGTH if i == last else None,
            )

    def _began(self, budget_s: float) -> Steps:
        """The record of a request's call, as a fleet keeps it, without the fleet."""
        path = Steps(asyncio.get_running_loop().time())
        path.enter("place", asyncio.get_running_loop().time())
        text = f"attempt 0 room 1: prefill > decode (for {budget_s:.0f} s)"
        path.enter("attempt", asyncio.get_running_loop().time(), text)
        return path

    def _ended(self, request: Request, path: Steps) -> None:
        assert self._records is not None
        record = RequestRecord(
            request_id=request.request_id,
            where="frontend bench",
            began=0.0,
            seconds=asyncio.get_running_loop().time(),
            steps=path.steps(),
            facts={"prompt_tokens": len(request.prompt), "output_tokens": request.sampling.max_tokens},
        )
        self._records.put(record)


class NoRecords(Records):
    """Keeps nothing: what records cost is the difference."""

    def put(self, record: RequestRecord) -> None:
        """Dropped."""


def serve(
    pipe: Connection,
    folder: str,
    pace: Pace,
    state: Callable[[HttpServer], Any],
    records: Records | None = None,
) -> None:
    """Send the port over `pipe`, then answer whatever comes with `state`, until "stop". With `records` each
    request leaves there what a fleet's would."""
    import from_tests  # noqa: F401
    from frontend_rig import make_tokenizer

    make_tokenizer().save_pretrained(folder)
    tokenizer = ModelTokenizer.load(folder)
    words = list(tokenizer.encode(" the answer is Paris and there", special=False))

    async def main() -> None:
        settings = OpenAIServerSettings(model="tiny", context_tokens=4096, vocab_size=400, limits=Limits())
        backend = ScriptedBackend(words, pace, None if isinstance(records, NoRecords) else records)
        door = OpenAIServer(backend, tokenizer, settings, Metrics(), records)
        http = HttpServer(build_app(door), bind("127.0.0.1", 0), drain_s=1)
        http.start()
        pipe.send(http.address[1])
        while await asyncio.to_thread(pipe.recv) != "stop":
            pipe.send(state(http))
        await http.stop()
        door.close()

    uvloop.run(main())
