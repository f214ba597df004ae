"""The worker side: carries out the scheduler side's orders with a `KVManager`, in this process or in an agent
(`KVAgent`), and collects what it reports.

vLLM's calls come on the worker's main thread, changes of hand-offs on the manager's I/O thread. One lock is
between them; nothing waits while it is held.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from segue.integrations.vllm.vllm_memory import CachePool
from segue.integrations.vllm.vllm_orders import (
    AbortOrder,
    BlocksReleased,
    DeclineOrder,
    EvictOrder,
    ExpectOrder,
    HandoffEnded,
    Order,
    ReceiveOrder,
    RefuseOrder,
    SendOrder,
)
from segue.integrations.vllm.vllm_params import PeerAddress
from segue.integrations.vllm.vllm_query import QueryServer, RankDirectory, announce, session_port
from segue.integrations.vllm.vllm_rank import (
    Computed,
    StepResults,
    WorkerPlace,
    cpus_of_parent,
    on_a_device,
    sends_chunks,
    step_raised,
    worker_config,
)
from segue.integrations.vllm.vllm_settings import ConnectorSettings
from segue.kv import (
    HOST,
    Change,
    ErrorInfo,
    Internal,
    IoThread,
    KVAgent,
    KVManager,
    KVPoll,
    KVReceiver,
    KVSender,
    LeaderId,
    MonotonicClock,
    Phase,
    Rank,
    ReadyEvent,
    Release,
    Role,
    RoomKey,
    SegueError,
    Span,
    background,
    local_rank,
    new_incarnation,
)

log = logging.getLogger("segue.vllm")

_ALONE = WorkerPlace()
#: Prefill leaders to which decode keeps sessions without a hand-off.
_MAX_IDLE_PEERS = 64
_QUERY_S = 5.0
#: Where a listener at all addresses is reached on its host.
_LOCAL = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}


@dataclass(slots=True)
class _PrefillPeer:
    """A prefill leader with `open` hand-offs; its sessions are at `port`, once that is known."""

    open: int = 0
    port: int = 0


@dataclass(slots=True)
class _WorkerHandoff:
    """One hand-off of this side. `request_id`, `peer`, `pages` and `prefix` are decode's."""

    handoff: int
    key: RoomKey
    units: int
    handle: KVSender | KVReceiver | None = None
    request_id: str = ""
    peer: LeaderId | None = None
    pages: list[int] = field(default_factory=list)
    prefix: int = 0
    #: units that were sent
    sent: int = 0
    ended: bool = False
    failed: bool = False


class WorkerSide:
    """The hand-offs of one vLLM engine, in its worker of rank 0. `model` is the model's identity, which both
    sides must share. `place` are the worker's numbers, and `others` the other ranks' workers; `me` and
    `others` are those of `lead`. With `settings.agent` the manager runs in a process of its own, which maps
    the pool. `computed` is for a `pool` whose device computes behind its host.

    Raises ConfigError for settings or a `pool` that do not work here.
    """

    def __init__(
        self,
        role: Role,
        settings: ConnectorSettings,
        secret: bytes,
        model: str,
        pool: CachePool,
        place: WorkerPlace = _ALONE,
        me: LeaderId | None = None,
        others: Sequence[Rank] = (),
        computed: Computed | None = None,
    ) -> None:
        self._clock = MonotonicClock()
        self._unit = pool.unit_tokens
        self._computed = computed
        self._on_device = on_a_device(pool)
        self._lock = threading.Lock()
        self._halves: dict[int, _WorkerHandoff] = {}
        self._by_key: dict[RoomKey, _WorkerHandoff] = {}
        #: the least recently used first
        self._peers: dict[LeaderId, _PrefillPeer] = {}
        self._queries: IoThread | None = None
        self._server: QueryServer | None = None
        #: the end of the forward of the step that runs, if its chunks are sent
        self._forward: ReadyEvent | None = None
        self._in_step = False
        self._results = StepResults()
        #: why no hand-off is possible any more
        self._lost: SegueError | None = None
        me = me or LeaderId(new_incarnation())
        config = worker_config(role, settings, secret, model, pool, place, me)
        heard, lost = self._on_change, self._on_lost
        self._manager: KVManager | KVAgent
        with cpus_of_parent(settings.cpus):
            if settings.agent:
                self._manager = KVAgent(config, pool.memory, heard, on_rank_lost=lost)
            else:
                ranks = [local_rank(config, pool.memory, HOST), *others] if others else pool.memory
                self._manager = KVManager(config, ranks, heard, on_rank_lost=lost)
            host, port = self._manager.start()
        self.address = PeerAddress(config.me, settings.advertise_host or host, port)
        if role is Role.PREFILL and settings.query_port:
            try:
                self._serve_query(settings.host, settings.query_port, place.data_rank, secret)
            except SegueError:
                self.close()
                raise
        log.info("KV hand-off: %s at %s:%d over %s", role.value, host, port, ", ".join(config.transports))

    # ---- vLLM's calls, on the worker's thread ------------------------------------------------

    def begin_step(self, orders: Iterable[Order]) -> None:
        """Carry out `orders`, before the step's forward. Its chunks are prepared and leave when it has ended.
        Raises SegueError when this worker cannot hand over KV any more, so that vLLM fails its health
        checks."""
        if self._in_step:  # vLLM's newer runner does not call `wait_for_save` when a step has raised
            self.end_forward(Internal("before wait_for_save"))
        if self._lost is not None:
            raise self._lost
        if not self._manager.io.running:
            raise Internal("the thread of the KV hand-off has ended; start this vLLM again")
        self._in_step = True
        orders = list(orders)
        if sends_chunks(orders, self._on_device):
            self._forward = self._manager.ready()
        for order in orders:
            self._carry_out(order)

    def end_forward(self, raised: BaseException | None = None) -> None:
        """The KV of the step is complete in memory, or will be when the device has computed it: its chunks
        leave then. If the step has `raised`, nothing is sent any more, for vLLM may share its blocks with
        later requests: the hand-offs of its chunks end on both sides, and the next step raises."""
        forward, self._forward, self._in_step = self._forward, None, False
        if raised is not None:
            self._lost = step_raised(raised)
        if forward is None:
            return
        if self._lost is None:
            forward.signal(self._computed and self._computed())
        else:
            forward.end(self._lost)

    def take_results(self) -> StepResults:
        """Requests and hand-offs that have ended since the last call."""
        with self._lock:
            results, self._results = self._results, StepResults()
        return results

    def sizes(self) -> dict[str, int]:
        """The number of entries of every table, for leak checks: all 0 at rest but `peers`."""
        with self._lock:
            own = {"halves": len(self._halves), "keys": len(self._by_key)}
        return {**own, **self._manager.sizes()}

    def close(self) -> None:
        """End all sessions and threads. Idempotent."""
        self._manager.close()
        if self._queries is not None:
            if self._server is not None and self._queries.running:
                self._queries.call(self._server.close(), _QUERY_S)
            self._queries.stop()

    # ---- orders ------------------------------------------------------------------------------

    def _carry_out(self, order: Order) -> None:
        with self._lock:
            match order:
                case ExpectOrder():
                    self._expect(order)
                case SendOrder():
                    self._send(order)
                case ReceiveOrder():
                    self._receive(order)
                case RefuseOrder():
                    self._name(order.request_id, failed=True)
                case AbortOrder():
                    self._abort(order)
                case EvictOrder():
                    half = self._halves.get(order.handoff)
                    if half is not None and isinstance(half.handle, KVSender):
                        half.handle.evict(order.error)
                case DeclineOrder():
                    self._decline(order)

    def _expect(self, order: ExpectOrder) -> None:
        half = _WorkerHandoff(order.handoff, order.room, self._units(order.prompt_tokens))
        self._halves[half.handoff] = half
        try:
            handle = self._manager.expect(
                order.room, half.units, order.budget_s, claim=order.claim, retain_s=order.retain_s or None
            )
        except SegueError as error:
            self._never_began(half, error.info)
        else:
            self._began(half, handle)

    def _send(self, order: SendOrder) -> None:
        half = self._halves.get(order.handoff)
        if half is None or half.ended or not isinstance(half.handle, KVSender):
            return
        # A unit that is not full yet goes with a later chunk.
        end = self._units(order.end) if order.last else order.end // self._unit
        if end > half.sent:
            ready = None if order.ready and not self._on_device else self._forward
            half.handle.send(Span(half.sent, end), order.blocks, b"" if order.last else None, ready=ready)
            half.sent = end

    def _receive(self, order: ReceiveOrder) -> None:
        half = _WorkerHandoff(order.handoff, order.room, self._units(order.prompt_tokens))
        half.request_id, half.peer = order.request_id, order.peer.leader
        half.pages, half.prefix = order.blocks, order.prefix_tokens // self._unit
        self._halves[half.handoff] = half
        self._peer(half.peer).open += 1
        deadline = self._clock.now() + order.budget_s

        def receive(host: str, port: int) -> None:
            if half.ended:
                return  # aborted meanwhile
            try:
                self._manager.add_peer(order.peer.leader, host, port)
                # vLLM's prefill learns its decode from the destination alone.
                handle = self._manager.receive(
                    order.room,
                    order.peer.leader,
                    half.units,
                    deadline - self._clock.now(),
                    claim=order.claim,
                    placed=False,
                )
            except SegueError as error:
                self._never_began(half, error.info)
            else:
                self._began(half, handle)

        self._with_session(order.peer, receive, lambda error: self._never_began(half, error))

    def _abort(self, order: AbortOrder) -> None:
        half = self._halves.get(order.handoff)
        if half is None:
            return
        if half.handle is None:
            self._never_began(half, order.error)
        else:
            half.handle.abort(order.error)

    def _decline(self, order: DeclineOrder) -> None:
        def decline(host: str, port: int) -> None:
            self._peer(order.peer.leader)  # while its `GET /query` was asked, the peer may have been dropped
            self._manager.add_peer(order.peer.leader, host, port)
            self._manager.decline(order.room, order.peer.leader, order.error, claim=order.claim)
            self._drop_peers()

        self._peer(order.peer.leader)
        self._with_session(order.peer, decline, lambda _: self._drop_peers(order.peer.leader))

    # ---- GET /query ---------------------------------------------------------------------------

    def _with_session(
        self, peer: PeerAddress, then: Callable[[str, int], None], failed: Callable[[ErrorInfo], None]
    ) -> None:
        """Call `then` with the host and port of the sessions of `peer`, now or when its `GET /query` has
        answered, or `failed` with the error. Both are called under the lock."""
        known = self._peers[peer.leader].port if peer.leader in self._peers else 0
        if known or not peer.query:
            then(peer.host, known or peer.port)
            return

        async def ask() -> None:
            port = await session_port(peer.host, peer.port, peer.leader, _QUERY_S)
            with self._lock:
                if peer.leader in self._peers:
                    self._peers[peer.leader].port = port
                then(peer.host, port)  # the host that the settings allowed, whatever the answer names

        def not_answered(error: SegueError) -> None:
            with self._lock:
                failed(error.info)

        io, name = self._query_thread(), f"asking {peer.host}:{peer.port} for the sessions of {peer.leader}"
        io.post(lambda: background(ask(), name=name, failed=not_answered))

    def _serve_query(self, host: str, port: int, data_rank: int, secret: bytes) -> None:
        io = self._query_thread()
        if data_rank:
            known, address = _LOCAL.get(host, host), self.address
            work = partial(announce, known, port, data_rank, address, secret)
            name = f"telling {known}:{port} where data-parallel rank {data_rank} is"
            io.post(
                lambda: background(work(), name=name, failed=lambda error: log.error("%s: %s", name, error))
            )
            return
        ranks = RankDirectory()
        ranks.add(0, self.address)
        server = QueryServer(host, port, ranks, secret)
        io.call(server.open(), _QUERY_S)
        self._server = server

    def _query_thread(self) -> IoThread:
        if self._queries is None:
            self._queries = IoThread()
            self._queries.start()
        return self._queries

    # ---- the hand-offs' changes, on the I/O thread --------------------------------------------

    def _on_change(self, change: Change) -> None:
        with self._lock:
            half = self._by_key.get(change.key)
            if half is None:
                return
            match change:
                case Phase():
                    self._on_phase(half, change)
                case Release():
                    self._release(half)
                case _:
                    pass  # in quarantine: the release comes when it is proven

    def _on_phase(self, half: _WorkerHandoff, change: Phase) -> None:
        if change.phase.terminal:
            self._end(half, change.error, change.nbytes, change.wire_s)
        elif change.phase is KVPoll.WAITING_FOR_INPUT and isinstance(half.handle, KVReceiver):
            half.handle.publish(half.pages, half.prefix)

    def _on_lost(self, error: SegueError) -> None:
        self._lost = error

    # ---- both, under the lock -----------------------------------------------------------------

    def _began(self, half: _WorkerHandoff, handle: KVSender | KVReceiver) -> None:
        # Not before: another half may have had the key while this one waited for its session.
        half.handle = handle
        self._by_key[half.key] = half

    def _never_began(self, half: _WorkerHandoff, error: ErrorInfo) -> None:
        if not half.ended:
            self._end(half, error)
            self._release(half)

    def _peer(self, leader: LeaderId) -> _PrefillPeer:
        """The record of `leader`; now the most recently used one."""
        self._peers[leader] = peer = self._peers.pop(leader, _PrefillPeer())
        return peer

    def _end(
        self, half: _WorkerHandoff, error: ErrorInfo | None, nbytes: int = 0, wire_s: float = 0.0
    ) -> None:
        if half.ended:
            return
        half.ended, half.failed = True, error is not None
        self._results.reports.append(HandoffEnded(half.handoff, error, nbytes, wire_s))
        if half.request_id:
            self._name(half.request_id, failed=error is not None)

    def _release(self, half: _WorkerHandoff) -> None:
        del self._halves[half.handoff]
        if self._by_key.get(half.key) is half:
            del self._by_key[half.key]
        self._results.reports.append(BlocksReleased(half.handoff))
        if half.handle is not None:
            half.handle.clear()
        if half.peer is not None:
            self._peers[half.peer].open -= 1
            self._drop_peers(half.peer if half.failed else None)

    def _drop_peers(self, suspect: LeaderId | None = None) -> None:
        """End what nobody needs: a prefill that was replaced would be dialled for ever."""
        idle = [leader for leader, peer in self._peers.items() if not peer.open]
        unwanted = set(idle[: max(0, len(idle) - _MAX_IDLE_PEERS)])
        if suspect is not None and suspect in idle:
            unwanted.add(suspect)
        for leader in unwanted:
            del self._peers[leader]
            self._manager.remove_peer(leader)

    def _name(self, request_id: str, failed: bool) -> None:
        # vLLM wants a failed one in both sets.
        self._results.finished_recving.add(request_id)
        if failed:
            self._results.failed_recving.add(request_id)

    def _units(self, tokens: int) -> int:
        return -(-tokens // self._unit)
