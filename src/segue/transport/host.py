"""What this process can learn of its host and of a process at the other end of a unix socket."""

from __future__ import annotations

import os
import select
import socket
import struct
from pathlib import Path

_SO_PEERPIDFD = 77  # Linux 6.5
_CREDENTIALS = struct.Struct("3i")


def host_id() -> str:
    """Equal for two processes that can reach each other's abstract unix sockets and descriptors:
    the same boot of the same kernel, the same network namespace and the same user."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot}:{os.stat('/proc/self/ns/net').st_ino}:{os.getuid()}"


def peer_uid(sock: socket.socket) -> int:
    """The user at the other end of a unix socket, as the kernel recorded it at `connect`/`listen`."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(raw)[1])


def peer_pidfd(sock: socket.socket) -> int | None:
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


def ended(pidfd: int) -> bool:
    """Whether the process that `pidfd` stands for has ended, asked of the kernel now. An event of a
    descriptor is no answer: its number may have stood for another one when the event was collected."""
    asked = select.poll()
    asked.register(pidfd, select.POLLIN)
    return any(mask & select.POLLIN for _, mask in asked.poll(0))
