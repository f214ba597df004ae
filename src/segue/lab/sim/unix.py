"""What `shm` asks of its host, in virtual time: threads that copy, unix sockets, mappings, ends of processes.

Two nodes of a deployment are processes of one user on one host. A descriptor stands for what it was opened
as, in whichever process; a mapping is the other node's pool itself, until it is unmapped.
"""

from __future__ import annotations

import ctypes
import errno
import select
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from segue.kv.transport.shm.shm_host import ShmHost
from segue.kv.transport.shm.shm_table import TABLE_BYTES
from segue.kv.transport.shm.shm_wire import GOODBYE
from segue.lab.sim.sim_ioloop import SimIoLoop
from segue.lab.sim.sim_threads import SimThread
from segue.lab.sim.streams import SimNet
from segue.lab.sim.world import Process, Violation

if TYPE_CHECKING:
    from segue.lab.sim.sim_node import KVNode


class SimCondition:
    """A condition of threads of which one runs at a time: the lock is nobody's."""

    def __init__(self, host: SimHost) -> None:
        self._host = host
        self._waiting: deque[SimThread] = deque()

    def __enter__(self) -> SimCondition:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is held."""

    def wait(self) -> None:
        """Until `notify`; only in a thread."""
        thread = SimThread.current
        assert thread is not None, "the simulation itself cannot wait"
        self._waiting.append(thread)
        thread.sleep(None)

    def notify(self, count: int = 1) -> None:
        """Wake so many."""
        for _ in range(min(count, len(self._waiting))):
            self._waiting.popleft().woken(self._host.hop_s())

    def notify_all(self) -> None:
        """Wake all."""
        self.notify(len(self._waiting))


class SimCopyThread:
    """A thread of the copier: made when it is started, ended with its process."""

    def __init__(self, host: SimHost, run: Callable[[], None]) -> None:
        self._host = host
        self._run = run
        self.thread: SimThread | None = None

    def start(self) -> None:
        """Run soon."""
        self.thread = SimThread(self._host.node, self._guarded)
        self._host.node.after(0.0, self.thread.run)

    def _guarded(self) -> None:
        try:
            self._run()
        except Exception as exc:
            self._host.crashed(exc)

    def join(self, _timeout_s: float) -> None:
        """Whoever waits for it sees no time pass."""
        while self.thread is not None and not self.thread.over:
            self.thread.run()

    def is_alive(self) -> bool:
        """Not ended."""
        return self.thread is not None and not self.thread.over


class Memfd:
    """Memory that a descriptor stands for. `node` is whose pool it is, None for a table of grants."""

    closed = False
    listening = None

    def __init__(self, data: bytearray | memoryview, node: KVNode | None) -> None:
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
        """Whoever holds it is gone."""


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

    def __init__(self, net: SimNet) -> None:
        self.net = net
        self.process: Process = net.process
        self.closed = False
        self.other: UnixSocket | None = None
        self.backlog: deque[UnixSocket] = deque()
        self.listening: bytes | None = None
        self.inbox: deque[tuple[bytes, list[Any]]] = deque()
        #: the other end is closed
        self.ended = False
        #: what came over it
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
        """The socket is closed under a process that lives (a bug of it, or a meddler)."""
        self.ended = True
        self.changed()

    def ready(self) -> int:
        """What epoll says of it."""
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


class SimHost(ShmHost):
    """What production's `shm` of one node runs on."""

    def __init__(self, node: KVNode, rank: int) -> None:
        self.node = node
        self.net = SimNet(node, rank)
        self.io: SimIoLoop | None = None
        self._took: UnixSocket | None = None
        self._rng = node.world.rng(f"host {node.name}")
        #: how many of the next pools cannot be mapped
        self.unmapped = 0
        #: a thread that copies ends by this at its next slice
        self.breaks: Exception | None = None

    def hop_s(self) -> float:
        """How long a thread takes to wake."""
        return self.node.world_timing.hop_s * self._rng.random()

    def random_bytes(self, nbytes: int) -> bytes:
        return self.net.random_bytes(nbytes)

    def crashed(self, exc: Exception) -> None:
        """A thread that copies has ended."""
        if exc is not self.breaks:
            self.node.world.fail(exc)

    def died(self) -> None:
        """The process has ended."""
        self.net.died()

    # ---- threads ---------------------------------------------------------------------------------

    def loop(self, name: str, on_crash: Callable[[BaseException], None]) -> SimIoLoop:
        self.io = self.net.loop(name, on_crash)
        return self.io

    def condition(self) -> Any:
        return SimCondition(self)

    def copying(self, name: str, nth: int, of: int, run: Callable[[], None]) -> Any:
        return SimCopyThread(self, run)

    def is_current(self, thread: Any) -> bool:
        return SimThread.current is not None and thread.thread is SimThread.current

    # ---- sockets and processes -------------------------------------------------------------------

    def id(self) -> str:
        return "the host"

    def uid(self) -> int:
        return 0

    def peer_uid(self, sock: Any) -> int:
        return 0

    def peer_pidfd(self, sock: Any) -> int | None:
        other = sock.other
        assert other is not None
        if other.process.ended:
            return None
        return self.net.open(Pidfd(other.process))

    def ended(self, pidfd: int) -> bool:
        pid = self.net.at(pidfd)
        assert isinstance(pid, Pidfd)
        return bool(pid.ready())

    def listen(self, name: bytes) -> Any:
        sock = UnixSocket(self.net)
        sock.listening = name
        sock.setblocking(False)
        self.net.streams.names[name] = sock
        return sock

    def new_socket(self) -> Any:
        return UnixSocket(self.net)

    def send_fds(self, sock: Any, frame: bytes, fds: Sequence[int]) -> None:
        sock.put(frame, [self.net.at(fd) for fd in fds])

    def receive_fds(self, sock: Any, nbytes: int) -> tuple[bytes, list[int], bool]:
        frame, things = sock.take(nbytes)
        self._took = sock
        return frame, [self.net.open(thing) for thing in things], False

    # ---- descriptors and memory ------------------------------------------------------------------

    def close(self, fd: int) -> None:
        self.net.closed(fd)

    def sealed(self, fd: int) -> bool:
        return True

    def size(self, fd: int) -> int:
        return len(self.net.at(fd).data)

    def map_pool(self, fd: int, nbytes: int) -> Any:
        if self.unmapped:
            self.unmapped -= 1
            self.node.deployment.counts["pools that could not be mapped"] += 1
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        mapping = Mapping(self.net.at(fd))
        assert self._took is not None, "a pool that came over no socket"
        self._took.mapping = mapping
        return mapping

    def map_table(self, fd: int, nbytes: int) -> Any:
        return TableMapping.from_buffer(self.net.at(fd).data)

    def table(self, nbytes: int) -> tuple[int, Any]:
        memfd = Memfd(Shared(nbytes), None)
        return self.net.open(memfd), memfd.data
