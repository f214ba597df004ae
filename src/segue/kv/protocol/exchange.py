"""Every hand-off of one leader: routes events to rooms, receivers and machines, keeps time, remembers what is
over.

No I/O, no clock: `handle(event, now)` returns the effects that the caller carries out in order. The state of
a hand-off lives in its machine. A machine belongs to a room (`Rooms`, on prefill) or a receiver
(`Receptions`, on decode), which speak with the engine. A hand-off without a machine has at most a tombstone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import msgspec

from segue.kv.errors import Internal, SegueError
from segue.kv.ids import ChecksumMode, KVPoll, LeaderId, Role, RoomKey, TransferId
from segue.kv.limits import Limits
from segue.kv.protocol.events import (
    AbortTransfer,
    ChecksumReady,
    DeclineRoom,
    Effect,
    EndRoom,
    Event,
    ExpectRoom,
    Fence,
    FenceDone,
    Granted,
    HandoffPhase,
    HandoffQuarantined,
    HandoffReleased,
    OpenReceiver,
    PeerDown,
    PeerUp,
    PlaceRoom,
    PrefillInstances,
    Publish,
    RankEvent,
    Received,
    Redirected,
    RefuseRoom,
    RoomFound,
    RoomUnknown,
    SendChunk,
    SendMetadata,
    Tick,
    Turn,
    WriteBroken,
    WriteLanded,
)
from segue.kv.protocol.link import LocalLeader, PeerLink, make_link
from segue.kv.protocol.machine import IllegalEvent, Machine, MachineArgs
from segue.kv.protocol.messages import (
    Abort,
    Accepted,
    ChunkPosted,
    Committed,
    Declined,
    Destination,
    Drained,
    Failed,
    Gone,
    Metadata,
    Moved,
)
from segue.kv.protocol.receptions import Reception, Receptions
from segue.kv.protocol.room_ranks import DpRanks
from segue.kv.protocol.rooms import Room, Rooms
from segue.kv.protocol.table_checks import Tables
from segue.kv.protocol.timers import DeadlineEntry, Deadlines
from segue.kv.protocol.tombstones import Tombstones

_TO_PREFILL = frozenset({Destination, Declined, Committed, Failed, Abort, Gone})
_TO_DECODE = frozenset({Accepted, Moved, ChunkPosted, Metadata, Failed, Drained, Gone})


class Exchange:
    """All hand-offs of one leader.

    `origin` is how errors that begin here name this side (`prefill 3fa94c01 dp0`). `kv_checksum` is what a
    sender's checksums cover; a receiver verifies whatever it is given. `dp` are the ranks of this instance.
    `handle` raises a
    `SegueError` for an illegal local event, and then nothing has changed; everything that a peer
    or the transport does wrong becomes the failure of one hand-off, or a count in `counters`.
    """

    def __init__(
        self,
        role: Role,
        me: LeaderId,
        origin: str,
        limits: Limits,
        transport: str = "",
        kv_checksum: ChecksumMode = ChecksumMode.OFF,
        dp: DpRanks | None = None,
    ) -> None:
        if role not in (Role.PREFILL, Role.DECODE):
            raise IllegalEvent(f"a {role} has no hand-offs")
        self.local = LocalLeader(role, me, origin, limits, kv_checksum, dp or DpRanks())
        self._transport = transport
        # The tables that checks and the simulator read have public names.
        self.machines: dict[TransferId, Machine] = {}
        self._owners: dict[TransferId, Room | Reception] = {}
        self.links: dict[LeaderId, PeerLink] = {}
        # The transport speaks of epochs, which are decode's numbers; an entry lives as long as its machine.
        self._epochs: dict[tuple[LeaderId, int], Machine] = {}
        self._deadlines = Deadlines()
        # Epochs of two leaders at one address differ as well, whatever the transport checks.
        high = int.from_bytes(hashlib.blake2b(msgspec.msgpack.encode(me), digest_size=4).digest(), "big")
        self._last_epoch = high << 32
        #: Things that were dropped or answered without a machine; each is harmless, many are a sign.
        self.counters: dict[str, int] = dict.fromkeys(
            ("stray_messages", "late_events", "repeats", "gone_answers", "early_refused", "internal_errors"),
            0,
        )
        self._turn = Turn()
        books = (self._deadlines, self._turn)
        self._tombstones = Tombstones(self.local, self._deadlines, self.counters, self._turn, self._known)
        self.rooms = Rooms(self, self.local, self._deadlines, self.counters, self._turn, self._tombstones)
        self._receptions = Receptions(self, self.local, *books, self._tombstones)
        self._handlers: dict[type[Any], Callable[[Any], None]] = {
            AbortTransfer: self._abort,
            PeerUp: self._peer_up,
            PeerDown: self._peer_down,
            Received: self._received,
            WriteLanded: self._of_rank,
            WriteBroken: self._of_rank,
            ChecksumReady: self._of_rank,
            FenceDone: self._of_rank,
            Granted: self._of_rank,
            Tick: self._tick,
        }
        rooms, receptions = self.rooms, self._receptions
        if role is Role.PREFILL:
            self._handlers |= {
                ExpectRoom: rooms.expect,
                RefuseRoom: rooms.refuse,
                SendChunk: rooms.send_chunk,
                SendMetadata: rooms.send_metadata,
                EndRoom: rooms.end,
                PlaceRoom: rooms.place,
                RoomFound: rooms.found,
                RoomUnknown: rooms.unknown,
            }
        else:
            self._handlers |= {
                OpenReceiver: receptions.open,
                Publish: receptions.publish,
                EndRoom: receptions.end,
                DeclineRoom: receptions.decline,
                RoomFound: receptions.found,
                RoomUnknown: receptions.unknown,
                PrefillInstances: receptions.instances,
            }

    # ---- the face ------------------------------------------------------------------------------

    def handle(self, event: Event, now: float) -> list[Effect]:
        """One event in, its effects out, in order. `now` never decreases between calls. If it raises, carry
        out the effects that it had `decided` before."""
        self._turn.now = now
        effects: list[Effect] = []
        self._turn.effects = effects
        handler = self._handlers.get(type(event))
        if handler is None:
            raise IllegalEvent(f"{type(event).__name__} is not an event of {self.local.origin}")
        handler(event)
        self._turn.effects = []
        return effects

    @property
    def decided(self) -> list[Effect]:
        """The effects that the last `handle` had decided before it raised; none if it refused its event."""
        return self._turn.effects

    def next_deadline(self) -> float | None:
        """When to deliver the next `Tick`; None when there is nothing to wait for."""
        return self._deadlines.next()

    def phase(self, transfer: TransferId) -> KVPoll | None:
        """The phase of a transfer, also of one that ended recently; None for an unknown one."""
        machine = self.machines.get(transfer)
        if machine is not None:
            return machine.phase
        ended = self._tombstones.ended.get(transfer)
        return ended.phase if ended is not None and ended.opened else None

    def transfer_of(self, peer: LeaderId, epoch: int) -> TransferId | None:
        """The live transfer with `peer` that writes under `epoch`; None if it has ended or never existed.
        Decode's own ranks write under its epochs as well."""
        decode = self.local.me if self.local.role is Role.DECODE else peer
        machine = self._epochs.get((decode, epoch))
        return machine.transfer if machine is not None and peer in (decode, machine.peer) else None

    def open_halves(self) -> list[RoomKey]:
        """The engine's halves that have not ended."""
        rooms = [key for key, r in self.rooms.rooms.items() if r.expected and not r.phase.terminal]
        return rooms + [key for key, r in self._receptions.receptions.items() if not r.phase.terminal]

    def phase_of(self, key: RoomKey) -> KVPoll | None:
        """The phase of the engine's half `key`; None for one that is unknown, or over and forgotten."""
        room, reception = self.rooms.rooms.get(key), self._receptions.receptions.get(key)
        if room is not None:
            return None if room.expected is None else room.phase
        return None if reception is None else reception.phase

    def holds(self, key: RoomKey) -> bool:
        """Whether a half `key` is open, or its pages are not back."""
        room = self.rooms.rooms.get(key)
        return key in self._receptions.receptions or (room is not None and room.out)

    def peers(self) -> set[LeaderId]:
        """The peers of all hand-offs that are not over."""
        return {machine.peer for machine in self.machines.values()}

    def unproven_fences(self, peer: LeaderId, transport: str) -> list[Fence]:
        """The fences of hand-offs with `peer` over `transport` that our ranks have not answered with a proof.
        An answer that is still under way may say what was known before. Another transport knows nothing of
        their writes, and its word would be none."""
        return [
            Fence(machine.transfer, *fenced, machine.epoch)
            for machine in self._bound_to(peer)
            if machine.transport == transport
            for fenced in sorted(machine.fences.unproven)
        ]

    def sizes(self) -> dict[str, int]:
        """How much is in every table; all zero at rest without peers. It changes nothing, and copies each
        table in one step, so any thread may ask."""
        rooms, machines = list(self.rooms.rooms.values()), list(self.machines.values())
        return {
            "transfers": len(machines),
            "rooms": self.rooms.open,
            **self._receptions.sizes(),
            "early": sum(len(room.parked) for room in rooms),
            "ended": len(self._tombstones.ended) + len(self.rooms.rooms) - self.rooms.open,
            "epochs": len(self._epochs),
            "peers": len(self.links),
            "deadlines": self._deadlines.live,
            "quarantined": sum(m.phase is KVPoll.FAILED for m in machines),
        }

    def quarantined_pages(self) -> int:
        """Pages of failed hand-offs that wait for a fence (a gauge; looks at every machine)."""
        return sum(m.exposed_pages for m in self.machines.values() if m.phase is KVPoll.FAILED)

    def check_integrity(self) -> None:
        """Look at everything; raises Internal with what is wrong."""
        tables = Tables(self.machines, self.rooms, self._receptions, self._tombstones.ended, self._epochs)
        found = tables.problems(self._deadlines.live, self.local.limits)
        if found:
            raise Internal("; ".join(found))

    # ---- what rooms and receivers need (MachineHost) -----------------------------------------------

    def args(self, transfer: TransferId, peer: LeaderId, prompt_tokens: int, deadline: float) -> MachineArgs:
        """The arguments of a new machine of `transfer`."""
        return MachineArgs(
            self.local,
            self._turn,
            self.new_epoch,
            lambda timer: self._due(transfer, timer),
            transfer,
            peer,
            self.links.get(peer),
            prompt_tokens,
            deadline,
        )

    def add(self, machine: Machine, owner: Room | Reception) -> None:
        """`machine` is one of `owner`'s from now on."""
        self.machines[machine.transfer] = machine
        self._owners[machine.transfer] = owner
        self._deadlines.add(machine.timer)
        if machine.epoch:
            self._epochs[machine.transfer.decode, machine.epoch] = machine
        start = len(self._turn.effects)
        machine.begin()
        self._report(owner, start)

    def epoch_owner(self, decode: LeaderId, epoch: int) -> Machine | None:
        """The machine whose writes carry this epoch of `decode`."""
        return self._epochs.get((decode, epoch))

    def linked(self, peer: LeaderId) -> bool:
        """Whether the session to this leader is up."""
        return peer in self.links

    def _known(self, peer: LeaderId) -> bool:
        """Whether a client cannot have made up this leader. Prefill learns decodes from its placer or from
        their sessions."""
        return (
            self.local.role is Role.PREFILL or self.linked(peer) or self._receptions.lists(peer.incarnation)
        )

    def new_epoch(self) -> int:
        """A number that this leader has never used for writes to it."""
        self._last_epoch += 1
        return self._last_epoch

    def _abort(self, event: AbortTransfer) -> None:
        machine = self.machines.get(event.transfer)
        if machine is not None:
            self.tell(machine, event)
        elif self.local.role is Role.PREFILL:
            self.rooms.abort(event)

    # ---- our ranks: transport and hash -----------------------------------------------------------

    def _of_rank(self, event: RankEvent) -> None:
        machine = self.machines.get(event.transfer)
        if machine is None and isinstance(event, FenceDone):
            return  # the answer to the fence of a success, mostly
        if machine is None or not self.tell(machine, event):
            self.counters["late_events"] += 1

    # ---- the session ---------------------------------------------------------------------------

    def _peer_up(self, event: PeerUp) -> None:
        link = make_link(self.local, event, self._transport)
        self.links[event.peer] = link
        for machine in self._bound_to(event.peer):
            self.tell(machine, link)
        self._tombstones.peer_up(event.peer)

    def _peer_down(self, event: PeerDown) -> None:
        self.links.pop(event.peer, None)
        try:
            self.rooms.peer_down(event)
        finally:  # a bug there costs no hand-off its proof
            for machine in self._bound_to(event.peer):
                elsewhere = event.over is not None and machine.transport != event.over
                self.tell(machine, msgspec.structs.replace(event, dead=False) if elsewhere else event)

    def _bound_to(self, peer: LeaderId) -> list[Machine]:
        return [m for m in self.machines.values() if m.peer == peer]

    def _received(self, event: Received) -> None:
        message = event.message
        transfer = message.transfer
        prefill = self.local.role is Role.PREFILL
        if prefill:
            legal, mine, theirs = _TO_PREFILL, transfer.prefill, transfer.decode
        else:
            legal, mine, theirs = _TO_DECODE, transfer.decode, transfer.prefill
        kind = type(message)
        # Not even `Gone` is said for another leader: we can prove nothing about its writes.
        known = event.peer in self.links
        if not known or kind not in legal or mine != self.local.me or theirs != event.peer:
            self.counters["stray_messages"] += 1
            return
        if isinstance(message, Committed) and self.rooms.commits_late(message):
            return
        # `Declined` is about the room, which may outlive the hand-off whose fences are still waited for.
        machine = None if kind is Declined else self.machines.get(transfer)
        if machine is not None:
            if not self.tell(machine, message) and kind is Destination:
                self.counters["repeats"] += 1
        elif prefill:
            self.rooms.received(event)
        else:
            self._tombstones.received(event)

    # ---- time and the end ----------------------------------------------------------------------

    def _tick(self, event: Tick) -> None:
        while (timer := self._deadlines.pop_due(self._turn.now)) is not None:
            timer.due(timer)

    def _due(self, transfer: TransferId, timer: DeadlineEntry) -> None:
        machine = self.machines.get(transfer)
        if machine is not None and machine.timer is timer:
            self.tell(machine, Tick())

    def tell(self, machine: Machine, event: object) -> bool:
        """Like `run`, for events that may be late: False if the event is illegal (by now)."""
        try:
            self.run(machine, event)
        except IllegalEvent:
            return False
        return True

    def run(self, machine: Machine, event: object) -> None:
        """Give one event to one machine inside its own error boundary, then tidy up after it. Raises
        IllegalEvent alone, and then nothing has changed."""
        start = len(self._turn.effects)
        try:
            machine.take(event)
        except IllegalEvent:
            raise
        except SegueError as error:
            machine.fail(error.info)
        except Exception as error:  # the boundary of invariant 12: one hand-off fails, no other
            self.counters["internal_errors"] += 1
            machine.fail(Internal(f"{type(error).__name__} in the hand-off's handler: {error}").info)
        if machine.epoch:
            self._epochs.setdefault((machine.transfer.decode, machine.epoch), machine)
        owner = self._owners[machine.transfer]
        if machine.ended:
            self._forget(machine)
        elif machine.deadline < machine.timer.at and not machine.phase.terminal:
            self._deadlines.cancel(machine.timer)
            machine.timer = DeadlineEntry(machine.deadline, machine.timer.due)
            self._deadlines.add(machine.timer)
        self._report(owner, start)

    def _report(self, owner: Room | Reception, start: int) -> None:
        """Show the machine's effects from `start` on to its owner. Its own effects follow each of them."""
        effects = self._turn.effects
        new = effects[start:]
        del effects[start:]
        broken: Internal | None = None
        for effect in new:
            effects.append(effect)
            if not isinstance(effect, HandoffPhase | HandoffReleased | HandoffQuarantined | Redirected):
                continue
            try:
                if isinstance(owner, Reception):
                    self._receptions.on_effect(owner, effect)
                elif isinstance(effect, HandoffPhase):
                    self.rooms.on_phase(owner, effect)
                elif isinstance(effect, HandoffReleased):
                    self.rooms.on_release(owner, effect.transfer)
            except Exception as error:  # the machine has moved on, so what follows counts, too
                self.counters["internal_errors"] += 1
                broken = Internal(f"{type(error).__name__} in the half of a hand-off: {error}")
        if broken is not None:
            table = self._receptions if isinstance(owner, Reception) else self.rooms
            table.end(EndRoom(owner.key, broken.info))

    def _forget(self, machine: Machine) -> None:
        del self.machines[machine.transfer]
        del self._owners[machine.transfer]
        if self._epochs.get(key := (machine.transfer.decode, machine.epoch)) is machine:
            del self._epochs[key]
        self._tombstones.add_tombstone(machine)
