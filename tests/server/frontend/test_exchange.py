"""An answer as bytes is the one that uvicorn makes of ASGI's messages, in fewer writes."""

from __future__ import annotations

import asyncio
from typing import Any

import httptools
import pytest
from frontend_rig import Wire, cycle_over

from segue.server.http.http_exchange import HttpExchange

HEADERS = [(b"content-type", b"application/json"), (b"x-request-id", b"r")]


class Answer:
    """The answer as a client parses it."""

    def __init__(self, said: bytes) -> None:
        self.headers: set[tuple[bytes, bytes]] = set()
        self.body = b""
        self.complete = False
        self.parser = httptools.HttpResponseParser(self)
        self.parser.feed_data(said)
        self.status = self.parser.get_status_code()

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.add((name, value))

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        self.complete = True

    @property
    def all(self) -> tuple[Any, ...]:
        return self.status, self.headers, self.body, self.complete


def state(cycle: Any, wire: Wire) -> tuple[bool, ...]:
    return cycle.response_started, cycle.response_complete, cycle.message_event.is_set(), wire.closed


@pytest.mark.parametrize("keep_alive", [True, False])
@pytest.mark.parametrize("close", [True, False])
@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("status", [200, 429, 499])
def test_bytes_say_what_messages_say(status: int, streamed: bool, close: bool, keep_alive: bool) -> None:
    headers = [*HEADERS, *([(b"connection", b"close")] if close else [])]

    async def main() -> None:
        theirs, ours = Wire(), Wire()
        reference, cycle = cycle_over(theirs, keep_alive=keep_alive), cycle_over(ours, keep_alive=keep_alive)
        exchange = HttpExchange(cycle)
        pieces = [b"data: 1\n\n", b"data: 2\n\n"] if streamed else [b"{}"]
        length = [] if streamed else [(b"content-length", b"2")]
        await reference.send({"type": "http.response.start", "status": status, "headers": headers + length})
        for piece in pieces:
            more = piece is not pieces[-1]
            await reference.send({"type": "http.response.body", "body": piece, "more_body": more})
        if streamed:
            exchange.begin(status, headers)
            assert not ours.said, "the head waits for the first piece"
            for piece in pieces:
                exchange.send(piece, last=piece is pieces[-1])
        else:
            exchange.answer(status, headers, pieces[0])
        said, expected = Answer(ours.said), Answer(theirs.said)
        if not keep_alive:
            expected.headers.add((b"connection", b"close"))  # uvicorn before 0.51 leaves it out
        assert said.all == expected.all
        assert state(cycle, ours) == state(reference, theirs)

    asyncio.run(main())


@pytest.mark.parametrize("first", [True, False])
def test_nothing_is_written_for_a_client_that_has_left(first: bool) -> None:
    async def main() -> None:
        wire = Wire()
        exchange, left = HttpExchange(cycle_over(wire)), list[int]()
        if first:
            exchange.leave()
            exchange.watch(lambda: left.append(1))
        else:
            exchange.watch(lambda: left.append(1))
            exchange.leave()
        exchange.leave()
        exchange.answer(200, HEADERS, b"{}")
        exchange.begin(200, HEADERS)
        exchange.send(b"data: 1\n\n", last=True)
        assert left == [1], "told once"
        assert not wire.said
        assert not exchange.behind

    asyncio.run(main())


def test_a_body_is_taken_once_it_is_whole_and_is_not_kept_here() -> None:
    async def main() -> None:
        cycle = cycle_over(Wire())
        exchange = HttpExchange(cycle)
        cycle.body += b"half"
        assert exchange.take_body() is None, "half of it has come"
        cycle.body, cycle.more_body = bytearray(b"whole"), False
        assert exchange.take_body() == b"whole"
        assert not cycle.body, "a prompt would be held twice for as long as it is served"

    asyncio.run(main())


def test_who_watches_no_more_is_not_told() -> None:
    async def main() -> None:
        exchange, left = HttpExchange(cycle_over(Wire())), list[int]()
        exchange.watch(lambda: left.append(1))
        exchange.watch(None)
        exchange.leave()
        assert not left

    asyncio.run(main())
