"""The prefill half of one hand-off (`KVSender`)."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from segue.core.errors import (
    BootstrapTimeout,
    ErrorInfo,
    LayoutMismatch,
    TransferFailed,
)
from segue.core.types import ChecksumMode, KVPoll, Span
from segue.handoff.events import (
    ChecksumReady,
    ComputeChecksum,
    Effect,
    Fence,
    Phase,
    PostWrite,
    Release,
    Send,
    SendChunk,
    SendMetadata,
    WriteBroken,
    WriteLanded,
)
from segue.handoff.lease import LeaseState, LeaseStep
from segue.handoff.link import PeerLink
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
    HandoffMessage,
)
from segue.handoff.tally import page_problem
from segue.layout.content import Sample
from segue.layout.planner import PairPlan

#: How long a sender whose write decode refused waits for decode to say why. Decode says it before it refuses
#: anything, but over the session, which a write may overtake; without a session nothing comes.
REASON_WAIT_S = 1.0

#: A sampled checksum covers one layer in this many; following chunks look at other ones.
SAMPLE_EVERY = 8


class SenderState(enum.StrEnum):
    """`DRAINING` is a failed sender whose pages may still be read, by writes in flight or for a
    checksum; the last two hold nothing."""

    BOOTSTRAPPING = "BOOTSTRAPPING"
    WAITING_FOR_INPUT = "WAITING_FOR_INPUT"
    TRANSFERRING = "TRANSFERRING"
    DRAINING = "DRAINING"
    SUCCESS = "SUCCESS"
    FAILED = "FAILED"


class SenderStep(enum.StrEnum):
    """What moves a sender."""

    DESTINATION = "Destination received"
    SKIP = "SendChunk below the prefix"
    CHUNK = "SendChunk"
    METADATA = "SendMetadata"
    LANDED = "WriteLanded"
    REFUSED = "WriteBroken, refused"
    COMMITTED = "Committed received"
    FAIL = "fails, nothing posted"
    FAIL_POSTED = "fails, writes posted"
    CHECKSUM = "ChecksumReady"
    FENCED = "FenceDone"
    UNREAD = "fenced, nothing read"


_S, _E = SenderState, SenderStep

SENDER_TABLE: Mapping[SenderState, Mapping[SenderStep, SenderState]] = {
    _S.BOOTSTRAPPING: {_E.DESTINATION: _S.WAITING_FOR_INPUT, _E.FAIL: _S.FAILED},
    _S.WAITING_FOR_INPUT: {
        _E.SKIP: _S.WAITING_FOR_INPUT,
        _E.METADATA: _S.WAITING_FOR_INPUT,
        _E.CHUNK: _S.TRANSFERRING,
        _E.FAIL: _S.FAILED,
    },
    _S.TRANSFERRING: {
        _E.CHUNK: _S.TRANSFERRING,
        _E.METADATA: _S.TRANSFERRING,
        _E.LANDED: _S.TRANSFERRING,
        _E.REFUSED: _S.TRANSFERRING,
        _E.CHECKSUM: _S.TRANSFERRING,
        _E.COMMITTED: _S.SUCCESS,
        _E.FAIL: _S.FAILED,
        _E.FAIL_POSTED: _S.DRAINING,
    },
    _S.DRAINING: {_E.FENCED: _S.DRAINING, _E.CHECKSUM: _S.DRAINING, _E.UNREAD: _S.FAILED},
    _S.SUCCESS: {},
    _S.FAILED: {},
}


@dataclass(slots=True)
class _Write:
    """One chunk of one pair, from posting until it was announced. `summed`: its checksum is here,
    or not wanted."""

    span: Span
    sequence: int
    nbytes: int
    final: bool
    landed: bool
    summed: bool = True
    checksum: int | None = None
    every: int = 1
    wire_s: float = 0.0


class SenderMachine(Machine):
    """Waits for a destination, posts writes into it, hashes what it sends, announces what landed with its
    checksum, ends on `Committed`."""

    TABLE = SENDER_TABLE
    PHASES: ClassVar[Mapping[SenderState, KVPoll]] = {
        _S.BOOTSTRAPPING: KVPoll.BOOTSTRAPPING,
        _S.WAITING_FOR_INPUT: KVPoll.WAITING_FOR_INPUT,
        _S.TRANSFERRING: KVPoll.TRANSFERRING,
        _S.DRAINING: KVPoll.FAILED,
        _S.SUCCESS: KVPoll.SUCCESS,
        _S.FAILED: KVPoll.FAILED,
    }
    ENDS: ClassVar[frozenset[SenderState]] = frozenset({_S.SUCCESS, _S.FAILED})

    __slots__ = (
        "_destination",
        "_due",
        "_fenced",
        "_first_post_at",
        "_in_flight",
        "_last_landed_at",
        "_metadata_sent",
        "_next_tag",
        "_next_token",
        "_queues",
        "_reading",
        "_refusal",
        "_sequence",
    )

    def __init__(self, args: MachineArgs) -> None:
        super().__init__(args)
        self._destination: Destination | None = None
        self._next_token = 0
        self._next_tag = 0
        self._sequence = 0
        self._in_flight: dict[int, tuple[tuple[int, int], _Write]] = {}
        self._queues: dict[tuple[int, int], deque[_Write]] = {}
        #: chunks whose pages are being read for their checksum, by tag
        self._reading: dict[int, tuple[tuple[int, int], _Write]] = {}
        self._fenced = False
        self._metadata_sent = False
        #: what to fail with if decode does not say why it refused a write, and the deadline without that
        self._refusal: ErrorInfo | None = None
        self._due = args.deadline
        self._first_post_at: float | None = None
        self._last_landed_at = 0.0

    # ---- the peer ------------------------------------------------------------------------------

    def receive(self, message: HandoffMessage, link: PeerLink, now: float, out: list[Effect]) -> None:
        if isinstance(message, Destination):
            self.destination(message, now + message.budget_s, link, now, out)
        elif isinstance(message, Committed):
            self._committed(out)
        elif isinstance(message, Failed):
            self.fail(message.error, now, out, peer_notified=True)
        elif isinstance(message, Abort):
            text = "decode aborted this hand-off without giving a reason"
            self.fail(self.problem(TransferFailed, text, now), now, out, peer_notified=True)
            if self._fenced:
                # It was said to a session that had just ended; a checksum may still be reading here.
                out.append(Send(self.peer, Drained(self.transfer)))
        elif isinstance(message, Gone):
            text = "decode does not know this hand-off any more"
            self.fail(self.problem(TransferFailed, text, now), now, out, peer_notified=True)

    def destination(
        self, message: Destination, deadline: float, link: PeerLink, now: float, out: list[Effect]
    ) -> None:
        """Where to write. A repeat changes nothing. Raises what is wrong with it."""
        if self.state is not SenderState.BOOTSTRAPPING:
            return
        plan = link.usable_plan()
        self.transport = link.transport
        self._check(message, plan)
        self.go(SenderStep.DESTINATION)
        self.plan = plan
        self._destination = message
        self.prefix_tokens = message.prefix_tokens
        self.epoch = message.epoch
        self.deadline = min(self.deadline, deadline)
        self._queues = {pair: deque() for pair in plan.pairs}
        out.append(Phase(self.transfer, KVPoll.WAITING_FOR_INPUT))
        out.append(Send(self.peer, Accepted(self.transfer)))

    def _check(self, message: Destination, plan: PairPlan) -> None:
        """Both sides must agree on prompt, prefix, pages and layouts before a byte moves."""
        if message.transport != self.transport:
            raise TransferFailed(
                f"decode expects writes over {message.transport!r}, this prefill writes over "
                f"{self.transport!r}; start both sides with the same --transport",
                retryable=False,
            )
        if message.prompt_tokens != self.prompt_tokens:
            raise TransferFailed(
                f"decode has a prompt of {message.prompt_tokens} tokens, prefill one of {self.prompt_tokens}",
                retryable=False,
            )
        if not 0 < message.epoch < 2**64:
            raise TransferFailed(f"epoch {message.epoch} is not a non-zero unsigned 64-bit number")
        problem = page_problem(message.pages, message.prompt_tokens, message.prefix_tokens, plan)
        if problem:
            raise LayoutMismatch(f"decode's destination is impossible: {problem}")
        ours = plan.hash(message.prompt_tokens, message.prefix_tokens, len(message.pages))
        if message.plan_hash != ours:
            raise LayoutMismatch(
                f"the two sides computed different copy plans ({message.plan_hash:016x} on decode, "
                f"{ours:016x} on prefill); start both with the same version of segue"
            )

    def _committed(self, out: list[Effect]) -> None:
        if self.phase.terminal:
            return
        if self._next_token < self.prompt_tokens or any(self._queues.values()) or not self._metadata_sent:
            raise TransferFailed("decode committed before every write had landed and the metadata was sent")
        self.go(SenderStep.COMMITTED)
        # With a fully cached prompt nothing was written, so nothing was published either.
        unused = self.lease.state is LeaseState.HELD
        self.lease.end(LeaseStep.UNUSED if unused else LeaseStep.COMPLETE)
        wire_s = 0.0 if self._first_post_at is None else self._last_landed_at - self._first_post_at
        out.append(Phase(self.transfer, KVPoll.SUCCESS, wire_s=wire_s))
        out.append(Release(self.transfer))

    def peer_up(self, link: PeerLink, now: float, out: list[Effect]) -> None:
        self.resend_failure(out)
        if link.error is not None and not self.phase.terminal:
            raise link.error.exception()

    def peer_down(self, error: ErrorInfo, dead: bool, now: float, out: list[Effect]) -> None:
        self.fail(self.fill(error, now), now, out, lost=True)

    # ---- the engine ----------------------------------------------------------------------------

    def chunk(self, event: SendChunk, now: float, out: list[Effect]) -> None:
        """Post the writes of a finished chunk. Raises IllegalEvent, unchanged, for a wrong span."""
        self.expect(SenderStep.CHUNK)
        plan, destination = self.plan, self._destination
        span = event.span
        if plan is None or destination is None:
            raise IllegalEvent("no destination yet", room=self.transfer.room)
        if span.start != self._next_token or not span.start < span.end <= self.prompt_tokens:
            raise IllegalEvent(
                f"chunk [{span.start}, {span.end}) where one from token {self._next_token} of "
                f"{self.prompt_tokens} was due",
                room=self.transfer.room,
            )
        if len(event.pages) * plan.source_page_tokens < span.end:
            raise IllegalEvent(
                f"{len(event.pages)} source pages do not hold {span.end} tokens", room=self.transfer.room
            )
        prefix = self.prefix_tokens
        final = span.end == self.prompt_tokens
        part = Span(max(span.start, prefix), max(span.end, prefix))
        if not final and len(part) == 0:
            self._next_token = span.end
            return self.go(SenderStep.SKIP) if self.state is SenderState.WAITING_FOR_INPUT else None
        page = plan.target_page_tokens
        first_token = prefix // page * page
        blocks = [
            tuple(plan.blocks(s, t, part, event.pages, destination.pages, first_token)) for s, t in plan.pairs
        ]
        if self.state is SenderState.WAITING_FOR_INPUT:
            out.append(Phase(self.transfer, KVPoll.TRANSFERRING))
        self.go(SenderStep.CHUNK)
        self._next_token = span.end
        if len(part) and self.lease.state is LeaseState.HELD:
            self.lease.publish(len(event.pages))
            self._first_post_at = now
        for pair, pair_blocks in zip(plan.pairs, blocks, strict=True):
            nbytes = len(part) * plan.pair_token_bytes(*pair)
            write = _Write(part, self._sequence, nbytes, final, landed=not pair_blocks)
            self._queues[pair].append(write)
            if pair_blocks:
                tag = self._next_tag
                self._next_tag += 1
                self._in_flight[tag] = (pair, write)
                out.append(PostWrite(self.transfer, self.epoch, tag, pair[0], pair[1], pair_blocks))
                self._sum(tag, pair, write, event.pages, out)
            else:
                self._announce(pair, out)
        self._sequence += 1
        return None

    def _sum(
        self, tag: int, pair: tuple[int, int], write: _Write, pages: tuple[int, ...], out: list[Effect]
    ) -> None:
        """Have the chunk's source bytes hashed, beside the write."""
        if self.plan is None or self.local.kv_checksum is ChecksumMode.OFF:
            return
        write.every = 1 if self.local.kv_checksum is ChecksumMode.FULL else SAMPLE_EVERY
        sample = Sample(write.every, self.transfer.room + write.sequence)
        content = self.plan.source_content(*pair, write.span, pages, sample)
        write.summed = False
        self._reading[tag] = (pair, write)
        out.append(ComputeChecksum(self.transfer, tag, pair[0], content))

    def metadata(self, event: SendMetadata, now: float, out: list[Effect]) -> None:
        """Send the metadata at once: it need not wait for the writes, the tally does."""
        self.expect(SenderStep.METADATA)
        if self._metadata_sent:
            raise IllegalEvent("metadata was sent already", room=self.transfer.room)
        if event.metadata.transfer != self.transfer:
            raise IllegalEvent(
                f"metadata of {event.metadata.transfer} for {self.transfer}", room=self.transfer.room
            )
        if event.metadata.prompt_tokens != self.prompt_tokens:
            raise IllegalEvent(
                f"metadata for {event.metadata.prompt_tokens} prompt tokens, not {self.prompt_tokens}",
                room=self.transfer.room,
            )
        self.go(SenderStep.METADATA)
        self._metadata_sent = True
        out.append(Send(self.peer, event.metadata))

    # ---- the transport -------------------------------------------------------------------------

    def landed(self, event: WriteLanded, now: float, out: list[Effect]) -> bool:
        """A write has landed; False if this write is not (or no longer) ours."""
        entry = self._in_flight.pop(event.tag, None)
        if entry is None:
            return False
        self.go(SenderStep.LANDED)
        pair, write = entry
        write.landed = True
        write.wire_s = event.seconds
        self._last_landed_at = now
        self._announce(pair, out)
        return True

    def checksum_ready(self, event: ChecksumReady, now: float, out: list[Effect]) -> bool:
        """What a chunk's checksum is; False if nobody asked."""
        entry = self._reading.pop(event.tag, None)
        if entry is None:
            return False
        self.go(SenderStep.CHECKSUM)
        if self.state is SenderState.DRAINING:
            self._release_when_fenced(out)
        elif event.error is not None:
            self.fail(self.fill(event.error, now), now, out)
        else:
            pair, write = entry
            write.summed = True
            write.checksum = event.checksum
            self._announce(pair, out)
        return True

    def broken(self, event: WriteBroken, now: float, out: list[Effect]) -> bool:
        """A write did not land; False if it is not (or no longer) ours."""
        if self._in_flight.pop(event.tag, None) is None:
            return False
        error = self.fill(event.error, now)
        if not event.refused:
            self.fail(error, now, out)
        elif self._refusal is None:
            self.go(SenderStep.REFUSED)
            self._refusal, self._due = error, self.deadline
            self.deadline = min(self.deadline, now + REASON_WAIT_S)
        return True

    def _announce(self, pair: tuple[int, int], out: list[Effect]) -> None:
        """Tell decode of landed chunks and their checksums, in order of sequence, whatever order they
        landed in."""
        queue = self._queues[pair]
        while queue and queue[0].landed and queue[0].summed:
            write = queue.popleft()
            message = ChunkPosted(
                transfer=self.transfer,
                source=pair[0],
                target=pair[1],
                sequence=write.sequence,
                span=write.span,
                nbytes=write.nbytes,
                final=write.final,
                checksum=write.checksum,
                every=write.every,
                wire_s=write.wire_s,
            )
            out.append(Send(self.peer, message))

    def fence_done(self, proven: bool, now: float, out: list[Effect]) -> bool:
        # On the writing side the answer itself says that no write is in flight, whatever `proven` is.
        if self.state is not SenderState.DRAINING or self._fenced:
            return False
        self.go(SenderStep.FENCED)
        self._fenced = True
        out.append(Send(self.peer, Drained(self.transfer)))
        self._release_when_fenced(out)
        return True

    def _release_when_fenced(self, out: list[Effect]) -> None:
        """The source pages are free once no write and no checksum reads them."""
        if self._fenced and not self._reading:
            self.go(SenderStep.UNREAD)
            self.lease.end(LeaseStep.PROOF)
            out.append(Release(self.transfer))

    # ---- the end -------------------------------------------------------------------------------

    def deadline_error(self, now: float) -> ErrorInfo:
        if self.state is SenderState.BOOTSTRAPPING:
            text = f"decode gave no destination within {now - self.opened_at:.3f} s"
            return self.problem(BootstrapTimeout, text, now)
        if self._refusal is not None and now < self._due:
            return self._refusal
        return super().deadline_error(now)

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
        if self._refusal is not None:
            self.deadline = self._due  # the tombstone's
        posted = self.lease.state is LeaseState.PUBLISHED
        self.go(SenderStep.FAIL_POSTED if posted else SenderStep.FAIL)
        self._in_flight.clear()
        self._queues.clear()
        if posted:
            self.lease.end(LeaseStep.FAIL)
            out.append(Fence(self.transfer, self.epoch))
        out.append(Phase(self.transfer, KVPoll.FAILED, error=error))
        if not peer_notified and not lost:
            out.append(Send(self.peer, Failed(self.transfer, error)))
        if posted:
            return
        self.lease.end(LeaseStep.UNUSED)
        if not lost:
            out.append(Send(self.peer, Drained(self.transfer)))
        out.append(Release(self.transfer))

    def broken_rule(self) -> str:
        """See `Machine.broken_rule`."""
        if self.phase.terminal and (self._in_flight or self._queues) and self.state is SenderState.DRAINING:
            return f"{self.transfer} has failed but still counts writes"
        if self.state is SenderState.DRAINING and self.lease.state is not LeaseState.QUARANTINED:
            return f"{self.transfer} drains with a lease that is {self.lease.state}"
        if self._fenced and not self._reading:
            return f"{self.transfer} drains and waits for nothing"
        return super().broken_rule()
