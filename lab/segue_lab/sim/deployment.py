"""A whole deployment in virtual time: registry, instances, frontends, clients, and a scenario's faults."""

from __future__ import annotations

from collections.abc import Iterator

from segue_lab.sim.causes import Causes
from segue_lab.sim.clients import Wanted
from segue_lab.sim.fault_actions import FaultActions
from segue_lab.sim.front import FrontNode
from segue_lab.sim.invariants import Checks
from segue_lab.sim.room_engine import RoomStories
from segue_lab.sim.scenario import Scenario
from segue_lab.sim.sim_leader import LeaderNode
from segue_lab.sim.sim_node import KVNode
from segue_lab.sim.sim_registry import RegistryNode, SimRegistry
from segue_lab.sim.sim_state import BUDGET_S, SimState
from segue_lab.sim.sim_supervisor import SimSupervisor

#: Turns of leaders between two looks at the tables of a node: one looks at all of them.
CHECK_EVERY = 8


class Deployment:
    """Builds and runs one scenario. Raises `Violation` at the first invariant that does not hold."""

    def __init__(self, scenario: Scenario, check_every: int = CHECK_EVERY, *, records: bool = True) -> None:
        self.scenario = scenario
        self.state = state = SimState(scenario, records=records)
        self.world, self.network, self.timing = state.world, state.network, state.timing
        self.counts, self.injected = state.counts, state.injected
        self.asked, self.rooms = state.asked, state.rooms
        self.causes = Causes(state)
        self.checks = Checks(state, self.causes, check_every)
        self.registry = SimRegistry(state)
        self.supervisor = SimSupervisor(state, self.causes, self.checks, self.registry)
        self.nodes, self.fronts = self.supervisor.nodes, self.supervisor.fronts
        self.fault_actions = FaultActions(state, self.causes, self.supervisor, self.registry)

    # ---- time ----------------------------------------------------------------------------------

    def run(self) -> None:
        """The whole scenario: busy time with faults, then peace, then rest."""
        scenario, world = self.scenario, self.world
        self.registry.start()
        for instance in dict.fromkeys(spec.instance for spec in self.state.specs.values()):
            self.supervisor.start_instance(instance)
        for index in range(scenario.fronts):
            self.supervisor.start_front(index)
        for wanted in scenario.requests:
            world.at(wanted.at, None, self._ask, wanted)
        RoomStories(self.state, self.causes).start()
        for fault in scenario.faults:
            world.at(fault.at, None, self.fault_actions.inject, fault)
        longest = max((f.at + f.seconds for f in scenario.faults), default=0.0)
        asked = [r.at for r in scenario.requests] + [r.at for r in scenario.rooms]
        last = max(asked, default=0.0)
        for feature in scenario.features & {"session backlog", "full queues"}:
            self.causes.record(feature)
        world.at(1.0, None, self._sweep)
        self._until(max(longest, last) + 0.5)
        self._peace()
        self._until_answered(world.now + BUDGET_S + 2.0)
        self._rest(world.now + BUDGET_S * 1.3 + self.timing.silence_s + 5.0)
        if self._end_stuck():
            self._until(world.now + self.timing.silence_s + 5.0)
        if any(isinstance(node, KVNode) and node.exchange.sizes()["ended"] for node in self.leaders()):
            # A leader that hears late of the end of a hand-off remembers it for as long as a request may
            # take.
            self._until(world.now + BUDGET_S * 1.3)
        self.checks.sweep()
        self.registry.sweep()
        self.checks.at_rest()

    def _end_stuck(self) -> bool:
        """End processes whose pages stay in quarantine because a bug has lost the proof that memory is free;
        whether there was one. The pages are visible until the process ends."""
        stuck = [
            node
            for node in self.leaders()
            if isinstance(node, KVNode)
            and node.exchange.sizes()["quarantined"]
            and any(t in self.state.buggy for t in node.exchange.machines)
        ]
        for node in stuck:
            self.counts["ended for its quarantine"] += 1
            self.supervisor.kill(node)
        return bool(stuck)

    def close(self) -> None:
        """The run is over: end what still waits in the loops of its processes."""
        for process in (*self.nodes.values(), *self.fronts.values(), self.registry.node):
            if process is not None:
                self._end(process)
        # Threads of ranks whose leader has ended would have ended in time.
        for thread in list(self.world.threads):
            thread.kill()

    def _end(self, process: LeaderNode | FrontNode | RegistryNode) -> None:
        process.kill()
        process.loop.die()

    def _until(self, end: float) -> None:
        self.world.run(end)
        self.world.now = max(self.world.now, end)

    def _until_answered(self, end: float) -> None:
        while self.world.run(end, 64):
            if all(asked.outcome for asked in self.asked.values()):
                return

    def _rest(self, end: float) -> None:
        """Run until `end`, or until nothing is left of any request: then nothing changes any more but what
        the registry's watchers know."""
        while self.world.now < end:
            self._until(min(end, self.world.now + 1.0))
            if not self.scenario.long_rest and not self.checks.something_left():
                return

    def _sweep(self) -> None:
        self.checks.sweep()
        self.registry.sweep()
        self.world.after(1.0, None, self._sweep)

    def _peace(self) -> None:
        """Faults have stopped: everything that was down comes back."""
        self.world.note("-", "faults have ended")
        self.state.healed_at = self.world.now

    def leaders(self) -> Iterator[LeaderNode]:
        """Every live leader of an instance."""
        return (node for node in self.nodes.values() if node.alive)

    def _ask(self, wanted: Wanted) -> None:
        front = self.fronts[f"front{wanted.front}"]
        if front.alive:
            front.after(0.0, front.request, wanted)
