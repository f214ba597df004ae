"""The hand-offs of one scheduler rank of SGLang over one `KVManager`: its senders and receivers, without
SGLang. Nothing raises: SGLang's scheduler dies of an exception, so every error ends the hand-off as Failed.

SGLang polls; nothing here waits. Its calls come on the scheduler's thread, changes of hand-offs on the
manager's I/O thread.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from segue.integrations.prompt_claim import ClaimedPrompt, ModelFacts, claim_of
from segue.integrations.sglang.sglang_phases import (
    MIXED_ROUTING,
    RoomUses,
    SglPoll,
    digest_of,
    must_register,
    receiver_phase,
    sender_phase,
)
from segue.integrations.sglang.sglang_pool import MetadataSlots, SglangPool
from segue.kv import (
    AbortedByClient,
    BootstrapTimeout,
    Change,
    DpRankConflict,
    DpRanks,
    ErrorCode,
    ErrorInfo,
    Internal,
    InvalidRequest,
    KVConfig,
    KVManager,
    KVPoll,
    KVReceiver,
    KVSender,
    LayoutMismatch,
    LeaderId,
    Release,
    RoomKey,
    SegueError,
    Span,
    TransferFailed,
)

log = logging.getLogger("segue.sglang")

#: Seconds after its deadline that a sender's failure waits for the fences of its ranks. Its pages wait on.
FENCE_S = 10.0
#: Seconds until decode asks for the first time where a room is that no prefill rank answers for. Doubled each
#: time.
ASK_AFTER_S = 2.0
#: After these the address of a prefill may belong to another process.
_PEER_GONE = frozenset(
    {
        ErrorCode.DRAINING,
        ErrorCode.PEER_LOST,
        ErrorCode.PEER_RESTARTED,
        ErrorCode.PEER_REFUSED,
        ErrorCode.BOOTSTRAP_UNREACHABLE,
    }
)


@dataclass(frozen=True, slots=True)
class Intake:
    """A request as prefill knows it when SGLang makes its sender: its prompt, and the DP rank that it names
    (`disagg_prefill_dp_rank`)."""

    prompt: ClaimedPrompt
    hint: int | None = None


@dataclass(frozen=True, slots=True)
class PrefillRow:
    """Where a prefill rank is: its leader, and the address of its sessions. `dp_size` is the instance's."""

    leader: LeaderId
    host: str
    port: int
    dp_rank: int = 0
    dp_size: int = 1


@dataclass(frozen=True, slots=True)
class HalfFailure:
    """The reason of a failure for SGLang. `from_another_rank`: this rank's half has not failed."""

    text: str
    from_another_rank: bool


@dataclass(frozen=True, slots=True)
class RankHooks:
    """The calls of a rank to SGLang's bootstrap server; none blocks. `register(room)` tells it that this DP
    rank has a room. `ask(address, room, answer)` asks which one has it. `ranks(address, answer)` names each
    DP rank of a prefill. `forget(address)` drops what is known of a prefill."""

    register: Callable[[int], None] = lambda room: None
    ask: Callable[[str, int, Callable[[int], None]], None] = lambda address, room, answer: None
    ranks: Callable[[str, Callable[[PrefillRow], None]], None] = lambda address, answer: None
    forget: Callable[[str], None] = lambda address: None


class RankHandoffs:
    """All hand-offs of a rank, which is DP rank `dp_rank` of its instance. A room waits `bootstrap_s` seconds
    for decode, and decode `waiting_s` for the KV.

    Raises ConfigError for settings or a pool that do not work here.
    """

    def __init__(
        self,
        config: KVConfig,
        pool: SglangPool,
        slots: MetadataSlots,
        *,
        bootstrap_s: float,
        waiting_s: float,
        dp: DpRanks | None = None,
        dp_rank: int = 0,
        hooks: RankHooks | None = None,
    ) -> None:
        self.pool = pool
        self.slots = slots
        self.bootstrap_s = bootstrap_s
        self.waiting_s = waiting_s
        self.dp = dp or DpRanks()
        self.dp_rank = dp_rank
        self.hooks = hooks or RankHooks()
        self.manager = KVManager(config, pool.memory, self._on_change)
        self.model = ModelFacts(config.model, pool.spec.shape.dtype)
        self._lock = threading.Lock()
        self._uses = RoomUses()
        self._halves: dict[RoomKey, RoomHalf] = {}
        #: senders whose end SGLang was told before the proof that nothing reads their pages
        self._unproven: dict[RoomKey, SenderHalf] = {}
        #: the prefill leader of each bootstrap address and rank, and leaders that were replaced
        self._leaders: dict[tuple[str, int], LeaderId] = {}
        self._replaced: set[LeaderId] = set()

    def start(self) -> tuple[str, int]:
        """Listen; returns `(host, port)` of the sessions. Raises ConfigError."""
        return self.manager.start()

    def close(self) -> None:
        """End all hand-offs of this rank; the pool may be freed afterwards."""
        self.manager.close()

    def now(self) -> float:
        """Seconds of the manager's clock."""
        return self.manager.clock.now()

    def key(self, room: int, prompt: ClaimedPrompt) -> RoomKey:
        """The name of one more use of a room (see `RoomUses`). Raises InvalidRequest."""
        try:
            with self._lock:
                return self._uses.next(room, digest_of(prompt.tokens))
        except ValueError as error:
            raise InvalidRequest(f"bootstrap_room {room}: {error}") from None

    def meet(self, address: str, row: PrefillRow) -> None:
        """Keep a session to a prefill rank, in place of the one that had this address before."""
        with self._lock:
            before = self._leaders.get((address, row.dp_rank))
            self._leaders[address, row.dp_rank] = row.leader
            if before not in (None, row.leader):
                self._replaced.add(before)
        self.manager.add_peer(row.leader, row.host, row.port)
        self._drop_replaced()

    def remember(self, half: RoomHalf) -> None:
        """Keep a half until its pages are free and SGLang has cleared it."""
        with self._lock:
            self._halves[half.key] = half

    def told(self, half: RoomHalf) -> None:
        """SGLang knows the end of a half and may free its pages."""
        if isinstance(half, SenderHalf) and not half.released:
            with self._lock:
                self._unproven[half.key] = half
            self.settle(half)  # the proof may have come meanwhile

    def unproven_pages(self) -> frozenset[int]:
        """Source pages that SGLang may free while the proof that nothing reads them is due."""
        if not self._unproven:
            return frozenset()
        with self._lock:
            return frozenset(page for half in self._unproven.values() for page in half.pages)

    def settle(self, half: RoomHalf) -> None:
        """Forget a half that nobody needs any more."""
        if half.released:
            with self._lock:
                self._unproven.pop(half.key, None)
        if not half.cleared or not half.released:
            return
        with self._lock:
            if self._halves.get(half.key) is half:
                del self._halves[half.key]
        if half.handle is not None:
            half.handle.clear()
        self._drop_replaced()

    def release_safe(self, room: int) -> bool:
        """Whether no prefill can write into pages of this room any more whose half has failed."""
        with self._lock:
            return all(
                half.released
                for half in self._halves.values()
                if half.key.room == room and half.conclude_state is SglPoll.FAILED
            )

    def sizes(self) -> dict[str, int]:
        """The entries of each table (see `KVManager.sizes`); `room_uses` counts rooms that were used, and
        `unproven_pages` the pages of `unproven_pages()`."""
        unproven = len(self.unproven_pages())
        with self._lock:
            return {
                **self.manager.sizes(),
                "halves": len(self._halves),
                "room_uses": len(self._uses),
                "replaced_peers": len(self._replaced),
                "unproven_pages": unproven,
            }

    def _on_change(self, change: Change) -> None:
        if isinstance(change, Release):
            with self._lock:
                half = self._halves.get(change.key)
            if half is not None:
                if isinstance(half, ReceiverHalf):
                    half.proven()
                self.settle(half)

    def _drop_replaced(self) -> None:
        with self._lock:
            used = {half.leader for half in self._halves.values() if isinstance(half, ReceiverHalf)}
            unused = self._replaced - used
            self._replaced -= unused
        for leader in unused:
            self.manager.remove_peer(leader)


class RoomHalf(ABC):
    """The common part of SGLang's sender and receiver. `conclude_state` is the end that SGLang was told."""

    handle: KVSender | KVReceiver | None = None

    def __init__(self, handoffs: RankHandoffs, room: int | None) -> None:
        self.handoffs = handoffs
        self.room = room or 0
        #: this use of the room, which has a name once it is `named`, and what both sides must have alike
        self.key = RoomKey(1)
        self.named = False
        self.claim = b""
        self.units = 0
        self.conclude_state: SglPoll | None = None
        self.cleared = False
        #: why this half has failed without a hand-off
        self.own_error: ErrorInfo | None = None

    @property
    def released(self) -> bool:
        """True when no peer can touch the pages."""
        return self.handle is None or self.handle.released

    @property
    def error(self) -> ErrorInfo | None:
        """Why this half has failed."""
        return self.own_error or (self.handle.error if self.handle is not None else None)

    def _begin(self, function: Callable[[], object]) -> None:
        """Call a part of a constructor; what it raises ends this half."""
        try:
            function()
        except SegueError as error:
            self.fail(error)
        except Exception as exc:
            log.exception("room %s", self.room)
            self.fail(Internal(f"{type(exc).__name__} when one half was made: {exc}"))

    def _name(self, prompt: ClaimedPrompt | None) -> ClaimedPrompt:
        """Name this use of the room and its claim. Raises InvalidRequest, Internal."""
        if prompt is None:
            raise Internal("SGLang made one half of a hand-off without its request")
        self.key, self.named = self.handoffs.key(self.room, prompt), True
        self.claim = claim_of(prompt, self.handoffs.model)
        return prompt

    def poll(self) -> SglPoll:
        """The phase for the queue that asks; final once it is Failed or Success."""
        if self.conclude_state is None:
            try:
                phase = self._phase()
            except Exception as exc:
                log.exception("room %s", self.room)
                self.fail(Internal(f"{type(exc).__name__} in poll: {exc}"))
                phase = SglPoll.FAILED
            if phase not in (SglPoll.FAILED, SglPoll.SUCCESS):
                return phase
            return self._conclude(phase)
        return self.conclude_state

    def fail(self, error: SegueError) -> None:
        """End this half, and the other one as far as it is known."""
        self.own_error = self.own_error or error.at(room=self.room).info
        self._end(self.own_error)

    def abort(self) -> None:
        """SGLang ends the request. Prefill frees its pages at once, decode after `release_safe`. Some ways
        out of SGLang's queues end here, without `clear`."""
        if self.conclude_state is None:
            self.fail(AbortedByClient("SGLang aborted the request"))
            self._conclude(SglPoll.FAILED)
        self.clear()

    def failure(self) -> HalfFailure:
        """Why the request fails: this half, or another rank's. Ends this half, too."""
        error, other = self.error, False
        if error is None:
            other = True
            self.fail(
                TransferFailed("the half of another rank of this engine failed; its log has the reason")
            )
            error = self.error
        self._conclude(SglPoll.FAILED)
        self.clear()
        return HalfFailure(f"{error.code}: {error.text}" if error else "", other)

    def clear(self) -> None:
        """SGLang drops this half."""
        self.cleared = True
        if self.conclude_state is None:
            self.fail(AbortedByClient("SGLang dropped the request"))
            self._conclude(SglPoll.FAILED)
        self.handoffs.settle(self)

    def _conclude(self, phase: SglPoll) -> SglPoll:
        self.conclude_state = phase
        self.handoffs.told(self)
        return phase

    def metric(self) -> tuple[float, int]:
        """Seconds and bytes of the transfer."""
        return (self.handle.wire_s, self.handle.nbytes) if self.handle is not None else (0.0, 0)

    @abstractmethod
    def _phase(self) -> SglPoll: ...

    @abstractmethod
    def _end(self, error: ErrorInfo) -> None: ...


class SenderHalf(RoomHalf):
    """Prefill's half. `intake` is the request as SGLang had it; without it the half has failed."""

    handle: KVSender | None = None

    def __init__(self, handoffs: RankHandoffs, room: int | None, intake: Intake | None) -> None:
        super().__init__(handoffs, room)
        self._inited = False
        self._slot = 0
        #: the pages that SGLang has sent so far
        self.pages: list[int] = []
        self._finished = False
        self._late = False
        self._began = handoffs.now()
        self._budget_s = handoffs.bootstrap_s + handoffs.waiting_s
        self._begin(lambda: self._open(intake))

    def _open(self, intake: Intake | None) -> None:
        handoffs, hint = self.handoffs, intake.hint if intake is not None else None
        try:
            prompt = self._name(intake.prompt if intake is not None else None)
        except SegueError as error:
            if self.named:
                handoffs.manager.refuse(self.key, error.at(room=self.room).info, self._budget_s)
            raise
        self.units = handoffs.pool.units(len(prompt.tokens))
        try:
            register = must_register(handoffs.dp, handoffs.dp_rank, self.room, hint)
        except DpRankConflict:
            # Decode waits at another rank, and asks the bootstrap server when that one does not answer.
            handoffs.hooks.register(self.room)
            raise
        if register:
            handoffs.hooks.register(self.room)
        self.handle = handoffs.manager.expect(self.key, self.units, self._budget_s, claim=self.claim)
        handoffs.remember(self)

    def init(self, pages: int, slot: int | None) -> None:
        """SGLang has seen WaitingForInput: it will send so many pages, and the metadata of `slot`."""
        self._inited, self._slot = True, slot or 0
        if self.own_error is None and pages != self.units:
            self.fail(LayoutMismatch(f"SGLang sends {pages} pages of a prompt of {self.units}"))

    def send(self, pages: Sequence[int], event: Any = None) -> None:
        """The next pages; with the last one go the bytes of the slot. `event`: their KV is complete when
        `event.synchronize()` returns."""
        if self.own_error is not None or self.conclude_state is not None or self.handle is None:
            return
        start, end = len(self.pages), len(self.pages) + len(pages)
        if not self._inited or end > self.units:
            self.fail(Internal(f"SGLang sent page {end} of a prompt of {self.units}"))
            return
        self.pages += pages
        metadata = None
        if end == self.units and not self._finished:
            self._finished = True
            try:
                metadata = self.handoffs.slots.read(self._slot)
            except IndexError as error:
                self.fail(Internal(str(error)))
                return
        ready = self.handoffs.manager.ready() if event is not None else None
        if start < end:
            self.handle.send(Span(start, end), self.pages, metadata, ready=ready)
        if ready is not None:
            ready.signal(event.synchronize)

    def _phase(self) -> SglPoll:
        if self.handle is None:
            return SglPoll.FAILED
        phase, now = self.handle.poll(), self.handoffs.now()
        waited_s = now - self._began
        if phase is KVPoll.BOOTSTRAPPING and not self._late and waited_s >= self.handoffs.bootstrap_s:
            self._late = True
            error = BootstrapTimeout(
                f"decode gave no destination within {waited_s:.1f} s "
                "(SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT)",
                room=self.room,
            )
            self.handle.evict(error.info)
        released = self.handle.released
        unproven = self.handoffs.manager.ended is not None or waited_s >= self._budget_s + FENCE_S
        if phase.terminal and not released and unproven:
            log.warning(
                "room %d: nothing proves yet that %d pages are no longer read: kept from SGLang until then",
                self.room,
                len(self.pages),
            )
            released = True
        return sender_phase(phase, inited=self._inited, released=released)

    def _end(self, error: ErrorInfo) -> None:
        if self.handle is not None:
            self.handle.abort(error)


class ReceiverHalf(RoomHalf):
    """Decode's half. `address` is that of prefill's bootstrap server, `prompt` is wanted from there."""

    handle: KVReceiver | None = None

    def __init__(
        self, handoffs: RankHandoffs, address: str, room: int | None, prompt: ClaimedPrompt | None
    ) -> None:
        super().__init__(handoffs, room)
        self.address = address
        #: SGLang holds the pages of a failed request only if this is True
        self.abort_notified = False
        self._row: PrefillRow | None = None
        self._pages: list[int] = []
        self._prefix = 0
        self._slot = 0
        self._published = False
        self._ask_at: float | None = None
        self._ask_after_s = ASK_AFTER_S
        self._begin(lambda: self._name(prompt))

    @property
    def leader(self) -> LeaderId | None:
        """The prefill leader, once it is known."""
        return self._row.leader if self._row is not None else None

    def init(self, row: PrefillRow) -> None:
        """The prefill rank is known."""
        if self.own_error is None and self.conclude_state is None:
            self._row = row
            self.handoffs.meet(self.address, row)

    def send_metadata(self, pages: Sequence[int], slot: int | None, prefix_tokens: int | None) -> None:
        """SGLang has allocated `pages` for the prompt from `prefix_tokens` on, and a metadata slot."""
        if self.own_error is not None or self.conclude_state is not None:
            return
        prefix, beside = divmod(prefix_tokens or 0, self.handoffs.pool.page_tokens)
        try:
            if self._row is None or self.handle is not None:
                raise Internal("SGLang named pages before the prefill rank was known, or twice")
            if beside:
                raise Internal(f"a prefix of {prefix_tokens} tokens does not end with a page")
            self._pages, self._prefix, self._slot = list(pages), prefix, slot or 0
            self.units = prefix + len(self._pages)
            # SGLang's prefill learns its decode from the destination alone: nobody has placed the room.
            self.handle = self.handoffs.manager.receive(
                self.key,
                self._row.leader,
                self.units,
                self.handoffs.waiting_s,
                claim=self.claim,
                placed=False,
            )
            self.handoffs.remember(self)
            if self._row.dp_size > 1:
                self._ask_at = self.handoffs.now() + self._ask_after_s
        except SegueError as error:
            self.fail(error)

    def _phase(self) -> SglPoll:
        if self.own_error is not None:
            return SglPoll.FAILED
        if self.handle is None:
            if (lost := self.handoffs.manager.ended) is not None:
                self.fail(lost)
                return SglPoll.FAILED
            return SglPoll.BOOTSTRAPPING if self._row is None else SglPoll.WAITING_FOR_INPUT
        phase = self.handle.poll()
        if phase is KVPoll.WAITING_FOR_INPUT and not self._published:
            self._published = True
            self.handle.publish(self._pages, self._prefix)
        elif phase is KVPoll.SUCCESS:
            self.handoffs.slots.write(self._slot, self.handle.metadata or b"")
        elif phase is KVPoll.FAILED and self.error is not None and self.error.code in _PEER_GONE:
            self.handoffs.hooks.forget(self.address)
        elif phase is KVPoll.WAITING_FOR_INPUT and self._ask_at is not None:
            self._ask_where()
        return receiver_phase(phase)

    def proven(self) -> None:
        """No peer can touch the pages any more. If the claims differ, tell prefill: its room waits for a
        decode with its prompt, and none will come. On the manager's I/O thread."""
        error = self.error
        if error is not None and error.code is ErrorCode.METADATA_MISMATCH and self._row is not None:
            # Without a claim: ours is not the room's.
            self.handoffs.manager.decline(self.key, self._row.leader, error)

    def _ask_where(self) -> None:
        """Nothing has landed: the room may be on another DP rank than decode inferred."""
        now = self.handoffs.now()
        if self._ask_at is None or now < self._ask_at:
            return
        self._ask_after_s *= 2
        self._ask_at = now + self._ask_after_s
        self.handoffs.hooks.ask(self.address, self.room, self._on_rank)

    def _on_rank(self, rank: int) -> None:
        row = self._row
        if row is not None and rank != row.dp_rank and self.handle is not None:
            error = DpRankConflict(
                f"the request is on DP rank {rank} of prefill, decode looked on DP rank {row.dp_rank}: "
                + MIXED_ROUTING,
                room=self.room,
            )
            self.handle.abort(error.info)

    def ensure_abort_notified(self) -> None:
        """SGLang holds the pages of this failed request until `release_safe`."""
        self.abort_notified = True

    def _end(self, error: ErrorInfo) -> None:
        if self.handle is not None:
            self.handle.abort(error)
        elif self._row is not None:
            self._decline(self._row, error)
        elif self.named:
            # Each rank is told: nobody knows yet which one has the room, or will have it.
            self.handoffs.hooks.ranks(self.address, lambda row: self._decline(row, error))

    def _decline(self, row: PrefillRow, error: ErrorInfo) -> None:
        self.handoffs.meet(self.address, row)
        self.handoffs.manager.decline(self.key, row.leader, error, claim=self.claim)
