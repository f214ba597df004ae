"""Decode's receivers: an engine opens one for a request, whatever is known of its prefill side.

A receiver without a DP rank of prefill waits until the rank is known, from the first source that knows it:
the request's hint, the only rank, the rule that prefill declares, or the registry, which is asked once. Then
it has a hand-off. If that rank answers that the room is on another one (`Moved`), the receiver begins a
second hand-off there, with the same pages, once nobody can write for the first one any more. A second `Moved`
is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from segue.kv.errors import (
    DeadlineExceeded,
    DpRankConflict,
    ErrorInfo,
    Internal,
    InvalidRequest,
    OutOfCapacity,
    PeerLost,
    SegueError,
)
from segue.kv.ids import Incarnation, KVPoll, LeaderId, RoomKey, TransferId
from segue.kv.protocol.events import (
    AbortTransfer,
    AskRoom,
    DeclineRoom,
    EndRoom,
    HandoffEffect,
    HandoffPhase,
    HandoffQuarantined,
    HandoffReleased,
    OpenReceiver,
    Phase,
    PrefillInstances,
    Publish,
    Quarantined,
    Redirected,
    Release,
    RoomFound,
    RoomSettled,
    RoomUnknown,
    Send,
    Turn,
)
from segue.kv.protocol.link import LocalLeader
from segue.kv.protocol.machine import IllegalEvent
from segue.kv.protocol.messages import MAX_CLAIM_BYTES, Declined
from segue.kv.protocol.receiver import ReceiverMachine
from segue.kv.protocol.room_ranks import PrefillInstance
from segue.kv.protocol.rooms import MachineHost
from segue.kv.protocol.timers import DeadlineEntry, Deadlines
from segue.kv.protocol.tombstones import Tombstones


@dataclass(slots=True)
class Reception:
    """One receiver, as its engine knows it."""

    opened: OpenReceiver
    timer: DeadlineEntry
    opened_at: float
    phase: KVPoll = KVPoll.BOOTSTRAPPING
    machine: ReceiverMachine | None = None
    asked: bool = False
    published: Publish | None = None
    #: the DP rank that it goes to as soon as its first hand-off is over
    moving_to: int | None = None
    moved: bool = False
    quarantined: int = 0

    @property
    def key(self) -> RoomKey:
        return self.opened.key


class Receptions:
    """All receivers of one decode leader."""

    def __init__(
        self, host: MachineHost, local: LocalLeader, deadlines: Deadlines, turn: Turn, tombstones: Tombstones
    ) -> None:
        self._host = host
        self._local = local
        self._deadlines = deadlines
        self._turn = turn
        self._tombstones = tombstones
        self._instances: Mapping[Incarnation, PrefillInstance] = {}
        self.receptions: dict[RoomKey, Reception] = {}

    # ---- the engine ------------------------------------------------------------------------------

    def open(self, event: OpenReceiver) -> None:
        """See `OpenReceiver`. Raises InvalidRequest for a room that is in use or was, OutOfCapacity."""
        room, limits = event.key.room, self._local.limits
        origin = self._local.origin
        if event.prompt_tokens < 1:
            raise IllegalEvent("a hand-off needs at least one prompt token", room=room)
        if len(event.claim) > MAX_CLAIM_BYTES:
            raise InvalidRequest(f"a claim has at most {MAX_CLAIM_BYTES} bytes, not {len(event.claim)}")
        if event.key in self.receptions:
            raise InvalidRequest(
                f"room {room} is in use; each request needs a room of its own", origin=origin, room=room
            )
        if not event.prefill.is_open and self._used(self._transfer(event, event.prefill)):
            raise InvalidRequest(
                f"room {room}, attempt {event.key.attempt} was used already; "
                "each request needs a room of its own",
                origin=origin,
                room=room,
            )
        if len(self.receptions) >= limits.max_transfers:
            raise OutOfCapacity(
                f"{len(self.receptions)} hand-offs are open, as many as limits.max_transfers allows",
                origin=origin,
                room=room,
            )
        timer = DeadlineEntry(event.deadline, lambda _: self._due(event.key))
        reception = self.receptions[event.key] = Reception(event, timer, self._turn.now)
        self._deadlines.add(timer)
        self._turn.emit(Phase(event.key, KVPoll.BOOTSTRAPPING))
        if event.prefill.is_open:
            self._find(reception)
        else:
            self._begin(reception, event.prefill, inferred=False)

    def publish(self, event: Publish) -> None:
        """See `Publish`. Raises IllegalEvent where it is not legal."""
        reception = self.receptions.get(event.key)
        if reception is None or reception.phase.terminal:
            return  # it has ended, and the engine could not know yet
        machine = reception.machine
        if machine is None:
            raise IllegalEvent("pages were published before prefill is known", room=event.key.room)
        on_the_way = reception.moving_to is not None or machine.phase is KVPoll.BOOTSTRAPPING
        if not (on_the_way and reception.phase is KVPoll.WAITING_FOR_INPUT and reception.published is None):
            self._host.run(machine, event)
        reception.published = event

    def end(self, event: EndRoom) -> None:
        """See `EndRoom`."""
        reception = self.receptions.get(event.key)
        if reception is None or reception.phase.terminal:
            return
        if reception.machine is None:
            self._fail(reception, event.error)
        elif reception.moving_to is not None or not self._host.tell(
            reception.machine, AbortTransfer(reception.machine.transfer, event.error)
        ):
            self._fail_on_the_way(reception, event.error)

    def decline(self, event: DeclineRoom) -> None:
        """See `DeclineRoom`."""
        if event.key not in self.receptions:
            self._decline(event, remember=True)

    def _decline(self, event: DeclineRoom, *, remember: bool) -> None:
        """Tell prefill; with `remember`, on its next session if it has none now."""
        key, prefill = event.key, event.prefill
        ranks = [prefill]
        if prefill.is_open:
            instance = self._instances.get(prefill.incarnation)
            there = () if instance is None else sorted(instance.ranks)
            ranks = [LeaderId(prefill.incarnation, rank) for rank in there]
        for leader in ranks:
            transfer = TransferId(key.room, key.attempt, leader, self._local.me, key.generation, key.ordinal)
            error = self._tombstones.record(event.error, key.room, leader)
            listed = self._instances.get(leader.incarnation)
            if self._host.linked(leader):
                self._turn.emit(Send(leader, Declined(transfer, error, event.claim)))
            elif remember and (listed is None or leader.dp_rank in listed.ranks):
                self._tombstones.add_unopened(transfer, error, ended_by_peer=False, declined=event.claim)

    def _due(self, key: RoomKey) -> None:
        """The deadline has passed. A hand-off that goes on has it, too."""
        reception = self.receptions.get(key)
        if reception is None or reception.phase.terminal:
            return
        if reception.machine is None:
            lacking = (
                "nobody registered its room" if reception.asked else "the registry names no such instance"
            )
            text = f"the deadline passed before the DP rank of prefill was known: {lacking}"
            self._fail(reception, DeadlineExceeded(text).info)
        elif reception.moving_to is not None:
            text = "the deadline passed while the receiver went to another DP rank of prefill"
            self._fail_on_the_way(reception, DeadlineExceeded(text).info)

    # ---- finding the rank ------------------------------------------------------------------------

    def instances(self, event: PrefillInstances) -> None:
        """See `PrefillInstances`: receivers without a rank are looked at again."""
        gone = self._instances.keys() - event.instances.keys()
        self._instances = event.instances
        for reception in list(self.receptions.values()):
            if reception.machine is not None or reception.phase.terminal:
                continue
            if reception.opened.prefill.incarnation in gone:
                self._fail(reception, PeerLost("the prefill instance has left the registry").info)
            elif not reception.asked:
                self._find(reception)

    def _find(self, reception: Reception) -> None:
        opened = reception.opened
        instance = self._instances.get(opened.prefill.incarnation)
        if instance is None:
            return  # the registry has not named it yet
        dp, force_query = instance.dp, self._local.dp.force_query or opened.force_query
        try:
            rank = dp.inferred(opened.key.room, opened.hint, force_query=force_query)
        except SegueError as error:
            self._fail(reception, error.info)
            return
        # A rank that the rule names and that has left gets no requests: prefill has registered which one did.
        if rank is not None and (rank in instance.ranks or opened.hint is not None):
            self._found(reception, LeaderId(opened.prefill.incarnation, rank), inferred=dp.size > 1)
            return
        reception.asked = True
        self._turn.emit(AskRoom(opened.key, max(0.0, opened.deadline - self._turn.now)))

    def found(self, event: RoomFound) -> None:
        """See `RoomFound`."""
        reception = self.receptions.get(event.key)
        if reception is not None and reception.machine is None and not reception.phase.terminal:
            self._found(reception, event.leader, inferred=False)

    def unknown(self, event: RoomUnknown) -> None:
        """See `RoomUnknown`."""
        reception = self.receptions.get(event.key)
        if reception is not None and reception.machine is None and not reception.phase.terminal:
            self._fail(reception, event.error)

    def _found(self, reception: Reception, leader: LeaderId, *, inferred: bool) -> None:
        """`leader` has the room, as far as is known; `inferred` as in `Destination`."""
        opened = reception.opened
        instance = self._instances.get(opened.prefill.incarnation)
        if leader.incarnation != opened.prefill.incarnation:
            text = f"room {opened.key.room} is registered for {leader}, not for {opened.prefill}"
            self._fail(reception, DpRankConflict(text).info)
        elif instance is None or leader.dp_rank not in instance.ranks:
            text = f"DP rank {leader.dp_rank} of this prefill instance is not there"
            self._fail(reception, PeerLost(text).info)
        elif self._used(self._transfer(opened, leader)):
            text = f"room {opened.key.room} was used already; each request needs a room of its own"
            self._fail(reception, InvalidRequest(text).info)
        else:
            self._begin(reception, leader, inferred=inferred)

    # ---- its hand-off ----------------------------------------------------------------------------

    def _transfer(self, opened: OpenReceiver, leader: LeaderId) -> TransferId:
        key = opened.key
        return TransferId(key.room, key.attempt, leader, self._local.me, key.generation, key.ordinal)

    def _used(self, transfer: TransferId) -> bool:
        ended = self._tombstones.ended.get(transfer)
        return ended is not None and ended.opened

    def _begin(self, reception: Reception, leader: LeaderId, *, inferred: bool) -> None:
        """The receiver's hand-off with `leader`; its first one, or the second after `Moved`."""
        opened = reception.opened
        transfer = self._transfer(opened, leader)
        self._settle(reception)
        ended = self._tombstones.ended.get(transfer)
        if ended is not None and ended.error is not None:
            ended.opened = True
            self._fail(reception, ended.error)  # prefill has ended it before it began here
            return
        args = self._host.args(transfer, leader, opened.prompt_tokens, opened.deadline)
        machine = ReceiverMachine(args, opened.claim, inferred=inferred)
        reception.machine = machine
        machine.declined = None if opened.placed else opened.claim
        self._host.add(machine, reception)
        if machine.link is not None:
            self._host.tell(machine, machine.link)

    def _fail(self, reception: Reception, error: ErrorInfo) -> None:
        """End a receiver without a hand-off."""
        error = self._filled(reception, error)
        self._settle(reception)
        self._report(reception, Phase(reception.key, KVPoll.FAILED, error=error))
        self._drop(reception)

    def _fail_on_the_way(self, reception: Reception, error: ErrorInfo) -> None:
        """End a receiver whose first hand-off has ended and still holds its pages."""
        self._report(reception, Phase(reception.key, KVPoll.FAILED, error=self._filled(reception, error)))
        if reception.quarantined:
            self._turn.emit(Quarantined(reception.key, reception.quarantined))

    def _filled(self, reception: Reception, error: ErrorInfo) -> ErrorInfo:
        return self._tombstones.record(error, reception.key.room, reception.opened.prefill)

    def _report(self, reception: Reception, phase: Phase) -> None:
        opened, waits = reception.opened, reception.phase < KVPoll.TRANSFERRING
        reception.phase = phase.phase
        self._turn.emit(phase)
        if phase.phase is KVPoll.FAILED and waits and not opened.placed:
            error = phase.error or Internal("no reason given").info
            word = DeclineRoom(opened.key, opened.prefill, error, opened.claim)
            self._decline(word, remember=reception.machine is None)

    def _settle(self, reception: Reception) -> None:
        if reception.asked:
            reception.asked = False
            self._turn.emit(RoomSettled(reception.key))

    def _drop(self, reception: Reception) -> None:
        self._deadlines.cancel(reception.timer)
        del self.receptions[reception.key]
        self._turn.emit(Release(reception.key))

    def on_effect(self, reception: Reception, effect: HandoffEffect) -> None:
        """Tell the engine what its hand-off says, by the engine's name."""
        match effect:
            case HandoffPhase():
                self._on_phase(reception, effect)
            case HandoffQuarantined() if reception.moving_to is not None:
                reception.quarantined = effect.pages
            case HandoffQuarantined():
                self._turn.emit(Quarantined(reception.key, effect.pages))
            case Redirected():
                self._redirected(reception, effect)
            case HandoffReleased() if reception.moving_to is not None and not reception.phase.terminal:
                rank, reception.moving_to, reception.moved = reception.moving_to, None, True
                reception.machine = None
                leader = LeaderId(reception.opened.prefill.incarnation, rank)
                self._begin(reception, leader, inferred=False)
            case HandoffReleased():
                if not reception.phase.terminal:  # a bug has lost the phase before
                    error = Internal("the end of this hand-off was lost").info
                    self._report(reception, Phase(reception.key, KVPoll.FAILED, error=error))
                self._drop(reception)

    def _on_phase(self, reception: Reception, effect: HandoffPhase) -> None:
        if reception.moving_to is not None or reception.phase.terminal:
            return
        waits = effect.phase is KVPoll.WAITING_FOR_INPUT
        if reception.moved and waits and reception.published is not None and reception.machine is not None:
            if not self._host.tell(reception.machine, reception.published):
                text = "pages that fit one DP rank of prefill do not fit another one"
                self._host.tell(reception.machine, AbortTransfer(effect.transfer, Internal(text).info))
        elif effect.phase > reception.phase or effect.phase is KVPoll.FAILED:
            rest = (effect.error, effect.metadata, effect.wire_s, effect.nbytes, effect.transfer.prefill)
            phase = Phase(reception.key, effect.phase, *rest)
            self._report(reception, phase)

    def _redirected(self, reception: Reception, effect: Redirected) -> None:
        """Once: a second time it is an error, as for a hand-off whose rank was named."""
        instance = self._instances.get(effect.transfer.prefill.incarnation)
        open_rank = reception.opened.prefill.is_open
        if open_rank and not reception.moved and instance and effect.dp_rank in instance.ranks:
            reception.moving_to = effect.dp_rank

    def lists(self, prefill: Incarnation) -> bool:
        """Whether the registry names this prefill instance."""
        return prefill in self._instances

    def sizes(self) -> dict[str, int]:
        """Receivers, and how many of them have no hand-off (yet). Any thread may ask."""
        receptions = list(self.receptions.values())
        waiting = sum(reception.machine is None for reception in receptions)
        return {"receivers": len(receptions), "open_receivers": waiting}
