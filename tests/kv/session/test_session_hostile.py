"""Strangers, broken peers and silent ones."""

from __future__ import annotations

import ast
import asyncio
import gc
import logging
import os
import pickle
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from session_peers import (
    DEADLINE_S,
    PATIENT,
    SECRET,
    Events,
    Message,
    Note,
    RawPeer,
    closing,
    hello,
    leader,
    node,
)

import segue
from jumps import Jumps
from loops import in_loop, on_each_loop
from segue.kv.errors import DECODE_ERRORS, BootstrapUnreachable, ErrorCode, ErrorInfo, PeerLost
from segue.kv.limits import Limits
from segue.kv.session.connection import Connection, State
from segue.kv.session.frames import (
    HANDSHAKE_FRAME_BYTES,
    HEADER,
    KIND_MESSAGE,
    KIND_SESSION,
    PREAMBLE,
    SESSION_VERSIONS,
    Bye,
    Duplicate,
    Opened,
    Ping,
    Proof,
    SessionAccepted,
    SessionFrame,
    SessionHello,
    SessionRefused,
    Welcome,
    decode_frame,
    decode_preamble,
    encode_frame,
    encode_preamble,
    lead_check,
    pack_frame,
)
from segue.kv.session.session_handshake import prove, session_key
from segue.kv.versions import Versions

#: Whoever goes makes room for others, and is not late.
UNHURRIED = msgspec.structs.replace(PATIENT, handshake_s=3600.0)


@on_each_loop
async def test_a_flood_of_strangers_keeps_nobody_out_and_stays_bounded() -> None:
    listener, dialler = node("a", Events(), max_half_open=16, limits=UNHURRIED), node("b", Events())
    async with closing(dialler, listener):
        address = await listener.listen("127.0.0.1", 0)
        strangers = [await RawPeer.dial(*address) for _ in range(100)]
        session = await dialler.connect(*address, timeout_s=DEADLINE_S)
        assert session.peer.leader == leader("a")
        assert listener.pending <= 16
        assert listener.stats.pending_dropped >= 100 - 16
        for stranger in strangers:
            await stranger.close()


@pytest.mark.parametrize("opening", [b"", b"segue", encode_preamble(Versions(77, 77))])
@on_each_loop
async def test_200_strangers_keep_nobody_out_and_leave_no_descriptor(opening: bytes) -> None:
    """Silent ones, ones that begin, and ones that were told why they are refused and stay (linger)."""

    def descriptors() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    listener = node("a", Events(), limits=UNHURRIED)
    first, dialler = node("c", Events()), node("b", Events())
    async with closing(first, dialler, listener):
        address = await listener.listen("127.0.0.1", 0)
        await first.connect(*address, timeout_s=DEADLINE_S)  # now the loop has what it opens for itself
        before = descriptors()
        strangers = [await RawPeer.dial(*address) for _ in range(200)]
        for stranger in strangers:
            stranger.writer.write(opening)
        session = await dialler.connect(*address, timeout_s=DEADLINE_S)
        assert session.peer.leader == leader("a")
        # 200 of theirs, two of the session, and at most as many of ours as strangers may wait.
        assert descriptors() - before <= 200 + 2 + 128
        assert listener.pending <= 128
        for stranger in strangers:
            await stranger.close()
        async with asyncio.timeout(DEADLINE_S):
            while listener.pending or descriptors() > before + 2:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


@in_loop
async def test_a_stranger_that_says_nothing_is_cut_after_the_handshake_deadline() -> None:
    listener, jumps = node("a", Events()), Jumps()
    async with closing(listener):
        address = await listener.listen("127.0.0.1", 0)
        mute, halfway = await RawPeer.dial(*address), await RawPeer.dial(*address)
        await halfway.preamble()
        halfway.send(hello("b"))
        assert isinstance(await halfway.frame(), SessionHello)
        assert listener.pending == 2
        jumps.over(PATIENT.handshake_s)
        await mute.ended()
        await halfway.ended()
        assert listener.stats.handshakes_late == 2
        assert not listener.pending
        await mute.close()
        await halfway.close()


@in_loop
async def test_a_listener_that_says_nothing_is_given_up_after_the_handshake_deadline() -> None:
    async def mute(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_server(mute, "127.0.0.1", 0)
    dialler = node("b", Events(), limits=Limits(handshake_s=0.05))
    async with closing(dialler), server:
        with pytest.raises(BootstrapUnreachable, match="handshake"):
            await dialler.connect(*server.sockets[0].getsockname(), timeout_s=DEADLINE_S)


def _huge(kind: int, length: int) -> bytes:
    return HEADER.pack(length, kind, lead_check(length, kind), 0) + b"x" * 100


#: What a peer of this version begins with: of another one nothing that follows is looked at.
OURS = encode_preamble(SESSION_VERSIONS)

BAD_OPENINGS: dict[str, bytes] = {
    "http": b"GET / HTTP/1.1\r\nhost: x\r\n\r\n",
    "huge frame": OURS + _huge(KIND_SESSION, 2**31),
    "frame just too large": OURS + _huge(KIND_SESSION, HANDSHAKE_FRAME_BYTES + 1),
    "message before the session": OURS + pack_frame(KIND_MESSAGE, b"\xc0"),
    "unknown kind": OURS + pack_frame(77, b"\xc0"),
    "not msgpack": OURS + pack_frame(KIND_SESSION, b"\xc1\xc1\xc1"),
    "changed on its way": OURS + HEADER.pack(1, KIND_SESSION, lead_check(1, 0), 1) + b"\xc0",
    "changed header": OURS + HEADER.pack(1, KIND_SESSION, 1, 1) + b"\xc0",
    "empty frame": OURS + pack_frame(KIND_SESSION, b""),
    "pickle": OURS + pack_frame(KIND_SESSION, pickle.dumps([1] * 99)[:60].ljust(60)),
    "ping instead of hello": OURS + encode_frame(Ping()),
}


def refusal_in(said: bytes) -> ErrorInfo | None:
    """Why there will be no session, in the last frame of what a listener said."""
    at, found = PREAMBLE.size, None
    while at < len(said):
        length, *_ = HEADER.unpack_from(said, at)
        at += HEADER.size + length
        found = decode_frame(said[at - length : at])
    return found.error if isinstance(found, SessionRefused) else None


@pytest.mark.parametrize("opening", BAD_OPENINGS)
@in_loop
async def test_lesson_17_a_stranger_with_wrong_bytes_costs_its_own_connection_only(opening: str) -> None:
    here = Events()
    listener, dialler = node("a", here), node("b", Events())
    async with closing(dialler, listener):
        address = await listener.listen("127.0.0.1", 0)
        session = await dialler.connect(*address, timeout_s=DEADLINE_S)
        stranger = await RawPeer.dial(*address)
        stranger.writer.write(BAD_OPENINGS[opening])
        told = refusal_in(await stranger.ended())
        assert listener.stats.bad_frames + listener.stats.refused == 1
        if opening == "http":
            assert told is None, "it would not understand"
        else:
            # What the network has changed may be tried again; what a peer says wrongly is said again.
            changed = opening.startswith("changed")
            code = ErrorCode.BOOTSTRAP_UNREACHABLE if changed else ErrorCode.PEER_REFUSED
            assert told is not None
            assert (told.code, told.retryable) == (code, changed)
        session.send(Note(1))
        assert await here.wait("received") == [Note(1)]
        assert not here.of("closed")
        await stranger.close()


async def _prove(stranger: RawPeer, mine: SessionHello, *, as_listener: bool = False) -> bytes:
    """The proof that answers the listener's hello: ours, or with `as_listener` the one that it must give."""
    stranger.send(mine)
    theirs = await stranger.frame()
    assert isinstance(theirs, SessionHello)
    key = session_key(SECRET)
    return encode_frame(
        Proof(prove(key, (SESSION_VERSIONS, SESSION_VERSIONS), mine, theirs, not as_listener))
    )


async def _claims(stranger: RawPeer, **claims: Any) -> None:
    stranger.send(hello("b", **claims))


async def _says_hello_twice(stranger: RawPeer) -> None:
    stranger.send(hello("b"), hello("b"))


async def _guesses(stranger: RawPeer, proof: bytes) -> None:
    stranger.send(hello("b"), Proof(proof))


async def _sends_our_nonce_back(stranger: RawPeer) -> None:
    theirs = await stranger.frame()
    assert isinstance(theirs, SessionHello)
    stranger.send(hello("b", nonce=theirs.nonce))


async def _sends_our_proof_back(stranger: RawPeer) -> None:
    stranger.writer.write(await _prove(stranger, hello("b"), as_listener=True))


async def _replays(stranger: RawPeer) -> None:
    """The proof that was right on an earlier connection with the same hello."""
    first = await RawPeer.dial(*stranger.writer.get_extra_info("peername"))
    await first.preamble()
    recorded = await _prove(first, hello("b"))
    await first.close()
    await _prove(stranger, hello("b"))
    stranger.writer.write(recorded)


@pytest.mark.parametrize(
    ("attack", "code"),
    [
        (_says_hello_twice, ErrorCode.PEER_REFUSED),
        (partial(_claims, incarnation=leader("a").incarnation), ErrorCode.PEER_REFUSED),
        (partial(_claims, keepalive_s=PATIENT.peer_silence_s), ErrorCode.PEER_REFUSED),
        (partial(_claims, keyed=False), ErrorCode.UNAUTHORIZED),
        (partial(_guesses, proof=b"x" * 32), ErrorCode.UNAUTHORIZED),
        (partial(_guesses, proof=b""), ErrorCode.UNAUTHORIZED),
        (_sends_our_nonce_back, ErrorCode.UNAUTHORIZED),
        (_sends_our_proof_back, ErrorCode.UNAUTHORIZED),
        (_replays, ErrorCode.UNAUTHORIZED),
    ],
    ids=[
        "twice",
        "our name",
        "rare pings",
        "no key",
        "guess",
        "empty proof",
        "nonce back",
        "proof back",
        "replay",
    ],
)
@in_loop
async def test_a_stranger_without_a_proof_of_its_own_is_told_why_and_let_in_nowhere(
    attack: Callable[[RawPeer], Awaitable[None]], code: ErrorCode
) -> None:
    here = Events()
    listener = node("a", here)
    async with closing(listener):
        stranger = await RawPeer.dial(*await listener.listen("127.0.0.1", 0))
        await stranger.preamble()
        await attack(stranger)
        last = None
        while not isinstance(last, SessionRefused):
            last = await stranger.frame()
        assert last.error.code is code
        await stranger.ended()
        assert not listener.sessions
        assert not here.peers + here.log
        await stranger.close()


BAD_MESSAGES: dict[str, bytes] = {
    "unknown tag": msgspec.msgpack.encode({"type": "Exec", "number": 1}),
    "wrong type": msgspec.msgpack.encode({"type": "Note", "number": "one"}),
    "missing field": msgspec.msgpack.encode({"type": "Note"}),
    "invalid utf-8": b"\x82\xa4type\xa4No\xff\xfe\xa6number\x01",
    "deep nesting": b"\x91" * 100_000,
    "pickle": pickle.dumps(Path("/")),
    "nothing": b"",
}


@pytest.mark.parametrize("body", BAD_MESSAGES)
def test_lesson_17_a_message_that_does_not_decode_is_counted_and_ends_only_that_session(
    body: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        here = Events()
        listener, dialler = node("a", here), node("b", Events())
        async with closing(dialler, listener):
            address = await listener.listen("127.0.0.1", 0)
            session = await dialler.connect(*address, timeout_s=DEADLINE_S)
            broken = await RawPeer.dial(*address)
            await broken.open("c")
            await here.wait("opened", 2)
            for _ in range(3):
                broken.send_message(BAD_MESSAGES[body])
            await here.wait("closed")
            await broken.ended()
            session.send(Note(1))
            assert await here.wait("received") == [Note(1)]
            assert list(listener.sessions) == [leader("b")]
            assert listener.stats.bad_frames == 1
            assert isinstance(here.of("closed")[0], PeerLost)
            await broken.close()

    asyncio.run(main())
    # Told once as a warning; that the session ended is an event of its own.
    told = [r for r in caplog.records if r.levelno == logging.WARNING and "does not decode" in r.message]
    assert len(told) == 1


@pytest.mark.parametrize(
    "frame",
    [
        hello("c"),
        Proof(b""),
        Welcome(payload=b"", max_frame_bytes=9),
        SessionAccepted(),
        Opened(),
        Duplicate(),
        SessionRefused(PeerLost("x").info),
    ],
    ids=lambda frame: type(frame).__name__,
)
@in_loop
async def test_a_frame_of_the_opening_on_an_open_session_ends_it(frame: SessionFrame) -> None:
    here = Events()
    listener = node("a", here)
    async with closing(listener):
        confused = await RawPeer.dial(*await listener.listen("127.0.0.1", 0))
        await confused.open("c")
        confused.send(frame)
        assert "on an open session" in str((await here.wait("closed"))[0])
        assert listener.stats.bad_frames == 1
        await confused.close()


@in_loop
async def test_a_huge_frame_on_an_open_session_ends_only_that_session() -> None:
    here = Events()
    listener = node("a", here, limits=Limits(max_frame_bytes=10_000))
    async with closing(listener):
        broken = await RawPeer.dial(*await listener.listen("127.0.0.1", 0))
        await broken.open("c")
        broken.writer.write(_huge(KIND_MESSAGE, 10_001))
        assert "10001" in str((await here.wait("closed"))[0])
        await broken.close()


def test_lesson_17_nothing_here_knows_pickle() -> None:
    source = Path(segue.__file__).parent
    for package in ("kv/session", "server/registry"):
        files = list((source / package).glob("*.py"))
        assert len(files) > 10
        for file in files:
            for item in ast.walk(ast.parse(file.read_text())):
                names = [a.name for a in item.names] if isinstance(item, (ast.Import, ast.ImportFrom)) else []
                module = item.module or "" if isinstance(item, ast.ImportFrom) else ""
                assert not {"pickle", "marshal", "shelve", "dill", "cloudpickle"} & {*names, module}, file


# ---- decoders -----------------------------------------------------------------------------------


@given(st.binary(max_size=200))
def test_lesson_17_frame_decoders_give_a_frame_or_a_known_error(data: bytes) -> None:
    decoders: tuple[tuple[Callable[[bytes], object], Any], ...] = (
        (decode_frame, SessionFrame),
        (msgspec.msgpack.Decoder(Message).decode, Message),
    )
    for decode, kinds in decoders:
        try:
            decoded = decode(data)
        except DECODE_ERRORS:
            continue
        assert isinstance(decoded, kinds)


@given(st.binary(min_size=8, max_size=8))
def test_lesson_17_a_preamble_is_versions_or_a_value_error(data: bytes) -> None:
    try:
        versions = decode_preamble(data)
    except ValueError:
        assert data[:6] != b"segue\x00" or not 1 <= (data[6] or data[7]) <= data[7]
    else:
        assert decode_preamble(encode_preamble(versions)) == versions
        assert (versions.oldest, versions.newest) == (data[6] or data[7], data[7])


class FakeTransport:
    """Just enough of a transport to feed a connection by hand."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        self.host = host
        self.written = bytearray()
        self.aborted = False

    def get_extra_info(self, name: str) -> Any:
        return (self.host, 1) if name == "peername" else None

    def write(self, data: bytes | bytearray) -> None:
        self.written += data

    def get_write_buffer_size(self) -> int:
        return 0

    def can_write_eof(self) -> bool:
        return False

    def close(self) -> None:
        self.aborted = True

    abort = close


def _feed(connection: Connection, data: bytes, sizes: list[int]) -> None:
    at = 0
    while at < len(data) and connection.state is not State.ENDED:
        piece = data[at : at + (sizes[at % len(sizes)] if sizes else len(data))]
        view = connection.get_buffer(-1)
        piece = piece[: len(view)]
        view[: len(piece)] = piece
        connection.buffer_updated(len(piece))
        at += len(piece)


@in_loop
async def test_a_dial_that_was_given_up_before_its_socket_was_there_leaves_no_socket() -> None:
    me, transport = node("a", Events()), FakeTransport()
    connection = Connection(me, dialling=True, loop=asyncio.get_running_loop())
    connection.end(BootstrapUnreachable("the caller gave up"), tell=False)
    connection.connection_made(transport)  # type: ignore[arg-type]
    assert transport.aborted
    assert not transport.written
    await me.close()


@pytest.mark.parametrize(("host", "alone"), [("10.0.0.5", False), ("127.0.0.1", True), ("::1", True)])
@in_loop
async def test_without_a_secret_nobody_from_elsewhere_is_let_in_either(host: str, alone: bool) -> None:
    for secret in (None, b"a secret of the tests"):
        me, transport = node("a", Events(), secret=secret), FakeTransport(host)
        connection = Connection(me, dialling=False, loop=asyncio.get_running_loop())
        connection.connection_made(transport)  # type: ignore[arg-type]
        assert (connection.state is not State.ENDED) == (alone or secret is not None)
        assert transport.written.startswith(OURS) == (alone or secret is not None)
        connection.connection_lost(None)
        await me.close()


_FRAMES = st.one_of(
    st.binary(max_size=60).map(lambda body: pack_frame(KIND_SESSION, body)),
    st.binary(max_size=60).map(lambda body: pack_frame(KIND_MESSAGE, body)),
    st.just(encode_frame(hello("c"))),
    st.just(encode_frame(Ping())),
    st.binary(max_size=32).map(lambda mac: encode_frame(Proof(mac))),
    st.binary(max_size=40),
)


@settings(deadline=None)
@given(
    st.lists(_FRAMES, max_size=6),
    st.lists(st.integers(1, 30), max_size=5),
    st.booleans(),
    st.booleans(),
)
@in_loop
async def test_lesson_17_no_bytes_open_a_session_without_the_secret(
    frames: list[bytes], sizes: list[int], good_preamble: bool, dialling: bool
) -> None:
    here = Events()
    me = node("a", here)
    connection = Connection(me, dialling=dialling, loop=asyncio.get_running_loop())
    transport = FakeTransport()
    connection.connection_made(transport)  # type: ignore[arg-type]
    _feed(connection, (OURS if good_preamble else b"") + b"".join(frames), sizes)
    assert connection.state is not State.OPEN
    assert not here.peers
    assert not here.log
    assert len(transport.written) < 4 * HANDSHAKE_FRAME_BYTES
    connection.connection_lost(None)
    await me.close()


# ---- silence, slowness --------------------------------------------------------------------------


@on_each_loop
async def test_a_silent_peer_is_lost_and_talking_ones_are_kept() -> None:
    here, there = Events(), Events()
    limits = Limits(keepalive_s=0.05, peer_silence_s=0.4)
    listener, talker = node("a", here, limits=limits), node("b", there, limits=limits)
    async with closing(talker, listener):
        address = await listener.listen("127.0.0.1", 0)
        silent = await RawPeer.dial(*address)
        await silent.open("c")
        await talker.connect(*address, timeout_s=DEADLINE_S)
        await here.wait("opened", 2)
        lost = (await here.wait("closed"))[0]
        assert isinstance(lost, PeerLost)
        assert "silent" in str(lost)
        # The silent peer heard us all the time: keepalive runs in both directions by itself.
        said = await silent.ended()
        assert said.count(encode_frame(Ping())) >= 3
        assert said.endswith(encode_frame(Bye(lost.info))), "it may only have been slow, and hears why"
        assert list(listener.sessions) == [leader("b")]
        assert list(talker.sessions) == [leader("a")]
        await silent.close()


@on_each_loop
async def test_one_slow_peer_does_not_delay_the_detection_of_anothers_silence() -> None:
    here = Events()
    limits = Limits(keepalive_s=0.05, peer_silence_s=0.3, max_session_backlog_bytes=2**30)
    listener = node("a", here, limits=limits)
    async with closing(listener):
        address = await listener.listen("127.0.0.1", 0)
        slow = await RawPeer.dial(*address, receive_buffer=4096)
        await slow.open("b")
        await here.wait("opened")
        for i in range(50):
            here.sessions[0].send(Note(i, b"x" * 500_000))
        silent = await RawPeer.dial(*address)
        await silent.open("c")
        await here.wait("opened", 2)

        async def talk() -> None:
            while True:
                slow.send(Ping())
                await asyncio.sleep(0.02)

        talking = asyncio.create_task(talk())
        await here.wait("closed")
        assert list(listener.sessions) == [leader("b")]
        talking.cancel()
        await silent.close()
        await slow.close()


@in_loop
async def test_our_own_pause_is_not_the_peers_silence() -> None:
    here, there = Events(), Events()
    limits = Limits(keepalive_s=0.05, peer_silence_s=0.2)
    listener, dialler = node("a", here, limits=limits), node("b", there, limits=limits)
    async with closing(dialler, listener):
        address = await listener.listen("127.0.0.1", 0)
        session = await dialler.connect(*address, timeout_s=DEADLINE_S)
        time.sleep(0.5)  # noqa: ASYNC251  the whole process stands still, as under SIGSTOP
        session.send(Note(1))
        await here.wait("received")
        assert not here.of("closed") + there.of("closed")


@on_each_loop
async def test_a_peer_that_does_not_read_is_lost_at_the_backlog_limit() -> None:
    here = Events()
    listener = node("a", here, limits=Limits(max_session_backlog_bytes=1_000_000))
    async with closing(listener):
        raw = await RawPeer.dial(*await listener.listen("127.0.0.1", 0), receive_buffer=4096)
        await raw.open("b")
        await here.wait("opened")
        session: Any = here.sessions[0]
        for i in range(2000):
            session.send(Note(i, b"x" * 100_000))
            assert session.wire.backlog_bytes <= 1_000_000 + 100_100
            if not listener.sessions:
                break
        assert not here.of("closed")  # never inside the sender's own call
        error = (await here.wait("closed"))[0]
        assert isinstance(error, PeerLost)
        assert "does not read" in str(error)
        await raw.close()


@in_loop
async def test_what_is_gathered_for_one_write_counts_as_backlog_too() -> None:
    """A burst within one turn must not take any memory it likes."""
    here = Events()
    listener = node("a", here, limits=msgspec.structs.replace(PATIENT, max_session_backlog_bytes=1_000_000))
    async with closing(listener):
        raw = await RawPeer.dial(*await listener.listen("127.0.0.1", 0))
        await raw.open("b")
        await here.wait("opened")
        listener.gather()
        for number in range(12):
            here.sessions[0].send(Note(number, b"x" * 100_000))
        assert not listener.sessions
        assert "does not read" in str((await here.wait("closed"))[0])
        await raw.close()
