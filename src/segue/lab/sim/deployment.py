"""A whole deployment in virtual time: registry, instances, frontends, clients, and a scenario's faults."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator

from segue.engine.request import RankHints
from segue.kv.errors import ConfigError
from segue.kv.ids import LeaderId, Role
from segue.kv.limits import Limits
from segue.kv.protocol.room_ranks import FAIL_ON_CONFLICT, DpRanks
from segue.kv.protocol.ticket import Ticket
from segue.kv.threads import ThreadPerCall
from segue.lab.sim.causes import Causes
from segue.lab.sim.clients import Asked, Wanted
from segue.lab.sim.fault_actions import Strikes
from segue.lab.sim.front import FrontNode
from segue.lab.sim.invariants import Checks
from segue.lab.sim.network import Network
from segue.lab.sim.scenario import Scenario
from segue.lab.sim.sim_addresses import Addresses
from segue.lab.sim.sim_leader import EOS
from segue.lab.sim.sim_node import KVNode, LeaderNode, NodeSpec
from segue.lab.sim.sim_registry import RegistryNode, SimRegistry
from segue.lab.sim.streams import Streams
from segue.lab.sim.timing import Timing
from segue.lab.sim.world import Process, World, new_leader
from segue.server.observe.metrics import Metrics

#: Turns of leaders between two looks at the tables of a node: one looks at all of them.
CHECK_EVERY = 8
BUDGET_S = 20.0


class Deployment:
    """Builds and runs one scenario. Raises `Violation` at the first invariant that does not hold."""

    def __init__(self, scenario: Scenario, check_every: int = CHECK_EVERY) -> None:
        self.scenario = scenario
        self.check_every = check_every
        self.world = World(scenario.seed)
        self.timing: Timing = scenario.timing
        self.network = Network(self.world, scenario.timing)
        self.streams = Streams(scenario.timing.latency_s)
        self.transports = scenario.transports
        #: behind each pool; pairs measure where they may choose
        self.scratch_bytes = 192 if len(self.transports) > 1 else 0
        self.eos = EOS if "endings" in scenario.features else frozenset[int]()
        self.secret = b"a secret of the simulator" if scenario.signed else None
        self.policy = scenario.policy
        self.counts: Counter[str] = Counter()
        #: faults that took place, by kind
        self.struck: Counter[str] = Counter()
        self.metrics = Metrics()
        self.asked: dict[str, Asked] = {}
        self.rooms: dict[int, Asked] = {}
        self.healed_at = 0.0
        self.calm = not scenario.features - {"client abort", "bad request", "skew", "leg delay"}
        self.causes = Causes(self)
        self.checks = Checks(self)
        self.by_leader: dict[LeaderId, Process] = {}
        self.nodes: dict[str, LeaderNode] = {}
        #: what each leader of an instance is in its next life, and where
        self.specs = {spec.name: spec for spec in scenario.nodes}
        self.addresses = Addresses(scenario.nodes, self.world.rng("places"))
        self.instance_lives: Counter[str] = Counter()
        self._supervisors = self.world.rng("supervisors")
        self.fronts: dict[str, FrontNode] = {}
        self._lives: Counter[str] = Counter()
        self.registry = SimRegistry(self)
        self.strikes = Strikes(self)

    # ---- life ----------------------------------------------------------------------------------

    def run(self) -> None:
        """The whole scenario: busy time with faults, then peace, then rest."""
        scenario, world = self.scenario, self.world
        self.registry.start()
        for instance in dict.fromkeys(spec.instance for spec in self.specs.values()):
            self._start_instance(instance)
        for index in range(scenario.fronts):
            self._start_front(index)
        for wanted in scenario.requests:
            world.at(wanted.at, None, self._ask, wanted)
        for fault in scenario.faults:
            world.at(fault.at, None, self.strikes.strike, fault)
        longest = max((f.at + f.seconds for f in scenario.faults), default=0.0)
        last = max((r.at for r in scenario.requests), default=0.0)
        for feature in scenario.features & {"session backlog", "full queues"}:
            self.causes.struck(feature)
        world.at(1.0, None, self._sweep)
        self._until(max(longest, last) + 0.5)
        self._peace()
        self._until(world.now + BUDGET_S + 2.0, quiet=True)
        rest_s = BUDGET_S * 1.3 + self.timing.silence_s + 5.0
        self._until(world.now + rest_s)
        if self._end_stuck():
            self._until(world.now + self.timing.silence_s + 5.0)
        if any(isinstance(node, KVNode) and node.exchange.sizes()["ended"] for node in self.leaders()):
            # Who hears late of the end of a hand-off remembers it for as long as a request may take.
            self._until(world.now + BUDGET_S * 1.3)
        self.checks.sweep()
        self.registry.sweep()
        self.checks.at_rest()

    def _end_stuck(self) -> bool:
        """Where a bug has cost the proof that memory is free, the pages stay in quarantine until the process
        ends, and can be seen there. Ends such processes; whether there was one."""
        stuck = [
            node
            for node in self.leaders()
            if isinstance(node, KVNode)
            and node.exchange.sizes()["quarantined"]
            and any(t in self.checks.buggy for t in node.exchange._machines)
        ]
        for node in stuck:
            self.counts["ended for its quarantine"] += 1
            self.kill(node)
        return bool(stuck)

    def close(self) -> None:
        """The run is over: end what still waits in the loops of its processes."""
        for process in (*self.nodes.values(), *self.fronts.values(), self.registry.node):
            if process is not None:
                self._end(process)
        # Of ranks whose leader has ended, who would have ended in time.
        for thread in list(self.world.threads):
            thread.kill()

    def _end(self, process: LeaderNode | FrontNode | RegistryNode) -> None:
        process.kill()
        process.loop.die()

    def _until(self, end: float, quiet: bool = False) -> None:
        world = self.world
        heap, step = world.heap, world.step
        while heap and heap[0][0] <= end:
            step()
            if (
                quiet
                and not world.events % 64
                and not any(not asked.outcome for asked in self.asked.values())
            ):
                return
        world.now = max(world.now, end) if not quiet else world.now

    def _sweep(self) -> None:
        self.checks.sweep()
        self.registry.sweep()
        self.world.after(1.0, None, self._sweep)

    def _peace(self) -> None:
        """Faults have stopped: everything that was down comes back."""
        self.world.note("-", "faults have ended")
        self.healed_at = self.world.now

    @property
    def front_limits(self) -> Limits:
        """The bounds of a frontend's sessions."""
        return Limits(
            connect_s=self.timing.connect_s,
            keepalive_s=self.timing.keepalive_s,
            peer_silence_s=self.timing.silence_s,
            max_session_backlog_bytes=self.scenario.backlog_bytes,
        )

    def limits(self, spec: NodeSpec) -> Limits:
        """The bounds of one instance."""
        return Limits(
            request_budget_s=BUDGET_S,
            max_transfers=4096,
            max_early_destinations=self.scenario.max_early,
            max_queue=self.scenario.max_queue,
            max_session_backlog_bytes=self.scenario.backlog_bytes,
            max_batch=spec.max_batch,
            keepalive_s=self.timing.keepalive_s,
            peer_silence_s=self.timing.silence_s,
            drain_s=5.0,
        )

    def leaders(self) -> Iterator[LeaderNode]:
        """Every live leader of an instance."""
        return (node for node in self.nodes.values() if node.alive)

    # ---- instances and frontends ---------------------------------------------------------------

    def _dp_of(self, leader: LeaderId) -> DpRanks:
        node = self.by_leader[leader]
        assert isinstance(node, LeaderNode)
        return node.spec.dp

    def is_open(self, ticket: Ticket) -> bool:
        """Whether the DP rank of prefill is left open: a third of what goes to an instance of several."""
        return self._dp_of(ticket.prefill).size > 1 and ticket.room % 3 == 0

    def expect_conflict(self, ticket: Ticket, hints: RankHints | None) -> None:
        """Of an open ticket, with these hints of its client: decode looks for it on the rank that they or its
        room name, unless it is to ask. Of another one (None) the instance's own rule may name another."""
        dp, room, true = self._dp_of(ticket.prefill), ticket.room, ticket.prefill
        if hints is not None:
            self.causes.open_rooms.add(room)
        rank = dp.follows(room)
        if hints is not None and hints.disagg_prefill_dp_rank is not None:
            rank = hints.disagg_prefill_dp_rank
        elif hints is not None and (dp.force_query or hints.force_query_prefill_dp_rank):
            self.counts["forced queries"] += 1
            return
        fails = dp.on_conflict == FAIL_ON_CONFLICT
        if rank not in (None, true.dp_rank) and (hints is not None or fails):
            self.causes.misplaced(room, LeaderId(true.incarnation, rank), fails=fails)

    def identity(self, spec: NodeSpec, rng: random.Random) -> LeaderId:
        """Who a leader is in this life of its instance: of the same incarnation as its other leaders."""
        if spec.dp_size == 1:
            return new_leader(rng)
        instance = spec.instance
        rng = self.world.rng(f"incarnation {self.instance_lives[instance]} of {instance}")
        return LeaderId(new_leader(rng).incarnation, spec.dp_rank)

    def leaders_of(self, node: LeaderNode) -> list[LeaderNode]:
        """`node` and the other leaders of its incarnation, alive or not; those that have not begun are
        missing."""
        found = (other for other in self.nodes.values() if other.spec.instance == node.spec.instance)
        return [other for other in found if other.instance_life == node.instance_life]

    def _start_instance(self, instance: str) -> None:
        """All leaders of an instance, in a new incarnation."""
        self.instance_lives[instance] += 1
        for spec in list(self.specs.values()):
            if spec.instance == instance:
                self.addresses.settle(spec.name)
                self._start_node(spec.name, self.instance_lives[instance])

    def _start_node(self, name: str, instance_life: int) -> None:
        spec, life = self.specs[name], self._lives[name]
        if self.instance_lives[spec.instance] != instance_life:
            return
        self._lives[name] += 1
        make = LeaderNode if spec.role is Role.UNIFIED else KVNode
        try:
            node = make(self, spec, life)
        except ConfigError as error:
            # Its process ends with this sentence, and its supervisor tries again.
            if "in use by another process" not in str(error):
                raise
            self.counts["addresses taken"] += 1
            self.world.after(0.1, None, self._start_node, name, instance_life)
            return
        self.nodes[name] = node
        self.by_leader[node.me] = node
        self.causes.struck("started", node)
        self.world.note(node.name, f"starts as {spec.role} {node.me} at {node.host}:{node.port}")
        self.registry.join(node)

    def _start_front(self, index: int) -> None:
        life = self._lives[f"front{index}"]
        self._lives[f"front{index}"] += 1
        front = FrontNode(self, index, life)
        self.fronts[f"front{index}"] = front
        self.by_leader[front.me] = front
        self.registry.join(front)

    def process(self, name: str) -> LeaderNode | FrontNode | None:
        """An instance or a frontend by its name."""
        return self.nodes.get(name) or self.fronts.get(name)

    def kill(self, process: LeaderNode | FrontNode, *, silently: bool = False) -> None:
        """SIGKILL, and what the kernel tells others, unless the whole machine is gone `silently`."""
        if not process.alive:
            return
        self.world.note(process.name, "is killed")
        self.causes.struck("killed", process)
        if isinstance(process, LeaderNode) and any(
            n.alive for n in self.leaders_of(process) if n is not process
        ):
            self.counts["leaders that ended beside others of their incarnation"] += 1
        process.kill()
        self.network.died(process, silently=silently)
        process.loop.die()
        if isinstance(process, FrontNode):
            process.died()
        if not isinstance(process, KVNode):
            return
        for transport in process.transports.values():
            transport.died()
        for key in [k for k in self.checks.reads if k[0] == process.me]:
            del self.checks.reads[key]

    def leave(self, node: LeaderNode) -> None:
        """A drained instance goes, as `Instance.close` does."""

        async def leaving() -> None:
            await self.registry.members[node].leave()
            await node.loop.run_in_executor(ThreadPerCall("close", node.spawn), node.close)
            self.world.after(0.0, None, self.kill, node)
            self.world.after(0.2, None, self.restart, node)

        node.loop.enter(node.loop.create_task, leaving())

    def restart(self, old: LeaderNode | FrontNode) -> None:
        """What has ended comes back, an instance as a whole: what is left of it ends before."""
        if isinstance(old, LeaderNode):
            if self.instance_lives[old.spec.instance] != old.instance_life:
                return
            if any(node.alive for node in self.leaders_of(old)):
                self.world.after(self._supervisors.choice((0.0, 0.5, 3.0)), None, self._end_the_rest, old)
            else:
                self._start_instance(old.spec.instance)
        elif self.fronts[f"front{old.index}"] is old:
            self._start_front(old.index)

    def _end_the_rest(self, old: LeaderNode) -> None:
        kills = self._supervisors.random() < 0.5
        for node in self.leaders_of(old):
            if kills and node.alive:
                self.kill(node)
                self.world.after(0.1, None, self.restart, node)
            elif node.alive:
                node.drain()

    # ---- requests and faults -------------------------------------------------------------------

    def _ask(self, wanted: Wanted) -> None:
        front = self.fronts[f"front{wanted.front}"]
        if front.alive:
            front.after(0.0, front.request, wanted)

    def break_session(self, a: Process, b: Process) -> None:
        """The connections between two processes end."""
        self.causes.struck("broken", a, b)
        for connection in self.network.between(a, b):
            connection.snap()
