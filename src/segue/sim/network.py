"""Sessions between simulated processes: ordered, visible when broken, silent when blocked.

One `Session` is one TCP connection. It never heals: a broken one is a new one. Each end learns of a
break after a delay of its own; until then it goes on sending into the void.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, Protocol

from segue.core.errors import PeerLost, SegueError
from segue.sim.world import Process, World


@dataclass(slots=True)
class Timing:
    """How fast things are, in seconds and bytes per second."""

    latency_s: float = 0.0005
    jitter: float = 1.0
    hop_s: float = 0.00005
    break_seen_s: float = 0.02
    keepalive_s: float = 0.5
    silence_s: float = 2.0
    retry_s: float = 0.1
    connect_s: float = 1.0
    step_s: float = 0.002
    token_s: float = 0.00005
    link_bytes_s: float = 2e6
    slice_s: float = 0.0005


class Owner(Protocol):
    """A process that has sessions."""

    def session_received(self, end: End, message: Any) -> None: ...
    def session_closed(self, end: End, error: SegueError) -> None: ...


class End:
    """One end of a session, as its process sees it."""

    __slots__ = ("data", "open", "other", "owner", "process", "queue", "ready_at", "session")

    def __init__(self, session: Session, process: Process, owner: Owner) -> None:
        self.session = session
        self.process = process
        self.owner = owner
        self.open = True
        self.other: End = self
        #: when the last message we sent arrives: the next one comes after it
        self.ready_at = 0.0
        #: messages held back while our direction is blocked
        self.queue: list[Any] = []
        self.data: Any = None

    def send(self, message: Any, delay_s: float = 0.0) -> None:
        """Queue a message; after the end it is dropped."""
        session = self.session
        if not self.open or session.broken:
            return
        if session.network.blocked(self.process, self.other.process):
            self.queue.append(message)
            return
        world, timing = session.network.world, session.network.timing
        at = world.now + delay_s + timing.latency_s * (1.0 + timing.jitter * session.rng.random())
        if at <= self.ready_at:
            at = self.ready_at + 1e-9
        self.ready_at = at
        world.at(at, self.other.process, self.other._deliver, message)

    def _deliver(self, message: Any) -> None:
        if self.open and not (self.session.broken and self.session.lost[self is self.session.ends[0]]):
            self.owner.session_received(self, message)

    def close(self, error: SegueError) -> None:
        """End the session: our side now, the other one after what is under way."""
        if not self.open:
            return
        self.shut(error)
        session = self.session
        if not session.broken:
            session.finish(self)

    def shut(self, error: SegueError) -> None:
        """This end learns that the session is over. Idempotent."""
        if self.open:
            self.open = False
            self.session.network.ended(self)
            self.owner.session_closed(self, error)

    def drop(self) -> None:
        """The process is gone: nobody is told on this side."""
        if self.open:
            self.open = False
            self.session.network.ended(self)


class Session:
    """Two ends. `lost[0]` says that what is under way to `ends[1]` is lost, `lost[1]` to `ends[0]`."""

    def __init__(self, network: Network, ends: tuple[tuple[Process, Owner], tuple[Process, Owner]]) -> None:
        self.network = network
        network.opened += 1
        self.rng = network.world.rng(f"session {ends[0][0].name} {ends[1][0].name} {network.opened}")
        self.broken = False
        self.lost = [False, False]
        first, second = (End(self, process, owner) for process, owner in ends)
        first.other, second.other = second, first
        self.ends = (first, second)

    def snap(self) -> None:
        """The connection breaks: what is under way may be lost, both ends notice in their own time."""
        if self.broken:
            return
        self.broken = True
        self.lost = [self.rng.random() < 0.5, self.rng.random() < 0.5]
        bound_s = self.network.timing.break_seen_s
        for end in self.ends:
            if end.open:
                end.process.after(self.rng.random() * bound_s, end.shut, PeerLost("the connection broke"))

    def finish(self, by: End) -> None:
        """`by` closed it: the other end reads what was sent before, then the end."""
        self.broken = True
        other = by.other
        if not other.open:
            return
        network = self.network
        if network.blocked(by.process, other.process):
            return  # silence: `Network.silence` will find it
        at = max(by.ready_at + 1e-9, network.world.now + network.timing.latency_s)
        network.world.at(at, other.process, other.shut, PeerLost("the peer closed the session"))


class Network:
    """All sessions, and which directions are blocked."""

    def __init__(self, world: World, timing: Timing) -> None:
        self.world = world
        self.timing = timing
        self.opened = 0
        self.live: dict[Process, dict[End, None]] = {}
        self._blocked: dict[tuple[Process, Process], float] = {}
        self._rng: random.Random = world.rng("network")

    def connect(self, dialler: tuple[Process, Owner], listener: tuple[Process, Owner]) -> Session:
        """A new session; both ends are open at once."""
        session = Session(self, (dialler, listener))
        for end in session.ends:
            self.live.setdefault(end.process, {})[end] = None
        return session

    def ended(self, end: End) -> None:
        """Forget an end that is over."""
        ends = self.live.get(end.process)
        if ends is not None:
            ends.pop(end, None)
            if not ends:
                del self.live[end.process]

    def between(self, a: Process, b: Process) -> list[Session]:
        """The sessions between two processes that are not broken."""
        return [e.session for e in self.live.get(a, {}) if e.other.process is b and not e.session.broken]

    # ---- partitions ----------------------------------------------------------------------------

    def blocked(self, source: Process, target: Process) -> bool:
        """Whether nothing gets from `source` to `target` now."""
        return bool(self._blocked) and (source, target) in self._blocked

    def block(self, source: Process, target: Process) -> None:
        """From now on nothing gets from `source` to `target`; TCP holds it back."""
        self._blocked[source, target] = self.world.now
        self._watch(source, target)

    def heal(self, source: Process, target: Process) -> None:
        """What was held back arrives, if the session still lives."""
        if self._blocked.pop((source, target), None) is None:
            return
        for end in list(self.live.get(source, {})):
            if end.other.process is target:
                held, end.queue = end.queue, []
                for message in held:
                    end.send(message)
        for end in list(self.live.get(target, {})):
            if end.other.process is source and end.session.broken:
                end.process.after(self.timing.latency_s, end.shut, PeerLost("the peer closed the session"))

    def silent(self, process: Process) -> None:
        """`process` was paused: its peers will notice."""
        for end in list(self.live.get(process, {})):
            self._watch(process, end.other.process)

    def _watch(self, source: Process, target: Process) -> None:
        bound_s = self.timing.silence_s + self._rng.random() * self.timing.keepalive_s
        self.world.after(bound_s, target, self._heard_nothing, source, target, self.world.now)

    def _heard_nothing(self, source: Process, target: Process, since: float) -> None:
        """On `target`: has `source` been silent all the time since then?"""
        cut = self._blocked.get((source, target), self.world.now) <= since
        asleep = (source.alive and source.paused) or source.resumed_at >= self.world.now
        if not cut and not asleep:
            return
        for end in list(self.live.get(target, {})):
            if end.other.process is source:
                end.close(PeerLost(f"nothing heard for {self.timing.silence_s:.1f} s"))

    # ---- death ---------------------------------------------------------------------------------

    def died(self, process: Process) -> None:
        """The kernel closes what `process` had; peers that can be reached hear it."""
        for end in list(self.live.get(process, {})):
            end.drop()
            session, other = end.session, end.other
            if session.broken or not other.open:
                continue
            session.broken = True
            session.lost = [session.rng.random() < 0.5] * 2
            if self.blocked(process, other.process):
                continue  # silence: the watch of the partition finds it
            delay_s = self.timing.latency_s + session.rng.random() * self.timing.break_seen_s
            other.process.after(delay_s, other.shut, PeerLost("the peer's process ended"))
