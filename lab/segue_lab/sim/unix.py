"""Unix sockets, and what descriptors stand for that are sent over them: memory and processes."""

from __future__ import annotations

import ctypes
import errno
import select
from collections import deque
from typing import Any

from segue.kv.transport.shm.shm_table import TABLE_BYTES
from segue.kv.transport.shm.shm_wire import GOODBYE
from segue_lab.sim.sim_threads import SimThread
from segue_lab.sim.sockets import SocketNet
from segue_lab.sim.world import Process, Violation


class Memfd:
    """Memory that a descriptor stands for. `node` is whose pool it is, None for a table of grants."""

    closed = False
    listening = None

    def __init__(self, data: bytearray | memoryview, node: Process | None) -> None:
        self.data = data
        self.node = node

    def ready(self) -> int:
        """Nothing ever happens at it."""
        return 0

    def vanish(self) -> None:
        """Its process is gone; mappings stay."""


class Pidfd:
    """A descriptor that stands for a process."""

    closed = False

    def __init__(self, process: Process) -> None:
        self.process = process

    def ready(self) -> int:
        """Readable once the process has ended, and the kernel has cleaned up after it."""
        return select.EPOLLIN if self.process.ended else 0

    def vanish(self) -> None:
        """The holder of the descriptor has ended."""


class Shared(bytearray):
    """A small memory that can be mapped."""

    closed = False

    def close(self) -> None:
        """Unmap."""


class TableMapping(ctypes.c_uint8 * TABLE_BYTES):  # type: ignore[misc]
    """A writer's mapping of a table of grants: the same bytes, unmapped by itself."""

    closed = False

    def close(self) -> None:
        """Unmap."""
        self.closed = True


class Mapping:
    """A mapping of a memfd."""

    def __init__(self, memfd: Memfd) -> None:
        self.memfd = memfd
        self.closed = False

    def __len__(self) -> int:
        return len(self.memfd.data)

    def close(self) -> None:
        """Unmap."""
        self.closed = True


class UnixSocket:
    """A unix socket: messages, whole and at once; a listener, or one end of a pair."""

    def __init__(self, net: SocketNet) -> None:
        self.net = net
        self.process: Process = net.process
        self.closed = False
        self.other: UnixSocket | None = None
        self.backlog: deque[UnixSocket] = deque()
        self.listening: bytes | None = None
        self.inbox: deque[tuple[bytes, list[Any]]] = deque()
        #: the other end is closed
        self.ended = False
        #: the memory that came over it
        self.mapping: Mapping | None = None
        self._fd = net.open(self)
        self._timeout_s: float | None = None
        self._blocks = True
        self._waiter: SimThread | None = None

    def fileno(self) -> int:
        return -1 if self.closed else self._fd

    def setblocking(self, blocks: bool) -> None:
        self._blocks = blocks

    def settimeout(self, seconds: float) -> None:
        self._timeout_s = seconds

    def accept(self) -> tuple[UnixSocket, str]:
        self.net.need_descriptor()
        if not self.backlog:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        sock = self.backlog.popleft()
        sock._fd = self.net.open(sock)
        return sock, ""

    def connect(self, name: bytes) -> None:
        listener = self.net.streams.names.get(name)
        if listener is None:
            raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
        theirs = UnixSocket(listener.net)
        listener.net.closed(theirs._fd)  # it has a number once it is accepted
        self.other, theirs.other = theirs, self
        listener.backlog.append(theirs)
        listener.changed()

    def send(self, data: bytes, _flags: int = 0) -> int:
        if data == GOODBYE and self.mapping is not None and not self.mapping.closed:
            raise Violation("4", f"{self.process.name} says goodbye with the pool still mapped")
        self.put(data, [])
        return len(data)

    def sendall(self, data: bytes) -> None:
        self.put(data, [])

    def put(self, data: bytes, things: list[Any]) -> None:
        """Send a message, with what descriptors of this process stand for."""
        other = self.other
        if self.closed or other is None or other.closed or self.ended:
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")
        other.inbox.append((data, things))
        other.changed()

    def recv(self, nbytes: int) -> bytes:
        return self.take(nbytes)[0]

    def take(self, nbytes: int) -> tuple[bytes, list[Any]]:
        """The next message; empty at the end."""
        if self.closed:
            raise OSError(errno.EBADF, "Bad file descriptor")
        self._wait()
        if not self.inbox:
            return b"", []
        data, things = self.inbox.popleft()
        return data[:nbytes], things

    def _wait(self) -> None:
        thread, world = SimThread.current, self.process.world
        ends_at = world.now + (self._timeout_s if self._timeout_s is not None else 1e9)
        while not self.inbox and not self.ended:
            if not self._blocks or thread is None:
                raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
            if world.now >= ends_at:
                raise TimeoutError("timed out")
            self._waiter = thread
            thread.sleep(ends_at - world.now + 1e-6)
            self._waiter = None

    def close(self) -> None:
        if self.closed:
            return
        self.net.closed(self._fd)
        self._leave()

    def vanish(self) -> None:
        """Its process is gone."""
        if not self.closed:
            self._leave()

    def _leave(self) -> None:
        self.closed = True
        if self.listening is not None:
            self.net.streams.names.pop(self.listening, None)
            for sock in self.backlog:
                sock._leave()
        if self.other is not None:
            self.other.ended = True
            self.other.changed()

    def cut(self) -> None:
        """The socket of a living process is closed (a bug, or another program)."""
        self.ended = True
        self.changed()

    def ready(self) -> int:
        """Its epoll events."""
        if self.listening is not None:
            return select.EPOLLIN if self.backlog else 0
        if self.other is None:
            return 0
        hung = select.EPOLLIN | select.EPOLLHUP if self.ended else 0
        return hung | select.EPOLLOUT | (select.EPOLLIN if self.inbox else 0)

    def changed(self) -> None:
        """The kernel has news of it."""
        if self.closed or not self.process.alive:
            return
        if self._waiter is not None:
            self._waiter.woken()
        self.net.poller.changed(self._fd)
