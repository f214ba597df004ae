"""Requests that a web page makes a browser send: which of them a server answers.

A page cannot set these headers, so they tell its requests from others:

- `Host`: a page whose own name resolves to this server (DNS rebinding) may read its answers. Names are taken
  only if they are ours; an address is always taken, since rebinding needs a name.
- `Origin`: a page of another origin may send requests, even if it cannot read the answers. An origin is taken
  if it is the `Host` itself, or allowed.
- `Content-Type`: a form, which need not name its origin, sends `text/plain` or `multipart/form-data`.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any, Final

from segue.kv import InvalidRequest, SegueError, Unauthorized
from segue.kv.printable import printable

_Message = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[_Message]]
_Send = Callable[[_Message], Awaitable[None]]
_App = Callable[[_Message, _Receive, _Send], Awaitable[None]]

#: Types that a form of any page can send without a question before.
_FORMS: Final = frozenset({b"text/plain", b"multipart/form-data"})
#: Characters of a name that an error repeats.
_SHOWN: Final = 100


class ForeignPage(Unauthorized):
    """A request by a name or from an origin that is not allowed."""

    status = 403


class WrongContentType(InvalidRequest):
    """A body of a type that a form sends."""

    status = 415


class HostCheck:
    """An ASGI application in front of `app`. It refuses what another page may have sent, with `body_of` the
    error.

    `hosts` are further names of this server: `NAME`, `*.NAME` for all below it, or `*`; None if all clients
    prove themselves by a key, which no page of others has. `hosts_hint` and `origins_hint` say what to
    change.
    """

    def __init__(
        self,
        app: _App,
        *,
        hosts: Iterable[str] | None,
        origins: Iterable[str] = (),
        body_of: Callable[[SegueError], bytes],
        hosts_hint: str = "give --allowed-hosts {}",
        origins_hint: str = "no flag allows it",
    ) -> None:
        self._app = app
        self._any_host = hosts is None or "*" in hosts
        self._hosts = _own_names() | {host.lower() for host in hosts or ()}
        self._origins = {origin.lower() for origin in origins}
        self._body_of = body_of
        self._hosts_hint = hosts_hint
        self._origins_hint = origins_hint

    async def __call__(self, scope: _Message, receive: _Receive, send: _Send) -> None:
        error = self._refusal(scope)
        if error is None:
            await self._app(scope, receive, send)
            return
        body = self._body_of(error)
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            (b"connection", b"close"),
        ]
        await send({"type": "http.response.start", "status": error.status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def _refusal(self, scope: _Message) -> SegueError | None:
        hosts = _values(scope, b"host")
        for host in hosts:
            name = _name_of(host)
            if not (self._any_host or self._is_ours(name)):
                shown = printable(name, _SHOWN)
                hint = self._hosts_hint.format(shown)
                return ForeignPage(
                    f"the Host header names {shown!r}, which may be a page of others (DNS rebinding): use "
                    f"this server's address, or {hint}"
                )
        for origin in _values(scope, b"origin"):
            same = origin.partition("://")[2] in hosts
            if not (same or origin in self._origins or "*" in self._origins):
                shown = printable(origin, _SHOWN)
                hint = self._origins_hint.format(shown)
                return ForeignPage(f"pages of {shown!r} may not ask this server; {hint}")
        for content_type in _values(scope, b"content-type"):
            if content_type.partition(";")[0].strip().encode() in _FORMS:
                return WrongContentType(
                    f"a body of {printable(content_type, _SHOWN)!r} may come from a form of any page: send "
                    "JSON with content-type: application/json"
                )
        return None

    def _is_ours(self, name: str) -> bool:
        return (
            name in self._hosts
            or name.endswith(".localhost")
            or _is_address(name)
            or any("*" + name[at:] in self._hosts for at, char in enumerate(name) if char == ".")
        )


def _own_names() -> frozenset[str]:
    """Names that lead to this host alone, whoever answers for a domain; the empty one is a client without a
    name, which no browser is."""
    own = socket.gethostname().lower()
    short = own.partition(".")[0]
    return frozenset({"", "localhost", own, short, f"{short}.local"})


def _values(scope: _Message, wanted: bytes) -> list[str]:
    return [value.decode("latin-1").strip().lower() for name, value in scope["headers"] if name == wanted]


def _name_of(host: str) -> str:
    """The name in a `Host` header, without a port and the dot of the root."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].removesuffix(".")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
