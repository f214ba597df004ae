"""The bytes of a session's connection: a preamble, then length-prefixed frames.

    preamble   6 bytes `segue\\0`, unsigned 8-bit oldest protocol version (0: the newest alone), newest one
    frame      unsigned 32-bit length of the body, unsigned 8-bit kind, CRC-32 of these two,
               unsigned 32-bit checksum of the body, body
    kind 0     a frame of the session itself (`SessionFrame`, msgpack)
    kind 1     a message of the caller's union type (msgpack)

Integers are big-endian. TCP's own checksum misses a flip that a broken box on the way makes, and a
flipped token is a wrong answer: so each frame has a checksum, which proves nothing against an attacker
(TLS does). The versions stand outside the frames, so that two sides whose frames differ can still tell each
other why they part. Both use the highest version that both speak.
"""

from __future__ import annotations

import struct
import zlib
from typing import Annotated, Final

import msgspec
import xxhash

from segue.kv.errors import ErrorInfo
from segue.kv.ids import Incarnation, LeaderId, Role
from segue.kv.versions import Versions

#: Compared when a session opens. Raise the newest one whenever a frame or a message changes its meaning, and
#: the oldest one when its meaning is not understood any more.
SESSION_VERSIONS: Final = Versions(5, 5)

#: No frame before authentication is larger, so that one who proves nothing costs next to nothing.
HANDSHAKE_FRAME_BYTES: Final = 4096

KIND_SESSION: Final = 0
KIND_MESSAGE: Final = 1

HEADER: Final = struct.Struct("!IBII")
_LEAD: Final = struct.Struct("!IB")
PREAMBLE: Final = struct.Struct("!6sBB")
_MAGIC: Final = b"segue\x00"

NONCE_BYTES: Final = 32
MAC_BYTES: Final = 32
SESSION_ID_BYTES: Final = 16

_SessionId = Annotated[bytes, msgspec.Meta(min_length=SESSION_ID_BYTES, max_length=SESSION_ID_BYTES)]


class SessionHello(msgspec.Struct, frozen=True, tag="Hello", kw_only=True):
    """Both ways, first: who I claim to be. Proven by the `Proof` that follows.

    `advertised` is where peers reach my listener, as I tell it the registry (`host:port`; empty without
    a listener, or when I do not know it), `keyed` says whether I hold a secret, `keepalive_s` how
    often I let the other side hear from me.
    """

    incarnation: Annotated[Incarnation, msgspec.Meta(min_length=1, max_length=64)]
    role: Role
    dp_rank: Annotated[int, msgspec.Meta(ge=0, lt=2**16)]
    advertised: Annotated[str, msgspec.Meta(max_length=300)]
    nonce: Annotated[bytes, msgspec.Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
    keyed: bool
    keepalive_s: Annotated[float, msgspec.Meta(gt=0)]

    @property
    def leader(self) -> LeaderId:
        """The peer of this session."""
        return LeaderId(self.incarnation, self.dp_rank)


class Proof(msgspec.Struct, frozen=True, tag=True):
    """Both ways, the dialling side first: I hold the secret. Empty when neither side has one."""

    mac: Annotated[bytes, msgspec.Meta(max_length=MAC_BYTES)]


class Welcome(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Both ways, after both proofs: the owner's payload, the largest frame I take, and the ids
    of the other sessions with this peer that I know (`others`, for the duplicate rule)."""

    payload: bytes
    max_frame_bytes: Annotated[int, msgspec.Meta(gt=0)]
    others: Annotated[list[_SessionId], msgspec.Meta(max_length=64)] = []


class SessionAccepted(msgspec.Struct, frozen=True, tag="Accepted"):
    """Listener to dialler: my owner accepts you; you decide. `others` as in `Welcome`."""

    others: Annotated[list[_SessionId], msgspec.Meta(max_length=64)] = []


class Opened(msgspec.Struct, frozen=True, tag=True):
    """From the side that decides: the session is open; messages may follow."""


class Duplicate(msgspec.Struct, frozen=True, tag=True):
    """From the side that decides: we already have a session; use that one."""


class SessionRefused(msgspec.Struct, frozen=True, tag="Refused"):
    """Both ways, before `Opened`: no session, and why."""

    error: ErrorInfo


class Ping(msgspec.Struct, frozen=True, tag=True):
    """Both ways, whenever nothing else was sent for `keepalive_s`. Needs no answer: the other
    side pings by itself, so each direction is judged on its own."""


class Bye(msgspec.Struct, frozen=True, tag=True):
    """Both ways: I end the session, and why."""

    error: ErrorInfo


SessionFrame = (
    SessionHello | Proof | Welcome | SessionAccepted | Opened | Duplicate | SessionRefused | Ping | Bye
)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[SessionFrame] = msgspec.msgpack.Decoder(SessionFrame)


def encode_preamble(versions: Versions) -> bytes:
    """The first eight bytes of either side."""
    alone = versions.oldest == versions.newest  # as before there were ranges
    return PREAMBLE.pack(_MAGIC, 0 if alone else versions.oldest, versions.newest)


def decode_preamble(data: bytes | bytearray | memoryview) -> Versions:
    """The peer's protocol versions; ValueError if the peer does not speak this protocol at all."""
    magic, oldest, newest = PREAMBLE.unpack(data)
    if magic != _MAGIC:
        raise ValueError("the first bytes are not those of a segue session")
    return Versions(oldest or newest, newest)


def encode_frame(frame: SessionFrame) -> bytes:
    """Header and body of one of the session's own frames."""
    return pack_frame(KIND_SESSION, _encoder.encode(frame))


def pack_frame(kind: int, body: bytes) -> bytes:
    """A frame of any kind around `body`."""
    return HEADER.pack(len(body), kind, lead_check(len(body), kind), body_check(body)) + body


def lead_check(length: int, kind: int) -> int:
    """Over the first two fields. On its own, because a flipped length would make the reader wait
    for bytes that never come, deaf to everything else."""
    return zlib.crc32(_LEAD.pack(length, kind))


def body_check(body: bytes | bytearray | memoryview) -> int:
    """32 bits over the body."""
    return xxhash.xxh3_64_intdigest(body) & 0xFFFFFFFF


def decode_frame(body: bytes | bytearray | memoryview) -> SessionFrame:
    """The session frame in `body`; one of `DECODE_ERRORS` if there is none."""
    return _decoder.decode(body)


def encode_message(encoder: msgspec.msgpack.Encoder, message: msgspec.Struct) -> bytearray:
    """Header and body of one of the caller's messages, in one buffer without a second copy."""
    frame = bytearray(HEADER.size)
    encoder.encode_into(message, frame, HEADER.size)
    with memoryview(frame) as view:
        mark = body_check(view[HEADER.size :])
    length = len(frame) - HEADER.size
    HEADER.pack_into(frame, 0, length, KIND_MESSAGE, lead_check(length, KIND_MESSAGE), mark)
    return frame
