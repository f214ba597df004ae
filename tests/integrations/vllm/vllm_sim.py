"""vLLM engines in the simulator: production's tables and worker sides, over production's managers.

Each prefill and decode node of a scenario has an EngineCore of the model (`vllm_model`) beside its role,
which has nothing to do. Its blocks are pages of the node's pool, and its worker side uses the node's
`KVManager`: every fault of the simulator meets it, and every rule of the simulator holds for it. A killed
node loses its engine. `GET /query` is a model: what it answers is known.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from vllm_model import ModelEngine, ModelPool, ModelWorker, Step

from segue.engine.request import SamplingParams
from segue.integrations.vllm.vllm_claim import EngineRequest, ModelFacts
from segue.integrations.vllm.vllm_decode_table import DecodeTable
from segue.integrations.vllm.vllm_memory import CachePool
from segue.integrations.vllm.vllm_orders import (
    BlocksReleased,
    DeclineOrder,
    ExpectOrder,
    Order,
    ReceiveOrder,
    Report,
    SendOrder,
    decode_orders,
)
from segue.integrations.vllm.vllm_params import PeerAddress, engine_id, room_of
from segue.integrations.vllm.vllm_prefill_table import PrefillTable
from segue.integrations.vllm.vllm_settings import ConnectorSettings, LoadFailurePolicy
from segue.integrations.vllm.vllm_table import SchedulerTable
from segue.integrations.vllm.vllm_worker import WorkerSide
from segue.kv import ErrorCode, LeaderId, Phase, Quarantined, Release, Role, SegueError, Span
from segue.kv.protocol.events import Change
from segue.kv.transport.memory.pool_memory import Memory, host_region
from segue.lab.sim.causes import Causes
from segue.lab.sim.clients import Asked, Wanted
from segue.lab.sim.deployment import Deployment
from segue.lab.sim.node_spec import VOCAB
from segue.lab.sim.room_engine import CONTESTED, RoomEngine
from segue.lab.sim.scenario import Scenario, make_scenario
from segue.lab.sim.sim_engine import WrongKV
from segue.lab.sim.sim_node import KVNode
from segue.lab.sim.sim_state import SimState
from segue.lab.sim.vocabulary import SPOILED_METADATA
from segue.lab.sim.world import Violation

ROOM_S = 4.0
#: An engine without a forward steps this often. vLLM does each millisecond.
IDLE_S = 0.01
#: Codes that the engines' own requests may cause: clients that leave, prompts without blocks or without peer.
OWN_CODES = frozenset(
    {
        ErrorCode.ABORTED_BY_CLIENT,
        ErrorCode.OUT_OF_CAPACITY,
        ErrorCode.DEADLINE_EXCEEDED,
        ErrorCode.BOOTSTRAP_TIMEOUT,
        ErrorCode.TRANSFER_FAILED,
    }
)


@dataclass(slots=True)
class BlocksHalf:
    """A half as the checks of the simulator ask for it."""

    pages: list[int] = field(default_factory=list)
    published: list[int] = field(default_factory=list)
    quarantined: bool = False


class NodeManager:
    """The `KVManager` of a node, as a worker side has one of its own."""

    def __init__(self, node: Any, sim: VllmEngines) -> None:
        self._node = node
        self._sim = sim

    def __call__(self, config: Any, memory: Any, on_change: Any, *, on_rank_lost: Any) -> Any:
        self._sim.on_change, self._sim.on_lost = on_change, on_rank_lost
        return self

    def start(self) -> tuple[str, int]:
        return self._node.host, self._node.port

    def __getattr__(self, name: str) -> Any:
        return getattr(self._node.manager, name)


class SimWorker(ModelWorker):
    """Computes prompts into the node's memory, and hands over with the node's manager."""

    def __init__(self, pool: ModelPool, sim: VllmEngines, side: WorkerSide) -> None:
        super().__init__(pool)
        self.sim = sim
        self.side = side

    def begin(self, step: Step) -> None:
        """vLLM's calls before the forward."""
        orders = [self.found(order) for order in decode_orders(step.orders)]
        for order in orders:
            self.track(order)
        self.side.begin_step(orders)

    def found(self, order: Order) -> Order:
        """The order with what `GET /query` answers."""
        if isinstance(order, ReceiveOrder | DeclineOrder) and order.peer.query:
            peer = type(order.peer)(
                order.peer.incarnation, order.peer.dp_rank, order.peer.host, order.peer.port, False
            )
            return replace_order(order, peer)
        return order

    def track(self, order: Order) -> None:
        halves = self.sim.halves
        match order:
            case ExpectOrder() | ReceiveOrder():
                super().carry_out(order)
                half = halves.setdefault(order.room, BlocksHalf())  # type: ignore[arg-type]
                if isinstance(order, ReceiveOrder) and not half.pages:
                    half.pages = half.published = list(order.blocks)
                    self.cached(order)
            case SendOrder():
                handoff = self.handoffs.get(order.handoff)
                if handoff is not None:
                    self.lend(order.handoff, order.blocks)
                    halves[handoff.order.room].pages = list(order.blocks)
            case _:
                pass

    def cached(self, order: ReceiveOrder) -> None:
        """The prefix that decode has already."""
        request = self.sim.engine.requests.get(order.request_id)
        if request is not None and order.prefix_tokens:
            self.sim.node.engine.put(request.spec.tokens, Span(0, order.prefix_tokens), request.blocks)

    def run(self, step: Step) -> None:
        engine = self.sim.node.engine
        for request, start, end, life, blocks in step.chunks:
            if request.life != life:
                continue
            if start:
                engine.verify(request.spec.tokens[:start], blocks)
            engine.put(request.spec.tokens, Span(start, end), blocks)
        self.side.end_forward()

    def check_content(self, handoff: Any) -> None:
        """The simulator compares the bytes themselves."""

    def take(self) -> tuple[list[Report], set[str], set[str]]:
        results = self.side.take_results()
        for report in results.reports:
            if isinstance(report, BlocksReleased):
                del self.handoffs[report.handoff]
        return results.reports, results.finished_recving, results.failed_recving


def replace_order(order: Any, peer: Any) -> Any:
    fields = {name: getattr(order, name) for name in order.__struct_fields__}
    return type(order)(**{**fields, "peer": peer})


class VllmEngines(RoomEngine):
    """The EngineCore of one incarnation of a node; made by the first request, gone when it is at rest."""

    engine: ModelEngine

    def __init__(self, node: Any) -> None:
        super().__init__(node)
        self.node = node
        self.on_change: Callable[[Change], None] = lambda change: None
        self.on_lost: Callable[[SegueError], None] = lambda error: None
        self.borrowed: list[int] = []
        self.waiting: dict[str, Callable[[Any], None]] = {}
        self.dead = self.stepping = False
        self.make_room: Callable[[], int] = lambda: 1

    # ---- as the simulator asks ------------------------------------------------------------------

    @property
    def pages(self) -> list[int]:
        """All pages that it has; one in quarantine twice."""
        halves: Any = self.halves.values()
        return self.borrowed + [page for half in halves if half.quarantined for page in half.published]

    def heard(self, change: Change) -> None:
        """A change of a half, as the manager's I/O thread calls the worker side."""
        half: Any = self.halves[change.key]
        match change:
            case Quarantined() if not half.quarantined:
                half.quarantined = True
                self.node.pool.share(half.published)
                self.node.pool.quarantine(half.published)
            case Release():
                if half.quarantined:
                    self.node.pool.unquarantine(half.published)
                del self.halves[change.key]
            case Phase() if change.error is None and change.phase.terminal:
                self.node.state.counts["vllm: hand-offs that succeeded"] += self.node.spec.role is Role.DECODE
            case _:
                pass
        self.on_change(change)

    # ---- the engine -----------------------------------------------------------------------------

    def begin(self, rng: random.Random) -> bool:
        """Have an engine; False if the node has no memory for one."""
        if self.borrowed:
            return not self.dead
        node = self.node
        count = min(rng.choice((12, 40, 80)), node.pool.free // 2)
        if self.dead or count < 4:
            return False
        self.borrowed = node.pool.allocate(count)
        pool = ModelPool(node.pool.total, node.pool.page_tokens)
        pool.free = deque(pool.blocks[page] for page in self.borrowed)
        settings = ConnectorSettings(transport=["tcp"], room_s=ROOM_S, retain_s=rng.choice((0.0, 0.1, 1.0)))
        model, policy = ModelFacts(node.spec.model, "lineage"), rng.choice(list(LoadFailurePolicy))
        table: SchedulerTable
        if node.spec.role is Role.PREFILL:
            table = PrefillTable(model, pool, pool.block, settings, make_room=lambda: self.make_room())
            table.address = PeerAddress(node.me, node.host, node.port)
        else:
            table = DecodeTable(model, pool, pool.block, settings, policy=policy)
        self.engine = ModelEngine(table, pool, policy, rng.choice((1, 1, 2)))
        self.engine.fails_first = rng.random() < 0.5
        memory = Memory([host_region(bytearray(64))])
        side = WorkerSide(
            node.spec.role,
            settings,
            b"",
            node.spec.model,
            CachePool(node.engine.spec, memory, 1),
            clock=node.clock,
            make_manager=NodeManager(node, self),
        )
        self.engine.worker = self.worker = SimWorker(pool, self, side)
        self.wake()
        return True

    def add(
        self, spec: EngineRequest, prefix: int = 0, answered: Callable[[Any], None] | None = None
    ) -> None:
        """A request; `answered` is called with its `kv_transfer_params` when it has ended."""
        self.engine.add(spec, prefix)
        if answered is not None:
            self.waiting[spec.request_id] = answered
        self.wake()

    def abort(self, name: str) -> None:
        """Its client has left."""
        if self.borrowed and not self.dead and name in self.engine.requests:
            self.node.state.counts["vllm: clients that left"] += 1
            self.engine.abort(name)
            self.wake()

    def wake(self) -> None:
        """Step, if it does not."""
        if not self.stepping:
            self.stepping = True
            self.node.after(0.0, self.step)

    def step(self) -> None:
        """Schedule; the forward ends later."""
        node, engine = self.node, self.engine
        if node.lost_rank:
            self.die()
            return
        while len(engine.steps) < engine.depth and (engine.requests or engine.table.has_work()):
            engine.schedule(node.rng.choice((4, 8, 32)))
        self.stepping = bool(engine.steps)
        if not self.stepping:
            self.rest()
            return
        try:
            self.worker.begin(engine.steps[0])
        except SegueError:
            self.die()
            return
        computed = sum(end - start for _, start, end, _, _ in engine.steps[0].chunks)
        forward_s = (
            IDLE_S if not computed else node.world_timing.step_s + computed * node.world_timing.token_s
        )
        node.after(forward_s * (0.5 + node.rng.random()), self.end_step)

    def end_step(self) -> None:
        """The forward has ended."""
        engine, name = self.engine, self.node.name
        try:
            engine.complete()
            engine.check()
        except AssertionError as error:
            self.node.world.fail(Violation("vllm", f"EngineCore of {name} dies: {error!r}"))
            raise
        except WrongKV as error:
            self.node.world.fail(Violation("5", f"{name}: {error}"))
            raise
        counts = self.node.state.counts
        counts["vllm: steps"] += 1
        for request in [request for request in self.waiting if request in engine.answers]:
            self.waiting.pop(request)(engine.answers[request])
        self.node.after(0.0, self.step)

    def die(self) -> None:
        """Its worker has raised: vLLM fails its health check, and its supervisor ends the process."""
        self.node.state.counts["vllm: engines that ended with their node"] += 1
        self.dead, self.stepping = True, False
        self.waiting.clear()

    def rest(self) -> None:
        """Nothing is left: it has given everything back, and its pages go to the node."""
        engine, node = self.engine, self.node
        held = {key: count for key, count in engine.table.sizes().items() if count}
        held |= {f"worker {k}": v for k, v in self.own_sizes().items() if v}
        if held or self.halves or len(engine.pool.free) != len(self.borrowed):
            free = f"{len(engine.pool.free)} of {len(self.borrowed)} blocks free"
            raise Violation("vllm", f"{node.name} at rest holds {held}, {len(self.halves)} halves, {free}")
        counts = node.state.counts
        counts["vllm: engines at rest"] += 1
        counts["vllm: loads"] += len(engine.loaded)
        counts["vllm: preemptions"] += engine.preemptions
        for end in engine.ends.values():
            counts[f"vllm: ended {end.value}"] += 1
        for code, times in engine.table.take_figures().outcomes.items():
            counts[f"vllm: {node.spec.role.value} {code}"] += times
        node.pool.release(self.borrowed)
        self.borrowed = []

    def own_sizes(self) -> dict[str, int]:
        """The worker side's tables, without those of its manager."""
        sizes = self.worker.side.sizes()
        return {name: sizes[name] for name in ("halves", "keys")}


class VllmStories:
    """Requests to the engines: pairs in both flows, clients that leave, halves that never come."""

    def __init__(self, state: SimState, causes: Causes) -> None:
        self._state = state
        self._causes = causes
        self._rng = state.world.rng("vllm")
        self._codes = CONTESTED if state.scenario.features else OWN_CODES
        self._count = 0

    def start(self) -> None:
        """Have all requests come at their times."""
        scenario, rng = self._state.scenario, self._rng
        for _ in range(rng.choice((10, 20, 40))):
            self._state.world.at(rng.uniform(0.01, scenario.busy_s + 0.3), None, self._ask)

    def _there(self, role: Role) -> list[Any]:
        nodes: list[Any] = [
            n for n in self._state.nodes.values() if isinstance(getattr(n, "rooms", None), VllmEngines)
        ]
        return [
            n
            for n in nodes
            if n.alive and n.spec.role is role and not (n.draining or n.steered or n.lost_rank or n.paused)
        ]

    def _ask(self) -> None:
        rng = self._rng
        prefills, decodes = self._there(Role.PREFILL), self._there(Role.DECODE)
        if not (prefills and decodes):
            return
        prefill, decode = rng.choice(prefills), rng.choice(decodes)
        if not prefill.rooms.begin(rng):
            return
        self._count += 1
        name = f"v{self._count}"
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 24))]
        self._state.counts["vllm: requests"] += 1
        if rng.random() < 0.5:
            self._sequential(name, prompt, prefill, decode)
        else:
            self._concurrent(name, prompt, prefill, decode)

    def _spec(self, name: str, prompt: list[int], params: Any) -> EngineRequest:
        return EngineRequest(request_id=name, tokens=prompt, params=params)

    def _placed(self, room: int, *leaders: LeaderId) -> None:
        now = self._state.world.now
        wanted = Wanted(f"v{room:x}", now, [1], SamplingParams(max_tokens=1), ROOM_S)
        self._causes.placed(room, Asked(wanted, now + ROOM_S), set(leaders))
        self._causes.of_rooms.setdefault(room, set(self._codes))

    def _sequential(self, name: str, prompt: list[int], prefill: Any, decode: Any) -> None:
        rng = self._rng
        params = {"do_remote_decode": True, "do_remote_prefill": False}

        def make_room() -> int:
            room = rng.getrandbits(63) or 1
            self._placed(room, prefill.me)
            return room

        def answered(answer: Any) -> None:
            if answer is None or rng.random() < 0.1:
                return  # nobody comes: the room ends by its time, or is evicted
            decodes = 2 if rng.random() < 0.15 else 1
            if decodes > 1:
                self._causes.of_rooms[int(answer["segue"]["room"])] |= CONTESTED
            for again in range(decodes):
                delay_s = rng.choice((0.0, 0.002, 0.05, 1.0)) + again * rng.choice((0.0, 0.01, 0.5))
                self._state.world.after(
                    delay_s, None, self._decodes, f"{name}.{again}", prompt, decode.spec.name, answer
                )

        prefill.rooms.make_room = make_room
        self._add(prefill, name, prompt, params, answered)

    def _concurrent(self, name: str, prompt: list[int], prefill: Any, decode: Any) -> None:
        rng = self._rng
        transfer = f"{name} of {self._state.scenario.seed}"
        self._placed(room_of(transfer), prefill.me)
        to_prefill = {"do_remote_decode": True, "transfer_id": transfer}
        to_decode = {
            "do_remote_prefill": True,
            "transfer_id": transfer,
            "remote_bootstrap_addr": f"http://{prefill.host}:{prefill.port}",
            "remote_engine_id": engine_id(prefill.me),
        }
        legs = [(0.0, 0.0), (0.0, 0.05), (0.05, 0.0), (0.0, 1.0), (1.0, 0.0)]
        first, second = rng.choice(legs)
        if rng.random() < 0.95:
            self._state.world.after(first, None, self._prefills, name, prompt, prefill.spec.name, to_prefill)
        if rng.random() < 0.95:
            self._state.world.after(
                second, None, self._decodes, f"{name}.d", prompt, decode.spec.name, to_decode
            )

    def _prefills(self, name: str, prompt: list[int], node_name: str, params: Any) -> None:
        node = next((n for n in self._there(Role.PREFILL) if n.spec.name == node_name), None)
        if node is not None and node.rooms.begin(self._rng):
            self._placed(room_of(params["transfer_id"]), node.me)
            self._add(node, name, prompt, params)

    def _decodes(self, name: str, prompt: list[int], node_name: str, params: dict[str, Any]) -> None:
        rng = self._rng
        node = next((n for n in self._there(Role.DECODE) if n.spec.name == node_name), None)
        if node is None or not node.rooms.begin(rng):
            return
        found = params.get("segue")
        room = int(found["room"]) if found else room_of(params["transfer_id"])
        self._placed(room, node.me)
        if rng.random() < 0.03:  # another prompt under this room
            prompt = [token + 1 for token in prompt]
            self._causes.of_rooms[room] |= CONTESTED
        size = node.pool.page_tokens
        prefix = rng.choice((0, 0, 1, 2)) * size
        self._add(node, name, prompt, params, prefix=prefix if prefix < len(prompt) else 0)

    def _add(
        self, node: Any, name: str, prompt: list[int], params: Any, answered: Any = None, prefix: int = 0
    ) -> None:
        rng = self._rng
        if -(-len(prompt) // node.pool.page_tokens) > len(node.rooms.borrowed):
            return  # vLLM refuses what can never fit
        if name in node.rooms.engine.requests:
            return
        node.rooms.add(self._spec(name, prompt, params), prefix, answered)
        if rng.random() < 0.2:
            node.after(rng.choice((0.0, 0.001, 0.01, 0.1, 1.0)), node.rooms.abort, name)


class VllmDeployment(Deployment):
    """A deployment whose requests are those of vLLM engines."""

    make_rooms = VllmEngines
    stories = VllmStories  # type: ignore[assignment]

    def _rest(self, end: float) -> None:
        # A prompt of a small pool may wait for long, and goes to decode up to 1.5 s after its answer.
        quiet = 0
        while quiet < 4 and self.world.now < end + 120.0:
            super()._rest(max(end, self.world.now + 1.0))
            quiet = 0 if any(self._borrowed()) else quiet + 1
            self._until(self.world.now + 0.5)

    def _borrowed(self) -> list[int]:
        return [len(node.rooms.pages) for node in self.leaders() if isinstance(node, KVNode)]


def vllm_scenario(seed: int) -> Scenario:
    """The simulator's scenario of `seed` with its faults, without requests and rooms of its own. Engines of
    vLLM send no state beside the KV, and nothing in the metadata that could be spoiled."""
    scenario = make_scenario(seed)
    spoiled = ("first token", "content")
    faults = [
        fault
        for fault in scenario.faults
        if fault.kind != "metadata" or SPOILED_METADATA[fault.amount % len(SPOILED_METADATA)] not in spoiled
    ]
    return replace(scenario, requests=[], rooms=[], state=False, faults=faults)
