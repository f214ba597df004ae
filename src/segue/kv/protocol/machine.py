"""The common part of both halves of a hand-off; who may end one, and the proof that memory is free again.

**A machine** is a table, `TABLE`: state × class of event → a handler, and the next state. `FOLLOWS` has the
states that are left without an event: as soon as their condition holds, the step beside it is taken.
Handlers append effects to the exchange's `Turn`.

- An event without a row, and an answer that nobody waits for, is an `IllegalEvent`: nothing changes.
- If a handler raises anything else, the state stays, none of its effects is carried out, and the exchange
  ends this hand-off. So do messages that contradict the plan, wrong checksums, and bugs.

A *state* is the machine's own. Its *phase* is what the engine is shown of it (`STATES`).

**Who may end a hand-off.** Either half, alone, in every state before its end; the reason makes no
difference.

| who | by which event |
|---|---|
| its engine, also because a client or a frontend wants so; its room | `AbortTransfer` |
| its clock | `Tick`, at the request's deadline |
| its peer, which has failed, or has stopped | `Failed`, `Drained` |
| its peer, which asks prefill to stop, or has no such hand-off | `Abort`, `Gone` |
| its peer, whose other DP rank has the room | `Moved` |
| its session | `PeerDown` |
| its ranks | `WriteBroken`; `ChecksumReady` with an error, or with the wrong checksum |
| whatever else is wrong | a handler raises; no other hand-off ends by that |
| success | decode alone, when the tally is complete (`FOLLOWS`); prefill learns it by `Committed` |

Each half ends once. It tells its room (`HandoffPhase`) and sends its peer `Failed`, unless the peer has ended
it.
Without a session it sends that over the next one (`End`). Later events change no outcome; they can only be
proofs.

**Who may touch the pages** is part of each state (`STATES`, `lease.py`). Pages that nobody else could touch
yet are free when the hand-off ends: decode's, as long as nobody was told of them; prefill's, as long as no
write of them was started. All others are in quarantine after a failure until all three of these are known. A
`Fence` tells one of our own ranks to stop all that it sends and writes for this hand-off; it answers
(`FenceDone`) when it has.

1. *Our ranks have stopped*: each of ours in the plan has answered its own `Fence`s, one for every rank that
   it exchanges bytes with. On prefill they read the pages, to send them. On decode they write, too: what
   arrives over `tcp`, and what one rank passes on to another (`Relay`: both ends of such a write are
   fenced).
2. *The peer writes no more.* Decode only; into prefill's pages nobody writes. One of these:

   - The answers of 1 for prefill's ranks say so, too (`FenceDone.proven`). Over `tcp` they do: decode itself
     puts the bytes in their place, and drops what comes later. Over `shm` they do not: prefill writes into
     decode's memory itself.
   - Prefill said `Drained` (all its ranks have answered their fences) or `Gone` (it has no such hand-off).
   - All processes of that prefill leader that write here are known to be dead (`PeerDown.dead`): the kernel
     or the transport says so.
3. *No checksum reads*: each `ComputeChecksum` was answered by the rank that was asked.

No proof is: a time that has passed, a lost session, an error, the answer of another rank, a word of another
incarnation. Nor is prefill's word without 1: what it sent over a stream that broke may still be put in its
place by decode's own thread.

**If no proof comes** the pages stay in quarantine, at worst until the process ends: less memory, but never a
wrong token. So it is with a rank of ours that hangs, and, where our fences prove nothing, with a prefill
that can neither be reached nor be known to be dead. So it is, too, when a handler breaks (a bug) on the
event that was the proof: it is never shown the same event again.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import msgspec

from segue.kv.errors import (
    DeadlineExceeded,
    ErrorInfo,
    Internal,
    SegueError,
    TransferFailed,
)
from segue.kv.ids import ChecksumKind, KVPoll, LeaderId, RankId, TransferId
from segue.kv.layout.planner import PairPlan
from segue.kv.protocol.events import (
    AbortTransfer,
    ChecksumReady,
    Effect,
    Fence,
    FenceDone,
    HandoffPhase,
    HandoffReleased,
    PeerDown,
    Send,
    Tick,
    Turn,
)
from segue.kv.protocol.lease import Lease
from segue.kv.protocol.link import LocalLeader, PeerLink
from segue.kv.protocol.messages import Failed, HandoffMessage
from segue.kv.protocol.tally import Fences
from segue.kv.protocol.timers import DeadlineEntry

Asked = TypeVar("Asked")
#: Handles an event. Returns None, or the next state if its row has several.
Handler = Callable[[Any, Any], enum.StrEnum | None]
#: A handler and the next state, or the ones that it chooses from.
Row = tuple[Handler, enum.StrEnum, *tuple[enum.StrEnum, ...]]
#: When something follows by itself, what is done then, and the next state.
Follow = tuple[Callable[[Any], bool], Callable[[Any], None], enum.StrEnum]


def rows(after: enum.StrEnum, handlers: Mapping[type[Any], Handler]) -> dict[type[Any], Row]:
    """Rows of a table that all lead to `after`."""
    return {event: (handler, after) for event, handler in handlers.items()}


class IllegalEvent(Internal):
    """The table does not allow this event here, or nobody waits for this answer: it changes nothing."""


class End(enum.Enum):
    """How a failure came to this half, and so what its peer is told."""

    HERE = "it began here: the peer is told"
    BY_PEER = "the peer ended it, and knows"
    SESSION_LOST = "there is no session; the peer is told over the next one"


@dataclass(frozen=True, slots=True)
class MachineArgs:
    """The arguments of a new machine. `link` is the session to `peer`, if there is one; `deadline` is in
    seconds of the caller's clock; `new_epoch` makes a number that no hand-off has had; `due` is called when
    the deadline has passed."""

    local: LocalLeader
    turn: Turn
    new_epoch: Callable[[], int]
    due: Callable[[DeadlineEntry], None]
    transfer: TransferId
    peer: LeaderId
    link: PeerLink | None
    prompt_tokens: int
    deadline: float


class Machine:
    """One half of one hand-off and everything it holds."""

    TABLE: ClassVar[Mapping[Any, Mapping[type[Any], Row]]]
    FOLLOWS: ClassVar[Mapping[Any, Follow]]
    #: For each state: the answer of `poll`, and who may touch the pages.
    STATES: ClassVar[Mapping[Any, tuple[KVPoll, Lease]]]

    __slots__ = (
        "_plan",
        "checksum",
        "deadline",
        "declined",
        "ended_by_peer",
        "epoch",
        "error",
        "exposed_pages",
        "fences",
        "link",
        "local",
        "new_epoch",
        "opened_at",
        "partners",
        "peer",
        "prefix_tokens",
        "prompt_tokens",
        "state",
        "timer",
        "transfer",
        "transport",
        "turn",
    )

    def __init__(self, args: MachineArgs) -> None:
        self.local = args.local
        self.turn = args.turn
        self.new_epoch = args.new_epoch
        self.transfer = args.transfer
        self.peer = args.peer
        self.link = args.link
        self.prompt_tokens = args.prompt_tokens
        self.deadline = args.deadline
        self.opened_at = args.turn.now
        self.timer = DeadlineEntry(args.deadline, args.due)
        self.state: enum.StrEnum = next(iter(self.TABLE))
        self.error: ErrorInfo | None = None
        self._plan: PairPlan | None = None
        #: by our rank in the plan: the ranks that it exchanges bytes with
        self.partners: Mapping[int, Sequence[RankId]] = {}
        self.transport = ""
        #: how both sides compute checksums, if they do
        self.checksum: ChecksumKind | None = None
        self.prefix_tokens = 0
        self.epoch = 0
        #: How many pages somebody else may touch, while the lease says that somebody may.
        self.exposed_pages = 0
        self.fences = Fences({}, args.peer)
        #: The peer ended this hand-off, so it need not hear of it.
        self.ended_by_peer = False
        #: see `Tombstone.declined`
        self.declined: bytes | None = None

    @property
    def phase(self) -> KVPoll:
        """The answer to `poll`."""
        return self.STATES[self.state][0]

    @property
    def lease(self) -> Lease:
        """The access to the pages."""
        return self.STATES[self.state][1]

    @property
    def ended(self) -> bool:
        """Nothing is held any more; the exchange forgets the machine."""
        return self.lease is Lease.RELEASED

    @property
    def plan(self) -> PairPlan:
        """How the pools of the pair are copied into one another; fixed by `meet`."""
        if self._plan is None:
            raise Internal("no layout of the peer yet")
        return self._plan

    def begin(self) -> None:
        """The exchange knows the machine from now on."""
        self.emit(HandoffPhase(self.transfer, self.phase))

    def meet(self, link: PeerLink) -> None:
        """Use the plan of this session until the end."""
        self._plan, self.partners, self.transport = link.plan, link.partners, link.transport
        self.checksum = link.checksum

    def take(self, event: object) -> None:
        """Do what the table says of `event`, and what follows from it. Raises IllegalEvent, with nothing
        changed, if it says nothing; any other error ends this hand-off (see `Exchange`)."""
        row = self.TABLE[self.state].get(type(event))
        if row is None:
            raise self.illegal(f"{type(event).__name__} is not legal in {self.state}")
        effects = self.turn.effects
        done = len(effects)
        try:
            self.state = row[0](self, event) or row[1]
            done = len(effects)
            while (follow := self.FOLLOWS.get(self.state)) is not None and follow[0](self):
                follow[1](self)
                self.state = follow[2]
                done = len(effects)
        except BaseException:
            # The state has not moved, so nothing of this may be carried out: a write that was posted from a
            # state whose pages count as untouched would be forgotten.
            del effects[done:]
            raise

    def fail(self, error: ErrorInfo) -> None:
        """End with an error that begins here; a no-op after the end."""
        if not self.phase.terminal:
            self.take(AbortTransfer(self.transfer, error))

    def illegal(self, text: str) -> IllegalEvent:
        """The error of an event that must not come now, or not so."""
        return IllegalEvent(text, phase=self.phase.name, room=self.transfer.room)

    def problem(self, kind: type[SegueError], text: str) -> ErrorInfo:
        """A record of an error that begins here and now."""
        return self.fill(kind(text).info)

    def fill(self, error: ErrorInfo) -> ErrorInfo:
        """`error` with its empty fields filled in: it began at this side."""
        return msgspec.structs.replace(
            error,
            phase=error.phase or self.phase.name,
            origin=error.origin or self.local.origin,
            peer=error.peer or self.local.name_of(self.peer),
            room=error.room or self.transfer.room,
            elapsed_s=error.elapsed_s or self.turn.now - self.opened_at,
        )

    def deadline_error(self) -> ErrorInfo:
        """The error of a deadline that passes in this phase."""
        text = f"the deadline passed in {self.phase.name} after {self.turn.now - self.opened_at:.3f} s"
        return self.problem(DeadlineExceeded, text)

    def broken_rule(self) -> str:
        """The first invariant of this object that does not hold, or an empty string."""
        if self.phase is KVPoll.FAILED and self.error is None:
            return f"{self.transfer} has failed without an error"
        return ""

    # ---- what handlers are made of -----------------------------------------------------------------

    def emit(self, effect: Effect) -> None:
        """Add an effect of this turn."""
        self.turn.effects.append(effect)

    def send(self, message: HandoffMessage) -> None:
        """Say something to the peer."""
        self.emit(Send(self.peer, message))

    def fence(self) -> None:
        """Have every rank of ours end the epoch for each rank that it exchanges bytes with; the answers are
        collected in `fences`."""
        self.fences = Fences(self.partners, self.peer)
        for rank, others in self.partners.items():
            for other in others:
                self.emit(Fence(self.transfer, rank, other, self.epoch))

    def end(self, error: ErrorInfo, end: End) -> None:
        """End with `error`: record it, and inform the engine and the peer."""
        self.error = error
        self.ended_by_peer = end is End.BY_PEER
        self.emit(HandoffPhase(self.transfer, KVPoll.FAILED, error=error))
        if end is End.HERE:
            self.send(Failed(self.transfer, error))

    def release(self) -> None:
        """Nobody but our engine touches the pages any more."""
        self.emit(HandoffReleased(self.transfer))

    # ---- handlers of both halves -------------------------------------------------------------------

    def on_abort(self, event: AbortTransfer) -> None:
        """Our engine, or an error in a handler, ends this hand-off."""
        self.end(self.fill(event.error), End.HERE)

    def on_deadline(self, event: Tick) -> None:
        """The deadline has passed."""
        self.end(self.deadline_error(), End.HERE)

    def on_failed(self, event: Failed) -> None:
        """The peer's half has failed."""
        self.end(event.error, End.BY_PEER)

    def on_session_lost(self, event: PeerDown) -> None:
        """The session to the peer has ended."""
        self.end(self.fill(event.error), End.SESSION_LOST)

    def peer_ended(self, text: str) -> None:
        """The peer is through with this hand-off and has not said why."""
        self.end(self.problem(TransferFailed, text), End.BY_PEER)

    def resend_failure(self) -> None:
        """Say again that this hand-off has failed: a session that broke may have lost it."""
        if self.error is not None and not self.ended_by_peer:
            self.send(Failed(self.transfer, self.error))

    def on_fenced(self, event: FenceDone) -> None:
        """One of our ranks has answered its fence. Raises IllegalEvent if that is no news."""
        if not self.fences.answer(event.rank, event.partner, event.proven):
            raise self.illegal(f"no fence for {event.partner} is waited for at rank {event.rank}")

    def asked(self, waiting: dict[tuple[int, int], Asked], rank: int, tag: int) -> Asked:
        """Take what our rank `rank` was asked for under `tag` out of `waiting`. Raises IllegalEvent if it was
        not asked for that: one rank's answer is never taken for another's."""
        if (rank, tag) not in waiting:
            raise self.illegal(f"nothing is waited for from rank {rank} under tag {tag}")
        return waiting.pop((rank, tag))

    @staticmethod
    def checked(event: ChecksumReady) -> int:
        """The checksum, or the reason why there is none, raised."""
        if event.error is not None:
            raise event.error.exception()
        return event.checksum
