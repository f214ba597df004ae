"""One connected socket between two processes of one engine, one framing.

    frame   unsigned 32-bit length of the body, body (msgpack)

Messages arrive in the order in which they were sent, on the thread of the link. Both ends trust each other:
they are one engine, and started each other.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable
from typing import Any, cast

import msgspec

from segue.kv.errors import DECODE_ERRORS, ErrorInfo, PeerLost, RequestTooLarge, SegueError, TransferFailed
from segue.kv.io import Io, IoThread
from segue.kv.limits import Limits
from segue.kv.ready import ReadyEvent
from segue.kv.session.keepalive import Keepalive

HEAD = struct.Struct("!I")
#: More than the blocks of any chunk, the pages of any prompt, or any step takes: 64 sequences of 4,096 tokens
#: with all their pages take less than 4 MiB.
MAX_BYTES = 64 * 2**20
#: For a loop to take a connected socket.
OPEN_S = 10.0


def _plain(value: Any) -> ErrorInfo | int:
    if isinstance(value, SegueError):
        return value.info
    if isinstance(value, ReadyEvent):
        return value.number
    raise NotImplementedError(f"{type(value).__name__} in a message between two processes")


_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)


def encode(message: msgspec.Struct) -> bytes:
    """One frame. RequestTooLarge beyond `MAX_BYTES`."""
    body = _encoder.encode(message)
    if len(body) > MAX_BYTES:
        raise RequestTooLarge(f"{type(message).__name__} takes {len(body)} bytes; at most {MAX_BYTES} may")
    return HEAD.pack(len(body)) + body


class PingCommand(msgspec.Struct, frozen=True, tag=True):
    """Are you there?"""


class PongAnswer(msgspec.Struct, frozen=True, tag=True):
    """Yes."""


def _no_ready_event(_number: int) -> ReadyEvent:
    raise ValueError("this end of the link knows no ReadyEvent")


class Frames:
    """Bytes in, messages out: those of the union `kinds`, and the link's own. A `ReadyEvent` travels as its
    number, for which `ready_event` gives that of this end."""

    def __init__(self, kinds: Any, ready_event: Callable[[int], ReadyEvent] = _no_ready_event) -> None:
        kinds = kinds | PingCommand | PongAnswer
        self._ready_event = ready_event
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(kinds, dec_hook=self._read)
        self._buffer = bytearray()

    def _read(self, kind: type, value: Any) -> Any:
        if kind is ReadyEvent:
            return self._ready_event(msgspec.convert(value, int))
        assert kind is SegueError
        return msgspec.convert(value, ErrorInfo).exception()

    def feed(self, data: bytes) -> list[Any]:
        """The messages that are complete now. Raises TransferFailed for bytes that are no message."""
        self._buffer += data
        found: list[Any] = []
        while len(self._buffer) >= HEAD.size:
            (length,) = HEAD.unpack_from(self._buffer)
            if length > MAX_BYTES:
                raise TransferFailed(f"a frame of {length} bytes, at most {MAX_BYTES} are taken")
            if len(self._buffer) < HEAD.size + length:
                break
            try:
                found.append(self._decoder.decode(self._buffer[HEAD.size : HEAD.size + length]))
            except DECODE_ERRORS as exc:
                raise TransferFailed(f"unreadable message: {exc}") from exc
            del self._buffer[: HEAD.size + length]
        return found


class ProcessLink(asyncio.Protocol):
    """One end of a link over `sock`: a connected stream socket, which the link closes. Errors call the other
    end `name`. `kinds` is the union of the tagged msgspec structs that the other end sends.

    At most `limits.max_session_backlog_bytes` wait for another end that does not read. `io` is the thread
    that it lives on, by default one of its own. `received` and `ended` are as in `attach`, from the first
    message on; without them a message that comes before `attach` is lost.
    """

    def __init__(
        self,
        sock: socket.socket,
        name: str,
        kinds: Any,
        *,
        limits: Limits | None = None,
        io: Io | None = None,
        received: Callable[[Any], None] | None = None,
        ended: Callable[[SegueError, bool], None] | None = None,
    ) -> None:
        self.name = name
        #: gives the `ReadyEvent` of this end for a number of the other end
        self.ready_event: Callable[[int], ReadyEvent] = _no_ready_event
        self.limits = limits or Limits()
        self.io: Io = io or IoThread()
        self._own_io = io is None
        self._frames = Frames(kinds, lambda number: self.ready_event(number))
        self._received = received
        self._ended = ended
        self._transport: asyncio.Transport | None = None
        self._keepalive = Keepalive(self.io.loop, self.limits, self._ping, self._silent)
        #: why nothing is sent or heard any more; `_over`: the other end has closed
        self._error: SegueError | None = None
        self._over = False
        self._lost = asyncio.Event()
        if self._own_io:
            self.io.on_end = self._io_ended
            self.io.start()
        self.io.call(self._open(sock), OPEN_S)

    async def _open(self, sock: socket.socket) -> None:
        await self.io.loop.create_connection(lambda: self, sock=sock)

    # ---- from any thread -------------------------------------------------------------------------

    def post(self, message: msgspec.Struct) -> None:
        """Send `message`; nothing is sent once the link has ended. Raises RequestTooLarge beyond 64 MiB."""
        self.io.post(self.send_frame, encode(message))

    def close(self) -> None:
        """End it when what was sent has been read; the other end hears so. Idempotent; not on its thread."""
        try:
            if not self.io.loop.is_closed():
                self.io.call(self._hang_up(), self.limits.connect_s)
        finally:
            if self._own_io:
                self.io.stop()

    async def _hang_up(self) -> None:
        given_up = self._error is not None
        self.detach()
        self._end(PeerLost(f"the link to {self.name} is closed"))
        if self._transport is None:
            return
        self._transport.close()
        try:
            async with asyncio.timeout(0 if given_up else self.limits.connect_s / 2):
                await self._lost.wait()
        except TimeoutError:
            self._transport.abort()
            await self._lost.wait()

    # ---- on its thread ---------------------------------------------------------------------------

    def attach(
        self,
        received: Callable[[Any], None],
        ended: Callable[[SegueError, bool], None],
        *,
        ping: bool = False,
    ) -> None:
        """From now on `received` gets the messages; it must not raise. `ping`: see `watch`.

        `ended` is told why nothing can be sent or heard any more: first with False, when the other end is
        silent, does not read, or says nonsense; then, or at once, with True, when it has closed. Each at most
        once, and not after `detach` or `close`."""
        self._received, self._ended = received, ended
        if self._error is not None:
            ended(self._error, self._over)
        elif ping:
            self.watch()

    def watch(self) -> None:
        """From now on the other end must answer, or send something else, within `limits.peer_silence_s`."""
        if self._error is None:
            self._keepalive.stop()
            self._keepalive.heard_at = self.io.loop.time()
            self._keepalive.start()

    def send(self, message: msgspec.Struct) -> None:
        """Like `post`, at once."""
        self.send_frame(encode(message))

    def detach(self) -> None:
        """Tell nobody of anything any more."""
        self._received = self._ended = None
        self._keepalive.stop()

    def send_frame(self, frame: bytes) -> None:
        """Send what `encode` gave, at once."""
        transport = self._transport
        if transport is None or transport.is_closing() or self._error is not None:
            return
        if transport.get_write_buffer_size() > self.limits.max_session_backlog_bytes:
            self._end(PeerLost(f"{self.name} does not read what it is told"))
        else:
            transport.write(frame)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        # uvloop's transports have asyncio's methods but not its base class.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        if self._error is not None:
            return
        self._keepalive.heard_at = self.io.loop.time()
        try:
            messages = self._frames.feed(data)
        except SegueError as error:
            # Not closed here: that the link has ended must say that the other end closed it.
            self._end(error)
            return
        for message in messages:
            if self._error is None:
                self._take(message)

    def _take(self, message: Any) -> None:
        match message:
            case PingCommand():
                self.send(PongAnswer())
            case PongAnswer():
                pass
            case _:
                self._deliver(message)

    def _deliver(self, message: Any) -> None:
        if self._received is not None:  # else it is released
            self._received(message)

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self._lost.set()
        self._keepalive.stop()
        if not self._over:
            self._over = True
            self._end(PeerLost(f"{self.name} has ended"))

    def _io_ended(self, error: SegueError) -> None:
        if self._error is None:
            self._end(error)

    # ---- inside ----------------------------------------------------------------------------------

    def _ping(self) -> None:
        self._keepalive.sent_at = self.io.loop.time()
        self.send(PingCommand())

    def _silent(self, silence_s: float) -> None:
        self._end(PeerLost(f"{self.name} has said nothing for {silence_s:.1f} s"))

    def _end(self, error: SegueError) -> None:
        if self._error is None:
            self._error = error
            self._keepalive.stop()
        elif not self._over:
            return
        if self._ended is not None:
            self._ended(self._error, self._over)
