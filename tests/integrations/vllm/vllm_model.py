"""vLLM's EngineCore as a connector sees it: block pool with reference counts, scheduler, one worker.

The asserts are those that kill EngineCore (`_update_from_kv_xfer_finished`, `free_blocks`, `_free_blocks`),
and two about memory: no block of a hand-off that is not released is given to another request, and the KV
that is sent is the prompt's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

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
    Report,
    SendOrder,
    decode_orders,
    decode_reports,
    encode,
)
from segue.integrations.vllm.vllm_request import EngineRequest
from segue.integrations.vllm.vllm_settings import LoadFailurePolicy
from segue.integrations.vllm.vllm_table import RequestEnd, ScheduledChunk, SchedulerTable
from segue.kv import ErrorInfo

BLOCK = 4


@dataclass(eq=False)
class Block:
    id: int
    #: whose KV each token's place holds
    content: list[object]
    refs: int = 0
    #: how often the pool gave it to a request
    lent: int = 0


class ModelPool:
    def __init__(self, count: int, block: int = BLOCK) -> None:
        self.block = block
        self.blocks = [Block(i, content=[None] * block) for i in range(count)]
        self.free = deque(self.blocks)

    def get_num_free_blocks(self) -> int:
        return len(self.free)

    def allocate(self, count: int) -> list[int] | None:
        if count > len(self.free):
            return None
        taken = [self.free.popleft() for _ in range(count)]
        for block in taken:
            assert block.refs == 0
            block.refs, block.lent = 1, block.lent + 1
        return [block.id for block in taken]

    def touch(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            assert block.refs > 0, "a block that nobody holds is pinned"
            block.refs += 1

    def free_blocks(self, ordered_blocks: Iterable[Block]) -> None:
        for block in ordered_blocks:
            assert block.refs > 0, "a block is freed twice"
            block.refs -= 1
            if not block.refs:
                self.free.append(block)


@dataclass
class Request:
    spec: EngineRequest
    prefix: int = 0
    status: str = "WAITING"
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    #: changes with each preemption: what a step computed before it counts no more
    life: int = 0
    #: its blocks were told to the connector by a step
    told: int = 0

    @property
    def tokens(self) -> int:
        return len(self.spec.tokens)


@dataclass
class Handoff:
    order: ExpectOrder | ReceiveOrder
    #: blocks and how often each had been lent when they were ordered
    lent: dict[int, int] = field(default_factory=dict)
    sends: list[SendOrder] = field(default_factory=list)
    #: a decode has the room
    bound: bool = False
    aborted: bool = False
    ended: bool = False


@dataclass
class Step:
    chunks: list[tuple[Request, int, int, int, list[int]]]
    orders: bytes


class ModelWorker:
    """Carries out orders and owes the reports that `vllm_orders` promises."""

    def __init__(self, pool: ModelPool) -> None:
        self.pool = pool
        self.handoffs: dict[int, Handoff] = {}
        self.released: list[int] = []
        self.declined: list[DeclineOrder] = []
        self.refused: list[RefuseOrder] = []
        self.reports: list[Report] = []
        self.finished_recving: set[str] = set()
        self.failed_recving: set[str] = set()

    def run(self, step: Step) -> None:
        orders = decode_orders(step.orders)
        for request, start, end, _, blocks in step.chunks:
            for token in range(start, end):
                self.pool.blocks[blocks[token // self.pool.block]].content[token % self.pool.block] = (
                    request.spec.request_id,
                    token,
                )
        for order in orders:
            self.carry_out(order)

    def carry_out(self, order: Order) -> None:
        match order:
            case ExpectOrder() | ReceiveOrder():
                assert order.handoff not in self.handoffs
                self.handoffs[order.handoff] = Handoff(order)
                if isinstance(order, ReceiveOrder):
                    self.lend(order.handoff, order.blocks)
            case SendOrder():
                handoff = self.handoffs.get(order.handoff)
                if handoff is None or handoff.ended:
                    return
                position = handoff.sends[-1].end if handoff.sends else 0
                assert order.start == position < order.end
                assert len(order.blocks) == -(-order.end // self.pool.block)
                assert isinstance(handoff.order, ExpectOrder)
                assert order.last == (order.end == handoff.order.prompt_tokens)
                handoff.sends.append(order)
                self.lend(order.handoff, order.blocks)
                self.check_content(handoff)
            case AbortOrder():
                if order.handoff in self.handoffs:
                    self.handoffs[order.handoff].aborted = True
            case EvictOrder():
                if order.handoff in self.handoffs and not self.handoffs[order.handoff].bound:
                    self.handoffs[order.handoff].aborted = True
            case RefuseOrder():
                self.refused.append(order)
                self.name(order.request_id, failed=True)
            case DeclineOrder():
                self.declined.append(order)

    def lend(self, handoff: int, blocks: Sequence[int]) -> None:
        for block in blocks:
            self.handoffs[handoff].lent.setdefault(block, self.pool.blocks[block].lent)

    def check_content(self, handoff: Handoff) -> None:
        """What is sent is one request's KV, each token in its place."""
        owner = None
        for send in handoff.sends:
            for token in range(send.start, send.end):
                found = self.pool.blocks[send.blocks[token // self.pool.block]].content[
                    token % self.pool.block
                ]
                assert isinstance(found, tuple)
                assert found[1] == token
                assert owner in (None, found[0])
                owner = found[0]

    def name(self, request_id: str, failed: bool) -> None:
        self.finished_recving.add(request_id)
        if failed:
            self.failed_recving.add(request_id)

    def end(self, number: int, error: ErrorInfo | None) -> None:
        handoff = self.handoffs[number]
        handoff.ended = True
        self.reports.append(HandoffEnded(number, error))
        if isinstance(handoff.order, ReceiveOrder):
            if error is None:
                self.write(handoff)
            self.name(handoff.order.request_id, error is not None)

    def write(self, handoff: Handoff) -> None:
        """The peer writes into the published blocks: also after a failure, until the release."""
        order = handoff.order
        assert isinstance(order, ReceiveOrder)
        for token in range(order.prefix_tokens, order.prompt_tokens):
            block = order.blocks[(token - order.prefix_tokens) // self.pool.block]
            self.pool.blocks[block].content[token % self.pool.block] = ("peer", order.claim, token)

    def release(self, number: int) -> None:
        assert self.handoffs.pop(number).ended
        self.released.append(number)
        self.reports.append(BlocksReleased(number))

    def take(self) -> tuple[list[Report], set[str], set[str]]:
        reports = decode_reports(encode(self.reports))
        output = reports, self.finished_recving, self.failed_recving
        self.reports, self.finished_recving, self.failed_recving = [], set(), set()
        return output


class ModelEngine:
    """EngineCore with one worker. `depth` steps may be scheduled before the first one has run. With
    `fails_first` requests whose load failed end before the connector sees the step's output."""

    def __init__(
        self, table: SchedulerTable, pool: ModelPool, policy: LoadFailurePolicy, depth: int = 1
    ) -> None:
        self.table = table
        self.pool = pool
        self.policy = policy
        self.depth = depth
        self.fails_first = False
        self.worker = ModelWorker(pool)
        self.requests: dict[str, Request] = {}
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.steps: deque[Step] = deque()
        self.finished_recving: set[str] = set()
        self.failed: set[str] = set()
        #: how each request ended, and what its client got
        self.ends: dict[str, RequestEnd] = {}
        self.answers: dict[str, dict[str, object] | None] = {}
        #: requests that decode with KV of a peer
        self.loaded: list[str] = []
        self.preemptions = 0

    def add(self, spec: EngineRequest, prefix: int = 0) -> None:
        request = Request(spec, prefix)
        self.requests[spec.request_id] = request
        self.table.new_request(spec)
        self.waiting.append(request)

    # ---- one step ----------------------------------------------------------------------------

    def schedule(self, budget: int) -> None:
        chunks: list[tuple[Request, int, int, int, list[int]]] = []
        told: list[ScheduledChunk] = []
        preempted: list[str] = []
        for request in list(self.running):
            if request not in self.running or not budget:
                continue
            count = min(budget, request.tokens - request.computed)
            if count <= 0 or not self.make_room(request, count, preempted):
                continue
            budget -= count
            self.put(request, count, chunks, told)
        for request in list(self.waiting):
            if preempted:
                break
            budget -= self.admit(request, budget, chunks, told)
        self.table.step(told, preempted)
        self.steps.append(Step(chunks, encode(self.table.take_orders())))

    def make_room(self, request: Request, count: int, preempted: list[str]) -> bool:
        needed = -(-(request.computed + count) // self.pool.block) - len(request.blocks)
        while (fresh := self.pool.allocate(max(0, needed))) is None:
            victim = self.running.pop()
            self.preempt(victim)
            preempted.append(victim.spec.request_id)
            if victim is request:
                return False
        request.blocks += fresh
        return True

    def preempt(self, victim: Request) -> None:
        self.preemptions += 1
        self.free(victim)
        victim.status, victim.computed, victim.told = "PREEMPTED", 0, 0
        victim.life += 1
        self.waiting.insert(0, victim)

    def admit(self, request: Request, budget: int, chunks: list, told: list[ScheduledChunk]) -> int:
        name = request.spec.request_id
        if request.status == "WAITING_FOR_REMOTE_KVS":
            if name not in self.finished_recving:
                return 0
            self.finished_recving.remove(name)
            request.status = "WAITING"
            if name in self.failed:
                self.failed.remove(name)
                self.free(request)
                request.computed = 0
            else:
                self.loaded.append(name)
                request.computed = request.tokens - 1
        external = 0
        if not request.computed:
            computed = 0 if request.status == "PREEMPTED" else request.prefix
            external, is_async = self.table.matched(name, computed)
            assert (external, is_async) == self.table.matched(name, computed), "asking changes the answer"
            assert external > 0 or not is_async
        if not external and not budget:
            return 0
        count = 0 if external else min(budget, request.tokens - request.computed)
        total = request.tokens if external else request.computed + count
        fresh = self.pool.allocate(max(0, -(-total // self.pool.block) - len(request.blocks)))
        if fresh is None:
            return 0
        request.blocks += fresh
        self.table.allocated(name, list(request.blocks), external)
        if external:
            request.status = "WAITING_FOR_REMOTE_KVS"
            return 0
        self.waiting.remove(request)
        self.running.append(request)
        request.status = "RUNNING"
        self.put(request, count, chunks, told)
        return count

    def put(self, request: Request, count: int, chunks: list, told: list[ScheduledChunk]) -> None:
        start = request.computed
        new = request.told == 0
        blocks = request.blocks if new else request.blocks[request.told :]
        told.append(ScheduledChunk(request.spec.request_id, start, count, list(blocks)))
        request.told = len(request.blocks)
        request.computed += count
        chunks.append((request, start, request.computed, request.life, list(request.blocks)))

    def complete(self, *names: str, lies: Sequence[Report] = ()) -> None:
        """The oldest step has run; the worker also says `lies` and `names`, which it must not."""
        step = self.steps.popleft()
        self.worker.run(step)
        for request, _, end, life, _ in step.chunks:
            current = self.requests.get(request.spec.request_id) is request and request.life == life
            if current and request.status == "RUNNING" and end == request.tokens:
                self.finish(request, RequestEnd.LENGTH)
        said, finished, failed = self.worker.take()
        if self.fails_first and self.policy is LoadFailurePolicy.FAIL:
            for name in failed:
                if name in self.requests and self.requests[name].status == "WAITING_FOR_REMOTE_KVS":
                    self.finish(self.requests[name], RequestEnd.ERROR)
        passed = self.table.results([*said, *lies], finished | set(names), failed)
        assert passed.failed_recving <= passed.finished_recving
        for name in passed.failed_recving:
            assert self.requests[name].status == "WAITING_FOR_REMOTE_KVS"
            self.failed.add(name)
            if self.policy is LoadFailurePolicy.FAIL:
                self.finish(self.requests[name], RequestEnd.ERROR)
        for name in passed.finished_recving:
            assert name in self.requests, f"EngineCore dies: finished_recving names {name}"
            request = self.requests[name]
            if request.status == "WAITING_FOR_REMOTE_KVS":
                assert name not in self.finished_recving
                self.finished_recving.add(name)
            else:
                assert request.status == "FINISHED"
                self.free_finished(request)

    # ---- ends --------------------------------------------------------------------------------

    def finish(self, request: Request, end: RequestEnd) -> None:
        name = request.spec.request_id
        assert request.status != "FINISHED"
        delay = request.status == "WAITING_FOR_REMOTE_KVS" and name not in self.finished_recving
        self.finished_recving.discard(name)
        self.failed.discard(name)
        for queue in (self.waiting, self.running):
            if request in queue:
                queue.remove(request)
        request.status = "FINISHED"
        assert name not in self.ends
        self.ends[name] = end
        keep, self.answers[name] = self.table.finished(name, list(request.blocks), request.computed, end)
        if not (delay or keep):
            self.free_finished(request)

    def abort(self, name: str) -> None:
        if name in self.requests and self.requests[name].status != "FINISHED":
            self.finish(self.requests[name], RequestEnd.ABORT)

    def free_finished(self, request: Request) -> None:
        self.free(request)
        del self.requests[request.spec.request_id]

    def free(self, request: Request) -> None:
        self.pool.free_blocks([self.pool.blocks[block] for block in reversed(request.blocks)])
        request.blocks = []

    # ---- what holds at every moment -----------------------------------------------------------

    def check(self) -> None:
        for handoff in self.worker.handoffs.values():
            for block, lent in handoff.lent.items():
                found = self.pool.blocks[block]
                assert found.refs > 0, "a block of a hand-off is free"
                assert found.lent == lent, "a block of a hand-off went to another request"
            self.worker.check_content(handoff)

    @property
    def at_rest(self) -> bool:
        return not (self.requests or self.steps or self.table.has_work())

    def quiet(self, error: ErrorInfo | None = None, limit: int = 500) -> None:
        """Run until nothing is left: each hand-off ends (with `error`, if it was aborted or one is given) and
        is released."""
        for _ in range(limit):
            if self.at_rest:
                break
            if not self.steps:
                self.schedule(64)
            self.complete()
            for number, handoff in list(self.worker.handoffs.items()):
                if not handoff.ended:
                    self.worker.end(number, error)
                self.worker.release(number)
            self.check()
        assert self.at_rest, "vLLM waits for ever"
        assert not any(self.table.sizes().values()), self.table.sizes()
        assert len(self.pool.free) == len(self.pool.blocks)
        assert not any(block.refs for block in self.pool.blocks)
