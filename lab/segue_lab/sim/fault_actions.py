"""The action of each fault of a scenario on its deployment."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

from segue.kv.errors import Internal
from segue.kv.ids import Role
from segue_lab.sim.causes import CODES, Causes
from segue_lab.sim.datapath import DataPath, SimShm, TcpPath
from segue_lab.sim.front import FrontNode
from segue_lab.sim.loop import SimLoop
from segue_lab.sim.network import Network
from segue_lab.sim.scenario import Fault
from segue_lab.sim.sim_leader import LeaderNode
from segue_lab.sim.sim_node import KVNode
from segue_lab.sim.sim_registry import SimRegistry
from segue_lab.sim.sim_state import SimState
from segue_lab.sim.sim_supervisor import SimSupervisor
from segue_lab.sim.timing import Timing
from segue_lab.sim.vocabulary import DATA, ENGINE_CALLS, RANK_CALLS, RANKS, ROLE_CALLS, SPOILED_METADATA
from segue_lab.sim.world import Process, SkewedClock, Violation, World


class FaultActions:
    """The faults of one deployment."""

    def __init__(
        self, state: SimState, causes: Causes, supervisor: SimSupervisor, registry: SimRegistry
    ) -> None:
        self.state = state
        self.causes = causes
        self.supervisor = supervisor
        self.registry = registry
        self.world: World = state.world
        self.network: Network = state.network
        self.timing: Timing = state.timing
        self.nodes: dict[str, LeaderNode] = supervisor.nodes
        self.fronts: dict[str, FrontNode] = supervisor.fronts
        self.counts: Counter[str] = state.counts
        self._rng: random.Random = state.world.rng("deployment")

    def inject(self, fault: Fault) -> None:
        """A fault begins, or lies in wait for the next effect of its trigger's kind."""
        node = self.nodes.get(fault.node)
        if fault.trigger and node is not None and node.alive and "mid write" not in fault.kind:
            node.faults.arm(fault.trigger, lambda: self._now(fault))
        else:
            self._now(fault)

    def _now(self, fault: Fault) -> None:
        self.world.note("fault", fault)
        self.state.injected[fault.kind] += 1
        world, kind = self.world, fault.kind
        process = self.supervisor.process(fault.node)
        other = self.supervisor.process(fault.other)
        match kind:
            case _ if kind.startswith("registry "):
                self.registry.inject(fault, process)
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
                self.causes.break_session(process, other)
            case "partition" | "front partition" if other is not None:
                self.network.block(process, other)
                self.causes.record("blocked", process, other, seconds=fault.seconds)
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

    def _crash(self, process: LeaderNode | FrontNode, down_s: float, *, silently: bool = False) -> None:
        """One process ends; all leaders of its instance where the machine is gone `silently`."""
        ends: list[LeaderNode | FrontNode] = [process]
        if silently and isinstance(process, LeaderNode):
            ends = [*self.supervisor.leaders_of(process)]
        for ended in ends:
            if ended.alive:
                self.supervisor.kill(ended, silently=silently)
                self.world.after(down_s, None, self.supervisor.restart, ended)

    def _drain(self, fault: Fault, node: LeaderNode) -> None:
        """SIGTERM, to all leaders of its instance or, now and then, to one of them."""
        for leader in self.supervisor.leaders_of(node) if fault.amount % 4 else [node]:
            if leader.alive:
                leader.drain()

    def _succeeded(self, fault: Fault, node: LeaderNode) -> None:
        """The process ends, by a crash or by a drain, and starts again as another incarnation."""
        if fault.amount % 2:
            self._drain(fault, node)
        else:
            self._crash(node, fault.seconds)

    def _change_role(self, fault: Fault, node: LeaderNode) -> None:
        """The next incarnation has another role, at the same address. A deployment keeps one prefill and one
        decode instance: where the last one changes, one of the other side takes its place."""
        specs, instance = self.state.specs, node.spec.instance
        old = specs[node.spec.name].role
        others = {spec.instance: spec.role for spec in specs.values() if spec.instance != instance}
        if old is Role.UNIFIED or old in others.values():
            choice = [role for role in (Role.PREFILL, Role.DECODE, Role.UNIFIED) if role is not old]
            self._becomes(fault, instance, choice[fault.amount // 2 % 2])
            return
        new = Role.DECODE if old is Role.PREFILL else Role.PREFILL
        partner = next(name for name, role in others.items() if role is new)
        for changed, role in ((instance, new), (partner, old)):
            self._becomes(fault, changed, role)

    def _becomes(self, fault: Fault, instance: str, role: Role) -> None:
        specs = self.state.specs
        mine = [spec.name for spec in specs.values() if spec.instance == instance]
        specs |= {name: replace(specs[name], role=role) for name in mine}
        if alive := [name for name in mine if self.nodes[name].alive]:
            self._succeeded(fault, self.nodes[alive[0]])

    def _pause(self, process: LeaderNode | FrontNode, seconds: float) -> None:
        if process.alive and not process.paused:
            process.pause()
            self.causes.record("paused", process, seconds=seconds)
            self.world.after(seconds, None, process.resume)

    def _heal(self, a: Process, b: Process) -> None:
        self.network.heal(a, b)
        self.state.healed_at = self.world.now

    def _mid_write(self, fault: Fault, process: Process, other: Process | None) -> None:
        path = _path(process, other, fault.amount)
        if path is None:
            return
        writer = path.writer
        assert isinstance(writer, KVNode)
        end = self._crash if fault.kind == "crash mid write" else self._pause
        path.mid_write.append(lambda: end(writer, fault.seconds))

    def _path_fault(self, fault: Fault, process: Process, other: Process | None) -> None:
        path = _path(process, other, fault.amount)
        if path is None:
            return
        if fault.kind != "wire flip":
            self.causes.record(fault.kind, path.writer, path.reader, seconds=fault.seconds)
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
            self.causes.record(fault.kind, node, seconds=fault.seconds)
        match fault.kind:
            case "metadata":
                faults.spoil_metadata.append(fault.amount % len(SPOILED_METADATA))
            case "role exception":
                late, which = divmod(fault.amount, len(ROLE_CALLS))
                if ROLE_CALLS[which] == "frontend_gone":
                    self.causes.break_session(node, self._rng.choice(list(self.fronts.values())))
                faults.fail_next_item(ROLE_CALLS[which], late % 2 == 1)
            case "handler exception":
                if self._rng.random() < 0.5:
                    faults.fail_next_machine_step()
                else:
                    faults.effect_fails += 1
            case "step exception":
                faults.step_fails += 1
            case "slow step":
                faults.slow_step_s = fault.seconds
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
            case "address taken":
                self._crash(node, 0.01)
                self._take_address(node.host, node.port, fault.seconds)
            case _ if fault.kind in (*DATA, *RANKS, "no memory", "fence exception", "rank lost"):
                if isinstance(node, KVNode):  # in this incarnation
                    self._data_fault(fault, node)
            case "wrong message":
                if isinstance(node, KVNode):
                    node.hearing.arm(fault.amount)
            case "effect exception":
                if isinstance(node, KVNode) and node.workers:
                    node.workers[fault.amount % len(node.workers)].fail_next(self._rng.choice(RANK_CALLS))
                else:
                    faults.effect_fails += 1
            case "event exception":
                faults.event_fails += 1
            case "dial exception":
                faults.dial_fails += 1
                if (other := self.nodes.get(fault.other)) is not None:
                    self.causes.break_session(node, other)
            case "drain":
                self._drain(fault, node)
            case "switch":
                node.switch(resumes=fault.amount % 2 > 0, late_s=fault.seconds)
            case "no descriptors":
                for listener in self.network.listeners(node):
                    listener.starved_until = self.world.now + fault.seconds
            case "clock jump":
                node.jump(fault.seconds)
            case "move":
                self.state.addresses.move(node.spec.name)
                self._succeeded(fault, node)
            case "role change":
                self._change_role(fault, node)
            case _:
                raise Violation("scenario", f"no such fault: {fault}")

    def _data_fault(self, fault: Fault, node: KVNode) -> None:
        transport, until = self._rng.choice(list(node.transports.values())), self.world.now + fault.seconds
        match fault.kind:
            case "deaf port":
                # A session without its paths is not ready: what is asked over it is answered afterwards.
                transport.net.deaf_until = until
                node.no_answer_until = max(node.no_answer_until, until)
            case "no data descriptors":
                transport.net.full_until = until
            case "write astray":
                transport.astray += 1
            case "no memory":
                self._no_memory(fault, node)
            case "fence exception":
                transport.fence_raises += 1
            case "rank lost":
                self._rank_lost(fault, node)
            case "rank diverges":
                node.faults.diverges = fault.amount
            case "rank late":
                node.no_answer_until = max(node.no_answer_until, until)
                for worker in node.workers[fault.amount % 4 :][:1]:
                    worker.stand_still(fault.seconds)
            case "thread death":
                transport.end_a_thread()
                node.after(fault.seconds, self._crash, node, 0.01)
            case _:
                transport.connect_raises += 1

    def _no_memory(self, fault: Fault, node: KVNode) -> None:
        """Its next path over `shm` cannot be mapped, and one must be opened anew. Where there is another
        transport that pair goes on with it, and so does any other that meets again."""
        rank, other = fault.amount % len(node.specs), self.nodes[fault.other]
        shm = node.transports.get((rank, SimShm.name))
        if not isinstance(shm, SimShm):
            return
        shm.host.unmapped += 1
        self.causes.record("no memory" if len(self.state.transports) == 1 else "no memory for shm", node)
        for path in node.paths_to(other.me):
            if (path.mine, path.name) == (rank, shm.name):
                path.cut()
        self.causes.break_session(node, other)
        if len(self.state.transports) > 1:
            self.world.after(0.05, None, self._all_meet_anew, node)

    def _rank_lost(self, fault: Fault, node: KVNode) -> None:
        """A rank of a leader is gone, or its worker has ended or says nothing more: all its hand-offs end at
        once, none begins, and the instance ends."""
        which, after_s = fault.amount % len(node.specs), 2 * self.timing.hop_s
        # A rank that an earlier fault stopped is heard when that is over.
        noticed_s = after_s + 0.1 + max(0.0, node.no_answer_until - self.world.now)
        looks_at = silent_until = self.world.now

        def ended() -> None:
            nonlocal looks_at, silent_until
            # It stood still itself, or its clock says so, and notices only now.
            if max(node.resumed_at, node.jumped_at) > looks_at:
                looks_at = self.world.now
                node.after(after_s, ended)
            elif node.no_answer_until > silent_until:  # a later fault made the worker stand still as it ended
                silent_until = max(silent_until, node.no_answer_until)
                node.after(max(0.0, silent_until - self.world.now) + after_s, ended)
            elif left := list(node.exchange.open_halves()):
                text = f"{node.name} has lost its rank and still has {left}"
                self.world.fail(Violation("12", text, tuple(key.room for key in left)))

        def leaves() -> None:
            node.workers[which].leave()  # waits for what its threads copy
            node.after(noticed_s, ended)

        if node.workers and fault.amount // 4 % 2:
            self.counts["workers that ended"] += 1
            node.spawn("a worker ends", leaves)
            after_s += noticed_s
        elif node.workers:
            after_s += node.limits.peer_silence_s + 3 * node.limits.keepalive_s
            node.workers[which].stand_still(2 * after_s)
            node.no_answer_until = max(node.no_answer_until, self.world.now + 2 * after_s)
            node.after(after_s, ended)
        else:
            node.manager.lost(which, Internal("injected: the rank is lost"))
            node.after(after_s, ended)
        silent_until = max(silent_until, node.no_answer_until)
        node.after(after_s + fault.seconds, self._crash, node, 0.01)

    def _take_address(self, host: str, port: int, seconds: float) -> None:
        """Another process listens there for a while, and says nothing."""
        process = Process(self.world, f"at {host}:{port}")
        loop = SimLoop(process, SkewedClock(self.world, 0.0, 1.0), self.network, host)  # type: ignore[abstract]
        listener = self.network.listening(loop, port)
        self.world.after(seconds, None, listener.close)

    def _all_meet_anew(self, node: KVNode) -> None:
        for peer in list(node.peers):
            self.causes.break_session(node, self.state.by_leader[peer])
        self.world.after(0.2, None, self._cut_unused, node)

    def _cut_unused(self, node: KVNode) -> None:
        """Paths that its pairs have no use for any more end: no cause of anything."""
        for (_, reader, name), path in node.paths.items():
            if (peer := node.peers.get(reader.leader)) is not None and peer.transport != name:
                self.counts["unused paths cut"] += 1
                path.cut()


def _path(a: Process, b: Process | None, which: int) -> DataPath | None:
    """One of the data paths between two instances, whichever of them is the prefill one now, or between the
    ranks of the decode one."""
    if not isinstance(a, KVNode) or not isinstance(b, KVNode):
        return None
    found = a.paths_to(b.me) or b.paths_to(a.me)
    for decode in (a, b):
        found += decode.paths_to(decode.me)
    return found[which % len(found)] if found else None
