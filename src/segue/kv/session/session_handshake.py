"""The opening of a session, sans-I/O: frames in, frames and decisions out.

    dialler                                listener
    Hello            ->                                    claims and a fresh nonce
                     <-                    Hello           claims and a fresh nonce
    Proof            ->                                    the dialler proves itself first
                     <-                    Proof, Welcome
    Welcome          ->                                    after its owner accepted the listener
                     <-                    Accepted        after its owner accepted the dialler
    Opened           ->                                    …if the dialler decides; if the listener
                     <-                    Opened          decides, `Opened` replaces `SessionAccepted`

A proof is HMAC-SHA256 under a key derived from the shared secret, over the direction, the protocol
versions that either side speaks and both Hellos (nonces, incarnations, roles, ranks, listeners). The
direction in it makes a proof useless when sent back to its author, the nonces make it useless later. The
versions keep somebody in between from making both sides use an older one.

**Who decides.** The side with the smaller `LeaderId`. It alone opens, so two connections that two
nodes dial to each other at the same moment cannot both win or both lose: the first one that it
opens stays, and later ones are answered `Duplicate` as long as the other side still knows the first
(its `others`). If the other side no longer does, the old one is broken and the new one replaces it.
"""

from __future__ import annotations

import enum
import hashlib
import hmac

import msgspec

from segue.kv.errors import ErrorCode, ErrorInfo, PeerRefused, Unauthorized
from segue.kv.session.frames import (
    SESSION_ID_BYTES,
    Duplicate,
    Opened,
    Proof,
    SessionAccepted,
    SessionFrame,
    SessionHello,
    SessionRefused,
    Welcome,
)
from segue.kv.versions import Versions

#: Codes that a peer without proof may make us raise. Other codes would let it
#: put words into our mouth; they become PeerRefused with the text kept.
_CODES_BEFORE_PROOF = frozenset(
    {ErrorCode.UNAUTHORIZED, ErrorCode.PEER_REFUSED, ErrorCode.OUT_OF_CAPACITY, ErrorCode.DRAINING}
)


def session_key(secret: bytes | None) -> bytes | None:
    """The key of proofs: derived, so that no other use of the secret can be played against it."""
    return None if secret is None else hmac.digest(secret, b"segue session key v1", "sha256")


def prove(
    key: bytes | None,
    versions: tuple[Versions, Versions],
    dialler: SessionHello,
    listener: SessionHello,
    by_dialler: bool,
) -> bytes:
    """The proof of one side; empty without a key. `versions` are the dialler's and the listener's."""
    if key is None:
        return b""
    side = "dialler" if by_dialler else "listener"
    transcript = msgspec.msgpack.encode(("segue session proof", side, *versions, dialler, listener))
    return hmac.digest(key, transcript, "sha256")


def session_id(dialler: SessionHello, listener: SessionHello) -> bytes:
    """Names one connection for both sides."""
    return hashlib.sha256(dialler.nonce + listener.nonce).digest()[:SESSION_ID_BYTES]


class Expect(enum.Enum):
    """The next expected frame."""

    HELLO = enum.auto()
    PROOF = enum.auto()
    WELCOME = enum.auto()
    ACCEPTED = enum.auto()
    OPENED = enum.auto()
    NOTHING = enum.auto()


class Progress(enum.Enum):
    """The result of a frame, for the owner of the connection."""

    WAIT = enum.auto()
    #: The dialler: the listener's claims are here; answer with `proof_frame`.
    SEND_PROOF = enum.auto()
    #: The peer has proven itself. The listener answers with its own proof and welcome.
    AUTHENTICATED = enum.auto()
    #: The peer's payload is here: ask the owner, then welcome, accept or decide.
    PAYLOAD = enum.auto()
    #: The listener accepted us and we decide.
    DECIDE = enum.auto()
    OPEN = enum.auto()
    DUPLICATE = enum.auto()
    #: The peer declined; `Handshake.refusal` says why.
    REFUSED = enum.auto()


class Handshake:
    """One side of one opening. A refusal of ours is a SegueError raised from `receive`."""

    def __init__(self, me: SessionHello, *, dialling: bool, key: bytes | None, versions: Versions) -> None:
        self.me = me
        self.dialling = dialling
        self.peer: SessionHello | None = None
        self.welcome: Welcome | None = None
        self.others: frozenset[bytes] = frozenset()
        self.refusal: ErrorInfo | None = None
        self.authenticated = False
        self.id = b""
        self._key = key
        self.versions = versions
        #: the peer's versions, and the version that both use; from its preamble on (`meet`)
        self.theirs = versions
        self.version = versions.newest
        self._expect = Expect.HELLO

    @property
    def decides(self) -> bool:
        """True if this side opens the session (known once the peer's Hello is)."""
        assert self.peer is not None
        return self.me.leader < self.peer.leader

    def meet(self, theirs: Versions) -> bool:
        """The peer speaks these versions; False if none of them is one of ours."""
        version = self.versions.common(theirs)
        self.theirs, self.version = theirs, version or self.version
        return version is not None

    def receive(self, frame: SessionFrame, peer_silence_s: float) -> Progress:
        """Take the peer's next frame. Raises our refusal, which the caller sends as `SessionRefused`.
        `peer_silence_s` is after how much silence this side gives a peer up."""
        if isinstance(frame, SessionRefused):
            return self._on_refused(frame.error)
        match self._expect, frame:
            case Expect.HELLO, SessionHello():
                return self._on_hello(frame, peer_silence_s)
            case Expect.PROOF, Proof():
                return self._on_proof(frame)
            case Expect.WELCOME, Welcome():
                self.welcome = frame
                self.others = frozenset(frame.others)
                if not self.dialling:
                    self._expect = Expect.NOTHING if self.decides else Expect.OPENED
                else:
                    self._expect = Expect.ACCEPTED if self.decides else Expect.OPENED
                return Progress.PAYLOAD
            case Expect.ACCEPTED, SessionAccepted():
                self.others = frozenset(frame.others)
                self._expect = Expect.NOTHING
                return Progress.DECIDE
            case Expect.OPENED, Opened():
                self._expect = Expect.NOTHING
                return Progress.OPEN
            case Expect.OPENED, Duplicate():
                self._expect = Expect.NOTHING
                return Progress.DUPLICATE
            case _:
                raise PeerRefused(
                    f"the peer sent {type(frame).__name__} where {self._expect.name} was due in the handshake"
                )

    def proof_frame(self) -> Proof:
        """Our own proof; the peer's Hello must be here."""
        dialler, listener = self._hellos()
        return Proof(prove(self._key, self._both, dialler, listener, self.dialling))

    @property
    def _both(self) -> tuple[Versions, Versions]:
        """The versions of the dialler, then of the listener."""
        return (self.versions, self.theirs) if self.dialling else (self.theirs, self.versions)

    def _hellos(self) -> tuple[SessionHello, SessionHello]:
        assert self.peer is not None
        return (self.me, self.peer) if self.dialling else (self.peer, self.me)

    def _on_hello(self, hello: SessionHello, peer_silence_s: float) -> Progress:
        self.peer = hello
        if hello.leader == self.me.leader:
            raise PeerRefused("the address belongs to this very leader: a node does not connect to itself")
        if hello.nonce == self.me.nonce:
            raise Unauthorized("the peer sent our own nonce back")
        if hello.keyed and not self.me.keyed:
            raise Unauthorized("one side has a secret and the other has none: give both the same secret file")
        if self.me.keyed and not hello.keyed:
            raise Unauthorized(
                "a secret is required here and the other side has none: give it the secret file"
            )
        if hello.keepalive_s >= peer_silence_s:
            raise PeerRefused(
                f"one side is heard every {hello.keepalive_s} s and the other gives up after "
                f"{peer_silence_s} s of silence: make keepalive_s smaller than peer_silence_s on both sides"
            )
        self.id = session_id(*self._hellos())
        self._expect = Expect.PROOF
        return Progress.SEND_PROOF if self.dialling else Progress.WAIT

    def _on_proof(self, proof: Proof) -> Progress:
        expected = prove(self._key, self._both, *self._hellos(), by_dialler=not self.dialling)
        if not hmac.compare_digest(expected, proof.mac):
            raise Unauthorized("the two sides do not have the same secret")
        self.authenticated = True
        self._expect = Expect.WELCOME
        return Progress.AUTHENTICATED

    def _on_refused(self, error: ErrorInfo) -> Progress:
        if not self.authenticated and error.code not in _CODES_BEFORE_PROOF:
            error = msgspec.structs.replace(error, code=ErrorCode.PEER_REFUSED)
        self.refusal = error
        self._expect = Expect.NOTHING
        return Progress.REFUSED
