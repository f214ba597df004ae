"""What a leader and the worker process of one of its ranks say to each other, over a socket of one host.

    frame   unsigned 32-bit length of the body, body (msgpack)

The worker speaks first: `ReadyAnswer`. To a `…Command` it says the `…Answer` of the same name; to a
`WriteCommand` it says `LandedAnswer` or `BrokenAnswer`, to a `PingCommand` `PongAnswer`, to those of which
`Rank` has coroutines `DoneAnswer`.
"""

from __future__ import annotations

import struct

import msgspec

from segue.kv.errors import DECODE_ERRORS, ErrorInfo, RequestTooLarge, TransferFailed
from segue.kv.ids import RankId, TransferId
from segue.kv.layout.blocks import CopyBlock
from segue.kv.layout.content import Content
from segue.kv.layout.spec import PoolSpec
from segue.kv.path_figures import PathFigures
from segue.kv.transport.probe import PageShape, Scratch

HEAD = struct.Struct("!I")
#: More than the blocks of any chunk, or the pages of any prompt, take.
MAX_BYTES = 64 * 2**20


class ReadyAnswer(msgspec.Struct, frozen=True, tag=True):
    """The rank's pool and how peers reach it: an encoded `Endpoint` for each transport's name; and where its
    scratch is, if it has any."""

    spec: PoolSpec
    endpoints: dict[str, bytes]
    scratch: Scratch | None = None


class ConnectCommand(msgspec.Struct, frozen=True, tag=True):
    """`Rank.connect`; `number` names the question."""

    number: int
    transport: str
    peer: RankId
    endpoint: bytes
    timeout_s: float


class AdmitCommand(msgspec.Struct, frozen=True, tag=True):
    """`Rank.admit`."""

    number: int
    transports: list[str]
    peer: RankId
    epoch: int


class MeasureCommand(msgspec.Struct, frozen=True, tag=True):
    """`Rank.measure`."""

    number: int
    transport: str
    peer: RankId
    epoch: int
    scratch: Scratch
    shape: PageShape
    timeout_s: float


class DoneAnswer(msgspec.Struct, frozen=True, tag=True):
    """What was asked by this number was done, or why it was not; `figures` if something was measured."""

    number: int
    figures: PathFigures | None = None
    error: ErrorInfo | None = None


class WriteCommand(msgspec.Struct, frozen=True, tag=True):
    """`Rank.write`."""

    transport: str
    peer: RankId
    epoch: int
    number: int
    blocks: list[CopyBlock]


class LandedAnswer(msgspec.Struct, frozen=True, tag=True):
    """`kv.transport.base.Written`; `number` is its tag."""

    transport: str
    peer: RankId
    epoch: int
    number: int
    nbytes: int
    seconds: float


class BrokenAnswer(msgspec.Struct, frozen=True, tag=True):
    """`kv.transport.base.WriteFailed`; `number` is its tag."""

    transport: str
    peer: RankId
    epoch: int
    number: int
    error: ErrorInfo
    refused: bool


class GrantCommand(msgspec.Struct, frozen=True, tag=True):
    """`Rank.grant`."""

    transport: str
    peer: RankId
    epoch: int
    pages: list[int]
    slot: int | None


class GrantAnswer(msgspec.Struct, frozen=True, tag=True):
    """Writes of `epoch` by this rank of a peer may land, or why they may not."""

    peer: RankId
    epoch: int
    error: ErrorInfo | None = None


class FenceCommand(msgspec.Struct, frozen=True, tag=True):
    """`Rank.fence`."""

    transport: str
    peer: RankId
    epoch: int


class FenceAnswer(msgspec.Struct, frozen=True, tag=True):
    """`kv.transport.base.Fenced`."""

    transport: str
    peer: RankId
    epoch: int
    proven: bool


class PeerGoneAnswer(msgspec.Struct, frozen=True, tag=True):
    """`kv.transport.base.PeerGone`."""

    transport: str
    peer: RankId
    proven: bool
    error: ErrorInfo


class ChecksumCommand(msgspec.Struct, frozen=True, tag=True):
    """`Rank.checksum`."""

    transfer: TransferId
    rank: int
    number: int
    content: Content


class ChecksumAnswer(msgspec.Struct, frozen=True, tag=True):
    """`kv.protocol.events.ChecksumReady`."""

    transfer: TransferId
    rank: int
    number: int
    checksum: int
    error: ErrorInfo | None = None


class FailedAnswer(msgspec.Struct, frozen=True, tag=True):
    """The worker could not do what it was asked, and cannot say for which hand-off: it ends."""

    error: ErrorInfo


class PingCommand(msgspec.Struct, frozen=True, tag=True):
    """Are you there?"""


class PongAnswer(msgspec.Struct, frozen=True, tag=True):
    """Yes."""


Command = (
    ConnectCommand
    | AdmitCommand
    | MeasureCommand
    | WriteCommand
    | GrantCommand
    | FenceCommand
    | ChecksumCommand
    | PingCommand
)
Answer = (
    ReadyAnswer
    | DoneAnswer
    | LandedAnswer
    | BrokenAnswer
    | GrantAnswer
    | FenceAnswer
    | PeerGoneAnswer
    | ChecksumAnswer
    | FailedAnswer
    | PongAnswer
)

_encoder = msgspec.msgpack.Encoder()


def encode(message: Command | Answer) -> bytes:
    """One frame. RequestTooLarge beyond `MAX_BYTES`."""
    body = _encoder.encode(message)
    if len(body) > MAX_BYTES:
        raise RequestTooLarge(
            f"{type(message).__name__} for a rank takes {len(body)} bytes; at most {MAX_BYTES} may"
        )
    return HEAD.pack(len(body)) + body


class Frames:
    """Bytes in, messages of one side out."""

    def __init__(self, kind: object) -> None:
        self._decoder: msgspec.msgpack.Decoder[Command | Answer] = msgspec.msgpack.Decoder(kind)
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Command | Answer]:
        """What is complete now. Raises TransferFailed for bytes that are no message."""
        self._buffer += data
        found: list[Command | Answer] = []
        while len(self._buffer) >= HEAD.size:
            (length,) = HEAD.unpack_from(self._buffer)
            if length > MAX_BYTES:
                raise TransferFailed(f"a frame of {length} bytes, at most {MAX_BYTES} are taken")
            if len(self._buffer) < HEAD.size + length:
                break
            try:
                found.append(self._decoder.decode(self._buffer[HEAD.size : HEAD.size + length]))
            except DECODE_ERRORS as exc:
                raise TransferFailed(f"unreadable message between a leader and its worker: {exc}") from exc
            del self._buffer[: HEAD.size + length]
        return found
