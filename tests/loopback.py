"""A network of this thread's own with nothing but loopback; what it starts is in it, too."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import socket
import struct
from collections.abc import Iterator

import pytest

_CLONE_NEWNET = 0x40000000
_SIOCSIFFLAGS, _IFF_UP, _IFF_RUNNING = 0x8914, 1, 64


@contextlib.contextmanager
def only_loopback() -> Iterator[None]:
    """Nothing here can reach another host, not even by a bug: only loopback, and nobody else's ports. Skips
    the test where that is not allowed."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open("/proc/thread-self/ns/net") as before:
        if libc.unshare(_CLONE_NEWNET):
            pytest.skip(f"no network namespace: {os.strerror(ctypes.get_errno())}")
        try:
            with socket.socket() as any_socket:
                fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh", b"lo", _IFF_UP | _IFF_RUNNING))
            yield
        finally:
            assert libc.setns(before.fileno(), _CLONE_NEWNET) == 0
