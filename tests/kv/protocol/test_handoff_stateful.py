"""Two exchanges under any order of events: the safety invariants hold at every step and at rest.

Invariants 1 to 7, 13, 16, 18, 19 and 21 of the protocol are asserted inside `handoff_world`.
"""

from __future__ import annotations

import pytest
from handoff_world import Job, Node, Side, Sides, World

from segue.kv.errors import ErrorCode
from segue.kv.ids import ChecksumMode, KVPoll, Role, TransferId
from segue.kv.limits import Limits

#: ranks of prefill and of decode, which divide the layers among them, or hold the same ones
RANKS: list[Sides] = [
    *((1, 1), (2, 2), (1, 3), (3, 2), (3, 3), (2, 1)),
    *((1, Side(copies=2)), (2, Side(3, copies=2)), (Side(2, copies=2), Side(copies=3))),
    *((Side(cp=2), 1), (Side(2, copies=2, cp=2), 3), (Side(cp=3), Side(2, copies=2))),
]
FULL = ChecksumMode.FULL
MODES = (FULL, ChecksumMode.SAMPLED, ChecksumMode.OFF, FULL, FULL)
#: How often each thing happens: mostly progress, sometimes a fault.
PROGRESS = {
    "request": 4.0,
    "open": 8.0,
    "publish": 6.0,
    "chunk": 8.0,
    "layers": 2.0,
    "metadata": 4.0,
    "deliver": 30.0,
    "land": 4.0,
    "finish": 5.0,
    "fence": 5.0,
    "checksum": 8.0,
    "notice": 2.0,
    "connect": 2.0,
}
FAULTS = {
    "duplicate": 2.0,
    "flip": 0.5,
    "abort": 0.5,
    "abort_in_flight": 1.0,
    "advance": 0.3,
    "cut": 0.2,
    "crash": 0.1,
}


class Walk:
    """A random walk over what may happen; `seed` replays it exactly."""

    def __init__(self, seed: int) -> None:
        self.world = World(
            seed,
            one_sided=bool(seed % 2),
            page_tokens=((4, 4), (4, 3), (2, 8), (8, 2))[seed // 2 % 4],
            limits=Limits() if seed % 3 else Limits(max_transfers=4, max_early_destinations=1),
            kv_checksum=MODES[seed % 5],
            ranks=RANKS[seed % 13 % len(RANKS)],
        )
        self.rng = self.world.rng
        self.unopened: list[tuple[Role, TransferId, int, int, float]] = []

    def go(self, steps: int, weights: dict[str, float]) -> None:
        for name in self.rng.choices(list(weights), list(weights.values()), k=steps):
            getattr(self, name)()

    def index(self) -> int:
        return self.rng.randrange(8)

    def node(self) -> Node:
        return self.rng.choice(self.world.nodes())

    def live(self, node: Node) -> Job | None:
        jobs = [job for job in node.jobs.values() if not job.phases[-1].terminal]
        return self.rng.choice(jobs) if jobs else None

    # ---- what the engines do ---------------------------------------------------------------------

    def request(self) -> None:
        """A request reaches one side now; the other one later, or never."""
        transfer, prompt = self.world.new_transfer(), self.rng.randint(1, 20)
        cached, until = self.rng.randint(0, prompt), self.world.now + self.rng.choice([5.0, 60.0])
        self.unopened += [(role, transfer, prompt, cached, until) for role in (Role.PREFILL, Role.DECODE)]

    def open(self) -> None:
        if not self.unopened:
            return
        world = self.world
        role, transfer, prompt, prefix, until = self.unopened.pop(self.rng.randrange(len(self.unopened)))
        node, budget_s = world.nodes()[role is Role.DECODE], until - world.now
        halves = node.exchange.sizes()["rooms" if role is Role.PREFILL else "receivers"]
        if budget_s <= 0 or halves >= world.limits.max_transfers or not world.fits(role, transfer, prompt):
            return
        if role is Role.PREFILL:
            world.open_sender(transfer, prompt, budget_s)
        else:
            world.open_receiver(transfer, prompt, prefix, budget_s)

    def publish(self) -> None:
        if (job := self.live(self.world.decode)) is not None:
            self.world.publish(job)

    def chunk(self) -> None:
        if (job := self.live(self.world.prefill)) is not None:
            self.world.send_chunk(job, self.rng.randint(1, 20))

    def layers(self) -> None:
        if (job := self.live(self.world.prefill)) is not None:
            self.world.send_layers(job, self.rng.randint(1, 20), self.rng.randint(1, 5))

    def metadata(self) -> None:
        if (job := self.live(self.world.prefill)) is not None:
            self.world.send_metadata(job)

    def abort(self) -> None:
        node = self.node()
        if (job := self.live(node)) is not None:
            self.world.abort(node, job)

    def abort_in_flight(self) -> None:
        """The dangerous moment: a hand-off ends while its bytes are still on their way."""
        node, writes = self.node(), [write for write in self.world.writes if not write.landed]
        if writes and (job := node.jobs.get(self.rng.choice(writes).effect.transfer)) is not None:
            self.world.abort(node, job)

    # ---- the network, the ranks and the clock ------------------------------------------------------

    def deliver(self) -> None:
        role = self.node().role
        for _ in range(self.rng.randint(1, 4)):
            self.world.deliver(role)

    def duplicate(self) -> None:
        self.world.deliver(self.node().role, times=2)

    def land(self) -> None:
        self.world.land(self.index())

    def finish(self) -> None:
        self.world.finish(self.index())

    def fence(self) -> None:
        self.world.answer_fence(self.node(), self.index())

    def checksum(self) -> None:
        self.world.answer_checksum(self.node(), self.index())

    def flip(self) -> None:
        """Where all is covered, nothing is decoded from it: the world compares each success byte by byte."""
        if self.world.kv_checksum is FULL:
            self.world.flip(self.index())

    def cut(self) -> None:
        self.world.cut()

    def notice(self) -> None:
        self.world.notice(self.index())

    def connect(self) -> None:
        self.world.connect()

    def crash(self) -> None:
        self.world.crash(self.node().role)
        leaders = {node.me for node in self.world.nodes()}
        self.unopened = [entry for entry in self.unopened if {entry[1].prefill, entry[1].decode} & leaders]

    def advance(self) -> None:
        self.world.advance(self.rng.choice([0.5, 3.0, 20.0]))


def walked(seed: int, weights: dict[str, float]) -> World:
    """The world at rest after such a walk."""
    walk = Walk(seed)
    walk.go(300, weights)
    if seed % 4:
        walk.world.work()
    walk.world.come_to_rest()
    return walk.world


@pytest.mark.parametrize("block", range(8))
def test_random_walks_keep_every_invariant(block: int) -> None:
    ends = {KVPoll.SUCCESS: 0, KVPoll.FAILED: 0}
    for seed in range(block * 20, block * 20 + 20):
        world = walked(seed, {**PROGRESS, **FAULTS})
        for node in (*world.nodes(), *world.dead):
            for job in node.jobs.values():
                if job.phases[-1].terminal:
                    ends[job.phases[-1]] += 1
    assert ends[KVPoll.SUCCESS] > 20, "the walks must also reach the good end"
    assert ends[KVPoll.FAILED] > 20


@pytest.mark.parametrize("seed", range(20))
def test_without_faults_everything_that_was_asked_of_both_sides_succeeds(seed: int) -> None:
    world = walked(4 * seed + 1 + seed % 2, PROGRESS)
    both = set(world.prefill.jobs) & set(world.decode.jobs)
    jobs = [node.jobs[t] for t in both for node in world.nodes()]
    refused = [job for job in jobs if job.errors and job.errors[0].code is ErrorCode.OUT_OF_CAPACITY]
    assert all(job.phases[-1] is KVPoll.SUCCESS for job in jobs if job not in refused)
    assert len(refused) <= 2 * world.prefill.exchange.counters["early_refused"]
    assert len(jobs) >= 4
