"""Every hand-off of one leader: routes events to machines, keeps time, remembers what is over.

No I/O, no clock: `handle(event, now)` returns the effects that the caller carries out in order. What a
hand-off holds lives in its machine. Here is the table of machines; a transfer that has none (yet, or any
more) is at most in one of the tables of `Tombstones`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec

from segue.kv.errors import Internal, InvalidRequest, OutOfCapacity, SegueError, TransferFailed
from segue.kv.ids import ChecksumMode, KVPoll, LeaderId, Role, TransferId
from segue.kv.limits import Limits
from segue.kv.protocol.events import (
    AbortTransfer,
    ChecksumReady,
    Effect,
    Event,
    Fence,
    FenceDone,
    Granted,
    OpenReceiver,
    OpenSender,
    PeerDown,
    PeerUp,
    Phase,
    Publish,
    Received,
    RoomFound,
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
    Destination,
    Drained,
    Failed,
    Gone,
    Metadata,
    Moved,
)
from segue.kv.protocol.receiver import ReceiverMachine
from segue.kv.protocol.room_ranks import DpRanks
from segue.kv.protocol.sender import SenderMachine
from segue.kv.protocol.table_checks import Tables
from segue.kv.protocol.timers import DeadlineEntry, Deadlines
from segue.kv.protocol.tombstones import Tombstones

_TO_PREFILL = frozenset({Destination, Committed, Failed, Abort, Gone})
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
        self._local = LocalLeader(role, me, origin, limits, kv_checksum, dp or DpRanks())
        self._transport = transport
        self._machines: dict[TransferId, Machine] = {}
        self._links: dict[LeaderId, PeerLink] = {}
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
        self._tombstones = Tombstones(self._local, self._deadlines, self.counters, self._turn)
        self._handlers: dict[type[Any], Callable[[Any], None]] = {
            OpenSender: self._open_sender,
            OpenReceiver: self._open_receiver,
            Publish: self._of_engine,
            SendChunk: self._of_engine,
            SendMetadata: self._of_engine,
            AbortTransfer: self._abort,
            PeerUp: self._peer_up,
            PeerDown: self._peer_down,
            Received: self._received,
            WriteLanded: self._of_rank,
            WriteBroken: self._of_rank,
            ChecksumReady: self._of_rank,
            FenceDone: self._of_rank,
            Granted: self._of_rank,
            RoomFound: self._tombstones.room_found,
            Tick: self._tick,
        }

    # ---- the face ------------------------------------------------------------------------------

    def handle(self, event: Event, now: float) -> list[Effect]:
        """One event in, its effects out, in order. `now` never decreases between calls."""
        self._turn.now = now
        effects: list[Effect] = []
        self._turn.effects = effects
        self._handlers[type(event)](event)
        return effects

    def next_deadline(self) -> float | None:
        """When to deliver the next `Tick`; None when there is nothing to wait for."""
        return self._deadlines.next()

    def phase(self, transfer: TransferId) -> KVPoll | None:
        """The phase of a transfer, also of one that ended recently; None for an unknown one."""
        machine = self._machines.get(transfer)
        if machine is not None:
            return machine.phase
        ended = self._tombstones.ended.get(transfer)
        return ended.phase if ended is not None and ended.opened else None

    def transfer_of(self, peer: LeaderId, epoch: int) -> TransferId | None:
        """Which live transfer with `peer` writes under `epoch`; None if it is over or never was. Decode's own
        ranks write as well, under its epochs."""
        decode = self._local.me if self._local.role is Role.DECODE else peer
        machine = self._epochs.get((decode, epoch))
        return machine.transfer if machine is not None and peer in (decode, machine.peer) else None

    def open_transfers(self) -> list[TransferId]:
        """The hand-offs that have not ended."""
        return [transfer for transfer, machine in self._machines.items() if not machine.phase.terminal]

    def peers(self) -> set[LeaderId]:
        """The peers of all hand-offs that are not over."""
        return {machine.peer for machine in self._machines.values()}

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
        """How much is in every table; all zero at rest without peers."""
        self._deadlines.next()
        return {
            "transfers": len(self._machines),
            "early": len(self._tombstones.parked),
            "ended": len(self._tombstones.ended),
            "epochs": len(self._epochs),
            "peers": len(self._links),
            "deadlines": len(self._deadlines),
            "quarantined": sum(m.phase is KVPoll.FAILED for m in self._machines.values()),
        }

    def quarantined_pages(self) -> int:
        """Pages of failed hand-offs that wait for a fence (a gauge; looks at every machine)."""
        return sum(m.exposed_pages for m in self._machines.values() if m.phase is KVPoll.FAILED)

    def check_integrity(self) -> None:
        """Look at everything; raises Internal with what is wrong."""
        tables = Tables(self._machines, self._tombstones.parked, self._tombstones.ended, self._epochs)
        found = tables.problems(self._deadlines.live, self._local.limits)
        if found:
            raise Internal("; ".join(found))

    # ---- the engine ----------------------------------------------------------------------------

    def _open_sender(self, event: OpenSender) -> None:
        machine = self._open(event, SenderMachine, Role.PREFILL, event.transfer.decode)
        parked = None if machine is None else self._tombstones.take_parked(event.transfer)
        if machine is not None and parked is not None:
            rest_s = parked.timer.at - self._turn.now
            self._tell(machine, msgspec.structs.replace(parked.destination, budget_s=rest_s))

    def _open_receiver(self, event: OpenReceiver) -> None:
        machine = self._open(event, ReceiverMachine, Role.DECODE, event.transfer.prefill)
        if machine is not None and machine.link is not None:
            self._tell(machine, machine.link)

    def _open(
        self, event: OpenSender | OpenReceiver, kind: type[Machine], role: Role, peer: LeaderId
    ) -> Machine | None:
        """The machine of a new hand-off; None if the peer ended it before it began here."""
        transfer = event.transfer
        self._check_open(transfer, event.prompt_tokens, role)
        if self._tombstones.over_before_it_began(transfer):
            return None
        link = self._links.get(peer)
        machine = kind(
            MachineArgs(
                self._local,
                self._turn,
                self.new_epoch,
                transfer,
                peer,
                link,
                event.prompt_tokens,
                event.deadline,
                isinstance(event, OpenReceiver) and event.inferred,
            )
        )
        self._machines[transfer] = machine
        self._deadlines.add(machine.timer)
        self._turn.emit(Phase(transfer, machine.phase))
        return machine

    def _check_open(self, transfer: TransferId, prompt_tokens: int, role: Role) -> None:
        mine = transfer.prefill if self._local.role is Role.PREFILL else transfer.decode
        if self._local.role is not role or mine != self._local.me:
            raise IllegalEvent(f"{transfer} is not a hand-off of {self._local.origin}", room=transfer.room)
        if prompt_tokens < 1:
            raise IllegalEvent("a hand-off needs at least one prompt token", room=transfer.room)
        ended = self._tombstones.ended.get(transfer)
        if transfer in self._machines or (ended is not None and ended.opened):
            raise InvalidRequest(
                f"room {transfer.room}, attempt {transfer.attempt} was used already; "
                "each request needs a room of its own",
                origin=self._local.origin,
                room=transfer.room,
            )
        if len(self._machines) >= self._local.limits.max_transfers:
            raise OutOfCapacity(
                f"{len(self._machines)} hand-offs are open, as many as limits.max_transfers allows",
                origin=self._local.origin,
                room=transfer.room,
            )

    def new_epoch(self) -> int:
        """A number that this leader has never used for writes to it."""
        self._last_epoch += 1
        return self._last_epoch

    def _of_engine(self, event: Publish | SendChunk | SendMetadata) -> None:
        """Raises IllegalEvent for a hand-off that never was, and for what its machine does not allow. If it
        is over, the engine could not know yet."""
        machine = self._machines.get(event.transfer)
        if machine is None and event.transfer not in self._tombstones.ended:
            raise IllegalEvent(f"{event.transfer} is not open here", room=event.transfer.room)
        if machine is None or machine.phase.terminal:
            self.counters["late_events"] += 1
        else:
            self._run(machine, event)

    def _abort(self, event: AbortTransfer) -> None:
        machine = self._machines.get(event.transfer)
        if machine is not None:
            self._tell(machine, event)

    # ---- our ranks: transport and hash -----------------------------------------------------------

    def _of_rank(self, event: Granted | WriteLanded | WriteBroken | ChecksumReady | FenceDone) -> None:
        machine = self._machines.get(event.transfer)
        if machine is None and isinstance(event, FenceDone):
            return  # the answer to the fence of a success, mostly
        if machine is None or not self._tell(machine, event):
            self.counters["late_events"] += 1

    # ---- the session ---------------------------------------------------------------------------

    def _peer_up(self, event: PeerUp) -> None:
        link = make_link(self._local, event, self._transport)
        self._links[event.peer] = link
        for machine in self._bound_to(event.peer):
            self._tell(machine, link)
        self._tombstones.peer_up(event.peer)

    def _peer_down(self, event: PeerDown) -> None:
        self._links.pop(event.peer, None)
        self._tombstones.peer_down(event.peer, event.error)
        for machine in self._bound_to(event.peer):
            elsewhere = event.over is not None and machine.transport != event.over
            self._tell(machine, replace(event, dead=False) if elsewhere else event)

    def _bound_to(self, peer: LeaderId) -> list[Machine]:
        return [m for m in self._machines.values() if m.peer == peer]

    def _received(self, event: Received) -> None:
        message = event.message
        transfer = message.transfer
        if self._local.role is Role.PREFILL:
            legal, mine, theirs = _TO_PREFILL, transfer.prefill, transfer.decode
        else:
            legal, mine, theirs = _TO_DECODE, transfer.decode, transfer.prefill
        link = self._links.get(event.peer)
        kind = type(message)
        # Not even `Gone` is said for another leader: we can prove nothing about its writes.
        if link is None or kind not in legal or mine != self._local.me or theirs != event.peer:
            self.counters["stray_messages"] += 1
            return
        machine = self._machines.get(transfer)
        if machine is None:
            self._tombstones.received(event, link)
        elif (
            isinstance(message, Destination)
            and self._epochs.get((event.peer, message.epoch), machine) is not machine
        ):
            text = f"decode uses epoch {message.epoch:x} for two hand-offs"
            self._tell(machine, AbortTransfer(transfer, TransferFailed(text).info))
        else:
            self._tell(machine, message)

    # ---- time and the end ----------------------------------------------------------------------

    def _tick(self, event: Tick) -> None:
        while (timer := self._deadlines.pop_due(self._turn.now)) is not None:
            machine = self._machines.get(timer.transfer)
            if machine is not None and machine.timer is timer:
                self._tell(machine, event)
            else:
                self._tombstones.expire(timer)

    def _tell(self, machine: Machine, event: object) -> bool:
        """As `_run`, where an illegal event is nobody's mistake here: False if it is one (by now)."""
        try:
            self._run(machine, event)
        except IllegalEvent:
            return False
        return True

    def _run(self, machine: Machine, event: object) -> None:
        """Give one event to one machine inside its own error boundary, then tidy up after it. Raises
        IllegalEvent alone, and then nothing has changed."""
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
        if machine.ended:
            self._forget(machine)
        elif machine.deadline < machine.timer.at and not machine.phase.terminal:
            self._deadlines.cancel(machine.timer)
            machine.timer = DeadlineEntry(machine.transfer, machine.deadline)
            self._deadlines.add(machine.timer)

    def _forget(self, machine: Machine) -> None:
        del self._machines[machine.transfer]
        if self._epochs.get(key := (machine.transfer.decode, machine.epoch)) is machine:
            del self._epochs[key]
        self._tombstones.add_tombstone(machine)
