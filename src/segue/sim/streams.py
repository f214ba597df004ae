"""The sockets of `tcp` in memory: what production's transport calls instead of the host's.

A stream has latency, a speed, and buffers that are small now and then, so that it carries pieces. It can be
slow, stand still in one or both directions, break at one end before the other, and change a bit. What the
simulator says of the bytes (which write they belong to, where they may land) it reads from what was sent, and
not from the receiver.
"""

from __future__ import annotations

import ctypes
import errno
import os
import random
import select
import socket
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from segue.sim.ioloop import SimIoLoop, SimPoller
from segue.sim.threads import SimThread
from segue.sim.world import Process, Violation
from segue.transport import handshake, tcp_wire
from segue.transport.tcp_channel import PlainChannel
from segue.transport.tcp_net import Net
from segue.transport.tcp_wire import Vectors

if TYPE_CHECKING:
    from segue.sim.datapath import TcpPath
    from segue.sim.node import KVNode
    from segue.sim.unix import UnixSocket

#: How long a packet that does not get through waits before it is sent again.
AGAIN_S = 0.1
#: Bytes that a stream takes before its reader has read some; more than any head or answer.
CAPACITIES = (300, 2000, 1 << 16)
LINGER = b"\x01\x00\x00\x00\x00\x00\x00\x00"


@dataclass(slots=True, eq=False)
class Part:
    """A part of a write as it was sent: where it begins in the stream, its head's size, its rows."""

    start: int
    head: int
    end: int
    epoch: int
    rows: list[tuple[int, int]]
    #: a bit of its head has changed on the way
    spoiled: bool = False

    def rows_at(self, at: int, nbytes: int) -> list[tuple[int, int]]:
        """Where `nbytes` of its data from byte `at` of the stream on belong: (offset, length)."""
        skip = at - self.start - self.head
        found: list[tuple[int, int]] = []
        for offset, length in self.rows:
            if skip >= length:
                skip -= length
                continue
            take = min(length - skip, nbytes)
            found.append((offset + skip, take))
            nbytes -= take
            skip = 0
            if not nbytes:
                break
        return found


class Flow:
    """One direction of a stream."""

    def __init__(self, sender: SimSocket, receiver: SimSocket, path: TcpPath, rng: random.Random) -> None:
        self.sender, self.receiver = sender, receiver
        self.path = path
        self.rng = rng
        self.capacity = rng.choice(CAPACITIES) if sender.process is path.writer else CAPACITIES[-1]
        #: what has arrived and was not read
        self.buffer = bytearray()
        self.flying = 0
        self.read = 0
        self.ended = False
        self.lost = False
        #: what waits for the way to be free, in order
        self._held: deque[bytes | None] = deque()
        self._ready_at = 0.0
        #: bytes that were sent, by the simulator's own reading: those of the handshake first
        self._sent = 0
        self._skip = handshake.RESPONSE_BYTES
        self._head = bytearray()
        self.parts: deque[Part] = deque()

    @property
    def forward(self) -> bool:
        """From the writer to the reader."""
        return self.sender.process is self.path.writer

    @property
    def room(self) -> int:
        """Bytes that can be taken now."""
        return self.capacity - self.flying - len(self.buffer)

    def send(self, data: bytes) -> None:
        """Put it on its way."""
        self._note(data)
        self.flying += len(data)
        cut = self.rng.randrange(len(data)) if self.rng.random() < 0.5 else 0
        for segment in (data[:cut], data[cut:]):
            if segment:
                self._go(segment)

    def finish(self) -> None:
        """The sender sends no more."""
        self._go(None)

    def _go(self, data: bytes | None) -> None:
        world, timing, path = self.sender.process.world, self.path.timing, self.path
        took_s = timing.latency_s * self.rng.random()
        if self.forward and data is not None:
            took_s += path.slow * (timing.slice_s * self.rng.random() + len(data) / timing.link_bytes_s)
        self._ready_at = at = max(world.now + took_s, self._ready_at + 1e-9)
        world.at(at, None, self._arrive, data)

    def _arrive(self, data: bytes | None) -> None:
        self._held.append(data)
        if len(self._held) == 1:
            self._deliver()

    def _deliver(self) -> None:
        """What has come, unless the way is not free; then it is tried again."""
        if self.lost or self.receiver.error is not None:
            return
        if self.path.stands_still(self.sender.process, self.receiver.process):
            self.sender.process.world.after(AGAIN_S, None, self._deliver)
            return
        while self._held:
            data = self._held.popleft()
            if data is None:
                self.ended = True
            elif self.receiver.closed:
                self.sender.reset_by_peer()
                return
            else:
                self.flying -= len(data)
                self.buffer += data
        self.receiver.changed()

    def take(self, nbytes: int) -> bytes:
        """Read at most so many bytes of what has arrived."""
        most = min(nbytes, len(self.buffer))
        data = bytes(self.buffer[:most])
        del self.buffer[:most]
        while self.parts and self.parts[0].end <= self.read:
            self.parts.popleft()
        self.read += most
        self.sender.changed()  # it has room again
        return data

    # ---- what was sent ---------------------------------------------------------------------------

    def _note(self, data: bytes) -> None:
        if not self.forward:
            return
        at = 0
        while at < len(data):
            if self._skip:
                step = min(self._skip, len(data) - at)
                self._skip -= step
            else:
                want = tcp_wire.HEADER.size
                if len(self._head) >= want:
                    want += tcp_wire.HEADER.unpack(self._head[:want])[2] * tcp_wire.ROW_BYTES
                step = min(want - len(self._head), len(data) - at)
                self._head += data[at : at + step]
                if len(self._head) == want > tcp_wire.HEADER.size:
                    self._begin(self._sent + step)
            at += step
            self._sent += step

    def _begin(self, data_at: int) -> None:
        """The head of a part is complete; its data comes next."""
        size = tcp_wire.HEADER.size
        _, _, count, _, epoch, _, nbytes = tcp_wire.HEADER.unpack(self._head[:size])
        words = memoryview(self._head)[size:].cast("Q").tolist()
        rows = list(zip(words[::2], words[1::2], strict=True))
        assert len(rows) == count
        head = len(self._head)
        self.parts.append(Part(data_at - head, head, data_at + nbytes, epoch, rows))
        self._head = bytearray()
        self._skip = nbytes

    @property
    def sending(self) -> Part | None:
        """The part of which the head and not all data was sent."""
        return self.parts[-1] if self.parts and self.parts[-1].end > self._sent else None

    def part_at(self, at: int) -> Part | None:
        """The part that byte `at` of the stream belongs to."""
        return next((part for part in self.parts if part.start <= at < part.end), None)

    def carries(self, epoch: int) -> bool:
        """Whether a part of `epoch` is on its way: begun, and not all read by a reader that lives."""
        gone = self.lost or self.receiver.closed or not self.receiver.process.alive
        return not gone and any(part.epoch == epoch and part.end > self.read for part in self.parts)


class Thing(Protocol):
    """What a descriptor stands for."""

    def ready(self) -> int:
        """What epoll says of it."""

    def vanish(self) -> None:
        """Its process has ended."""


class SimSocket:
    """One descriptor of a process: a listener, or one end of a stream. It has the methods of
    `socket.socket` that `tcp` calls, and no others."""

    def __init__(self, net: SimNet) -> None:
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
        return sock, (sock.inward.sender.net.node.host, 1)

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
        flow, node = self._writable(), self.net.node
        left = count = min(flow.room, sum(length for _, length in iov))
        pieces: list[bytes] = []
        read: list[tuple[int, int]] = []
        for address, length in iov:
            size = min(length, left)
            pieces.append(ctypes.string_at(address, size))
            if (offset := node.offset_of(address, size)) is not None:
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
        flow, node = self._readable(), self.net.node
        most = sum(length for _, length in iov)
        at, data = flow.read, flow.take(most)
        if not data:
            return 0
        landed: list[tuple[int, bytes]] = []
        done = 0
        for address, length in iov:
            size = min(length, len(data) - done)
            offset = node.offset_of(address, size)
            if offset is None:
                raise Violation("4", f"{node.name} lets a write land outside its pool")
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
        """What epoll says of it."""
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


class Streams:
    """Who listens where, in one deployment."""

    def __init__(self, latency_s: float) -> None:
        self.latency_s = latency_s
        self.listeners: dict[tuple[str, int], SimSocket] = {}
        #: unix sockets that listen, and the descriptors of each process
        self.names: dict[bytes, UnixSocket] = {}
        self.nets: list[SimNet] = []
        self.ports = 40000
        self.opened = 0


class SimNet(Net):
    """What production's `tcp` of one node runs on."""

    def __init__(self, node: KVNode) -> None:
        self.node = node
        self.process: Process = node
        self.streams = node.deployment.streams
        self._fds: dict[int, Thing] = {}
        self.streams.nets.append(self)
        self.poller = SimPoller(self._fds, node.world.rng(f"epoll {node.name}"))
        self._rng = node.world.rng(f"net {node.name}")
        #: until then no descriptor is free, and packets to our port are lost
        self.full_until = self.deaf_until = 0.0
        self.io: SimIoLoop | None = None

    @cached_property
    def _keys(self) -> random.Random:
        return self.node.world.rng(f"keys {self.node.me}")  # no two lives have the same

    def random_bytes(self, nbytes: int) -> bytes:
        return self._keys.randbytes(nbytes)

    def open(self, thing: Thing) -> int:
        """The lowest free number, as the kernel's."""
        fd = next(n for n in range(3, 1 << 20) if n not in self._fds)
        self._fds[fd] = thing
        return fd

    def at(self, fd: int) -> Any:
        """What a descriptor stands for."""
        return self._fds[fd]

    @property
    def open_fds(self) -> dict[int, Thing]:
        """Every descriptor."""
        return self._fds

    def closed(self, fd: int) -> None:
        """It is free again."""
        del self._fds[fd]
        self.poller.closed(fd)

    def need_descriptor(self) -> None:
        """Raises OSError while none is free."""
        if self.node.world.now < self.full_until:
            raise OSError(errno.EMFILE, "Too many open files")

    def died(self) -> None:
        """The process has ended: the kernel closes everything."""
        for thing in list(self._fds.values()):
            thing.vanish()
        self._fds.clear()
        self.streams.nets.remove(self)
        delay_s = self._rng.random() * self.node.world_timing.break_seen_s
        self.node.world.after(delay_s, None, self._reaped)

    def _reaped(self) -> None:
        """The process is no more: who holds a descriptor of it hears so."""
        self.process.ended = True
        for net in self.streams.nets:
            for fd in net.open_fds:
                net.poller.changed(fd)

    # ---- Net -------------------------------------------------------------------------------------

    def loop(self, name: str, on_crash: Callable[[BaseException], None]) -> SimIoLoop:
        hop_s = self.node.world_timing.hop_s
        self.io = SimIoLoop(name, on_crash, self.node, self.node.skewed, hop_s, self.poller)
        return self.io

    def time(self) -> float:
        return self.node.skewed.now()

    def listen(self, host: str, port: int) -> Any:
        sock = SimSocket(self)
        self.streams.ports += 1
        sock.listening = (host, port or self.streams.ports)
        self.streams.listeners[sock.listening] = sock
        return sock

    def connect(self, address: tuple[str, int], timeout_s: float) -> Any:
        thread, world, network = SimThread.current, self.node.world, self.node.deployment.network
        assert thread is not None, "a connect waits, so it needs a thread"
        self.need_descriptor()
        ends_at = world.now + timeout_s
        thread.sleep(self.streams.latency_s * self._rng.random())
        while True:
            listener = self.streams.listeners.get(address)
            if listener is None or not listener.process.alive:
                raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
            us, them = self.process, listener.process
            deaf = world.now < listener.net.deaf_until
            if not (deaf or network.blocked(us, them) or network.blocked(them, us)):
                break
            if world.now >= ends_at:
                raise TimeoutError("timed out")
            thread.sleep(min(AGAIN_S, ends_at - world.now) + 1e-6)
        sock = self._joined(listener)
        thread.sleep(self.streams.latency_s * self._rng.random())
        if sock.error is not None:
            raise sock.error
        return sock

    def _joined(self, listener: SimSocket) -> SimSocket:
        ours, theirs = SimSocket(self), SimSocket(listener.net)
        listener.net.closed(theirs._fd)  # it has a number once it is accepted
        path: Any = self.node.data_path(listener.net.node)
        self.streams.opened += 1
        rng = self.node.world.rng(f"stream {self.streams.opened}")
        there, back = Flow(ours, theirs, path, rng), Flow(theirs, ours, path, rng)
        ours.outward = theirs.inward = there
        ours.inward = theirs.outward = back
        path.flows.append(there)
        listener.backlog.append(theirs)
        theirs.setblocking(False)
        listener.changed()
        return ours

    def channel(self, sock: Any) -> PlainChannel:
        return PlainChannel(sock, Vectors((sock.sendmsg, sock.recvmsg)))
