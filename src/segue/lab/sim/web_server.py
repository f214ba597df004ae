"""An HTTP server that is guarded as the public one, in a process of its own, and what must be true of it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from segue.lab.sim.loop import SimLoop
from segue.lab.sim.sim_http import SimGuardedServer
from segue.lab.sim.world import Process, SkewedClock, Violation
from segue.server.http.guarded_http import Guard, connection_bounds

if TYPE_CHECKING:
    from segue.lab.sim.deployment import Deployment

HOST, PORT = "127.0.9.1", 8000
HEAD_S, REQUEST_S, IDLE_S, DRAIN_S = 1.0, 3.0, 2.0, 2.0
#: Few descriptors, so that a handful of clients fills it.
PENDING, MEMBERS = connection_bounds(288)
#: What `/stream` answers, and how long there is between two pieces: in all more than a request may take.
PIECES = [f"{number} ".encode() for number in range(12)]
PIECE_S = 0.3


class WebServer(Process):
    """One life of it. `/stream` answers slowly, `/early` before it has read its request, the rest with what
    it was sent."""

    def __init__(self, deployment: Deployment, life: int) -> None:
        super().__init__(deployment.world, f"web#{life}" if life else "web")
        self._deployment = deployment
        clock = SkewedClock(deployment.world, 0.0, 1.0)
        self.loop = SimLoop(self, clock, deployment.network, HOST)  # type: ignore[abstract]
        self.closing = False
        #: handlers that run now, and when they last filled all places of members
        self.answering = 0
        self.full_at = -1.0
        listener: Any = deployment.network.listening(self.loop, PORT)
        self.server: SimGuardedServer = self.loop.enter(self._make, listener)
        self.loop.enter(self.loop.create_task, self._lives())

    def _make(self, listener: Any) -> SimGuardedServer:
        guard = Guard(
            head_s=HEAD_S,
            request_s=REQUEST_S,
            idle_s=IDLE_S,
            max_pending=PENDING,
            max_members=MEMBERS,
            head_is_proof=True,
        )
        return SimGuardedServer(self, listener, guard=guard, drain_s=DRAIN_S)

    async def _lives(self) -> None:
        try:
            await self.server.answering()
            await self.server.ended()
        except Exception as error:  # nobody but `close` ends it
            self.world.fail(error)

    # ---- the handler -----------------------------------------------------------------------------

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """One request (ASGI)."""
        self.answering += 1
        try:
            await self._answer(scope["path"], receive, send)
        except asyncio.CancelledError:
            pass  # its time to drain is over
        finally:
            if self.full:
                self.full_at = self.world.now
            self.answering -= 1

    @property
    def full(self) -> bool:
        """All places of members are taken by answers."""
        return self.answering >= MEMBERS

    async def _answer(self, path: str, receive: Any, send: Any) -> None:
        body, more = b"", path != "/early"
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body, more = body + message["body"], message["more_body"]
        await send({"type": "http.response.start", "status": 200, "headers": []})
        left = asyncio.ensure_future(receive())
        try:
            for piece in PIECES if path == "/stream" else ():
                await asyncio.wait({left}, timeout=PIECE_S)
                if left.done():
                    return
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        finally:
            left.cancel()
        await send({"type": "http.response.body", "body": body})

    # ---- life ------------------------------------------------------------------------------------

    def close(self) -> None:
        """SIGTERM: nobody is let in any more; who is being answered has its time; then nothing is left."""
        if not self.closing:
            self.closing = True
            self.loop.enter(self.loop.create_task, self._close())

    async def _close(self) -> None:
        began = self.world.now
        await self.server.stop()
        took_s = self.world.now - began
        if took_s > DRAIN_S + 2.0:
            self._wrong(f"took {took_s:.1f} s to stop")
        await asyncio.sleep(0)  # what was cut hears so
        if (
            self.server.server_state.connections
            or self.server.pending
            or self._deployment.network.live.get(self)
        ):
            self._wrong("has stopped and still has connections")
        self.world.after(0.2, None, self._deployment.start_web_server)

    def check(self) -> None:
        """Its places are bounded, and nobody is answered who has left."""
        if self.server.pending > PENDING or self.server.members > MEMBERS:
            self._wrong(f"has {self.server.pending} pending connections and {self.server.members} members")
        if self.answering > self.server.members:
            self._wrong(f"answers {self.answering} requests of {self.server.members} clients")

    def _wrong(self, text: str) -> None:
        self.world.fail(Violation("http", f"{self.name} {text}"))
