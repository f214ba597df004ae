"""The public HTTP server: a guarded one whose bounds follow from how many files this process may open."""

from __future__ import annotations

import dataclasses
import socket
import ssl
from collections.abc import Callable
from typing import Any

import msgspec

from segue.kv import SegueError
from segue.kv.session import listening
from segue.server.frontend.problems import body_of
from segue.server.http.guarded_http import Guard, GuardedServer, max_connections, raise_descriptor_limit

#: Deadline of a request's head, in seconds.
HEAD_S = 10.0
#: Deadline of its body's last byte. The application gives up on a body before, and counts it.
REQUEST_S = 75.0
#: Limit of an idle connection between two requests: longer than that of proxies (60), so that they close
#: first.
IDLE_S = 75.0
_TLS_HINT = "this server speaks plain HTTP: use http://, or give it --https-cert and --https-key"
_HTTPS_HINT = "use https://"


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. ConfigError if the port is taken or the host is not ours."""
    return listening(host, port, what="the HTTP server", flag="--port")


def public_guard(
    *, head_s: float = HEAD_S, request_s: float = REQUEST_S, idle_s: float = IDLE_S, descriptors: int = 0
) -> Guard:
    """The limits of the public server with `descriptors` (0: the system's limit).

    A quarter of the connections may wait, the others may be answered.
    """
    places = max_connections(descriptors or raise_descriptor_limit())
    return Guard(
        head_s=head_s,
        request_s=request_s,
        idle_s=idle_s,
        max_pending=places // 4,
        max_requests=places - places // 4,
        head_is_proof=True,
        tls_hint=_TLS_HINT,
        body_of=error_bytes,
    )


def error_bytes(error: SegueError) -> bytes:
    """The body of an error that no handler answers."""
    return msgspec.json.encode(body_of(error))


class HttpServer(GuardedServer):
    """Serves an application to everybody on an open socket until `stop`."""

    def __init__(
        self,
        app: Callable[..., Any],
        sock: socket.socket,
        *,
        drain_s: float,
        guard: Guard | None = None,
        server_tls: ssl.SSLContext | None = None,
    ) -> None:
        guard = guard or public_guard()
        if server_tls is not None:
            guard = dataclasses.replace(guard, tls_hint=_HTTPS_HINT)
        super().__init__(app, sock, guard=guard, drain_s=drain_s, server_tls=server_tls)
