"""How the two ends of a stream prove that they know the Endpoint's key, without sending it.

    listener → Challenge (nonce) → writer
    writer   → Response (its name, its nonce, HMAC-SHA256) → listener
    listener → Verdict (accepted with its own HMAC, or the reason) → writer

Frames have a fixed size, so that a reader never trusts a length from the network. Encryption is not
decided here: under TLS (`tcp_channel`) all of this runs inside it, else the bytes cross as they are.
"""

from __future__ import annotations

import hmac
import secrets
import struct
from collections.abc import Callable
from dataclasses import dataclass

from segue.core.errors import ConfigError, PeerRefused

#: Gives that many bytes that nobody can guess.
RandomBytes = Callable[[int], bytes]

KEY_BYTES = 16
VERSION = 1
MAX_NAME_BYTES = 128
_MAGIC = b"SGUE"
_NONCE = 16
_MAC = 32
_CHALLENGE = struct.Struct(f">4sH{_NONCE}s")
_RESPONSE = struct.Struct(f">4sH{_NONCE}s16sHHB{MAX_NAME_BYTES}s{_MAC}s")
_VERDICT = struct.Struct(f">4sHB{_MAC}s128s")
CHALLENGE_BYTES = _CHALLENGE.size
RESPONSE_BYTES = _RESPONSE.size
VERDICT_BYTES = _VERDICT.size


def new_key(random_bytes: RandomBytes = secrets.token_bytes) -> bytes:
    """A fresh 128-bit key."""
    return random_bytes(KEY_BYTES)


def checked_name(name: str) -> str:
    """`name`, if it can be what peers call a side. Raises ConfigError."""
    if not (name and name.isascii() and name.isprintable() and len(name) <= MAX_NAME_BYTES):
        raise ConfigError(
            f"a transport's name is 1 to {MAX_NAME_BYTES} printable ASCII characters, not {name!r}"
        )
    return name


@dataclass(frozen=True, slots=True)
class Hello:
    """Who opened a stream. `group` is one random id for all `streams` of one `connect`."""

    name: str
    group: bytes
    index: int
    streams: int


def _sign(key: bytes, side: bytes, *parts: bytes) -> bytes:
    return hmac.digest(key, side + b"".join(parts), "sha256")


class Listener:
    """The listening end of one stream. Pure: bytes in, bytes out."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._nonce = secrets.token_bytes(_NONCE)

    def challenge(self) -> bytes:
        """The first frame."""
        return _CHALLENGE.pack(_MAGIC, VERSION, self._nonce)

    def accept(self, frame: bytes) -> tuple[Hello, bytes]:
        """Who is there, and the verdict to send. Raises PeerRefused, whose text may be sent."""
        if len(frame) != RESPONSE_BYTES:
            raise PeerRefused("not a segue stream")
        magic, version, nonce, group, index, streams, size, padded, mac = _RESPONSE.unpack(frame)
        if magic != _MAGIC:
            raise PeerRefused("not a segue stream")
        if version != VERSION:
            raise PeerRefused(f"stream version {version}; this side speaks {VERSION}")
        if not hmac.compare_digest(mac, _sign(self._key, b"writer", self._nonce, frame[:-_MAC])):
            raise PeerRefused("wrong key")
        if not 1 <= size <= MAX_NAME_BYTES or not index < streams:
            raise PeerRefused("malformed greeting")
        name = padded[:size].decode("ascii", "strict") if padded[:size].isascii() else ""
        if not name.isprintable() or not name:
            raise PeerRefused("malformed name")
        proof = _sign(self._key, b"listener", self._nonce, nonce)
        return Hello(name, group, index, streams), _VERDICT.pack(_MAGIC, VERSION, 1, proof, b"")

    def refuse(self, reason: str) -> bytes:
        """The verdict that says no."""
        return _VERDICT.pack(_MAGIC, VERSION, 0, bytes(_MAC), reason.encode("ascii", "replace")[:128])


class Writer:
    """The connecting end of one stream. Pure: bytes in, bytes out."""

    def __init__(self, key: bytes, hello: Hello) -> None:
        self._key = key
        self._hello = hello
        self._nonce = secrets.token_bytes(_NONCE)
        self._theirs = b""

    def respond(self, challenge: bytes) -> bytes:
        """The answer to the listener's first frame. Raises PeerRefused."""
        magic, version, self._theirs = _CHALLENGE.unpack(challenge)
        if magic != _MAGIC:
            raise PeerRefused("the address of the peer does not answer as a segue transport")
        if version != VERSION:
            raise PeerRefused(f"the peer speaks stream version {version}, this side {VERSION}")
        name = self._hello.name.encode("ascii")
        head = _RESPONSE.pack(
            _MAGIC,
            VERSION,
            self._nonce,
            self._hello.group,
            self._hello.index,
            self._hello.streams,
            len(name),
            name,
            bytes(_MAC),
        )[:-_MAC]
        return head + _sign(self._key, b"writer", self._theirs, head)

    def finish(self, verdict: bytes) -> None:
        """Raises PeerRefused unless the listener accepted and knows the key itself."""
        magic, version, accepted, mac, reason = _VERDICT.unpack(verdict)
        if magic != _MAGIC or version != VERSION:
            raise PeerRefused("the peer's verdict is unreadable")
        if not accepted:
            raise PeerRefused(
                f"the peer refused the stream: {reason.rstrip(bytes(1)).decode('ascii', 'replace')}"
            )
        if not hmac.compare_digest(mac, _sign(self._key, b"listener", self._theirs, self._nonce)):
            raise PeerRefused("the peer could not prove that it knows the key")
