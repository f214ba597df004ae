"""The host of production's `tcp` and `shm` for one process: descriptors, listeners, connects.

Sockets are in `sockets.py`, what travels between two of them is in `flow.py`.
"""

from __future__ import annotations

import errno
import random
from collections.abc import Callable
from functools import cached_property
from typing import Any

from segue.kv.transport.net.stream import PlainChannel
from segue.kv.transport.tcp.tcp_net import Net
from segue.kv.transport.tcp.tcp_wire import Vectors
from segue_lab.sim.flow import AGAIN_S, Flow
from segue_lab.sim.node_views import KVView
from segue_lab.sim.sim_ioloop import Descriptor, SimIoLoop, SimPoller
from segue_lab.sim.sim_threads import SimThread
from segue_lab.sim.sockets import SimSocket
from segue_lab.sim.world import Process


class SimNet(Net):
    """The network of one node for production's `tcp`."""

    def __init__(self, node: KVView, rank: int, carries: str) -> None:
        self.node = node
        self.rank = rank
        #: the transport whose streams these are
        self.carries = carries
        #: the address and size of what is registered, if it is not the node's pool
        self.pool: tuple[int, int] | None = None
        self.process: Process = node
        self.host = node.host
        self.streams = node.state.streams
        self._fds: dict[int, Descriptor] = {}
        self.streams.nets.append(self)
        self.poller = SimPoller(self._fds, node.world.rng(f"epoll {node.name}"))
        self._rng = node.world.rng(f"net {node.name}")
        #: until then no descriptor is free, and packets to our port are lost
        self.full_until = self.deaf_until = 0.0
        self.io: SimIoLoop | None = None

    @cached_property
    def _keys(self) -> random.Random:
        return self.node.world.rng(f"keys {self.node.me} {self.rank}")  # each incarnation has its own

    def random_bytes(self, nbytes: int) -> bytes:
        return self._keys.randbytes(nbytes)

    def open(self, thing: Descriptor) -> int:
        """The lowest free number, as the kernel's."""
        fd = next(n for n in range(3, 1 << 20) if n not in self._fds)
        self._fds[fd] = thing
        return fd

    def at(self, fd: int) -> Any:
        """The object of a descriptor."""
        return self._fds[fd]

    @property
    def open_fds(self) -> dict[int, Descriptor]:
        """Every descriptor."""
        return self._fds

    def closed(self, fd: int) -> None:
        """The descriptor is free again."""
        del self._fds[fd]
        self.poller.closed(fd)

    def offset_of(self, address: int, nbytes: int) -> int | None:
        """The offset of an address in what is registered; None unless all of these bytes are in it."""
        if self.pool is None:
            return self.node.offset_of(address, nbytes)
        offset = address - self.pool[0]
        return offset if 0 <= offset <= self.pool[1] - nbytes else None

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
        thread, world, network = SimThread.current, self.node.world, self.node.state.network
        assert thread is not None, "a connect waits, so it needs a thread"
        self.need_descriptor()
        ends_at = world.now + timeout_s
        thread.sleep(self.streams.latency_s * self._rng.random())
        while True:
            listener = self.streams.listeners.get(address)
            if listener is None or not listener.process.alive:
                raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
            us, them = self.process, listener.process
            peer: Any = listener.net
            deaf = world.now < peer.deaf_until
            if not (deaf or network.blocked(us, them) or network.blocked(them, us)):
                break
            if world.now >= ends_at:
                raise TimeoutError("timed out")
            thread.sleep(min(AGAIN_S, ends_at - world.now) + 1e-6)
        sock = self._joined(listener)
        thread.sleep(self.streams.latency_s * self._rng.random())
        if sock.error is not None:
            sock.close()  # nobody else has it
            raise sock.error
        return sock

    def _joined(self, listener: SimSocket) -> SimSocket:
        ours, theirs = SimSocket(self), SimSocket(listener.net)
        listener.net.closed(theirs._fd)  # it has a number once it is accepted
        peer: Any = listener.net
        path: Any = self.node.data_path(self.rank, peer.node, peer.rank, self.carries)
        there = Flow(ours, theirs, path, path.rng, forward=path.carries_writes)
        back = Flow(theirs, ours, path, path.rng, forward=False)
        ours.outward = theirs.inward = there
        ours.inward = theirs.outward = back
        path.flows.append(there)
        listener.backlog.append(theirs)
        theirs.setblocking(False)
        listener.changed()
        return ours

    def channel(self, sock: Any) -> PlainChannel:
        return PlainChannel(sock, Vectors((sock.sendmsg, sock.recvmsg)))
