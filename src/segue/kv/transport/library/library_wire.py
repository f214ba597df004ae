"""The control stream between the two ends of a path of `library`: what is said, and how it is read.

    writer   → Greeting (what its library says of it) → receiver
    receiver → Ready (its regions, its library's blob) → writer
    receiver → Grant (an epoch may be written)
             | Fence (an epoch has ended: answer when nothing of it is on its way any more)
             | Answer (to an Ask)
    writer   → Ask (may I write this epoch?) | Settled (the answer to a Fence) | Goodbye

Each message is msgpack behind its length, four bytes, little-endian. Its bytes come from a peer that knows
the endpoint's key; they are bounded and checked all the same.
"""

from __future__ import annotations

import select
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import msgspec

from segue.kv.errors import DECODE_ERRORS, PeerLost, SegueError, TransferFailed
from segue.kv.ids import RankId
from segue.kv.transport.net.ioloop import IoLoop
from segue.kv.transport.net.silence import SilenceWatch
from segue.kv.transport.net.stream import RECORD_BYTES, Channel

MAX_FRAME_BYTES = 4 * 2**20
MAX_UNSENT_BYTES = 2 * MAX_FRAME_BYTES
_HEAD_BYTES = 4

Epoch = int  # msgpack itself has none of more than 64 bits
Blob = Annotated[bytes, msgspec.Meta(max_length=MAX_FRAME_BYTES // 2)]


class RegionAt(msgspec.Struct, frozen=True, array_like=True):
    """One region of the receiver's memory, in its own process (or on its own `device`)."""

    address: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
    nbytes: Annotated[int, msgspec.Meta(gt=0, le=2**63 - 1)]
    device: Annotated[str, msgspec.Meta(max_length=64)]


class Greeting(msgspec.Struct, frozen=True, tag="greeting"):
    """Writer: the first message."""

    blob: Blob


class ReceiverReady(msgspec.Struct, frozen=True, tag="ready"):
    """Receiver: its end is made."""

    regions: Annotated[tuple[RegionAt, ...], msgspec.Meta(min_length=1, max_length=65536)]
    blob: Blob


class GrantEpoch(msgspec.Struct, frozen=True, tag="grant"):
    """Receiver: writes of `epoch` may land."""

    epoch: Epoch


class AskAnswer(msgspec.Struct, frozen=True, tag="answer"):
    """Receiver: whether they may, as was asked."""

    epoch: Epoch
    granted: bool


class FenceEpoch(msgspec.Struct, frozen=True, tag="fence"):
    """Receiver: they may not any more."""

    epoch: Epoch


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    """Writer: whether they may."""

    epoch: Epoch


class Settled(msgspec.Struct, frozen=True, tag="settled"):
    """Writer: every write of `epoch` that was begun has landed, as the library says; none will begin."""

    epoch: Epoch


class Goodbye(msgspec.Struct, frozen=True, tag="goodbye"):
    """Writer: the same of every epoch. The stream ends."""


FromReceiver = ReceiverReady | GrantEpoch | AskAnswer | FenceEpoch
FromWriter = Greeting | Ask | Settled | Goodbye
Message = FromReceiver | FromWriter
_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(Message)


def frame(message: msgspec.Struct) -> bytes:
    """A message as it travels. Raises TransferFailed for one that is too long."""
    body = _encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise TransferFailed(f"a control message of {len(body)} bytes; the limit is {MAX_FRAME_BYTES}")
    return len(body).to_bytes(_HEAD_BYTES, "little") + body


class ControlFrames:
    """Messages of the union `kinds` out of a stream of bytes. Holds at most one frame, and what came with
    it."""

    def __init__(self, kinds: Any = Message) -> None:
        self._data = bytearray()
        self._decode = _decoder if kinds is Message else msgspec.msgpack.Decoder(kinds)

    def feed(self, data: bytes) -> list[Any]:
        """The messages that are whole now. Raises TransferFailed for what is none."""
        self._data += data
        found: list[Any] = []
        while len(self._data) >= _HEAD_BYTES:
            end = _HEAD_BYTES + int.from_bytes(self._data[:_HEAD_BYTES], "little")
            if end > _HEAD_BYTES + MAX_FRAME_BYTES:
                raise TransferFailed("the peer's control message is longer than the limit")
            if len(self._data) < end:
                break
            try:
                found.append(self._decode.decode(bytes(self._data[_HEAD_BYTES:end])))
            except DECODE_ERRORS as exc:
                raise TransferFailed(f"the peer's control message is unreadable: {exc}") from exc
            del self._data[:end]
        return found


class ControlStream:
    """One authenticated connection. Everything here runs on the loop's thread.

    told: is given each message; what it raises ends the stream.
    ended: called once when the stream has ended by itself, with the reason.
    A peer that owes a message (`expect`) and says nothing for `silence_s` has ended. The messages are those
    of the union `kinds`.
    """

    def __init__(
        self,
        loop: IoLoop,
        channel: Channel,
        peer: RankId,
        told: Callable[[Any], None],
        ended: Callable[[SegueError], None],
        silence_s: float,
        kinds: Any = Message,
    ) -> None:
        self._loop = loop
        self._channel = channel
        self._peer = peer
        self._told = told
        self._ended = ended
        self._silence_s = silence_s
        self._frames = ControlFrames(kinds)
        self._unsent = bytearray()
        self._waits = False  # to be called when the socket has room
        self._overfull = False  # the peer does not read, and nothing more is said to it
        self._owed = 0
        self._heard_at = 0.0
        self._silence = SilenceWatch(loop, silence_s, self._owed_since, self._silent)
        self.closed = False

    def open(self) -> None:
        """Start to read."""
        try:
            self._loop.watch(self._channel.fileno(), select.EPOLLIN, self._ready)
        except OSError as exc:
            self._end(PeerLost(f"the stream of {self._peer} cannot be watched: {exc.strerror}"))
            return
        if self._channel.buffered:  # the peer's first bytes may have come with the last of the handshake
            self._loop.post(partial(self._ready, select.EPOLLIN))

    def send(self, message: msgspec.Struct, *, owes: bool = False) -> None:
        """Say something, now or when the socket has room; `owes`: the peer must answer it."""
        if self.closed or self._overfull:
            return
        if owes:
            self.expect()
        self._unsent += frame(message)
        if len(self._unsent) > MAX_UNSENT_BYTES:
            self._unsent.clear()
            self._overfull = True
            error = PeerLost(f"{self._peer} does not read what it is told", peer=str(self._peer))
            # Not at once: the caller may be at work on what the end of this stream ends.
            self._loop.post(partial(self._end, error))
        elif not self._waits:
            self._guard(self._push)

    def expect(self) -> None:
        """The peer owes one more message from now on."""
        self._owed += 1
        if self._owed == 1:
            self._heard_at = self._loop.time()
        self._silence.start()

    def answered(self) -> None:
        """It has said what it owed."""
        self._owed -= 1

    def close(self) -> None:
        """Close it without a word; what was sent is still delivered. Idempotent."""
        if self.closed:
            return
        self.closed = True
        self._silence.stop()
        self._loop.unwatch(self._channel.fileno())
        self._channel.close()

    def _end(self, error: SegueError) -> None:
        if not self.closed:
            self.close()
            self._ended(error)

    def _ready(self, events: int) -> None:
        if events & select.EPOLLOUT and not self.closed:
            self._guard(self._push)
        if events & ~select.EPOLLOUT and not self.closed:
            self._guard(self._read)

    def _guard(self, step: Callable[[], None]) -> None:
        try:
            step()
        except SegueError as exc:
            self._end(exc)
        except OSError as exc:
            self._end(PeerLost(f"the stream of {self._peer} broke: {exc.strerror}", peer=str(self._peer)))

    def _read(self) -> None:
        # One TLS record at most, so nothing stays behind where no poll would see it.
        data = self._channel.receive(RECORD_BYTES)
        if data is None:
            return
        if not data:
            raise PeerLost(f"{self._peer} closed its stream", peer=str(self._peer))
        self._heard_at = self._loop.time()
        for message in self._frames.feed(data):
            if not self.closed:
                self._told(message)

    def _push(self) -> None:
        # TLS wants an attempt that is repeated to have the same bytes again, so nothing is cut here.
        try:
            while self._unsent and (sent := self._channel.send(bytes(self._unsent[:RECORD_BYTES]))):
                del self._unsent[:sent]
        except OSError:
            # The peer does not listen any more. Its earlier messages, perhaps goodbye, are still to be read,
            # and behind them the end.
            self._unsent.clear()
        if bool(self._unsent) != self._waits:
            self._waits = bool(self._unsent)
            self._loop.change(
                self._channel.fileno(), select.EPOLLIN | (select.EPOLLOUT if self._waits else 0)
            )

    def _owed_since(self) -> float | None:
        return self._heard_at if self._owed > 0 else None

    def _silent(self) -> None:
        self._end(PeerLost(f"{self._peer} said nothing for {self._silence_s} s", peer=str(self._peer)))
