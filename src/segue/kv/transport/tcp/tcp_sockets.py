"""Sockets of the transports that meet their peers over TCP: where they listen, what peers are told of it, and
how both ends of a connection prove themselves. The streams' contents are not decided here."""

from __future__ import annotations

import socket
import ssl

import msgspec

from segue.kv.errors import (
    DECODE_ERRORS,
    BootstrapTimeout,
    ConfigError,
    PeerRefused,
    TransferFailed,
    Unauthorized,
)
from segue.kv.ids import RankId
from segue.kv.session.tls import GIVE_BOTH, explain_tls
from segue.kv.transport.base import Endpoint
from segue.kv.transport.net import key_handshake as handshake
from segue.kv.transport.net.stream import Channel, TlsChannel
from segue.kv.transport.options import TransportOptions
from segue.kv.transport.tcp.tcp_net import NET, Net


class TcpAddress(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `Endpoint.data`."""

    version: int
    host: str
    port: int
    key: bytes
    encrypted: bool = False


class TcpSockets:
    """The sockets of the transport called `name`."""

    def __init__(self, name: str, options: TransportOptions, net: Net = NET) -> None:
        self._name = name
        self._options = options
        self._net = net

    def listen(self) -> socket.socket:
        """A listener that does not block. Raises ConfigError when the port cannot be listened on."""
        host, port = self._options.host, self._options.port
        try:
            return self._net.listen(host, port)
        except OSError as exc:
            raise ConfigError(
                f"{self._name} cannot listen on {host}:{port}: {exc.strerror}; choose another port"
            ) from exc

    def endpoint(self, listener: socket.socket, key: bytes, nbytes: int) -> Endpoint:
        """The endpoint of `listener` for peers, which must prove that they know `key`."""
        told = self._options
        address = TcpAddress(
            version=1,
            host=told.advertise or told.host,
            port=told.advertise_port or listener.getsockname()[1],
            key=key,
            encrypted=told.tls is not None,
        )
        return Endpoint(self._name, nbytes, msgspec.msgpack.encode(address))

    def address(self, peer: RankId, endpoint: Endpoint) -> TcpAddress:
        """The address at which `peer` listens. Raises PeerRefused for an endpoint that is not of this
        transport, and if only one side encrypts."""
        try:
            address = msgspec.msgpack.decode(endpoint.data, type=TcpAddress)
        except DECODE_ERRORS as exc:
            raise PeerRefused(f"unreadable {self._name} endpoint: {exc}") from exc
        if endpoint.transport != self._name or address.version != 1:
            raise PeerRefused(
                f"not a {self._name} endpoint of version 1: {endpoint.transport} v{address.version}"
            )
        if address.encrypted != (self._options.tls is not None):
            raise PeerRefused(f"only one of this side and {peer} encrypts its KV; {GIVE_BOTH}")
        if not 1 <= address.port < 2**16 or not address.host or not address.host.isprintable():
            raise PeerRefused(
                f"{address.host[:64]!r}:{address.port} is no address of a {self._name} endpoint"
            )
        return address

    def accepted(self, sock: socket.socket) -> Channel:
        """The channel of a socket that was accepted."""
        self._prepare(sock)
        if self._options.tls is None:
            return self._net.channel(sock)
        server = self._options.tls.server
        return TlsChannel(server.wrap_socket(sock, server_side=True, do_handshake_on_connect=False))

    def open_stream(self, peer: RankId, address: TcpAddress, timeout_s: float) -> Channel:
        """Connect and prove a stream within `timeout_s`.

        Raises TransferFailed, PeerRefused, Unauthorized (the certificate) or BootstrapTimeout; then
        nothing is left open.
        """
        deadline = self._net.time() + timeout_s
        sock: socket.socket | None = None
        try:
            sock = self._net.connect((address.host, address.port), self._left(deadline))
            self._prepare(sock)
            if self._options.tls is not None:
                sock.settimeout(self._left(deadline))
                sock = self._options.tls.client.wrap_socket(sock, server_hostname=address.host)
            proof = handshake.WriterProof(address.key, self._options.me)
            sock.sendall(proof.respond(self._exactly(sock, handshake.CHALLENGE_BYTES, deadline)))
            proof.finish(self._exactly(sock, handshake.VERDICT_BYTES, deadline))
            sock.setblocking(False)
        except BaseException as exc:
            if sock is not None:
                sock.close()
            where = f"{peer} at {address.host}:{address.port}"
            if isinstance(exc, TimeoutError):
                raise BootstrapTimeout(f"{where} did not answer within {timeout_s} s") from exc
            if isinstance(exc, ssl.SSLError):
                kind = Unauthorized if isinstance(exc, ssl.SSLCertVerificationError) else TransferFailed
                raise kind(f"no {self._name} path to {where}: {explain_tls(exc)}") from exc
            if isinstance(exc, OSError | UnicodeError):  # the latter: a name that no resolver takes
                why = exc.strerror if isinstance(exc, OSError) else None
                raise TransferFailed(f"no {self._name} path to {where}: {why or exc}") from exc
            raise
        return TlsChannel(sock) if isinstance(sock, ssl.SSLSocket) else self._net.channel(sock)

    def _prepare(self, sock: socket.socket) -> None:
        """Options of every stream. Buffer sizes stay with the kernel's autotuning, which on common
        settings allows more than a process may ask for."""
        stall_s = self._options.limits.peer_silence_s
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        idle_s = max(1, int(stall_s / 2))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, idle_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, idle_s // 3))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(stall_s * 1000))

    def _left(self, deadline: float) -> float:
        left = deadline - self._net.time()
        if left <= 0:
            raise TimeoutError
        return left

    def _exactly(self, sock: socket.socket, nbytes: int, deadline: float) -> bytes:
        data = b""
        while len(data) < nbytes:
            sock.settimeout(self._left(deadline))
            more = sock.recv(nbytes - len(data))
            if not more:
                # A refusal carries its reason; a close without one is for want of a descriptor or of time,
                # and may pass.
                raise TransferFailed("the peer closed the stream during the handshake")
            data += more
        return data
