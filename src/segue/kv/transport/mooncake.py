"""`mooncake`: Mooncake's Transfer Engine. Its `tcp` is tried; its other protocols are configuration.

`MOONCAKE_PROTOCOL` (default `tcp`) and `MOONCAKE_DEVICE` (network cards, separated by commas) set it up.

- One engine per peer and direction. A receiving engine has the whole memory registered. Over `tcp` to drop it
  is a proof: our own process does the copying, and its thread has ended. A writer that stood still and goes
  on connects to the old ports again, so they are held until this process ends (nothing tells when the
  writer's has), and no later engine draws them. Where that fails, and over any other protocol, it is no
  proof.
- A writing engine registers nothing over `tcp`, which does not ask for it.
- Pieces are posted and asked for one by one: the calls that take a whole list hold a core until they
  return, cannot be interrupted, and took 1.5 times as long.
- A piece of one kilobyte takes as long as one of 50 (40 to 50 µs): `library_out` merges neighbours.

Every engine listens at two ports, on all interfaces, whatever address it is given, and asks nobody who he is:
who reaches them can read and write what is registered.
"""

from __future__ import annotations

import importlib
import logging
import os
import socket
import struct
import sys
import threading
from collections import deque
from collections.abc import Iterator
from typing import Any

from segue.kv.errors import ConfigError, PeerRefused, TransferFailed
from segue.kv.ids import RankId
from segue.kv.transport.base import EventSink
from segue.kv.transport.library.library_api import Handle, Library, ReceivingEnd, WritingEnd
from segue.kv.transport.library.library_transport import LibraryTransport
from segue.kv.transport.memory.pool_memory import Memory, MemoryKind
from segue.kv.transport.options import TransportOptions
from segue.kv.transport.tcp.tcp_wire import PartRows

_TCP = "tcp"
#: Pieces that an engine has at once. It takes 1,024 per peer, and lets a call wait for room.
_MAX_RUNNING = 256
#: The engine looks this often whether it is to end, and whoever drops it waits for that with the GIL held.
#: The library's own value is a second.
_ACCEPT_S = 0.02
_DONE, _RUNNING = 1, 0
#: Engines begin and end one at a time in a process: none draws a port between the end of another and `_hold`.
_ONE_AT_A_TIME = threading.Lock()
#: Ports of ended engines; an engine has two of the 2,000 that it draws from. Bounded by `_MAX_HELD`.
HELD: list[socket.socket] = []
_MAX_HELD = 512

log = logging.getLogger("segue.kv.transport")


class MooncakeTransport(LibraryTransport):
    """`Transport` over Mooncake's Transfer Engine."""

    name = "mooncake"
    preference = 40
    memory_kinds = frozenset({MemoryKind.SHARED, MemoryKind.HOST})

    @classmethod
    def unusable(cls) -> str:
        """Why the package cannot be loaded here, or ""."""
        try:
            _engines()
        except ImportError as exc:
            return (
                f"Mooncake cannot be loaded ({exc}); pip install 'segue[mooncake]', which needs libibverbs, "
                "libnuma and libcurl of the system"
            )
        return super().unusable()

    def __init__(self, on_event: EventSink, options: TransportOptions) -> None:
        """Raises ConfigError for an address or a protocol that cannot be used."""
        if os.environ.get("MC_TCP_PROTO") == "1":
            raise ConfigError("MC_TCP_PROTO=1 says that bytes have landed before they have; unset it")
        host = options.advertise or options.host
        if ":" in host:
            raise ConfigError(
                f"mooncake needs an IPv4 address or a name, not {host}; set --host or --advertise"
            )
        if options.tls is not None:
            log.warning("mooncake encrypts no KV; the certificates protect its control streams only")
        super().__init__(on_event, options, MooncakeLibrary(host))
        log.warning(
            "mooncake listens on all interfaces, at ports of 15000 to 17000, and asks nobody for a key: who "
            "reaches them can read and write the KV pool; let a firewall admit the peers alone"
        )


class MooncakeLibrary(Library):
    """Engines that peers reach at `host`."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._protocol = os.environ.get("MOONCAKE_PROTOCOL", _TCP)
        self._device = os.environ.get("MOONCAKE_DEVICE", "")

    def load(self) -> None:
        """See `Library.load`."""
        self._new = _engines()

    def receiving(self, peer: RankId, memory: Memory, greeting: bytes) -> ReceivingEnd:
        """See `Library.receiving`. Raises TransferFailed."""
        engine, ports = self._engine()
        self._register(engine, memory)
        name = f"{self._host}:{engine.get_rpc_port()}"
        return _MooncakeReceivingEnd(engine, name, ports, self._protocol == _TCP)

    def writing(self, peer: RankId, memory: Memory, target: Memory, blob: bytes) -> WritingEnd:
        """See `Library.writing`. Asks the peer's engine for its description, which proves that it answers;
        one that does not is waited for up to a minute. Raises PeerRefused, TransferFailed."""
        name = blob.decode("ascii", "replace")
        if not (name.isascii() and name.isprintable() and name.rpartition(":")[2].isdecimal()):
            raise PeerRefused(f"{peer} gives {name[:64]!r} as the address of its engine")
        engine, _ = self._engine()
        if self._protocol != _TCP:
            self._register(engine, memory)
        if engine.send_probe(name) != 0 or engine.batch_transfer_sync_write(name, [], [], []) != 0:
            raise TransferFailed(f"the engine of {peer} at {name} does not answer")
        return _Writing(engine, name, memory, target, self._protocol == _TCP)

    def _engine(self) -> tuple[Any, set[int]]:
        """An engine, and the ports at which it listens."""
        with _ONE_AT_A_TIME:
            engine, before = self._new(), {port for _, port in _listeners()}
            if engine.initialize(self._host, "P2PHANDSHAKE", self._protocol, self._device) != 0:
                raise TransferFailed(
                    f"mooncake cannot start an engine for protocol {self._protocol!r}, devices "
                    f"{self._device!r}; what it has said on standard error is the reason"
                )
            ports = {port for _, port in _listeners()} - before
        port = engine.get_rpc_port()
        _set_up(port, ports)
        engine.send_probe(f"127.0.0.1:{port}")  # so that what it waits for now, for a second, ends at once
        return engine, ports

    def _register(self, engine: Any, memory: Memory) -> None:
        addresses = [region.address for region in memory.regions]
        if engine.batch_register_memory(addresses, [region.nbytes for region in memory.regions]) != 0:
            raise TransferFailed("mooncake cannot register the KV pool", retryable=False)


class _MooncakeReceivingEnd(ReceivingEnd):
    def __init__(self, engine: Any, name: str, ports: set[int], proves: bool) -> None:
        self.blob = name.encode("ascii")
        self._engine = engine
        self._ports = ports
        self._proves = proves

    def close(self) -> bool:
        last = sys.getrefcount(self._engine) == 2  # the attribute's, and this call's
        with _ONE_AT_A_TIME:
            self._engine = None
            return last and self._proves and (not self.unsettled or _hold(self._ports))


class _BatchPost:
    """Pieces of one post: those that the engine has, by its numbers, and those that it has not."""

    def __init__(self, pieces: Iterator[tuple[int, int, int]]) -> None:
        self.running: deque[int] = deque()
        self.left = pieces
        self.all_begun = False


class _Writing(WritingEnd):
    def __init__(self, engine: Any, name: str, memory: Memory, target: Memory, proves: bool) -> None:
        self._engine = engine
        self._name = name
        self._memory = memory
        self._target = target
        self._proves = proves
        #: Pieces that were given to the engine and did not end in success. It may read even those of which it
        #: says that they have failed: what was given up for a peer that stood still landed when that went on.
        self._unsettled = 0

    def post(self, rows: PartRows) -> Handle:
        source, target = rows.source.copy(), rows.target.copy()
        self._memory.to_addresses(source)
        self._target.to_addresses(target)
        post = _BatchPost(
            zip(source[:, 0].tolist(), target[:, 0].tolist(), source[:, 1].tolist(), strict=True)
        )
        self._begin(post)
        return post

    def done(self, handle: Handle) -> bool:
        assert isinstance(handle, _BatchPost)
        # Each number is a pointer, which the engine frees when it has said how the piece ended.
        while (
            handle.running and (status := self._engine.transfer_check_status(handle.running[0])) != _RUNNING
        ):
            handle.running.popleft()
            if status != _DONE:
                raise TransferFailed(f"mooncake says {status} of a piece for {self._name}")
            self._unsettled -= 1
        self._begin(handle)
        return handle.all_begun and not handle.running

    def close(self) -> bool:
        last = sys.getrefcount(self._engine) == 2
        self._engine = None
        return (last and self._proves) or not self._unsettled

    def _begin(self, post: _BatchPost) -> None:
        while not post.all_begun and self._unsettled < _MAX_RUNNING:
            piece = next(post.left, None)
            if piece is None:
                post.all_begun = True
                return
            self._unsettled += 1
            number = self._engine.transfer_submit_write(self._name, *piece)
            if not number:
                raise TransferFailed(f"mooncake does not take a piece of {piece[2]} bytes for {self._name}")
            post.running.append(number)


def _engines() -> Any:
    """The class of engines. Raises ImportError. Their log says errors only, unless `MC_LOG_LEVEL` is set."""
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")  # read when the package is loaded
    return importlib.import_module("mooncake.engine").TransferEngine


def _listeners() -> Iterator[tuple[socket.socket, int]]:
    """The sockets of this process that listen, each with its port. Their descriptors are not ours."""
    for fd in os.listdir("/proc/self/fd"):
        try:
            sock = socket.socket(fileno=int(fd))
        except OSError:
            continue  # no socket, or closed meanwhile
        try:
            internet = sock.family in (socket.AF_INET, socket.AF_INET6)
            if internet and sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                yield sock, sock.getsockname()[1]
        except OSError:
            continue  # closed meanwhile
        finally:
            sock.detach()  # also if who goes through them raises: it would close the descriptor


def _set_up(rpc_port: int, ports: set[int]) -> None:
    """The engine's listener at `rpc_port` is to look up every `_ACCEPT_S`; connections that linger at `ports`
    are not to keep us from taking them. The numbers are all that is known of the sockets."""
    for sock, port in _listeners():
        if port == rpc_port:
            timeout = struct.pack("ll", 0, int(_ACCEPT_S * 1e6))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)
        if port in ports:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)


def _hold(ports: set[int]) -> bool:
    """Take the ports of an engine that has ended. False if they are not known, or one cannot be had."""
    if len(ports) < 2 or len(HELD) + len(ports) > _MAX_HELD:
        return False
    try:
        HELD.extend(map(_taken, ports))
    except OSError:
        return False
    return True


def _taken(port: int) -> socket.socket:
    """A socket that has `port` at every address, and refuses connections. Raises OSError if somebody else has
    it."""
    family, any_address = (
        (socket.AF_INET6, "::") if socket.has_dualstack_ipv6() else (socket.AF_INET, "0.0.0.0")
    )
    sock = socket.socket(family)
    try:
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of the engine may linger
        sock.bind((any_address, port))
        # The kernel forgets at `listen` that the port may be shared with others that set SO_REUSEADDR.
        sock.listen(1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        sock.close()
        raise
    return sock
