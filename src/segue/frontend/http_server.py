"""uvicorn with three additions: the port is bound first, TCP_NODELAY, and a way to cut a stalled client."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Generator
from typing import Any

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from segue.frontend.call import TRANSPORT_KEY
from segue.session.listen import listening


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. ConfigError if the port is taken or the host is not ours."""
    return listening(host, port, what="the HTTP door", flag="--port")


class _Protocol(HttpToolsProtocol):
    """One connection. The transport goes into the scope (see `call.TRANSPORT_KEY`)."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        # Without it a router in front of another server delayed each first token by 41 ms.
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        super().connection_made(transport)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope[TRANSPORT_KEY] = self.transport  # type: ignore[literal-required]


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        # Signals are the process's, not one of its servers'.
        yield


class HttpServer:
    """Serves an application on an open socket until `stop`."""

    def __init__(self, app: Starlette, sock: socket.socket, *, drain_s: float) -> None:
        self._sock = sock
        config = uvicorn.Config(
            app,
            http=_Protocol,
            ws="none",
            lifespan="off",
            loop="none",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=max(1, int(drain_s)),
        )
        self._server = _Server(config)
        self._task: asyncio.Task[Any] | None = None

    @property
    def address(self) -> tuple[str, int]:
        """What was bound."""
        host, port = self._sock.getsockname()[:2]
        return str(host), int(port)

    def start(self) -> asyncio.Task[Any]:
        """Begin to accept; the task ends with the server. The socket listens already."""
        self._task = asyncio.create_task(self._server.serve(sockets=[self._sock]), name="http")
        return self._task

    async def stop(self) -> None:
        """Stop accepting, end idle connections, and wait for the rest within `drain_s`."""
        self._server.should_exit = True
        if self._task is not None:
            await self._task
        self._sock.close()
