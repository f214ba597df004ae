"""The operating system calls of `shm`, in one place: a loop, threads, unix sockets, memory."""

from __future__ import annotations

import logging
import mmap
import os
import secrets
import select
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from segue.kv.transport.memory import pool_memory as memory
from segue.kv.transport.net.ioloop import IoLoop

log = logging.getLogger("segue.shm")

_SO_PEERPIDFD = 77  # Linux 6.5
_CREDENTIALS = struct.Struct("3i")


class ShmHost:
    """The host's. Another one (the simulator's) runs the same transport in a world of its own."""

    # ---- threads ---------------------------------------------------------------------------------

    def loop(self, name: str, on_crash: Callable[[BaseException], None]) -> IoLoop:
        """A loop, not started."""
        return IoLoop(name, on_crash)

    def condition(self) -> threading.Condition:
        """A lock that threads of `copying` wait at."""
        return threading.Condition()

    def copying(self, name: str, nth: int, of: int, run: Callable[[], None]) -> threading.Thread:
        """The `nth` `of` several threads that copy, not started.

        They are kept on disjoint CPUs: the scheduler likes to wake them all on the waker's core, where they
        take turns instead of sharing the work (bench/transport.py: 0.73 of a memcpy without this, 0.8 to
        0.9 with it, for scattered pages on a busy machine)."""

        def spread() -> None:
            try:
                cpus = sorted(os.sched_getaffinity(0))
                if of <= len(cpus):
                    os.sched_setaffinity(0, cpus[nth::of])  # affects this thread only
            except OSError as exc:  # a sandbox, or a set of CPUs that has changed meanwhile: only speed
                log.info("copying threads stay where the scheduler puts them: %s", exc.strerror)
            run()

        return threading.Thread(target=spread, name=f"{name}-{nth}", daemon=True)

    def is_current(self, thread: threading.Thread) -> bool:
        """Whether `thread` is the caller."""
        return thread is threading.current_thread()

    # ---- sockets and processes -------------------------------------------------------------------

    def id(self) -> str:
        """Equal for two processes that can reach each other's abstract unix sockets and descriptors:
        the same boot of the same kernel, the same network namespace and the same user."""
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}:{os.stat('/proc/self/ns/net').st_ino}:{os.getuid()}"

    def random_bytes(self, nbytes: int) -> bytes:
        """Unpredictable bytes: keys, and names of sockets."""
        return secrets.token_bytes(nbytes)

    def uid(self) -> int:
        """Our user."""
        return os.getuid()

    def peer_uid(self, sock: socket.socket) -> int:
        """The user at the other end of a unix socket, as the kernel recorded it at `connect`/`listen`."""
        raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        return int(_CREDENTIALS.unpack(raw)[1])

    def peer_pidfd(self, sock: socket.socket) -> int | None:
        """A descriptor that becomes readable when the process at the other end has ended.

        None when the kernel says that it has ended already. The fallback for old kernels opens it by
        process id: if that id was reused meanwhile, the descriptor stands for a process that lives longer
        than the peer, so a death is reported late, never early. Raises OSError when neither works.
        """
        try:
            fd = sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
            os.set_inheritable(fd, False)
            return fd
        except OSError:
            raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            pid = int(_CREDENTIALS.unpack(raw)[0])
            try:
                return os.pidfd_open(pid)
            except ProcessLookupError:
                return None

    def ended(self, pidfd: int) -> bool:
        """Whether the process that `pidfd` stands for has ended, asked of the kernel now. An event of a
        descriptor is no answer: its number may have stood for another one when the event was collected."""
        asked = select.poll()
        asked.register(pidfd, select.POLLIN)
        return any(mask & select.POLLIN for _, mask in asked.poll(0))

    def listen(self, name: bytes) -> socket.socket:
        """A listener that does not block, at an abstract name."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        listener.bind(name)
        listener.listen(128)
        return listener

    def new_socket(self) -> socket.socket:
        """A socket that can connect to such a listener."""
        return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def send_fds(self, sock: socket.socket, frame: bytes, fds: Sequence[int]) -> None:
        """A frame, and descriptors with it."""
        socket.send_fds(sock, [frame], fds)

    def receive_fds(self, sock: socket.socket, nbytes: int) -> tuple[bytes, list[int], bool]:
        """A frame and the two descriptors that came with it; True if some were lost."""
        frame, fds, flags, _ = socket.recv_fds(sock, nbytes, 2, socket.MSG_CMSG_CLOEXEC)
        return frame, fds, bool(flags & socket.MSG_CTRUNC)

    # ---- descriptors and memory ------------------------------------------------------------------

    def close(self, fd: int) -> None:
        """Close a descriptor."""
        os.close(fd)

    def sealed(self, fd: int) -> bool:
        """See `memory.sealed`."""
        return memory.sealed(fd)

    def size(self, fd: int) -> int:
        """Bytes of a memfd."""
        return os.fstat(fd).st_size

    def map_pool(self, fd: int, nbytes: int) -> mmap.mmap:
        """See `memory.map_shared`."""
        return memory.map_shared(fd, nbytes)

    def map_table(self, fd: int, nbytes: int) -> mmap.mmap:
        """A mapping that can only be read. Raises OSError."""
        return mmap.mmap(fd, nbytes, mmap.MAP_SHARED, mmap.PROT_READ)

    def table(self, nbytes: int) -> tuple[int, mmap.mmap]:
        """Memory that others can only read: its memfd and our mapping."""
        return memory.readable(nbytes)


HOST = ShmHost()
