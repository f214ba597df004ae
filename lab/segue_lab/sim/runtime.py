"""Production's sessions and `KVManager` in one simulated process: what they run on instead of threads."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from segue.kv.errors import ErrorCode
from segue.kv.ids import LeaderId
from segue.kv.io import LoopIo
from segue.kv.session.api import Session, SessionHandler
from segue.kv.session.connection import Connection
from segue.kv.session.node import SessionNode
from segue_lab.sim.loop import SimLoop, SimSockets
from segue_lab.sim.sim_threads import ProcessEnded, SimThread
from segue_lab.sim.world import Injected, Process, Violation

T = TypeVar("T")

#: Where every instance listens at first; its host tells them apart.
PORT = 7000


class SimIo(LoopIo):
    """The I/O thread of a process: what others post arrives a little later, in order."""

    loop: SimLoop

    def __init__(self, loop: SimLoop) -> None:
        super().__init__(loop)
        self._process = loop.process

    @property
    def running(self) -> bool:
        return self._process.alive

    def start(self) -> None:
        """Nothing: it runs as long as its process."""

    def stop(self) -> None:
        """Nothing: it ends with its process."""

    def yield_gil(self) -> None:
        """Threads take turns here as the simulation says."""

    def call(self, coroutine: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """As production, on a thread that may wait. Elsewhere only what needs no wait, such as listening."""
        if SimThread.current is not None:
            try:
                return super().call(coroutine, timeout_s)
            except ProcessEnded:
                coroutine.close()  # nobody will run it
                raise
        try:
            self.loop.enter(coroutine.send, None)
        except StopIteration as done:
            result: T = done.value
            return result
        raise RuntimeError(f"{coroutine} waits for something")

    def wait(self, future: Future[T], timeout_s: float) -> T:
        """As production, in virtual time."""
        thread, process = SimThread.current, self._process
        assert thread is not None
        future.add_done_callback(lambda _: thread.woken())
        world, began = process.world, process.world.now
        ends_at = began + timeout_s
        while not future.done() and world.now < ends_at:
            thread.sleep(ends_at - world.now + 1e-6)
            if process.resumed_at > began:  # the time in which the process stood still does not count
                ends_at += process.resumed_at - max(began, process.paused_at)
                began = process.resumed_at
        return future.result(0)


class SimWorker:
    """As `kv.threads.WorkerThread`: work takes `takes_s()` seconds, one piece after the other."""

    def __init__(
        self, process: Process, takes_s: Callable[[], float], work: Callable[[], object], _name: str
    ) -> None:
        self._process = process
        self._takes_s = takes_s
        self._work = work
        self._turns = 0
        self._busy = self._ended = False

    def start(self) -> None:
        """Nothing: it runs as long as its process."""

    def wake(self) -> None:
        """Do it once more."""
        self._turns += 1
        if not self._busy:
            self._next()

    def end(self) -> None:
        """Waiting work is dropped."""
        self._ended = True

    def _next(self) -> None:
        self._busy = self._turns > 0 and not self._ended
        if self._busy:
            self._turns -= 1
            self._process.after(self._takes_s(), self._do)

    def _do(self) -> None:
        if not self._ended:
            self._work()
        self._next()


class SimSessionNode(SessionNode):
    """Production's node, listening in the simulated network, and what 13 says of its sessions: each is with
    the leader that was asked for, nobody is said to be gone who is there and could say so, and two
    leaders at one address are never both taken for alive."""

    def __init__(self, *, loop: SimLoop, **options: Any) -> None:
        rng = loop.process.world.rng(f"nonces {loop.process.name}")
        super().__init__(**options, random_bytes=rng.randbytes, sockets=SimSockets(loop))
        self._sim_loop = loop
        loop.network.processes[self.me] = loop.process

    async def listen(self, host: str, port: int) -> tuple[str, int]:
        """As production. Behind an address translator it listens everywhere, as all others there do."""
        network = self._sim_loop.network
        self._advertise = host
        await super().listen("0.0.0.0" if network.translator and self._key is not None else host, port)
        network.places[self.me] = (host, port)
        return host, port

    async def connect(
        self, host: str, port: int, *, expect: LeaderId | None = None, timeout_s: float
    ) -> Session:
        """As production; an address is not a peer."""
        faults = getattr(self._sim_loop.process, "faults", None)
        if faults is not None and faults.dial_fails:
            faults.dial_fails -= 1
            raise Injected("injected into a dial")
        session = await super().connect(host, port, expect=expect, timeout_s=timeout_s)
        if expect is not None and session.peer.leader != expect:
            self._wrong(f"dialled {expect} and took {session.peer.leader} for it")
        return session

    def authenticated(self, connection: Connection) -> SessionHandler:
        """As production."""
        try:
            return super().authenticated(connection)
        finally:
            hello, places = connection.handshake.peer, self._sim_loop.network.places
            place = places.get(hello.leader) if hello is not None else None
            for other in self._open:
                if hello is not None and other != hello.leader and place and places.get(other) == place:
                    self._wrong(f"keeps {other} where it has just met {hello.leader}: {place}")

    def ended(self, connection: Connection) -> None:
        """As production."""
        hello, error = connection.handshake.peer, connection.error
        open_here = hello is not None and self._open.get(hello.leader) is connection
        who = hello.leader if hello is not None and open_here else connection.expect
        super().ended(connection)
        if who is None or error is None:
            return
        network = self._sim_loop.network
        peer, us = network.processes[who], self._sim_loop.process
        could_speak = peer.alive and not (peer.was_paused or us.was_paused or network.ever_blocked)
        if open_here and could_speak and "silent" in error.info.text:
            self._wrong(f"takes {who} for dead, which nothing kept from speaking: {error}")
        if error.info.code is ErrorCode.PEER_RESTARTED and peer.alive:
            self._wrong(f"says that {who} was restarted, but it was not: {error}")

    def _wrong(self, text: str) -> None:
        process = self._sim_loop.process
        process.world.fail(Violation("13", f"{process.name} {text}"))


__all__ = ["PORT", "SimIo", "SimSessionNode", "SimWorker"]
