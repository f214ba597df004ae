"""Every hand-off of one leader: routes events to machines, keeps time, remembers what is over.

No I/O, no clock: `handle(event, now)` returns the effects that the caller carries out in order. What a
hand-off holds lives in its machine. Here is the table of machines; a transfer that has none (yet, or any
more) is at most in one of the tables of `Tombstones`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from segue.core.errors import Internal, InvalidRequest, OutOfCapacity, SegueError, TransferFailed
from segue.core.limits import Limits
from segue.core.types import ChecksumMode, KVPoll, LeaderId, Role, TransferId
from segue.handoff.events import (
    AbortTransfer,
    ChecksumReady,
    Effect,
    Event,
    FenceDone,
    OpenReceiver,
    OpenSender,
    PeerDown,
    PeerUp,
    Phase,
    Publish,
    Received,
    SendChunk,
    SendMetadata,
    Tick,
    WriteBroken,
    WriteLanded,
)
from segue.handoff.link import LocalLeader, PeerLink, make_link
from segue.handoff.machine import IllegalEvent, Machine, MachineArgs
from segue.handoff.messages import (
    Abort,
    Accepted,
    ChunkPosted,
    Committed,
    Destination,
    Drained,
    Failed,
    Gone,
    LeaderInfo,
    Metadata,
    Moved,
)
from segue.handoff.receiver import ReceiverMachine
from segue.handoff.sender import SenderMachine
from segue.handoff.table_checks import Tables
from segue.handoff.timers import Deadlines, Timer
from segue.handoff.tombstones import Tombstones

_M = TypeVar("_M", bound=Machine)

_TO_PREFILL = frozenset({Destination, Committed, Failed, Abort, Gone})
_TO_DECODE = frozenset({Accepted, Moved, ChunkPosted, Metadata, Failed, Drained, Gone})


class Exchange:
    """All hand-offs of one leader.

    `origin` is how errors that begin here name this side (`prefill 3fa94c01 dp0`). `kv_checksum` is what a
    sender's checksums cover; a receiver verifies whatever it is given. `handle` raises a
    `SegueError` for an illegal local event, and then nothing has changed; everything that a peer
    or the transport does wrong becomes the failure of one hand-off, or a count in `counters`.
    """

    def __init__(
        self,
        role: Role,
        me: LeaderId,
        origin: str,
        limits: Limits,
        info: LeaderInfo,
        transport: str = "",
        kv_checksum: ChecksumMode = ChecksumMode.OFF,
    ) -> None:
        if role not in (Role.PREFILL, Role.DECODE):
            raise IllegalEvent(f"a {role} has no hand-offs")
        self._local = LocalLeader(role, me, origin, limits, info, kv_checksum)
        self._transport = transport
        self._machines: dict[TransferId, Machine] = {}
        self._links: dict[LeaderId, PeerLink] = {}
        # The transport speaks of epochs; an entry lives as long as its machine.
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
        self._tombstones = Tombstones(self._local, self._deadlines, self.counters)
        self._handlers: dict[type[Any], Callable[[Any, float, list[Effect]], None]] = {
            OpenSender: self._open_sender,
            OpenReceiver: self._open_receiver,
            Publish: self._publish,
            SendChunk: self._send_chunk,
            SendMetadata: self._send_metadata,
            AbortTransfer: self._abort,
            PeerUp: self._peer_up,
            PeerDown: self._peer_down,
            Received: self._received,
            WriteLanded: self._write_landed,
            WriteBroken: self._write_broken,
            ChecksumReady: self._checksum_ready,
            FenceDone: self._fence_done,
            Tick: self._tick,
        }

    # ---- the face ------------------------------------------------------------------------------

    def handle(self, event: Event, now: float) -> list[Effect]:
        """One event in, its effects out, in order. `now` never decreases between calls."""
        out: list[Effect] = []
        self._handlers[type(event)](event, now, out)
        return out

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
        """Which live transfer with `peer` writes under `epoch`; None if it is over or never was."""
        machine = self._epochs.get((peer, epoch))
        return None if machine is None else machine.transfer

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
        }

    def quarantined_pages(self) -> int:
        """Pages of failed hand-offs that wait for a fence (a gauge; looks at every machine)."""
        return sum(m.lease.pages for m in self._machines.values() if m.phase is KVPoll.FAILED)

    def check_integrity(self) -> None:
        """Look at everything; raises Internal with what is wrong."""
        tables = Tables(self._machines, self._tombstones.parked, self._tombstones.ended, self._epochs)
        found = tables.problems(self._deadlines.live, self._local.limits)
        if found:
            raise Internal("; ".join(found))

    # ---- the engine ----------------------------------------------------------------------------

    def _open_sender(self, event: OpenSender, now: float, out: list[Effect]) -> None:
        self._check_open(event.transfer, event.prompt_tokens, Role.PREFILL)
        if self._tombstones.over_before_it_began(event.transfer, out):
            return
        machine = SenderMachine(self._machine_args(event, event.transfer.decode, now))
        self._add(machine, out)
        parked = self._tombstones.take_parked(event.transfer)
        if parked is None:
            return
        link = self._links.get(parked.peer)
        if link is None:
            raise Internal("an early destination outlived its session")
        self._destination(machine, parked.destination, parked.timer.at, link, now, out)

    def _open_receiver(self, event: OpenReceiver, now: float, out: list[Effect]) -> None:
        self._check_open(event.transfer, event.prompt_tokens, Role.DECODE)
        if self._tombstones.over_before_it_began(event.transfer, out):
            return
        machine = ReceiverMachine(self._machine_args(event, event.transfer.prefill, now))
        self._add(machine, out)
        link = self._links.get(machine.peer)
        if link is not None:
            self._run(machine, now, out, machine.peer_up, link)

    def _machine_args(self, event: OpenSender | OpenReceiver, peer: LeaderId, now: float) -> MachineArgs:
        return MachineArgs(self._local, event.transfer, peer, event.prompt_tokens, event.deadline, now)

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

    def _add(self, machine: Machine, out: list[Effect]) -> None:
        self._machines[machine.transfer] = machine
        self._deadlines.add(machine.timer)
        out.append(Phase(machine.transfer, machine.phase))

    def _publish(self, event: Publish, now: float, out: list[Effect]) -> None:
        machine = self._mine(event.transfer, ReceiverMachine)
        if machine is None:
            return
        epoch = self._last_epoch + 1
        self._run(machine, now, out, machine.publish, event, epoch, local=True)
        if machine.epoch == epoch:
            self._last_epoch = epoch

    def _send_chunk(self, event: SendChunk, now: float, out: list[Effect]) -> None:
        machine = self._mine(event.transfer, SenderMachine)
        if machine is not None:
            self._run(machine, now, out, machine.chunk, event, local=True)

    def _send_metadata(self, event: SendMetadata, now: float, out: list[Effect]) -> None:
        machine = self._mine(event.transfer, SenderMachine)
        if machine is not None:
            self._run(machine, now, out, machine.metadata, event, local=True)

    def _abort(self, event: AbortTransfer, now: float, out: list[Effect]) -> None:
        machine = self._machines.get(event.transfer)
        if machine is not None:
            self._run(machine, now, out, machine.fail, machine.fill(event.error, now))

    def _mine(self, transfer: TransferId, kind: type[_M]) -> _M | None:
        """The live machine that an engine's event is for. None if the hand-off is over: the engine
        could not know yet. Raises IllegalEvent for one that never was, or is of the other half."""
        machine = self._machines.get(transfer)
        if isinstance(machine, kind):
            if not machine.phase.terminal:
                return machine
        elif machine is not None or transfer not in self._tombstones.ended:
            raise IllegalEvent(f"{transfer} is not open here", room=transfer.room)
        self.counters["late_events"] += 1
        return None

    # ---- the transport -------------------------------------------------------------------------

    def _write_landed(self, event: WriteLanded, now: float, out: list[Effect]) -> None:
        machine = self._machines.get(event.transfer)
        if not isinstance(machine, SenderMachine) or not self._run(machine, now, out, machine.landed, event):
            self.counters["late_events"] += 1

    def _write_broken(self, event: WriteBroken, now: float, out: list[Effect]) -> None:
        machine = self._machines.get(event.transfer)
        if not isinstance(machine, SenderMachine) or not self._run(machine, now, out, machine.broken, event):
            self.counters["late_events"] += 1

    def _checksum_ready(self, event: ChecksumReady, now: float, out: list[Effect]) -> None:
        machine = self._machines.get(event.transfer)
        if machine is None or not self._run(machine, now, out, machine.checksum_ready, event):
            self.counters["late_events"] += 1

    def _fence_done(self, event: FenceDone, now: float, out: list[Effect]) -> None:
        machine = self._machines.get(event.transfer)
        if machine is None:
            return  # the answer to the fence of a success, mostly
        if not self._run(machine, now, out, machine.fence_done, event.proven):
            self.counters["late_events"] += 1

    # ---- the session ---------------------------------------------------------------------------

    def _peer_up(self, event: PeerUp, now: float, out: list[Effect]) -> None:
        link = make_link(self._local, event, self._transport)
        self._links[event.peer] = link
        for machine in self._bound_to(event.peer):
            self._run(machine, now, out, machine.peer_up, link)
        self._tombstones.peer_up(event.peer, out)

    def _peer_down(self, event: PeerDown, now: float, out: list[Effect]) -> None:
        self._links.pop(event.peer, None)
        self._tombstones.peer_down(event.peer, event.error, now)
        for machine in self._bound_to(event.peer):
            self._run(machine, now, out, machine.peer_down, event.error, event.dead)

    def _bound_to(self, peer: LeaderId) -> list[Machine]:
        return [m for m in self._machines.values() if m.peer == peer]

    def _received(self, event: Received, now: float, out: list[Effect]) -> None:
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
            self._tombstones.received(event, link, now, out)
        elif isinstance(message, Destination) and isinstance(machine, SenderMachine):
            self._destination(machine, message, now + message.budget_s, link, now, out)
        else:
            self._run(machine, now, out, machine.receive, message, link)

    def _destination(
        self,
        machine: SenderMachine,
        message: Destination,
        deadline: float,
        link: PeerLink,
        now: float,
        out: list[Effect],
    ) -> None:
        if self._epochs.get((link.peer, message.epoch), machine) is not machine:
            text = f"decode uses epoch {message.epoch:x} for two hand-offs"
            self._run(machine, now, out, machine.fail, machine.problem(TransferFailed, text, now))
        else:
            self._run(machine, now, out, machine.destination, message, deadline, link)

    # ---- time and the end ----------------------------------------------------------------------

    def _tick(self, event: Tick, now: float, out: list[Effect]) -> None:
        while (timer := self._deadlines.pop_due(now)) is not None:
            machine = self._machines.get(timer.transfer)
            if machine is not None and machine.timer is timer:
                self._run(machine, now, out, machine.expire)
            else:
                self._tombstones.expire(timer)

    def _run(
        self,
        machine: Machine,
        now: float,
        out: list[Effect],
        step: Callable[..., bool | None],
        *args: object,
        local: bool = False,
    ) -> bool | None:
        """Run one step of one machine inside its own error boundary, then tidy up after it."""
        result: bool | None = True
        try:
            result = step(*args, now, out)
        except SegueError as error:
            if local and isinstance(error, IllegalEvent):
                raise
            machine.fail(machine.fill(error.info, now), now, out)
        except Exception as error:  # the boundary of invariant 12: one hand-off fails, no other
            self.counters["internal_errors"] += 1
            text = f"{type(error).__name__} in the hand-off's handler: {error}"
            machine.fail(machine.problem(Internal, text, now), now, out)
            result = self._once_more(machine, now, out, step, args)
        if machine.epoch and (machine.peer, machine.epoch) not in self._epochs:
            self._epochs[machine.peer, machine.epoch] = machine
        if machine.ended:
            self._forget(machine, now)
        elif machine.deadline < machine.timer.at and not machine.phase.terminal:
            self._deadlines.cancel(machine.timer)
            machine.timer = Timer(machine.transfer, machine.deadline)
            self._deadlines.add(machine.timer)
        return result

    def _once_more(
        self,
        machine: Machine,
        now: float,
        out: list[Effect],
        step: Callable[..., bool | None],
        args: tuple[object, ...],
    ) -> bool | None:
        """The event whose handler broke may have been the proof that a failed hand-off's memory waits
        for. A proof comes only once, so the failed machine is shown it again, once."""
        if machine.ended:
            return True
        try:
            return step(*args, now, out)
        except Exception:
            self.counters["internal_errors"] += 1
            return True

    def _forget(self, machine: Machine, now: float) -> None:
        del self._machines[machine.transfer]
        if self._epochs.get((machine.peer, machine.epoch)) is machine:
            del self._epochs[machine.peer, machine.epoch]
        self._tombstones.add_tombstone(machine, now)
