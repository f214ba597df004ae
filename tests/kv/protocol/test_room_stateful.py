"""One prefill leader, two decode leaders and their words in any order: the rules of rooms hold at every step.

The transport is one-sided: nothing at decode stops a write, so what prefill says must be true. After each
step there is one live binding for each room, of a decode that knows the claim; each half ends once and is
released once; no write lands in pages that were released, none is in flight after `Gone`, `Moved` or
`Drained`; a room without retention is committed by one live decode at most; and the tables are whole.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

import pytest
from handoff_world import peer_up, pool_spec
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from segue.kv.errors import AbortedByClient, OutOfCapacity, PeerLost, SegueError
from segue.kv.ids import Incarnation, KVPoll, LeaderId, Role, RoomKey, Span, TransferId
from segue.kv.limits import Limits
from segue.kv.protocol import events
from segue.kv.protocol.exchange import Exchange
from segue.kv.protocol.messages import Accepted, Declined, Drained, Gone, HandoffMessage, Moved

SPEC = pool_spec(64, 4)
PROMPT = 10
SOURCE = (0, 1, 2)
CLAIM = b"the prompt"
LEFT = AbortedByClient("the client left").info
LIMITS = Limits(max_early_destinations=4, early_share=0.5, peer_silence_s=1.0)
TOKEN_BYTES = 32


@dataclass
class Half:
    """An engine's record of its half; decode's has its pages."""

    phases: list[KVPoll] = field(default_factory=list)
    releases: int = 0
    #: prefill
    retain_s: float | None = None
    sent: int = 0
    layers: int = 0
    finished: bool = False
    #: decode
    prefix: int = 0
    wrong: bool = False
    published: bool = False
    landed: int = 0

    @property
    def over(self) -> bool:
        return bool(self.phases) and self.phases[-1].terminal


class Node:
    """A leader: its exchange, the halves of its engine, the fences that its rank has not answered."""

    def __init__(self, role: Role, letter: str, born: int) -> None:
        self.role = role
        self.me = LeaderId(Incarnation(f"{letter}{born:07d}".ljust(32, "0")))
        self.exchange = Exchange(role, self.me, f"{role.value} {letter}", LIMITS, "fake")
        self.halves: dict[RoomKey, Half] = {}
        self.fences: list[events.Fence] = []
        self.up = False


class World:
    def __init__(self) -> None:
        self.now = 0.0
        self.born = 0
        self.prefill = Node(Role.PREFILL, "p", 0)
        self.decodes = [self.new_decode(), self.new_decode()]
        #: messages under way, by who hears them and whose word it is
        self.queues: dict[tuple[LeaderId, LeaderId], deque[HandoffMessage]] = {}
        self.notices: list[tuple[Node, events.PeerDown]] = []
        self.writes: list[events.PostWrite] = []
        self.silent: set[TransferId] = set()
        #: what prefill has heard last of each decode, and when
        self.heard: dict[LeaderId, deque[tuple[float, HandoffMessage]]] = {}
        self.ends: Counter[tuple[Role, KVPoll]] = Counter()
        for index in range(2):
            self.connect(index)

    def new_decode(self) -> Node:
        self.born += 1
        return Node(Role.DECODE, "d", self.born)

    def node(self, leader: LeaderId) -> Node | None:
        return next((n for n in (self.prefill, *self.decodes) if n.me == leader), None)

    # ---- events and effects ----------------------------------------------------------------------

    def tell(self, node: Node, event: events.Event) -> None:
        for effect in node.exchange.handle(event, self.now):
            self._look(node, effect)
        self.check()

    def _look(self, node: Node, effect: events.Effect) -> None:
        match effect:
            case events.Send():
                self._sent(node, effect)
            case events.PostWrite():
                assert effect.transfer not in self.silent, "written after it was said that nothing is"
                self.writes.append(effect)
            case events.Fence():
                node.fences.append(effect)
            case events.Grant():
                self.tell(node, events.Granted(effect.transfer, effect.rank))
            case events.Phase():
                self._phase(node, effect)
            case events.Release():
                half = node.halves[effect.key]
                half.releases += 1
                assert half.releases == 1, "released twice"
                assert half.over, "released before its end"
                if node is self.prefill:
                    reads = [w for w in self.writes if w.transfer.sent_as == effect.key]
                    assert not reads, "released while a write reads the pages"

    def _sent(self, node: Node, effect: events.Send) -> None:
        message = effect.message
        if node is self.prefill and isinstance(message, (Gone, Moved, Drained)):
            running = [w for w in self.writes if w.transfer == message.transfer]
            assert not running, f"{type(message).__name__} while writes are in flight"
            self.silent.add(message.transfer)
        other = self.node(effect.peer)
        if isinstance(message, Accepted) and other is not None:
            assert not other.halves[message.transfer.received_as].wrong, "accepted with another claim"
        decode = other if node is self.prefill else node
        if other is not None and decode is not None and decode.up:
            self.queues[other.me, node.me].append(message)

    def _phase(self, node: Node, effect: events.Phase) -> None:
        half = node.halves[effect.key]
        assert not half.over, "a phase after the last one"
        assert not half.phases or effect.phase is KVPoll.FAILED or effect.phase > half.phases[-1]
        half.phases.append(effect.phase)
        if effect.phase.terminal:
            self.ends[node.role, effect.phase] += 1
        if effect.phase is KVPoll.SUCCESS and node is not self.prefill:
            assert effect.metadata == str(effect.key.room).encode()
            assert half.landed == (PROMPT - half.prefix) * TOKEN_BYTES, "success without all bytes"

    def check(self) -> None:
        for node in (self.prefill, *self.decodes):
            node.exchange.check_integrity()
        live = Counter(t.sent_as for t, m in self.prefill.exchange.machines.items() if not m.phase.terminal)
        assert all(count == 1 for count in live.values()), "two live bindings of one room"
        committed = Counter(
            key.room
            for decode in self.decodes
            for key, half in decode.halves.items()
            if half.phases[-1:] == [KVPoll.SUCCESS]
        )
        for key, half in self.prefill.halves.items():
            assert half.retain_s is not None or committed[key.room] <= 1, "committed twice"

    # ---- what happens ----------------------------------------------------------------------------

    def connect(self, index: int) -> None:
        decode = self.decodes[index]
        if decode.up or any(decode.me in (n.me, e.peer) for n, e in self.notices):
            return
        decode.up = True
        both = ((self.prefill, decode), (decode, self.prefill))
        self.queues |= {(to.me, of.me): deque() for to, of in both}
        for to, of in both:
            self.tell(to, peer_up(of.me, SPEC))

    def cut(self, index: int) -> None:
        decode = self.decodes[index]
        if not decode.up:
            return
        decode.up = False
        for to, of in ((self.prefill, decode), (decode, self.prefill)):
            self.queues.pop((to.me, of.me))
            self.notices.append((to, events.PeerDown(of.me, PeerLost("cut").info)))

    def die(self, index: int) -> None:
        """A decode process dies, the kernel says so, and another one starts."""
        dead = self.decodes[index]
        self.cut(index)
        self.notices = [n for n in self.notices if n[0] is not dead and n[1].peer != dead.me]
        self.notices.append((self.prefill, events.PeerDown(dead.me, PeerLost("dead").info, dead=True)))
        self.decodes[index] = self.new_decode()

    def notice(self, index: int) -> bool:
        if not self.notices:
            return False
        node, event = self.notices.pop(index % len(self.notices))
        self.tell(node, event)
        return True

    def deliver(self, index: int, to_prefill: bool) -> bool:
        decode = self.decodes[index]
        to, of = (self.prefill, decode) if to_prefill else (decode, self.prefill)
        queue = self.queues.get((to.me, of.me))
        if not queue:
            return False
        message = queue.popleft()
        if to_prefill:
            self.heard.setdefault(of.me, deque(maxlen=8)).append((self.now, message))
        self.tell(to, events.Received(of.me, message))
        return True

    def repeat(self, index: int, which: int) -> None:
        """A word that prefill has just heard comes once more."""
        decode = self.decodes[index]
        heard = [m for at, m in self.heard.get(decode.me, ()) if self.now - at < LIMITS.peer_silence_s]
        if decode.up and heard and not any(decode.me == event.peer for _, event in self.notices):
            self.tell(self.prefill, events.Received(decode.me, heard[which % len(heard)]))

    def land(self, index: int) -> bool:
        """A write lands, whatever decode thinks by now."""
        if not self.writes:
            return False
        write = self.writes.pop(index % len(self.writes))
        decode = self.node(write.transfer.decode)
        if decode is not None:
            half = decode.halves[write.transfer.received_as]
            assert not half.releases, "a write landed in pages that were released"
            half.landed += sum(block.nbytes for block in write.blocks)
        self.tell(self.prefill, events.WriteLanded(write.transfer, write.rank, write.tag, 0.1))
        return True

    def fence(self, index: int) -> bool:
        """A rank answers a fence; prefill's only when none of its writes is in flight."""
        for node in (self.prefill, *self.decodes):
            running = {w.transfer for w in self.writes} if node is self.prefill else set()
            ready = [f for f in node.fences if f.transfer not in running]
            if ready:
                fence = ready[index % len(ready)]
                node.fences.remove(fence)
                self.tell(node, events.FenceDone(fence.transfer, fence.rank, fence.partner, False))
                return True
        return False

    def advance(self, seconds: float) -> None:
        self.now += seconds
        for node in (self.prefill, *self.decodes):
            self.tell(node, events.Tick())

    def settle(self, rng: random.Random) -> None:
        steps: list[Any] = [lambda i=i, p=p: self.deliver(i, p) for i in (0, 1) for p in (True, False)]
        steps += [lambda: self.land(rng.randrange(8)), lambda: self.fence(0), lambda: self.notice(0)]
        moved = True
        while moved:
            rng.shuffle(steps)
            moved = any(step() for step in steps)

    def come_to_rest(self, rng: random.Random) -> None:
        """Faults stop; then nothing may be left anywhere."""
        for _ in range(2):
            self.settle(rng)
            self.connect(0)
            self.connect(1)
            self.settle(rng)
            self.advance(300.0)
        self.advance(2 * LIMITS.request_budget_s)
        self.settle(rng)
        for node in (self.prefill, *self.decodes):
            for key, half in node.halves.items():
                assert half.over, (key, half)
                assert half.releases == 1, (key, half)
            sizes = node.exchange.sizes()
            sizes.pop("peers")
            assert not any(sizes.values()), sizes
            assert node.exchange.counters["internal_errors"] == 0


WHICH = st.integers(0, 1)
INDEX = st.integers(0, 7)


class Rooms(RuleBasedStateMachine):
    @initialize(seed=st.integers(0, 1000))
    def start(self, seed: int) -> None:
        self.world = World()
        self.rng = random.Random(seed)
        self.rooms = 0
        self.attempts: Counter[int] = Counter()

    @property
    def prefill(self) -> Node:
        return self.world.prefill

    def room(self, index: int) -> int:
        """One of the latest rooms."""
        return max(1, self.rooms - index % 3)

    def half(self, node: Node, index: int) -> tuple[RoomKey, Half] | None:
        live = [(key, half) for key, half in node.halves.items() if not half.over]
        return live[index % len(live)] if live else None

    @rule(
        which=WHICH,
        placed=st.booleans(),
        retain_s=st.sampled_from([None, None, 0.0, 30.0]),
        budget=st.sampled_from([5.0, 60.0]),
    )
    def expect(self, which: int, placed: bool, retain_s: float | None, budget: float) -> None:
        """Prefill's engine opens the next room, or the one that decode has spoken of already."""
        number = self.room(0)
        if not self.rooms or RoomKey(number) in self.prefill.halves:
            self.rooms = number = self.rooms + 1
        key = RoomKey(number)
        self.prefill.halves[key] = half = Half(retain_s=retain_s)
        event = events.ExpectRoom(
            key=key,
            prompt_tokens=PROMPT,
            deadline=self.world.now + budget,
            claim=CLAIM,
            decode=self.world.decodes[which].me if placed else None,
            retain_s=retain_s,
        )
        try:
            self.world.tell(self.prefill, event)
        except SegueError:
            assert not half.phases
            del self.prefill.halves[key]

    @rule(
        which=WHICH,
        index=INDEX,
        replaces=st.booleans(),
        wrong=st.integers(0, 9),
        prefix=st.sampled_from([0, 4, 5, PROMPT]),
    )
    def receive(self, which: int, index: int, replaces: bool, wrong: int, prefix: int) -> None:
        """The next attempt at a room that is open, or at one that is still to come."""
        if index == 0 or not self.rooms:
            self.rooms += 1
        decode, number = self.world.decodes[which], self.room(index)
        attempt = self.attempts[number]
        self.attempts[number] += 1
        key = RoomKey(number, attempt=attempt)
        decode.halves[key] = Half(prefix=prefix, wrong=wrong == 0)
        event = events.OpenReceiver(
            key=key,
            prefill=self.prefill.me,
            prompt_tokens=PROMPT,
            deadline=self.world.now + 40.0,
            claim=b"another" if wrong == 0 else CLAIM,
            replaces=attempt - 1 if replaces and attempt else None,
        )
        self.world.tell(decode, event)

    @rule(which=WHICH, index=INDEX)
    def publish(self, which: int, index: int) -> None:
        decode = self.world.decodes[which]
        if (found := self.half(decode, index)) is None:
            return
        key, half = found
        if half.phases[-1] is KVPoll.WAITING_FOR_INPUT and not half.published:
            half.published = True
            pages = tuple(range(half.prefix // 4, 3))
            self.world.tell(decode, events.Publish(key, pages, half.prefix))

    @rule(index=INDEX, tokens=st.integers(1, PROMPT), partial=st.booleans())
    def chunk(self, index: int, tokens: int, partial: bool) -> None:
        if (found := self.half(self.prefill, index)) is None:
            return
        key, half = found
        if half.sent == PROMPT or (partial and half.layers):
            return
        end = half.layers or min(PROMPT, half.sent + tokens)
        span = Span(half.sent, end)
        half.layers = end if partial else 0
        half.sent = half.sent if partial else end
        self.world.tell(self.prefill, events.SendChunk(key, span, SOURCE, layers=1 if partial else None))

    @rule(index=INDEX)
    def finish(self, index: int) -> None:
        found = self.half(self.prefill, index)
        if found is not None and not found[1].finished:
            found[1].finished = True
            self.world.tell(self.prefill, events.SendMetadata(found[0], str(found[0].room).encode()))

    @rule(index=INDEX, which=WHICH)
    def allow(self, index: int, which: int) -> None:
        """The placer's word about the newest attempt, or the one that comes next."""
        found = self.half(self.prefill, index)
        if found is not None:
            key, by = found[0], max(1, self.attempts[found[0].room] - index % 2)
            event = events.AllowReplacement(key, by - 1, by, self.world.decodes[which].me)
            self.world.tell(self.prefill, event)

    @rule(index=INDEX, evict=st.booleans())
    def end(self, index: int, evict: bool) -> None:
        if (found := self.half(self.prefill, index)) is not None:
            error = OutOfCapacity("full").info if evict else LEFT
            self.world.tell(self.prefill, events.EndRoom(found[0], error, unbound_s=0.0 if evict else None))

    @rule(which=WHICH, index=INDEX)
    def leave(self, which: int, index: int) -> None:
        decode = self.world.decodes[which]
        if (found := self.half(decode, index)) is not None:
            self.world.tell(decode, events.EndRoom(found[0], LEFT))

    @rule(which=WHICH, index=INDEX, right=st.booleans())
    def decline(self, which: int, index: int, right: bool) -> None:
        """Also without a receiver, and with a claim that is wrong."""
        decode, number = self.world.decodes[which], self.room(index)
        if self.rooms and decode.up:
            transfer = TransferId(number, self.attempts[number], self.prefill.me, decode.me)
            word = Declined(transfer, LEFT, CLAIM if right else b"another")
            self.world.queues[self.prefill.me, decode.me].append(word)

    @rule(which=WHICH, to_prefill=st.booleans(), count=st.integers(1, 5))
    def deliver(self, which: int, to_prefill: bool, count: int) -> None:
        for _ in range(count):
            self.world.deliver(which, to_prefill)

    @rule(which=WHICH, index=INDEX)
    def repeat(self, which: int, index: int) -> None:
        self.world.repeat(which, index)

    @rule(index=INDEX)
    def land(self, index: int) -> None:
        self.world.land(index)

    @rule(index=INDEX)
    def fence(self, index: int) -> None:
        self.world.fence(index)

    @rule(index=INDEX)
    def notice(self, index: int) -> None:
        self.world.notice(index)

    @rule(which=WHICH)
    def cut(self, which: int) -> None:
        self.world.cut(which)

    @rule(which=WHICH)
    def connect(self, which: int) -> None:
        self.world.connect(which)

    @rule(which=WHICH)
    def die(self, which: int) -> None:
        self.world.die(which)

    @rule(seconds=st.sampled_from([0.5, 3.0, 20.0]))
    def advance(self, seconds: float) -> None:
        self.world.advance(seconds)

    @rule()
    def settle(self) -> None:
        self.world.settle(self.rng)

    def teardown(self) -> None:
        self.world.come_to_rest(self.rng)


Rooms.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
TestRooms = Rooms.TestCase

#: How often each thing happens in a random walk: mostly progress, sometimes a fault.
WEIGHTS = {
    "expect": 6,
    "receive": 10,
    "publish": 14,
    "chunk": 14,
    "finish": 6,
    "allow": 2,
    "end": 0.5,
    "leave": 0.8,
    "decline": 0.3,
    "deliver": 40,
    "repeat": 4,
    "land": 10,
    "fence": 8,
    "notice": 3,
    "cut": 0.3,
    "connect": 3,
    "die": 0.1,
    "advance": 0.5,
}


def walk(seed: int, steps: int) -> World:
    """A weighted random walk over the same rules; `seed` replays it exactly."""
    machine, rng = Rooms(), random.Random(seed)
    machine.start(seed)
    names, weights = list(WEIGHTS), list(WEIGHTS.values())
    for _ in range(steps):
        which, index, coin = rng.randrange(2), rng.randrange(8), rng.random() < 0.5
        match rng.choices(names, weights)[0]:
            case "expect":
                machine.expect(which, coin, rng.choice([0.0, 30.0]), rng.choice([5.0, 60.0, 60.0]))
            case "receive":
                machine.receive(which, index, coin, rng.randrange(10), rng.choice([0, 4, 5, PROMPT]))
            case "chunk":
                machine.chunk(index, rng.randint(1, PROMPT), rng.random() < 0.2)
            case "allow":
                machine.allow(index, which)
            case "end":
                machine.end(index, coin)
            case "decline":
                machine.decline(which, index, coin)
            case "deliver":
                machine.deliver(which, coin, rng.randint(1, 4))
            case ("publish" | "leave" | "repeat") as name:
                getattr(machine, name)(which, index)
            case ("cut" | "connect" | "die") as name:
                getattr(machine, name)(which)
            case "advance":
                machine.advance(rng.choice([0.5, 3.0]))
            case name:
                getattr(machine, name)(index)
    machine.world.come_to_rest(rng)
    return machine.world


@pytest.mark.parametrize("block", range(6))
def test_random_walks_keep_every_rule(block: int) -> None:
    ends: Counter[tuple[Role, KVPoll]] = Counter()
    for seed in range(block * 12, block * 12 + 12):
        ends += walk(seed, 300).ends
    for role in (Role.PREFILL, Role.DECODE):
        for phase in (KVPoll.SUCCESS, KVPoll.FAILED):
            assert ends[role, phase] > 10, f"the walks must reach {phase.name} on {role}, too: {ends}"
