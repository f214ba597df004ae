"""Parts of the session tests: a recording handler, nodes, and a peer made of raw streams."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec

from segue.kv.errors import SegueError
from segue.kv.ids import Incarnation, LeaderId, Role
from segue.kv.limits import Limits
from segue.kv.session.api import PeerInfo, Session
from segue.kv.session.frames import (
    HEADER,
    KIND_MESSAGE,
    PREAMBLE,
    SESSION_VERSIONS,
    Opened,
    SessionAccepted,
    SessionFrame,
    SessionHello,
    Welcome,
    decode_frame,
    encode_frame,
    encode_preamble,
    pack_frame,
)
from segue.kv.session.node import SessionNode
from segue.kv.session.session_handshake import Handshake, Progress, session_key
from segue.kv.versions import Versions

SECRET = b"a secret of the tests"
#: When a test is given up: no machine stands still for so long. Nor is a peer that does not get a turn.
DEADLINE_S = 60.0
PATIENT = Limits(handshake_s=60.0, connect_s=60.0)


class Note(msgspec.Struct, frozen=True, tag=True):
    number: int
    data: bytes = b""


class Question(msgspec.Struct, frozen=True, tag=True):
    number: int


Message = Note | Question


def incarnation(letter: str) -> Incarnation:
    return Incarnation(letter * 32)


def leader(letter: str, dp_rank: int = 0) -> LeaderId:
    return LeaderId(incarnation(letter), dp_rank)


@dataclass
class Events:
    """A SessionHandler that writes everything down and wakes who waits for it."""

    payload: bytes = b"payload"
    refuse: SegueError | None = None
    log: list[tuple[str, object]] = field(default_factory=list)
    sessions: list[Session] = field(default_factory=list)
    peers: list[PeerInfo] = field(default_factory=list)
    on_message: Callable[[Session, object], None] | None = None

    def __post_init__(self) -> None:
        self._more = asyncio.Event()

    def hello(self) -> bytes:
        return self.payload

    def accept(self, peer: PeerInfo) -> None:
        self.peers.append(peer)
        if self.refuse is not None:
            raise self.refuse

    def opened(self, session: Session) -> None:
        self.sessions.append(session)
        self._add("opened", session.peer.leader)

    def received(self, session: Session, message: object) -> None:
        self._add("received", message)
        if self.on_message is not None:
            self.on_message(session, message)

    def closed(self, session: Session, error: SegueError) -> None:
        self._add("closed", error)

    def _add(self, what: str, value: object) -> None:
        self.log.append((what, value))
        self._more.set()

    def of(self, what: str) -> list[Any]:
        return [value for name, value in self.log if name == what]

    async def wait(self, what: str, count: int = 1) -> list[Any]:
        async with asyncio.timeout(DEADLINE_S):
            while len(self.of(what)) < count:
                self._more.clear()
                await self._more.wait()
        return self.of(what)


def node(letter: str, handler: Events, **changes: Any) -> SessionNode:
    settings: dict[str, Any] = {
        "me": leader(letter),
        "role": Role.PREFILL,
        "secret": SECRET,
        "handlers": dict.fromkeys(Role, handler),
        "message_type": Message,
        "limits": PATIENT,
    }
    return SessionNode(**(settings | changes))


@asynccontextmanager
async def closing(*nodes: SessionNode) -> AsyncIterator[None]:
    try:
        yield
    finally:
        for each in nodes:
            await each.close()


class RawPeer:
    """The dialling side by hand: says what it is told, and nothing by itself (no keepalive)."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def dial(cls, host: str, port: int, *, receive_buffer: int | None = None) -> RawPeer:
        sock = socket.socket()
        sock.setblocking(False)
        if receive_buffer is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        await asyncio.get_running_loop().sock_connect(sock, (host, port))
        limit = receive_buffer or 2**16
        return cls(*await asyncio.open_connection(sock=sock, limit=limit))

    def send(self, *frames: SessionFrame) -> None:
        self.writer.write(b"".join(encode_frame(frame) for frame in frames))

    def send_message(self, body: bytes) -> None:
        self.writer.write(pack_frame(KIND_MESSAGE, body))

    async def preamble(self, versions: Versions = SESSION_VERSIONS) -> bytes:
        self.writer.write(encode_preamble(versions))
        return await self.reader.readexactly(PREAMBLE.size)

    async def frame(self) -> SessionFrame:
        async with asyncio.timeout(DEADLINE_S):
            length, *_ = HEADER.unpack(await self.reader.readexactly(HEADER.size))
            return decode_frame(await self.reader.readexactly(length))

    async def ended(self) -> bytes:
        """The unread bytes until the other side closes."""
        async with asyncio.timeout(DEADLINE_S):
            try:
                return await self.reader.read()
            except ConnectionError:
                return b""

    async def close(self) -> None:
        self.writer.close()
        try:
            await self.writer.wait_closed()
        except ConnectionError:
            return

    async def open(
        self, letter: str, *, secret: bytes | None = SECRET, advertised: str = "", dp_rank: int = 0
    ) -> None:
        """The whole handshake as dialler."""
        await self.preamble()
        me = hello(letter, advertised=advertised, dp_rank=dp_rank, keyed=secret is not None)
        shake = Handshake(me, dialling=True, key=session_key(secret), versions=SESSION_VERSIONS)
        self.send(me)
        while True:
            progress = shake.receive(await self.frame(), 10.0)
            if progress is Progress.SEND_PROOF:
                self.send(shake.proof_frame())
            elif progress is Progress.PAYLOAD:
                self.send(Welcome(payload=b"raw", max_frame_bytes=2**20))
            elif progress is Progress.DECIDE:
                self.send(Opened())
                return
            elif progress is Progress.OPEN:
                return
            elif progress is not Progress.AUTHENTICATED:
                raise AssertionError(f"{progress}: {shake.refusal}")


def hello(letter: str, **changes: Any) -> SessionHello:
    fields: dict[str, Any] = {
        "incarnation": incarnation(letter),
        "role": Role.DECODE,
        "dp_rank": 0,
        "advertised": "",
        "nonce": letter.encode() * 32,
        "keyed": True,
        "keepalive_s": 0.01,
    }
    return SessionHello(**(fields | changes))


__all__ = ["Events", "Message", "Note", "Question", "RawPeer", "SessionAccepted", "closing", "hello", "node"]
