"""The scheduler side on decode (`kv_consumer`). Pure.

A request asks for its KV once. The blocks that it publishes are pinned from the order until the release:
after a failure vLLM fails the request or computes it in other blocks at once, and nobody gets the published
ones before it is proven that the peer cannot write into them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from segue.integrations.prompt_claim import ModelFacts, claim_of
from segue.integrations.vllm.vllm_orders import (
    AbortOrder,
    DeclineOrder,
    ReceiveOrder,
    RefuseOrder,
)
from segue.integrations.vllm.vllm_params import ReceiveParams, parse_params
from segue.integrations.vllm.vllm_pins import BlockPool
from segue.integrations.vllm.vllm_request import EngineRequest
from segue.integrations.vllm.vllm_settings import ConnectorSettings, LoadFailurePolicy, PeerPolicy
from segue.integrations.vllm.vllm_table import PassedIds, RequestEnd, ScheduledChunk, SchedulerTable
from segue.kv import (
    AbortedByClient,
    ErrorInfo,
    Internal,
    InvalidRequest,
    MetadataMismatch,
    RoomKey,
    SegueError,
    Unauthorized,
)

#: Rooms whose attempts are counted. A room that was forgotten begins with attempt 0 again, which prefill
#: refuses if that was used: the request computes its prompt.
_MAX_ROOMS = 4096
_MAX_ATTEMPT = 2**16 - 1


@dataclass(slots=True)
class _LoadedRequest:
    """A request whose KV comes from prefill: from its arrival until vLLM has heard of the end."""

    tokens: int
    claim: bytes = b""
    params: ReceiveParams | None = None
    #: why it fails
    error: ErrorInfo | None = None
    #: vLLM has allocated its blocks, and waits for its id in `finished_recving`
    owed: bool = False
    handoff: int = 0
    #: the hand-off has ended
    ended: bool = False
    #: the request ended while it was loaded
    gone: bool = False


class DecodeTable(SchedulerTable):
    """See `SchedulerTable`. `policy` is vLLM's `kv_load_failure_policy`."""

    def __init__(
        self,
        model: ModelFacts,
        pool: BlockPool,
        block_size: int,
        settings: ConnectorSettings,
        secret: bytes = b"",
        *,
        policy: LoadFailurePolicy = LoadFailurePolicy.FAIL,
    ) -> None:
        super().__init__(model, pool, block_size, settings, secret)
        self._policy = policy
        self._peers = PeerPolicy(secret, tuple(settings.peers))
        self._loads: dict[str, _LoadedRequest] = {}
        self._attempts: OrderedDict[int, int] = OrderedDict()

    def new_request(self, request: EngineRequest) -> None:
        """Prepare the load that the params ask for. If it cannot be made, the request is computed here, or
        fails, as the policy says."""
        if request.request_id in self._loads:
            self.warn(f"vLLM has a second request {request.request_id}")
            return
        load = _LoadedRequest(len(request.tokens))
        try:
            params = parse_params(request.params, self.secret)
            if params is None:
                return
            if not isinstance(params, ReceiveParams):
                raise InvalidRequest("kv_transfer_params ask a kv_consumer for do_remote_decode")
            load.claim = claim_of(request, self.model)
            if params.tokens not in (0, load.tokens):
                raise MetadataMismatch(f"prefill's prompt has {params.tokens} tokens, decode's {load.tokens}")
            if not self._peers.allows(params.peer.host, params.signed):
                raise Unauthorized(
                    f"prefill's host {params.peer.host} is not allowed: give both sides the same "
                    "secret_file, or name the host in extra_config.peers; without a secret only loopback is"
                )
            load.params = params
        except SegueError as error:
            load.error = error.info
            self._refused(request.request_id, error)
            if self._policy is LoadFailurePolicy.RECOMPUTE:
                return
        self._loads[request.request_id] = load

    def _refused(self, request_id: str, error: SegueError) -> None:
        # One warning for all hosts that are not allowed: a client could name a new one in each request.
        subject = "host" if isinstance(error, Unauthorized) else ""
        self.warn(f"the KV of {request_id} is not loaded: {error}", subject)

    def matched(self, request_id: str, computed: int) -> tuple[int, bool]:
        """All tokens that no prefix cache has, until the load has begun."""
        load = self._loads.get(request_id)
        if load is None or load.owed or computed >= load.tokens:
            return 0, False
        return load.tokens - computed, True

    def allocated(self, request_id: str, blocks: Sequence[int], external: int) -> None:
        """Begin the load; with `external` 0 nothing is loaded, and prefill hears that."""
        load = self._loads.get(request_id)
        if load is None or load.owed:
            return
        if external <= 0:
            del self._loads[request_id]
            self._decline(load, AbortedByClient("decode needs no KV for this request"))
            return
        load.owed = True
        prefix = load.tokens - external
        published = list(blocks[prefix // self.block_size : self.block_count(load.tokens)])
        if prefix % self.block_size or len(set(published)) != self.block_count(external):
            self._refuse(
                request_id, load, Internal(f"vLLM allocated {len(blocks)} blocks for {load.tokens} tokens")
            )
            return
        if load.params is None:
            self._refuse(request_id, load, Internal("a load without params"))
            return
        load.handoff = self.open_handoff(request_id)
        self.pins.hold(load.handoff, published)
        self.order(
            ReceiveOrder(
                handoff=load.handoff,
                request_id=request_id,
                room=self._attempt(load.params.room),
                peer=load.params.peer,
                prompt_tokens=load.tokens,
                prefix_tokens=prefix,
                blocks=published,
                claim=load.claim,
                budget_s=self.settings.room_s,
            )
        )

    def step(self, scheduled: Iterable[ScheduledChunk], preempted: Iterable[str] = ()) -> None:
        """Nothing: vLLM preempts no request that it loads, and afterwards the KV is the request's own."""

    def finished(
        self, request_id: str, blocks: Sequence[int], computed: int, end: RequestEnd
    ) -> tuple[bool, dict[str, object] | None]:
        """End the load. vLLM itself keeps the blocks of a request that it loads until `finished_recving`
        names it, so that the answer is False in each case."""
        load = self._loads.get(request_id)
        if load is None:
            return False, None
        gone = AbortedByClient(f"decode's request ended ({end})")
        if not load.owed:
            del self._loads[request_id]
            self._decline(load, gone)
        else:
            load.gone = True
            if load.handoff:
                self.order(AbortOrder(load.handoff, gone.info))
        return False, None

    def has_work(self) -> bool:
        """See `SchedulerTable.has_work`."""
        return super().has_work() or any(load.owed for load in self._loads.values())

    def sizes(self) -> dict[str, int]:
        """See `SchedulerTable.sizes`."""
        return {**super().sizes(), "loads": len(self._loads)}

    def _refuse(self, request_id: str, load: _LoadedRequest, error: SegueError) -> None:
        load.error, load.ended = load.error or error.info, True
        self.order(RefuseOrder(request_id, load.error))

    def _decline(self, load: _LoadedRequest, error: SegueError) -> None:
        if load.params is not None:
            peer = load.params.peer
            self.order(DeclineOrder(RoomKey(load.params.room), peer, error.info, load.claim))

    def _attempt(self, room: int) -> RoomKey:
        attempt = self._attempts.pop(room, 0)
        self._attempts[room] = min(attempt + 1, _MAX_ATTEMPT)
        if len(self._attempts) > _MAX_ROOMS:
            self._attempts.popitem(last=False)
        return RoomKey(room, attempt=attempt)

    def _on_ended(self, handoff: int, request_id: str, error: ErrorInfo | None) -> None:
        load = self._loads.get(request_id)
        if load is not None and load.handoff == handoff:
            load.ended, load.error = True, error

    def _pass(self, finished: Iterable[str], failed: Iterable[str]) -> PassedIds:
        """vLLM hears of a request when the worker names it and its hand-off has ended; an id that is named
        before that is dropped. A hand-off that ended with an error is a failure, whatever the worker says."""
        passed = PassedIds()
        failed = set(failed)
        for request_id in {*finished, *failed}:
            load = self._loads.get(request_id)
            if load is None or not load.ended:
                continue
            del self._loads[request_id]
            passed.finished_recving.add(request_id)
            if (load.error is not None or request_id in failed) and not load.gone:
                passed.failed_recving.add(request_id)
        return passed
