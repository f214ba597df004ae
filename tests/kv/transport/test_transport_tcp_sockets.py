"""How the sockets of `tcp` are opened: by when, with which options, and what is said when one cannot be.
No network is here; the clock is the test's."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import select
import socket
import ssl
import struct
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from ranks import options, rank
from segue.kv.errors import (
    BootstrapTimeout,
    ConfigError,
    PeerRefused,
    SegueError,
    TransferFailed,
    Unauthorized,
)
from segue.kv.ids import RankId
from segue.kv.session.tls import Tls
from segue.kv.transport.base import Endpoint
from segue.kv.transport.net import key_handshake as handshake
from segue.kv.transport.tcp.tcp_net import Net, TcpTuning
from segue.kv.transport.tcp.tcp_sockets import TcpAddress, TcpSockets
from segue.kv.transport.tcp.tcp_wire import MAX_PART_BYTES

PEER = rank("bbbb")
KEY = bytes(16)


class Clock(Net):
    """A network whose time the test tells; it connects to what `doors` holds, or raises that."""

    def __init__(self, *doors: Door | Exception, connect_s: float = 0.0) -> None:
        self.now = 1000.0
        self.doors = list(doors)
        self.timeouts: list[float] = []
        self._connect_s = connect_s
        self._numbers = itertools.count(1)

    def time(self) -> float:
        return self.now

    def random_bytes(self, nbytes: int) -> bytes:
        return next(self._numbers).to_bytes(nbytes, "big")

    def connect(self, address: tuple[str, int], timeout_s: float) -> Any:
        self.timeouts.append(timeout_s)
        door = self.doors.pop(0)
        if isinstance(door, Exception):
            raise door
        door.clock = self
        self.now += self._connect_s
        return door

    def channel(self, sock: Any) -> Any:
        return sock


class Door:
    """A socket to a listener that answers by the rules, with so many bytes and so many seconds at a time."""

    def __init__(self, piece_bytes: int = 1000, piece_s: float = 0.0, key: bytes = KEY) -> None:
        self.clock: Clock
        self.proof = handshake.ListenerProof(key)
        self.hello: RankId | None = None
        self.options: dict[tuple[int, int], int] = {}
        self.closed = False
        self.waits_until = float("inf")
        self.timeout: float | None = None
        self._data = self.proof.challenge()
        self._piece_bytes, self._piece_s = piece_bytes, piece_s

    def setsockopt(self, level: int, name: int, value: int) -> None:
        self.options[level, name] = value

    def settimeout(self, timeout_s: float) -> None:
        self.timeout = timeout_s
        self.waits_until = self.clock.now + timeout_s

    def setblocking(self, flag: bool) -> None:
        self.timeout = None if flag else 0.0

    def recv(self, nbytes: int) -> bytes:
        self.clock.now += self._piece_s
        if self.clock.now > self.waits_until:
            raise TimeoutError
        size = min(nbytes, self._piece_bytes)
        data, self._data = self._data[:size], self._data[size:]
        return data

    def sendall(self, data: bytes) -> None:
        with contextlib.suppress(PeerRefused):  # it says that it has accepted, whatever it knows
            self.hello, self._data = self.proof.accept(data)
            return
        verdict = struct.Struct(">4sHB32s128s")
        self._data = verdict.pack(b"SGUE", handshake.VERSION, 1, bytes(32), b"")

    def close(self) -> None:
        self.closed = True

    def fileno(self) -> int:
        return 7


def address(**fields: Any) -> TcpAddress:
    return TcpAddress(**({"version": 1, "host": "10.0.0.2", "port": 7, "key": KEY} | fields))


def told(made: TcpAddress, transport: str = "tcp") -> Endpoint:
    return Endpoint(transport, 4096, msgspec.msgpack.encode(made))


def sockets(net: Net, **fields: Any) -> TcpSockets:
    return TcpSockets("tcp", options(rank("aaaa"), **fields), net)


def opened(net: Clock, timeout_s: float = 5.0) -> Any:
    return sockets(net).open_stream(PEER, address(), timeout_s)


def tls_error(kind: type[ssl.SSLError]) -> ssl.SSLError:
    """As OpenSSL's own, which have more than their text."""
    made = kind(1, "it says")
    made.reason = "BAD_RECORD_MAC"
    if isinstance(made, ssl.SSLCertVerificationError):
        made.verify_message = "Hostname mismatch"
    return made


#: What each stream must have where `peer_silence_s` is 60: so a host that is gone is noticed in that time.
OPTIONS = {
    (socket.IPPROTO_TCP, socket.TCP_NODELAY): 1,
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE): 1,
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE): 30,
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL): 10,
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT): 3,
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT): 60_000,
}


def test_a_stream_says_whose_it_is_has_its_options_and_never_blocks() -> None:
    door = Door()
    assert opened(Clock(door)) is door
    assert door.hello == rank("aaaa")
    assert door.options == OPTIONS
    assert door.timeout == 0.0, "a loop would wait in it for all of its streams"


def test_a_listener_that_does_not_know_the_key_gets_no_kv() -> None:
    door = Door(key=b"another key 1234")
    with pytest.raises(PeerRefused, match="could not prove"):
        opened(Clock(door))
    assert door.closed


def test_a_listener_that_closes_without_a_word_has_refused_nothing() -> None:
    """It may lack a descriptor, or have waited too long: the next try may do."""
    door = Door(piece_bytes=0)
    with pytest.raises(TransferFailed, match="closed the stream during the handshake") as caught:
        opened(Clock(door))
    assert caught.value.info.retryable


def test_a_stream_that_was_accepted_has_the_same_options() -> None:
    door = Door()
    sockets(Clock()).accepted(door)  # type: ignore[arg-type]
    assert door.options == OPTIONS


def test_a_peer_that_gives_a_byte_now_and_then_does_not_put_the_deadline_off() -> None:
    door = Door(piece_bytes=1, piece_s=0.5)
    net = Clock(door)
    with pytest.raises(BootstrapTimeout, match=r"did not answer within 5\.0 s"):
        opened(net)
    assert net.now <= 1005.5
    assert door.closed


@pytest.mark.parametrize(
    ("why", "error", "text"),
    [
        (
            ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED)),
            TransferFailed,
            "refused",
        ),
        (TimeoutError(), BootstrapTimeout, "did not answer"),
        (UnicodeError("label too long"), TransferFailed, "label too long"),
        (tls_error(ssl.SSLCertVerificationError), Unauthorized, "certificate is not valid"),
        (tls_error(ssl.SSLError), TransferFailed, "TLS failed"),
        (PeerRefused("wrong key"), PeerRefused, "wrong key"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
def test_what_cannot_be_opened_says_why_and_leaves_nothing_open(
    why: Exception, error: type[SegueError], text: str
) -> None:
    with pytest.raises(error, match=text):
        opened(Clock(why))
    door = Door()
    door.sendall = lambda _data: (_ for _ in ()).throw(why)  # type: ignore[method-assign]
    with pytest.raises(error, match=text):
        opened(Clock(door))
    assert door.closed


def test_under_tls_the_certificate_must_be_of_the_host_that_was_asked_for() -> None:
    asked: list[dict[str, Any]] = []

    def wrap(sock: Door, **how: Any) -> Door:
        asked.append(how | {"timeout": sock.timeout})
        return sock

    context = SimpleNamespace(wrap_socket=wrap)
    net = Clock(Door(), connect_s=2.0)
    made = sockets(net, tls=Tls(context, context), host="10.0.0.1")  # type: ignore[arg-type]
    made.open_stream(PEER, address(encrypted=True), 5.0)
    assert asked == [{"server_hostname": "10.0.0.2", "timeout": 3.0}]


@pytest.mark.parametrize("ours", [False, True])
def test_where_one_side_alone_encrypts_nothing_is_sent_and_both_hear_what_to_do(ours: bool) -> None:
    made = sockets(Clock(), tls=Tls(None, None) if ours else None)  # type: ignore[arg-type]
    with pytest.raises(PeerRefused, match=r"only one of this side .* give both sides --tls-cert"):
        made.address(PEER, told(address(encrypted=not ours)))
    assert made.address(PEER, told(address(encrypted=ours))).encrypted is ours


@pytest.mark.parametrize(
    "fields", [{"port": 0}, {"port": 2**16}, {"port": -1}, {"host": ""}, {"host": "a\nb"}, {"version": 2}]
)
def test_what_is_no_address_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(PeerRefused):
        sockets(Clock()).address(PEER, told(address(**fields)))
    with pytest.raises(PeerRefused):
        sockets(Clock()).address(PEER, told(address(), "nixl"))


@pytest.mark.parametrize(
    ("fields", "host", "port"),
    [
        ({"host": "0.0.0.0"}, "0.0.0.0", 4711),
        ({"host": "0.0.0.0", "advertise": "kv.example"}, "kv.example", 4711),
        ({"host": "0.0.0.0", "advertise": "kv.example", "advertise_port": 7002}, "kv.example", 7002),
    ],
)
def test_peers_are_told_what_is_advertised(fields: dict[str, Any], host: str, port: int) -> None:
    listener: Any = SimpleNamespace(getsockname=lambda: ("0.0.0.0", 4711))
    endpoint = sockets(Clock(), **fields).endpoint(listener, KEY, 99)
    assert (endpoint.transport, endpoint.nbytes) == ("tcp", 99)
    assert msgspec.msgpack.decode(endpoint.data, type=TcpAddress) == address(host=host, port=port)


@pytest.mark.parametrize(
    "fields",
    [
        {"part_bytes": 0},
        {"part_bytes": MAX_PART_BYTES + 1},
    ],
)
def test_sizes_that_no_receiver_takes_are_refused(fields: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        TcpTuning(**fields)
    assert TcpTuning(part_bytes=MAX_PART_BYTES)


def test_a_port_in_use_leaves_no_descriptor() -> None:
    taken = Net().listen("127.0.0.1", 0)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError) as caught:  # it keeps the frame, and with it what was left open
        Net().listen("127.0.0.1", taken.getsockname()[1])
    assert caught.value.errno == errno.EADDRINUSE
    assert len(os.listdir("/proc/self/fd")) == before
    taken.close()


def test_a_data_port_can_be_listened_at_again_while_connections_of_before_linger() -> None:
    """Connections that this end closed first stay in the kernel (TIME_WAIT) for a minute."""
    first = Net().listen("127.0.0.1", 0)
    host, port = first.getsockname()
    with socket.create_connection((host, port), 10) as peer:
        select.select([first], [], [], 10)
        accepted, _ = first.accept()
        accepted.close()
        first.close()
        assert peer.recv(1) == b""
    Net().listen(host, port).close()
