"""The prefill half of one hand-off: a room (`rooms.py`) makes one for each destination that it accepts."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, NoReturn

from segue.kv.errors import ErrorInfo, LayoutMismatch, TransferFailed
from segue.kv.ids import ChecksumMode, KVPoll, Span
from segue.kv.layout.content import LayerSample
from segue.kv.layout.planner import PairPlan
from segue.kv.protocol.events import (
    AbortTransfer,
    ChecksumReady,
    ComputeChecksum,
    FenceDone,
    HandoffPhase,
    PeerDown,
    PostWrite,
    SendChunk,
    SendMetadata,
    Tick,
    WriteBroken,
    WriteLanded,
)
from segue.kv.protocol.lease import Lease
from segue.kv.protocol.link import PeerLink
from segue.kv.protocol.machine import End, Follow, Handler, Machine, MachineArgs, Row, rows
from segue.kv.protocol.messages import (
    Abort,
    Accepted,
    ChunkPosted,
    Committed,
    Destination,
    Drained,
    Failed,
    Gone,
    Metadata,
)
from segue.kv.protocol.tally import page_problem, slot_problem
from segue.kv.protocol.timers import DeadlineEntry

#: How long a sender whose write decode refused waits for decode to say why. Decode says it before it refuses
#: anything, but over the session, which a write may overtake; without a session nothing comes.
REASON_WAIT_S = 1.0

#: A sampled checksum covers one layer in this many; following chunks look at other ones.
SAMPLE_EVERY = 8


class SenderState(enum.StrEnum):
    """`ALL_CACHED` is TRANSFERRING where decode has the whole prompt already: nothing is written. `DRAINING`
    has failed, and writes may be in flight; `DRAINED` has none, but a checksum may still read the pages; the
    last two hold nothing."""

    WAITING_FOR_INPUT = "WAITING_FOR_INPUT"
    TRANSFERRING = "TRANSFERRING"
    ALL_CACHED = "ALL_CACHED"
    DRAINING = "DRAINING"
    DRAINED = "DRAINED"
    SUCCESS = "SUCCESS"
    FAILED = "FAILED"


_S = SenderState
#: (source rank, target rank)
_Pair = tuple[int, int]


@dataclass(slots=True)
class _ChunkWrite:
    """One chunk of one pair, from its first post until it was announced. `whole`: all its layers are posted;
    `in_flight`: posts that have not landed; `summed`: its checksum is here, or not wanted."""

    span: Span
    sequence: int
    nbytes: int
    final: bool
    whole: bool = False
    in_flight: int = 0
    summed: bool = True
    checksum: int | None = None
    every: int = 1
    wire_s: float = 0.0


class SenderMachine(Machine):
    """Waits for a destination, posts writes into it, hashes what it sends, announces what landed with its
    checksum, ends on `Committed`."""

    __slots__ = (
        "_due",
        "_first_post_at",
        "_in_flight",
        "_landed_bytes",
        "_last_landed_at",
        "_layers_sent",
        "_metadata_sent",
        "_next_tag",
        "_next_token",
        "_partly_sent",
        "_queues",
        "_reading",
        "_refusal",
        "_sequence",
        "_to",
    )

    def __init__(self, args: MachineArgs, destination: Destination) -> None:
        """Raises what is wrong with the destination; nothing was said or written then."""
        super().__init__(args)
        if self.link is None:
            raise self.illegal("a destination came without a session")
        self.meet(self.link)
        self._check(destination, self.plan)
        self._to = destination
        self.prefix_tokens = destination.prefix_tokens
        self.epoch = destination.epoch
        self.deadline = min(self.deadline, self.turn.now + destination.budget_s)
        self.timer = DeadlineEntry(self.deadline, args.due)
        self._queues: dict[_Pair, deque[_ChunkWrite]] = {pair: deque() for pair in self.plan.pairs}
        self._next_token = 0
        self._next_tag = 0
        self._sequence = 0
        #: the chunk at `_next_token` of which some layers were sent, and how many
        self._partly_sent = Span(0, 0)
        self._layers_sent = 0
        #: by rank and tag: writes that have not landed, and chunks whose pages are read for their checksum
        self._in_flight: dict[tuple[int, int], tuple[_Pair, _ChunkWrite]] = {}
        self._reading: dict[tuple[int, int], tuple[_Pair, _ChunkWrite]] = {}
        self._metadata_sent = False
        #: the error if decode does not tell why it refused a write, and the deadline without that
        self._refusal: ErrorInfo | None = None
        self._due = self.deadline
        self._first_post_at: float | None = None
        self._last_landed_at = 0.0
        self._landed_bytes = 0

    # ---- the session and the peer --------------------------------------------------------------

    def begin(self) -> None:
        """The room is bound: its engine and decode are told."""
        self.emit(HandoffPhase(self.transfer, KVPoll.WAITING_FOR_INPUT))
        self.send(Accepted(self.transfer))

    @property
    def _all_sent(self) -> bool:
        done = self._next_token == self.prompt_tokens and not any(self._queues.values())
        return done and self._metadata_sent

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
        problem = page_problem(
            message.pages, message.prompt_tokens, message.prefix_tokens, plan
        ) or slot_problem(message.slot, message.prefix_tokens, plan)
        if problem:
            raise LayoutMismatch(f"decode's destination is impossible: {problem}")
        ours = plan.hash(message.prompt_tokens, message.prefix_tokens, len(message.pages))
        if message.plan_hash != ours:
            raise LayoutMismatch(
                f"the two sides computed different copy plans ({message.plan_hash:016x} on decode, "
                f"{ours:016x} on prefill); start both with the same version of segue"
            )

    def _too_early(self, message: Committed) -> NoReturn:
        raise TransferFailed("decode committed before every write had landed and the metadata was sent")

    def _committed(self, message: Committed) -> None:
        if not self._all_sent:
            self._too_early(message)
        wire_s = 0.0 if self._first_post_at is None else self._last_landed_at - self._first_post_at
        self.emit(HandoffPhase(self.transfer, KVPoll.SUCCESS, wire_s=wire_s, nbytes=self._landed_bytes))
        self.release()

    def _meet(self, link: PeerLink) -> None:
        """A session has opened, or another one."""
        self.link = link

    def _back(self, link: PeerLink) -> None:
        self.resend_failure()

    def _aborted(self, message: Abort) -> None:
        self.peer_ended("decode aborted this hand-off without giving a reason")

    def _gone(self, message: Gone) -> None:
        self.peer_ended("decode does not know this hand-off any more")

    # ---- the engine ----------------------------------------------------------------------------

    def _chunk(self, event: SendChunk) -> SenderState | None:
        """Post the writes of a finished chunk, or of more of its layers. Raises IllegalEvent, unchanged, for
        a wrong span or number of layers."""
        plan, to, span = self.plan, self._to, event.span
        if span.start != self._next_token or not span.start < span.end <= self.prompt_tokens:
            raise self.illegal(
                f"chunk [{span.start}, {span.end}) where one from token {self._next_token} of "
                f"{self.prompt_tokens} was due"
            )
        whole, sent = event.layers is None, self._layers_sent
        until = plan.layers if event.layers is None else event.layers
        if (sent and span != self._partly_sent) or not sent < until <= plan.layers - (not whole):
            raise self.illegal(
                f"{until} of {plan.layers} layers of chunk [{span.start}, {span.end}) after {sent} of "
                f"[{self._partly_sent.start}, {self._partly_sent.end})"
            )
        if len(event.pages) * plan.source_page_tokens < span.end:
            raise self.illegal(f"{len(event.pages)} source pages do not hold {span.end} tokens")
        prefix = self.prefix_tokens
        final = span.end == self.prompt_tokens
        if final and whole and (event.slot is None) != (to.slot is None):
            raise self.illegal(f"slot {event.slot} of the source for slot {to.slot} of the destination")
        part = Span(max(span.start, prefix), max(span.end, prefix))
        if len(part) == 0 and not (final and whole):
            if whole:
                self._next_token = span.end
            return None
        page, layers = plan.target_page_tokens, None if whole and not sent else Span(sent, until)
        first_token = prefix // page * page
        shares = [plan.share(source, part) for source, _ in plan.pairs]
        blocks = [
            tuple(plan.blocks(s, t, share, event.pages, to.pages, first_token, layers))
            for (s, t), share in zip(plan.pairs, shares, strict=True)
        ]
        slot = event.slot if final and whole else None
        if slot is not None and to.slot is not None:  # then there is one pair
            blocks[0] += (plan.state_block(*plan.pairs[0], slot, to.slot),)
        self._partly_sent, self._layers_sent = span, 0 if whole else until
        if self.state is SenderState.WAITING_FOR_INPUT:
            self.emit(HandoffPhase(self.transfer, KVPoll.TRANSFERRING))
            if len(part):
                self.exposed_pages = len(event.pages)
        for pair, share, pair_blocks in zip(plan.pairs, shares, blocks, strict=True):
            if not sent:
                nbytes = plan.chunk_bytes(*pair, len(share), final)
                self._queues[pair].append(_ChunkWrite(part, self._sequence, nbytes, final))
            write = self._queues[pair][-1]
            tag = self._next_tag
            self._next_tag += 1
            if pair_blocks:
                rank, target = pair
                write.in_flight += 1
                self._in_flight[rank, tag] = (pair, write)
                self.emit(PostWrite(self.transfer, rank, self.epoch, tag, target, pair_blocks, event.ready))
            if whole:
                write.whole = True
                if write.nbytes:
                    self._sum(tag, pair, write, share, slot, event)
                self._announce(pair)
        if whole:
            self._next_token = span.end
            self._sequence += 1
        return SenderState.TRANSFERRING if len(part) else SenderState.ALL_CACHED

    def _sum(
        self, tag: int, pair: _Pair, write: _ChunkWrite, share: Span, slot: int | None, event: SendChunk
    ) -> None:
        """Have the chunk's source bytes hashed, beside the write."""
        if self.local.kv_checksum is ChecksumMode.OFF or self.checksum is None:
            return
        write.every = 1 if self.local.kv_checksum is ChecksumMode.FULL else SAMPLE_EVERY
        sample = LayerSample(write.every, self.transfer.room + write.sequence)
        content = self.plan.source_content(*pair, share, event.pages, sample, slot)
        write.summed = False
        self._reading[pair[0], tag] = (pair, write)
        self.emit(
            ComputeChecksum(self.transfer, pair[0], tag, content, self.checksum, self.epoch, event.ready)
        )

    def _metadata(self, event: SendMetadata) -> None:
        """Send the metadata at once: it need not wait for the writes, the tally does."""
        if self._metadata_sent:
            raise self.illegal("metadata was sent already")
        self._metadata_sent = True
        self.send(Metadata(transfer=self.transfer, prompt_tokens=self.prompt_tokens, content=event.content))

    # ---- the transport -------------------------------------------------------------------------

    def _landed(self, event: WriteLanded) -> None:
        pair, write = self.asked(self._in_flight, event.rank, event.tag)
        write.in_flight -= 1
        write.wire_s = event.seconds
        self._last_landed_at = self.turn.now
        began_at = self.turn.now - event.seconds
        self._first_post_at = min(began_at, self._first_post_at or began_at)
        self._announce(pair)

    def _broken(self, event: WriteBroken) -> None:
        """A write did not land. Raises why, unless decode refused it: then its word is under way."""
        self.asked(self._in_flight, event.rank, event.tag)
        if not event.refused:
            raise event.error.exception()
        if self._refusal is None:
            self._refusal, self._due = self.fill(event.error), self.deadline
            self.deadline = min(self.deadline, self.turn.now + REASON_WAIT_S)

    def _summed(self, event: ChecksumReady) -> None:
        """Record the checksum of a chunk. Raises the reason if there is none."""
        pair, write = self.asked(self._reading, event.rank, event.tag)
        write.checksum = self.checked(event)
        write.summed = True
        self._announce(pair)

    def _announce(self, pair: _Pair) -> None:
        """Tell decode of landed chunks and their checksums, in order of sequence, whatever order they
        landed in."""
        queue = self._queues[pair]
        while queue and queue[0].whole and not queue[0].in_flight and queue[0].summed:
            write = queue.popleft()
            self._landed_bytes += write.nbytes
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
            self.send(message)

    # ---- the end -------------------------------------------------------------------------------

    def deadline_error(self) -> ErrorInfo:
        """See `Machine.deadline_error`; why decode refused a write, if it did and has not said so."""
        if self._refusal is not None and self.turn.now < self._due:
            return self._refusal
        return super().deadline_error()

    def end(self, error: ErrorInfo, end: End) -> None:
        """See `Machine.end`; where writes were posted they are fenced, else the pages are free."""
        if self._refusal is not None:
            self.deadline = self._due  # the tombstone's
        self._in_flight.clear()
        self._queues.clear()
        if self.lease is Lease.PUBLISHED:
            self.fence()
            return super().end(error, end)
        super().end(error, end)
        if end is not End.SESSION_LOST:
            self.send(Drained(self.transfer))
        return self.release()

    def _read(self, event: ChecksumReady) -> None:
        """A checksum that nobody wants any more: its pages are not being read now."""
        self.asked(self._reading, event.rank, event.tag)

    def _fenced(self) -> bool:
        """No write is in flight. The other side needs the answers' proof, not this one: they come from the
        transport that writes."""
        return not self.fences.waiting

    def _say_drained(self, message: Abort | None = None) -> None:
        """Also when asked again: it was said to a session that had just ended."""
        self.send(Drained(self.transfer))

    def _unread(self) -> bool:
        return not self._reading

    # ---- the table -----------------------------------------------------------------------------

    _ENDED_BY: ClassVar[Mapping[type, Handler]] = {
        AbortTransfer: Machine.on_abort,
        Tick: Machine.on_deadline,
        Failed: Machine.on_failed,
        Abort: _aborted,
        Gone: _gone,
        PeerDown: Machine.on_session_lost,
    }

    TABLE: ClassVar[Mapping[SenderState, Mapping[type, Row]]] = {
        _S.WAITING_FOR_INPUT: {
            PeerLink: (_meet, _S.WAITING_FOR_INPUT),
            SendChunk: (_chunk, _S.WAITING_FOR_INPUT, _S.TRANSFERRING, _S.ALL_CACHED),
            SendMetadata: (_metadata, _S.WAITING_FOR_INPUT),
            **rows(_S.FAILED, {**_ENDED_BY, Committed: _too_early}),
        },
        _S.TRANSFERRING: {
            PeerLink: (_meet, _S.TRANSFERRING),
            SendChunk: (_chunk, _S.TRANSFERRING),
            SendMetadata: (_metadata, _S.TRANSFERRING),
            WriteLanded: (_landed, _S.TRANSFERRING),
            WriteBroken: (_broken, _S.TRANSFERRING),
            ChecksumReady: (_summed, _S.TRANSFERRING),
            Committed: (_committed, _S.SUCCESS),
            **rows(_S.DRAINING, _ENDED_BY),
        },
        _S.ALL_CACHED: {
            PeerLink: (_meet, _S.ALL_CACHED),
            SendMetadata: (_metadata, _S.ALL_CACHED),
            Committed: (_committed, _S.SUCCESS),
            **rows(_S.FAILED, _ENDED_BY),
        },
        _S.DRAINING: {
            PeerLink: (_back, _S.DRAINING),
            FenceDone: (Machine.on_fenced, _S.DRAINING),
            ChecksumReady: (_read, _S.DRAINING),
        },
        _S.DRAINED: {
            PeerLink: (_back, _S.DRAINED),
            Abort: (_say_drained, _S.DRAINED),
            ChecksumReady: (_read, _S.DRAINED),
        },
        _S.SUCCESS: {},
        _S.FAILED: {},
    }

    FOLLOWS: ClassVar[Mapping[SenderState, Follow]] = {
        _S.DRAINING: (_fenced, _say_drained, _S.DRAINED),
        _S.DRAINED: (_unread, Machine.release, _S.FAILED),
    }

    STATES: ClassVar[Mapping[SenderState, tuple[KVPoll, Lease]]] = {
        _S.WAITING_FOR_INPUT: (KVPoll.WAITING_FOR_INPUT, Lease.HELD),
        _S.TRANSFERRING: (KVPoll.TRANSFERRING, Lease.PUBLISHED),
        _S.ALL_CACHED: (KVPoll.TRANSFERRING, Lease.HELD),
        _S.DRAINING: (KVPoll.FAILED, Lease.QUARANTINED),
        _S.DRAINED: (KVPoll.FAILED, Lease.QUARANTINED),
        _S.SUCCESS: (KVPoll.SUCCESS, Lease.RELEASED),
        _S.FAILED: (KVPoll.FAILED, Lease.RELEASED),
    }
