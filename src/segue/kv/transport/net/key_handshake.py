"""How the two ends of a stream prove that they know the Endpoint's key, without sending it.

    listener → Challenge (nonce) → writer
    writer   → Response (its rank, its nonce, HMAC-SHA256) → listener
    listener → Verdict (accepted with its own HMAC, or the reason) → writer

Frames have a fixed size, so that a reader never trusts a length from the network. Encryption is not
decided here: under TLS (`channel`) all of this runs inside it, else the bytes cross as they are.
"""

from __future__ import annotations

import hmac
import secrets
import struct
from collections.abc import Callable

from segue.kv.errors import ConfigError, PeerRefused
from segue.kv.ids import Incarnation, LeaderId, RankId

#: Gives that many bytes that nobody can guess.
RandomBytes = Callable[[int], bytes]

KEY_BYTES = 16
VERSION = 3
_MAGIC = b"SGUE"
_NONCE = 16
_MAC = 32
_CHALLENGE = struct.Struct(f">4sH{_NONCE}s")
_RANK = struct.Struct(">16sII")
_RESPONSE = struct.Struct(f">4sH{_NONCE}s{_RANK.size}s{_MAC}s")
_VERDICT = struct.Struct(f">4sHB{_MAC}s128s")
CHALLENGE_BYTES = _CHALLENGE.size
RESPONSE_BYTES = _RESPONSE.size
VERDICT_BYTES = _VERDICT.size


def new_key(random_bytes: RandomBytes = secrets.token_bytes) -> bytes:
    """A fresh 128-bit key."""
    return random_bytes(KEY_BYTES)


def pack_rank(rank: RankId) -> bytes:
    """A rank as it travels. Raises ConfigError for one that cannot."""
    leader = rank.leader
    try:
        incarnation = bytes.fromhex(leader.incarnation)
        packed = _RANK.pack(incarnation, leader.dp_rank, rank.rank)
    except (ValueError, struct.error):
        incarnation = packed = b""
    if len(incarnation) != 16 or incarnation.hex() != leader.incarnation:
        raise ConfigError(f"no rank of an incarnation of 32 hex digits: {rank!r}")
    return packed


def unpack_rank(packed: bytes) -> RankId:
    """The rank that `pack_rank` made so many bytes of; they are always one."""
    incarnation, dp_rank, rank = _RANK.unpack(packed)
    return RankId(LeaderId(Incarnation(incarnation.hex()), dp_rank), rank)


def _sign(key: bytes, side: bytes, *parts: bytes) -> bytes:
    return hmac.digest(key, side + b"".join(parts), "sha256")


class ListenerProof:
    """The listening end of one stream. Pure: bytes in, bytes out."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._nonce = secrets.token_bytes(_NONCE)

    def challenge(self) -> bytes:
        """The first frame."""
        return _CHALLENGE.pack(_MAGIC, VERSION, self._nonce)

    def accept(self, frame: bytes) -> tuple[RankId, bytes]:
        """The peer, and the verdict to send. Raises PeerRefused, whose text may be sent."""
        if len(frame) != RESPONSE_BYTES:
            raise PeerRefused("not a segue stream")
        magic, version, nonce, rank, mac = _RESPONSE.unpack(frame)
        if magic != _MAGIC:
            raise PeerRefused("not a segue stream")
        if version != VERSION:
            raise PeerRefused(f"stream version {version}; this side speaks {VERSION}")
        if not hmac.compare_digest(mac, _sign(self._key, b"writer", self._nonce, frame[:-_MAC])):
            raise PeerRefused("wrong key")
        proof = _sign(self._key, b"listener", self._nonce, nonce)
        return unpack_rank(rank), _VERDICT.pack(_MAGIC, VERSION, 1, proof, b"")

    def refuse(self, reason: str) -> bytes:
        """The verdict that says no."""
        return _VERDICT.pack(_MAGIC, VERSION, 0, bytes(_MAC), reason.encode("ascii", "replace")[:128])


class WriterProof:
    """The connecting end of one stream. Pure: bytes in, bytes out."""

    def __init__(self, key: bytes, me: RankId) -> None:
        self._key = key
        self._me = me
        self._nonce = secrets.token_bytes(_NONCE)
        self._theirs = b""

    def respond(self, challenge: bytes) -> bytes:
        """The answer to the listener's first frame. Raises PeerRefused."""
        magic, version, self._theirs = _CHALLENGE.unpack(challenge)
        if magic != _MAGIC:
            raise PeerRefused("the address of the peer does not answer as a segue transport")
        if version != VERSION:
            raise PeerRefused(f"the peer speaks stream version {version}, this side {VERSION}")
        head = _RESPONSE.pack(_MAGIC, VERSION, self._nonce, pack_rank(self._me), bytes(_MAC))[:-_MAC]
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
