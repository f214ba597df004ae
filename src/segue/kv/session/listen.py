"""Listening sockets and their URLs."""

from __future__ import annotations

import errno
import socket
from typing import Any

from segue.kv.errors import ConfigError

_BACKLOG = 1024
#: Where a process that listens everywhere is reached from its own host.
_OWN = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def url_of(scheme: str, host: str, port: int) -> str:
    """The URL with `scheme` of a listener at `host`:`port`, from this host; loopback for one that listens at
    every address."""
    host = _OWN.get(host, host)
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def listening(host: str, port: int, *, what: str, flag: str, sockets: Any = socket) -> socket.socket:
    """A non-blocking socket that listens at `host`:`port` (an empty host: every address; `port` 0: any).

    It listens already, so that a second process fails here and not when it begins to accept. Raises
    ConfigError with `what` as the subject and `flag` as the remedy. `sockets` replaces the module `socket` in
    the simulator.
    """
    try:
        found = sockets.getaddrinfo(host or "0.0.0.0", port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, where = found[0]
        sock: socket.socket = sockets.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"{what} cannot listen at {host}: {error.strerror or error}") from error
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setblocking(False)
        sock.bind(where)
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            text = f"port {port} at {host} is in use by another process: choose another {flag}"
            raise ConfigError(text) from error
        raise ConfigError(f"{what} cannot listen at {host}:{port}: {error.strerror or error}") from error
    return sock
