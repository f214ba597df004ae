"""An asyncio loop in virtual time: what production code of one simulated process runs on.

It has what sessions and the I/O half of a `KVManager` ask of their loop: callbacks, timers, futures, tasks,
dialling. A call of any other method ends the run, loudly: nothing is simulated by accident.
The time is the process's own monotonic clock; a paused process's callbacks wait, a dead one's never run.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import socket
from collections.abc import Callable, Coroutine, Generator
from typing import Any, TypeVar, TypeVarTuple, Unpack

from segue_lab.sim.network import Network
from segue_lab.sim.sim_tcp import SimListener, Socket
from segue_lab.sim.world import Process, SkewedClock

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

#: Timers fire this much late, so that a clock of another rate has surely reached their time.
LATE_S = 1e-6


def resolve(host: str, port: int, **_: Any) -> list[Any]:
    """As `socket.getaddrinfo`: numbers only, and a name that has no address at all."""
    if host == "nothing.invalid":
        return []
    if not host[-1:].isdigit():
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, port))]


class SimSockets:
    """The part of the module `socket` that one process uses."""

    getaddrinfo = staticmethod(resolve)

    def __init__(self, loop: SimLoop) -> None:
        self._loop = loop

    def socket(self, _family: int, _kind: int) -> SimListener:
        """A socket that is to listen."""
        return SimListener(self._loop.network, self._loop)


class SimLoop(asyncio.AbstractEventLoop):
    """The loop of one process at `host`. An exception of a callback ends the simulation."""

    def __init__(
        self, process: Process, clock: SkewedClock, network: Network, host: str, hop_s: float = 0.0
    ) -> None:
        self.process = process
        self.network = network
        self.host = host
        self._clock = clock
        self._tasks: dict[asyncio.Task[Any], None] = {}
        #: delay of calls that other threads post, at most; they keep their order
        self._hop_s = hop_s
        self._posted_at = 0.0
        self._rng = process.world.rng(f"io {process.name}")

    # ---- time and callbacks ----------------------------------------------------------------------

    def time(self) -> float:
        return self._clock.now()

    def call_soon(
        self,
        callback: Callable[[Unpack[Ts]], object],
        *args: *Ts,
        context: contextvars.Context | None = None,
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self.process.after(0.0, self._run, handle)
        return handle

    def call_soon_threadsafe(
        self,
        callback: Callable[[Unpack[Ts]], object],
        *args: *Ts,
        context: contextvars.Context | None = None,
    ) -> asyncio.Handle:
        world = self.process.world
        self._posted_at = max(world.now + self._hop_s * self._rng.random(), self._posted_at + 1e-9)
        handle = asyncio.Handle(callback, args, self, context)
        world.at(self._posted_at, self.process, self._run, handle)
        return handle

    def call_later(
        self,
        delay: float,
        callback: Callable[[Unpack[Ts]], object],
        *args: *Ts,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(
        self,
        when: float,
        callback: Callable[[Unpack[Ts]], object],
        *args: *Ts,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        self.process.after(self._clock.delay_until(when) + LATE_S, self._run, handle)
        return handle

    def jumped(self) -> None:
        """The clock has jumped: timers whose time has come are due now."""

        def due(handle: asyncio.Handle) -> float | None:
            if not isinstance(handle, asyncio.TimerHandle):
                return None
            return self.process.world.now + self._clock.delay_until(handle.when()) + LATE_S

        self.process.world.hasten(self.process, self._run, due)

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """The timer stays in the world's heap and does nothing when it is due."""

    def _run(self, handle: asyncio.Handle) -> None:
        if not handle._cancelled:
            self.enter(handle._context.run, handle._callback, *handle._args)  # type: ignore[attr-defined]

    def enter(self, call: Callable[..., Any], *args: Any) -> Any:
        """Call something as from inside the running loop."""
        before = asyncio._get_running_loop()
        if before is self:
            return call(*args)
        asyncio._set_running_loop(self)
        try:
            return call(*args)
        finally:
            asyncio._set_running_loop(before)
            if self._tasks and not self.process.alive:
                self.die()  # it was killed in the midst of a callback that then started tasks

    # ---- futures and tasks -----------------------------------------------------------------------

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(
        self, coro: Generator[Any, None, T] | Coroutine[Any, Any, T], **options: Any
    ) -> asyncio.Task[T]:
        task: asyncio.Task[T] = asyncio.Task(coro, loop=self, **options)
        self._tasks[task] = None
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.pop(task, None)

    def die(self) -> None:
        """The process is gone: what its tasks hold is closed now, not whenever memory is collected."""
        tasks, self._tasks = self._tasks, {}
        for task in tasks:
            coroutine = task.get_coro()
            # The one that runs right now (a fault ended it half way) finds its process dead.
            if inspect.iscoroutine(coroutine) and not coroutine.cr_running:
                frame = coroutine.cr_frame
                if frame is not None and inspect.getcoroutinestate(coroutine) == inspect.CORO_CREATED:
                    # It never ran, so it cannot close what it was to await.
                    for inner in frame.f_locals.values():
                        if inspect.iscoroutine(inner):
                            self.enter(inner.close)
                self.enter(coroutine.close)

    def run_in_executor(
        self, executor: Any, func: Callable[[Unpack[Ts]], T], *args: *Ts
    ) -> asyncio.Future[T]:
        """As asyncio, with an executor of the process's own; its threads are those of the simulation."""
        return asyncio.wrap_future(executor.submit(func, *args), loop=self)

    # ---- the network -----------------------------------------------------------------------------

    async def getaddrinfo(self, host: Any, port: Any, **options: Any) -> list[Any]:
        return resolve(host, port)

    async def create_connection(
        self, protocol_factory: Callable[[], Any], host: Any = None, port: Any = None, **options: Any
    ) -> tuple[Any, Any]:
        if (channel := options.get("sock")) is not None:
            return channel, channel.adopted(protocol_factory())
        if not 0 <= port < 1 << 16:
            raise OverflowError("getsockaddrarg: port must be 0-65535.")
        made: asyncio.Future[Any] = self.create_future()
        self.network.dial(self, host, port, protocol_factory, made)
        transport, protocol = await made
        return transport, protocol

    async def connect_accepted_socket(  # type: ignore[override]
        self, protocol_factory: Callable[[], Any], sock: Socket, **options: Any
    ) -> tuple[Any, Any]:
        protocol = protocol_factory()
        sock.attach(protocol)
        return sock, protocol

    def add_reader(self, fd: Any, callback: Callable[[], object], *args: Any) -> None:  # type: ignore[override]
        fd.watch(callback)

    def remove_reader(self, fd: Any) -> bool:
        fd.watch(None)
        return True

    # ---- what asyncio asks of its loop -----------------------------------------------------------

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """A task's or future's exception that nobody took. Exceptions of a dead process are ignored."""
        if self.process.alive and context.get("exception") is not None:
            self.process.world.fail(f"in the loop of {self.process.name}: {context}")
