"""The decode half of one hand-off (`KVReceiver`)."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import ClassVar

from segue.core.errors import DeadlineExceeded, DpRankConflict, ErrorInfo, TransferFailed
from segue.core.types import KVPoll
from segue.handoff.events import (
    ChecksumReady,
    ComputeChecksum,
    Effect,
    Fence,
    Grant,
    Phase,
    Publish,
    Quarantined,
    Release,
    Send,
)
from segue.handoff.lease import LeaseState, LeaseStep
from segue.handoff.link import PeerLink
from segue.handoff.machine import IllegalEvent, Machine, MachineArgs
from segue.handoff.messages import (
    Abort,
    ChunkPosted,
    Committed,
    Destination,
    Drained,
    Failed,
    Gone,
    HandoffMessage,
    Metadata,
    Moved,
)
from segue.handoff.tally import Tally, expected_pages, page_problem
from segue.layout.content import Sample


class ReceiverState(enum.StrEnum):
    """`PUBLISHED` is WAITING_FOR_INPUT with pages that a peer may write into; `QUARANTINED` is FAILED
    with such pages; the last two hold nothing."""

    BOOTSTRAPPING = "BOOTSTRAPPING"
    WAITING_FOR_INPUT = "WAITING_FOR_INPUT"
    PUBLISHED = "PUBLISHED"
    TRANSFERRING = "TRANSFERRING"
    QUARANTINED = "QUARANTINED"
    SUCCESS = "SUCCESS"
    FAILED = "FAILED"


class ReceiverStep(enum.StrEnum):
    """What moves a receiver."""

    PEER_UP = "PeerUp"
    PUBLISH = "Publish"
    CHUNK = "ChunkPosted received"
    METADATA = "Metadata received"
    CHECKSUM = "ChecksumReady"
    COMPLETE = "tally complete"
    FAIL = "fails"
    PROOF = "fence proven, nothing read"


_S, _E = ReceiverState, ReceiverStep

RECEIVER_TABLE: Mapping[ReceiverState, Mapping[ReceiverStep, ReceiverState]] = {
    _S.BOOTSTRAPPING: {_E.PEER_UP: _S.WAITING_FOR_INPUT, _E.FAIL: _S.FAILED},
    _S.WAITING_FOR_INPUT: {_E.PUBLISH: _S.PUBLISHED, _E.FAIL: _S.FAILED},
    _S.PUBLISHED: {
        _E.METADATA: _S.PUBLISHED,
        _E.CHUNK: _S.TRANSFERRING,
        _E.FAIL: _S.QUARANTINED,
    },
    _S.TRANSFERRING: {
        _E.CHUNK: _S.TRANSFERRING,
        _E.METADATA: _S.TRANSFERRING,
        _E.CHECKSUM: _S.TRANSFERRING,
        _E.COMPLETE: _S.SUCCESS,
        _E.FAIL: _S.QUARANTINED,
    },
    _S.QUARANTINED: {_E.CHECKSUM: _S.QUARANTINED, _E.PROOF: _S.FAILED},
    _S.SUCCESS: {},
    _S.FAILED: {},
}


class ReceiverMachine(Machine):
    """Publishes pages, tallies and verifies what lands in them, commits; or fails and waits for a fence."""

    TABLE = RECEIVER_TABLE
    PHASES: ClassVar[Mapping[ReceiverState, KVPoll]] = {
        _S.BOOTSTRAPPING: KVPoll.BOOTSTRAPPING,
        _S.WAITING_FOR_INPUT: KVPoll.WAITING_FOR_INPUT,
        _S.PUBLISHED: KVPoll.WAITING_FOR_INPUT,
        _S.TRANSFERRING: KVPoll.TRANSFERRING,
        _S.QUARANTINED: KVPoll.FAILED,
        _S.SUCCESS: KVPoll.SUCCESS,
        _S.FAILED: KVPoll.FAILED,
    }
    ENDS: ClassVar[frozenset[ReceiverState]] = frozenset({_S.SUCCESS, _S.FAILED})

    __slots__ = ("_fenced", "_proven", "pages", "tally")

    def __init__(self, args: MachineArgs) -> None:
        super().__init__(args)
        self.tally: Tally | None = None
        self.pages: tuple[int, ...] = ()
        #: No write can start or land any more; our own transport may be inside one, a verification may read.
        self._proven = False
        #: Our transport has answered: it is inside no write of this epoch.
        self._fenced = False

    # ---- the engine ----------------------------------------------------------------------------

    def publish(self, event: Publish, epoch: int, now: float, out: list[Effect]) -> None:
        """Let the peer write into `event.pages`. Raises IllegalEvent, unchanged, for wrong pages."""
        self.expect(ReceiverStep.PUBLISH)
        plan = self.plan
        if plan is None:
            raise IllegalEvent("no layout of the peer yet", room=self.transfer.room)
        due = expected_pages(self.prompt_tokens, event.prefix_tokens, plan.target_page_tokens)
        pages = list(event.pages[: max(0, due)])
        problem = page_problem(pages, self.prompt_tokens, event.prefix_tokens, plan)
        if problem:
            raise IllegalEvent(f"cannot publish {problem}", room=self.transfer.room)
        self.go(ReceiverStep.PUBLISH)
        self.lease.publish(len(pages))
        self.pages = tuple(pages)
        self.epoch = epoch
        self.prefix_tokens = event.prefix_tokens
        self.tally = Tally(self.transfer, plan, event.prefix_tokens, self.prompt_tokens)
        message = Destination(
            transfer=self.transfer,
            epoch=epoch,
            budget_s=self.deadline - now,
            prompt_tokens=self.prompt_tokens,
            prefix_tokens=event.prefix_tokens,
            pages=pages,
            transport=self.transport,
            plan_hash=plan.hash(self.prompt_tokens, event.prefix_tokens, len(pages)),
        )
        # The grant comes first: a write may arrive as soon as the peer has read the message.
        out.append(Grant(self.transfer, epoch, self.pages))
        out.append(Send(self.peer, message))

    # ---- the peer ------------------------------------------------------------------------------

    def peer_up(self, link: PeerLink, now: float, out: list[Effect]) -> None:
        if self.state is ReceiverState.BOOTSTRAPPING:
            self.plan = link.usable_plan()
            self.transport = link.transport
            self.go(ReceiverStep.PEER_UP)
            out.append(Phase(self.transfer, KVPoll.WAITING_FOR_INPUT))
        elif self.state is ReceiverState.QUARANTINED:
            # The same leader is back: its word is proof, so ask for it again.
            self.resend_failure(out)
            out.append(Send(self.peer, Abort(self.transfer)))

    def peer_down(self, error: ErrorInfo, dead: bool, now: float, out: list[Effect]) -> None:
        self.fail(self.fill(error, now), now, out, lost=True)
        if dead:
            self._prove(out)

    def receive(self, message: HandoffMessage, link: PeerLink, now: float, out: list[Effect]) -> None:
        if isinstance(message, ChunkPosted):
            self._chunk(message, out)
        elif isinstance(message, Metadata):
            self._metadata(message, out)
        elif isinstance(message, Failed):
            self.fail(message.error, now, out, peer_notified=True)
        elif isinstance(message, Moved):
            text = f"the room belongs to DP rank {message.dp_rank} of this prefill instance"
            self.fail(self.problem(DpRankConflict, text, now), now, out)
        elif isinstance(message, (Drained, Gone)):
            text = "prefill does not know this hand-off (any more)"
            self.fail(self.problem(TransferFailed, text, now), now, out, peer_notified=True)
            self._prove(out)

    def _open_tally(self, what: str) -> Tally:
        if self.tally is None:
            raise TransferFailed(f"{what} came before any page was published")
        return self.tally

    def _chunk(self, message: ChunkPosted, out: list[Effect]) -> None:
        if self.phase.terminal or not self._open_tally("a chunk").chunk(message):
            return
        first = self.state is ReceiverState.PUBLISHED
        self.go(ReceiverStep.CHUNK)
        if first:
            out.append(Phase(self.transfer, KVPoll.TRANSFERRING))
        self._verify(message, out)
        self._commit_if_complete(out)

    def _verify(self, message: ChunkPosted, out: list[Effect]) -> None:
        """Have the bytes that landed hashed, if prefill said what their checksum must be."""
        tally, plan = self.tally, self.plan
        if tally is None or plan is None or message.checksum is None or len(message.span) == 0:
            return
        page = plan.target_page_tokens
        content = plan.target_content(
            message.source,
            message.target,
            message.span,
            self.pages,
            self.prefix_tokens // page * page,
            Sample(message.every, self.transfer.room + message.sequence),
        )
        out.append(ComputeChecksum(self.transfer, tally.verify(message), message.target, content))

    def checksum_ready(self, event: ChecksumReady, now: float, out: list[Effect]) -> bool:
        """What a landed chunk's checksum is; False if nobody asked. Raises ChecksumMismatch."""
        tally = self.tally
        message = None if tally is None else tally.unverified.pop(event.tag, None)
        if tally is None or message is None:
            return False
        self.go(ReceiverStep.CHECKSUM)
        if self.state is ReceiverState.QUARANTINED:
            self._release_when_fenced(out)
        elif event.error is not None:
            self.fail(self.fill(event.error, now), now, out)
        else:
            tally.check(message, event.checksum)
            self._commit_if_complete(out)
        return True

    def _metadata(self, message: Metadata, out: list[Effect]) -> None:
        if self.phase.terminal or not self._open_tally("metadata").note_metadata(message):
            return
        self.go(ReceiverStep.METADATA)
        self._commit_if_complete(out)

    def _commit_if_complete(self, out: list[Effect]) -> None:
        tally = self.tally
        if tally is None or not tally.complete:
            return
        self.go(ReceiverStep.COMPLETE)
        self.lease.end(LeaseStep.COMPLETE)
        out.append(Phase(self.transfer, KVPoll.SUCCESS, metadata=tally.metadata, wire_s=tally.last_wire_s))
        out.append(Send(self.peer, Committed(self.transfer)))
        out.append(Fence(self.transfer, self.epoch))
        out.append(Release(self.transfer))

    # ---- the end -------------------------------------------------------------------------------

    def fence_done(self, proven: bool, now: float, out: list[Effect]) -> bool:
        if self.state is not ReceiverState.QUARANTINED:
            return False
        self._fenced = True
        self._proven = self._proven or proven
        self._release_when_fenced(out)
        return True

    def _prove(self, out: list[Effect]) -> None:
        """The peer's word or death: it writes no more."""
        if self.state is ReceiverState.QUARANTINED:
            self._proven = True
            self._release_when_fenced(out)

    def _release_when_fenced(self, out: list[Effect]) -> None:
        """The pages leave quarantine once nobody can write into them and nobody reads them. The peer's word
        is not enough: what it has sent over a stream that broke may be landing right now, by our own hand."""
        if not (self._proven and self._fenced) or (self.tally is not None and self.tally.unverified):
            return
        self.go(ReceiverStep.PROOF)
        self.lease.end(LeaseStep.PROOF)
        out.append(Release(self.transfer))

    def deadline_error(self, now: float) -> ErrorInfo:
        if self.tally is None:
            return super().deadline_error(now)
        text = (
            f"the deadline passed in {self.phase.name} after {now - self.opened_at:.3f} s "
            f"without {self.tally.missing()}"
        )
        return self.problem(DeadlineExceeded, text, now)

    def fail(
        self,
        error: ErrorInfo,
        now: float,
        out: list[Effect],
        *,
        peer_notified: bool = False,
        lost: bool = False,
    ) -> None:
        if self.phase.terminal:
            return
        self.error = error
        self.peer_notified = peer_notified
        published = self.lease.state is LeaseState.PUBLISHED
        self.go(ReceiverStep.FAIL)
        self.lease.end(LeaseStep.FAIL if published else LeaseStep.UNUSED)
        out.append(Phase(self.transfer, KVPoll.FAILED, error=error))
        if not peer_notified and not lost:
            out.append(Send(self.peer, Failed(self.transfer, error)))
        if not published:
            out.append(Release(self.transfer))
            return
        if not lost:
            out.append(Send(self.peer, Abort(self.transfer)))
        # After the words: a write that the fence refuses must not reach prefill before the reason does.
        out.append(Fence(self.transfer, self.epoch))
        out.append(Quarantined(self.transfer, self.lease.pages))

    def broken_rule(self) -> str:
        """See `Machine.broken_rule`."""
        quarantined = self.state is ReceiverState.QUARANTINED
        if quarantined != (self.lease.state is LeaseState.QUARANTINED):
            return f"{self.transfer} is {self.state} with a lease that is {self.lease.state}"
        if self._proven and self._fenced and self.tally is not None and not self.tally.unverified:
            return f"{self.transfer} waits in quarantine for nothing"
        return super().broken_rule()
