"""TCP between simulated processes: bytes in order, visible when broken, silent when blocked.

Production's sessions run over it unchanged. A connection never heals: a broken one is a new one. Each
end learns of a break after a delay of its own; until then it goes on sending into the void.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from segue.kv.session import connection as session
from segue_lab.sim.timing import Timing
from segue_lab.sim.world import Process, Violation, World

#: Connections that a kernel keeps for a process that does not accept them.
BACKLOG = 512
#: Bytes that a kernel keeps for a process that does not read; the rest waits at the sender.
WINDOW_BYTES = 2**16


class ProcessLoop(Protocol):
    """The loop of a process that has connections."""

    process: Process
    host: str

    def enter(self, call: Callable[..., Any], *args: Any) -> Any: ...

    def call_soon(self, callback: Callable[..., object], *args: Any) -> Any: ...


class Carrier(Protocol):
    """The network that a connection runs over, and where listeners are found."""

    world: World
    timing: Timing
    opened: int
    slow: dict[Process, float]
    translator: str

    def blocked(self, source: Process, target: Process) -> bool: ...

    def carried(self, socket: Socket, data: bytes) -> bytes: ...

    def forget(self, socket: Socket) -> None: ...

    def listen(self, listener: SimListener) -> None: ...

    def unlisten(self, listener: SimListener) -> None: ...

    def listener_at(self, host: str, port: int) -> SimListener | None: ...

    def free_port(self, host: str) -> int: ...


class _Options:
    """Socket options that production sets."""

    family = socket.AF_INET

    def __init__(self, here: tuple[str, int], there: tuple[str, int]) -> None:
        self.nodelay = False
        self.getsockname, self.getpeername = lambda: here, lambda: there

    def setsockopt(self, level: int, name: int, value: int) -> None:
        """As a socket's."""
        self.nodelay |= (level, name, value) == (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


class Socket(asyncio.Transport):
    """One end of a connection, and asyncio's transport over it."""

    def __init__(self, connection: SimConnection, loop: ProcessLoop, name: tuple[str, int]) -> None:
        self._options = _Options((loop.host, 0), name)
        super().__init__({"peername": name, "socket": self._options})
        self.connection = connection
        self.loop = loop
        self.process: Process = loop.process
        self.protocol: Any = None
        self.other: Socket = self
        #: when what we sent last arrives: the next comes after it
        self.ready_at = 0.0
        #: bytes that wait while our direction is blocked; None is our end of the stream
        self.held: list[bytes | None] = []
        #: bytes that nobody reads yet: there is no protocol, or it has paused; None is the end
        self._early: deque[bytes | None] = deque()
        self._reading = True
        self._readable: Callable[[], None] | None = None
        self._no_more_out = False
        self.over = False
        self._why: Exception | None = None

    # ---- what loops and protocols call -------------------------------------------------------------

    def attach(self, protocol: Any) -> None:
        """`protocol` gets received bytes from now on, and those from before."""
        self.protocol = protocol
        protocol.connection_made(self)
        if isinstance(protocol, session.Connection) and not self._options.nodelay and not self.over:
            self.process.world.fail(Violation("delay", f"{self.process.name} leaves small packets waiting"))
        if self.over:
            self.loop.call_soon(protocol.connection_lost, self._why)
        elif self._early:
            self.loop.call_soon(self._catch_up)

    def set_protocol(self, protocol: Any) -> None:
        self.protocol = protocol

    def pause_reading(self) -> None:
        self._reading = False

    def resume_reading(self) -> None:
        if not self._reading:
            self._reading = True
            self.loop.call_soon(self._catch_up)

    def setblocking(self, _blocks: bool) -> None:
        """As a socket: only asyncio reads from it."""

    def watch(self, readable: Callable[[], None] | None) -> None:
        """Call `readable` when there is something to read, as `add_reader`; None: no more."""
        self._readable = readable
        if readable is not None and (self._early or self.over):
            self.loop.call_soon(readable)

    def recv(self, size: int, flags: int) -> bytes:
        """A look at what has come (MSG_PEEK), of a socket without a protocol."""
        return bytes((self._early[0] if self._early else None) or b"")[:size]

    def shutdown(self, how: int) -> None:
        """Both directions end, for the process too: SHUT_RDWR."""
        if self.over:
            raise OSError(errno.ENOTCONN, "not connected")
        self.write_eof()
        self._arrived(None)

    def write(self, data: Any) -> None:
        if not self.over and not self._no_more_out:
            self._send(bytes(data))

    def write_eof(self) -> None:
        if not self.over and not self._no_more_out:
            self._no_more_out = True
            self._send(None)

    def can_write_eof(self) -> bool:
        return True

    def get_write_buffer_size(self) -> int:
        held = sum(len(data) for data in self.held if data is not None)
        unread = sum(len(data) for data in self.other._early if data is not None)
        return held + max(0, unread - WINDOW_BYTES)

    def is_closing(self) -> bool:
        return self.over

    def close(self) -> None:
        self.write_eof()
        self._finish(None)

    def abort(self) -> None:
        if not self.over:
            self._finish(None)
            self.connection.reset(self)

    # ---- the network's side ----------------------------------------------------------------------

    def _send(self, data: bytes | None) -> None:
        connection = self.connection
        if connection.broken:
            return
        network = connection.network
        if network.blocked(self.process, self.other.process):
            self.held.append(data)
            return
        world, timing = network.world, network.timing
        at = world.now + timing.latency_s * (1.0 + timing.jitter * connection.rng.random())
        if network.slow:
            at += network.slow.get(self.process, 0.0)
        if at <= self.ready_at:
            at = self.ready_at + 1e-9
        self.ready_at = at
        world.at(at, self.other.process, self.other._arrived, data)

    def release(self) -> None:
        """Our direction is open again: TCP sends what waited."""
        held, self.held = self.held, []
        for data in held:
            self._send(data)

    def _arrived(self, data: bytes | None) -> None:
        connection = self.connection
        if connection.broken and connection.lost[self is connection.ends[0]]:
            return
        if self.over:
            if data:
                connection.reset(self)  # the answer of a closed socket
            return
        if data is not None:
            data = connection.network.carried(self, data)
        if self.protocol is None or not self._reading or self._early:
            self._early.append(data)
            if self._readable is not None:
                self.loop.enter(self._readable)
        elif data is None:
            self.loop.enter(self._ended)
        else:
            self.loop.enter(self._feed, data)

    def _catch_up(self) -> None:
        """A protocol reads on."""
        while self._early and self._reading and not self.over:
            data = self._early.popleft()
            if data is None:
                self._ended()
            else:
                self._feed(data)

    def _ended(self) -> None:
        if not self.protocol.eof_received():
            self.close()

    def _feed(self, data: bytes) -> None:
        """In pieces now and then: a stream knows no messages."""
        rng = self.connection.rng
        if rng.random() >= 0.02:
            self._feed_piece(data)
            return
        cuts = sorted(rng.randrange(max(1, len(data))) for _ in range(2))
        for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
            self._feed_piece(data[start:end])

    def _feed_piece(self, data: bytes) -> None:
        if not isinstance(self.protocol, asyncio.BufferedProtocol):
            if data and not self.over:
                self.protocol.data_received(data)
            return
        at, end = 0, len(data)
        while at < end and not self.over:
            room: Any = self.protocol.get_buffer(-1)
            size = min(len(room), end - at)
            room[:size] = data[at : at + size]
            at += size
            self.protocol.buffer_updated(size)

    def _finish(self, error: Exception | None) -> None:
        """This end is over; its protocol hears it in the loop's next turn."""
        if self.over:
            return
        self.over = True
        self._why = error
        self.connection.network.forget(self)
        if not self.process.alive:
            return
        if self.protocol is not None:
            self.loop.call_soon(self.protocol.connection_lost, error)
        elif self._readable is not None:
            self.loop.call_soon(self._readable)

    def broke(self, error: Exception) -> None:
        """The kernel tells us that the connection is no more."""
        self.loop.enter(self._finish, error)

    def vanish(self) -> None:
        """The process is gone: nobody is told on this side."""
        self.over = True
        self.connection.network.forget(self)


class SimConnection:
    """Two sockets. `lost[0]` says that what is under way to `ends[1]` is lost, `lost[1]` to `ends[0]`."""

    def __init__(self, network: Carrier, dialler: ProcessLoop, listener: ProcessLoop, port: int) -> None:
        self.network = network
        network.opened += 1
        self.rng = network.world.rng(f"tcp {dialler.process.name} {listener.process.name} {network.opened}")
        self.broken = False
        self.lost = [False, False]
        ours = Socket(self, dialler, (listener.host, port))
        seen_as = network.translator or dialler.host
        theirs = Socket(self, listener, (seen_as, 30000 + network.opened % 30000))
        ours.other, theirs.other = theirs, ours
        self.ends = (ours, theirs)

    def reset(self, by: Socket) -> None:
        """`by` has no use for what comes: the other end hears it after what was sent before."""
        if self.broken:
            return
        self.broken = True
        other, network = by.other, self.network
        if other.over or network.blocked(by.process, other.process):
            return
        at = max(by.ready_at + 1e-9, network.world.now + network.timing.latency_s)
        network.world.at(at, other.process, other.broke, ConnectionResetError("connection reset by peer"))

    def snap(self) -> None:
        """The connection breaks: what is under way may be lost, both ends notice in their own time."""
        if self.broken:
            return
        self.broken = True
        self.lost = [self.rng.random() < 0.5, self.rng.random() < 0.5]
        for end in self.ends:
            if not end.over:
                delay_s = self.rng.random() * self.network.timing.break_seen_s
                end.process.after(delay_s, end.broke, ConnectionResetError("connection reset"))


class SimListener:
    """A listening socket: what the kernel has accepted, and the process not yet."""

    def __init__(self, network: Carrier, loop: ProcessLoop) -> None:
        self.network = network
        self.loop = loop
        self.process = loop.process
        self._bound = ("", 0)
        self._waiting: deque[Socket] = deque()
        self._readable: Callable[[], None] | None = None
        #: until when the system has no descriptor for another connection
        self.starved_until = 0.0

    def setsockopt(self, *_: Any) -> None:
        """As a socket: nothing of it matters here."""

    def setblocking(self, _blocks: bool) -> None:
        """As a socket: only asyncio reads from it."""

    def bind(self, where: tuple[str, int]) -> None:
        """As a socket: of an address of its own host, or of all of them, where nobody else listens."""
        host, port = where
        if host not in (self.loop.host, "0.0.0.0"):
            raise OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")
        port = port or self.network.free_port(self.loop.host)
        if self.network.listener_at(self.loop.host, port) is not None:
            raise OSError(errno.EADDRINUSE, "Address already in use")
        self._bound = (host, port)

    def listen(self, _backlog: int) -> None:
        """As a socket: from now on it is found."""
        self.network.listen(self)

    def getsockname(self) -> tuple[str, int]:
        """As a socket."""
        return self._bound

    @property
    def place(self) -> tuple[str, int]:
        """The address at which others find it."""
        return self.loop.host, self._bound[1]

    def fileno(self) -> int:
        """-1: it has no descriptor."""
        return -1

    def close(self) -> None:
        """As a socket: nobody is let in any more, and who was not yet accepted is reset."""
        self.network.unlisten(self)
        waiting, self._waiting = self._waiting, deque()
        for accepted in waiting:
            accepted.abort()

    @property
    def full(self) -> bool:
        """Nobody accepts: the kernel drops whoever knocks."""
        return len(self._waiting) >= BACKLOG

    def knocked(self, socket: Socket) -> None:
        """The kernel has accepted one more connection."""
        self._waiting.append(socket)
        if self._readable is not None:
            self.loop.enter(self._readable)

    def watch(self, readable: Callable[[], None] | None) -> None:
        """Call `readable` when somebody knocks, as `add_reader`; None: no more."""
        self._readable = readable
        if readable is not None and self._waiting:
            self.loop.call_soon(readable)

    def accept(self) -> tuple[Socket, tuple[str, int]]:
        """The next connection. BlockingIOError if nobody waits, OSError while there are no descriptors."""
        if not self._waiting:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        if self.network.world.now < self.starved_until:
            raise OSError(errno.EMFILE, "too many open files")
        socket = self._waiting.popleft()
        where: tuple[str, int] = socket.get_extra_info("peername")
        return socket, where
