"""A leader's queries and messages to the registry about rooms: the effects `AskRoom`, `RegisterRoom` and
`RoomSettled`. Everything runs on the I/O thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Protocol

from segue.kv.errors import BootstrapUnreachable, SegueError
from segue.kv.ids import LeaderId, RoomKey
from segue.kv.io import Io
from segue.kv.protocol.events import (
    AskRoom,
    RegisterRoom,
    RegistryEffect,
    RoomFound,
    RoomSettled,
    RoomUnknown,
)
from segue.kv.session.tasks import background

Answer = RoomFound | RoomUnknown


class RoomRegistry(Protocol):
    """The part of a registry that knows whose a room is. `room` is `RoomKey.registered`."""

    async def register_room(self, room: int, leader: LeaderId, ttl_s: float) -> None:
        """`leader` has the room, for `ttl_s` seconds. Raises DpRankConflict if another one has it."""
        ...

    async def resolve_room(self, room: int, timeout_s: float) -> LeaderId:
        """The owner of the room; waits for its registration, at most `timeout_s` seconds."""
        ...


class RoomQueries:
    """One question or registration per room, each a task. `deliver` gives an answer to the protocol, which
    may be in the middle of a turn; `registry` is None until there is one."""

    def __init__(self, me: LeaderId, io: Io, deliver: Callable[[Answer], None]) -> None:
        self.registry: RoomRegistry | None = None
        self._me = me
        self._io = io
        self._deliver = deliver
        self._tasks: dict[RoomKey, asyncio.Task[None]] = {}

    def __len__(self) -> int:
        """How many answers are waited for; 0 at rest."""
        return len(self._tasks)

    def carry_out(self, effect: RegistryEffect) -> None:
        """Begin or give up one question or registration."""
        match effect:
            case AskRoom():
                answers: list[Answer] = []
                self._start(effect.key, self._ask(effect, answers), answers)
            case RegisterRoom():
                self._start(effect.key, self._register(effect), [])
            case RoomSettled():
                self._stop(effect.key)

    async def _ask(self, effect: AskRoom, answers: list[Answer]) -> None:
        leader = await self._known_registry().resolve_room(effect.key.registered, effect.timeout_s)
        answers.append(RoomFound(effect.key, leader))

    async def _register(self, effect: RegisterRoom) -> None:
        await self._known_registry().register_room(effect.key.registered, self._me, effect.ttl_s)

    def _known_registry(self) -> RoomRegistry:
        if self.registry is None:
            raise BootstrapUnreachable("this leader has no registry that knows which DP rank has a room")
        return self.registry

    def _start(self, key: RoomKey, work: Coroutine[Any, Any, None], answers: list[Answer]) -> None:
        def failed(error: SegueError) -> None:
            answers.append(RoomUnknown(key, error.info))

        self._stop(key)
        task = background(
            work, name=f"the registry's answer for room {key}", failed=failed, loop=self._io.loop
        )
        self._tasks[key] = task
        task.add_done_callback(partial(self._done, key, answers))

    def _done(self, key: RoomKey, answers: list[Answer], task: asyncio.Task[None]) -> None:
        # Not before: an answer of what is settled meanwhile is nobody's. Never in the middle of a turn.
        if self._tasks.get(key) is task:
            del self._tasks[key]
            for answer in answers:
                self._deliver(answer)

    def _stop(self, key: RoomKey) -> None:
        if (task := self._tasks.pop(key, None)) is not None:
            task.cancel()
