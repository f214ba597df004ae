"""The transfers that have no machine: destinations that came too early, and the tombstones of what is over.

A message for one of them is answered here, and never obeyed. Both tables are bounded, and an entry
stays only until its deadline.
"""

from __future__ import annotations

from dataclasses import dataclass

from segue.kv.errors import ErrorInfo, OutOfCapacity, TransferFailed
from segue.kv.ids import KVPoll, LeaderId, Role, TransferId
from segue.kv.protocol.events import (
    AskRoom,
    Phase,
    Received,
    Release,
    RoomFound,
    RoomSettled,
    Send,
    Turn,
)
from segue.kv.protocol.link import LocalLeader, PeerLink
from segue.kv.protocol.machine import Machine
from segue.kv.protocol.messages import Abort, Committed, Destination, Drained, Failed, Gone, Moved
from segue.kv.protocol.room_ranks import REDIRECT_ON_CONFLICT, dp_rank_conflict
from segue.kv.protocol.timers import DeadlineEntry, Deadlines

#: Messages about something unknown that get no answer, so that two sides never ping-pong.
_UNANSWERED = frozenset({Gone, Drained, Committed})


@dataclass(frozen=True, slots=True)
class ParkedDestination:
    """A parked destination; `timer.at` is its own deadline."""

    peer: LeaderId
    destination: Destination
    timer: DeadlineEntry


@dataclass(slots=True)
class Tombstone:
    """A tombstone. `opened` says whether this side ever had a machine for it; `ended_by_peer`, that the
    peer need not be told of the end."""

    phase: KVPoll
    error: ErrorInfo | None
    timer: DeadlineEntry
    opened: bool
    ended_by_peer: bool


class Tombstones:
    """What an exchange knows of transfers without a machine. A transfer is in at most one of its tables.

    `deadlines`, `counters` and `turn` are the exchange's own.
    """

    def __init__(
        self, local: LocalLeader, deadlines: Deadlines, counters: dict[str, int], turn: Turn
    ) -> None:
        self._local = local
        self._turn = turn
        self._deadlines = deadlines
        self._counters = counters
        self.parked: dict[TransferId, ParkedDestination] = {}
        self.ended: dict[TransferId, Tombstone] = {}

    # ---- the beginning of a machine --------------------------------------------------------------

    def take_parked(self, transfer: TransferId) -> ParkedDestination | None:
        """The destination that came before this sender was opened, if one did."""
        parked = self.parked.pop(transfer, None)
        if parked is not None:
            self._deadlines.cancel(parked.timer)
            self._settled(parked)
        return parked

    def _settled(self, parked: ParkedDestination) -> None:
        if parked.destination.inferred:
            self._turn.emit(RoomSettled(parked.destination.transfer))

    def over_before_it_began(self, transfer: TransferId) -> bool:
        """True if the peer ended this hand-off before we opened it: it fails at once."""
        ended = self.ended.get(transfer)
        if ended is None:
            return False
        ended.opened = True
        self._turn.emit(Phase(transfer, KVPoll.BOOTSTRAPPING))
        self._turn.emit(Phase(transfer, KVPoll.FAILED, error=ended.error))
        self._turn.emit(Release(transfer))
        return True

    # ---- the session -----------------------------------------------------------------------------

    def received(self, event: Received, link: PeerLink) -> None:
        """A legal message of a peer whose session is up, for a transfer without a machine."""
        message = event.message
        if message.transfer in self.parked:
            self._received_parked(event)
        elif isinstance(message, Destination) and message.transfer not in self.ended:
            self._park(message, link)
        else:
            self._received_unknown(event)

    def _park(self, message: Destination, link: PeerLink) -> None:
        limits = self._local.limits
        if len(self.parked) >= limits.max_early_destinations:
            self._counters["early_refused"] += 1
            text = (
                f"{len(self.parked)} destinations wait for requests that prefill has not seen, as many as "
                "limits.max_early_destinations allows"
            )
            error = self._record(OutOfCapacity(text).info, message.transfer, link.peer)
            # If the request comes after all, it fails at once for the same reason.
            self._add_unopened(message.transfer, error, self._turn.now + limits.request_budget_s)
            self._turn.emit(Send(link.peer, Failed(message.transfer, error)))
            return
        # A NaN from the wire must not get into the heap: it compares as false with everything.
        budget_s = message.budget_s if message.budget_s > 0 else 0.0
        timer = DeadlineEntry(message.transfer, self._turn.now + min(budget_s, limits.request_budget_s))
        self.parked[message.transfer] = ParkedDestination(link.peer, message, timer)
        self._deadlines.add(timer)
        if message.inferred:
            self._turn.emit(AskRoom(message.transfer, timer.at - self._turn.now))

    def room_found(self, event: RoomFound) -> None:
        """The request that a destination waits for is on another rank of our instance: decode is sent there,
        or its half ends as that rank's has (`DpRanks.on_conflict`)."""
        parked, transfer = self.parked.get(event.transfer), event.transfer
        if parked is None or event.dp_rank == self._local.me.dp_rank:
            return
        found = dp_rank_conflict(transfer.room, event.dp_rank, self._local.me.dp_rank)
        error = self._record(found.info, transfer, parked.peer)
        self._end_parked(transfer, error)
        moved = self._local.dp.on_conflict == REDIRECT_ON_CONFLICT
        word = Moved(transfer, event.dp_rank) if moved else Failed(transfer, error)
        self._turn.emit(Send(parked.peer, word))

    def _received_parked(self, event: Received) -> None:
        message, transfer = event.message, event.message.transfer
        if isinstance(message, (Failed, Abort)):
            error = message.error if isinstance(message, Failed) else self._aborted(transfer, event.peer)
            self._end_parked(transfer, error)
            self._turn.emit(Send(event.peer, Drained(transfer)))
        elif isinstance(message, Gone):
            self._end_parked(transfer, self._aborted(transfer, event.peer))
        else:
            self._counters["repeats"] += 1

    def _received_unknown(self, event: Received) -> None:
        """A message for a hand-off that is over, or that is not open yet."""
        message, transfer = event.message, event.message.transfer
        if isinstance(message, (Failed, Abort)) and transfer not in self.ended:
            # If our half is still to come, it must not wait for a peer that has given up.
            error = message.error if isinstance(message, Failed) else self._aborted(transfer, event.peer)
            until = self._turn.now + self._local.limits.request_budget_s
            self._add_unopened(transfer, error, until)
        if type(message) in _UNANSWERED:
            return
        ended = self.ended.get(transfer)
        if isinstance(message, Destination) and ended is not None and ended.error is not None:
            self._turn.emit(Send(event.peer, Failed(transfer, ended.error)))
        self._counters["gone_answers"] += 1
        self._turn.emit(Send(event.peer, Gone(transfer)))

    def peer_up(self, peer: LeaderId) -> None:
        """A failure while there was no session must not stay one-way: the peer's half may be waiting,
        or still to come."""
        for transfer, ended in self.ended.items():
            other = transfer.decode if self._local.role is Role.PREFILL else transfer.prefill
            if ended.error is not None and not ended.ended_by_peer and other == peer:
                self._turn.emit(Send(peer, Failed(transfer, ended.error)))

    def peer_down(self, peer: LeaderId, error: ErrorInfo) -> None:
        """The session ended: what came early over it is void."""
        for transfer in [t for t, parked in self.parked.items() if parked.peer == peer]:
            self._end_parked(transfer, self._record(error, transfer, peer))

    def _end_parked(self, transfer: TransferId, error: ErrorInfo) -> None:
        parked = self.parked.pop(transfer)
        self._deadlines.cancel(parked.timer)
        self._settled(parked)
        self._add_unopened(transfer, error, parked.timer.at)

    def _aborted(self, transfer: TransferId, peer: LeaderId) -> ErrorInfo:
        text = "the peer ended this hand-off before it began here"
        return self._record(TransferFailed(text).info, transfer, peer)

    def _record(self, error: ErrorInfo, transfer: TransferId, peer: LeaderId) -> ErrorInfo:
        name = self._local.name_of(peer)
        where = {"phase": KVPoll.BOOTSTRAPPING.name, "origin": self._local.origin, "peer": name}
        return error.exception().at(room=transfer.room, **where).info

    # ---- tombstones ------------------------------------------------------------------------------

    def add_tombstone(self, machine: Machine) -> None:
        """Remember a machine that has ended."""
        ended = Tombstone(
            machine.phase, machine.error, machine.timer, opened=True, ended_by_peer=machine.ended_by_peer
        )
        self._add(machine.transfer, ended, machine.deadline)

    def _add_unopened(self, transfer: TransferId, error: ErrorInfo, until: float) -> None:
        timer = DeadlineEntry(transfer, until)
        self._deadlines.add(timer)
        self._add(transfer, Tombstone(KVPoll.FAILED, error, timer, opened=False, ended_by_peer=True), until)

    def _add(self, transfer: TransferId, ended: Tombstone, until: float) -> None:
        """Leave a tombstone until the transfer's deadline, and long enough that what is still under way
        meets it; the oldest goes when there are too many."""
        until = max(until, self._turn.now + self._local.limits.peer_silence_s)
        if not ended.timer.live or ended.timer.at < until:
            self._deadlines.cancel(ended.timer)
            ended.timer = DeadlineEntry(transfer, until)
            self._deadlines.add(ended.timer)
        self.ended[transfer] = ended
        if len(self.ended) > self._local.limits.max_transfers:
            oldest = next(iter(self.ended))
            self._deadlines.cancel(self.ended.pop(oldest).timer)

    def expire(self, timer: DeadlineEntry) -> None:
        """The timer of an entry has run out, or one that no entry has any more."""
        parked, ended = self.parked.get(timer.transfer), self.ended.get(timer.transfer)
        if parked is not None and parked.timer is timer:
            del self.parked[timer.transfer]
            self._settled(parked)
        elif ended is not None and ended.timer is timer:
            del self.ended[timer.transfer]
