"""The registry of a deployment in virtual time: production's store, and its client in every process.

Checks messages to the registry, its losses of entries, and the beliefs of its watchers.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from msgspec import structs

from segue.kv.errors import ErrorCode, SegueError
from segue.kv.ids import Incarnation, LeaderId, Role
from segue.kv.limits import Limits
from segue.server.instance.registry_link import follow_prefill
from segue.server.registry.client import BackendRegistry
from segue.server.registry.registry_records import InstanceRecord, Registered
from segue.server.registry.registry_store import RegistryStore
from segue.server.registry.waiting import AwakeClock, StoreBackend
from segue_lab.sim.front import FrontNode
from segue_lab.sim.loop import SimLoop
from segue_lab.sim.node_views import NodeView, leaders_of
from segue_lab.sim.registry_wire import (
    CONNECT_S,
    HOST,
    PORT,
    SETTLED_S,
    SILENT_S,
    TTL_S,
    RegistryDoor,
    SimBackend,
)
from segue_lab.sim.sim_leader import LeaderNode
from segue_lab.sim.sim_node import KVNode
from segue_lab.sim.sim_state import SimState
from segue_lab.sim.world import Process, SkewedClock, Violation

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine

    from segue_lab.sim.scenario import Fault


class CheckedStore(RegistryStore):
    """Production's store; what it lets in is what the process in question is, whom it forgets was silent, and
    who leaves takes no other rank along."""

    state: SimState

    def __init__(self, state: SimState, node: RegistryNode, **options: Any) -> None:
        self.state = state
        self._node = node
        self._heard_at: dict[tuple[Incarnation, int], float] = {}
        super().__init__(**options)

    def register(self, record: InstanceRecord, dp_rank: int) -> Registered:
        """As production."""
        process = self.state.by_leader.get(LeaderId(record.incarnation, dp_rank))
        answer = super().register(record, dp_rank)
        world = self.state.world
        self._heard_at[record.incarnation, dp_rank] = world.now
        if isinstance(process, NodeView):
            true = process.record()
            if structs.replace(record, draining=False, complete=False) != true:
                self._wrong(f"took {record} for {process.name}, which is {true}")
        return answer

    def expire(self) -> None:
        """As production."""
        before = {
            (incarnation, rank): known.alive
            for incarnation, entry in self._entries.items()
            for rank, known in entry.ranks.items()
        }
        super().expire()
        for (incarnation, rank), alive in before.items():
            entry = self._entries.get(incarnation)
            if alive and (entry is None or not entry.ranks[rank].alive):
                silent_s = self.state.world.now - self._heard_at[incarnation, rank]
                if silent_s < TTL_S - 1e-6:
                    self._wrong(f"forgot {incarnation[:8]} after {silent_s:.3f} s of silence")

    def _take_out(self, leader: LeaderId, why: type[SegueError]) -> None:
        others = self._alive(leader.incarnation) - {leader.dp_rank}
        super()._take_out(leader, why)
        if others - self._alive(leader.incarnation):
            self._wrong(f"dropped other ranks of {leader.incarnation[:8]} with rank {leader.dp_rank}")

    def _alive(self, incarnation: Incarnation) -> set[int]:
        entry = self._entries.get(incarnation)
        return {rank for rank, known in entry.ranks.items() if known.alive} if entry is not None else set()

    def heard_of(self, leader: LeaderId) -> bool:
        """Whether it registered within the time to live."""
        heard_at = self._heard_at.get((leader.incarnation, leader.dp_rank))
        return heard_at is not None and self.state.world.now - heard_at < TTL_S - 1e-6

    def _wrong(self, text: str) -> None:
        self.state.world.fail(Violation("registry", f"{self._node.name} {text}"))


class RegistryNode(Process):
    """One incarnation of the registry."""

    def __init__(self, state: SimState, restart: int) -> None:
        super().__init__(state.world, f"registry#{restart}" if restart else "registry")
        rng = state.world.rng(self.name)
        self.clock = SkewedClock(state.world, 0.0, 1.0)
        self.loop = SimLoop(self, self.clock, state.network, HOST)  # type: ignore[abstract]
        self._awake = AwakeClock(self.clock)
        self.store = CheckedStore(state, self, clock=self._awake, ttl_s=TTL_S, random_bytes=rng.randbytes)
        self.backend = StoreBackend(self.store, self._awake)
        self.door = RegistryDoor(self.loop, state.network.listening(self.loop, PORT), self.backend)
        #: it was told to end: nobody is let in any more
        self.closing = False


class Member:
    """One process' use of the registry: an instance as in `server.instance.instance`, a frontend by its
    fleet."""

    def __init__(
        self,
        state: SimState,
        process: LeaderNode | FrontNode,
        ended: Callable[[Member, str, SegueError], None],
    ) -> None:
        self.state = state
        self.ended = ended
        self.process = process
        self.joined_at: float | None = None
        self.left = False
        self._tasks: list[asyncio.Task[None]] = []
        self._view: dict[LeaderId, InstanceRecord] = {}
        self.client = BackendRegistry(
            SimBackend(process.loop, HOST, PORT, CONNECT_S),
            Limits(connect_s=CONNECT_S, registry_ttl_s=TTL_S),
            self._trouble,
            SkewedClock(state.world, 0.0, 1.0),
        )
        if isinstance(process, FrontNode):
            process.begin(self.client)
        else:
            self._spawn(self._join())

    @property
    def view(self) -> dict[LeaderId, InstanceRecord]:
        """The instances that the process takes for listed."""
        return self.process.view if isinstance(self.process, FrontNode) else self._view

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(self.process.loop.enter(self.process.loop.create_task, work))

    def _trouble(self, error: SegueError) -> None:
        self.state.world.note(self.process.name, f"registry: {error}")
        self.state.counts[f"registry: {error.info.code}"] += 1

    async def _pause(self, seconds: float) -> None:
        wake = asyncio.Event()
        self.process.after(seconds, self.process.loop.enter, wake.set)
        await wake.wait()

    # ---- an instance ------------------------------------------------------------------------------

    async def _join(self) -> None:
        node = self.process
        assert isinstance(node, LeaderNode)
        while not self.left:
            try:
                await self.client.register(node.record())
                break
            except SegueError as error:
                self._trouble(error)
                await self._pause(self.state.timing.retry_s)
        if self.left:
            return  # it has drained before anybody heard of it
        self.joined_at = self.state.world.now
        if isinstance(node, KVNode):
            node.manager.use_registry(self.client)
        if node.draining:
            self.say_draining()
        self._spawn(self._or_drain("keep-alive", self.client.keep_alive))
        if isinstance(node, KVNode) and node.spec.role is Role.DECODE:
            self._spawn(self._or_drain("watch", follow_prefill, self, node.manager))

    async def _or_drain(self, name: str, work: Callable[..., Coroutine[Any, Any, None]], *args: Any) -> None:
        """As `Instance._spawn`: one that has lost its registry for good drains."""
        node = self.process
        assert isinstance(node, LeaderNode)
        try:
            await work(*args)
        except SegueError as error:
            self._trouble(error)
            self.ended(self, name, error)
            if not node.draining:
                node.drain()

    def say_draining(self) -> None:
        """SIGTERM: say that nothing new is taken."""
        if self.joined_at is not None and not self.left:
            self._spawn(self._or_drain("drain", self.client.set_draining, True))

    async def leave(self) -> None:
        """As `Instance._leave`."""
        self.left = True
        await self.client.leave(self.process.me)
        for task in self._tasks:
            task.cancel()
        await self.client.aclose()

    # ---- whoever looks for others -----------------------------------------------------------------

    async def watch(self, role: Role | None = None) -> AsyncIterator[list[InstanceRecord]]:
        """As production's client; what it shows is kept."""
        async for records in self.client.watch(role):
            self._view = {leader: record for record in records for leader, _ in record.leaders()}
            yield records


class SimRegistry:
    """All incarnations of the registry, its members, and their rules."""

    def __init__(self, state: SimState) -> None:
        self.state = state
        self.world = state.world
        self.node: RegistryNode | None = None
        self.members: dict[Process, Member] = {}
        self._restarts = 0

    def start(self) -> None:
        """A registry that knows nobody."""
        if self.node is not None:
            return
        self.node = RegistryNode(self.state, self._restarts)
        self._restarts += 1
        self._trouble_for(0.0)
        self.world.note("registry", f"starts as {self.node.name}")

    def stop(self, down_s: float, *, silently: bool = False) -> None:
        """SIGKILL; after `down_s` seconds another one that knows nobody takes its place."""
        node, self.node = self.node, None
        if node is None:
            return
        self.world.note("registry", "is killed")
        node.kill()
        self.state.network.died(node, silently=silently)
        node.loop.die()
        self._trouble_for(down_s + (SILENT_S if silently else 0.0))
        self.world.after(down_s, None, self.start)

    def close(self, down_s: float) -> None:
        """SIGTERM."""
        node = self.node
        if node is None or node.closing:
            return
        self.world.note("registry", "is closed")
        node.closing = True

        async def closing() -> None:
            await node.door.close()
            if self.node is node:
                self.world.after(0.0, None, self.stop, down_s)

        self._trouble_for(down_s)
        node.loop.enter(node.loop.create_task, closing())

    def join(self, process: LeaderNode | FrontNode) -> None:
        """A process begins to use it."""
        self.members[process] = Member(self.state, process, self.ended)

    def say_draining(self, node: NodeView) -> None:
        """SIGTERM of a leader."""
        self.members[node].say_draining()

    # ---- faults -----------------------------------------------------------------------------------

    def inject(self, fault: Fault, member: Process | None) -> None:
        """A fault of the registry, or of what lies between it and one of its members."""
        world, network, node, kind = self.world, self.state.network, self.node, fault.kind
        match kind.removeprefix("registry "):
            case "loss":
                self.stop(fault.seconds)
            case "silent loss":
                self.stop(fault.seconds, silently=True)
            case "close":
                self.close(fault.seconds)
            case _ if node is None:
                pass
            case "pause":
                if not node.paused:
                    node.pause()
                    self._trouble_for(fault.seconds)
                    world.after(fault.seconds, None, node.resume)
            case "slow":
                network.slow[node] = 0.01 * fault.amount
                self._trouble_for(fault.seconds)
                world.after(fault.seconds, None, self._quick_again, node)
            case _ if member is None or not member.alive:
                pass
            case "partition":
                ways = ((member, node), (node, member))
                self._trouble_for(fault.seconds)
                for way in ways if fault.amount % 3 == 0 else ways[fault.amount % 2 :][:1]:
                    network.block(*way)
                    world.after(fault.seconds, None, network.heal, *way)
            case "break":
                self._trouble_for(0.0)
                for connection in network.between(member, node):
                    connection.snap()
            case _:
                raise Violation("scenario", f"no such fault: {fault}")

    def _quick_again(self, node: RegistryNode) -> None:
        self.state.network.slow.pop(node, None)

    def _trouble_for(self, seconds: float) -> None:
        self.state.registry_trouble_at = max(self.state.registry_trouble_at, self.world.now + seconds)

    # ---- what must be true ------------------------------------------------------------------------

    def ended(self, member: Member, what: str, error: SegueError) -> None:
        """The registry said that an instance is over: it must have had a reason."""
        code, node = error.info.code, member.process
        if code in (ErrorCode.DRAINING, ErrorCode.NOT_FOUND) and member.left:
            return  # NOT_FOUND: the word that it drains came after the one that it leaves
        told = f"{what} of {node.name} was told that it is over: {error}"
        self.world.fail(Violation("registry", told))

    def sweep(self) -> None:
        """Once nothing has stood in the way for long enough, every watcher knows what is true."""
        now, network, registry = self.world.now, self.state.network, self.node
        if (
            registry is None
            or registry.closing
            or not self._calm(registry, now, self.state.registry_trouble_at)
        ):
            return
        # The query of one that has died is there until the registry hears of its end.
        waiting = sum(not socket.other.process.alive for socket in network.live.get(registry, {}))
        for process, member in self.members.items():
            if not process.alive:
                continue
            if isinstance(process, NodeView) and process.spec.role is not Role.DECODE:
                continue
            waiting += 1
            if member.left:
                continue
            since = max(self.state.registry_trouble_at, process.began_at, member.joined_at or 0.0)
            if not self._calm(process, now, since) or network.cut_off(process, registry):
                continue
            self._knows(process, member, now)
        found = len(registry.backend._waiters)
        if found > waiting:
            raise Violation("registry", f"{found} queries wait for {waiting} watchers")

    def _calm(self, process: Process, now: float, since: float) -> bool:
        return not process.paused and now - max(since, process.resumed_at) > SETTLED_S

    def _knows(self, watcher: Process, member: Member, now: float) -> None:
        registry = self.node
        assert registry is not None
        for process, other in self.members.items():
            if not isinstance(process, NodeView) or other.left or other.joined_at is None:
                continue
            if isinstance(watcher, LeaderNode) and process.spec.role is not Role.PREFILL:
                continue
            record = member.view.get(process.me)
            if not process.alive:
                if record is not None and now - process.died_at > SETTLED_S:
                    self._wrong(watcher, f"still believes in {process.name}, dead since {process.died_at}")
                continue
            # An instance is listed once all of its leaders are there.
            leaders = leaders_of(process)
            if len(leaders) < process.spec.dp_size or not all(self._is_there(node, now) for node in leaders):
                continue
            if record is None:
                self._wrong(watcher, f"does not know of {process.name}")
                continue
            drains = dict(record.leaders())[process.me].draining
            if process.draining_since is None:
                if drains:
                    self._wrong(watcher, f"believes that {process.name} drains")
            elif not drains and now - process.draining_since > SETTLED_S:
                self._wrong(watcher, f"does not know that {process.name} drains")

    def _is_there(self, process: NodeView, now: float) -> bool:
        """Whether it has been registered, alive and connected for long enough."""
        member, registry = self.members[process], self.node
        assert registry is not None
        if not process.alive or member.left or member.joined_at is None:
            return False
        cut_off = self.state.network.cut_off(process, registry)
        return not cut_off and self._calm(process, now, max(self.state.registry_trouble_at, member.joined_at))

    def _wrong(self, watcher: Process, text: str) -> None:
        raise Violation("registry", f"{watcher.name} {text}")
