"""The decode half of one hand-off: a receiver (`receptions.py`) has one with each prefill leader it asks."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import ClassVar

import msgspec

from segue.kv.errors import (
    DeadlineExceeded,
    DpRankConflict,
    ErrorInfo,
    Internal,
    MetadataMismatch,
    TransferFailed,
)
from segue.kv.ids import KVPoll, LeaderId
from segue.kv.layout.content import LayerSample
from segue.kv.protocol.events import (
    AbortTransfer,
    ChecksumReady,
    ComputeChecksum,
    FenceDone,
    Grant,
    Granted,
    HandoffPhase,
    HandoffQuarantined,
    PeerDown,
    Publish,
    Redirected,
    Relay,
    Send,
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
    Declined,
    Destination,
    Drained,
    Failed,
    Gone,
    Metadata,
    Moved,
)
from segue.kv.protocol.tally import Tally, expected_pages, page_problem, slot_problem


class ReceiverState(enum.StrEnum):
    """`GRANTING` and `PUBLISHED` are WAITING_FOR_INPUT with pages that a peer may write into, before it is
    told and after; `QUARANTINED` is FAILED with such pages; the last two hold nothing."""

    BOOTSTRAPPING = "BOOTSTRAPPING"
    WAITING_FOR_INPUT = "WAITING_FOR_INPUT"
    GRANTING = "GRANTING"
    PUBLISHED = "PUBLISHED"
    TRANSFERRING = "TRANSFERRING"
    QUARANTINED = "QUARANTINED"
    SUCCESS = "SUCCESS"
    FAILED = "FAILED"


_S = ReceiverState


class ReceiverMachine(Machine):
    """Publishes pages, tallies and verifies what lands in them, has it passed on to the ranks that hold the
    same, commits; or fails and waits for a proof."""

    __slots__ = ("_claim", "_granting", "_inferred", "_tally", "accepted", "pages", "peer_done", "slot")

    def __init__(self, args: MachineArgs, claim: bytes, *, inferred: bool) -> None:
        super().__init__(args)
        #: as in `Destination`
        self._claim, self._inferred = claim, inferred
        #: Prefill's room is bound to this hand-off.
        self.accepted = False
        self._tally: Tally | None = None
        self.pages: tuple[int, ...] = ()
        self.slot: int | None = None
        #: our ranks at which a write could not land yet
        self._granting: set[int] = set()
        #: The peer has given its word, or is dead: it starts no write any more.
        self.peer_done = False

    @property
    def tally(self) -> Tally:
        """The chunks that have arrived; exists once pages are published."""
        if self._tally is None:
            raise Internal("nothing was published yet")
        return self._tally

    @property
    def _first_token(self) -> int:
        """The prompt's first token in `pages`."""
        page = self.plan.target_page_tokens
        return self.prefix_tokens // page * page

    # ---- the engine ----------------------------------------------------------------------------

    def _publish(self, event: Publish) -> None:
        """Have our ranks let the peer write into `event.pages`. Raises IllegalEvent, unchanged, for wrong
        pages."""
        plan = self.plan
        due = expected_pages(self.prompt_tokens, event.prefix_tokens, plan.target_page_tokens)
        pages = list(event.pages[: max(0, due)])
        problem = page_problem(pages, self.prompt_tokens, event.prefix_tokens, plan) or slot_problem(
            event.slot, event.prefix_tokens, plan
        )
        if problem:
            raise self.illegal(f"cannot publish {problem}")
        self.pages, self.slot = tuple(pages), event.slot
        self.exposed_pages = len(pages)
        self.epoch = self.new_epoch()
        self.prefix_tokens = event.prefix_tokens
        self._tally = Tally(self.transfer, plan, event.prefix_tokens, self.prompt_tokens)
        self._granting = set(self.partners)
        for rank in self.partners:
            self.emit(Grant(self.transfer, rank, self.epoch, self.pages, self.slot))

    def _granted(self, event: Granted) -> None:
        if event.rank not in self._granting:
            raise self.illegal(f"no grant is waited for at rank {event.rank}")
        self._granting.discard(event.rank)

    def _all_granted(self) -> bool:
        return not self._granting

    def _tell_where(self) -> None:
        """Only now: a write may arrive at any rank as soon as the peer has read the message."""
        message = Destination(
            transfer=self.transfer,
            epoch=self.epoch,
            budget_s=self.deadline - self.turn.now,
            prompt_tokens=self.prompt_tokens,
            prefix_tokens=self.prefix_tokens,
            pages=list(self.pages),
            transport=self.transport,
            plan_hash=self.plan.hash(self.prompt_tokens, self.prefix_tokens, len(self.pages)),
            claim=self._claim,
            inferred=self._inferred,
            slot=self.slot,
        )
        self.send(message)

    # ---- the session and the peer --------------------------------------------------------------

    def _meet(self, link: PeerLink) -> None:
        self.meet(link)
        self.emit(HandoffPhase(self.transfer, KVPoll.WAITING_FOR_INPUT))

    def _ask_again(self, link: PeerLink) -> None:
        """The same incarnation is back: its word is proof, so ask for it again."""
        self.resend_failure()
        self.send(Abort(self.transfer))

    def _session_lost(self, event: PeerDown) -> None:
        self.on_session_lost(event)
        self.peer_done = event.dead

    def _perhaps_dead(self, event: PeerDown) -> None:
        self.peer_done = self.peer_done or event.dead

    def _peer_ended(self, message: Drained | Gone) -> None:
        self.peer_ended("prefill does not know this hand-off (any more)")
        self.peer_done = True

    def _word(self, message: Drained | Gone) -> None:
        self.peer_done = True

    def _moved(self, message: Moved) -> None:
        """The receiver begins again there, once nobody writes for this hand-off. Raises TransferFailed if
        prefill had accepted it: then it may have written."""
        if self.accepted:
            raise TransferFailed("prefill sent decode to another DP rank after it had accepted this one")
        if message.error is not None:
            # The rank that has the room was not asked, and must not wait for us.
            owner = LeaderId(self.peer.incarnation, message.dp_rank)
            elsewhere = msgspec.structs.replace(self.transfer, prefill=owner)
            self.emit(Send(owner, Declined(elsewhere, message.error, self._claim)))
            self.end(message.error, End.BY_PEER)
            return
        text = f"the room belongs to DP rank {message.dp_rank} of this prefill instance"
        self.emit(Redirected(self.transfer, message.dp_rank))
        self.end(self.problem(DpRankConflict, text), End.HERE)

    def _accepted(self, message: Accepted) -> None:
        self.accepted = True

    def _too_early(self, message: ChunkPosted | Metadata) -> None:
        raise TransferFailed(f"{type(message).__name__} came before any page was published")

    # ---- what arrives --------------------------------------------------------------------------

    def _first_chunk(self, message: ChunkPosted) -> None:
        self.tally.chunk(message)
        self.emit(HandoffPhase(self.transfer, KVPoll.TRANSFERRING))
        self._verify(message)

    def _chunk(self, message: ChunkPosted) -> None:
        if self.tally.chunk(message):
            self._verify(message)

    def _verify(self, message: ChunkPosted) -> None:
        if not self._hash(message, message.target):
            self._pass_on(message)

    def _hash(self, message: ChunkPosted, rank: int) -> bool:
        """Have the bytes that landed at `rank` hashed, if prefill said what their checksum must be."""
        share = self.tally.share(message)
        if message.checksum is None or len(share) == 0:
            return False
        if self.checksum is None:
            raise TransferFailed("prefill sent a checksum, and the two sides agreed on none")
        sample = LayerSample(message.every, self.transfer.room + message.sequence)
        slot = self.slot if message.final else None
        content = self.plan.target_content(
            message.source, rank, share, self.pages, self._first_token, sample, slot
        )
        tag = self.tally.verify(message, rank)
        self.emit(ComputeChecksum(self.transfer, rank, tag, content, self.checksum))
        return True

    def _verified(self, event: ChecksumReady) -> None:
        """Check the checksum of a landed chunk. Raises ChecksumMismatch."""
        message = self.asked(self.tally.unverified, event.rank, event.tag)
        self.tally.check(message, event.rank, self.checked(event))
        if event.rank == message.target:
            self._pass_on(message)
        else:
            self.tally.relayed(message, event.rank)

    def _pass_on(self, message: ChunkPosted) -> None:
        """Have the rank that has received a chunk write it to the ranks that hold the same."""
        source, target = message.source, message.target
        share = self.tally.share(message)
        for other in self.plan.passed_on(source, target):
            if len(share) == 0:
                self.tally.relayed(message, other)
                continue
            blocks = self.plan.relay_blocks(source, target, other, share, self.pages, self._first_token)
            tag = self.tally.relay(message, other)
            self.emit(Relay(self.transfer, target, self.epoch, tag, other, tuple(blocks)))

    def _relayed(self, event: WriteLanded) -> None:
        message, other = self.asked(self.tally.relaying, event.rank, event.tag)
        if not self._hash(message, other):
            self.tally.relayed(message, other)

    def _not_relayed(self, event: WriteBroken) -> None:
        self.asked(self.tally.relaying, event.rank, event.tag)
        raise event.error.exception()

    def _metadata(self, message: Metadata) -> None:
        limit = self.local.limits.max_metadata_bytes
        if len(message.content) > limit:
            raise MetadataMismatch(
                f"metadata of {len(message.content)} bytes, limits.max_metadata_bytes allows {limit}"
            )
        self.tally.note_metadata(message)

    def _complete(self) -> bool:
        return self.tally.complete

    def _commit(self) -> None:
        tally = self.tally
        content = None if tally.metadata is None else tally.metadata.content
        phase = HandoffPhase(self.transfer, KVPoll.SUCCESS, None, content, tally.last_wire_s, tally.nbytes)
        self.emit(phase)
        self.send(Committed(self.transfer))
        self.fence()
        self.release()

    # ---- the end -------------------------------------------------------------------------------

    def deadline_error(self) -> ErrorInfo:
        """See `Machine.deadline_error`; with what has not arrived."""
        if self._tally is None:
            return super().deadline_error()
        after_s = self.turn.now - self.opened_at
        text = (
            f"the deadline passed in {self.phase.name} after {after_s:.3f} s without {self.tally.missing()}"
        )
        return self.problem(DeadlineExceeded, text)

    def end(self, error: ErrorInfo, end: End) -> None:
        """See `Machine.end`; published pages are asked for back, others are free, and prefill's room was not
        bound."""
        held = self.lease is Lease.HELD
        super().end(error, End.BY_PEER if held else end)
        if held:
            self.ended_by_peer = end is End.BY_PEER
            if end is End.HERE:
                self.send(Declined(self.transfer, error, self._claim))
            return self.release()
        if end is not End.SESSION_LOST:
            self.send(Abort(self.transfer))
        # After the words: a write that the fence refuses must not reach prefill before the reason does.
        self.fence()
        self.emit(HandoffQuarantined(self.transfer, self.exposed_pages))
        return None

    def _read(self, event: ChecksumReady) -> None:
        """A checksum that nobody wants any more: its pages are not being read now."""
        self.asked(self.tally.unverified, event.rank, event.tag)

    def _untouched(self) -> bool:
        """Nobody writes into the pages any more, and nobody reads them (see `machine`)."""
        if self.fences.waiting or self.tally.unverified:
            return False
        return self.peer_done or not self.fences.unproven

    # ---- the table -----------------------------------------------------------------------------

    _ENDED_BY: ClassVar[Mapping[type, Handler]] = {
        AbortTransfer: Machine.on_abort,
        Tick: Machine.on_deadline,
        Failed: Machine.on_failed,
        Drained: _peer_ended,
        Gone: _peer_ended,
        Moved: _moved,
        PeerDown: _session_lost,
    }

    TABLE: ClassVar[Mapping[ReceiverState, Mapping[type, Row]]] = {
        _S.BOOTSTRAPPING: {
            PeerLink: (_meet, _S.WAITING_FOR_INPUT),
            **rows(_S.FAILED, {**_ENDED_BY, ChunkPosted: _too_early, Metadata: _too_early}),
        },
        _S.WAITING_FOR_INPUT: {
            Publish: (_publish, _S.GRANTING),
            **rows(_S.FAILED, {**_ENDED_BY, ChunkPosted: _too_early, Metadata: _too_early}),
        },
        _S.GRANTING: {
            Granted: (_granted, _S.GRANTING),
            **rows(_S.QUARANTINED, {**_ENDED_BY, ChunkPosted: _too_early, Metadata: _too_early}),
        },
        _S.PUBLISHED: {
            Accepted: (_accepted, _S.PUBLISHED),
            Metadata: (_metadata, _S.PUBLISHED),
            ChunkPosted: (_first_chunk, _S.TRANSFERRING),
            **rows(_S.QUARANTINED, _ENDED_BY),
        },
        _S.TRANSFERRING: {
            Metadata: (_metadata, _S.TRANSFERRING),
            ChunkPosted: (_chunk, _S.TRANSFERRING),
            ChecksumReady: (_verified, _S.TRANSFERRING),
            WriteLanded: (_relayed, _S.TRANSFERRING),
            WriteBroken: (_not_relayed, _S.TRANSFERRING),
            **rows(_S.QUARANTINED, _ENDED_BY),
        },
        _S.QUARANTINED: {
            PeerLink: (_ask_again, _S.QUARANTINED),
            FenceDone: (Machine.on_fenced, _S.QUARANTINED),
            Drained: (_word, _S.QUARANTINED),
            Gone: (_word, _S.QUARANTINED),
            PeerDown: (_perhaps_dead, _S.QUARANTINED),
            ChecksumReady: (_read, _S.QUARANTINED),
        },
        _S.SUCCESS: {},
        _S.FAILED: {},
    }

    FOLLOWS: ClassVar[Mapping[ReceiverState, Follow]] = {
        _S.GRANTING: (_all_granted, _tell_where, _S.PUBLISHED),
        _S.TRANSFERRING: (_complete, _commit, _S.SUCCESS),
        _S.QUARANTINED: (_untouched, Machine.release, _S.FAILED),
    }

    STATES: ClassVar[Mapping[ReceiverState, tuple[KVPoll, Lease]]] = {
        _S.BOOTSTRAPPING: (KVPoll.BOOTSTRAPPING, Lease.HELD),
        _S.WAITING_FOR_INPUT: (KVPoll.WAITING_FOR_INPUT, Lease.HELD),
        _S.GRANTING: (KVPoll.WAITING_FOR_INPUT, Lease.PUBLISHED),
        _S.PUBLISHED: (KVPoll.WAITING_FOR_INPUT, Lease.PUBLISHED),
        _S.TRANSFERRING: (KVPoll.TRANSFERRING, Lease.PUBLISHED),
        _S.QUARANTINED: (KVPoll.FAILED, Lease.QUARANTINED),
        _S.SUCCESS: (KVPoll.SUCCESS, Lease.RELEASED),
        _S.FAILED: (KVPoll.FAILED, Lease.RELEASED),
    }
