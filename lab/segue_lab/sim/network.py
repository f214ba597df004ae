"""Connections, listeners, and faults of the network."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

from segue.kv.ids import LeaderId
from segue_lab.sim.sim_tcp import BACKLOG, ProcessLoop, SimConnection, SimListener, Socket
from segue_lab.sim.timing import Timing
from segue_lab.sim.world import Process, World


class Network:
    """All connections, who listens where, and which directions are blocked."""

    def __init__(self, world: World, timing: Timing) -> None:
        self.world = world
        self.timing = timing
        self.opened = 0
        self.live: dict[Process, dict[Socket, None]] = {}
        #: the truth about a leader, whatever others believe: its process, and where it listens
        self.processes: dict[LeaderId, Process] = {}
        self.places: dict[LeaderId, tuple[str, int]] = {}
        self._listeners: dict[tuple[str, int], SimListener] = {}
        #: since when nothing gets from the first to the second
        self._blocked: dict[tuple[Process, Process], float] = {}
        self.ever_blocked = False
        #: how many of the next segments that arrive at a process come with one bit changed
        self.flips: dict[Process, int] = {}
        #: by how much everything from a process is late, in seconds
        self.slow: dict[Process, float] = {}
        #: as what host every dialler is seen, if there is an address translator before all of them
        self.translator = "127.255.0.1" if world.rng("translator").random() < 0.25 else ""
        self._rng: random.Random = world.rng("network")

    # ---- listening and dialling ------------------------------------------------------------------

    def listen(self, listener: SimListener) -> None:
        """`listener` is bound, and is found from now on."""
        self._listeners[listener.place] = listener

    def listening(self, loop: ProcessLoop, port: int) -> SimListener:
        """A listener of `loop`'s process at its host and `port`."""
        listener = SimListener(self, loop)
        listener.bind((loop.host, port))
        listener.listen(BACKLOG)
        return listener

    def listener_at(self, host: str, port: int) -> SimListener | None:
        """The listener at an address."""
        found = self._listeners.get((host, port))
        return found if found is not None and found.process.alive else None

    def free_port(self, host: str) -> int:
        """One at which nobody listens."""
        return next(port for port in range(20000, 1 << 16) if (host, port) not in self._listeners)

    def unlisten(self, listener: SimListener) -> None:
        """`listener` is closed."""
        if self._listeners.get(listener.place) is listener:
            del self._listeners[listener.place]

    def listeners(self, process: Process) -> list[SimListener]:
        """The listeners of `process`."""
        return [listener for listener in self._listeners.values() if listener.process is process]

    def dial(
        self, loop: ProcessLoop, host: str, port: int, make: Callable[[], Any], made: asyncio.Future[Any]
    ) -> None:
        """A SYN on its way. `made` gets (transport, protocol), or ConnectionRefusedError, or TimeoutError."""
        delay_s = self.timing.latency_s * (1.0 + self.timing.jitter * self._rng.random())
        self.world.after(delay_s, None, self._knock, loop, host, port, make, made, self.world.now)

    def _knock(
        self,
        loop: ProcessLoop,
        host: str,
        port: int,
        make: Callable[[], Any],
        made: asyncio.Future[Any],
        since: float,
    ) -> None:
        listener = self._listeners.get((host, port))
        target = listener.process if listener is not None else None
        unheard = target is not None and self.cut_off(loop.process, target)
        if unheard or (listener is not None and listener.full):
            if self.world.now - since >= self.timing.connect_s:
                loop.process.after(0.0, _fail, loop, made, TimeoutError("connection timed out"))
            else:
                again = (loop, host, port, make, made, since)
                self.world.after(self.timing.connect_s / 4, None, self._knock, *again)
            return
        if listener is None or target is None or not target.alive:
            delay_s = self.timing.latency_s * self._rng.random()
            refused = ConnectionRefusedError("connection refused")
            loop.process.after(delay_s, _fail, loop, made, refused)
            return
        # A stopped process's kernel still accepts; the process finds the connection when it goes on.
        connection = SimConnection(self, loop, listener.loop, port)
        ours, theirs = connection.ends
        for socket in connection.ends:
            self.live.setdefault(socket.process, {})[socket] = None
        at = self.world.now + self.timing.latency_s * (1.0 + self.timing.jitter * self._rng.random())
        theirs.ready_at = at  # nothing overtakes the answer to the SYN
        listener.knocked(theirs)
        self.world.at(at, loop.process, self._dialled, ours, make, made)

    def _dialled(self, socket: Socket, make: Callable[[], Any], made: asyncio.Future[Any]) -> None:
        if made.done():  # the caller has given up
            socket.abort()
        elif socket.over:
            _fail(socket.loop, made, ConnectionResetError("connection reset by peer"))
        else:
            socket.loop.enter(socket.attach, make())
            socket.loop.enter(made.set_result, (socket, socket.protocol))

    def forget(self, socket: Socket) -> None:
        """An end is over."""
        ends = self.live.get(socket.process)
        if ends is not None:
            ends.pop(socket, None)
            if not ends:
                del self.live[socket.process]

    def between(self, a: Process, b: Process) -> list[SimConnection]:
        """The connections between two processes that are not broken."""
        return [
            s.connection for s in self.live.get(a, {}) if s.other.process is b and not s.connection.broken
        ]

    # ---- what happens on the way -----------------------------------------------------------------

    def carried(self, socket: Socket, data: bytes) -> bytes:
        """The bytes that arrive at `socket`: `data`, unless a bit flips."""
        if not data:
            return data
        if not self.flips.get(socket.process):
            return data
        self.flips[socket.process] -= 1
        bit = self._rng.randrange(8 * len(data))
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        return bytes(changed)

    def blocked(self, source: Process, target: Process) -> bool:
        """Whether nothing gets from `source` to `target` now."""
        return bool(self._blocked) and (source, target) in self._blocked

    def blocked_s(self, source: Process, target: Process) -> float:
        """For how long nothing has got from `source` to `target`; 0 where something does."""
        return self.world.now - self._blocked.get((source, target), self.world.now)

    def block(self, source: Process, target: Process) -> None:
        """Block the direction from `source` to `target`; TCP holds the bytes back."""
        self._blocked.setdefault((source, target), self.world.now)
        self.ever_blocked = True

    def heal(self, source: Process, target: Process) -> None:
        """Deliver held-back bytes if the connection is open; else notify the other end."""
        if (source, target) not in self._blocked:
            return
        del self._blocked[source, target]
        for socket in list(self.live.get(source, {})):
            if socket.other.process is target:
                socket.release()
        for socket in list(self.live.get(target, {})):
            if socket.other.process is source and (socket.connection.broken or socket.other.over):
                error = ConnectionResetError("connection reset by peer")
                socket.process.after(self.timing.latency_s, socket.broke, error)

    def cut_off(self, a: Process, b: Process) -> bool:
        """Whether nothing gets from one to the other, in either direction."""
        return self.blocked(a, b) or self.blocked(b, a)

    def died(self, process: Process, *, silently: bool = False) -> None:
        """The kernel closes what `process` had; peers that can be reached hear it, unless the whole machine
        is gone `silently`."""
        for listener in self.listeners(process):
            self.unlisten(listener)
        for socket in list(self.live.get(process, {})):
            socket.vanish()
            connection, other = socket.connection, socket.other
            if connection.broken or other.over:
                continue
            connection.broken = True
            connection.lost = [connection.rng.random() < 0.5] * 2
            if silently or self.blocked(process, other.process):
                continue  # silence: keepalive finds it, or the end of the partition
            delay_s = self.timing.latency_s + connection.rng.random() * self.timing.break_seen_s
            other.process.after(delay_s, other.broke, ConnectionResetError("connection reset by peer"))


def _fail(loop: ProcessLoop, made: asyncio.Future[Any], error: Exception) -> None:
    if not made.done():
        loop.enter(made.set_exception, error)
