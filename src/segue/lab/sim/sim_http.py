"""HTTP over the simulated network: what httpx sends, and uvicorn answers, as bytes of TCP connections."""

from __future__ import annotations

import asyncio
from typing import Any

import httptools
import httpx

from segue.lab.sim.loop import SimLoop
from segue.lab.sim.sim_tcp import Socket
from segue.server.http.guarded_http import GuardedServer

#: How often a server looks whether it is to end, in seconds; uvicorn's own 0.1 would cost more.
LOOK_S = 0.5


#: For how long httpx keeps a connection that nothing is asked over.
KEPT_S = httpx.Limits().keepalive_expiry or 0.0


class SimHttp(httpx.AsyncBaseTransport):
    """The sockets of an `httpx.AsyncClient` in one simulated process; a connection is used again while it
    lives."""

    def __init__(self, loop: SimLoop) -> None:
        self._loop = loop
        self._idle: list[_Asking] = []
        self._busy: dict[_Asking, None] = {}

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """As httpcore's pool, with the errors of httpx."""
        timeout: dict[str, float] = request.extensions["timeout"]
        asking = await self._connection(request.url, timeout["connect"])
        self._busy[asking] = None
        try:
            async with asyncio.timeout(timeout["read"]):
                answer = await asking.ask(request)
        except TimeoutError:
            raise httpx.ReadTimeout("", request=request) from None
        finally:
            del self._busy[asking]
            asking.put_back(self._idle)
        return answer

    async def _connection(self, url: httpx.URL, connect_s: float) -> _Asking:
        self._idle[:] = [asking for asking in self._idle if asking.usable and not self._expired(asking)]
        if self._idle:
            return self._idle.pop()
        try:
            async with asyncio.timeout(connect_s):
                _, asking = await self._loop.create_connection(
                    lambda: _Asking(self._loop), url.host, url.port or 80
                )
        except TimeoutError as error:
            raise httpx.ConnectTimeout(str(error)) from None
        except OSError as error:
            raise httpx.ConnectError(str(error)) from error
        found: _Asking = asking
        return found

    def _expired(self, asking: _Asking) -> bool:
        if self._loop.time() - asking.idle_since < KEPT_S:
            return False
        asking.end()
        return True

    async def aclose(self) -> None:
        """Every connection ends."""
        for asking in [*self._idle, *self._busy]:
            asking.end()


class _Asking(asyncio.Protocol):
    """A client's connection: one question at a time."""

    def __init__(self, loop: SimLoop) -> None:
        self._loop = loop
        self._transport: Socket
        self._answer: asyncio.Future[httpx.Response] | None = None
        self._over = self._again = False
        self.idle_since = 0.0

    @property
    def usable(self) -> bool:
        """It may be asked."""
        return not self._over and self._answer is None

    async def ask(self, request: httpx.Request) -> httpx.Response:
        """The answer to `request`."""
        lines = [b"%b %b HTTP/1.1" % (request.method.encode(), request.url.raw_path)]
        lines += [b"%b: %b" % pair for pair in request.headers.raw]
        self._status, self._headers, self._body = 0, list[tuple[bytes, bytes]](), bytearray()
        self._parser = httptools.HttpResponseParser(self)
        self._answer = self._loop.create_future()
        self._transport.write(b"\r\n".join(lines) + b"\r\n\r\n" + request.read())
        if self._over:
            self._fail(httpx.WriteError("the connection is closed"))
        return await self._answer

    def put_back(self, idle: list[_Asking]) -> None:
        """It may serve the next question, unless this one was not answered to its end."""
        answered = self._answer is not None and self._answer.done() and not self._answer.cancelled()
        if answered and not self._over and self._again:
            self._answer, self.idle_since = None, self._loop.time()
            idle.append(self)
        else:
            self.end()

    def end(self) -> None:
        """Close it."""
        self._over = True
        self._transport.abort()
        self._fail(httpx.ReadError("the client was closed"))

    def _fail(self, error: httpx.HTTPError) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)
            self._answer.exception()  # seen, also where the asker has given up

    # ---- asyncio --------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, Socket)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if self._answer is None or self._answer.done():
            self.end()  # nobody has asked
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(httpx.RemoteProtocolError(f"this is no HTTP: {error}"))

    def eof_received(self) -> bool:
        self._over = True
        self._fail(httpx.RemoteProtocolError("the server closed the connection without an answer"))
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._over = True
        self._fail(httpx.ReadError(str(exc or "the connection ended")))

    # ---- httptools ------------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        """One line of the head."""
        self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        """The head is there."""
        self._status = self._parser.get_status_code()

    def on_body(self, data: bytes) -> None:
        """A piece of the body."""
        self._body += data

    def on_message_complete(self) -> None:
        """All of it is there."""
        self._again = self._parser.should_keep_alive()
        if self._answer is not None and not self._answer.done():
            headers = [
                h for h in self._headers if h[0].lower() not in (b"content-encoding", b"content-length")
            ]
            self._answer.set_result(httpx.Response(self._status, headers=headers, content=bytes(self._body)))


class _InOrder(dict[Any, None]):
    """A set whose order is the same in every run."""

    def add(self, item: Any) -> None:
        self[item] = None

    def discard(self, item: Any) -> None:
        self.pop(item, None)


class SimGuardedServer(GuardedServer):
    """Production's server; it looks less often whether it is to end, and no answer has a date."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        state: Any = self.server_state
        state.connections, state.tasks = _InOrder(), _InOrder()

    def count(self, what: str) -> None:
        """As production. Of connections that go as pending ones, those are counted apart beside which no
        address had more than one: then it may be anybody's."""
        super().count(what)
        # The newcomer is there already.
        if what == "pending_dropped" and self._listener.pending.most <= 2:
            super().count("pending_dropped_among_equals")

    async def main_loop(self) -> None:
        """As uvicorn's, without a look at the machine's clock."""
        while not self.should_exit:  # noqa: ASYNC110 as uvicorn's own
            await asyncio.sleep(LOOK_S)
