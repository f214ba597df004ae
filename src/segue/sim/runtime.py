"""Production's sessions and `KVManager` in one simulated process: what they run on instead of threads."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from segue.session.node import SessionNode
from segue.sim.loop import SimLoop
from segue.sim.world import Process

T = TypeVar("T")

#: Where every instance listens; its host tells them apart.
PORT = 7000


class SimIo:
    """The I/O thread of a process: what others post arrives a little later, in order."""

    def __init__(self, loop: SimLoop, process: Process, hop_s: float) -> None:
        self.loop = loop
        self._process = process
        self._hop_s = hop_s
        self._rng = process.world.rng(f"io {process.name}")
        self._ready_at = 0.0

    @property
    def running(self) -> bool:
        return self._process.alive

    def start(self) -> None:
        """It runs as long as its process."""

    def post(self, function: Callable[..., object], *args: object) -> None:
        world = self._process.world
        at = world.now + self._hop_s * self._rng.random()
        self._ready_at = at = max(at, self._ready_at + 1e-9)
        world.at(at, self._process, self.loop.enter, function, *args)

    def call(self, coroutine: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """Only of what needs no wait, such as listening."""
        try:
            self.loop.enter(coroutine.send, None)
        except StopIteration as done:
            result: T = done.value
            return result
        raise RuntimeError(f"{coroutine} waits for something")

    def stop(self) -> None:
        """It ends with its process."""


class SimSessionNode(SessionNode):
    """Production's node, listening in the simulated network."""

    def __init__(self, *, loop: SimLoop, **options: Any) -> None:
        rng = loop.process.world.rng(f"nonces {loop.process.name}")
        super().__init__(**options, random_bytes=rng.randbytes)
        self._sim_loop = loop

    async def listen(self, host: str, port: int) -> tuple[str, int]:
        """Bind nothing; the network gives us each connection."""
        self._listen = f"{host}:{port}"
        self._sim_loop.network.listen(self._sim_loop, port, self._gate.guest)
        return host, port


__all__ = ["PORT", "SimIo", "SimSessionNode"]
