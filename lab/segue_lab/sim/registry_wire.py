"""Questions to the registry and their answers, as messages over simulated connections.

Production asks over HTTP, which tests on real sockets hold. Hand-offs depend on when a question and its
answer arrive, and which of them are lost.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from segue.kv.errors import BootstrapTimeout, BootstrapUnreachable, ErrorInfo, SegueError
from segue.kv.ids import Incarnation, LeaderId, Role
from segue.kv.session.frames import KIND_MESSAGE, pack_frame
from segue.kv.session.guarded_listener import accepted
from segue.kv.session.inbox import ChangedFrame, Inbox
from segue.server.registry.backends import RegistryBackend
from segue.server.registry.registry_records import (
    DrainFlag,
    InstanceList,
    InstanceRecord,
    Registered,
    RoomRecord,
)
from segue_lab.sim.loop import SimLoop
from segue_lab.sim.sim_tcp import SimListener

HOST, PORT = "127.0.3.1", 8998
#: In the proportion of production's defaults, and short, so that a run sees many of them.
TTL_S, CONNECT_S = 9.0, 4.5
#: In the same proportion: how long a connection that is not used may be used again (`backends.IDLE_S`).
IDLE_S = 4.5
#: Within which a watcher knows what is true when nothing stands in the way: somebody's silence is noticed,
#: a restarted registry has heard of everybody, a query that was lost is given up and asked again.
SETTLED_S = 1.2 * (TTL_S + 2 * CONNECT_S + 3.0)
#: The same behind a connection of which nobody says that it is gone.
SILENT_S = 1.2 * (TTL_S + CONNECT_S)

MAX_FRAME_BYTES = 2**20
#: The types of each question's arguments and of its answer.
QUESTIONS: dict[str, tuple[Any, Any]] = {
    "put_rank": (tuple[InstanceRecord], Registered),
    "put_draining": (tuple[Incarnation, DrainFlag], None),
    "delete": (tuple[LeaderId], None),
    "instances": (tuple[Role | None, int | None, float], InstanceList),
    "put_room": (tuple[int, RoomRecord], None),
    "room": (tuple[int, float], LeaderId | None),
}


class RegistryQuestion(msgspec.Struct, array_like=True, frozen=True):
    """A call of `RegistryBackend`."""

    name: str
    args: msgspec.Raw


class RegistryReply(msgspec.Struct, array_like=True, frozen=True):
    """The result of a query, or its error."""

    result: msgspec.Raw
    error: ErrorInfo | None = None


class FramedConnection(asyncio.Protocol):
    """One end of a connection that carries whole messages. A changed message ends the connection."""

    def __init__(self) -> None:
        self.transport: Any = None
        self.over = False
        self._inbox = Inbox()
        self._inbox.max_frame_bytes = MAX_FRAME_BYTES

    def send(self, message: msgspec.Struct) -> None:
        """Send one message."""
        self.transport.write(pack_frame(KIND_MESSAGE, msgspec.msgpack.encode(message)))

    def received(self, body: bytes) -> None:
        """Called for each message."""
        raise NotImplementedError

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        while data:
            space = self._inbox.space()
            size = min(len(space), len(data))
            space[:size], data = data[:size], data[size:]
            self._inbox.add(size)
            try:
                while (frame := self._inbox.next_frame()) is not None:
                    self.received(bytes(frame[1]))
            except ChangedFrame:
                self.transport.abort()
                return

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self.over = True


class AskingConnection(FramedConnection):
    """A client's end: one question at a time."""

    def __init__(self, loop: SimLoop) -> None:
        super().__init__()
        self._loop = loop
        self._answer: asyncio.Future[RegistryReply] | None = None

    async def ask(self, question: RegistryQuestion) -> RegistryReply:
        """The reply. BootstrapUnreachable if the connection ends first."""
        self._answer = self._loop.create_future()
        self.send(question)
        return await self._answer

    def received(self, body: bytes) -> None:
        """The reply."""
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(msgspec.msgpack.decode(body, type=RegistryReply))

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(BootstrapUnreachable("the registry's connection ended"))
            self._answer.exception()  # retrieved, also where the caller has given up


class SimBackend(RegistryBackend):
    """The registry at `host` and `port`, as one process reaches it. Connections are used again."""

    def __init__(self, loop: SimLoop, host: str, port: int, connect_s: float) -> None:
        self._loop = loop
        self._place = host, port
        self._connect_s = connect_s
        self._idle: list[tuple[float, AskingConnection]] = []
        self._busy: dict[AskingConnection, None] = {}

    async def put_rank(self, record: InstanceRecord) -> Registered:
        found: Registered = await self._ask("put_rank", record)
        return found

    async def put_draining(self, incarnation: Incarnation, flag: DrainFlag) -> None:
        await self._ask("put_draining", incarnation, flag)

    async def delete(self, leader: LeaderId) -> None:
        await self._ask("delete", leader)

    async def instances(self, role: Role | None, version: int | None, wait_s: float) -> InstanceList:
        found: InstanceList = await self._ask("instances", role, version, wait_s, wait_s=wait_s)
        return found

    async def put_room(self, room: int, record: RoomRecord) -> None:
        await self._ask("put_room", room, record)

    async def room(self, room: int, wait_s: float) -> LeaderId | None:
        found: LeaderId | None = await self._ask("room", room, wait_s, wait_s=wait_s)
        return found

    async def close(self) -> None:
        for connection in [*(connection for _, connection in self._idle), *self._busy]:
            connection.transport.abort()

    async def _ask(self, name: str, *args: Any, wait_s: float = 0.0) -> Any:
        """As `HttpBackend`: as patient, and with the same errors of what can be tried again."""
        try:
            connection = await self._connection()
            self._busy[connection] = None
            answered = False
            try:
                async with asyncio.timeout(wait_s + self._connect_s):
                    reply = await connection.ask(
                        RegistryQuestion(name, msgspec.Raw(msgspec.msgpack.encode(args)))
                    )
                answered = True
            finally:
                del self._busy[connection]
                if answered and not connection.over:
                    self._idle.append((self._loop.time(), connection))
                else:
                    connection.transport.abort()
        except TimeoutError:
            raise BootstrapTimeout("the registry did not answer in time") from None
        except OSError as error:
            raise BootstrapUnreachable(f"the registry cannot be reached: {error}") from error
        if reply.error is not None:
            raise reply.error.exception()
        return msgspec.msgpack.decode(reply.result, type=QUESTIONS[name][1])

    async def _connection(self) -> AskingConnection:
        while self._idle:
            since, connection = self._idle.pop()
            if self._loop.time() - since > IDLE_S:
                connection.transport.abort()
            elif not connection.over and not connection.transport.is_closing():
                return connection
        async with asyncio.timeout(self._connect_s):
            _, made = await self._loop.create_connection(lambda: AskingConnection(self._loop), *self._place)
        found: AskingConnection = made
        return found


class AnsweringConnection(FramedConnection):
    """The registry's end of a connection."""

    def __init__(self, door: RegistryDoor) -> None:
        super().__init__()
        self._door = door
        self._tasks: set[asyncio.Task[None]] = set()

    def received(self, body: bytes) -> None:
        """A question: it waits for its answer and not longer than its client does."""
        question = msgspec.msgpack.decode(body, type=RegistryQuestion)
        task = self._door.loop.create_task(self._reply(question))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _reply(self, question: RegistryQuestion) -> None:
        args = msgspec.msgpack.decode(question.args, type=QUESTIONS[question.name][0])
        try:
            result = await getattr(self._door.backend, question.name)(*args)
            reply = RegistryReply(msgspec.Raw(msgspec.msgpack.encode(result)))
        except SegueError as error:
            reply = RegistryReply(msgspec.Raw(b"\xc0"), error.info)
        self.send(reply)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for task in self._tasks:
            task.cancel()
        self._door.connections.pop(self, None)


class RegistryDoor:
    """Answers from `backend` whoever connects to `listener`, until it is closed."""

    def __init__(self, loop: SimLoop, listener: SimListener, backend: RegistryBackend) -> None:
        self.loop = loop
        self.backend = backend
        self.connections: dict[AnsweringConnection, None] = {}
        self._listener: Any = listener
        self._accepting = loop.enter(loop.create_task, self._accept())

    async def _accept(self) -> None:
        while True:
            sock: Any = (await accepted(self.loop, self._listener))[0]
            await self.loop.connect_accepted_socket(self._connected, sock)

    def _connected(self) -> AnsweringConnection:
        made = AnsweringConnection(self)
        self.connections[made] = None
        return made

    async def close(self) -> None:
        """SIGTERM: nobody is let in any more, those who wait are told so, and then every connection ends."""
        self._accepting.cancel()
        self._listener.close()
        await self.backend.close()
        await asyncio.sleep(0.01)
        for connection in list(self.connections):
            connection.transport.close()


__all__ = ["RegistryDoor", "SimBackend"]
