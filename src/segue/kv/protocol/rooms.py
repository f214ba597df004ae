"""Prefill's rooms: an engine opens one for a request before it knows decode; a destination binds it.

`TABLE` says what each message of decode does in each state of a room. `UNKNOWN` and `PARKED` come before the
engine's `ExpectRoom`, `CLOSED` after its one terminal event.

- A destination binds a room if it passes every check (`_bind`: leader, claim, session, copy plan, pages). One
  that fails leaves the room open, and gets `Failed` and `Gone`.
- A room has one live binding. Another destination is refused (retryable) unless it replaces the live attempt;
  the same decode leader, or the placer of the request (`AllowReplacement`), says so.
- A replaced attempt that may have committed is asked first (`Room.doubt`): `Committed` wins; after `Failed`,
  `Abort`, `Gone` or its proven death the other one binds. A lost session is no answer.
- The room keeps what its engine sent and gives it to each binding (`_replay`): all spans with the newest
  pages, and the metadata.
- With `retain_s` of 0 the room ends with its first binding. Otherwise it outlives `Limits.max_bindings`
  failures, and the first success by `retain_s`.
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
from typing import Any, ClassVar, Protocol

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
    AllowReplacement,
    AskRoom,
    EndRoom,
    ExpectRoom,
    HandoffPhase,
    PeerDown,
    Phase,
    Received,
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

MAX_CLAIM_BYTES = 64
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


class MachineHost(Protocol):
    """The exchange, as rooms and receivers use it."""

    def args(
        self, transfer: TransferId, peer: LeaderId, prompt_tokens: int, deadline: float
    ) -> MachineArgs: ...
    def add(self, machine: Machine, owner: Any) -> None: ...
    def run(self, machine: Machine, event: object) -> None: ...
    def tell(self, machine: Machine, event: object) -> bool: ...
    def epoch_owner(self, decode: LeaderId, epoch: int) -> Machine | None: ...


@dataclass(slots=True)
class ParkedDestination:
    """A destination that waits; `timer.at` is its own deadline."""

    peer: LeaderId
    message: Destination
    timer: DeadlineEntry


@dataclass(slots=True)
class Room:
    """One request's prefill half, as its engine knows it. `pages` and `slot` are the newest that the engine
    named, `spans` its complete chunks, `partial` the layers of the chunk that follows them."""

    key: RoomKey
    state: RoomState
    timer: DeadlineEntry
    parked: dict[TransferId, ParkedDestination] = field(default_factory=dict)
    declined: dict[LeaderId, Declined] = field(default_factory=dict)
    asked: bool = False
    expected: ExpectRoom | None = None
    opened_at: float = 0.0
    phase: KVPoll = KVPoll.BOOTSTRAPPING
    machine: SenderMachine | None = None
    #: the leader of the newest binding
    bound_to: LeaderId | None = None
    #: hand-offs of this room whose machines may still read the pages
    holding: set[TransferId] = field(default_factory=set)
    spans: list[Span] = field(default_factory=list)
    partial: SendChunk | None = None
    pages: tuple[int, ...] = ()
    slot: int | None = None
    metadata: SendMetadata | None = None
    failed_bindings: int = 0
    success: HandoffPhase | None = None
    error: ErrorInfo | None = None
    #: (replaced attempt, its successor, the successor's leader)
    permits: set[tuple[int, int, LeaderId]] = field(default_factory=set)
    #: the attempt that a waiting destination replaces, and that may have committed
    doubt: TransferId | None = None
    ending: bool = False
    replacing: bool = False

    @property
    def opened(self) -> ExpectRoom:
        """The engine's request."""
        if self.expected is None:
            raise Internal("nobody expects this room")
        return self.expected

    @property
    def sent(self) -> int:
        """Tokens whose KV is complete."""
        return self.spans[-1].end if self.spans else 0


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
        #: the closed ones, the oldest first, and how many are open
        self._closed: dict[RoomKey, None] = {}
        self.open = 0
        #: destinations that wait, and page ids in them
        self.parked = 0
        self.parked_pages = 0

    # ---- the engine ----------------------------------------------------------------------------

    def expect(self, event: ExpectRoom) -> None:
        """See `ExpectRoom`. Raises InvalidRequest for a room that was used already, OutOfCapacity."""
        room = self.rooms.get(event.key)
        self._check_expect(event, room)
        if room is None:
            room = self._new(event.key, _S.EXPECTED, event.deadline)
        else:
            self._retime(room, event.deadline)
        parked, room.parked = room.parked, {}
        room.state, room.expected, room.opened_at = _S.EXPECTED, event, self._turn.now
        self.open += 1
        self._turn.emit(Phase(event.key, KVPoll.BOOTSTRAPPING))
        self._settle(room)
        if event.announce:
            # Not given up when the room fails: another rank of ours may be asked about it.
            self._turn.emit(RegisterRoom(event.key, max(0.0, event.deadline - self._turn.now)))
        for waiting in parked.values():
            self._unpark(waiting)
            rest_s = waiting.timer.at - self._turn.now
            self._destination(room, waiting.peer, replace(waiting.message, budget_s=rest_s))
        if room.state is _S.EXPECTED and (error := self._given_up(room, event)) is not None:
            self._close(room, error, tell=False)

    def _given_up(self, room: Room, event: ExpectRoom) -> ErrorInfo | None:
        """Why decode will not bind the room: it has ended its half before ours began."""
        if event.decode is not None:
            ended = self._tombstones.ended.get(self._placed(event, event.decode))
            if ended is not None and ended.error is not None:
                return ended.error
        counts = (word.error for peer, word in room.declined.items() if self._may_decline(event, peer, word))
        return next(counts, None)

    @staticmethod
    def _may_decline(opened: ExpectRoom, peer: LeaderId, message: Declined) -> bool:
        """Whether this leader's word ends the room: it knows the claim, and speaks of no earlier attempt."""
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
            room.spans.append(event.span)
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
        if room is None or room.state in (_S.CLOSED, _S.PARKED) or (event.unbound and room.machine):
            return
        if room.machine is not None:
            room.ending = True
            self._host.tell(room.machine, AbortTransfer(room.machine.transfer, event.error))
        else:
            self._close(room, self._record(room, event.error))

    def allow(self, event: AllowReplacement) -> None:
        """See `AllowReplacement`; at most `limits.max_bindings` of one room count."""
        room = self._live(event.key)
        if room is None or len(room.permits) >= self._limits.max_bindings:
            return
        room.permits.add((event.replaced, event.by, event.decode))
        for waiting in list(room.parked.values()):
            self._contest(room, waiting)

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
            self._unpark(waiting)
            del room.parked[waiting.message.transfer]
            error = self._tombstones.record(conflict, event.key.room, waiting.peer)
            transfer = waiting.message.transfer
            self._tombstones.add_unopened(transfer, error, ended_by_peer=True, until=waiting.timer.at)
            redirect = self._local.dp.on_conflict == REDIRECT_ON_CONFLICT
            moved = Moved(transfer, owner.dp_rank, None if redirect else error)
            self._turn.emit(Send(waiting.peer, moved))
        self._forget_if_empty(room)

    def unknown(self, event: RoomUnknown) -> None:
        """The room could not be registered: no decode would find it. (A question without an answer leaves its
        destination waiting until that one's own deadline.)"""
        room = self.rooms.get(event.key)
        if room is not None and room.expected is not None:
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

    def settles_doubt(self, message: HandoffMessage) -> bool:
        """Whether `message` tells how an attempt ended that another one is to replace. False if a machine has
        to look at it, too."""
        room = self.rooms.get(message.transfer.sent_as)
        if room is None or room.doubt != message.transfer:
            return False
        if isinstance(message, (Failed, Abort, Gone)):
            room.doubt = None
            if room.machine is not None:
                room.replacing = bool(room.parked)  # the machine ends by this message, and it binds then
            else:
                self._bind_waiting(room)
            return False
        if isinstance(message, Committed) and room.machine is None:
            self._committed(room, HandoffPhase(message.transfer, KVPoll.SUCCESS))
            return True
        return False

    def _destination_of(self, room: Room | None, peer: LeaderId, message: Destination) -> None:
        ended = self._tombstones.ended.get(message.transfer)
        if ended is not None:
            self._tombstones.received(Received(peer, message))
        elif room is None or room.state is _S.PARKED:
            self._park(room, peer, message)
        else:
            self._destination(room, peer, message)

    def _destination(self, room: Room, peer: LeaderId, message: Destination) -> None:
        if room.state is _S.EXPECTED and room.doubt is None:
            self._bind(room, peer, message)
            return
        if room.state is _S.CLOSED:
            self._refuse(peer, message.transfer, room.error or self._over(room))
            return
        if message.transfer in room.parked:
            self._counters["repeats"] += 1
            return
        self._contest(room, self._waiting(peer, message))

    def _waiting(self, peer: LeaderId, message: Destination) -> ParkedDestination:
        # A NaN from the wire must not get into the heap: it compares as false with everything.
        budget_s = message.budget_s if message.budget_s > 0 else 0.0
        at = self._turn.now + min(budget_s, self._limits.request_budget_s)
        timer = DeadlineEntry(at, lambda _: self._parked_late(message))
        return ParkedDestination(peer, message, timer)

    def _over(self, room: Room) -> ErrorInfo:
        text = f"room {room.key.room} is over; each request needs a room of its own"
        return InvalidRequest(text, origin=self._local.origin, room=room.key.room).info

    def _declined(self, room: Room | None, peer: LeaderId, message: Declined) -> None:
        if room is None or room.state is _S.PARKED:
            self._declined_early(room, peer, message)
        elif self._may_decline(room.opened, peer, message):
            self._close(room, message.error, tell=False)
        else:
            self._counters["stray_messages"] += 1

    def _peer_ended(self, room: Room | None, peer: LeaderId, message: Failed | Abort) -> None:
        """Decode has ended a hand-off that has no machine here."""
        transfer = message.transfer
        parked = room.parked.pop(transfer, None) if room is not None else None
        error = self._tombstones.error_of(message, peer)
        if parked is not None:
            self._unpark(parked)
            self._tombstones.add_unopened(transfer, error, ended_by_peer=True, until=parked.timer.at)
            self._turn.emit(Send(peer, Drained(transfer)))
        else:
            self._tombstones.received(Received(peer, message))
        if room is None or room.state is _S.PARKED:
            if room is not None:
                self._forget_if_empty(room)
            return
        opened = room.opened
        placed = opened.decode == peer and transfer.attempt >= opened.attempt
        if room.state is _S.EXPECTED and placed and not opened.retain_s:
            self._close(room, error, tell=False)

    def _declined_early(self, room: Room | None, peer: LeaderId, message: Declined) -> None:
        """A room that its engine has not opened yet will not get its destination from this leader."""
        limits = self._limits
        if room is None:
            if len(self.rooms) - self.open - len(self._closed) >= limits.max_early_destinations:
                self._counters["early_refused"] += 1
                return
            room = self._new(message.transfer.sent_as, _S.PARKED, self._turn.now + limits.request_budget_s)
        if peer in room.declined or len(room.declined) < limits.max_bindings:
            room.declined[peer] = message

    def _gone(self, room: Room | None, peer: LeaderId, message: Gone) -> None:
        parked = room.parked.pop(message.transfer, None) if room is not None else None
        if room is not None and parked is not None:
            self._unpark(parked)
            error = self._tombstones.error_of(message, peer)
            self._tombstones.add_unopened(message.transfer, error, ended_by_peer=True, until=parked.timer.at)
            self._forget_if_empty(room)

    def _repeated(self, room: Room | None, peer: LeaderId, message: HandoffMessage) -> None:
        self._counters["repeats"] += 1

    # ---- parking ---------------------------------------------------------------------------------

    def _park(self, room: Room | None, peer: LeaderId, message: Destination) -> None:
        """Keep a destination until its room is expected; refuse it where the bounds are reached."""
        if room is not None and message.transfer in room.parked:
            self._counters["repeats"] += 1
            return
        if (problem := self._no_place(peer, message)) is not None:
            self._counters["early_refused"] += 1
            self._refuse(peer, message.transfer, OutOfCapacity(problem).info)
            return
        waiting = self._waiting(peer, message)
        if room is None:
            room = self._new(message.transfer.sent_as, _S.PARKED, waiting.timer.at)
        elif room.timer.at < waiting.timer.at:
            self._retime(room, waiting.timer.at)
        self._keep(room, waiting)
        if message.inferred and not room.asked:
            room.asked = True
            self._turn.emit(AskRoom(room.key, waiting.timer.at - self._turn.now))

    def _no_place(self, peer: LeaderId, message: Destination) -> str | None:
        limits = self._limits
        theirs = [p for room in self.rooms.values() for p in room.parked.values() if p.peer == peer]
        pages = sum(len(parked.message.pages) for parked in theirs)
        if self.parked >= limits.max_early_destinations:
            return (
                f"{self.parked} destinations wait for requests that prefill has not seen, as many as "
                "limits.max_early_destinations allows"
            )
        if self.parked_pages + len(message.pages) > limits.max_early_pages:
            return "destinations that wait for their requests name too many pages (limits.max_early_pages)"
        share = limits.early_share
        if len(theirs) >= max(1, share * limits.max_early_destinations) or (
            theirs and pages + len(message.pages) > share * limits.max_early_pages
        ):
            return f"{len(theirs)} destinations of this decode leader wait already (limits.early_share)"
        return None

    def _keep(self, room: Room, parked: ParkedDestination) -> None:
        room.parked[parked.message.transfer] = parked
        self._deadlines.add(parked.timer)
        self.parked += 1
        self.parked_pages += len(parked.message.pages)

    def _unpark(self, parked: ParkedDestination) -> None:
        """Undo `_keep`, but for the room's entry."""
        self._deadlines.cancel(parked.timer)
        self.parked -= 1
        self.parked_pages -= len(parked.message.pages)

    def _parked_late(self, message: Destination) -> None:
        room = self.rooms[message.transfer.sent_as]
        parked = room.parked.pop(message.transfer)
        self._unpark(parked)
        if room.state is _S.PARKED:
            text = f"the request of room {room.key.room} did not come to this prefill leader in time"
            late: SegueError = BootstrapTimeout(text)
        else:
            late = DeadlineExceeded(f"another attempt has room {room.key.room}, and it did not end in time")
            room.doubt = None
        self._refuse(parked.peer, message.transfer, late.info)
        self._forget_if_empty(room)

    def _forget_if_empty(self, room: Room) -> None:
        if room.state is _S.PARKED and not room.parked and not room.declined:
            self._forget(room)

    # ---- binding ---------------------------------------------------------------------------------

    def _bind(self, room: Room, peer: LeaderId, message: Destination) -> None:
        opened, permits = room.opened, room.permits
        if opened.decode not in (None, peer) and not any(leader == peer for _, _, leader in permits):
            text = f"room {room.key.room} was placed for decode {opened.decode}"
            self._refuse(peer, message.transfer, PeerRefused(text, retryable=False).info)
            return
        machine = self._accepted(room, peer, message)
        if machine is None:
            return
        room.state, room.machine, room.bound_to = _S.BOUND, machine, peer
        room.holding.add(machine.transfer)
        self._host.add(machine, room)
        self._replay(room, machine)

    def _accepted(self, room: Room, peer: LeaderId, message: Destination) -> SenderMachine | None:
        """The machine of a destination that is right; of another one None, and it is refused."""
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
        """The machine of a destination, whoever may bind. Raises what is wrong with it."""
        opened = room.opened
        if not hmac.compare_digest(opened.claim, message.claim):
            raise MetadataMismatch(
                "decode asks for another prompt, salt, adapter or model than prefill has under this room; "
                "each request needs a room of its own",
                retryable=False,
            )
        if self._host.epoch_owner(peer, message.epoch) is not None:
            raise TransferFailed(f"decode uses epoch {message.epoch:x} for two hand-offs")
        args = self._host.args(message.transfer, peer, opened.prompt_tokens, room.timer.at)
        return SenderMachine(args, message)

    def _replay(self, room: Room, machine: SenderMachine) -> None:
        """Give the binding what the engine has sent. The newest pages hold every earlier span."""
        prompt = room.opened.prompt_tokens
        sent: list[SendChunk | SendMetadata | None] = [
            SendChunk(room.key, span, room.pages, room.slot if span.end == prompt else None)
            for span in room.spans
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
        parked = None if room is None else room.parked.pop(transfer, None)
        if parked is not None:
            self._unpark(parked)
        if transfer not in self._tombstones.ended:
            self._refuse(transfer.decode, transfer, event.error)
        if room is not None:
            self._forget_if_empty(room)

    def _refuse(self, peer: LeaderId, transfer: TransferId, error: ErrorInfo) -> None:
        """A destination that binds nothing. The tombstone comes first: `Gone` is a proof only with it."""
        error = self._tombstones.record(error, transfer.room, peer)
        self._tombstones.add_unopened(transfer, error, ended_by_peer=True)
        self._turn.emit(Send(peer, Failed(transfer, error)))
        self._turn.emit(Send(peer, Gone(transfer)))

    def _contest(self, room: Room, waiting: ParkedDestination) -> None:
        """A destination for a room that has a live binding, or one in doubt."""
        message, live = waiting.message, room.machine.transfer if room.machine is not None else room.doubt
        known = message.transfer in room.parked
        if live is None or message.replaces != live.attempt or (room.parked and not known):
            if known:
                return
            text = f"attempt {live.attempt if live else 0} of decode has room {room.key.room}"
            self._refuse(waiting.peer, message.transfer, TransferFailed(text).info)
            return
        if not known:
            if self._accepted(room, waiting.peer, message) is None:
                return  # what is wrong with it ends no other one
            self._keep(room, waiting)
        permit = (live.attempt, message.transfer.attempt, waiting.peer)
        if room.doubt is not None or not (waiting.peer == live.decode or permit in room.permits):
            return  # it waits for the answer, or for the placer's word
        error = self._tombstones.record(
            TransferFailed("another attempt replaces this one").info, room.key.room, live.decode
        )
        if room.machine is not None and room.machine.in_doubt:
            room.doubt = live
            self._turn.emit(Send(live.decode, Failed(live, error)))
        elif room.machine is not None:
            room.replacing = True
            self._host.tell(room.machine, AbortTransfer(live, error))

    def _bind_waiting(self, room: Room) -> None:
        for waiting in list(room.parked.values()):
            self._unpark(waiting)
            del room.parked[waiting.message.transfer]
            rest_s = waiting.timer.at - self._turn.now
            self._destination(room, waiting.peer, replace(waiting.message, budget_s=rest_s))

    # ---- what a binding says -----------------------------------------------------------------------

    def on_phase(self, room: Room, effect: HandoffPhase) -> None:
        """The room's machine has entered a phase."""
        if room.machine is None or effect.transfer != room.machine.transfer:
            return  # one that was replaced
        match effect.phase:
            case KVPoll.SUCCESS:
                self._committed(room, effect)
            case KVPoll.FAILED:
                self._failed(room, effect.error or Internal("failed without a reason").info)
            case _ if effect.phase > room.phase:
                room.phase = effect.phase
                self._turn.emit(Phase(room.key, effect.phase))
            case _:
                pass

    def _committed(self, room: Room, effect: HandoffPhase) -> None:
        """Decode has it all: who waited to replace it gets `Gone`."""
        room.machine, room.doubt, room.success = None, None, effect
        parked, room.parked = room.parked, {}
        for waiting in parked.values():
            self._unpark(waiting)
            taken = TransferFailed(f"an earlier attempt at room {room.key.room} has succeeded")
            self._refuse(waiting.peer, waiting.message.transfer, taken.info)
        if room.opened.retain_s and not room.ending:
            room.state = _S.EXPECTED
            self._retime(room, min(room.timer.at, self._turn.now + room.opened.retain_s))
        else:
            self._close(room, None)

    def _failed(self, room: Room, error: ErrorInfo) -> None:
        room.machine, replacing = None, room.replacing
        room.replacing = False
        room.failed_bindings += 1
        room.error = error
        over = self._turn.now >= room.timer.at or error.code in _DOUBTFUL
        spent = room.failed_bindings >= self._limits.max_bindings
        if room.ending or over or spent or not (room.opened.retain_s or replacing or room.doubt):
            self._close(room, error, tell=False)
            return
        room.state = _S.EXPECTED
        if room.doubt is None:
            self._bind_waiting(room)

    def on_release(self, room: Room, transfer: TransferId) -> None:
        """A machine of the room touches the pages no more."""
        room.holding.discard(transfer)
        if room.state is _S.CLOSED and not room.holding:
            self._turn.emit(Release(room.key))

    # ---- sessions and time -------------------------------------------------------------------------

    def peer_down(self, event: PeerDown) -> None:
        """Before the machines hear of it. Destinations of this peer that wait are void; a room that was
        placed for it alone fails."""
        for room in list(self.rooms.values()):
            for waiting in [p for p in room.parked.values() if p.peer == event.peer]:
                self._unpark(waiting)
                transfer = waiting.message.transfer
                del room.parked[transfer]
                error = self._tombstones.record(event.error, transfer.room, event.peer)
                self._tombstones.add_unopened(transfer, error, ended_by_peer=True, until=waiting.timer.at)
            self._forget_if_empty(room)
            if room.state is _S.EXPECTED and room.doubt is not None:
                if room.doubt.decode == event.peer and event.dead:
                    room.doubt = None
                    self._bind_waiting(room)
            elif room.state is _S.EXPECTED and room.opened.decode == event.peer and not room.opened.retain_s:
                self._close(room, self._record(room, event.error))
            elif room.doubt is not None and room.doubt.decode == event.peer and event.dead:
                room.doubt, room.replacing = None, True

    def _due(self, timer: DeadlineEntry, key: RoomKey) -> None:
        room = self.rooms.get(key)
        if room is None or room.timer is not timer:
            return
        if room.state is _S.CLOSED:
            if room.holding:  # a quarantined room stays until its last page is proven free
                self._retime(room, self._turn.now + self._limits.peer_silence_s)
            else:
                self._forget(room)
        elif room.state is _S.PARKED:
            room.declined.clear()
            self._forget_if_empty(room)
        elif room.state is _S.EXPECTED:
            self._close(room, self._late(room))

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
        decode leader that it was placed for hears of the failure."""
        self._settle(room)
        room.state, room.doubt = _S.CLOSED, None
        self.open -= 1
        self._closed[room.key] = None
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
        parked, room.parked = room.parked, {}
        for waiting in parked.values():
            self._unpark(waiting)
            self._refuse(waiting.peer, waiting.message.transfer, error or self._over(room))
        if not room.holding:
            self._turn.emit(Release(room.key))
        room.spans, room.pages, room.partial, room.metadata = [], (), None, None
        room.permits.clear()
        room.declined.clear()
        self._retime(room, max(room.timer.at, self._turn.now + self._limits.peer_silence_s))
        self._bound_closed()

    def _tell_placed(self, room: Room, decode: LeaderId, error: ErrorInfo) -> None:
        transfer = self._placed(room.opened, decode)
        if transfer not in self._tombstones.ended and transfer not in room.holding:
            self._tombstones.add_unopened(transfer, error, ended_by_peer=False, until=room.timer.at)
            self._turn.emit(Send(decode, Failed(transfer, error)))
            self._turn.emit(Send(decode, Gone(transfer)))

    def _bound_closed(self) -> None:
        if len(self._closed) > self._limits.max_transfers:
            oldest = next((key for key in self._closed if not self.rooms[key].holding), None)
            if oldest is not None:
                self._forget(self.rooms[oldest])

    # ---- the table of rooms ------------------------------------------------------------------------

    def _new(self, key: RoomKey, state: RoomState, at: float) -> Room:
        room = self.rooms[key] = Room(key, state, DeadlineEntry(at, lambda timer: self._due(timer, key)))
        self._deadlines.add(room.timer)
        return room

    def _retime(self, room: Room, at: float) -> None:
        self._deadlines.cancel(room.timer)
        key = room.key
        room.timer = DeadlineEntry(at, lambda timer: self._due(timer, key))
        self._deadlines.add(room.timer)

    def _forget(self, room: Room) -> None:
        self._settle(room)
        self._deadlines.cancel(room.timer)
        self._closed.pop(room.key, None)
        del self.rooms[room.key]

    def problems(self) -> list[str]:
        """Every rule that does not hold, in words."""
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
            if not room.timer.live:
                found.append(f"room {room.key} has no deadline")
        parked = [p for room in rooms for p in room.parked.values()]
        pages = sum(len(p.message.pages) for p in parked)
        if (len(parked), pages) != (self.parked, self.parked_pages):
            found.append("the counts of parked destinations disagree with the table")
        states = [room.state for room in rooms]
        if self.open != states.count(_S.EXPECTED) + states.count(_S.BOUND):
            found.append(f"{self.open} rooms are counted as open")
        if len(self._closed) != states.count(_S.CLOSED):
            found.append(f"{len(self._closed)} rooms are counted as closed")
        return found

    @property
    def timers(self) -> list[DeadlineEntry]:
        """All timers of this table."""
        rooms = self.rooms.values()
        return [room.timer for room in rooms] + [p.timer for room in rooms for p in room.parked.values()]

    TABLE: ClassVar[Mapping[RoomState, Mapping[type, Callable[..., None]]]] = {
        _S.UNKNOWN: {
            Destination: _destination_of,
            Declined: _declined,
            Failed: _peer_ended,
            Abort: _peer_ended,
        },
        _S.PARKED: {
            Destination: _destination_of,
            Declined: _declined,
            Failed: _peer_ended,
            Abort: _peer_ended,
            Gone: _gone,
        },
        _S.EXPECTED: {
            Destination: _destination_of,
            Declined: _declined,
            Failed: _peer_ended,
            Abort: _peer_ended,
            Gone: _gone,
        },
        _S.BOUND: {
            Destination: _destination_of,
            Declined: _repeated,
            Failed: _peer_ended,
            Abort: _peer_ended,
            Gone: _gone,
        },
        _S.CLOSED: {
            Destination: _destination_of,
            Declined: _repeated,
        },
    }
