"""The hand-offs that are over: a message for one of them is answered here, and never obeyed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from segue.kv.errors import ErrorInfo, TransferFailed
from segue.kv.ids import KVPoll, LeaderId, Role, TransferId
from segue.kv.protocol.events import Received, Send, Turn
from segue.kv.protocol.link import LocalLeader
from segue.kv.protocol.machine import Machine
from segue.kv.protocol.messages import Abort, Committed, Declined, Destination, Drained, Failed, Gone
from segue.kv.protocol.timers import DeadlineEntry, Deadlines

#: Messages about something unknown that get no answer, so that two sides never ping-pong.
_UNANSWERED = frozenset({Gone, Drained, Committed, Declined})
#: The part of the table that is kept for leaders that no registry lists.
_STRANGERS = 1 / 8


@dataclass(slots=True)
class Tombstone:
    """`opened`: this side had a machine for it. `ended_by_peer`: the peer need not be told of the end.
    `declined`, on decode: it is told so with this claim, for its room was not placed for us. `share`: its
    entry in the table by peer."""

    phase: KVPoll
    error: ErrorInfo | None
    timer: DeadlineEntry
    opened: bool
    ended_by_peer: bool
    declined: bytes | None = None
    share: LeaderId | None = None


class Tombstones:
    """At most `limits.max_transfers` hand-offs that are over, each until its deadline and for at least
    `limits.peer_silence_s`. `deadlines`, `counters` and `turn` are the exchange's own; `known` says whether a
    leader has a session or is in the registry."""

    def __init__(
        self,
        local: LocalLeader,
        deadlines: Deadlines,
        counters: dict[str, int],
        turn: Turn,
        known: Callable[[LeaderId], bool],
    ) -> None:
        self._local = local
        self._turn = turn
        self._deadlines = deadlines
        self._counters = counters
        self._known = known
        self.ended: dict[TransferId, Tombstone] = {}
        #: the same by peer, the oldest first; all unknown leaders share one entry
        self._of: dict[LeaderId | None, dict[TransferId, None]] = {}

    def received(self, event: Received) -> None:
        """A legal message of a peer whose session is up, for a hand-off without a machine."""
        message, transfer = event.message, event.message.transfer
        ended = self.ended.get(transfer)
        if isinstance(message, (Failed, Abort)) and ended is None:
            # If our half is still to come, it must not wait for a peer that has given up.
            self.add_unopened(transfer, self.error_of(message, event.peer), ended_by_peer=True)
        if type(message) in _UNANSWERED:
            return
        if isinstance(message, Destination) and ended is not None and ended.error is not None:
            self._turn.emit(Send(event.peer, Failed(transfer, ended.error)))
        if isinstance(message, (Failed, Abort)) and ended is not None and ended.phase is KVPoll.SUCCESS:
            # The session may have lost it, and prefill may be asking for it (handoff rule 4).
            self._turn.emit(Send(event.peer, Committed(transfer)))
        self._counters["gone_answers"] += 1
        self._turn.emit(Send(event.peer, Gone(transfer)))

    def peer_up(self, peer: LeaderId) -> None:
        """A failure while there was no session must not stay one-way: the peer's half may be waiting,
        or still to come."""
        unknown = (transfer for transfer in self._of.get(None, ()) if self._peer_of(transfer) == peer)
        for transfer in [*self._of.get(peer, ()), *unknown]:
            ended = self.ended[transfer]
            if ended.error is None or ended.ended_by_peer:
                continue
            if ended.declined is None:
                self._turn.emit(Send(peer, Failed(transfer, ended.error)))
            else:
                self._turn.emit(Send(peer, Declined(transfer, ended.error, ended.declined)))

    def error_of(self, message: Failed | Abort | Gone, peer: LeaderId) -> ErrorInfo:
        """Why the peer ended a hand-off that has not begun here."""
        if isinstance(message, Failed):
            return message.error
        text = "the peer ended this hand-off before it began here"
        return self.record(TransferFailed(text).info, message.transfer.room, peer)

    def record(self, error: ErrorInfo, room: int, peer: LeaderId | None) -> ErrorInfo:
        """`error` of a hand-off that has not begun here, with its empty fields filled in."""
        name = "" if peer is None else self._local.name_of(peer)
        where = {"phase": KVPoll.BOOTSTRAPPING.name, "origin": self._local.origin, "peer": name}
        return error.exception().at(room=room, **where).info

    def add_tombstone(self, machine: Machine) -> None:
        """Remember a machine that has ended."""
        about = (machine.phase, machine.error, machine.timer, True, machine.ended_by_peer)
        met = machine.transport != ""  # chosen when a session was there
        self._add(machine.transfer, Tombstone(*about, machine.declined), machine.deadline, met=met)

    def add_unopened(
        self,
        transfer: TransferId,
        error: ErrorInfo,
        *,
        ended_by_peer: bool,
        until: float | None = None,
        declined: bytes | None = None,
    ) -> None:
        """Remember a hand-off that failed with `error` before it had a machine here."""
        until = self._turn.now + self._local.limits.request_budget_s if until is None else until
        timer = DeadlineEntry(until, lambda _: self._expired(transfer))
        self._deadlines.add(timer)
        tombstone = Tombstone(KVPoll.FAILED, error, timer, False, ended_by_peer, declined)
        self._add(transfer, tombstone, until)

    def _add(self, transfer: TransferId, tombstone: Tombstone, until: float, *, met: bool = False) -> None:
        """Leave a tombstone until the transfer's deadline, and long enough that what is still under way
        meets it. When there are too many, the oldest goes of the peer that has most: one peer's words cannot
        displace the tombstones of the others. Clients can make up any number of leaders: those that are
        unknown and were not `met` have `_STRANGERS` of the table together. They may use what is free of the
        rest, and go first when it is needed."""
        until = max(until, self._turn.now + self._local.limits.peer_silence_s)
        self._deadlines.cancel(tombstone.timer)
        tombstone.timer = DeadlineEntry(until, lambda _: self._expired(transfer))
        self._deadlines.add(tombstone.timer)
        self._expired(transfer)
        peer = self._peer_of(transfer)
        tombstone.share = peer if met or self._known(peer) else None
        self.ended[transfer] = tombstone
        self._of.setdefault(tombstone.share, {})[transfer] = None
        if len(self.ended) > self._local.limits.max_transfers:
            strangers, known = self._of.get(None, {}), [share for share in self._of if share is not None]
            if len(strangers) <= self._local.limits.max_transfers * _STRANGERS:
                strangers = self._of[max(known, key=lambda share: len(self._of[share]))]
            self._expired(next(iter(strangers)))

    def _peer_of(self, transfer: TransferId) -> LeaderId:
        return transfer.decode if self._local.role is Role.PREFILL else transfer.prefill

    def _expired(self, transfer: TransferId) -> None:
        if (ended := self.ended.pop(transfer, None)) is not None:
            self._deadlines.cancel(ended.timer)
            del self._of[ended.share][transfer]
            if not self._of[ended.share]:
                del self._of[ended.share]
