"""Processes of a deployment begin, end and come back, an instance with all of its leaders."""

from __future__ import annotations

from collections import Counter

from segue.kv.errors import ConfigError
from segue.kv.ids import Role
from segue.kv.threads import ThreadPerCall
from segue_lab.sim.causes import Causes
from segue_lab.sim.front import FrontNode
from segue_lab.sim.invariants import Checks
from segue_lab.sim.node_views import NodeView, leaders_of
from segue_lab.sim.sim_leader import LeaderNode, NodeParts
from segue_lab.sim.sim_node import KVNode
from segue_lab.sim.sim_registry import SimRegistry
from segue_lab.sim.sim_state import SimState


class SimSupervisor:
    """The supervisors of all instances and frontends."""

    def __init__(self, state: SimState, causes: Causes, checks: Checks, registry: SimRegistry) -> None:
        self._state = state
        self._world = state.world
        self._causes = causes
        self._checks = checks
        self._registry = registry
        self._parts = NodeParts(state, causes, checks, registry.say_draining, self._leave)
        self._rng = state.world.rng("supervisors")
        self._restarts: Counter[str] = Counter()
        #: restarts of each leader and each frontend
        self.nodes: dict[str, LeaderNode] = {}
        self.fronts: dict[str, FrontNode] = {}

    def process(self, name: str) -> LeaderNode | FrontNode | None:
        """An instance or a frontend by its name."""
        return self.nodes.get(name) or self.fronts.get(name)

    def leaders_of(self, node: LeaderNode) -> list[LeaderNode]:
        """`node` and the other leaders of its incarnation, alive or not."""
        return [other for other in leaders_of(node) if isinstance(other, LeaderNode)]

    def start_instance(self, instance: str) -> None:
        """All leaders of an instance, in a new incarnation."""
        state = self._state
        state.instance_restarts[instance] += 1
        for spec in list(state.specs.values()):
            if spec.instance == instance:
                state.addresses.settle(spec.name)
                self._start_node(spec.name, state.instance_restarts[instance])

    def _start_node(self, name: str, instance_restart: int) -> None:
        state = self._state
        spec, restart = state.specs[name], self._restarts[name]
        if state.instance_restarts[spec.instance] != instance_restart:
            return
        self._restarts[name] += 1
        make = LeaderNode if spec.role is Role.UNIFIED else KVNode
        try:
            node = make(self._parts, spec, restart)
        except ConfigError as error:
            # Its process ends with this sentence, and its supervisor tries again.
            if "in use by another process" not in str(error):
                raise
            state.counts["addresses taken"] += 1
            self._world.after(0.1, None, self._start_node, name, instance_restart)
            return
        self.nodes[name] = state.nodes[name] = node
        state.by_leader[node.me] = node
        self._causes.record("started", node)
        self._world.note(node.name, f"starts as {spec.role} {node.me} at {node.host}:{node.port}")
        self._registry.join(node)

    def start_front(self, index: int) -> None:
        """A new incarnation of a frontend."""
        state, name = self._state, f"front{index}"
        restart = self._restarts[name]
        self._restarts[name] += 1
        front = FrontNode(state, self._causes, self._checks.answers, index, restart)
        self.fronts[name] = state.fronts[name] = front
        state.by_leader[front.me] = front
        self._registry.join(front)

    def kill(self, process: LeaderNode | FrontNode, *, silently: bool = False) -> None:
        """SIGKILL, and what the kernel tells others, unless the whole machine is gone `silently`."""
        if not process.alive:
            return
        self._world.note(process.name, "is killed")
        self._causes.record("killed", process)
        if isinstance(process, LeaderNode) and any(n.alive for n in leaders_of(process) if n is not process):
            self._state.counts["leaders that ended beside others of their incarnation"] += 1
        process.kill()
        self._state.network.died(process, silently=silently)
        process.loop.die()
        if isinstance(process, FrontNode):
            process.died()
        if not isinstance(process, KVNode):
            return
        for transport in process.transports.values():
            transport.died()
        for key in [k for k in self._checks.reads if k[0] == process.me]:
            del self._checks.reads[key]

    def _leave(self, node: NodeView) -> None:
        """A drained instance goes, as `Instance.close` does."""
        assert isinstance(node, LeaderNode)

        async def leaving() -> None:
            await self._registry.members[node].leave()
            await node.loop.run_in_executor(ThreadPerCall("close", node.spawn), node.close)
            self._world.after(0.0, None, self.kill, node)
            self._world.after(0.2, None, self.restart, node)

        node.loop.enter(node.loop.create_task, leaving())

    def restart(self, old: LeaderNode | FrontNode) -> None:
        """Restart an ended process, an instance as a whole: the rest of it ends before."""
        if isinstance(old, LeaderNode):
            if self._state.instance_restarts[old.spec.instance] != old.instance_restart:
                return
            if any(node.alive for node in leaders_of(old)):
                self._world.after(self._rng.choice((0.0, 0.5, 3.0)), None, self._end_the_rest, old)
            else:
                self.start_instance(old.spec.instance)
        elif self.fronts[f"front{old.index}"] is old:
            self.start_front(old.index)

    def _end_the_rest(self, old: LeaderNode) -> None:
        kills = self._rng.random() < 0.5
        for node in self.leaders_of(old):
            if kills and node.alive:
                self.kill(node)
                self._world.after(0.1, None, self.restart, node)
            elif node.alive:
                node.drain()
