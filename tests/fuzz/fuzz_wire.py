"""Targets at the sockets themselves: sessions, the transports, the supervisor's pipe."""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import os
import socket
from typing import Any

import msgspec
import numpy as np
from fuzz_changes import SEPARATOR, Target, changed_json, changed_msgpack

from ranks import make_tcp, rank
from segue.kv.errors import DECODE_ERRORS, ErrorCode, ErrorInfo, PeerRefused, TransferFailed
from segue.kv.ids import Incarnation, LeaderId, Role, TransferId
from segue.kv.limits import Limits
from segue.kv.protocol.messages import Committed
from segue.kv.session import frames
from segue.kv.session.connection import Connection, State
from segue.kv.session.node import SessionNode
from segue.kv.session.session_handshake import Handshake, session_key
from segue.kv.transport.base import Endpoint
from segue.kv.transport.kinds import KINDS
from segue.kv.transport.memory.pool_memory import allocate
from segue.kv.transport.net import key_handshake as handshake
from segue.kv.transport.shm import shm_out
from segue.kv.transport.shm.shm_host import HOST
from segue.kv.transport.shm.shm_table import TABLE_BYTES
from segue.kv.transport.shm.shm_wire import ShmAddress
from segue.kv.transport.tcp import tcp_wire
from segue.kv.transport.tcp.tcp_sockets import TcpAddress
from segue.server.instance.kv_settings import LeaderMessage
from segue.server.messages.control import Cancel
from segue.server.supervisor.lifeline import CannotStart, Ready, decode_report

SECRET = b"a secret of the tests"
MINE, THEIRS = Incarnation("a" * 32), Incarnation("b" * 32)
BROKEN = ErrorInfo(code=ErrorCode.PEER_LOST, text="gone")
MESSAGES = [Committed(TransferId(7, 0, LeaderId(MINE), LeaderId(THEIRS))), Cancel("r", BROKEN)]


# ---- sessions -----------------------------------------------------------------------------------


class _Owner:
    """A SessionHandler that writes down what it hears."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def hello(self) -> bytes:
        return b"x"

    def accept(self, peer: object) -> None:
        self.heard.append("accept")

    def opened(self, session: object) -> None:
        self.heard.append("opened")

    def received(self, session: object, message: object) -> None:
        self.heard.append(type(message).__name__)

    def closed(self, session: object, error: object) -> None:
        self.heard.append("closed")


class _Wire:
    """Just enough of an asyncio transport."""

    def __init__(self) -> None:
        self.written = bytearray()

    def get_extra_info(self, name: str) -> Any:
        return ("127.0.0.1", 1) if name == "peername" else None

    def write(self, data: bytes) -> None:
        self.written += data

    def get_write_buffer_size(self) -> int:
        return 0

    def can_write_eof(self) -> bool:
        return False

    def close(self) -> None: ...

    def abort(self) -> None: ...


def _frame(kind: int, body: bytes) -> bytes:
    mark = frames.body_check(body)
    return frames.HEADER.pack(len(body), kind, frames.lead_check(len(body), kind), mark) + body


def _whole(data: bytes, kind: int) -> bytes:
    """Pieces of `data` as frames with right lengths and checksums: past these begins the interesting."""
    return b"".join(_frame(kind, piece) for piece in data.split(SEPARATOR)[:4])


def _session(data: bytes, *, state: str, framed: bool) -> str:
    async def main() -> str:
        owner = _Owner()
        me = SessionNode(
            me=LeaderId(MINE),
            role=Role.DECODE,
            secret=SECRET,
            handlers=dict.fromkeys(Role, owner),  # type: ignore[arg-type]
            message_type=LeaderMessage,
            limits=Limits(max_frame_bytes=2**20),
        )
        connection = Connection(me, dialling=False, loop=asyncio.get_running_loop())
        wire = _Wire()
        connection.connection_made(wire)  # type: ignore[arg-type]
        feed = frames.encode_preamble(frames.SESSION_VERSIONS)
        if state == "open":
            connection.state, connection.handler = State.OPEN, owner  # type: ignore[assignment]
            connection._inbox.max_frame_bytes = 2**20
            feed = b""
        elif state == "proven":
            feed += _frame(frames.KIND_SESSION, msgspec.msgpack.encode(_hello()))
            dialler = Handshake(
                _hello(), dialling=True, key=session_key(SECRET), versions=frames.SESSION_VERSIONS
            )
            dialler.receive(connection.handshake.me, 10.0)
            feed += _frame(frames.KIND_SESSION, msgspec.msgpack.encode(dialler.proof_frame()))
        kind = frames.KIND_MESSAGE if state == "open" else frames.KIND_SESSION
        feed += _whole(data, kind) if framed else data
        at = 0
        while at < len(feed) and connection.state is not State.ENDED:
            view = connection.get_buffer(-1)
            piece = feed[at : at + min(len(view), 997)]
            view[: len(piece)] = piece
            connection.buffer_updated(len(piece))
            at += len(piece)
            assert connection._inbox.buffer_bytes <= 4 * 2**20, "a buffer grows with what is announced"
        assert me.stats.handler_errors == 0
        if state == "stranger":
            assert not owner.heard, "a stranger was heard"
            assert len(wire.written) < 4 * frames.HANDSHAKE_FRAME_BYTES
        told = f"{connection.state.name} {' '.join(owner.heard[:4])} {str(connection.error)[-40:]}"
        if connection.state is State.OPEN:
            connection.state = State.HANDSHAKE
        connection.connection_lost(None)
        await me.close()
        return told

    return asyncio.run(main())


def _hello() -> frames.SessionHello:
    return frames.SessionHello(
        incarnation=THEIRS,
        role=Role.PREFILL,
        dp_rank=0,
        advertised="127.0.0.1:5",
        nonce=b"n" * 32,
        keyed=True,
        keepalive_s=1.0,
    )


def _frame_seeds() -> list[bytes]:
    made: list[frames.SessionFrame] = [
        _hello(),
        frames.Proof(b"m" * 32),
        frames.Welcome(payload=b"p", max_frame_bytes=2**20, others=[b"s" * 16]),
        frames.SessionAccepted([b"s" * 16]),
        frames.Opened(),
        frames.Duplicate(),
        frames.SessionRefused(BROKEN),
        frames.Ping(),
        frames.Bye(BROKEN),
    ]
    single = [msgspec.msgpack.encode(f) for f in made]
    return [*single, SEPARATOR.join((single[2], single[4])), SEPARATOR.join((single[0], single[1]))]


def _raw_seeds() -> list[bytes]:
    return [_frame(frames.KIND_SESSION, body) for body in _frame_seeds()] + [b"GET / HTTP/1.1\r\n\r\n"]


def _open_seeds() -> list[bytes]:
    return [msgspec.msgpack.encode(m) for m in MESSAGES]


# ---- the transports' own handshake ----------------------------------------------------------------

KEY = b"k" * handshake.KEY_BYTES


def _listener(data: bytes) -> str:
    door = handshake.ListenerProof(KEY)
    door._nonce = b"n" * 16  # so that a good answer can be a seed
    door.challenge()
    door.accept(data)
    return "in"


def _writer(data: bytes) -> str:
    door = handshake.WriterProof(KEY, rank("a"))
    door._nonce = b"w" * 16  # so that a good verdict can be a seed
    challenge, verdict = data[: handshake.CHALLENGE_BYTES], data[handshake.CHALLENGE_BYTES :]
    # Both are read with `exactly`: other lengths cannot come here.
    door.respond(challenge.ljust(handshake.CHALLENGE_BYTES, b"\0"))
    door.finish(verdict[: handshake.VERDICT_BYTES].ljust(handshake.VERDICT_BYTES, b"\0"))
    return "in"


def _response() -> bytes:
    listener = handshake.ListenerProof(KEY)
    listener._nonce = b"n" * 16
    return handshake.WriterProof(KEY, rank("a")).respond(listener.challenge())


def _verdict_seeds() -> list[bytes]:
    listener, writer = handshake.ListenerProof(KEY), handshake.WriterProof(KEY, _GOOD)
    writer._nonce = b"w" * 16
    _, verdict = listener.accept(writer.respond(listener.challenge()))
    return [listener.challenge() + verdict, listener.challenge() + listener.refuse("no")]


_GOOD = rank("a")


# ---- tcp ----------------------------------------------------------------------------------------

MEMORY_BYTES = 2**16
_landing = bytearray(MEMORY_BYTES)
_landing_at = ctypes.addressof(ctypes.c_char.from_buffer(_landing))


def _part(data: bytes) -> str:
    """A head with a right checksum (else nothing gets past it), rows, and a landing in memory."""
    head = data[: tcp_wire.HEADER.size].ljust(tcp_wire.HEADER.size, b"\0")
    fields = list(tcp_wire.HEADER.unpack(head))
    count = min(fields[2], tcp_wire.MAX_PART_ROWS)
    rows = data[tcp_wire.HEADER.size :][: count * tcp_wire.ROW_BYTES].ljust(count * tcp_wire.ROW_BYTES, b"\0")
    fields[3] = tcp_wire._mark(fields[1], *fields[4:], rows=rows)
    header = tcp_wire.parse_header(tcp_wire.HEADER.pack(*fields))
    parsed = tcp_wire.parse_rows(rows, header)
    if not tcp_wire.inside(parsed, np.array([(0, MEMORY_BYTES)], np.uint64)):
        return "outside"
    for offset, length in parsed.tolist():
        assert 0 <= offset <= offset + length <= MEMORY_BYTES, "a row outside the memory passed"
    parsed[:, 0] += np.uint64(_landing_at)
    cursor = tcp_wire.Cursor(parsed)
    while cursor.left:
        address, nbytes = cursor.piece(1000)
        assert _landing_at <= address <= address + nbytes <= _landing_at + MEMORY_BYTES
        cursor.advance(nbytes)
    return f"{min(header.rows, 3)} rows"


def _part_seeds() -> list[bytes]:
    rows = np.array([(0, 100), (4096, 28), (100, 8)], "<u8").tobytes()
    return [
        tcp_wire.pack_header(5, 1, 136, rows),
        tcp_wire.pack_header(5, 2, 100, np.array([(65436, 100)], "<u8").tobytes()),
        # the sum of its offset and length is a small number of 64 bits
        tcp_wire.pack_header(5, 3, 150, np.array([(2**64 - 100, 150)], "<u8").tobytes()),
    ]


def _raw_part(data: bytes) -> str:
    header = tcp_wire.parse_header(data[: tcp_wire.HEADER.size].ljust(tcp_wire.HEADER.size, b"\0"))
    rows = data[tcp_wire.HEADER.size :].ljust(header.rows * tcp_wire.ROW_BYTES, b"\0")
    tcp_wire.parse_rows(rows[: header.rows * tcp_wire.ROW_BYTES], header)
    return "part"


def _ack(data: bytes) -> str:
    status, _ = tcp_wire.parse_ack(data.ljust(tcp_wire.ACK.size, b"\0"))
    return f"status {min(status, 3)}"


def _ack_seeds() -> list[bytes]:
    return [tcp_wire.pack_ack(status, 7) for status in (tcp_wire.LANDED, tcp_wire.REFUSED, 9)]


def _nowhere(*_arguments: Any, **_options: Any) -> Any:
    raise ConnectionRefusedError("no network in a fuzzer")


def _tcp_endpoint(data: bytes) -> str:
    """`connect` to what a peer calls its endpoint. Addresses are looked up, never dialled."""
    memory = allocate(4096)
    transport = make_tcp(lambda _event: None, rank("a"))
    real = socket.socket.connect
    try:
        transport.register(memory)
        socket.socket.connect = _nowhere  # type: ignore[method-assign, assignment]
        transport.connect(rank("b"), Endpoint("tcp", 4096, data), 1.0)
        return "connected"
    except TransferFailed:
        return "no path"
    finally:
        socket.socket.connect = real  # type: ignore[method-assign]
        transport.close()
        memory.close()


def _tcp_endpoint_seeds() -> list[bytes]:
    address = TcpAddress(version=1, host="127.0.0.1", port=9, key=KEY)
    return [
        msgspec.msgpack.encode(a)
        for a in (
            address,
            msgspec.structs.replace(address, encrypted=True),
            msgspec.structs.replace(address, host="::1"),
            msgspec.structs.replace(address, port=70000),
            msgspec.structs.replace(address, host="a\0b"),
            msgspec.structs.replace(address, host="é" * 100),
        )
    ]


#: Of <fcntl.h>.
_F_ADD_SEALS, _SEAL_SHRINK = 1033, 0x2

# ---- shm ----------------------------------------------------------------------------------------


def _shm_endpoint(data: bytes) -> str:
    ours = {"shm": [Endpoint("shm", 4096, _shm_endpoint_seeds()[0])]}
    KINDS.common(ours, {"shm": [Endpoint("shm", 4096, data)]})
    shm_out.map_peer(rank("a"), rank("b"), Endpoint("shm", 4096, data), 0.2)
    return "connected"


def _shm_endpoint_seeds() -> list[bytes]:
    name = b"\0segue-fuzz-%d" % os.getpid()  # nobody listens there
    address = ShmAddress(version=1, name=name, key=KEY, host=HOST.id())
    return [
        msgspec.msgpack.encode(a)
        for a in (
            address,
            msgspec.structs.replace(address, host="elsewhere"),
            msgspec.structs.replace(address, name=b"\0" * 200),
            msgspec.structs.replace(address, name=b""),
        )
    ]


def _shm_verdict(data: bytes) -> str:
    """A listener that answers with a verdict, and with files of any size instead of a pool and a table. The
    first byte says how many, and whether they may shrink; the next bytes say how many KiB each has."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    fds = [os.memfd_create("segue-fuzz", os.MFD_ALLOW_SEALING) for _ in range(data[0] % 4 if data else 0)]
    try:
        for at, fd in enumerate(fds):
            os.ftruncate(fd, (data[at + 1] if len(data) > at + 1 else 0) * 1024)
            if data[0] < 128:
                fcntl.fcntl(fd, _F_ADD_SEALS, _SEAL_SHRINK)
        listener = handshake.ListenerProof(KEY)
        theirs.send(listener.challenge())
        writer = handshake.WriterProof(KEY, _GOOD)
        ours.settimeout(1.0)
        ours.sendall(writer.respond(shm_out.read_frame(ours, handshake.CHALLENGE_BYTES)))
        _, verdict = listener.accept(theirs.recv(2 * handshake.RESPONSE_BYTES))
        socket.send_fds(theirs, [verdict if len(data) < 60 else data], fds)
        pool, table = shm_out.take_memory(ours, writer, 4096)
        pool.close()
        table.close()
        return "mapped"
    finally:
        ours.close()
        theirs.close()
        for fd in fds:
            os.close(fd)


def _shm_verdict_seeds() -> list[bytes]:
    """The last one has a table that is too short, which was no typed error once."""
    table_kib = -(-TABLE_BYTES // 1024)
    return [bytes((2, 4, table_kib)), bytes((130, 4, table_kib)), b"\1\4", b"\0", b"\2\4\0"]


# ---- the supervisor's pipe ------------------------------------------------------------------------


def _report(data: bytes) -> str:
    try:
        return type(decode_report(data)).__name__
    except DECODE_ERRORS as error:
        raise PeerRefused(f"no report: {str(error)[:40]}") from error


def _report_seeds() -> list[bytes]:
    return [msgspec.json.encode(r) for r in (Ready("http://127.0.0.1:1"), CannotStart(BROKEN, 2))]


def _stranger(data: bytes) -> str:
    return _session(data, state="stranger", framed=False)


def _stranger_frames(data: bytes) -> str:
    return _session(data, state="stranger", framed=True)


def _proven(data: bytes) -> str:
    return _session(data, state="proven", framed=True)


def _open(data: bytes) -> str:
    return _session(data, state="open", framed=True)


def _bad_text(message: bytes, text: bytes) -> bytes:
    """`message` with invalid UTF-8 in the place of `text`."""
    assert text in message
    return message.replace(text, b"\xff" * len(text))


_FOUND_TCP = [_bad_text(_tcp_endpoint_seeds()[0], b"127")]
_FOUND_SHM = [_bad_text(_shm_endpoint_seeds()[1], b"elsewhere")]
_FOUND_REPORT = [_bad_text(_report_seeds()[1], b"PEER")]

TARGETS: list[Target] = [
    Target("session_bytes", _raw_seeds, _stranger),
    Target("session_stranger", _frame_seeds, _stranger_frames, changed_msgpack),
    Target("session_proven", _frame_seeds, _proven, changed_msgpack),
    Target("session_open", _open_seeds, _open, changed_msgpack),
    Target("transport_listener", lambda: [_response()], _listener),
    Target("transport_writer", _verdict_seeds, _writer),
    Target("tcp_part", _part_seeds, _part),
    Target("tcp_raw_part", _part_seeds, _raw_part),
    Target("tcp_ack", _ack_seeds, _ack),
    Target("tcp_endpoint", _tcp_endpoint_seeds, _tcp_endpoint, changed_msgpack, _FOUND_TCP),
    Target("shm_endpoint", _shm_endpoint_seeds, _shm_endpoint, changed_msgpack, _FOUND_SHM),
    Target("shm_verdict", _shm_verdict_seeds, _shm_verdict),
    Target("report", _report_seeds, _report, changed_json, _FOUND_REPORT),
]
