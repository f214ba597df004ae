"""Outsiders: processes that are not of the deployment. Each comes, does one thing, and goes.

Nothing that they do may harm anybody else; each is told what it did wrong, or cut in bounded time. Each lives
in a process of its own, so it can be looked at what it was told.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from math import inf
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from segue.lab.sim.loop import SimLoop
from segue.lab.sim.world import Process, SkewedClock, Violation

if TYPE_CHECKING:
    from segue.lab.sim.deployment import Deployment

#: What an ended connection may linger, and some latency.
GRACE_S = 2.0
#: How many connections a flood makes.
FLOOD = 160


class RawConnection(asyncio.Protocol):
    """A connection on which somebody types bytes."""

    def __init__(self) -> None:
        self.transport: Any = None
        self.heard = bytearray()
        self.ended = asyncio.Event()
        self.news = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.heard += data
        self.news.set()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended.set()
        self.news.set()


R = TypeVar("R", bound=RawConnection)


class Outsider(Process):
    """One of them, who comes from `host`."""

    #: how its kind is counted, and how those that are done are
    WHAT: ClassVar[str]
    DONE: ClassVar[str]

    def __init__(self, deployment: Deployment, name: str, kind: str, host: str) -> None:
        super().__init__(deployment.world, name)
        self.deployment = deployment
        self.kind = kind
        self.rng: random.Random = deployment.world.rng(name)
        self.clock = SkewedClock(deployment.world, 0.0, 1.0)
        self.loop = SimLoop(self, self.clock, deployment.network, host)  # type: ignore[abstract]
        #: when it dialled the last connection of a flood
        self._flooded_at = -inf

    def start(self) -> None:
        """Begin."""
        self.loop.enter(self.loop.create_task, self._visit())

    async def _visit(self) -> None:
        self.deployment.counts[f"{self.WHAT}: {self.kind}"] += 1
        try:
            await self.visits()
        except Exception as error:
            self.world.fail(error)
        self.deployment.counts[self.DONE] += 1

    async def visits(self) -> None:
        """What it comes for."""
        raise NotImplementedError

    @property
    def undisturbed(self) -> bool:
        """Nothing but itself has come between it and whom it visits."""
        raise NotImplementedError

    def wrong(self, text: str) -> None:
        """What must not happen has."""
        if self.undisturbed and not self._crowded_out:
            self.world.fail(Violation(self.WHAT, f"{self.name}, {self.kind}: {text}"))

    @property
    def _crowded_out(self) -> bool:
        """Others like it have made so many connections since it came that one of its own may have gone."""
        others = (
            other for other in self.deployment.visitors if other is not self and other.WHAT == self.WHAT
        )
        return any(other._flooded_at >= self.began_at for other in others)

    async def floods(self, dial: Callable[[], Awaitable[R | None]]) -> list[R]:
        """More connections than may be pending at one place."""
        self._flooded_at = inf
        made = [await dial() for _ in range(FLOOD)]
        self._flooded_at = self.world.now
        return [raw for raw in made if raw is not None]

    async def types(self, make: type[R], host: str, port: int) -> R | None:
        """A connection of bytes."""
        try:
            _, raw = await self.loop.create_connection(make, host, port)
        except OSError as error:
            self.wrong(f"could not connect: {error}")
            return None
        assert isinstance(raw, make)
        return raw

    async def is_cut(self, raw: RawConnection, within_s: float, grace_s: float = GRACE_S) -> None:
        """This connection is ended in time."""
        try:
            async with asyncio.timeout(grace_s + within_s):
                await raw.ended.wait()
        except TimeoutError:
            self.wrong("its connection is still there")
            raw.transport.abort()
