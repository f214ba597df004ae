"""`KVSender` and `KVReceiver`: one half of one room's hand-off, as an engine sees it.

A handle turns calls into events for the `Exchange` and mirrors its phase. Calls never block and may
come from any thread; `post` delivers them in order to the thread that owns the protocol. The
handle's fields change only in `apply`, which that thread calls.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from itertools import count
from operator import index
from typing import TypeVar
from weakref import WeakValueDictionary

from segue.kv.clock import Clock
from segue.kv.errors import AbortedByClient, ErrorInfo, InvalidRequest, SegueError
from segue.kv.ids import KVPoll, LeaderId, RoomKey, Span
from segue.kv.protocol import events
from segue.kv.protocol.events import Change
from segue.kv.ready import ReadyEvent
from segue.kv.threads import ThreadPerCall, Waits


class _Handle:
    """The common part of both halves: phase, error, abort, clear.

    Read from any thread: `error` (the record, after FAILED), `metadata` (the receiver's, after SUCCESS),
    `released` (True once `Release` was reported), `wire_s` and `nbytes` (seconds and bytes of the transfer,
    after SUCCESS), `changed_at` (when the phase last changed, in seconds of the manager's clock).
    """

    def __init__(self, owner: Handles, key: RoomKey) -> None:
        self.key = key
        self._owner = owner
        self._phase = KVPoll.BOOTSTRAPPING
        self.error: ErrorInfo | None = None
        self.metadata: bytes | None = None
        self.released = False
        self.wire_s = 0.0
        self.nbytes = 0
        self.changed_at = owner.clock.now()

    def poll(self) -> KVPoll:
        """The last phase the protocol reached; FAILED and SUCCESS are final. Never blocks."""
        return self._phase

    def abort(self, error: ErrorInfo | None = None) -> None:
        """End the hand-off on both sides with `error` (default ABORTED_BY_CLIENT). A no-op once it ended."""
        info = error or AbortedByClient("the request was aborted", room=self.key.room).info
        self._owner.post(events.EndRoom(self.key, info))

    def clear(self) -> None:
        """Drop this handle; aborts first if the hand-off has not ended. Idempotent.

        Pages stay leased until `Release` was reported, whether or not the handle still exists.
        """
        if not self._phase.terminal:
            self.abort()
        self._owner.forget(self.key)

    def apply(self, change: Change) -> None:
        """Mirror what the protocol reported. Called by the owner only."""
        match change:
            case events.Phase():
                self.changed_at = self._owner.clock.now()
                self.error = change.error or self.error
                self.metadata = self.metadata if change.metadata is None else change.metadata
                self.wire_s = change.wire_s or self.wire_s
                self.nbytes = change.nbytes or self.nbytes
                self._phase = (
                    change.phase
                )  # last: who reads the phase on another thread finds what belongs to it
            case events.Release():
                self.released = True
            case events.Quarantined():
                pass


class KVSender(_Handle):
    """The prefill half, made by `KVManager.expect`: (WAITING_FOR_INPUT) → `send` … → SUCCESS | FAILED.

    The phase is BOOTSTRAPPING until a destination of decode binds the room. `send` is legal before that, too:
    the room keeps what was sent, and gives it to the binding.

    Calls never block, and come from any thread. A call out of order, or with pages that do not fit, ends the
    hand-off on both sides: FAILED with INTERNAL and the reason.
    """

    def send(
        self,
        span: Span,
        pages: Sequence[int],
        metadata: bytes | None = None,
        *,
        slot: int | None = None,
        layers: int | None = None,
        ready: ReadyEvent | None = None,
    ) -> None:
        """Send the KV of `span`, which lies complete in `pages`, or will at `ready` (`KVManager.ready`): the
        page ids (integers) of the prompt from token 0 on, at least up to the end of `span`.

        Spans follow each other without gaps from token 0; the last one ends at the prompt's end. `metadata`
        (the engine's own bytes for decode, at most `Limits.max_metadata_bytes`) comes with it, or later by
        `finish`. With it goes the state in `slot`, if the model keeps one beside its KV. Pages and slot must
        not change until `Release`; the slot may change before the last chunk.

        With `layers` only that of the model's first so many layers is complete, and leaves now. The same span
        follows with more layers, and at last without a number. At the `ready` of one of them the layers of
        those before are complete, too.

        Each rank waits for `ready` by itself before it reads the pages; other calls need not. If the hand-off
        ends before, nothing of the chunk is read or sent. If `ready` never comes, the hand-off ends by its
        deadline.
        """
        chunk = events.SendChunk(self.key, span, _page_ids(pages), slot, layers, ready)
        if metadata is None:
            self._owner.post(chunk)
        else:
            self._owner.post(chunk, events.SendMetadata(self.key, metadata))

    def finish(self, metadata: bytes) -> None:
        """Send the engine's own bytes for decode, once. A prompt's KV is complete before its first token is
        known, so it may be on its way already."""
        self._owner.post(events.SendMetadata(self.key, metadata))

    def close(self) -> None:
        """End a retained room: SUCCESS if decode has committed, else FAILED (ABORTED_BY_CLIENT)."""
        self.abort()

    def evict(self, error: ErrorInfo, unbound_s: float = 0.0) -> None:
        """End the room with `error` unless a decode has it bound or has committed it, so that an engine that
        lacks memory may take its pages back. They are free at `Release`. With `unbound_s` only a room that no
        decode has had for so many seconds."""
        self._owner.post(events.EndRoom(self.key, error, unbound_s=unbound_s))

    def place(self, attempt: int, decode: LeaderId) -> None:
        """Give a retained room to `attempt` of the leader `decode`. Earlier attempts end, whatever they have
        committed."""
        self._owner.post(events.PlaceRoom(self.key, attempt, decode))


class KVReceiver(_Handle):
    """The decode half, made by `KVManager.receive`: (WAITING_FOR_INPUT) → `publish` → SUCCESS | FAILED.

    The phase is BOOTSTRAPPING until the DP rank of prefill is known and its session is up.

    Calls never block, and come from any thread. A call out of order, or with pages that do not fit, ends the
    hand-off on both sides: FAILED with INTERNAL and the reason.
    """

    def publish(self, pages: Sequence[int], prefix_tokens: int = 0, *, slot: int | None = None) -> None:
        """Tell prefill where to write: `pages` are the page ids (integers, each once) of the prompt
        from the page that holds token `prefix_tokens` on, exactly as many as its tokens need; the KV before
        `prefix_tokens` is already in place here. `slot` is for the state, if the model keeps one.

        Legal in WAITING_FOR_INPUT. From now until SUCCESS or `Release` pages and slot belong to the peer.
        """
        self._owner.post(events.Publish(self.key, _page_ids(pages), index(prefix_tokens), slot))


def _page_ids(pages: Sequence[int]) -> tuple[int, ...]:
    """`pages` as plain integers: those of numpy and torch cannot be encoded."""
    return tuple(map(index, pages))


HandleT = TypeVar("HandleT", KVSender, KVReceiver)


class Handles(ABC):
    """The handles of one leader, by the engine's names of its halves. `clock` is the leader's. A handle is in
    `handles` before anything is reported of it, until the engine drops it. `threads` run what a `ready`
    chunk waits for."""

    def __init__(self, clock: Clock, threads: Executor | None = None) -> None:
        self.clock = clock
        self.handles: dict[RoomKey, KVSender | KVReceiver] = {}
        #: why nothing is delivered any more
        self.ended: SegueError | None = None
        self._waits = Waits(threads or ThreadPerCall("segue-ready"))
        self._numbers = count(1)
        #: events that a caller still holds, by number
        self.moments: WeakValueDictionary[int, ReadyEvent] = WeakValueDictionary()

    @abstractmethod
    def post(self, *batch: events.EngineEvent) -> None:
        """Deliver events to the protocol, in this order; does not block."""

    def ready(self) -> ReadyEvent:
        """The moment at which the KV of a chunk will be complete, for `KVSender.send`; its `signal` says that
        it has come. From any thread."""
        made = ReadyEvent(next(self._numbers), self._waits)
        self.moments[made.number] = made
        return made

    def forget(self, key: RoomKey) -> None:
        """The engine has dropped its handle of `key`."""
        self.handles.pop(key, None)

    def apply(self, change: Change) -> None:
        """Have the handle mirror what the protocol reported, if there is one."""
        if (handle := self.handles.get(change.key)) is not None:
            handle.apply(change)

    def expect(
        self,
        key: RoomKey,
        prompt_tokens: int,
        budget_s: float,
        *,
        claim: bytes = b"",
        decode: LeaderId | None = None,
        attempt: int = 0,
        retain_s: float | None = None,
        announce: bool = False,
    ) -> KVSender:
        """Begin the prefill half of a room: wait for a destination of decode, at most `budget_s` seconds.

        `claim` (at most 64 bytes) must be what decode gives to `receive`: a digest of everything that has to
        be equal on both sides (prompt, salt, adapter, weights); it is compared before a byte moves. `decode`
        names the only leader that may bind the room, with the `attempt` of the placement; without it any
        leader with the claim may. With `retain_s` the room outlives bindings that fail, and the first success
        by so many seconds (0: it ends with that), so that another decode can have the KV. With `announce` the
        registry is told that this DP rank has the room, for a decode that was not told and cannot infer it.

        `budget_s` is a finite number, `prompt_tokens` the same on both sides. Raises InvalidRequest for
        another `budget_s` and for a `key` that has a handle already, Internal when the I/O thread has ended.
        A room that was used already, and more than `Limits.max_transfers`, fail at once.
        """
        deadline = self._deadline(budget_s)
        sender = self._remember(key, KVSender(self, key))
        event = events.ExpectRoom(
            key=key,
            prompt_tokens=index(prompt_tokens),
            deadline=deadline,
            claim=claim,
            decode=decode,
            attempt=attempt,
            retain_s=retain_s,
            announce=announce,
        )
        self.post(event)
        return sender

    def receive(
        self,
        key: RoomKey,
        prefill: LeaderId,
        prompt_tokens: int,
        budget_s: float,
        *,
        claim: bytes = b"",
        prefill_dp_rank: int | None = None,
        force_query: bool = False,
        placed: bool = True,
    ) -> KVReceiver:
        """Begin the decode half of a room, which ends after `budget_s` seconds at the latest.

        If `prefill` leaves the DP rank open (`LeaderId.is_open`), it is found first: `prefill_dp_rank` is the
        one that the request names; otherwise, or always with `force_query`, it is inferred from
        `prefill_instances` or the registry is asked. `claim` as in `expect`. If prefill's room does
        not name us as its decode leader, say that it is not `placed`: prefill then hears from here of a
        failure before KV has come.
        """
        deadline = self._deadline(budget_s)
        receiver = self._remember(key, KVReceiver(self, key))
        event = events.OpenReceiver(
            key=key,
            prefill=prefill,
            prompt_tokens=index(prompt_tokens),
            deadline=deadline,
            claim=claim,
            hint=prefill_dp_rank,
            force_query=force_query,
            placed=placed,
        )
        self.post(event)
        return receiver

    def refuse(self, key: RoomKey, error: ErrorInfo, budget_s: float, *, announce: bool = False) -> None:
        """Tell decode that nobody will expect this room: a destination that waits for it, or comes within
        `budget_s` seconds, fails with `error` at once. A room that was expected is not concerned. `announce`
        as in `expect`."""
        deadline = self._deadline(budget_s)
        self.post(events.RefuseRoom(key=key, error=error, deadline=deadline, announce=announce))

    def decline(self, key: RoomKey, prefill: LeaderId, error: ErrorInfo, *, claim: bytes = b"") -> None:
        """Tell prefill that no destination will be published for this room, unless it has a receiver here:
        the room fails with `error` if `claim` is what `expect` was given, or is empty and `expect` named no
        decode leader. If the DP rank of `prefill` is open, all ranks are told."""
        self.post(events.DeclineRoom(key, prefill, error, claim))

    def _deadline(self, budget_s: float) -> float:
        if not math.isfinite(budget_s):
            raise InvalidRequest(f"budget_s must be a finite number of seconds, not {budget_s}")
        return self.clock.now() + budget_s

    def _remember(self, key: RoomKey, handle: HandleT) -> HandleT:
        if self.handles.setdefault(key, handle) is not handle:
            raise InvalidRequest(f"room {key} is in use; each request needs a room of its own", room=key.room)
        if self.ended is not None:
            del self.handles[key]
            raise self.ended.info.exception()
        return handle


OnChange = Callable[[Change], None]
