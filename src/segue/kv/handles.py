"""`KVSender` and `KVReceiver`: one half of one hand-off, as an engine sees it.

A handle turns calls into events for the `Exchange` and mirrors its phase. Calls never block and may
come from any thread; `post` delivers them in order to the thread that owns the protocol. The
handle's fields change only in `apply`, which that thread calls.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from operator import index
from typing import Protocol

from segue.kv.clock import Clock
from segue.kv.errors import AbortedByClient, ErrorInfo, InvalidRequest
from segue.kv.ids import KVPoll, Span, TransferId
from segue.kv.protocol import events
from segue.kv.protocol.messages import Metadata

#: The argument of `KVManager`'s `on_change`: one step of one hand-off; `change.transfer` says of which.
Change = events.Phase | events.Release | events.Quarantined


class HandleOwner(Protocol):
    """Where a handle's events go: the `KVManager` in production, the simulator in tests."""

    clock: Clock

    def post(self, *batch: events.Event) -> None:
        """Deliver `events` in this order; does not block."""
        ...

    def forget(self, transfer: TransferId) -> None:
        """The engine has dropped its handle."""
        ...


class _Handle:
    """What both halves share: phase, error, abort, clear.

    Read from any thread: `error` (the record, after FAILED), `metadata` (the receiver's, after SUCCESS),
    `released` (True once `Release` was reported), `wire_s` and `nbytes` (seconds and bytes of the transfer,
    after SUCCESS), `changed_at` (when the phase last changed, in seconds of the manager's clock).
    """

    def __init__(self, owner: HandleOwner, transfer: TransferId) -> None:
        self.transfer = transfer
        self._owner = owner
        self._phase = KVPoll.BOOTSTRAPPING
        self.error: ErrorInfo | None = None
        self.metadata: Metadata | None = None
        self.released = False
        self.wire_s = 0.0
        self.nbytes = 0
        self.changed_at = owner.clock.now()

    def poll(self) -> KVPoll:
        """The last phase the protocol reached; FAILED and SUCCESS are final. Never blocks."""
        return self._phase

    def abort(self, error: ErrorInfo | None = None) -> None:
        """End the hand-off on both sides with `error` (default ABORTED_BY_CLIENT). A no-op once it ended."""
        info = error or AbortedByClient("the request was aborted", room=self.transfer.room).info
        self._owner.post(events.AbortTransfer(self.transfer, info))

    def clear(self) -> None:
        """Drop this handle; aborts first if the hand-off has not ended. Idempotent.

        Pages stay leased until `Release` was reported, whether or not the handle still exists.
        """
        if not self._phase.terminal:
            self.abort()
        self._owner.forget(self.transfer)

    def _deadline(self, budget_s: float) -> float:
        if not math.isfinite(budget_s):
            raise InvalidRequest(f"budget_s must be a finite number of seconds, not {budget_s}")
        return self._owner.clock.now() + budget_s

    def apply(self, change: Change) -> None:
        """Mirror what the protocol reported. Called by the owner only."""
        match change:
            case events.Phase():
                self.changed_at = self._owner.clock.now()
                self.error = change.error or self.error
                self.metadata = change.metadata or self.metadata
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
    """The prefill half. `init` → (WAITING_FOR_INPUT) → `send` … → SUCCESS | FAILED.

    Calls never block, and come from any thread. A call out of order, or with pages that do not fit, ends the
    hand-off on both sides: FAILED with INTERNAL and the reason.
    """

    def init(self, prompt_tokens: int, budget_s: float) -> None:
        """Begin: wait for the destination that decode publishes. The hand-off ends within `budget_s` seconds,
        a finite number (else InvalidRequest). `prompt_tokens` must be the same on both sides."""
        self._owner.post(events.OpenSender(self.transfer, index(prompt_tokens), self._deadline(budget_s)))

    def announce(self, budget_s: float) -> None:
        """Register the room at the registry, for `budget_s` seconds: decode was not told our DP rank and
        cannot infer it. If that is impossible, the hand-off fails."""
        self._owner.post(events.AnnounceRoom(self.transfer, budget_s))

    def send(
        self,
        span: Span,
        pages: Sequence[int],
        metadata: Metadata | None = None,
        *,
        slot: int | None = None,
        layers: int | None = None,
    ) -> None:
        """Send the KV of `span`, which lies complete in `pages`: the page ids (integers) of the prompt from
        token 0 on, at least up to the end of `span`.

        Legal from WAITING_FOR_INPUT on. Spans follow each other without gaps from token 0; the
        last one ends at `prompt_tokens`; `metadata` comes with it, or later by `finish`. With it goes the
        state in `slot`, if the model keeps one beside its KV. Pages and slot must not change until `Release`;
        what is in the slot before the last chunk is nobody's concern.

        With `layers` only that of the model's first so many layers is complete, and leaves now. The same span
        follows with more layers, and at last without a number.
        """
        chunk = events.SendChunk(self.transfer, span, _page_ids(pages), slot, layers)
        if metadata is None:
            self._owner.post(chunk)
        else:
            self._owner.post(chunk, events.SendMetadata(self.transfer, metadata))

    def finish(self, metadata: Metadata) -> None:
        """Send the first token and what goes with it, once. A prompt's KV is complete before its first token
        is known, so it may be on its way already."""
        self._owner.post(events.SendMetadata(self.transfer, metadata))


class KVReceiver(_Handle):
    """The decode half. `init` → (WAITING_FOR_INPUT) → `send_metadata` → SUCCESS | FAILED.

    Calls never block, and come from any thread. A call out of order, or with pages that do not fit, ends the
    hand-off on both sides: FAILED with INTERNAL and the reason.
    """

    def init(
        self,
        prompt_tokens: int,
        budget_s: float,
        *,
        prefill_dp_rank: int | None = None,
        force_query: bool = False,
    ) -> None:
        """Begin. The phase is WAITING_FOR_INPUT once the session to the transfer's prefill is up. The
        hand-off ends within `budget_s` seconds, a finite number (else InvalidRequest). `prompt_tokens` must
        be the same on both sides.

        Of an open transfer (`LeaderId.is_open`) the DP rank of prefill is found first, and the phase is
        BOOTSTRAPPING until then. `prefill_dp_rank` is the one that the request names; otherwise, or always
        with `force_query`, it is inferred or asked for (`kv.open_ranks`).
        """
        self._owner.post(
            events.OpenReceiver(
                self.transfer,
                index(prompt_tokens),
                self._deadline(budget_s),
                hint=prefill_dp_rank,
                force_query=force_query,
            )
        )

    def send_metadata(self, pages: Sequence[int], prefix_tokens: int = 0, *, slot: int | None = None) -> None:
        """Publish where prefill shall write: `pages` are the page ids (integers, each once) of the prompt
        from the page that holds token `prefix_tokens` on, exactly as many as its tokens need; the KV before
        `prefix_tokens` is already in place here. `slot` is for the state, if the model keeps one.

        Legal in WAITING_FOR_INPUT. From now until SUCCESS or `Release` pages and slot belong to the peer.
        """
        self._owner.post(events.Publish(self.transfer, _page_ids(pages), index(prefix_tokens), slot))


def _page_ids(pages: Sequence[int]) -> tuple[int, ...]:
    """`pages` as plain integers: those of numpy and torch cannot be encoded."""
    return tuple(map(index, pages))


OnChange = Callable[[Change], None]
