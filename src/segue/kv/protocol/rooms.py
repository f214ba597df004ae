"""Prefill's rooms: an engine opens one for a request before it knows decode; a destination binds it.

`TABLE` has the handler of each message of decode in each state of a room. `UNKNOWN` and `PARKED` come before
the engine's `ExpectRoom`, `CLOSED` after its one terminal event.

- A destination binds a room if it passes every check (`_bind`: leader, claim, session, copy plan, pages). A
destination that fails a check leaves the room open, and gets `Failed` and `Gone`.
- A room has one live binding, and another destination is refused (retryable).
- The room keeps what its engine sent and gives it to each binding (`_replay`): all spans with the newest
  pages, and the metadata.
- Without `retain_s` the room ends with its first binding. Otherwise it outlives failures, fewer than
  `Limits.max_bindings`, and the first success by `retain_s`.
- Words of the decode that a room is placed for, which no other attempt can mend (`retryable`), end it.
- The placer may give a retained room to a later attempt (`PlaceRoom`). The attempts before it end then. A
  destination of a later attempt at a placed, retained room waits for that.
- `Gone` and `Moved` are a proof that nothing is written: the tombstone of a hand-off without a machine comes
  before the answer.

Pages belong to the engine again (`Release`) once the room is closed and every machine that it had has let go
of them.
"""

from __future__ import annotations

import enum
import hmac
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from msgspec.structs import replace

from segue.kv.errors import (
    BootstrapTimeout,
    DeadlineExceeded,
    ErrorCode,
    ErrorInfo,
    Internal,
    InvalidRequest,
    MetadataMismatch,
    OutOfCapacity,
    PeerRefused,
    SegueError,
    TransferFailed,
)
from segue.kv.ids import KVPoll, LeaderId, RoomKey, Span, TransferId
from segue.kv.protocol.events import (
    AbortTransfer,
    AskRoom,
    EndRoom,
    ExpectRoom,
    HandoffPhase,
    PeerDown,
    Phase,
    PlaceRoom,
    Received,
    RefuseRoom,
    RegisterRoom,
    Release,
    RoomFound,
    RoomSettled,
    RoomUnknown,
    Send,
    SendChunk,
    SendMetadata,
    Turn,
)
from segue.kv.protocol.link import LocalLeader
from segue.kv.protocol.machine import IllegalEvent, Machine, MachineArgs
from segue.kv.protocol.messages import (
    MAX_CLAIM_BYTES,
    Abort,
    Committed,
    Declined,
    Destination,
    Drained,
    Failed,
    Gone,
    HandoffMessage,
    Moved,
)
from segue.kv.protocol.room_ranks import REDIRECT_ON_CONFLICT, dp_rank_conflict
from segue.kv.protocol.sender import SenderMachine
from segue.kv.protocol.timers import DeadlineEntry, Deadlines
from segue.kv.protocol.tombstones import Tombstones
from segue.kv.ready import ReadyEvent

#: After these, what prefill computed is not to be trusted: no other decode may bind the room.
_DOUBTFUL = frozenset({ErrorCode.CHECKSUM_MISMATCH, ErrorCode.METADATA_MISMATCH, ErrorCode.INTERNAL})


class RoomState(enum.StrEnum):
    """`PARKED`: destinations wait for the engine. `EXPECTED`: the engine waits for one; also between two
    bindings. `CLOSED` is a tombstone."""

    UNKNOWN = "UNKNOWN"
    PARKED = "PARKED"
    EXPECTED = "EXPECTED"
    BOUND = "BOUND"
    CLOSED = "CLOSED"


_S = RoomState
Word = TypeVar("Word", Destination, Declined)


class MachineHost(Protocol):
    """The exchange, as rooms and receivers use it."""

    def args(
        self, transfer: TransferId, peer: LeaderId, prompt_tokens: int, deadline: float
    ) -> MachineArgs: ...
    def add(self, machine: Machine, owner: Any) -> None: ...
    def run(self, machine: Machine, event: object) -> None: ...
    def tell(self, machine: Machine, event: object) -> bool: ...
    def epoch_owner(self, decode: LeaderId, epoch: int) -> Machine | None: ...
    def linked(self, peer: LeaderId) -> bool: ...


@dataclass(slots=True, eq=False)
class Parked(Generic[Word]):
    """A waiting message of decode. It waits until `timer.at`; its hand-off has time until `until`."""

    peer: LeaderId
    message: Word
    timer: DeadlineEntry
    until: float

    @property
    def pages(self) -> int:
        """The number of page ids in the message."""
        return len(self.message.pages) if isinstance(self.message, Destination) else 0


AnyParked = Parked[Destination] | Parked[Declined]


@dataclass(slots=True)
class Room:
    """One request's prefill half, as its engine knows it. `pages` and `slot` are the newest that the engine
    named, `spans` its whole chunks and when each is complete, `partial` the layers of the chunk after them.
    From the engine's request on `timer` is due at `until`; before that each parked message has a timer."""

    key: RoomKey
    state: RoomState = _S.PARKED
    until: float = 0.0
    timer: DeadlineEntry | None = None
    parked: dict[TransferId, Parked[Destination]] = field(default_factory=dict)
    declined: dict[TransferId, Parked[Declined]] = field(default_factory=dict)
    #: the registry is asked for the room's DP rank; only while the room is parked
    asked: bool = False
    expected: ExpectRoom | None = None
    opened_at: float = 0.0
    #: since when nobody has it bound, or it waits for the decode that the placer has named last, or that has
    #: come before the placer's word
    unbound_at: float = 0.0
    phase: KVPoll = KVPoll.BOOTSTRAPPING
    machine: SenderMachine | None = None
    #: the leader of the newest binding
    bound_to: LeaderId | None = None
    #: hand-offs of this room whose machines may still read the pages
    holding: set[TransferId] = field(default_factory=set)
    spans: list[tuple[Span, ReadyEvent | None]] = field(default_factory=list)
    partial: SendChunk | None = None
    pages: tuple[int, ...] = ()
    slot: int | None = None
    metadata: SendMetadata | None = None
    failed_bindings: int = 0
    success: HandoffPhase | None = None
    error: ErrorInfo | None = None
    #: the newest binding, if it has failed: its decode may have committed, and lost the word with the session
    failed: TransferId | None = None
    ending: bool = False

    @property
    def out(self) -> bool:
        """The engine's half is open, or somebody may still read its pages."""
        return self.state not in (_S.PARKED, _S.CLOSED) or bool(self.holding)

    @property
    def opened(self) -> ExpectRoom:
        """The engine's request."""
        if self.expected is None:
            raise Internal("nobody expects this room")
        return self.expected

    @property
    def sent(self) -> int:
        """Tokens whose KV was sent, complete or not."""
        return self.spans[-1][0].end if self.spans else 0


def _check_attempt(attempt: int, key: RoomKey) -> None:
    # Later it would raise in the end of the room, before its pages are released.
    if not (isinstance(attempt, int) and 0 <= attempt < 2**16):
        raise InvalidRequest(f"attempt must be in 0 … 65535, not {attempt}", room=key.room)


class Rooms:
    """All rooms of one prefill leader."""

    def __init__(
        self,
        host: MachineHost,
        local: LocalLeader,
        deadlines: Deadlines,
        counters: dict[str, int],
        turn: Turn,
        tombstones: Tombstones,
    ) -> None:
        self._host = host
        self._local = local
        self._limits = local.limits
        self._deadlines = deadlines
        self._counters = counters
        self._turn = turn
        self._tombstones = tombstones
        self.rooms: dict[RoomKey, Room] = {}
        #: the closed ones whose pages are free, the oldest first, and how many are open
        self._closed: dict[RoomKey, None] = {}
        self.open = 0
        #: waiting messages by decode leader; their number, and the number of their page ids
        self._parked_of: dict[LeaderId, dict[AnyParked, None]] = {}
        #: waiting `Declined` messages, the oldest first
        self._words: dict[AnyParked, None] = {}
        self.parked = 0
        self.parked_pages = 0

    # ---- the engine ----------------------------------------------------------------------------

    def expect(self, event: ExpectRoom) -> None:
        """See `ExpectRoom`. Raises InvalidRequest for a room that was used already, OutOfCapacity."""
        room = self.rooms.get(event.key)
        self._check_expect(event, room)
        room = room or self._new(event.key)
        self._set_timer(room, event.deadline)
        room.state, room.expected = _S.EXPECTED, event
        room.opened_at = room.unbound_at = self._turn.now
        self.open += 1
        self._turn.emit(Phase(event.key, KVPoll.BOOTSTRAPPING))
        self._settle(room)
        if event.announce:
            # Not given up when the room fails: another rank of ours may be asked about it.
            self._turn.emit(RegisterRoom(event.key, max(0.0, event.deadline - self._turn.now)))
        declined = self._take(room.declined)
        self._bind_waiting(room)
        if room.state is _S.EXPECTED and (error := self._given_up(event, declined)) is not None:
            self._close(room, error, tell=False)

    def refuse(self, event: RefuseRoom) -> None:
        """See `RefuseRoom`."""
        room = self.rooms.get(event.key)
        if room is not None and room.state is not _S.PARKED:
            return
        room = room or self._new(event.key)
        room.expected = ExpectRoom(key=event.key, prompt_tokens=1, deadline=event.deadline)
        room.state, room.phase, room.until = _S.CLOSED, KVPoll.FAILED, event.deadline
        room.error = self._tombstones.record(event.error, event.key.room, None)
        self._settle(room)
        if event.announce:
            self._turn.emit(RegisterRoom(event.key, max(0.0, event.deadline - self._turn.now)))
        self._take(room.declined)
        self._refuse_waiting(room, room.error)
        self._remember(room)

    def _given_up(self, event: ExpectRoom, declined: list[Parked[Declined]]) -> ErrorInfo | None:
        """The reason why decode will not bind the room: it has ended its half before ours began."""
        retained = event.retain_s is not None
        if event.decode is not None:
            ended = self._tombstones.ended.get(self._placed(event, event.decode))
            if ended is not None and ended.error is not None and not (retained and ended.error.retryable):
                return ended.error
        counts = (p.message.error for p in declined if self._may_decline(event, p.peer, p.message))
        return next(counts, None)

    @staticmethod
    def _may_decline(opened: ExpectRoom, peer: LeaderId, message: Declined) -> bool:
        """Whether this leader's message ends the room: it knows the claim and concerns no older attempt. A
        room that was placed for nobody has a number that only its placer knows; who has refused its request
        unread knows no claim."""
        if opened.decode is None and not message.claim:
            return True
        placed = opened.decode is None or (
            opened.decode == peer and message.transfer.attempt >= opened.attempt
        )
        return placed and hmac.compare_digest(opened.claim, message.claim)

    def _placed(self, event: ExpectRoom, decode: LeaderId) -> TransferId:
        """The hand-off that a room is placed for."""
        key = event.key
        return TransferId(key.room, event.attempt, self._local.me, decode, key.generation, key.ordinal)

    def _check_expect(self, event: ExpectRoom, room: Room | None) -> None:
        if event.prompt_tokens < 1:
            raise IllegalEvent("a hand-off needs at least one prompt token", room=event.key.room)
        if len(event.claim) > MAX_CLAIM_BYTES:
            raise InvalidRequest(f"a claim has at most {MAX_CLAIM_BYTES} bytes, not {len(event.claim)}")
        _check_attempt(event.attempt, event.key)
        room_id, origin = event.key.room, self._local.origin
        if room is not None and room.state is not _S.PARKED:
            raise InvalidRequest(
                f"room {room_id} was used already; each request needs a room of its own",
                origin=origin,
                room=room_id,
            )
        if self.open >= self._limits.max_transfers:
            raise OutOfCapacity(
                f"{self.open} rooms are open, as many as limits.max_transfers allows",
                origin=origin,
                room=room_id,
            )

    def send_chunk(self, event: SendChunk) -> None:
        """See `SendChunk`. Raises IllegalEvent, with nothing changed, for a wrong span or pages."""
        room = self._live(event.key)
        if room is None:
            return
        self._check_chunk(room, event)
        if room.machine is not None:
            self._host.run(room.machine, event)
        if event.layers is not None:
            room.partial = event
        else:
            room.spans.append((event.span, event.ready))
            room.partial = None
        room.pages = event.pages
        room.slot = event.slot if event.slot is not None else room.slot

    def _check_chunk(self, room: Room, event: SendChunk) -> None:
        span, prompt = event.span, room.opened.prompt_tokens
        partial = room.partial
        if span.start != room.sent or not span.start < span.end <= prompt:
            raise IllegalEvent(
                f"chunk [{span.start}, {span.end}) where one from token {room.sent} of {prompt} was due",
                room=event.key.room,
            )
        if partial is not None and (
            span != partial.span or (event.layers is not None and event.layers <= (partial.layers or 0))
        ):
            raise IllegalEvent(
                f"{event.layers} layers of chunk [{span.start}, {span.end}) after {partial.layers} of "
                f"[{partial.span.start}, {partial.span.end})",
                room=event.key.room,
            )
        if event.layers is not None and event.layers < 1:
            raise IllegalEvent(f"a chunk with {event.layers} layers", room=event.key.room)

    def send_metadata(self, event: SendMetadata) -> None:
        """See `SendMetadata`. Raises IllegalEvent the second time, InvalidRequest for too many bytes."""
        room = self._live(event.key)
        if room is None:
            return
        if room.metadata is not None:
            raise IllegalEvent("metadata was sent already", room=event.key.room)
        if len(event.content) > self._limits.max_metadata_bytes:
            raise InvalidRequest(
                f"metadata of {len(event.content)} bytes, limits.max_metadata_bytes allows "
                f"{self._limits.max_metadata_bytes}",
                room=event.key.room,
            )
        if room.machine is not None:
            self._host.run(room.machine, event)
        room.metadata = event

    def end(self, event: EndRoom) -> None:
        """See `EndRoom`."""
        room = self.rooms.get(event.key)
        if room is None or room.state in (_S.CLOSED, _S.PARKED):
            return
        if event.unbound_s is not None:
            since = self._turn.now - room.unbound_at
            if room.machine or room.success or since < event.unbound_s:
                return
        room.ending = True
        machine = room.machine
        if machine is None or not self._host.tell(machine, AbortTransfer(machine.transfer, event.error)):
            self._close(room, self._record(room, event.error))

    def place(self, event: PlaceRoom) -> None:
        """See `PlaceRoom`. Raises InvalidRequest, with nothing changed, for an attempt that cannot be."""
        room = self._live(event.key)
        if room is None:
            return
        _check_attempt(event.attempt, event.key)
        room.expected = replace(room.opened, decode=event.decode, attempt=event.attempt)
        room.unbound_at = self._turn.now
        if room.failed is not None and room.failed.attempt < event.attempt:
            room.failed = None
        machine = room.machine
        if machine is None:
            self._bind_waiting(room)
        elif machine.transfer.attempt < event.attempt:
            error = TransferFailed("the placer of the request has given it to another decode leader").info
            error = self._tombstones.record(error, room.key.room, machine.peer)
            self._host.tell(machine, AbortTransfer(machine.transfer, error))

    def _live(self, key: RoomKey) -> Room | None:
        """None for a room that is over, which the engine could not know yet. Raises IllegalEvent for one that
        never was."""
        room = self.rooms.get(key)
        if room is None or room.state is _S.PARKED:
            raise IllegalEvent(f"room {key} is not open here", room=key.room)
        if room.state is _S.CLOSED:
            self._counters["late_events"] += 1
            return None
        return room

    # ---- the registry ----------------------------------------------------------------------------

    def found(self, event: RoomFound) -> None:
        """A destination waits here, and the room is on another rank of our instance: decode is sent there, or
        both halves end (`DpRanks.on_conflict`)."""
        room, owner, me = self.rooms.get(event.key), event.leader, self._local.me
        if room is None or room.state is not _S.PARKED or owner.incarnation != me.incarnation:
            return
        if owner.dp_rank == me.dp_rank:
            return
        conflict = dp_rank_conflict(event.key.room, owner.dp_rank, me.dp_rank).info
        for waiting in [p for p in room.parked.values() if p.message.inferred]:
            transfer = waiting.message.transfer
            error = self._tombstones.record(conflict, event.key.room, waiting.peer)
            self._void(room, transfer, error)
            redirect = self._local.dp.on_conflict == REDIRECT_ON_CONFLICT
            moved = Moved(transfer, owner.dp_rank, None if redirect else error)
            self._turn.emit(Send(waiting.peer, moved))

    def unknown(self, event: RoomUnknown) -> None:
        """The room could not be registered: no decode would find it, unless one has bound it already. Or a
        question has no answer, and its destination waits until its own deadline; the next one that comes asks
        again."""
        room = self.rooms.get(event.key)
        if room is None:
            return
        if room.expected is None:
            room.asked = False
        elif room.machine is None or event.error.code is ErrorCode.DP_RANK_CONFLICT:
            self.end(EndRoom(event.key, event.error))

    def _settle(self, room: Room) -> None:
        if room.asked:
            room.asked = False
            self._turn.emit(RoomSettled(room.key))

    # ---- decode ----------------------------------------------------------------------------------

    def received(self, event: Received) -> None:
        """A legal message of decode for a hand-off without a machine."""
        message = event.message
        room = self.rooms.get(message.transfer.sent_as)
        state = _S.UNKNOWN if room is None else room.state
        handler = self.TABLE[state].get(type(message))
        if handler is None:
            self._tombstones.received(event)
        else:
            handler(self, room, event.peer, message)

    def commits_late(self, message: Committed) -> bool:
        """Whether the decode of the newest binding had committed before our half failed: then nobody else
        comes, and the room has succeeded. Its machine may still wait for its fences."""
        room = self.rooms.get(message.transfer.sent_as)
        if room is None or room.state is not _S.EXPECTED or room.success is not None:
            return False
        sent = room.sent == room.opened.prompt_tokens and room.metadata is not None
        if not sent or room.failed != message.transfer:
            return False
        self._committed(room, HandoffPhase(message.transfer, KVPoll.SUCCESS))
        return True

    def _destination_of(self, room: Room | None, peer: LeaderId, message: Destination) -> None:
        ended = self._tombstones.ended.get(message.transfer)
        if ended is not None:
            self._tombstones.received(Received(peer, message))
        elif room is None or room.state is _S.PARKED:
            self._early(room, peer, message)
        else:
            self._destination(room, peer, message)

    def _destination(self, room: Room, peer: LeaderId, message: Destination) -> None:
        if message.transfer in room.parked:
            self._counters["repeats"] += 1
        elif room.state is _S.EXPECTED:
            self._bind(room, peer, message)
        elif room.state is _S.CLOSED:
            self._refuse(peer, message.transfer, room.error or self._taken(room, message))
        elif self._may_be_placed(room, message):
            self._await_word(room, peer, message)
        else:
            text = f"another attempt at room {room.key.room} has it"
            self._refuse(peer, message.transfer, TransferFailed(text).info)

    def _waiting(self, peer: LeaderId, message: Word, budget_s: float) -> Parked[Word]:
        # A NaN from the wire must not get into the heap: it compares as false with everything.
        budget_s = budget_s if budget_s > 0 else 0.0
        until = self._turn.now + min(budget_s, self._limits.request_budget_s)
        at = min(until, self._turn.now + self._limits.early_wait_s)
        return Parked(peer, message, DeadlineEntry(at, lambda _: self._parked_late(message)), until)

    def _over(self, room: Room) -> ErrorInfo:
        text = f"room {room.key.room} is over; each request needs a room of its own"
        return InvalidRequest(text, origin=self._local.origin, room=room.key.room).info

    def _taken(self, room: Room, message: Destination) -> ErrorInfo:
        """The error of a destination for a closed room that has not failed. The placer may have given up the
        attempt that has committed: the next one is not at fault, and may be repeated in another room."""
        opened, success = room.opened, room.success
        later = success is not None and message.transfer.attempt > success.transfer.attempt
        return self._taken_before(room) if later and opened.decode is not None else self._over(room)

    @staticmethod
    def _taken_before(room: Room) -> ErrorInfo:
        text = f"an earlier attempt at room {room.key.room} has succeeded"
        # The placer knows the code: prefill does not have its half any more.
        return (TransferFailed(text) if room.opened.decode is None else OutOfCapacity(text)).info

    def _declined(self, room: Room | None, peer: LeaderId, message: Declined) -> None:
        if room is None or room.state is _S.PARKED:
            self._early(room, peer, message)
        elif self._may_decline(room.opened, peer, message):
            self._close(room, message.error, tell=False)
        else:
            self._counters["stray_messages"] += 1

    def _declined_bound(self, room: Room, peer: LeaderId, message: Declined) -> None:
        """The binding's own decode will not try again: the room ends with the binding."""
        if room.machine is not None and message.transfer == room.machine.transfer:
            room.ending = room.ending or self._may_decline(room.opened, peer, message)
        self._counters["repeats"] += 1

    def _peer_ended(self, room: Room | None, peer: LeaderId, message: Failed | Abort | Gone) -> None:
        """Decode has ended a hand-off that has no machine here."""
        transfer = message.transfer
        refused = self._tombstones.ended.get(transfer)
        error = (refused and refused.error) or self._tombstones.error_of(message, peer)
        if room is None or not self._void(room, transfer, error):
            self._tombstones.received(Received(peer, message))
        elif not isinstance(message, Gone):
            self._turn.emit(Send(peer, Drained(transfer)))
        if room is None or room.expected is None or isinstance(message, Gone):
            return
        # A later attempt that was refused here ends by that, and leaves the room open.
        attempt = room.expected.attempt
        later = transfer.attempt > attempt and not refused
        placed = room.expected.decode == peer and (transfer.attempt == attempt or later)
        if room.state is _S.EXPECTED and placed and self._is_final(room, error):
            self._close(room, error, tell=False)

    def _repeated(self, room: Room | None, peer: LeaderId, message: HandoffMessage) -> None:
        self._counters["repeats"] += 1

    # ---- parking ---------------------------------------------------------------------------------

    def _early(self, room: Room | None, peer: LeaderId, message: Destination | Declined) -> None:
        """Keep a message until its room is expected; refuse a destination beyond the limits."""
        transfer = message.transfer
        if room is not None and transfer in room.parked:
            self._counters["repeats"] += 1
            return
        if room is not None and isinstance(message, Declined):
            self._unpark(room.declined, transfer)  # the newest one counts
        if not self._has_place(peer, message):
            return
        # Not the one from before: it may have been forgotten to make place.
        room = self.rooms.get(transfer.sent_as) or self._new(transfer.sent_as)
        if isinstance(message, Declined):
            word = self._waiting(peer, message, self._limits.early_wait_s)
            self._keep(room.declined, word)
            return
        waiting = self._waiting(peer, message, message.budget_s)
        self._keep(room.parked, waiting)
        if message.inferred and not room.asked:
            room.asked = True
            self._turn.emit(AskRoom(room.key, waiting.timer.at - self._turn.now))

    def _has_place(self, peer: LeaderId, message: Destination | Declined) -> bool:
        """Whether one more message of this leader may wait; a destination that may not is refused."""
        pages = len(message.pages) if isinstance(message, Destination) else 0
        while (problem := self._no_place(peer, pages)) and self._drop_word(peer):
            pass
        if problem:
            self._counters["early_refused"] += 1
            if isinstance(message, Destination):
                self._refuse(peer, message.transfer, OutOfCapacity(problem).info)
        return not problem

    def _drop_word(self, peer: LeaderId) -> bool:
        """Make place: forget the oldest `Declined` of this leader, or of any if the whole table is full. Its
        room ends by its deadline then; a destination that is refused is a lost request. False if there is
        none."""
        full = self.parked >= self._limits.max_early_destinations
        word = next((word for word in self._words if full or word.peer == peer), None)
        if word is None:
            return False
        transfer = word.message.transfer
        room = self.rooms[transfer.sent_as]
        self._unpark(room.declined, transfer)
        self._left(room)
        return True

    def _no_place(self, peer: LeaderId, more_pages: int) -> str:
        limits, theirs = self._limits, self._parked_of.get(peer, ())
        if self.parked >= limits.max_early_destinations:
            return (
                f"{self.parked} destinations wait for requests that prefill has not seen, as many as "
                "limits.max_early_destinations allows"
            )
        if self.parked_pages + more_pages > limits.max_early_pages:
            return "destinations that wait for their requests name too many pages (limits.max_early_pages)"
        pages, share = sum(parked.pages for parked in theirs), limits.early_share
        if len(theirs) >= max(1, share * limits.max_early_destinations) or (
            theirs and more_pages and pages + more_pages > share * limits.max_early_pages
        ):
            return f"{len(theirs)} destinations of this decode leader wait already (limits.early_share)"
        return ""

    def _keep(self, table: dict[TransferId, Parked[Word]], parked: Parked[Word]) -> None:
        table[parked.message.transfer] = parked
        self._parked_of.setdefault(parked.peer, {})[parked] = None
        if isinstance(parked.message, Declined):
            self._words[parked] = None
        self._deadlines.add(parked.timer)
        self.parked += 1
        self.parked_pages += parked.pages

    def _unpark(self, table: dict[TransferId, Parked[Word]], transfer: TransferId) -> Parked[Word] | None:
        """Undo `_keep`; None if nothing of this hand-off waits in `table`."""
        parked = table.pop(transfer, None)
        if parked is not None:
            self._deadlines.cancel(parked.timer)
            del self._parked_of[parked.peer][parked]
            self._words.pop(parked, None)
            if not self._parked_of[parked.peer]:
                del self._parked_of[parked.peer]
            self.parked -= 1
            self.parked_pages -= parked.pages
        return parked

    def _take(self, table: dict[TransferId, Parked[Word]]) -> list[Parked[Word]]:
        """Take all messages out of `table`."""
        return [parked for transfer in list(table) if (parked := self._unpark(table, transfer))]

    def _void(self, room: Room, transfer: TransferId, error: ErrorInfo) -> bool:
        """Drop a waiting destination whose peer knows that it is void; False if there is none."""
        parked = self._unpark(room.parked, transfer)
        if parked is not None:
            self._tombstones.add_unopened(transfer, error, ended_by_peer=True, until=parked.timer.at)
            self._left(room)
        return parked is not None

    def _parked_late(self, message: Destination | Declined) -> None:
        transfer = message.transfer
        room = self.rooms[transfer.sent_as]
        if isinstance(message, Declined):
            self._unpark(room.declined, transfer)
        else:
            self._unpark(room.parked, transfer)
            if room.state is _S.PARKED:
                text = f"the request of room {room.key.room} did not come to this prefill leader in time"
                late: SegueError = BootstrapTimeout(text)
            else:
                late = DeadlineExceeded(f"another attempt has room {room.key.room}, and did not end in time")
            self._refuse(transfer.decode, transfer, late.info)
        self._left(room)

    def _left(self, room: Room) -> None:
        """A message does not wait any more. A parked room without another one is forgotten."""
        if room.state is _S.PARKED and not room.parked and not room.declined:
            self._forget(room)

    # ---- binding ---------------------------------------------------------------------------------

    def _bind(self, room: Room, peer: LeaderId, message: Destination) -> None:
        opened = room.opened
        if opened.decode not in (None, peer):
            if self._may_be_placed(room, message):
                self._await_word(room, peer, message)
                return
            text = f"room {room.key.room} was placed for decode {opened.decode}"
            self._refuse(peer, message.transfer, PeerRefused(text, retryable=False).info)
            return
        if opened.decode is not None and message.transfer.attempt < opened.attempt:
            text = f"room {room.key.room} was placed again as attempt {opened.attempt}"
            self._refuse(peer, message.transfer, TransferFailed(text).info)
            return
        machine = self._accepted(room, peer, message)
        if machine is None:
            return
        room.state, room.machine, room.bound_to = _S.BOUND, machine, peer
        room.holding.add(machine.transfer)
        self._host.add(machine, room)
        self._replay(room, machine)

    @staticmethod
    def _may_be_placed(room: Room, message: Destination) -> bool:
        """Whether the placer may still give the room to this attempt."""
        opened = room.opened
        placed = opened.decode is not None and opened.retain_s is not None
        return placed and message.transfer.attempt > opened.attempt

    def _await_word(self, room: Room, peer: LeaderId, message: Destination) -> None:
        """A destination of a later attempt waits until the placer says that the room is for it."""
        if self._accepted(room, peer, message) is not None and self._has_place(peer, message):
            self._keep(room.parked, self._waiting(peer, message, message.budget_s))
            room.unbound_at = self._turn.now

    def _accepted(self, room: Room, peer: LeaderId, message: Destination) -> SenderMachine | None:
        """The machine of a valid destination; an invalid one is refused, and gives None."""
        try:
            return self._checked(room, peer, message)
        except SegueError as error:
            self._refuse(peer, message.transfer, error.info)
        except Exception as error:  # the boundary: a bug costs this destination, and not the room
            self._counters["internal_errors"] += 1
            bug = Internal(f"{type(error).__name__} in the check of a destination: {error!r}")
            self._refuse(peer, message.transfer, bug.info)
        return None

    def _checked(self, room: Room, peer: LeaderId, message: Destination) -> SenderMachine:
        """The machine of a destination, of any leader. Raises the fault of an invalid one."""
        opened = room.opened
        if not hmac.compare_digest(opened.claim, message.claim):
            raise MetadataMismatch(
                "decode asks for another prompt, salt, adapter or model than prefill has under this room; "
                "each request needs a room of its own",
                retryable=False,
            )
        if self._host.epoch_owner(peer, message.epoch) is not None:
            raise TransferFailed(f"decode uses epoch {message.epoch:x} for two hand-offs")
        args = self._host.args(message.transfer, peer, opened.prompt_tokens, room.until)
        return SenderMachine(args, message)

    def _replay(self, room: Room, machine: SenderMachine) -> None:
        """Give the binding all that the engine has sent. The newest pages hold every earlier span."""
        prompt = room.opened.prompt_tokens
        sent: list[SendChunk | SendMetadata | None] = [
            SendChunk(room.key, span, room.pages, room.slot if span.end == prompt else None, ready=ready)
            for span, ready in room.spans
        ]
        for event in (*sent, room.partial, room.metadata):
            if event is None or machine.phase.terminal:
                continue
            if not self._host.tell(machine, event):
                error = Internal(f"{type(event).__name__} was legal for the room and not for its binding")
                self._host.tell(machine, AbortTransfer(machine.transfer, error.info))

    def abort(self, event: AbortTransfer) -> None:
        """A hand-off without a machine ends: its destination was lost by a bug, and is refused."""
        transfer = event.transfer
        room = self.rooms.get(transfer.sent_as)
        if room is not None:
            self._unpark(room.parked, transfer)
        if transfer not in self._tombstones.ended:
            self._refuse(transfer.decode, transfer, event.error)
        if room is not None:
            self._left(room)

    def _refuse(self, peer: LeaderId, transfer: TransferId, error: ErrorInfo) -> None:
        """A destination that binds nothing. The tombstone comes first: `Gone` is a proof only with it."""
        error = self._tombstones.record(error, transfer.room, peer)
        self._tombstones.add_unopened(transfer, error, ended_by_peer=True)
        self._turn.emit(Send(peer, Failed(transfer, error)))
        self._turn.emit(Send(peer, Gone(transfer)))

    def _bind_waiting(self, room: Room) -> None:
        for waiting in self._take(room.parked):
            rest_s = waiting.until - self._turn.now
            self._destination(room, waiting.peer, replace(waiting.message, budget_s=rest_s))

    def _refuse_waiting(self, room: Room, error: ErrorInfo) -> None:
        for waiting in self._take(room.parked):
            self._refuse(waiting.peer, waiting.message.transfer, error)

    # ---- phases of a binding -----------------------------------------------------------------------

    def on_phase(self, room: Room, effect: HandoffPhase) -> None:
        """The room's machine has entered a phase."""
        if room.machine is None:
            return  # the room has ended
        match effect.phase:
            case KVPoll.SUCCESS:
                self._committed(room, effect)
            case KVPoll.FAILED:
                self._failed(room, effect.transfer, effect.error or Internal("no reason given").info)
            case _ if effect.phase > room.phase:
                room.phase = effect.phase
                self._turn.emit(Phase(room.key, effect.phase))
            case _:
                pass

    def _committed(self, room: Room, effect: HandoffPhase) -> None:
        """Decode has the whole KV: later attempts that wait get `Gone`."""
        room.machine, room.success = None, effect
        self._refuse_waiting(room, self._taken_before(room))
        if room.opened.retain_s and not room.ending:
            room.state = _S.EXPECTED
            self._set_timer(room, min(room.until, self._turn.now + room.opened.retain_s))
        else:
            self._close(room, None)

    def _failed(self, room: Room, transfer: TransferId, error: ErrorInfo) -> None:
        room.machine, room.error = None, error
        room.failed_bindings += 1
        over = self._turn.now >= room.until or error.code in _DOUBTFUL
        # KV that will never be complete is of no use to a later attempt either.
        waited = [ready for _, ready in room.spans] + [room.partial.ready if room.partial else None]
        over = over or any(ready is not None and ready.error is not None for ready in waited)
        spent = room.failed_bindings >= self._limits.max_bindings
        retained = room.opened.retain_s is not None
        over = over or (retained and room.opened.decode is not None and not error.retryable)
        if room.ending or over or spent or not retained:
            self._close(room, error, tell=False)
            return
        room.state, room.failed, room.unbound_at = _S.EXPECTED, transfer, self._turn.now
        if room.opened.attempt > transfer.attempt:
            room.failed = None  # the placer takes nothing of it
        self._bind_waiting(room)

    @staticmethod
    def _is_final(room: Room, error: ErrorInfo) -> bool:
        """Whether the failure of the decode that a room is placed for ends the room, too."""
        opened = room.opened
        return opened.decode is not None and (opened.retain_s is None or not error.retryable)

    def on_release(self, room: Room, transfer: TransferId) -> None:
        """A machine of the room touches the pages no more."""
        room.holding.discard(transfer)
        if room.state is _S.CLOSED and not room.holding:
            self._release(room)

    # ---- sessions and time -------------------------------------------------------------------------

    def peer_down(self, event: PeerDown) -> None:
        """Handle the end of a peer before the machines do. Its waiting destinations are void; a room that was
        placed for it alone fails."""
        for parked in list(self._parked_of.get(event.peer, ())):
            transfer = parked.message.transfer
            error = self._tombstones.record(event.error, transfer.room, event.peer)
            if (room := self.rooms.get(transfer.sent_as)) is not None:  # else one before it has closed it
                self._void(room, transfer, error)
        for room in list(self.rooms.values()):
            if (
                room.state is _S.EXPECTED
                and room.opened.decode == event.peer
                and self._is_final(room, event.error)
            ):
                self._close(room, self._record(room, event.error))

    def _due(self, room: Room) -> None:
        if room.state is _S.EXPECTED:
            self._close(room, self._late(room))
        elif room.state is _S.CLOSED and not room.holding:
            self._forget(room)

    def _late(self, room: Room) -> ErrorInfo:
        after_s = self._turn.now - room.opened_at
        text = f"decode gave no destination within {after_s:.3f} s"
        if room.error is not None:
            text = f"no other attempt came within {after_s:.3f} s after one failed with {room.error.text}"
        return self._record(room, BootstrapTimeout(text).info)

    # ---- the end -----------------------------------------------------------------------------------

    def _record(self, room: Room, error: ErrorInfo) -> ErrorInfo:
        where = self._tombstones.record(error, room.key.room, room.opened.decode)
        return replace(where, elapsed_s=where.elapsed_s or self._turn.now - room.opened_at)

    def _close(self, room: Room, error: ErrorInfo | None, *, tell: bool = True) -> None:
        """The room's one end: SUCCESS if decode has committed, else FAILED with `error`. With `tell` the
        decode leader that it was placed for learns of the failure."""
        room.state, room.machine = _S.CLOSED, None
        self.open -= 1
        success = room.success
        room.error = None if success is not None else error
        opened = room.opened
        if success is not None:
            room.phase, peer = KVPoll.SUCCESS, success.transfer.decode
            phase = Phase(room.key, room.phase, None, None, success.wire_s, success.nbytes, peer)
        else:
            room.phase = KVPoll.FAILED
            phase = Phase(room.key, room.phase, error, peer=room.bound_to or opened.decode)
        self._turn.emit(phase)
        if tell and error is not None and success is None and opened.decode is not None:
            self._tell_placed(room, opened.decode, error)
        self._refuse_waiting(room, error or self._over(room))
        room.spans, room.pages, room.partial, room.metadata = [], (), None, None
        if not room.holding:
            self._release(room)

    def _release(self, room: Room) -> None:
        """The pages of a closed room are free."""
        self._turn.emit(Release(room.key))
        self._remember(room)

    def _remember(self, room: Room) -> None:
        """Keep a closed room for a late word about it, until too many others are kept."""
        self._set_timer(room, max(room.until, self._turn.now + self._limits.peer_silence_s))
        self._closed[room.key] = None
        if len(self._closed) > self._limits.max_transfers:
            self._forget(self.rooms[next(iter(self._closed))])

    def _tell_placed(self, room: Room, decode: LeaderId, error: ErrorInfo) -> None:
        transfer = self._placed(room.opened, decode)
        if transfer not in self._tombstones.ended and transfer not in room.holding:
            self._tombstones.add_unopened(transfer, error, ended_by_peer=False, until=room.until)
            self._turn.emit(Send(decode, Failed(transfer, error)))
            self._turn.emit(Send(decode, Gone(transfer)))

    # ---- the table of rooms ------------------------------------------------------------------------

    def _new(self, key: RoomKey) -> Room:
        room = self.rooms[key] = Room(key)
        return room

    def _set_timer(self, room: Room, until: float) -> None:
        if room.timer is not None:
            self._deadlines.cancel(room.timer)
        room.until, room.timer = until, DeadlineEntry(until, lambda _: self._due(room))
        self._deadlines.add(room.timer)

    def _forget(self, room: Room) -> None:
        self._settle(room)
        if room.timer is not None:
            self._deadlines.cancel(room.timer)
        self._closed.pop(room.key, None)
        del self.rooms[room.key]

    def problems(self) -> list[str]:
        """Violated invariants, as texts."""
        found, rooms = [], list(self.rooms.values())
        for room in rooms:
            if (room.machine is not None) != (room.state is _S.BOUND):
                found.append(f"room {room.key} is {room.state} with machine {room.machine}")
            if (room.expected is None) != (room.state is _S.PARKED):
                found.append(f"room {room.key} is {room.state} and its engine has {room.expected}")
            if room.phase.terminal != (room.state is _S.CLOSED):
                found.append(f"room {room.key} is {room.state} in phase {room.phase.name}")
            if room.machine is not None and room.machine.transfer not in room.holding:
                found.append(f"room {room.key} does not know that its machine holds pages")
            if room.state in (_S.EXPECTED, _S.BOUND) and not (room.timer and room.timer.live):
                found.append(f"room {room.key} has no deadline")
            if room.state is _S.PARKED and not (room.parked or room.declined):
                found.append(f"nothing waits in room {room.key}")
        parked = self._all_parked()
        pages = sum(p.pages for p in parked)
        indexed = {p for theirs in self._parked_of.values() for p in theirs}
        words = {p for p in parked if isinstance(p.message, Declined)}
        counted = (len(parked), pages) == (self.parked, self.parked_pages)
        if not counted or set(parked) != indexed or words != set(self._words):
            found.append("the counts of parked destinations disagree with the table")
        states = [room.state for room in rooms]
        if self.open != states.count(_S.EXPECTED) + states.count(_S.BOUND):
            found.append(f"{self.open} rooms are counted as open")
        if len(self._closed) != sum(room.state is _S.CLOSED and not room.holding for room in rooms):
            found.append(f"{len(self._closed)} rooms are counted as closed")
        return found

    def _all_parked(self) -> list[AnyParked]:
        found: list[AnyParked] = []
        for room in self.rooms.values():
            found += [*room.parked.values(), *room.declined.values()]
        return found

    @property
    def timers(self) -> list[DeadlineEntry]:
        """All timers of this table."""
        rooms = [room.timer for room in self.rooms.values() if room.timer is not None]
        return rooms + [parked.timer for parked in self._all_parked()]

    _EARLY: ClassVar[Mapping[type, Callable[..., None]]] = {
        Destination: _destination_of,
        Declined: _declined,
        Failed: _peer_ended,
        Abort: _peer_ended,
        Gone: _peer_ended,
    }

    TABLE: ClassVar[Mapping[RoomState, Mapping[type, Callable[..., None]]]] = {
        _S.UNKNOWN: _EARLY,
        _S.PARKED: _EARLY,
        _S.EXPECTED: _EARLY,
        _S.BOUND: {**_EARLY, Declined: _declined_bound},
        _S.CLOSED: {Destination: _destination_of, Declined: _repeated},
    }
