"""Two exchanges under any order of events: the safety invariants hold at every step and at rest.

Invariants 1 to 7, 13, 16, 18, 19 and 21 of the protocol are asserted inside `handoff_world`.
"""

from __future__ import annotations

import pytest
from handoff_world import Job, Side, Sides, World
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from segue.kv.errors import ErrorCode
from segue.kv.ids import ChecksumMode, KVPoll, Role, TransferId
from segue.kv.limits import Limits

ROLES = st.sampled_from([Role.PREFILL, Role.DECODE])
INDEX = st.integers(0, 7)
#: ranks of prefill and of decode, which divide the layers among them, or hold the same ones
RANKS: list[Sides] = [
    *((1, 1), (2, 2), (1, 3), (3, 2), (3, 3), (2, 1)),
    *((1, Side(copies=2)), (2, Side(3, copies=2)), (Side(2, copies=2), Side(copies=3))),
    *((Side(cp=2), 1), (Side(2, copies=2, cp=2), 3), (Side(cp=3), Side(2, copies=2))),
]


def live(jobs: dict[object, Job], index: int) -> Job | None:
    open_jobs = [job for job in jobs.values() if not job.phases[-1].terminal]
    return open_jobs[index % len(open_jobs)] if open_jobs else None


class Handoffs(RuleBasedStateMachine):
    @initialize(
        one_sided=st.booleans(),
        sizes=st.sampled_from([(4, 4), (4, 3), (2, 8), (8, 2)]),
        seed=st.integers(0, 1000),
        small=st.booleans(),
        kv_checksum=st.sampled_from(ChecksumMode),
        ranks=st.sampled_from(RANKS),
    )
    def start(
        self,
        one_sided: bool,
        sizes: tuple[int, int],
        seed: int,
        small: bool,
        kv_checksum: ChecksumMode,
        ranks: Sides,
    ) -> None:
        limits = Limits(max_transfers=4, max_early_destinations=1) if small else Limits()
        self.world = World(
            seed,
            one_sided=one_sided,
            page_tokens=sizes,
            limits=limits,
            kv_checksum=kv_checksum,
            ranks=ranks,
        )
        self.unopened: list[tuple[Role, TransferId, int, int, float]] = []

    @rule(prompt=st.integers(1, 20), cached=st.integers(0, 20), budget=st.sampled_from([5.0, 60.0]))
    def request(self, prompt: int, cached: int, budget: float) -> None:
        """A request reaches one side now; the other one later, or never."""
        transfer = self.world.new_transfer()
        for role in Role.PREFILL, Role.DECODE:
            self.unopened.append((role, transfer, prompt, min(cached, prompt), self.world.now + budget))

    @rule(index=INDEX)
    def open(self, index: int) -> None:
        if not self.unopened:
            return
        world = self.world
        role, transfer, prompt, prefix, deadline = self.unopened.pop(index % len(self.unopened))
        node = world.prefill if role is Role.PREFILL else world.decode
        budget = deadline - world.now
        halves = node.exchange.sizes()["rooms" if role is Role.PREFILL else "receivers"]
        if budget <= 0 or halves >= world.limits.max_transfers:
            return
        if role is Role.PREFILL:
            world.open_sender(transfer, prompt, budget)
        else:
            world.open_receiver(transfer, prompt, prefix, budget)

    @rule(index=INDEX)
    def publish(self, index: int) -> None:
        job = live(self.world.decode.jobs, index)
        if job is not None:
            self.world.publish(job)

    @rule(index=INDEX, tokens=st.integers(1, 20))
    def chunk(self, index: int, tokens: int) -> None:
        job = live(self.world.prefill.jobs, index)
        if job is not None:
            self.world.send_chunk(job, tokens)

    @rule(index=INDEX, tokens=st.integers(1, 20), layers=st.integers(1, 5))
    def layers(self, index: int, tokens: int, layers: int) -> None:
        job = live(self.world.prefill.jobs, index)
        if job is not None:
            self.world.send_layers(job, tokens, layers)

    @rule(index=INDEX)
    def metadata(self, index: int) -> None:
        job = live(self.world.prefill.jobs, index)
        if job is not None:
            self.world.send_metadata(job)

    @rule(role=ROLES, index=INDEX)
    def abort(self, role: Role, index: int) -> None:
        node = self.world.prefill if role is Role.PREFILL else self.world.decode
        job = live(node.jobs, index)
        if job is not None:
            self.world.abort(node, job)

    @rule(role=ROLES, index=INDEX)
    def abort_in_flight(self, role: Role, index: int) -> None:
        """The dangerous moment: a hand-off ends while its bytes are still on their way."""
        writes = [write for write in self.world.writes if not write.landed]
        node = self.world.prefill if role is Role.PREFILL else self.world.decode
        if writes:
            job = node.jobs.get(writes[index % len(writes)].effect.transfer)
            if job is not None:
                self.world.abort(node, job)

    @rule(role=ROLES, count=st.integers(1, 6))
    def deliver(self, role: Role, count: int) -> None:
        for _ in range(count):
            self.world.deliver(role)

    @rule(role=ROLES)
    def duplicate(self, role: Role) -> None:
        self.world.deliver(role, times=2)

    @rule(index=INDEX)
    def land(self, index: int) -> None:
        self.world.land(index)

    @rule(index=INDEX)
    def finish(self, index: int) -> None:
        self.world.finish(index)

    @rule(role=ROLES, index=INDEX)
    def fence(self, role: Role, index: int) -> None:
        self.world.answer_fence(self.world.prefill if role is Role.PREFILL else self.world.decode, index)

    @rule(role=ROLES, index=INDEX)
    def checksum(self, role: Role, index: int) -> None:
        self.world.answer_checksum(self.world.prefill if role is Role.PREFILL else self.world.decode, index)

    @rule(index=INDEX)
    def flip(self, index: int) -> None:
        """Where all is covered, nothing is decoded from it: the world compares each success byte by byte."""
        if self.world.kv_checksum is ChecksumMode.FULL:
            self.world.flip(index)

    @rule()
    def cut(self) -> None:
        self.world.cut()

    @rule(index=INDEX)
    def notice(self, index: int) -> None:
        self.world.notice(index)

    @rule()
    def connect(self) -> None:
        self.world.connect()

    @rule(role=ROLES)
    def crash(self, role: Role) -> None:
        self.world.crash(role)
        self.unopened = [u for u in self.unopened if self._still_there(u)]

    def _still_there(self, entry: tuple[Role, TransferId, int, int, float]) -> bool:
        transfer = entry[1]
        return transfer.prefill == self.world.prefill.me or transfer.decode == self.world.decode.me

    @rule(seconds=st.sampled_from([0.5, 3.0, 20.0]))
    def advance(self, seconds: float) -> None:
        self.world.advance(seconds)

    @rule()
    def settle(self) -> None:
        self.world.settle()

    def teardown(self) -> None:
        self.world.come_to_rest()


Handoffs.TestCase.settings = settings(
    max_examples=80,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
TestHandoffs = Handoffs.TestCase


#: How often each thing happens in a random walk: mostly progress, sometimes a fault.
WEIGHTS = {
    "request": 4,
    "open": 8,
    "publish": 6,
    "chunk": 8,
    "metadata": 4,
    "deliver": 30,
    "duplicate": 2,
    "land": 4,
    "finish": 5,
    "fence": 5,
    "checksum": 8,
    "flip": 0.5,
    "abort": 0.5,
    "abort_in_flight": 1,
    "advance": 0.3,
    "cut": 0.2,
    "notice": 2,
    "connect": 2,
    "crash": 0.1,
}


def walk(seed: int, steps: int, faults: bool = True) -> World:
    """A weighted random walk over the same rules; `seed` replays it exactly."""
    machine = Handoffs()
    rng_sizes = [(4, 4), (4, 3), (2, 8), (8, 2)]
    kv_checksum = (
        ChecksumMode.FULL,
        ChecksumMode.SAMPLED,
        ChecksumMode.OFF,
        ChecksumMode.FULL,
        ChecksumMode.FULL,
    )[seed % 5]
    machine.start(
        bool(seed % 2),
        rng_sizes[seed // 2 % 4],
        seed,
        seed % 3 == 0,
        kv_checksum,
        RANKS[seed % 13 % len(RANKS)],
    )
    rng = machine.world.rng
    names = [
        n
        for n in WEIGHTS
        if faults or n not in {"abort", "abort_in_flight", "advance", "cut", "crash", "duplicate", "flip"}
    ]
    weights = [WEIGHTS[n] for n in names]
    for _ in range(steps):
        match rng.choices(names, weights)[0]:
            case "request":
                machine.request(rng.randint(1, 20), rng.randint(0, 20), rng.choice([5.0, 60.0]))
            case "chunk":
                machine.chunk(rng.randrange(8), rng.randint(1, 20))
            case "deliver":
                machine.deliver(rng.choice([Role.PREFILL, Role.DECODE]), rng.randint(1, 4))
            case ("duplicate" | "crash") as name:
                getattr(machine, name)(rng.choice([Role.PREFILL, Role.DECODE]))
            case ("abort" | "abort_in_flight" | "fence" | "checksum") as name:
                getattr(machine, name)(rng.choice([Role.PREFILL, Role.DECODE]), rng.randrange(8))
            case "advance":
                machine.advance(rng.choice([0.5, 3.0, 20.0]))
            case ("cut" | "connect") as name:
                getattr(machine, name)()
            case name:
                getattr(machine, name)(rng.randrange(8))
    if seed % 4:
        machine.world.work()
    machine.world.come_to_rest()
    return machine.world


@pytest.mark.parametrize("block", range(8))
def test_random_walks_keep_every_invariant(block: int) -> None:
    ends = {KVPoll.SUCCESS: 0, KVPoll.FAILED: 0}
    for seed in range(block * 15, block * 15 + 15):
        world = walk(seed, 300)
        for node in (*world.nodes(), *world.dead):
            for job in node.jobs.values():
                if job.phases[-1].terminal:
                    ends[job.phases[-1]] += 1
    assert ends[KVPoll.SUCCESS] > 20, "the walks must also reach the good end"
    assert ends[KVPoll.FAILED] > 20


@pytest.mark.parametrize("seed", range(20))
def test_without_faults_everything_that_was_asked_of_both_sides_succeeds(seed: int) -> None:
    world = walk(4 * seed + 1 + seed % 2, 300, faults=False)
    both = set(world.prefill.jobs) & set(world.decode.jobs)
    jobs = [node.jobs[t] for t in both for node in world.nodes()]
    refused = [job for job in jobs if job.errors and job.errors[0].code is ErrorCode.OUT_OF_CAPACITY]
    assert all(job.phases[-1] is KVPoll.SUCCESS for job in jobs if job not in refused)
    assert len(refused) <= 2 * world.prefill.exchange.counters["early_refused"]
    assert len(jobs) >= 4
