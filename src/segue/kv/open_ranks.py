"""Hand-offs whose prefill DP rank was not named by who placed them: found, never guessed.

A receiver of an *open* transfer (`LeaderId.is_open`) exists at once, for its engine like any other. Here it
waits until its rank is known, from the first source that knows it: the request's hint, the only rank, the
rule that prefill declares, or the registry, which is asked once and answers when the room is registered. Then
it gets a hand-off of its own, under a name with the rank. If that rank answers that the room is on another
one, it gets a second one there, with the same pages, once nobody can write for the first one any more.

On the prefill side this tells the registry whose a room is, and asks it about rooms that decode looks for
here. Everything runs on the I/O thread.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from segue.kv.clock import Clock
from segue.kv.config import KVConfig
from segue.kv.errors import (
    BootstrapUnreachable,
    DeadlineExceeded,
    DpRankConflict,
    ErrorInfo,
    InvalidRequest,
    OutOfCapacity,
    PeerLost,
    SegueError,
)
from segue.kv.handles import Change
from segue.kv.ids import Incarnation, KVPoll, LeaderId, TransferId
from segue.kv.io import Io
from segue.kv.protocol import events
from segue.kv.protocol.room_ranks import DpRanks
from segue.kv.session.tasks import background

log = logging.getLogger("segue.kv")


class RoomRegistry(Protocol):
    """The part of a registry that knows whose a room is (`server.registry.client.Registry`)."""

    async def register_room(self, room: int, leader: LeaderId, ttl_s: float) -> None: ...
    async def resolve_room(self, room: int, timeout_s: float) -> LeaderId: ...


@dataclass(frozen=True, slots=True)
class PrefillInstance:
    """A prefill instance as the registry has it: `dp`, its number of DP ranks and placement rule, and
    `ranks`, the DP ranks that are registered."""

    dp: DpRanks
    ranks: frozenset[int]


@dataclass(slots=True)
class _Receiver:
    """A receiver under its engine's name, `opened.transfer`; `name` is that of its hand-off."""

    opened: events.OpenReceiver
    timer: asyncio.TimerHandle
    name: TransferId | None = None
    asked: bool = False
    published: events.Publish | None = None
    #: The rank that it goes to as soon as its first hand-off is over.
    moving_to: int | None = None
    moved: bool = False
    quarantined: int = 0
    #: Its engine has ended it while it moved, and knows.
    ended: bool = False


class OpenRanks:
    """See the module's text. `deliver` gives an event to the protocol, `report` a change to the engine.

    `registry` is None until there is one.
    """

    def __init__(
        self,
        config: KVConfig,
        io: Io,
        clock: Clock,
        deliver: Callable[[events.Event], None],
        report: Callable[[Change], None],
    ) -> None:
        self.registry: RoomRegistry | None = None
        self._origin = f"{config.role.value} {config.me}"
        self._max_transfers = config.limits.max_transfers
        self._force_query = config.dp.force_query
        self._io = io
        self._clock = clock
        self._deliver_now = deliver
        self._report = report
        self._instances: Mapping[Incarnation, PrefillInstance] = {}
        self._receivers: dict[TransferId, _Receiver] = {}
        #: the engine's name of each hand-off that has another
        self._names: dict[TransferId, TransferId] = {}
        self._tasks: dict[TransferId, asyncio.Task[None]] = {}

    def sizes(self) -> dict[str, int]:
        """The number of entries of every table; all zero at rest."""
        return {"open_receivers": len(self._receivers), "room_queries": len(self._tasks)}

    # ---- the engine ------------------------------------------------------------------------------

    def take(self, event: events.Event) -> bool:
        """Whether `event` is about an open transfer, or a room; then it is carried out here."""
        match event:
            case events.AnnounceRoom():
                self._announce(event.transfer, event.ttl_s)
            case events.OpenReceiver() if event.transfer.prefill.is_open:
                self._open(event)
            case events.OpenReceiver() if event.transfer in self._names:
                # Another request has this hand-off under its open name, which this one must not end.
                self._refuse(event, InvalidRequest(f"room {event.transfer.room} is in use"))
            case events.Publish() | events.AbortTransfer() if event.transfer.prefill.is_open:
                receiver = self._receivers.get(event.transfer)
                if receiver is None:
                    pass  # it has ended, and the engine could not know yet
                elif isinstance(event, events.Publish):
                    self._publish(receiver, event)
                else:
                    self._abort(receiver, event.error)
            case _:
                return False
        return True

    def _open(self, event: events.OpenReceiver) -> None:
        transfer = event.transfer
        try:
            if transfer in self._receivers:
                raise InvalidRequest(f"room {transfer.room} is in use; each request needs a room of its own")
            if len(self._receivers) >= self._max_transfers:
                raise OutOfCapacity(f"{len(self._receivers)} hand-offs are open already")
        except SegueError as error:
            self._refuse(event, error)
            return
        left_s = max(0.0, event.deadline - self._clock.now())
        receiver = _Receiver(event, self._io.loop.call_later(left_s, self._late, transfer))
        self._receivers[transfer] = receiver
        self._find(receiver)

    def _refuse(self, event: events.OpenReceiver, error: SegueError) -> None:
        for change in events.refusal(event, self._located(error, event.transfer)):
            if isinstance(change, events.Phase | events.Release):
                self._report(change)

    def _publish(self, receiver: _Receiver, event: events.Publish) -> None:
        receiver.published = event
        if receiver.name is not None and receiver.moving_to is None:
            self._deliver(replace(event, transfer=receiver.name))

    def _abort(self, receiver: _Receiver, error: ErrorInfo) -> None:
        if receiver.name is None:
            self._fail(receiver, error.exception())
        elif receiver.moving_to is None:
            self._deliver(events.AbortTransfer(receiver.name, error))
        elif not receiver.ended:
            receiver.ended = True
            transfer = receiver.opened.transfer
            self._report(events.Phase(transfer, KVPoll.FAILED, error=error))
            if receiver.quarantined:
                self._report(events.Quarantined(transfer, receiver.quarantined))

    def _late(self, transfer: TransferId) -> None:
        receiver = self._receivers[transfer]
        lacking = "nobody registered its room" if receiver.asked else "the registry names no such instance"
        self._fail(
            receiver,
            DeadlineExceeded(f"the deadline passed before the DP rank of prefill was known: {lacking}"),
        )

    # ---- finding the rank ------------------------------------------------------------------------

    def instances(self, there: Mapping[Incarnation, PrefillInstance]) -> None:
        """The prefill instances that are there now: what waits is looked at again."""
        gone = self._instances.keys() - there.keys()
        self._instances = there
        for receiver in list(self._receivers.values()):
            if receiver.name is not None:
                continue
            if receiver.opened.transfer.prefill.incarnation in gone:
                self._fail(receiver, PeerLost("the prefill instance has left the registry"))
            elif not receiver.asked:
                self._find(receiver)

    def _find(self, receiver: _Receiver) -> None:
        opened = receiver.opened
        transfer = opened.transfer
        instance = self._instances.get(transfer.prefill.incarnation)
        if instance is None:
            return  # the registry has not named it yet
        dp = instance.dp
        if self._force_query or opened.force_query:
            dp = DpRanks(size=dp.size, load_balance=dp.load_balance, force_query=True)
        try:
            rank = dp.inferred(transfer.room, opened.hint)
        except SegueError as error:
            self._fail(receiver, error)
            return
        # A rank that the rule names and that has left gets no requests: prefill has registered which one did.
        if rank is not None and (rank in instance.ranks or opened.hint is not None):
            self._found(receiver, LeaderId(transfer.prefill.incarnation, rank), inferred=dp.size > 1)
            return
        receiver.asked = True
        left_s = opened.deadline - self._clock.now()
        self._start(transfer, self._ask(transfer, left_s), partial(self._unanswered, transfer))

    async def _ask(self, transfer: TransferId, timeout_s: float) -> None:
        leader = await self._known_registry().resolve_room(transfer.room, timeout_s)
        if (receiver := self._receivers.get(transfer)) is not None and receiver.name is None:
            self._found(receiver, leader)

    def _unanswered(self, transfer: TransferId, error: SegueError) -> None:
        if (receiver := self._receivers.get(transfer)) is not None and receiver.name is None:
            self._fail(receiver, error)

    def _found(self, receiver: _Receiver, leader: LeaderId, *, inferred: bool = False) -> None:
        """`leader` has the room, as far as is known; `inferred` as in `Destination`."""
        transfer = receiver.opened.transfer
        instance = self._instances.get(transfer.prefill.incarnation)
        if leader.incarnation != transfer.prefill.incarnation:
            text = f"room {transfer.room} is registered for {leader}, not for {transfer.prefill}"
            self._fail(receiver, DpRankConflict(text))
        elif instance is None or leader.dp_rank not in instance.ranks:
            self._fail(receiver, PeerLost(f"DP rank {leader.dp_rank} of this prefill instance is not there"))
        else:
            receiver.timer.cancel()  # the hand-off has the same deadline
            self._hand_over(receiver, leader.dp_rank, inferred=inferred)

    def _hand_over(self, receiver: _Receiver, rank: int, *, inferred: bool) -> None:
        opened = receiver.opened
        leader = LeaderId(opened.transfer.prefill.incarnation, rank)
        name = receiver.name = TransferId(
            opened.transfer.room, opened.transfer.attempt, leader, opened.transfer.decode
        )
        event = events.OpenReceiver(name, opened.prompt_tokens, opened.deadline, inferred)
        self._io.loop.call_soon(self._begin, opened.transfer, event)

    def _begin(self, transfer: TransferId, event: events.OpenReceiver) -> None:
        """What the protocol says of the hand-off is for `transfer` from now on, also that it is refused."""
        self._names[event.transfer] = transfer
        self._deliver_now(event)

    def _fail(self, receiver: _Receiver, error: SegueError) -> None:
        """End a receiver without a hand-off, or after it."""
        transfer = receiver.opened.transfer
        self._drop(receiver)
        self._report(events.Phase(transfer, KVPoll.FAILED, error=self._located(error, transfer)))
        self._report(events.Release(transfer))

    def _drop(self, receiver: _Receiver) -> None:
        receiver.timer.cancel()
        transfer = receiver.opened.transfer
        self._stop(transfer)
        del self._receivers[transfer]

    def _located(self, error: SegueError, transfer: TransferId) -> ErrorInfo:
        where = {"phase": KVPoll.BOOTSTRAPPING.name, "peer": f"prefill {transfer.prefill}"}
        return error.at(origin=self._origin, room=transfer.room, **where).info

    # ---- what the protocol says of it ------------------------------------------------------------

    def engine_name(self, transfer: TransferId) -> TransferId:
        """What the engine calls this hand-off."""
        return self._names.get(transfer, transfer)

    def carry_out(self, effect: events.Effect) -> None:
        """Tell the engine what the protocol says of its hand-offs, by the engine's names, and do what it
        wants of rooms."""
        match effect:
            case events.Phase() | events.Release() | events.Quarantined():
                if (change := self._known_as(effect)) is not None:
                    self._report(change)
            case events.AskRoom():
                # Without an answer the destination waits for its request until its own deadline.
                self._start(effect.transfer, self._ask_ours(effect), lambda error: log.debug("%s", error))
            case events.RoomSettled():
                self._stop(effect.transfer)
            case events.Redirected():
                self._redirected(effect)

    def _known_as(self, change: Change) -> Change | None:
        transfer = self._names.get(change.transfer)
        if transfer is None:
            return change
        receiver = self._receivers[transfer]
        if receiver.moving_to is not None:
            self._on_the_way(receiver, receiver.moving_to, change)
            return None
        if receiver.moved and isinstance(change, events.Phase):
            if change.phase is KVPoll.BOOTSTRAPPING:
                return None
            if change.phase is KVPoll.WAITING_FOR_INPUT and receiver.published is not None:
                self._deliver(replace(receiver.published, transfer=change.transfer))
                return None
        if isinstance(change, events.Release):
            del self._names[change.transfer]
            self._drop(receiver)
        return replace(change, transfer=transfer)

    def _on_the_way(self, receiver: _Receiver, rank: int, change: Change) -> None:
        """The first hand-off ends, because the room is on `rank`."""
        if isinstance(change, events.Quarantined):
            receiver.quarantined = change.pages
        elif isinstance(change, events.Release):
            del self._names[change.transfer]
            if receiver.ended:
                self._drop(receiver)
                self._report(events.Release(receiver.opened.transfer))
                return
            receiver.moving_to, receiver.moved = None, True
            self._hand_over(receiver, rank, inferred=False)

    # ---- rooms -----------------------------------------------------------------------------------

    async def _ask_ours(self, effect: events.AskRoom) -> None:
        transfer = effect.transfer
        leader = await self._known_registry().resolve_room(transfer.room, effect.timeout_s)
        if leader.incarnation == transfer.prefill.incarnation:
            self._deliver(events.RoomFound(transfer, leader.dp_rank))

    def _redirected(self, effect: events.Redirected) -> None:
        """Once: a second time it is an error, as for a hand-off whose rank was named."""
        transfer = self._names.get(effect.transfer)
        receiver = self._receivers.get(transfer) if transfer is not None else None
        instance = self._instances.get(effect.transfer.prefill.incarnation)
        if receiver is not None and not receiver.moved and instance and effect.dp_rank in instance.ranks:
            receiver.moving_to = effect.dp_rank

    def _announce(self, transfer: TransferId, ttl_s: float) -> None:
        def failed(error: SegueError) -> None:
            self._deliver(events.AbortTransfer(transfer, error.info))

        self._start(transfer, self._tell(transfer, ttl_s), failed)

    async def _tell(self, transfer: TransferId, ttl_s: float) -> None:
        await self._known_registry().register_room(transfer.room, transfer.prefill, ttl_s)

    # ---- tasks -----------------------------------------------------------------------------------

    def _known_registry(self) -> RoomRegistry:
        if self.registry is None:
            raise BootstrapUnreachable("this leader has no registry that knows which DP rank has a room")
        return self.registry

    def _start(
        self, transfer: TransferId, work: Coroutine[Any, Any, None], failed: Callable[[SegueError], None]
    ) -> None:
        self._stop(transfer)
        task = background(work, name=f"the room of {transfer}", failed=failed, loop=self._io.loop)
        self._tasks[transfer] = task
        task.add_done_callback(partial(self._done, transfer))

    def _done(self, transfer: TransferId, task: asyncio.Task[None]) -> None:
        if self._tasks.get(transfer) is task:
            del self._tasks[transfer]

    def _stop(self, transfer: TransferId) -> None:
        if (task := self._tasks.pop(transfer, None)) is not None:
            task.cancel()

    def _deliver(self, event: events.Event) -> None:
        # Not at once: the protocol may be in the middle of a turn. All of them in this order.
        self._io.loop.call_soon(self._deliver_now, event)
