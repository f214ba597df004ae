"""The host of `shm` in virtual time: threads that copy, mappings, ends of processes.

Two nodes of a deployment are processes of one user on one host. A descriptor stands for what it was opened
as, in whichever process; a mapping is the other node's pool itself, until it is unmapped.
"""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from segue.kv.transport.shm.shm_host import ShmHost
from segue_lab.sim.node_views import KVView
from segue_lab.sim.sim_ioloop import SimIoLoop
from segue_lab.sim.sim_threads import SimThread
from segue_lab.sim.streams import SimNet
from segue_lab.sim.unix import Mapping, Memfd, Pidfd, Shared, TableMapping, UnixSocket


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
        """The wait takes no virtual time."""
        while self.thread is not None and not self.thread.over:
            self.thread.run()

    def is_alive(self) -> bool:
        """Not ended."""
        return self.thread is not None and not self.thread.over


class SimHost(ShmHost):
    """The host of one node for production's `shm`."""

    def __init__(self, node: KVView, rank: int) -> None:
        self.node = node
        self.net = SimNet(node, rank, "")
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
            self.node.state.counts["pools that could not be mapped"] += 1
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
