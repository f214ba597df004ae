"""The scheduler side on prefill (`kv_producer`). Pure.

Sequential flow: nobody knows the room before prefill answers. The room is opened when the request ends, with
the whole prompt; a request that is preempted or aborted before has nothing to undo.

Concurrent flow: the router gave both sides a `transfer_id`. The room is opened at the first allocation, and
each step sends its chunk. A preemption in between aborts the hand-off: to keep the pinned blocks of a request
that needs as many again could stop prefill for as long as the room is open.

Nobody was shown the blocks of a room that no decode has bound: when a request waits for blocks, the oldest
such rooms of finished requests are given up.

No request id is ever owed to `finished_sending`: pins keep the blocks after vLLM has freed the request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from segue.integrations.prompt_claim import ModelFacts, claim_of
from segue.integrations.vllm.vllm_orders import AbortOrder, EvictOrder, ExpectOrder, SendOrder
from segue.integrations.vllm.vllm_params import PeerAddress, SendParams, answer_params, parse_params
from segue.integrations.vllm.vllm_pins import BlockPool
from segue.integrations.vllm.vllm_request import EngineRequest
from segue.integrations.vllm.vllm_settings import ConnectorSettings
from segue.integrations.vllm.vllm_table import PassedIds, RequestEnd, ScheduledChunk, SchedulerTable
from segue.kv import (
    AbortedByClient,
    ErrorInfo,
    Internal,
    InvalidRequest,
    OutOfCapacity,
    RoomKey,
    SegueError,
    TransferFailed,
    new_room,
)

#: After so many steps a room is given up once more: a decode that had it may have failed, and the worker
#: is not told of that.
_EVICT_AGAIN_STEPS = 16


@dataclass(slots=True)
class _Prompt:
    """A request whose KV is to be handed over; `room` is 0 in the sequential flow."""

    tokens: int
    claim: bytes
    room: int
    #: concurrent flow: the hand-off, from the first allocation on
    handoff: int = 0
    sent: int = 0
    blocks: list[int] = field(default_factory=list)


class PrefillTable(SchedulerTable):
    """See `SchedulerTable`. `address` is where decode reaches this replica; the worker makes it, so that it
    is known only after the start. `make_room` mints rooms of the sequential flow."""

    def __init__(
        self,
        model: ModelFacts,
        pool: BlockPool,
        block_size: int,
        settings: ConnectorSettings,
        secret: bytes = b"",
        *,
        make_room: Callable[[], int] = new_room,
    ) -> None:
        super().__init__(model, pool, block_size, settings, secret)
        self.address: PeerAddress | None = None
        self._make_room = make_room
        self._prompts: dict[str, _Prompt] = {}
        #: blocks that each request needs: those of its prompt, and of what it has generated
        self._needs: dict[str, int] = {}
        #: requests that have no blocks, in vLLM's order: first those that lost them
        self._waiting: dict[str, None] = {}
        self._steps = 0
        #: hand-offs that were told to end unless somebody has them, and in which step
        self._evicted: dict[int, int] = {}

    def new_request(self, request: EngineRequest) -> None:
        """Prepare the hand-off that the params ask for. If it cannot be made, a warning is logged: prefill
        answers without `kv_transfer_params` of its own, and decode computes the prompt."""
        self._needs[request.request_id] = self.block_count(len(request.tokens))
        self._waiting[request.request_id] = None
        try:
            params = parse_params(request.params, self.secret)
            if params is None:
                return
            if not isinstance(params, SendParams):
                raise InvalidRequest("kv_transfer_params ask a kv_producer for do_remote_prefill")
            if request.max_tokens != 1:
                # Later tokens would be written into the prompt's last block while it is sent.
                raise InvalidRequest(f"a request to prefill needs max_tokens 1, not {request.max_tokens}")
            claim = claim_of(request, self.model)
        except SegueError as error:
            self.warn(f"the KV of {request.request_id} is not handed over: {error}")
            return
        self._prompts.setdefault(request.request_id, _Prompt(len(request.tokens), claim, params.room))

    def matched(self, request_id: str, computed: int) -> tuple[int, bool]:
        """Prefill computes each prompt itself."""
        return 0, False

    def allocated(self, request_id: str, blocks: Sequence[int], external: int) -> None:
        """Concurrent flow: open the room, once."""
        self._waiting.pop(request_id, None)
        prompt = self._prompts.get(request_id)
        if prompt is None or not prompt.room or prompt.handoff:
            return
        prompt.handoff = self._expect(request_id, prompt, prompt.room)

    def step(self, scheduled: Iterable[ScheduledChunk], preempted: Iterable[str] = ()) -> None:
        """Concurrent flow: send the chunk of each request in this step. Both flows: give up rooms whose
        blocks a request waits for."""
        preempted, scheduled = set(preempted), list(scheduled)
        if preempted:
            self._waiting = {**{name: None for name in self._needs if name in preempted}, **self._waiting}
        for chunk in scheduled:
            self._waiting.pop(chunk.request_id, None)  # vLLM may resume a request in the step that names it
            if (needed := self._needs.get(chunk.request_id)) is not None:
                held = self.block_count(chunk.computed + chunk.scheduled)
                self._needs[chunk.request_id] = max(needed, held)
        self._evict()
        for request_id in preempted:
            self._preempted(request_id)
        for chunk in scheduled:
            prompt = self._prompts.get(chunk.request_id)
            if prompt is None or not prompt.handoff or self.is_over(prompt.handoff):
                continue
            # A prompt that is preempted before its last chunk leaves the table: no blocks are replaced.
            prompt.blocks += chunk.blocks
            end = min(chunk.computed + chunk.scheduled, prompt.tokens)
            if len(prompt.blocks) < self.block_count(end):
                self._abort(prompt, Internal(f"vLLM named {len(prompt.blocks)} blocks for {end} tokens"))
                del self._prompts[chunk.request_id]
            elif end > prompt.sent:
                self._send(prompt.handoff, prompt, end, prompt.blocks, ready=False)

    def finished(
        self, request_id: str, blocks: Sequence[int], computed: int, end: RequestEnd
    ) -> tuple[bool, dict[str, object] | None]:
        """Sequential flow: open the room with the whole prompt and answer with its address. A request that
        did not compute its prompt has no room."""
        self._waiting.pop(request_id, None)
        self._needs.pop(request_id, None)
        prompt = self._prompts.pop(request_id, None)
        if prompt is None:
            return False, None
        if prompt.handoff:
            if prompt.sent < prompt.tokens:
                error = AbortedByClient if end is RequestEnd.ABORT else TransferFailed
                self._abort(prompt, error(f"prefill's request ended ({end}) before its prompt was computed"))
            return False, None
        complete = computed >= prompt.tokens and len(blocks) >= self.block_count(prompt.tokens)
        if prompt.room or not complete or end not in (RequestEnd.LENGTH, RequestEnd.STOP):
            return False, None
        if self.address is None:
            self.warn("the worker's address is not known yet: prompts are not handed over", "address")
            return False, None
        room = self._make_room()
        handoff = self._expect(request_id, prompt, room)
        self._send(handoff, prompt, prompt.tokens, blocks, ready=True)
        return False, answer_params(room, self.address, prompt.tokens, self.secret)

    def sizes(self) -> dict[str, int]:
        """See `SchedulerTable.sizes`."""
        own = {"prompts": len(self._prompts), "needs": len(self._needs), "waiting": len(self._waiting)}
        return {**super().sizes(), **own}

    def _expect(self, request_id: str, prompt: _Prompt, room: int) -> int:
        handoff = self.open_handoff(request_id)
        self.order(
            ExpectOrder(
                handoff=handoff,
                room=RoomKey(room),
                prompt_tokens=prompt.tokens,
                claim=prompt.claim,
                budget_s=self.settings.room_s,
                retain_s=self.settings.retain_s,
            )
        )
        return handoff

    def _send(self, handoff: int, prompt: _Prompt, end: int, blocks: Sequence[int], *, ready: bool) -> None:
        held = list(blocks[: self.block_count(end)])
        self.pins.hold(handoff, held)
        self.order(SendOrder(handoff, prompt.sent, end, held, end == prompt.tokens, ready))
        prompt.sent = end

    def _evict(self) -> None:
        self._steps += 1
        self._evicted = {handoff: at for handoff, at in self._evicted.items() if handoff in self._open}
        if not self._waiting:
            return
        for handoff, told in self._evicted.items():
            if self._steps - told >= _EVICT_AGAIN_STEPS and not self.is_over(handoff):
                self._give_up(handoff)
        needed = self._needs[next(iter(self._waiting))] - self.free_blocks()
        needed -= sum(map(self.pins.blocks_of, self._evicted))
        for handoff, request_id in self._open.items():
            if needed <= 0:
                return
            if request_id in self._prompts or handoff in self._evicted or self.is_over(handoff):
                continue
            self._give_up(handoff)
            needed -= self.pins.blocks_of(handoff)

    def _give_up(self, handoff: int) -> None:
        error = OutOfCapacity("prefill needed the blocks for another request before decode came")
        self.order(EvictOrder(handoff, error.info))
        self._evicted[handoff] = self._steps

    def _preempted(self, request_id: str) -> None:
        prompt = self._prompts.get(request_id)
        if prompt is None or not prompt.handoff or prompt.sent >= prompt.tokens:
            return
        self._abort(prompt, OutOfCapacity("prefill preempted the request before its prompt was computed"))
        del self._prompts[request_id]

    def _abort(self, prompt: _Prompt, error: SegueError) -> None:
        if not self.is_over(prompt.handoff):
            self.order(AbortOrder(prompt.handoff, error.at(room=prompt.room).info))

    def _on_ended(self, handoff: int, request_id: str, error: ErrorInfo | None) -> None:
        pass  # the request computes on; `is_over` stops its chunks

    def _pass(self, finished: Iterable[str], failed: Iterable[str]) -> PassedIds:
        return PassedIds()
