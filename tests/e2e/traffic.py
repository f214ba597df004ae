"""Clients that stream completions, and what becomes of each request. Plain asyncio, cheap per token."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import msgspec

#: Every error a request may end with while instances die; INTERNAL and whatever has no code are bugs.
TYPED = frozenset(
    {
        "ABORTED_BY_CLIENT",
        "BOOTSTRAP_TIMEOUT",
        "BOOTSTRAP_UNREACHABLE",
        "CHECKSUM_MISMATCH",
        "DEADLINE_EXCEEDED",
        "DRAINING",
        "OUT_OF_CAPACITY",
        "PEER_LOST",
        "PEER_REFUSED",
        "PEER_RESTARTED",
        "TRANSFER_FAILED",
    }
)


@dataclass(frozen=True)
class Ask:
    """One request: greedy without a seed, else sampled with it."""

    prompt: tuple[int, ...]
    max_tokens: int
    seed: int | None = None

    def body(self, model: str) -> bytes:
        how: dict[str, Any] = {"temperature": 0}
        if self.seed is not None:
            how = {"temperature": 0.9, "top_p": 0.95, "seed": self.seed}
        return msgspec.json.encode(
            {
                "model": model,
                "prompt": self.prompt,
                "max_tokens": self.max_tokens,
                "ignore_eos": True,
                "return_token_ids": True,
                "stream": True,
                **how,
            }
        )


@dataclass
class Result:
    """The result that a client saw. `error` is "" after a proper end, "HANG" if there was none in time and
    "BROKEN" if the connection just ended."""

    ask: Ask
    tokens: list[int] = field(default_factory=list)
    error: str = ""
    status: int = 0
    began: float = 0.0
    ended: float = 0.0
    text: str = ""


def asks(seed: int, count: int, *, vocab: int, longest: int, max_tokens: int) -> list[Ask]:
    """`count` requests, every second one with seeded sampling."""
    rng = random.Random(seed)
    return [
        Ask(
            tuple(rng.randrange(1, vocab) for _ in range(rng.randint(3, longest))),
            max_tokens,
            rng.randrange(2**31) if i % 2 else None,
        )
        for i in range(count)
    ]


async def stream(
    url: str,
    model: str,
    ask: Ask,
    *,
    within_s: float = 60,
    first: asyncio.Event | None = None,
    request_id: str = "",
) -> Result:
    """Run one request to its end, at most `within_s` seconds; `segue explain` knows its `request_id`."""
    result = Result(ask, began=time.monotonic())
    try:
        async with asyncio.timeout(within_s):
            await _stream(url, ask.body(model), result, first, request_id)
    except TimeoutError:
        result.error = "HANG"
    except (OSError, asyncio.IncompleteReadError) as error:
        result.error, result.text = "BROKEN", repr(error)
    result.ended = time.monotonic()
    return result


async def _stream(
    url: str, body: bytes, result: Result, first: asyncio.Event | None, request_id: str
) -> None:
    at = urlsplit(url)
    reader, writer = await asyncio.open_connection(at.hostname, at.port)
    try:
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
            b"content-type: application/json\r\nx-request-id: %s\r\ncontent-length: %d\r\n\r\n%s"
            % (request_id.encode(), len(body), body)
        )
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
        result.status = int(head.split(" ", 2)[1])
        if "transfer-encoding: chunked" not in head:
            _error(result, msgspec.json.decode(await reader.read()))
            return
        while size := int((await reader.readuntil(b"\r\n")).strip(), 16):
            for line in (await reader.readexactly(size + 2)).split(b"\n"):
                if line.startswith(b"data: {"):
                    _event(result, msgspec.json.decode(line[6:]))
                    if first is not None and result.tokens:
                        first.set()
                elif line.startswith(b"data: [DONE]"):
                    return
    finally:
        writer.close()


def _event(result: Result, event: dict[str, Any]) -> None:
    if "error" in event:
        _error(result, event)
        return
    for choice in event["choices"]:
        result.tokens += choice.get("token_ids") or []


def _error(result: Result, body: dict[str, Any]) -> None:
    result.error, result.text = str(body["error"]["code"]), str(body["error"]["message"])
