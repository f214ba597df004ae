"""A whole deployment in virtual time: registry, instances, frontends, clients, and a scenario's faults."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from segue.conn.threads import ThreadPerCall
from segue.core.limits import Limits
from segue.core.types import LeaderId, Role
from segue.observe.metrics import Metrics
from segue.sim.addresses import Addresses
from segue.sim.causes import CODES, Causes
from segue.sim.clients import Asked, Wanted
from segue.sim.datapath import DataPath, SimShm, TcpPath
from segue.sim.front import FrontNode
from segue.sim.invariants import Checks
from segue.sim.leader import EOS
from segue.sim.network import Network
from segue.sim.node import KVNode, LeaderNode, NodeSpec
from segue.sim.outsider import Outsider
from segue.sim.registry import Registry, RegistryNode
from segue.sim.scenario import Fault, Scenario
from segue.sim.streams import Streams
from segue.sim.timing import Timing
from segue.sim.visits import GUEST_KINDS, MISFIT_AND_TLS_KINDS, NODE_KINDS, VISITOR_KINDS, make_visitor
from segue.sim.vocabulary import DATA, ENGINE_CALLS, ROLE_CALLS, SPOILED_METADATA
from segue.sim.web_clients import WEB_KINDS, WebClient
from segue.sim.web_server import WebServer
from segue.sim.world import Process, Violation, World

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
        #: what each instance is in its next life, and where
        self.specs = {spec.name: spec for spec in scenario.nodes}
        self.addresses = Addresses(list(self.specs), self.world.rng("places"))
        self.fronts: dict[str, FrontNode] = {}
        self._lives: Counter[str] = Counter()
        self._rng = self.world.rng("deployment")
        self.registry = Registry(self)
        self.visitors: list[Outsider] = []
        self.web: WebServer | None = None

    # ---- life ----------------------------------------------------------------------------------

    def run(self) -> None:
        """The whole scenario: busy time with faults, then peace, then rest."""
        scenario, world = self.scenario, self.world
        self.registry.start()
        for name in self.specs:
            self._start_node(name)
        for index in range(scenario.fronts):
            self._start_front(index)
        if "web clients" in scenario.features:
            self.start_web_server()
        for wanted in scenario.requests:
            world.at(wanted.at, None, self._ask, wanted)
        for fault in scenario.faults:
            world.at(fault.at, None, self._strike, fault)
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
        for process in (
            *self.nodes.values(),
            *self.fronts.values(),
            *self.visitors,
            self.registry.node,
            self.web,
        ):
            if process is not None:
                self._end(process)

    def _end(self, process: LeaderNode | FrontNode | Outsider | RegistryNode | WebServer) -> None:
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

    def start_web_server(self) -> None:
        """A public HTTP server, in place of one that has stopped."""
        if self.web is not None:
            self._end(self.web)
        self.web = WebServer(self, self._lives["web"])
        self._lives["web"] += 1

    def leaders(self) -> Iterator[LeaderNode]:
        """Every live instance."""
        return (node for node in self.nodes.values() if node.alive)

    # ---- instances and frontends ---------------------------------------------------------------

    def _start_node(self, name: str) -> None:
        spec, life = self.specs[name], self._lives[name]
        self._lives[name] += 1
        make = LeaderNode if spec.role is Role.UNIFIED else KVNode
        node = make(self, spec, life)
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

    def _process(self, name: str) -> LeaderNode | FrontNode | None:
        """An instance or a frontend by its name."""
        return self.nodes.get(name) or self.fronts.get(name)

    def kill(self, process: LeaderNode | FrontNode, *, silently: bool = False) -> None:
        """SIGKILL, and what the kernel tells others, unless the whole machine is gone `silently`."""
        if not process.alive:
            return
        self.world.note(process.name, "is killed")
        self.causes.struck("killed", process)
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
            self.world.after(0.2, None, self._restart, node)

        node.loop.enter(node.loop.create_task, leaving())

    def _restart(self, old: LeaderNode | FrontNode) -> None:
        if isinstance(old, LeaderNode):
            name = old.spec.name
            if self.nodes[name] is old:
                self.addresses.settle(name)
                self._start_node(name)
        elif self.fronts[f"front{old.index}"] is old:
            self._start_front(old.index)

    # ---- requests and faults -------------------------------------------------------------------

    def _ask(self, wanted: Wanted) -> None:
        front = self.fronts[f"front{wanted.front}"]
        if front.alive:
            front.after(0.0, front.request, wanted)

    def _strike(self, fault: Fault) -> None:
        """A fault begins, or lies in wait for the next effect of its trigger's kind."""
        node = self.nodes.get(fault.node)
        if fault.trigger and node is not None and node.alive and "mid write" not in fault.kind:
            node.faults.arm(fault.trigger, lambda: self._now(fault))
        else:
            self._now(fault)

    def _now(self, fault: Fault) -> None:
        self.world.note("fault", fault)
        self.struck[fault.kind] += 1
        world, kind = self.world, fault.kind
        process = self._process(fault.node)
        other = self._process(fault.other)
        match kind:
            case _ if kind.startswith("registry "):
                self.registry.strike(fault, process)
            case "web client":
                client = WEB_KINDS[fault.amount % len(WEB_KINDS)]
                self._enters(WebClient(self, f"visitor {fault.name}", client))
            case "web stop" if self.web is not None:
                self.web.close()
            case _ if process is None or not process.alive:
                pass
            case "crash" | "front crash":
                self._crash(process, fault.seconds)
            case "power loss":
                self._crash(process, fault.seconds, silently=True)
            case "pause" | "front pause":
                self._pause(process, fault.seconds)
            case "crash mid write" | "pause mid write":
                self._mid_write(fault, process, other)
            case "break" | "front break" if other is not None:
                self.break_session(process, other)
            case "partition" | "front partition" if other is not None:
                self.network.block(process, other)
                self.causes.struck("blocked", process, other, seconds=fault.seconds)
                world.after(fault.seconds, None, self._heal, process, other)
            case (
                "slow link"
                | "write fails"
                | "path cut"
                | "wire flip"
                | "data stall"
                | "half open"
                | "head flip"
            ):
                self._path_fault(fault, process, other)
            case _ if isinstance(process, LeaderNode):
                self._node_fault(fault, process)
            case _:
                pass

    def visit(self, node: LeaderNode, name: str, kind: str) -> None:
        """Somebody comes to an instance, or to the registry, who does not belong here or does not behave."""
        self._enters(make_visitor(self, node, f"visitor {name}", kind))

    def _enters(self, visitor: Outsider) -> None:
        self.visitors.append(visitor)
        visitor.start()

    def _crash(self, process: LeaderNode | FrontNode, down_s: float, *, silently: bool = False) -> None:
        self.kill(process, silently=silently)
        self.world.after(down_s, None, self._restart, process)

    def _succeeded(self, fault: Fault, node: LeaderNode) -> None:
        """The process ends, by a crash or by a drain, and its next life is another one."""
        if fault.amount % 2:
            node.drain()
        else:
            self._crash(node, fault.seconds)

    def _change_role(self, fault: Fault, node: LeaderNode) -> None:
        """The next life is of another role, at the same address. A deployment keeps one prefill and one
        decode instance: where the last one changes, one of the other side takes its place."""
        specs, name = self.specs, node.spec.name
        old = specs[name].role
        others = [spec for spec in specs.values() if spec.name != name]
        if old is Role.UNIFIED or any(spec.role is old for spec in others):
            choice = [role for role in (Role.PREFILL, Role.DECODE, Role.UNIFIED) if role is not old]
            specs[name] = replace(specs[name], role=choice[fault.amount // 2 % 2])
            self._succeeded(fault, node)
            return
        new = Role.DECODE if old is Role.PREFILL else Role.PREFILL
        partner = next(spec.name for spec in others if spec.role is new)
        for changed, role in ((name, new), (partner, old)):
            specs[changed] = replace(specs[changed], role=role)
            if self.nodes[changed].alive:
                self._succeeded(fault, self.nodes[changed])

    def _pause(self, process: LeaderNode | FrontNode, seconds: float) -> None:
        if process.alive and not process.paused:
            process.pause()
            self.causes.struck("paused", process, seconds=seconds)
            self.world.after(seconds, None, process.resume)

    def break_session(self, a: Process, b: Process) -> None:
        """The connections between two processes end."""
        self.causes.struck("broken", a, b)
        for connection in self.network.between(a, b):
            connection.snap()

    def _heal(self, a: Process, b: Process) -> None:
        self.network.heal(a, b)
        self.healed_at = self.world.now

    def _mid_write(self, fault: Fault, process: Process, other: Process | None) -> None:
        path = _path(process, other, fault.amount)
        if path is None:
            return
        writer = path.writer
        if fault.kind == "crash mid write":
            writer.faults.kill_mid_write = lambda: self._crash(writer, fault.seconds)
            path.mid_write.append("kill")
        else:
            writer.faults.pause_mid_write = lambda: self._pause(writer, fault.seconds)
            path.mid_write.append("pause")

    def _path_fault(self, fault: Fault, process: Process, other: Process | None) -> None:
        path = _path(process, other, fault.amount)
        if path is None:
            return
        if fault.kind != "wire flip":
            self.causes.struck(fault.kind, path.writer, path.reader, seconds=fault.seconds)
        if fault.kind == "path cut":
            path.cut()
        elif fault.kind == "data stall":
            path.stand_still((path.writer, path.reader)[fault.amount % 2], fault.seconds)
        elif fault.kind == "half open":
            path.half_open(fault.amount % 2 == 0)
        elif fault.kind == "head flip":
            if isinstance(path, TcpPath):
                path.head_flips += 1
        elif fault.kind == "write fails":
            path.fail_write()
        elif fault.kind == "wire flip":
            path.flips += 1
        else:
            path.slow = float(fault.amount)

            def normal() -> None:
                path.slow = 1.0

            self.world.after(fault.seconds, None, normal)

    def _node_fault(self, fault: Fault, node: LeaderNode) -> None:
        faults = node.faults
        if fault.kind in CODES:
            self.causes.struck(fault.kind, node, seconds=fault.seconds)
        match fault.kind:
            case "metadata":
                faults.spoil_metadata.append(fault.amount % len(SPOILED_METADATA))
            case "role exception":
                late, which = divmod(fault.amount, len(ROLE_CALLS))
                if ROLE_CALLS[which] == "frontend_gone":
                    self.break_session(node, self._rng.choice(list(self.fronts.values())))
                faults.fail_next_item(ROLE_CALLS[which], late % 2 == 1)
            case "handler exception":
                if self._rng.random() < 0.5:
                    faults.fail_next_machine_step()
                else:
                    faults.effect_fails += 1
            case "step exception":
                faults.step_fails += 1
            case "sequence error":
                faults.sequence_fails += 1
            case "session flip":
                self.network.flips[node] = self.network.flips.get(node, 0) + 1
            case "page flip":
                faults.page_flips += 1
            case "engine exception":
                faults.fail_next_call(ENGINE_CALLS[fault.amount % len(ENGINE_CALLS)])
            case "plan exception":
                method = ("advance", "plan")[fault.amount % 2]
                faults.fail_next_item(method, fault.amount // 2 % 2 == 1)
            case "digest slow" | "digest fails":
                faults.digests.append(fault.seconds if fault.kind == "digest slow" else None)
            case "copy flip":
                faults.copy_flips += 1
            case "engine refuses":
                faults.fail_next_open()
            case "squeeze":
                if not node.squeezed and not node.busy:
                    node.squeeze(fault.amount * node.pool.total // 64)
                    node.after(fault.seconds, node.unsqueeze)
            case _ if fault.kind in (*DATA, "no memory"):
                if isinstance(node, KVNode):  # in this life
                    self._data_fault(fault, node)
            case "wrong message":
                if isinstance(node, KVNode):
                    node.hearing.arm(fault.amount)
            case "misfit":
                self.visit(node, fault.name, MISFIT_AND_TLS_KINDS[fault.amount % len(MISFIT_AND_TLS_KINDS)])
            case "effect exception":
                faults.effect_fails += 1
            case "event exception":
                faults.event_fails += 1
            case "dial exception":
                faults.dial_fails += 1
                if (other := self.nodes.get(fault.other)) is not None:
                    self.break_session(node, other)
            case "drain":
                node.drain()
            case "visitor":
                self.visit(node, fault.name, VISITOR_KINDS[fault.amount % len(VISITOR_KINDS)])
            case "node visit":
                self.visit(node, fault.name, NODE_KINDS[fault.amount % len(NODE_KINDS)])
            case "guest":
                self.visit(node, fault.name, GUEST_KINDS[fault.amount % len(GUEST_KINDS)])
            case "no descriptors":
                for listener in self.network.listeners(node):
                    listener.starved_until = self.world.now + fault.seconds
            case "clock jump":
                node.jump(fault.seconds)
            case "move":
                self.addresses.move(node.spec.name)
                self._succeeded(fault, node)
            case "role change":
                self._change_role(fault, node)
            case _:
                raise Violation("scenario", f"no such fault: {fault}")

    def _data_fault(self, fault: Fault, node: KVNode) -> None:
        transport, until = self._rng.choice(list(node.transports.values())), self.world.now + fault.seconds
        match fault.kind:
            case "deaf port":
                transport.net.deaf_until = until
            case "no data descriptors":
                transport.net.full_until = until
            case "write astray":
                transport.astray += 1
            case "no memory":
                self._no_memory(fault, node)
            case "thread death":
                transport.end_a_thread()
                node.after(fault.seconds, self._crash, node, 0.01)
            case _:
                transport.connect_raises += 1

    def _no_memory(self, fault: Fault, node: KVNode) -> None:
        """Its next path over `shm` cannot be mapped, and one must be opened anew. Where there is another
        transport that pair goes on with it, and so does any other that meets again."""
        shm, other = node.transports.get(SimShm.name), self.nodes[fault.other]
        if not isinstance(shm, SimShm):
            return
        shm.host.unmapped += 1
        self.causes.struck("no memory" if len(self.transports) == 1 else "no memory for shm", node)
        if (path := node.paths.get((other.me, shm.name))) is not None:
            path.cut()
        self.break_session(node, other)
        if len(self.transports) > 1:
            self.world.after(0.05, None, self._all_meet_anew, node)

    def _all_meet_anew(self, node: KVNode) -> None:
        for peer in list(node.peers):
            self.break_session(node, self.by_leader[peer])
        self.world.after(0.2, None, self._cut_unused, node)

    def _cut_unused(self, node: KVNode) -> None:
        """Paths that its pairs have no use for any more end: no cause of anything."""
        for (reader, name), path in node.paths.items():
            if (peer := node.peers.get(reader)) is not None and peer.transport != name:
                self.counts["unused paths cut"] += 1
                path.cut()


def _path(a: Process, b: Process | None, which: int) -> DataPath | None:
    """One of the data paths between two instances, whichever of them is the prefill one now."""
    if not isinstance(a, KVNode) or not isinstance(b, KVNode):
        return None
    found = a.paths_to(b.me) or b.paths_to(a.me)
    return found[which % len(found)] if found else None
