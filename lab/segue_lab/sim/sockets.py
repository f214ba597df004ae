"""The sockets of `tcp` in memory, with the methods that production's transport calls.

A stream has latency, a speed, and buffers that are small now and then, so that it carries pieces. It can be
slow, stand still in one or both directions, break at one end before the other, and change a bit.
"""

from __future__ import annotations

import ctypes
import errno
import os
import select
import socket
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from segue_lab.sim.flow import AGAIN_S, Flow
from segue_lab.sim.sim_ioloop import Descriptor, SimPoller
from segue_lab.sim.sim_threads import SimThread
from segue_lab.sim.world import Process, Violation

LINGER = b"\x01\x00\x00\x00\x00\x00\x00\x00"


class Streams:
    """The listeners of one deployment."""

    def __init__(self, latency_s: float) -> None:
        self.latency_s = latency_s
        self.listeners: dict[tuple[str, int], SimSocket] = {}
        #: unix sockets that listen, and the descriptors of each process
        self.names: dict[bytes, Any] = {}
        self.nets: list[Any] = []
        self.ports = 40000


class SocketNet(Protocol):
    """The descriptors of one process."""

    process: Process
    #: where other processes see it
    host: str
    streams: Streams
    poller: SimPoller

    def open(self, thing: Descriptor) -> int: ...

    def closed(self, fd: int) -> None: ...

    def need_descriptor(self) -> None: ...

    def offset_of(self, address: int, nbytes: int) -> int | None: ...


class SimSocket:
    """One descriptor of a process: a listener, or one end of a stream. It has the methods of
    `socket.socket` that `tcp` calls, and no others."""

    def __init__(self, net: SocketNet) -> None:
        self.net = net
        self.process: Process = net.process
        self.closed = False
        self.error: OSError | None = None
        self.backlog: deque[SimSocket] = deque()
        self.listening: tuple[str, int] | None = None
        self.inward: Flow | None = None
        self.outward: Flow | None = None
        self._fd = net.open(self)
        self._lowat = 1
        self._linger = False
        self._timeout_s: float | None = None
        self._blocks = True
        self._waiter: SimThread | None = None

    @property
    def host(self) -> str:
        """The host at which its process is seen."""
        return self.net.host

    # ---- what production calls -------------------------------------------------------------------

    def fileno(self) -> int:
        return -1 if self.closed else self._fd

    def getsockname(self) -> tuple[str, int]:
        assert self.listening is not None
        return self.listening

    def setblocking(self, blocks: bool) -> None:
        self._blocks, self._timeout_s = blocks, None

    def settimeout(self, seconds: float) -> None:
        self._timeout_s = seconds

    def setsockopt(self, level: int, name: int, value: int | bytes) -> None:
        if level == socket.SOL_SOCKET and name == socket.SO_RCVLOWAT:
            assert isinstance(value, int)
            self._lowat = value
            self.changed()
        elif level == socket.SOL_SOCKET and name == socket.SO_LINGER:
            self._linger = value == LINGER

    def accept(self) -> tuple[SimSocket, tuple[str, int]]:
        self.net.need_descriptor()
        if not self.backlog:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        sock = self.backlog.popleft()
        sock._fd = self.net.open(sock)
        assert sock.inward is not None
        return sock, (sock.inward.sender.host, 1)

    def recv(self, nbytes: int) -> bytes:
        flow = self._readable()
        at, data = flow.read, flow.take(nbytes)
        return flow.path.carried(flow, at, data)

    def recv_into(self, buffer: bytearray, nbytes: int) -> int:
        data = self._readable().take(nbytes)
        buffer[: len(data)] = data
        return len(data)

    def send(self, data: bytes, _flags: int = 0) -> int:
        flow = self._writable()
        taken = data[: flow.room]
        flow.send(taken)
        return len(taken)

    def sendall(self, data: bytes) -> None:
        while data:
            data = data[self.send(data) :]

    def close(self) -> None:
        if self.closed:
            return
        if self.listening is not None:
            self.net.streams.listeners.pop(self.listening, None)
        self.net.closed(self._fd)
        self.closed = True
        inward, outward = self.inward, self.outward
        if outward is None or inward is None or self.error is not None:
            return
        if self._linger or inward.buffer:
            outward.lost = self._linger and outward.rng.random() < 0.5
            inward.sender.reset_by_peer()
        else:
            outward.finish()

    # ---- vectors ---------------------------------------------------------------------------------

    def sendmsg(self, _fd: int, pointer: Any, _flags: int) -> int:
        """As libc's."""
        return self._call(self._send_rows, pointer)

    def recvmsg(self, _fd: int, pointer: Any, _flags: int) -> int:
        """As libc's."""
        return self._call(self._receive_rows, pointer)

    def _call(self, call: Callable[[list[tuple[int, int]]], int], pointer: Any) -> int:
        header = pointer.contents
        words = (ctypes.c_uint64 * (2 * header.iovlen)).from_address(header.iov)[:]
        try:
            return call(list(zip(words[::2], words[1::2], strict=True)))
        except OSError as exc:
            ctypes.set_errno(exc.errno or errno.EIO)
            return -1

    def _send_rows(self, iov: list[tuple[int, int]]) -> int:
        flow = self._writable()
        left = count = min(flow.room, sum(length for _, length in iov))
        pieces: list[bytes] = []
        read: list[tuple[int, int]] = []
        for address, length in iov:
            size = min(length, left)
            pieces.append(ctypes.string_at(address, size))
            if (offset := self.net.offset_of(address, size)) is not None:
                read.append((offset, size))
            left -= size
            if not left:
                break
        flow.send(b"".join(pieces))
        part = flow.parts[-1] if flow.parts else None
        if read:
            assert part is not None
            flow.path.reading(part.epoch, read)
        if flow.sending is not None:
            flow.path.in_mid_write()
        return count

    def _receive_rows(self, iov: list[tuple[int, int]]) -> int:
        flow = self._readable()
        most = sum(length for _, length in iov)
        at, data = flow.read, flow.take(most)
        if not data:
            return 0
        landed: list[tuple[int, bytes]] = []
        done = 0
        for address, length in iov:
            size = min(length, len(data) - done)
            offset = self.net.offset_of(address, size)
            if offset is None:
                raise Violation("4", f"{self.process.name} lets a write land outside its pool")
            landed.append((offset, data[done : done + size]))
            done += size
            if done == len(data):
                break
        flow.path.landing(flow.part_at(at), at, landed)
        return len(data)

    # ---- inside ----------------------------------------------------------------------------------

    def _readable(self) -> Flow:
        """The flow to read from: it has bytes or has ended."""
        flow = self._alive().inward
        assert flow is not None
        self._until(lambda: bool(flow.buffer) or flow.ended or self.error is not None)
        if not flow.buffer and self.error is not None:
            raise self.error
        return flow

    def _writable(self) -> Flow:
        flow = self._alive().outward
        assert flow is not None
        self._until(lambda: flow.room > 0 or self.error is not None)
        if self.error is not None:
            raise self.error
        return flow

    def _alive(self) -> SimSocket:
        if self.closed:
            raise OSError(errno.EBADF, "Bad file descriptor")
        return self

    def _until(self, done: Callable[[], bool]) -> None:
        if done():
            return
        thread = SimThread.current
        if not self._blocks or thread is None:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        timeout_s = self._timeout_s if self._timeout_s is not None else 1e9
        ends_at = self.process.world.now + timeout_s
        while not done():
            left_s = ends_at - self.process.world.now
            if left_s <= 0:
                raise TimeoutError("timed out")
            self._waiter = thread
            thread.sleep(left_s + 1e-6)
            self._waiter = None

    def ready(self) -> int:
        """Its epoll events."""
        if self.listening is not None:
            return select.EPOLLIN if self.backlog else 0
        inward, outward = self.inward, self.outward
        if inward is None or outward is None:
            return 0
        if self.error is not None:
            return select.EPOLLIN | select.EPOLLOUT | select.EPOLLERR | select.EPOLLHUP
        found = 0
        if inward.ended or len(inward.buffer) >= min(self._lowat, inward.capacity // 2) > 0:
            found |= select.EPOLLIN
        if outward.room > 0:
            found |= select.EPOLLOUT
        return found

    def changed(self) -> None:
        """The kernel has news of it."""
        if self.closed or not self.process.alive:
            return
        if self._waiter is not None:
            self._waiter.woken()
        self.net.poller.changed(self._fd)

    def reset_by_peer(self) -> None:
        """The other end has no use for this stream any more; it is known here a little later."""
        self.breaks(self.net.streams.latency_s, errno.ECONNRESET)

    def breaks(self, delay_s: float, code: int) -> None:
        """The kernel gives it up after `delay_s`, if a packet that says so gets through."""
        self.process.world.after(delay_s, None, self._broke, code, self.process.world.now)

    def _broke(self, code: int, since: float) -> None:
        flow, world = self.inward, self.process.world
        if self.error is not None or self.closed or flow is None:
            return
        if flow.path.stands_still(flow.sender.process, self.process):
            if world.now - since < flow.path.keepalive_s:
                world.after(AGAIN_S, None, self._broke, code, since)
                return
            code = errno.ETIMEDOUT
        self.error = OSError(code, os.strerror(code))
        self.changed()

    def vanish(self) -> None:
        """Its process is gone."""
        if self.closed:
            return
        self.closed = True
        if self.listening is not None:
            self.net.streams.listeners.pop(self.listening, None)
        inward, outward = self.inward, self.outward
        if inward is None or outward is None:
            for sock in self.backlog:
                sock.vanish()
            return
        outward.lost = outward.lost or outward.rng.random() < 0.5
        delay_s = outward.rng.random() * outward.path.timing.break_seen_s
        inward.sender.breaks(self.net.streams.latency_s + delay_s, errno.ECONNRESET)
