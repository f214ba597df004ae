"""A prefill and a decode engine (`vllm_model`) whose workers are real: tensors of the shape of vLLM's KV
cache, and a `WorkerSide` each that hands over between them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from vllm_bench import MODEL
from vllm_model import BLOCK, ModelEngine, ModelPool, ModelWorker, Step

from segue.integrations.vllm.vllm_decode_table import DecodeTable
from segue.integrations.vllm.vllm_memory import CacheFacts, cache_pool
from segue.integrations.vllm.vllm_orders import Order, SendOrder, decode_orders
from segue.integrations.vllm.vllm_prefill_table import PrefillTable
from segue.integrations.vllm.vllm_rank import RankSide, WorkerPlace, lead
from segue.integrations.vllm.vllm_settings import ConnectorSettings, LoadFailurePolicy
from segue.integrations.vllm.vllm_shared_pool import SharedPoolMode
from segue.integrations.vllm.vllm_table import SchedulerTable
from segue.integrations.vllm.vllm_worker import WorkerSide
from segue.kv import Role

LAYERS, HEADS, DIM, BLOCKS = 2, 2, 8, 24
WITHIN_S = 30.0
CPU_ATTN = CacheFacts(
    backend="CPU_ATTN", blocks=BLOCKS, block_size=BLOCK, head_size=DIM, dtype="float32", isa="vec"
)


class DeviceTensor(torch.Tensor):
    """A tensor of the CPU that is declared as a device's."""

    device = torch.device("cpu:0")


class LaunchedWork:
    """Work that was launched on a device; computed once."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._work = work
        self._lock = threading.Lock()
        self.done = False

    def compute(self) -> None:
        with self._lock:
            if not self.done:
                self.done = True
                self._work()


class LazyDevice:
    """Computes what was launched on it when somebody waits for that, and what was launched before it: a block
    may have tokens of two steps."""

    def __init__(self) -> None:
        self._launched: list[LaunchedWork] = []
        #: nothing is computed before this is set
        self.goes_on = threading.Event()
        self.goes_on.set()

    def launch(self, work: Callable[[], object]) -> None:
        self._launched.append(LaunchedWork(work))

    def computed(self) -> Callable[[], object]:
        before = [work for work in self._launched if not work.done]

        def wait() -> None:
            assert self.goes_on.wait(WITHIN_S)
            for work in before:
                work.compute()

        return wait


def make_caches(
    shared: bool = False, mode: SharedPoolMode | None = None, *, heads: int = HEADS
) -> tuple[dict[str, torch.Tensor], SharedPoolMode]:
    """One allocation for all layers, as vLLM makes it: `[blocks, heads, block_size, 2 * head_size]` each."""
    mode = mode or SharedPoolMode()
    nbytes = LAYERS * BLOCKS * heads * BLOCK * 2 * DIM * 4
    if shared:
        with mode:
            raw = torch.zeros(nbytes, dtype=torch.int8, device=torch.device("cpu"))
    else:
        raw = torch.zeros(nbytes, dtype=torch.int8)
    layers = raw.view(torch.float32).view(LAYERS, BLOCKS, heads, BLOCK, 2 * DIM)
    return {f"layers.{i}.attn": layers[i] for i in range(LAYERS)}, mode


def write(
    caches: dict[str, torch.Tensor], token: int, position: int, block: int, first_head: int = 0
) -> None:
    """The KV of one token, K transposed as CPU_ATTN keeps it: values that its id, position, layer and head
    give."""
    slot = position % BLOCK
    for number, cache in enumerate(caches.values()):
        row = torch.arange(DIM, dtype=torch.float32) + 100 * token + 10_000 * position + 7 * number
        heads = cache.shape[1]
        rows = row + 0.5 * torch.arange(first_head, first_head + heads)[:, None]
        both = cache[block].reshape(heads, 2, DIM * BLOCK)
        both[:, 0].view(heads, DIM, BLOCK)[:, :, slot] = rows
        both[:, 1].view(heads, BLOCK, DIM)[:, slot] = -rows


class TensorWorker(ModelWorker):
    """Computes prompts into tensors, and hands over for real."""

    def __init__(
        self, pool: ModelPool, sides: Sequence[WorkerSide | RankSide], caches: list[dict[str, torch.Tensor]]
    ) -> None:
        super().__init__(pool)
        assert isinstance(sides[0], WorkerSide)
        self.side = sides[0]
        #: those of each tensor-parallel rank
        self.sides, self.caches = sides, caches
        #: the KV of each prompt when its last token was computed
        self.kv: dict[str, torch.Tensor] = {}
        #: seconds that each forward takes before it writes any KV
        self.forward_s = 0.0
        #: what the next forwards raise, by rank; None: vLLM does not tell the connector
        self.raised: dict[int, BaseException | None] = {}
        #: the devices that compute, one for each rank; none: this thread does
        self.devices: list[LazyDevice] = []
        #: only so many tokens of a prompt leave that is computed when it is sent; 0: all
        self.sends_only = 0

    def run(self, step: Step) -> None:
        orders = [self._shortened(order) for order in decode_orders(step.orders)]
        for side in self.sides:
            side.begin_step(orders)
        if step.chunks:
            time.sleep(self.forward_s)
        for request, start, end, _, blocks in step.chunks:
            for position in range(start, end):
                head = 0
                for rank, caches in enumerate(self.caches):
                    token, block = request.spec.tokens[position], blocks[position // BLOCK]
                    work = partial(write, caches, token, position, block, head)
                    self.devices[rank].launch(work) if self.devices else work()
                    head += next(iter(caches.values())).shape[1]
            if end == request.tokens:
                parts = [kv_of(caches, blocks, end) for caches in self.caches]
                self.kv[request.spec.request_id] = torch.cat(parts, dim=3)
        raised = self.raised if step.chunks else {}
        for rank, side in enumerate(self.sides):
            if raised.get(rank, "") is not None:
                side.end_forward(raised.get(rank))

    def _shortened(self, order: Order) -> Order:
        if not (self.sends_only and isinstance(order, SendOrder) and order.ready):
            return order
        blocks = order.blocks[: self.sends_only // BLOCK]
        return SendOrder(order.handoff, 0, self.sends_only, blocks, last=False, ready=True)

    def take(self) -> Any:
        results = self.side.take_results()
        return results.reports, results.finished_recving, results.failed_recving


def kv_of(caches: dict[str, torch.Tensor], blocks: Sequence[int], tokens: int) -> torch.Tensor:
    """K and V of the first tokens, `[layer, 2, token, head, item]`."""
    layers = []
    for cache in caches.values():
        heads = cache.shape[1]
        both = cache[list(blocks)].view(-1, heads, 2, DIM * BLOCK)
        keys = both[:, :, 0].reshape(-1, heads, DIM, BLOCK).permute(0, 3, 1, 2)
        values = both[:, :, 1].reshape(-1, heads, BLOCK, DIM).permute(0, 2, 1, 3)
        layers.append(torch.stack([x.reshape(-1, heads, DIM)[:tokens] for x in (keys, values)]))
    return torch.stack(layers)


def landed(engine: ModelEngine, name: str) -> int:
    """The tokens, from the first one on, whose KV lies where the request `name` has its blocks."""
    worker = engine.worker
    assert isinstance(worker, TensorWorker)
    request = engine.requests[name]
    if not request.blocks:
        return 0
    tokens = request.spec.tokens[: len(request.blocks) * BLOCK]
    found = torch.cat([kv_of(caches, request.blocks, len(tokens)) for caches in worker.caches], dim=3)
    same = (found == expected(tokens)).all(dim=4).all(dim=3).all(dim=1).all(dim=0)
    return int(same.long().cumprod(0).sum())


def make_engine(
    stack: ExitStack,
    role: Role,
    settings: ConnectorSettings,
    policy: LoadFailurePolicy,
    *,
    shared: bool = False,
    facts: CacheFacts = CPU_ATTN,
    secret: bytes = b"",
    model: str = "model/float32",
    ranks: int = 1,
    on_device: bool = False,
) -> ModelEngine:
    """An engine whose workers are real, one for each tensor-parallel rank. Its `stack` closes it. With
    `on_device` its KV is in memory that is declared as a device's, and prefill's is computed there."""
    pool, block = ModelPool(BLOCKS), facts.block_size
    table: SchedulerTable
    if role is Role.PREFILL:
        table = PrefillTable(MODEL, pool, block, settings, secret)
    else:
        table = DecodeTable(MODEL, pool, block, settings, secret, policy=policy)
    made = [make_caches(shared, heads=HEADS // ranks) for _ in range(ranks)]
    kind = DeviceTensor if on_device else torch.Tensor
    declared = [{name: cache.as_subclass(kind) for name, cache in caches.items()} for caches, _ in made]
    pools = [
        cache_pool(declared[rank], replace(facts, tensor_rank=rank, tensor_ranks=ranks), mode.memory)
        for rank, (_, mode) in enumerate(made)
    ]
    common, first = (role, settings, secret, model), WorkerPlace(tensor_ranks=ranks)
    devices = [LazyDevice() for _ in made] if on_device and role is Role.PREFILL else []
    computed = [device.computed for device in devices] or [None] * ranks
    invitation: Future[tuple[str, bytes]] = Future()

    def follow(rank: int) -> RankSide:
        place = replace(first, tensor_rank=rank)
        return RankSide(*common, pools[rank], place, lambda _: invitation.result(WITHIN_S), computed[rank])

    def share(value: tuple[str, bytes] | None) -> tuple[str, bytes]:
        assert value is not None
        invitation.set_result(value)
        return value

    with ThreadPoolExecutor() as threads:
        others = [threads.submit(follow, rank) for rank in range(1, ranks)]
        side = WorkerSide(*common, pools[0], first, *lead(share, first), computed[0])
        sides = [side, *(other.result(WITHIN_S) for other in others)]
    for each in sides:
        stack.callback(each.close)
    if isinstance(table, PrefillTable):
        table.address = side.address
    engine = ModelEngine(table, pool, policy)
    engine.worker = TensorWorker(pool, sides, [caches for caches, _ in made])
    engine.worker.devices = devices
    return engine


def run_step(engine: ModelEngine, budget: int = 6) -> None:
    """One step. EngineCore's asserts hold in it."""
    engine.schedule(budget)
    engine.complete()


def held_by(engine: ModelEngine) -> dict[str, int]:
    """What the engine's table and worker hold; `peers` are sessions, `ended` what the protocol remembers."""
    worker = engine.worker
    assert isinstance(worker, TensorWorker)
    found = {**worker.side.sizes(), **engine.table.sizes()}
    return {key: n for key, n in found.items() if n and key not in ("peers", "ended", "deadlines")}


class Pair:
    """`prefill` and `decode`, and what each needs. Close it with its ExitStack."""

    def __init__(
        self,
        stack: ExitStack,
        *,
        policy: LoadFailurePolicy = LoadFailurePolicy.RECOMPUTE,
        decode_facts: CacheFacts = CPU_ATTN,
        shared: bool = False,
        secret: bytes = b"",
        decode_secret: bytes | None = None,
        models: tuple[str, str] = ("model/float32", "model/float32"),
        ranks: tuple[int, int] = (1, 1),
        on_device: tuple[bool, bool] = (False, False),
        **settings: Any,
    ) -> None:
        self.settings = ConnectorSettings(**{"transport": ["shm" if shared else "tcp"], **settings})
        self.stack = stack
        self.prefill = make_engine(
            stack,
            Role.PREFILL,
            self.settings,
            policy,
            shared=shared,
            secret=secret,
            model=models[0],
            ranks=ranks[0],
            on_device=on_device[0],
        )
        self.decode = make_engine(
            stack,
            Role.DECODE,
            self.settings,
            policy,
            shared=shared,
            facts=decode_facts,
            secret=secret if decode_secret is None else decode_secret,
            model=models[1],
            ranks=ranks[1],
            on_device=on_device[1],
        )
        self.running = [self.prefill, self.decode]

    def step(self) -> None:
        """One step of each engine, and vLLM's millisecond between steps without a forward."""
        for engine in self.running:
            run_step(engine)
        time.sleep(0.001)

    def until(self, condition: Callable[[], object], within_s: float = 30) -> None:
        """Step until `condition` holds."""
        deadline = time.monotonic() + within_s
        while not condition():
            assert time.monotonic() < deadline, (self.prefill.table.sizes(), self.decode.table.sizes())
            self.step()

    def sizes(self) -> dict[str, int]:
        """What both sides hold."""
        sides = {"prefill": self.prefill, "decode": self.decode}
        return {f"{name}.{key}": n for name, side in sides.items() for key, n in held_by(side).items()}


def expected(tokens: Sequence[int]) -> torch.Tensor:
    """What `kv_of` gives for a prompt that is computed."""
    caches, _ = make_caches()
    for position, token in enumerate(tokens):
        write(caches, token, position, position // BLOCK)
    return kv_of(caches, range(-(-len(tokens) // BLOCK)), len(tokens))
