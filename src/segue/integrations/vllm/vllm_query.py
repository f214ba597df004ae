"""`GET /query` of the concurrent flow, in the form of vLLM's MooncakeConnector: routers ask prefill for the
`engine_id` that they then give to decode, and decode asks for the port of prefill's sessions.

The worker of the first data-parallel rank answers for all: the others, on the same host, tell it where they
are (`POST /rank`), and are forgotten when that connection ends.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
from collections.abc import Callable
from functools import partial
from typing import cast

import msgspec

from segue.integrations.vllm.vllm_params import PeerAddress, engine_id
from segue.kv import (
    DECODE_ERRORS,
    BootstrapUnreachable,
    GuardedListener,
    InvalidRequest,
    LeaderId,
    PeerRestarted,
    SegueError,
    listening,
)

_MAX_REQUEST_BYTES = 8192
_MAX_ANSWER_BYTES = 65536
_MAX_RANKS = 1024
_REQUEST_S = 5.0
#: Between two attempts of a rank to tell the first one where it is.
_ANNOUNCE_AGAIN_S = 1.0
_SIGN_DOMAIN = b"segue vllm rank 1\0"


class _DpRankEntry(msgspec.Struct, frozen=True):
    """One DP rank: its `engine_id`, and for each TP and PP rank the address of its worker."""

    engine_id: str
    worker_addr: dict[int, dict[int, str]]


_ANSWER = msgspec.json.Decoder(dict[int, _DpRankEntry])


class _Announcement(msgspec.Struct, frozen=True):
    """Where the data-parallel rank `rank` is, signed with the deployment's secret if there is one."""

    rank: int
    entry: _DpRankEntry
    signature: str = ""


class RankDirectory:
    """The data-parallel ranks of one prefill instance, by their numbers. If several workers say to be the
    same rank, the last one counts; when it is gone, the one before it."""

    def __init__(self) -> None:
        self._entries: dict[int, list[_DpRankEntry]] = {}

    def add(self, rank: int, address: PeerAddress) -> None:
        """The rank's leader is at `address`."""
        self._entries[rank] = [_entry(address)]

    def answer(self) -> bytes:
        """The body of the answer to `GET /query`."""
        return msgspec.json.encode({rank: entries[-1] for rank, entries in self._entries.items()})

    def announced(self, announcement: _Announcement) -> Callable[[], None] | None:
        """Keep what a rank says of itself; returns how to forget it, None if there are too many."""
        rank, entry = announcement.rank, announcement.entry
        if sum(map(len, self._entries.values())) >= _MAX_RANKS:
            return None
        self._entries.setdefault(rank, []).append(entry)

        def forget() -> None:
            left = [other for other in self._entries.pop(rank) if other is not entry]
            if left:
                self._entries[rank] = left

        return forget


def _entry(address: PeerAddress) -> _DpRankEntry:
    host = f"[{address.host}]" if ":" in address.host else address.host
    return _DpRankEntry(engine_id(address.leader), {0: {0: f"{host}:{address.port}"}})


def _signed(rank: int, entry: _DpRankEntry, secret: bytes) -> str:
    if not secret:
        return ""
    return hmac.new(secret, _SIGN_DOMAIN + msgspec.json.encode([rank, entry]), hashlib.sha256).hexdigest()


class QueryServer:
    """Answers `GET /query` with `ranks` until `close`, and adds other ranks that say where they are: with
    `secret` if they sign that, without a secret from loopback. Connections that have not proven to be a rank
    are bounded in number, each address by itself, and in time. Use it on one loop. Raises ConfigError for a
    port in use."""

    def __init__(self, host: str, port: int, ranks: RankDirectory, secret: bytes = b"") -> None:
        self._ranks = ranks
        self._secret = secret
        self._clients: set[_QueryClient] = set()
        self._listener = GuardedListener(
            lambda: _QueryClient(self), server_tls=None, handshake_s=_REQUEST_S, count=lambda _: None
        )
        self._socket = listening(host, port, what="GET /query", flag="query_port")

    async def open(self) -> None:
        """Begin to accept."""
        self._listener.open(self._socket)

    async def close(self) -> None:
        """End all connections; the port is free."""
        await self._listener.close()
        self._socket.close()
        for client in list(self._clients):
            client.cut()

    def opened(self, client: _QueryClient) -> None:
        """It may ask now."""
        self._clients.add(client)

    def closed(self, client: _QueryClient) -> None:
        """Its socket is closed."""
        self._clients.discard(client)
        self._listener.closed(client)

    async def serve(
        self, client: _QueryClient, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Answer one client, or name a rank while its connection is open."""
        forget = None
        try:
            async with asyncio.timeout(_REQUEST_S):
                head = await reader.readuntil(b"\r\n\r\n")
                line = head.split(b"\r\n", 1)[0]
                if line.startswith(b"POST /rank "):
                    forget = await self._announced(reader, writer)
                else:
                    writer.write(_response(line, self._ranks.answer()))
                    await writer.drain()
            if forget is not None:
                self._listener.authenticated(client)
                await reader.read(1)  # it says nothing more: this ends with the rank
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # a client that left, is late or sends no HTTP costs nobody anything
        finally:
            writer.close()
            if forget is not None:
                forget()

    async def _announced(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> Callable[[], None] | None:
        try:
            found = msgspec.json.decode(await reader.readuntil(b"\n"), type=_Announcement)
        except DECODE_ERRORS:
            return None
        if self._secret:
            signed = _signed(found.rank, found.entry, self._secret)
            allowed = hmac.compare_digest(found.signature.encode(), signed.encode())
        else:
            allowed = ipaddress.ip_address(writer.get_extra_info("peername")[0]).is_loopback
        return self._ranks.announced(found) if allowed and found.rank > 0 else None


class _QueryClient(asyncio.StreamReaderProtocol):
    """One connection of a `QueryServer`; a `PendingProtocol`."""

    def __init__(self, server: QueryServer) -> None:
        super().__init__(asyncio.StreamReader(_MAX_REQUEST_BYTES), partial(server.serve, self))
        self._server = server
        self._socket: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        self._socket = cast(asyncio.Transport, transport)
        self._server.opened(self)
        super().connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        super().connection_lost(exc)
        self._server.closed(self)

    def refuse_when_made(self, error: SegueError) -> None:
        """Never called without TLS."""

    def cut(self, error: SegueError | None = None) -> None:
        """See `PendingProtocol`."""
        if self._socket is not None:
            self._socket.abort()


def _response(request_line: bytes, answer: bytes) -> bytes:
    status, body = b"200 OK", answer
    method, _, rest = request_line.partition(b" ")
    if method != b"GET" or rest.split(b" ")[0].split(b"?")[0] != b"/query":
        status, body = b"404 Not Found", b'{"detail":"only GET /query is served here"}'
    return (
        b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b"
        % (status, len(body), body)
    )


async def announce(host: str, port: int, rank: int, address: PeerAddress, secret: bytes) -> None:
    """Have the `GET /query` at `host`:`port` name this rank too, for as long as this runs."""
    entry = _entry(address)
    line = msgspec.json.encode(_Announcement(rank, entry, _signed(rank, entry, secret)))
    request = b"POST /rank HTTP/1.1\r\nhost: segue\r\n\r\n" + line + b"\n"
    while True:
        try:
            async with asyncio.timeout(_REQUEST_S):
                reader, writer = await asyncio.open_connection(host, port)
            try:
                writer.write(request)
                await reader.read(1)  # until the first rank ends the connection
            finally:
                writer.close()
        except (OSError, TimeoutError):
            pass  # the first rank starts later, or again
        await asyncio.sleep(_ANNOUNCE_AGAIN_S)


async def session_port(host: str, port: int, leader: LeaderId, within_s: float) -> int:
    """The port of the sessions of `leader`, whose `GET /query` is at `host`:`port`.

    Raises BootstrapUnreachable if nobody answers, PeerRestarted if another process does, InvalidRequest for
    an answer of another form.
    """
    try:
        async with asyncio.timeout(within_s):
            body = await _get(host, port)
    except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
        raise BootstrapUnreachable(f"GET http://{host}:{port}/query: {error or 'no answer'}") from None
    try:
        entries = _ANSWER.decode(body).values()
        entry = next((one for one in entries if one.engine_id == engine_id(leader)), None)
        found = 0 if entry is None else int(entry.worker_addr[0][0].rpartition(":")[2])
    except (*DECODE_ERRORS, KeyError) as error:
        raise InvalidRequest(f"http://{host}:{port}/query is no segue connector's: {error}") from None
    if entry is None:
        raise PeerRestarted(f"http://{host}:{port}/query has no engine {engine_id(leader)} any more")
    if not 0 < found < 2**16:
        raise InvalidRequest(f"http://{host}:{port}/query names the port {found}")
    return found


async def _get(host: str, port: int) -> bytes:
    reader, writer = await asyncio.open_connection(host, port, limit=_MAX_ANSWER_BYTES)
    try:
        writer.write(b"GET /query HTTP/1.1\r\nhost: segue\r\nconnection: close\r\n\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
        if b" 200 " not in head.split(b"\r\n", 1)[0]:
            return b""
        body = bytearray()
        while len(body) <= _MAX_ANSWER_BYTES and (more := await reader.read(_MAX_ANSWER_BYTES)):
            body += more
        return bytes(body)
    finally:
        writer.close()
