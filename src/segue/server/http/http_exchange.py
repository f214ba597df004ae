"""One HTTP request and its answer, for handlers that write bytes.

ASGI has a message for the head and one for each piece of the body, each of which is awaited and written by
itself. Here an answer is one system call, as is each piece of a stream (its head goes with the first), and
nothing is awaited, so that whoever has something to say to a client may say it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from http import HTTPStatus
from typing import Any, Final

#: In an ASGI scope: call it for the `HttpExchange` of the request that is being answered.
EXCHANGE: Final = "segue.exchange"

Header = tuple[bytes, bytes]

_CLOSE: Final[Header] = (b"connection", b"close")


class HttpExchange:
    """One request and its answer on one connection. Either this or ASGI's `send` answers it, never both.

    Nothing of it raises when the client has left: what is written then is dropped. Names and values of
    headers are the caller's to make harmless.
    """

    __slots__ = ("_cycle", "_head", "_left")

    def __init__(self, cycle: Any) -> None:
        #: uvicorn's object for it, whose state is kept as its own `send` keeps it
        self._cycle = cycle
        self._head = b""
        self._left: Callable[[], None] | None = None

    # ---- the client -----------------------------------------------------------------------------

    def take_body(self) -> bytes | None:
        """The whole body, which is not kept here any longer; None if it has not come. For who has received
        nothing of it."""
        if self._cycle.more_body:
            return None
        body, self._cycle.body = self._cycle.body, bytearray()
        return bytes(body)

    def watch(self, left: Callable[[], None] | None) -> None:
        """Call `left` once if the client leaves, also if it has left already; None: nobody asks any more."""
        self._left = left
        if left is None:
            return
        if self._cycle.disconnected:
            self.leave()
        else:
            # A client that has sent its next request already would leave unseen.
            self._cycle.flow.resume_reading()

    def leave(self) -> None:
        """The client has left, or its connection is about to be closed."""
        self._cycle.disconnected = True
        self._cycle.message_event.set()
        left, self._left = self._left, None
        if left is not None:
            left()

    @property
    def behind(self) -> bool:
        """Whether to write nothing before `drained`, because too much waits for the client."""
        return bool(self._cycle.flow.write_paused) and not self._cycle.disconnected

    @property
    def unread_bytes(self) -> int:
        """Written bytes that have not left this process."""
        return int(self._cycle.transport.get_write_buffer_size())

    async def drained(self) -> None:
        """Until the client has read most of what was written, or has left."""
        await self._cycle.flow.drain()

    def abort(self) -> None:
        """Cut the connection now."""
        self._cycle.transport.abort()

    # ---- the answer -----------------------------------------------------------------------------

    def answer(self, status: int, headers: Iterable[Header], body: bytes) -> None:
        """A whole answer."""
        if not self._cycle.disconnected:
            head = self._head_of(status, (*headers, (b"content-length", b"%d" % len(body))))
            self._cycle.transport.write(head if self._cycle.scope["method"] == "HEAD" else head + body)
            self._complete()

    def begin(self, status: int, headers: Iterable[Header]) -> None:
        """The head of an answer that is sent in pieces; it goes out with the first of them."""
        self._head = self._head_of(status, (*headers, (b"transfer-encoding", b"chunked")))

    def send(self, piece: bytes, *, last: bool = False) -> None:
        """The next piece, which is not empty."""
        if not self._cycle.disconnected:
            end = b"0\r\n\r\n" if last else b""
            self._cycle.transport.write(b"%b%x\r\n%b\r\n%b" % (self._head, len(piece), piece, end))
            self._head = b""
            if last:
                self._complete()

    def _head_of(self, status: int, headers: tuple[Header, ...]) -> bytes:
        cycle = self._cycle
        cycle.response_started, cycle.waiting_for_100_continue = True, False
        if _CLOSE in headers:
            cycle.keep_alive = False
        elif not cycle.keep_alive:
            headers = (*headers, _CLOSE)
        lines = [b"%b: %b\r\n" % header for header in (*cycle.default_headers, *headers)]
        return b"%b%b\r\n" % (_status_line(status), b"".join(lines))

    def _complete(self) -> None:
        cycle = self._cycle
        cycle.response_complete = True
        cycle.message_event.set()
        if not cycle.keep_alive:
            cycle.transport.close()
        cycle.on_response()


@cache
def _status_line(status: int) -> bytes:
    try:
        phrase = HTTPStatus(status).phrase
    except ValueError:  # one of our own
        phrase = ""
    return f"HTTP/1.1 {status} {phrase}\r\n".encode()
