"""What the sender and the receiver machine have in common.

A machine is a transition table, the things one hand-off holds, and one way to fail. It appends
effects to the list it is given; it never raises after it changed state, with one exception: a
`SegueError` out of a message handler, upon which the `Exchange` fails the machine with that error.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec

from segue.core.errors import DeadlineExceeded, ErrorInfo, Internal, SegueError
from segue.core.types import KVPoll, LeaderId, TransferId
from segue.handoff.events import ChecksumReady, Effect, Send
from segue.handoff.lease import Lease, LeaseState
from segue.handoff.link import LocalLeader, PeerLink
from segue.handoff.messages import Failed, HandoffMessage
from segue.handoff.timers import Timer
from segue.layout.planner import PairPlan


class IllegalEvent(Internal):
    """The caller did something that the table does not allow here. Nothing has changed."""


@dataclass(frozen=True, slots=True)
class MachineArgs:
    """What a machine knows from its beginning. `deadline` and `now` are the caller's clock."""

    local: LocalLeader
    transfer: TransferId
    peer: LeaderId
    prompt_tokens: int
    deadline: float
    now: float


class Machine:
    """One half of one hand-off and everything it holds."""

    TABLE: ClassVar[Mapping[Any, Mapping[Any, Any]]]
    PHASES: ClassVar[Mapping[Any, KVPoll]]
    ENDS: ClassVar[frozenset[Any]]

    __slots__ = (
        "deadline",
        "epoch",
        "error",
        "lease",
        "local",
        "opened_at",
        "peer",
        "peer_name",
        "peer_notified",
        "plan",
        "prefix_tokens",
        "prompt_tokens",
        "state",
        "timer",
        "transfer",
        "transport",
    )

    def __init__(self, args: MachineArgs) -> None:
        self.local = args.local
        self.transfer = args.transfer
        self.peer = args.peer
        #: how errors name the peer
        self.peer_name = args.local.name_of(args.peer)
        self.prompt_tokens = args.prompt_tokens
        self.deadline = args.deadline
        self.opened_at = args.now
        self.timer = Timer(args.transfer, args.deadline)
        self.state: enum.StrEnum = next(iter(self.TABLE))
        self.lease = Lease()
        self.error: ErrorInfo | None = None
        self.plan: PairPlan | None = None
        self.prefix_tokens = 0
        self.epoch = 0
        self.transport = ""
        #: The peer ended this hand-off itself, so it need not hear of it again.
        self.peer_notified = False

    @property
    def phase(self) -> KVPoll:
        """What `poll` answers."""
        return self.PHASES[self.state]

    @property
    def ended(self) -> bool:
        """Nothing is held any more; the exchange forgets the machine."""
        return self.state in self.ENDS

    def expect(self, step: enum.StrEnum) -> None:
        """Raise IllegalEvent unless `step` is legal now."""
        if step not in self.TABLE[self.state]:
            raise IllegalEvent(
                f"'{step}' is not legal in {self.state}", phase=self.phase.name, room=self.transfer.room
            )

    def go(self, step: enum.StrEnum) -> None:
        """Take one transition, or raise IllegalEvent and stay."""
        self.expect(step)
        self.state = self.TABLE[self.state][step]

    def problem(self, kind: type[SegueError], text: str, now: float) -> ErrorInfo:
        """A record of an error that begins here and now."""
        return self.fill(kind(text).info, now)

    def fill(self, error: ErrorInfo, now: float) -> ErrorInfo:
        """`error` with its empty fields filled in: it began at this side."""
        return msgspec.structs.replace(
            error,
            phase=error.phase or self.phase.name,
            origin=error.origin or self.local.origin,
            peer=error.peer or self.peer_name,
            room=error.room or self.transfer.room,
            elapsed_s=error.elapsed_s or now - self.opened_at,
        )

    def expire(self, now: float, out: list[Effect]) -> None:
        """The deadline has passed."""
        if not self.phase.terminal:
            self.fail(self.deadline_error(now), now, out)

    def deadline_error(self, now: float) -> ErrorInfo:
        """What a passed deadline means in this phase."""
        text = f"the deadline passed in {self.phase.name} after {now - self.opened_at:.3f} s"
        return self.problem(DeadlineExceeded, text, now)

    def resend_failure(self, out: list[Effect]) -> None:
        """Say again that this hand-off has failed: a session that broke may have lost it."""
        if self.phase is KVPoll.FAILED and self.error is not None and not self.peer_notified:
            out.append(Send(self.peer, Failed(self.transfer, self.error)))

    def broken_rule(self) -> str:
        """The first invariant of this object that does not hold, or an empty string."""
        if self.lease.state is LeaseState.RELEASED and not self.ended:
            return f"{self.transfer} is {self.state} but its lease has ended"
        if self.phase is KVPoll.FAILED and self.error is None:
            return f"{self.transfer} has failed without an error"
        return ""

    # What each half does in its own way.

    def fail(
        self,
        error: ErrorInfo,
        now: float,
        out: list[Effect],
        *,
        peer_notified: bool = False,
        lost: bool = False,
    ) -> None:
        """End with `error`; a no-op in a terminal phase. `peer_notified`: the peer knows already;
        `lost`: there is no session to tell it over."""
        raise Internal(f"{type(self).__name__} cannot fail")

    def receive(self, message: HandoffMessage, link: PeerLink, now: float, out: list[Effect]) -> None:
        """A message of this hand-off's peer."""
        raise Internal(f"{type(self).__name__} cannot receive")

    def peer_up(self, link: PeerLink, now: float, out: list[Effect]) -> None:
        """A session to this hand-off's peer has opened."""
        raise Internal(f"{type(self).__name__} cannot see a peer")

    def peer_down(self, error: ErrorInfo, dead: bool, now: float, out: list[Effect]) -> None:
        """The session to this hand-off's peer has ended."""
        raise Internal(f"{type(self).__name__} cannot lose a peer")

    def checksum_ready(self, event: ChecksumReady, now: float, out: list[Effect]) -> bool:
        """A checksum of our own bytes; False when nobody asked (any more)."""
        raise Internal(f"{type(self).__name__} cannot read")

    def fence_done(self, proven: bool, now: float, out: list[Effect]) -> bool:
        """The transport's answer to our fence; False when nobody asked (any more)."""
        raise Internal(f"{type(self).__name__} cannot fence")
