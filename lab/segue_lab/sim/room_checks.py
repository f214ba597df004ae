"""The rules of rooms (`docs/protocol.md`), seen from outside: what prefill decides about each room, what it
says of it, and what decodes make of that. Each rule that was at work is counted.

A rule's number is that of the list in `RULES`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from segue.kv.errors import ErrorCode
from segue.kv.ids import KVPoll, LeaderId, RankId, RoomKey, TransferId
from segue.kv.protocol import events
from segue.kv.protocol.messages import (
    Abort,
    Accepted,
    Committed,
    Declined,
    Destination,
    Drained,
    Failed,
    Gone,
    Metadata,
    Moved,
)
from segue_lab.sim.node_views import KVView
from segue_lab.sim.rank_checks import Half
from segue_lab.sim.sim_state import SimState
from segue_lab.sim.world import Violation

RULES: dict[int, tuple[str, ...]] = {
    1: ("nobody came", "replayed", "metadata replayed"),
    2: ("another claim refused", "bound after another claim"),
    3: ("refused beside a binding", "placed again"),
    4: ("committed late",),
    5: ("drained", "gone", "moved"),
    6: ("destination of a closed room", "closed room opened again", "refused while it waited"),
    7: ("parked", "bound when opened", "expired"),
    8: ("registry asked", "sent on", "sent on twice", "owned by another rank"),
    9: ("bound after a commit", "evicted", "bound and not evicted", "bindings spent"),
    10: ("closed before its proof",),
    11: ("declined", "no right to decline"),
}
#: Leaders of the simulator have fewer.
MOST_RANKS = 16
#: Messages after which no answer is due.
_ENDS = (Failed, Abort, Gone)


def rule_name(rule: int, what: str) -> str:
    """How the counts call that a rule was at work."""
    assert what in RULES[rule], what
    return f"room rule {rule}: {what}"


@dataclass(slots=True)
class Ledger:
    """One room of one prefill leader."""

    expected: events.ExpectRoom
    closed_at: float | None = None
    live: TransferId | None = None
    #: hand-offs whose machines may still read the pages
    machines: set[TransferId] = field(default_factory=set)
    sent: bool = False
    bindings: int = 0
    failures: int = 0
    commits: int = 0
    wrong: int = 0
    #: the number of tokens whose KV the engine has given, and whether it has given its metadata
    tokens: int = 0
    metadata: bool = False


class RoomChecks:
    """See the module's text. `halves` are those of `Checks`."""

    def __init__(self, state: SimState, halves: Mapping[tuple[LeaderId, TransferId], Half]) -> None:
        self._state = state
        self._world = state.world
        self._halves = halves
        self._counts: Counter[str] = state.counts
        self._rooms: dict[tuple[LeaderId, RoomKey], Ledger] = {}
        #: destinations that wait for an answer
        self._waiting: dict[tuple[LeaderId, RoomKey], dict[TransferId, Destination]] = {}
        #: leaders that have ever come for a room
        self.came: dict[tuple[LeaderId, RoomKey], set[LeaderId]] = {}
        #: the newest destination of each hand-off, as prefill heard it
        self._heard: dict[TransferId, Destination] = {}
        #: hand-offs of which prefill has said that nothing is or will be written, and when
        self._silent: dict[TransferId, float] = {}
        #: hand-offs of each receiver
        self._tries: dict[tuple[LeaderId, RoomKey], list[TransferId]] = {}
        self._open_ranks: dict[tuple[LeaderId, RoomKey], bool] = {}
        #: hand-offs of a room that decodes have committed
        self._committed: dict[tuple[LeaderId, RoomKey], set[TransferId]] = {}

    def _count(self, rule: int, what: str) -> None:
        self._counts[rule_name(rule, what)] += 1

    def _broken(self, rule: int, node: KVView, text: str, room: int) -> Violation:
        return Violation(f"room {rule}", f"{node.name}: {text}", (room,))

    # ---- decode --------------------------------------------------------------------------------------

    def decode(self, node: KVView, event: Any, effects: Sequence[Any]) -> None:
        """Check the decisions of a decode leader."""
        if isinstance(event, events.OpenReceiver):
            self._open_ranks[node.me, event.key] = event.prefill.is_open
            self._tries.pop((node.me, event.key), None)
        for effect in effects:
            match effect:
                case events.AskRoom() if not self._open_ranks.get((node.me, effect.key)):
                    text = "asks the registry for a room whose rank was named"
                    raise self._broken(8, node, text, effect.key.room)
                case events.HandoffPhase(transfer, KVPoll.BOOTSTRAPPING):
                    self._tried(node, transfer)
                case events.HandoffPhase(transfer, KVPoll.SUCCESS):
                    self._commits(node, transfer)
                case events.Redirected(transfer):
                    sent_on = len(self._tries.get((node.me, transfer.received_as), ()))
                    self._count(8, "sent on" if sent_on < 2 else "sent on twice")
                case events.Phase(error=error) if error is not None and "did not come to" in error.text:
                    self._count(7, "expired")
                case _:
                    pass

    def _tried(self, node: KVView, transfer: TransferId) -> None:
        tries = self._tries.setdefault((node.me, transfer.received_as), [])
        tries.append(transfer)
        if len(tries) > 2 or (len(tries) > 1 and not self._open_ranks.get((node.me, transfer.received_as))):
            raise self._broken(8, node, f"its receiver was sent on again: {tries}", transfer.room)

    def _commits(self, node: KVView, transfer: TransferId) -> None:
        """4: a room that is not retained is committed once, as far as decodes live."""
        key = (transfer.prefill, transfer.sent_as)
        ledger = self._rooms.get(key)
        self._committed.setdefault(key, set()).add(transfer)
        living = [t for t in self._committed[key] if self._state.by_leader[t.decode].alive]
        if ledger is not None and ledger.expected.retain_s is None and len(living) > 1:
            raise self._broken(4, node, f"{transfer} is one of two commits", transfer.room)

    def granted_no_more(self, node: KVView, transfer: TransferId, epoch: int) -> None:
        """5: after a failure decode's ranks let nobody write into pages that are used again."""
        writers = [RankId(me, rank) for me in (transfer.prefill, node.me) for rank in range(MOST_RANKS)]
        for (rank, name), transport in node.transports.items():
            if rank not in node.ended_ranks and any((w, epoch) in transport.grants for w in writers):
                text = (
                    f"rank {rank} grants epoch {epoch:x} of {transfer} over {name}, whose pages are released"
                )
                raise self._broken(5, node, text, transfer.room)

    # ---- prefill -------------------------------------------------------------------------------------

    def refused(self, node: KVView, event: Any) -> None:
        """The protocol has refused an event."""
        ledger = self._rooms.get((node.me, event.key)) if isinstance(event, events.ExpectRoom) else None
        if ledger is not None and ledger.closed_at is not None:
            self._count(6, "closed room opened again")

    def prefill(self, node: KVView, event: Any, effects: Sequence[Any]) -> None:
        """Check the decisions of a prefill leader."""
        message = event.message if isinstance(event, events.Received) else None
        if message is not None and event.peer not in node.exchange.links:
            return  # a fault has kept the protocol from hearing of the session
        key: RoomKey | None = message.transfer.sent_as if message is not None else getattr(event, "key", None)
        before = self._rooms.get((node.me, key)) if key is not None else None
        if isinstance(event, events.ExpectRoom):
            before = self._expected(node, event)
        if isinstance(message, Destination):
            self._comes(node, message)
        elif isinstance(message, _ENDS):
            self._waiting.get((node.me, message.transfer.sent_as), {}).pop(message.transfer, None)
        elif isinstance(event, events.SendChunk) and before is not None:
            before.tokens = event.span.end if event.layers is None else before.tokens
        elif isinstance(event, events.SendMetadata) and before is not None:
            before.metadata = True
        elif isinstance(event, events.PlaceRoom) and before is not None:
            before.expected = msgspec.structs.replace(
                before.expected, decode=event.decode, attempt=event.attempt
            )
        closed_at = None if before is None else before.closed_at
        was_closed = closed_at is not None and self._remembers(node, closed_at)
        live = before.live if before is not None else None
        if isinstance(message, Committed) and before is not None:
            self._commits_late(node, message.transfer, before)
        for effect in effects:
            self._look(node, event, effect)
        for effect in effects:
            if isinstance(effect, events.Send) and isinstance(effect.message, Accepted):
                self._replayed(node, effect.message.transfer, effects)
        if message is not None:
            self._after(node, message, effects, before, was_closed=was_closed, live=live)
        elif isinstance(event, events.EndRoom) and before is not None and not was_closed:
            self._evicted(node, event, before, effects)
        elif isinstance(event, events.ExpectRoom) and before is not None:
            self._opened(node, event, before)
        elif isinstance(event, events.RefuseRoom) and (before is None or (closed_at and not was_closed)):
            self._refused(node, event, effects)
        if before is not None and before.closed_at is not None and closed_at is None and before.machines:
            self._count(10, "closed before its proof")

    def _refused(self, node: KVView, event: events.RefuseRoom, effects: Sequence[Any]) -> None:
        """6: a room that its engine refuses is closed from then on; what waits for it hears the reason."""
        expected = events.ExpectRoom(key=event.key, prompt_tokens=1, deadline=event.deadline)
        self._rooms[node.me, event.key] = Ledger(expected, closed_at=self._world.now)
        if left := self._waiting.get((node.me, event.key)):
            text = f"{list(left)} wait on for room {event.key}, which is refused"
            raise self._broken(6, node, text, event.key.room)
        for effect in effects:
            if isinstance(effect, events.Send) and isinstance(effect.message, Failed):
                self._count(6, "refused while it waited")
                if effect.message.error.code is not event.error.code:
                    text = f"room {event.key} is refused with {event.error.code}, and says {effect.message}"
                    raise self._broken(6, node, text, event.key.room)

    def _commits_late(self, node: KVView, transfer: TransferId, ledger: Ledger) -> None:
        """4: a commit counts after its binding has failed, if decode has really committed and the placer has
        not given the room to another attempt."""
        room = node.exchange.rooms.rooms.get(transfer.sent_as)
        success = None if room is None else room.success
        if success is None or success.transfer != transfer or ledger.live == transfer:
            return
        if transfer.attempt < ledger.expected.attempt:
            raise self._broken(4, node, f"{transfer} is taken, and was replaced", transfer.room)
        if transfer not in self._committed.get((node.me, transfer.sent_as), ()):
            raise self._broken(4, node, f"{transfer} is taken, and has not committed", transfer.room)
        if not ledger.commits:
            ledger.commits += 1
            self._count(4, "committed late")

    def _expected(self, node: KVView, event: events.ExpectRoom) -> Ledger:
        """6: not while the last room of this key is remembered."""
        key = (node.me, event.key)
        last = self._rooms.get(key)
        if last is not None and (last.closed_at is None or self._remembers(node, last.closed_at)):
            raise self._broken(6, node, f"room {event.key} is opened again", event.key.room)
        self._rooms[key] = Ledger(event)
        self._committed.pop(key, None)
        return self._rooms[key]

    def _remembers(self, node: KVView, since: float) -> bool:
        """Whether a tombstone that was made `since` must still be there."""
        return self._world.now < since + 0.85 * self._state.timing.silence_s and node.jumped_at < since

    def _comes(self, node: KVView, message: Destination) -> None:
        transfer = message.transfer
        key = (node.me, transfer.sent_as)
        self.came.setdefault(key, set()).add(transfer.decode)
        self._heard.setdefault(transfer, message)
        ended = self._halves.get((node.me, transfer))
        if ended is None and transfer not in self._silent and transfer.prefill == node.me:
            self._waiting.setdefault(key, {}).setdefault(transfer, message)

    def _look(self, node: KVView, event: Any, effect: Any) -> None:
        match effect:
            case events.Send(message=Accepted(transfer)):
                self._binds(node, transfer)
            case events.Send(message=(Gone() | Moved() | Drained()) as message):
                self._proof(node, message)
            case events.Send(message=Failed(transfer)):
                self._waiting.get((node.me, transfer.sent_as), {}).pop(transfer, None)
            case events.PostWrite(transfer):
                ledger = self._rooms.get((node.me, transfer.sent_as))
                if transfer in self._silent or ledger is None or ledger.live != transfer:
                    raise self._broken(
                        5, node, f"{transfer} is written, and it has no binding", transfer.room
                    )
                ledger.sent = True
            case events.HandoffPhase(transfer, phase, error) if phase.terminal:
                self._ends(node, event, transfer, phase)
            case events.HandoffReleased(transfer):
                self._rooms[node.me, transfer.sent_as].machines.discard(transfer)
            case events.Phase(key, phase, error) if phase.terminal:
                self._closes(node, event, key, phase, error)
            case events.Release(key):
                ledger = self._rooms.get((node.me, key))
                if ledger is not None and ledger.machines:
                    text = f"room {key} is released, and {ledger.machines} may read its pages"
                    raise self._broken(10, node, text, key.room)
            case events.AskRoom(key):
                self._count(8, "registry asked")
                if not any(m.inferred for m in self._waiting.get((node.me, key), {}).values()):
                    text = f"asks for room {key}, of which no decode has inferred the rank"
                    raise self._broken(8, node, text, key.room)
            case _:
                pass

    def _binds(self, node: KVView, transfer: TransferId) -> None:
        room, key = transfer.room, (node.me, transfer.sent_as)
        message, ledger = self._heard.get(transfer), self._rooms.get(key)
        self._waiting.get(key, {}).pop(transfer, None)
        if message is None or ledger is None or ledger.closed_at is not None:
            raise self._broken(6, node, f"{transfer} binds a room that is not open", room)
        expected = ledger.expected
        if message.claim != expected.claim:
            raise self._broken(2, node, f"{transfer} binds with another claim", room)
        if expected.decode not in (None, transfer.decode):
            raise self._broken(3, node, f"{transfer} binds a room of {expected.decode}", room)
        if ledger.live is not None:
            raise self._broken(3, node, f"{transfer} binds beside {ledger.live}", room)
        if ledger.commits and not expected.retain_s:
            raise self._broken(9, node, f"{transfer} binds a room that is committed", room)
        if transfer in self._silent:
            raise self._broken(5, node, f"{transfer} binds, of which it was said that it is gone", room)
        if ledger.failures >= node.limits.max_bindings:
            raise self._broken(9, node, f"{transfer} binds after {ledger.failures} failures", room)
        if ledger.bindings:
            self._count(1, "replayed")
        if ledger.wrong:
            self._count(2, "bound after another claim")
        if ledger.commits:
            self._count(9, "bound after a commit")
        ledger.live, ledger.sent = transfer, False
        ledger.bindings += 1
        ledger.machines.add(transfer)

    def _replayed(self, node: KVView, transfer: TransferId, effects: Sequence[Any]) -> None:
        """1: a binding gets what the engine gave before, if it has not ended at once."""
        ledger, prefix = self._rooms[node.me, transfer.sent_as], self._heard[transfer].prefix_tokens
        if ledger.live != transfer:
            return
        sent = {
            type(e.message) for e in effects if isinstance(e, events.Send) and e.message.transfer == transfer
        }
        posted = any(isinstance(e, events.PostWrite) and e.transfer == transfer for e in effects)
        if ledger.metadata and Metadata not in sent:
            raise self._broken(1, node, f"{transfer} binds, and is not given the metadata", transfer.room)
        if ledger.tokens > prefix and not posted:
            raise self._broken(
                1, node, f"{transfer} binds, and is not given {ledger.tokens} tokens", transfer.room
            )
        if ledger.bindings > 1 and ledger.metadata:
            self._count(1, "metadata replayed")

    def _proof(self, node: KVView, message: Gone | Moved | Drained) -> None:
        """5: nothing is written, and nothing will be."""
        transfer = message.transfer
        self._count(5, type(message).__name__.lower())
        self._waiting.get((node.me, transfer.sent_as), {}).pop(transfer, None)
        ledger = self._rooms.get((node.me, transfer.sent_as))
        if not isinstance(message, Drained):
            if ledger is not None and transfer in ledger.machines:
                raise self._broken(5, node, f"{message} while its machine may write", transfer.room)
            if isinstance(message, Moved) and transfer in self._silent:
                raise self._broken(5, node, f"{message} after it was said to be gone", transfer.room)
        self._silent[transfer] = self._world.now

    def _ends(self, node: KVView, event: Any, transfer: TransferId, phase: KVPoll) -> None:
        ledger = self._rooms[node.me, transfer.sent_as]
        if phase is KVPoll.SUCCESS:
            ledger.commits += 1
        else:
            ledger.failures += 1
        if ledger.live != transfer:
            return
        ledger.live = None
        if isinstance(event, events.PlaceRoom):
            self._count(3, "placed again")
        elif isinstance(event, events.Received) and event.message.transfer != transfer:
            raise self._broken(3, node, f"{transfer} ends by {event.message}", transfer.room)

    def _closes(self, node: KVView, event: Any, key: RoomKey, phase: KVPoll, error: Any) -> None:
        ledger = self._rooms.get((node.me, key))
        if ledger is None or ledger.closed_at is not None:
            return  # it was refused
        ledger.closed_at = self._world.now
        message = event.message if isinstance(event, events.Received) else None
        if phase is KVPoll.FAILED and (error is None or not error.origin or not error.phase):
            raise Violation("25", f"room {key} fails without origin or phase: {error}", (key.room,))
        if (phase is KVPoll.SUCCESS) != bool(ledger.commits):
            raise self._broken(
                9, node, f"room {key} ends with {phase.name}, commits: {ledger.commits}", key.room
            )
        if isinstance(message, Destination) and message.claim != ledger.expected.claim:
            raise self._broken(2, node, f"another claim ends room {key}", key.room)
        if isinstance(message, _ENDS) and (heard := self._heard.get(message.transfer)) is not None:
            placed = TransferId(key.room, ledger.expected.attempt, node.me, message.transfer.decode)
            if heard.claim != ledger.expected.claim and placed.attempt != message.transfer.attempt:
                raise self._broken(2, node, f"the end of another claim ends room {key}", key.room)
        if isinstance(event, events.Tick) and not ledger.bindings:
            if error is None or error.code is not ErrorCode.BOOTSTRAP_TIMEOUT:
                raise self._broken(1, node, f"nobody came for room {key}, and it ends with {error}", key.room)
            self._count(1, "nobody came")
        if ledger.failures >= node.limits.max_bindings and ledger.expected.retain_s is not None:
            self._count(9, "bindings spent")
        if error is not None and error.code is ErrorCode.DP_RANK_CONFLICT:
            self._count(8, "owned by another rank")

    def _after(
        self,
        node: KVView,
        message: Any,
        effects: Sequence[Any],
        ledger: Ledger | None,
        *,
        was_closed: bool,
        live: TransferId | None,
    ) -> None:
        transfer = message.transfer
        if isinstance(message, Declined) and ledger is not None:
            self._declined(node, message, ledger, effects, was_closed=was_closed, live=live)
        if not isinstance(message, Destination) or transfer.prefill != node.me:
            return  # a message with another leader's name (injected) gets no answer
        replies = [
            e.message for e in effects if isinstance(e, events.Send) and e.message.transfer == transfer
        ]
        kinds = {type(reply) for reply in replies}
        if was_closed and ledger is not None and transfer not in ledger.machines:
            self._count(6, "destination of a closed room")
            if Gone not in kinds or kinds - {Gone, Failed}:
                raise self._broken(
                    6, node, f"{message} of a closed room is answered {replies}", transfer.room
                )
        elif ledger is None and not replies:
            self._count(7, "parked")
        elif ledger is not None and Failed in kinds and not was_closed:
            if message.claim != ledger.expected.claim:
                ledger.wrong += 1
                self._count(2, "another claim refused")
            elif live is not None and live != transfer:
                self._count(3, "refused beside a binding")
        if Failed in kinds and Gone not in kinds and Accepted not in kinds and transfer != live:
            raise self._broken(
                5, node, f"{message} was refused, and it was not said to be gone", transfer.room
            )

    def _declined(
        self,
        node: KVView,
        message: Declined,
        ledger: Ledger,
        effects: Sequence[Any],
        *,
        was_closed: bool,
        live: TransferId | None,
    ) -> None:
        """11: only the placed decode ends it, with the claim, and only while nobody has it; if nobody is
        placed, any decode, and without a claim, too."""
        expected, transfer = ledger.expected, message.transfer
        ends = any(isinstance(e, events.Phase) and e.phase.terminal for e in effects)
        placed = expected.decode in (None, transfer.decode)
        known = message.claim == expected.claim or (expected.decode is None and not message.claim)
        if ends and (not placed or not known or live is not None):
            raise self._broken(11, node, f"{message} ended a room that was not its own", transfer.room)
        if not was_closed:
            self._count(11, "declined" if ends else "no right to decline")

    def _evicted(self, node: KVView, event: events.EndRoom, ledger: Ledger, effects: Sequence[Any]) -> None:
        """9: only pages that nobody has a binding for are taken back."""
        if event.unbound_s is None:
            return
        if ledger.live is not None or ledger.commits:
            self._count(9, "bound and not evicted")
            if effects:
                raise self._broken(9, node, f"room {event.key} was bound, and is evicted", event.key.room)
        else:
            self._count(9, "evicted")
            if ledger.closed_at is None and not event.unbound_s:
                raise self._broken(9, node, f"room {event.key} is not evicted", event.key.room)

    def _opened(self, node: KVView, event: events.ExpectRoom, ledger: Ledger) -> None:
        """7: what waited for the room has an answer, unless it waits for the placer."""
        waiting = self._waiting.get((node.me, event.key), {}).values()
        left = [m for m in waiting if m.transfer.attempt <= event.attempt or event.retain_s is None]
        if ledger.bindings:
            self._count(7, "bound when opened")
        if left and ledger.closed_at is None and ledger.live is None:
            raise self._broken(7, node, f"{left[0]} waits on for room {event.key}", event.key.room)

    def parked_of(self, node: KVView, peer: LeaderId) -> None:
        """The session to `peer` has ended: what it waits for is void."""
        for (me, _), waiting in self._waiting.items():
            if me == node.me:
                for transfer in [t for t in waiting if t.decode == peer]:
                    del waiting[transfer]
