"""Visits of those who never prove themselves: each is told why it is not let in, or cut in bounded time."""

from __future__ import annotations

from collections.abc import Callable

from segue.kv.errors import ErrorCode
from segue.kv.session.frames import (
    HANDSHAKE_FRAME_BYTES,
    HEADER,
    KIND_MESSAGE,
    KIND_SESSION,
    SESSION_VERSION,
    Proof,
    SessionHello,
    Welcome,
    body_check,
    encode_frame,
    encode_preamble,
    lead_check,
    pack_frame,
)
from segue.kv.session.session_handshake import prove, session_key
from segue.lab.sim.visitor import FrameConnection, Visitor, Visits

UNAUTHENTICATED = Visits()
#: More than an instance keeps.


@UNAUTHENTICATED.kind("silence")
async def _silence(visitor: Visitor) -> None:
    raw = await visitor.raw()
    if raw is not None:
        await visitor.is_cut(raw)


@UNAUTHENTICATED.kind("half a preamble")
async def _half(visitor: Visitor) -> None:
    raw = await visitor.raw()
    if raw is not None:
        raw.transport.write(encode_preamble(SESSION_VERSION)[:5])
        await visitor.is_cut(raw)


@UNAUTHENTICATED.kind("half a hello")
async def _stalled(visitor: Visitor) -> None:
    raw = await visitor.raw()
    if raw is not None:
        frame = encode_frame(visitor.my_hello())
        cut = visitor.rng.randrange(len(frame))
        raw.transport.write(encode_preamble(SESSION_VERSION) + frame[:cut])
        await visitor.is_cut(raw)


@UNAUTHENTICATED.kind("another protocol")
async def _other(visitor: Visitor) -> None:
    raw = await visitor.raw()
    if raw is not None:
        raw.transport.write(
            visitor.rng.choice((b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc"))
        )
        await visitor.is_cut(raw, 0.5)


@UNAUTHENTICATED.kind("another version")
async def _version(visitor: Visitor) -> None:
    raw = await visitor.raw()
    if raw is not None:
        raw.transport.write(encode_preamble(SESSION_VERSION + 1))
        await visitor.is_refused(raw, ErrorCode.PEER_REFUSED)


@UNAUTHENTICATED.kind("leaves")
async def _leaves(visitor: Visitor) -> None:
    raw = await visitor.raw()
    if raw is not None:
        if visitor.rng.random() < 0.5:
            raw.transport.write(encode_preamble(SESSION_VERSION) + encode_frame(visitor.my_hello()))
        raw.transport.abort()


def _wrong_key(visitor: Visitor) -> list[bytes]:
    return [encode_frame(visitor.my_hello(keyed=visitor.deployment.secret is None))]


def _itself(visitor: Visitor) -> list[bytes]:
    me = visitor.target.me
    return [encode_frame(visitor.my_hello(incarnation=me.incarnation, dp_rank=me.dp_rank))]


def _false_proof(visitor: Visitor) -> list[bytes]:
    return [encode_frame(visitor.my_hello()), encode_frame(Proof(visitor.rng.randbytes(32)))]


def _frames(kind: str, make: Callable[[Visitor], list[bytes]], *codes: ErrorCode) -> None:
    @UNAUTHENTICATED.kind(kind)
    async def says(visitor: Visitor) -> None:
        raw = await visitor.raw()
        if raw is not None:
            raw.transport.write(encode_preamble(SESSION_VERSION) + b"".join(make(visitor)))
            await visitor.is_refused(raw, *codes)


_frames("no hello", lambda v: [encode_frame(Proof(b""))], ErrorCode.PEER_REFUSED)
_frames("hello twice", lambda v: [encode_frame(v.my_hello())] * 2, ErrorCode.PEER_REFUSED)
_frames("message first", lambda v: [pack_frame(KIND_MESSAGE, b"\x80")], ErrorCode.PEER_REFUSED)
_frames("no frame", lambda v: [pack_frame(KIND_SESSION, b"\x93abc")], ErrorCode.PEER_REFUSED)
_frames("long frame", lambda v: [header_of(HANDSHAKE_FRAME_BYTES + 1)], ErrorCode.PEER_REFUSED)
_frames("changed frame", lambda v: [changed_frame(v)], ErrorCode.BOOTSTRAP_UNREACHABLE)
_frames("itself", _itself, ErrorCode.PEER_REFUSED)
_frames("rare pings", lambda v: [encode_frame(v.my_hello(keepalive_s=1e3))], ErrorCode.PEER_REFUSED)
_frames("other key", _wrong_key, ErrorCode.UNAUTHORIZED)
_frames("false proof", _false_proof, ErrorCode.UNAUTHORIZED)


def header_of(length: int) -> bytes:
    """The header of a frame of `length` bytes, without the frame."""
    return HEADER.pack(length, KIND_SESSION, lead_check(length, KIND_SESSION), body_check(b""))


def changed_frame(visitor: Visitor) -> bytes:
    """A Hello of which one bit has changed on its way."""
    frame = bytearray(encode_frame(visitor.my_hello()))
    bit = visitor.rng.randrange(8 * len(frame))
    frame[bit // 8] ^= 1 << bit % 8
    return bytes(frame)


@UNAUTHENTICATED.kind("own nonce back")
async def _reflection(visitor: Visitor) -> None:
    raw = await visitor.raw()
    if raw is not None:
        raw.transport.write(encode_preamble(SESSION_VERSION))
        theirs = await raw.frame(SessionHello)
        if theirs is not None:
            raw.transport.write(encode_frame(visitor.my_hello(nonce=theirs.nonce)))
            await visitor.is_refused(raw, ErrorCode.UNAUTHORIZED)


async def _proven(
    visitor: Visitor, by_dialler: bool, hello: SessionHello | None = None
) -> tuple[FrameConnection, bytes] | None:
    """A handshake up to our proof: that of the dialler, or the listener's own sent back; and the frame."""
    raw = await visitor.raw()
    if raw is None:
        return None
    mine = hello or visitor.my_hello()
    raw.transport.write(encode_preamble(SESSION_VERSION) + encode_frame(mine))
    theirs = await raw.frame(SessionHello)
    if theirs is None:
        return None
    key = session_key(visitor.deployment.secret)
    proof = encode_frame(Proof(prove(key, SESSION_VERSION, mine, theirs, by_dialler)))
    return raw, proof


@UNAUTHENTICATED.kind("replayed proof")
async def _replay(visitor: Visitor) -> None:
    if visitor.deployment.secret is None:
        return
    hello = visitor.my_hello()
    first = await _proven(visitor, True, hello)
    if first is None:
        return
    first[0].transport.abort()
    again = await _proven(visitor, True, hello)
    if again is not None:
        again[0].transport.write(first[1])
        await visitor.is_refused(again[0], ErrorCode.UNAUTHORIZED)


@UNAUTHENTICATED.kind("reflected proof")
async def _reflected(visitor: Visitor) -> None:
    if visitor.deployment.secret is None:
        return
    found = await _proven(visitor, False)
    if found is not None:
        found[0].transport.write(found[1])
        await visitor.is_refused(found[0], ErrorCode.UNAUTHORIZED)


@UNAUTHENTICATED.kind("proof and silence")
async def _half_open(visitor: Visitor) -> None:
    found = await _proven(visitor, True)
    if found is None:
        return
    raw, proof = found
    raw.transport.write(proof)
    if await raw.frame(Welcome) is None:
        visitor.wrong("was not welcome, which knows the secret")
    await visitor.is_cut(raw)


@UNAUTHENTICATED.kind("flood")
async def _flood(visitor: Visitor) -> None:
    """More pending connections than fit: the oldest of them go, and nobody else."""
    raws = await visitor.floods(visitor.raw)
    if visitor.target.pending > 128:
        visitor.wrong(f"{visitor.target.pending} pending connections are kept")
    for raw in raws:
        await visitor.is_cut(raw)
