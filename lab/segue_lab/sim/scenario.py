"""A scenario: everything that a seed decides before anything runs, as lists that can be shortened."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from msgspec import structs

from segue.engine.request import SamplingParams
from segue.kv.ids import ChecksumMode, Role
from segue.kv.protocol.room_ranks import FAIL_ON_CONFLICT, FOLLOW_BOOTSTRAP_ROOM, REDIRECT_ON_CONFLICT
from segue.server.balance.policies import POLICY_NAMES
from segue_lab.sim.clients import Wanted
from segue_lab.sim.node_spec import VOCAB, NodeSpec
from segue_lab.sim.room_plans import RoomPlan, draw_rooms
from segue_lab.sim.sim_engine import reference
from segue_lab.sim.splits import Splits, draw_splits
from segue_lab.sim.timing import Timing
from segue_lab.sim.vocabulary import (
    AT_THE_DOORS,
    BAD,
    DATA,
    FAULTS,
    FEATURES,
    LATER,
    NEWEST,
    ODD,
    RANKS,
    RARE,
    STEERED,
    UNMET,
)

#: One deployment in five offers these instead of `shm` and `tcp`.
STAGED = (("staged_tcp",), ("staged_tcp",), ("staged_shm",), ("staged_shm",), ("staged_shm", "staged_tcp"))


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault: what, where (`node` and, for some, `other`, both names), when and how long."""

    name: str
    kind: str
    at: float
    node: str
    other: str = ""
    seconds: float = 0.0
    amount: int = 0
    trigger: str = ""


@dataclass(slots=True)
class Scenario:
    """A scenario, drawn from a seed. `timing` and `nodes` are small; requests and faults can be left out."""

    seed: int
    features: frozenset[str]
    transports: tuple[str, ...]
    #: how the ranks of each leader divide the model
    splits: Splits
    #: sequences keep a state beside their KV
    state: bool
    #: and each rank is a worker, asked over a channel
    workers: bool
    #: some instances compute only the checksum that devices have
    words: bool
    signed: bool
    policy: str
    fronts: int
    timing: Timing
    nodes: list[NodeSpec]
    requests: list[Wanted]
    faults: list[Fault] = field(default_factory=list)
    rooms: list[RoomPlan] = field(default_factory=list)
    busy_s: float = 1.0
    #: frontends that do not cancel at a deadline: instances must end such requests themselves
    forgetful: bool = False
    max_queue: int = 64
    max_early: int = 64
    #: how often in a row a frontend places requests again, and how long one waits for somebody to serve it
    retry_budget: float = 10.0
    no_replica_wait_s: float = 2.0
    #: it runs on, with nothing to do, until each watcher of the registry must know what is true
    long_rest: bool = False
    #: how much may wait in a session for a peer that does not read
    backlog_bytes: int = 2**26

    def only(self, names: frozenset[str]) -> Scenario:
        """The same scenario with no other requests and faults than these."""
        return replace(
            self,
            requests=[r for r in self.requests if r.name in names],
            faults=[f for f in self.faults if f.name in names],
            rooms=[r for r in self.rooms if r.name in names],
        )

    @property
    def names(self) -> list[str]:
        """The names of everything that can be left out."""
        return [f.name for f in self.faults] + [r.name for r in self.rooms] + [r.name for r in self.requests]


def make_scenario(seed: int) -> Scenario:
    """The scenario of `seed`; always the same one."""
    rng, ranking = random.Random(f"segue {seed}"), random.Random(f"segue ranks {seed}")
    share = rng.choice((0.0, 0.1, 0.25, 0.25, 0.5))
    features = frozenset(f for f in FEATURES if rng.random() < share)
    splits, workers = draw_splits(seed, ranking.choice((1, 1, 1, 2)) > 1), ranking.random() < 0.3
    if splits.several and ranking.random() < 0.7:  # each rank vouches for its own bytes
        features |= {"bit flip"}
    if workers and ranking.random() < 0.7:
        features |= {"rank lost"}
    timing = Timing(
        latency_s=rng.choice((0.0001, 0.0005, 0.002)),
        hop_s=rng.choice((0.00002, 0.0002, 0.002)),
        step_s=rng.choice((0.0005, 0.002, 0.005)),
        slice_s=rng.choice((0.0001, 0.001, 0.004)),
        link_bytes_s=rng.choice((2e5, 2e6, 2e7)),
        break_seen_s=rng.choice((0.001, 0.02, 0.2)),
    )
    nodes = _with_leaders(random.Random(f"segue leaders {seed}"), _nodes(rng, features))
    requests = rng.choice((30, 60, 60, 120, 200))
    gap_s = rng.choice((0.0005, 0.002, 0.005, 0.02))
    busy_s = requests * gap_s + 0.05
    scenario = Scenario(
        seed=seed,
        features=features,
        splits=splits,
        state=not splits.several and random.Random(f"segue state {seed}").random() < 0.35,
        workers=workers,
        words=random.Random(f"segue words {seed}").random() < 0.15,
        transports=("shm",) if rng.random() < 0.6 else ("tcp",),
        signed=rng.random() < 0.5,
        policy=rng.choice(POLICY_NAMES),
        fronts=rng.choice((1, 1, 2, 3)),
        timing=timing,
        nodes=nodes,
        requests=[],
        busy_s=busy_s,
        forgetful="short deadline" in features and rng.random() < 0.5,
        long_rest=random.Random(f"segue rest {seed}").random() < 0.25,
        max_queue=rng.choice((16, 64, 256)) if "small pools" in features else 512,
        max_early=rng.choice((2, 8, 64)) if "small pools" in features else 1024,
    )
    scenario.requests = _requests(rng, scenario, requests, gap_s)
    scenario.faults = _faults(rng, scenario)
    more = random.Random(f"segue later {seed}")
    scenario.features |= frozenset(f for f in LATER if more.random() < share)
    later = [f for f in LATER if f in scenario.features]
    scenario.faults += _faults(more, scenario, later, len(scenario.faults))
    doors = random.Random(f"segue at the doors {seed}")
    scenario.features |= frozenset(f for f in AT_THE_DOORS if doors.random() < share)
    if "session backlog" in scenario.features:
        # A leader says of each hand-off at once how it has ended (`Limits.max_session_backlog_bytes`).
        scenario.backlog_bytes = max(doors.choice((2**15, 2**16)), 2**10 * len(scenario.requests))
    found = [f for f in AT_THE_DOORS if f in scenario.features]
    scenario.faults += _faults(doors, scenario, found, len(scenario.faults))
    newest = random.Random(f"segue newest {seed}")
    scenario.features |= frozenset(f for f in NEWEST if newest.random() < share)
    found = [f for f in NEWEST if f in scenario.features]
    if "tight pools" in found:
        _tighten(newest, scenario)
    if "endings" in found:
        _vary_endings(newest, scenario)
    if "unequal budgets" in found:
        _vary_budgets(newest, scenario)
    scenario.faults += _faults(newest, scenario, found, len(scenario.faults))
    data = random.Random(f"segue data {seed}")
    scenario.features |= frozenset(f for f in DATA if data.random() < share)
    of_data = [f for f in DATA if f in scenario.features]
    scenario.faults += _faults(data, scenario, of_data, len(scenario.faults))
    fleet = random.Random(f"segue fleet {seed}")
    scenario.retry_budget = fleet.choice((10.0, 1e6, 1e6))
    scenario.no_replica_wait_s = fleet.choice((2.0, 20.0, 20.0))
    rare = random.Random(f"segue rare {seed}")
    scenario.features |= frozenset(f for f in RARE if rare.random() < share)
    found = [f for f in RARE if f in scenario.features]
    scenario.faults += _faults(rare, scenario, found, len(scenario.faults))
    unmet = random.Random(f"segue unmet {seed}")
    scenario.features |= frozenset(f for f in UNMET if unmet.random() < share)
    if "two transports" in scenario.features:
        scenario.transports = ("shm", "tcp")
    staged = random.Random(f"segue staged {seed}")
    if staged.random() < 0.2:
        scenario.transports = staged.choice(STAGED)
    found = [f for f in UNMET if f in scenario.features]
    scenario.faults += _faults(unmet, scenario, found, len(scenario.faults))
    orders = random.Random(f"segue orders {seed}")
    if splits.several:
        scenario.features |= frozenset(f for f in RANKS if orders.random() < 0.4)
    found = [f for f in RANKS if f in scenario.features]
    scenario.faults += _faults(orders, scenario, found, len(scenario.faults))
    _vary_conflicts(orders, scenario)
    steered = random.Random(f"segue steered {seed}")
    scenario.features |= frozenset(f for f in STEERED if steered.random() < share)
    found = [f for f in STEERED if f in scenario.features]
    scenario.faults += _faults(steered, scenario, found, len(scenario.faults))
    _compute_at_decode(random.Random(f"segue local {seed}"), scenario)
    _vary_order(random.Random(f"segue order {seed}"), scenario)
    if not splits.several and random.Random(f"segue layers {seed}").random() < 0.5:
        scenario.nodes = [replace(node, send_layers=node.role is Role.PREFILL) for node in scenario.nodes]
    unplaced = random.Random(f"segue rooms {seed}")
    several = any(node.dp_size > 1 for node in scenario.nodes)
    share = 0.9 if several else 0.4
    apart = scenario.state or "tight pools" in scenario.features
    if scenario.features and not apart and unplaced.random() < share:
        scenario.features |= {"unplaced rooms"}
        scenario.rooms = draw_rooms(unplaced, scenario.nodes, scenario.busy_s)
    return scenario


def _vary_order(rng: random.Random, scenario: Scenario) -> None:
    """In half of the deployments requests have priorities and tenants; in most of these most are urgent."""
    if rng.random() < 0.5:
        return
    urgent = rng.choice((0.5, 0.9, 0.97))
    for wanted in scenario.requests:
        wanted.priority = rng.choice((-2, -1)) if rng.random() < urgent else rng.choice((0, 3))
        wanted.tenant = rng.choice(("", "a", "a", "a", "b"))


def _compute_at_decode(rng: random.Random, scenario: Scenario) -> None:
    """In a quarter of the deployments some decode instances compute prompts themselves."""
    if rng.random() < 0.75:
        return
    chosen = {node.instance: rng.choice((None, -1, 0, 4, 12, 512)) for node in scenario.nodes}
    scenario.nodes = [
        replace(node, local_tokens=chosen[node.instance]) if node.role is Role.DECODE else node
        for node in scenario.nodes
    ]


def _vary_conflicts(rng: random.Random, scenario: Scenario) -> None:
    """Half of the deployments of instances with several leaders ask the registry for every rank, or for that
    of a client that wants it; and some of their prefill instances let a conflict of ranks fail."""
    if all(node.dp_size == 1 for node in scenario.nodes):
        return
    force_query = rng.random() < 0.25
    rules = {node.instance: rng.choice((REDIRECT_ON_CONFLICT, FAIL_ON_CONFLICT)) for node in scenario.nodes}
    scenario.nodes = [
        replace(node, force_query=force_query, on_conflict=rules[node.instance]) for node in scenario.nodes
    ]
    for wanted in scenario.requests:
        wanted.force_query = rng.random() < 0.2 and not wanted.bad


def _tighten(rng: random.Random, scenario: Scenario) -> None:
    """Pools in which two requests do not fit where each does, and a unified instance."""
    room = rng.choice((32, 48, 64))
    if all(node.role is not Role.UNIFIED for node in scenario.nodes):
        unified = replace(scenario.nodes[0], name="unified0", role=Role.UNIFIED, dp_size=1)
        scenario.nodes.append(unified)
    scenario.nodes = [replace(node, pages=room // node.page_tokens) for node in scenario.nodes]
    for wanted in scenario.requests:
        if rng.random() < 0.5:
            wanted.prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, room - 2))]
            longest = room - len(wanted.prompt)
            wanted.sampling = structs.replace(wanted.sampling, max_tokens=rng.randint(1, longest))
            wanted.bad = ""


def _vary_endings(rng: random.Random, scenario: Scenario) -> None:
    """Answers that end by a stop token or by the end of the sequence, not before `min_tokens`; and
    log-probabilities of prompts."""
    for wanted in scenario.requests:
        most = wanted.sampling.max_tokens
        wanted.sampling = structs.replace(
            wanted.sampling,
            min_tokens=rng.choice((0, 0, 1, rng.randint(0, most))),
            stop_token_ids=rng.sample(range(VOCAB), rng.choice((0, 0, VOCAB // 4))),
            ignore_eos=rng.random() < 0.3,
            prompt_logprobs=rng.choice((None, None, None, 0)),
        )


def _vary_budgets(rng: random.Random, scenario: Scenario) -> None:
    """One half is given much less time than the other."""
    for wanted in scenario.requests:
        if rng.random() < 0.3:
            nearer = rng.uniform(0.002, 0.1)
            wanted.leg_budget_s = rng.choice(((nearer, None), (None, nearer)))


def _nodes(rng: random.Random, features: frozenset[str]) -> list[NodeSpec]:
    found: list[NodeSpec] = []
    chunk, layers = rng.choice((4, 8, 16, 64)), rng.choice((1, 1, 2))
    counts = (
        (Role.PREFILL, rng.choice((1, 1, 2, 3))),
        (Role.DECODE, rng.choice((1, 1, 2, 3))),
        (Role.UNIFIED, rng.choice((0, 0, 0, 0, 0, 0, 0, 1))),
    )
    same_page = rng.choice((2, 4, 4, 8))
    mixed = rng.random() < 0.3
    for role, count in counts:
        page = rng.choice((2, 4, 8)) if mixed else same_page
        for index in range(count):
            tokens = rng.choice((48, 64, 96, 160)) if "small pools" in features else 1024
            skew = "skew" in features
            odd = rng.choice(ODD) if "mismatch" in features and index else ""
            found.append(
                NodeSpec(
                    name=f"{role.value}{index}",
                    role=role,
                    pages=max(tokens // page, 8),
                    page_tokens=page,
                    chunk_tokens=chunk,
                    max_batch=rng.choice((2, 4, 16)),
                    model="another" if "model" in odd else "lineage-1",
                    layers=3 - layers if "layers" in odd else layers,
                    kv_checksum=_kv_checksum(rng, features),
                    clock_offset_s=rng.uniform(0, 1e6) if skew else 0.0,
                    clock_rate=rng.choice((0.9, 0.99, 1.0, 1.01, 1.1)) if skew else 1.0,
                    pace=rng.choice((0.5, 1.0, 2.0)),
                )
            )
    return found


def _with_leaders(rng: random.Random, nodes: list[NodeSpec]) -> list[NodeSpec]:
    """In a quarter of the seeds at least one instance has several leaders of one incarnation. Half of these
    instances go by the room."""
    if rng.random() < 0.75:
        return nodes
    sizes = {node.name: rng.choice((1, 2, 2, 3)) for node in nodes}
    sizes[rng.choice(nodes).name] = 2
    rules = {node.name: rng.choice((FOLLOW_BOOTSTRAP_ROOM, "round_robin")) for node in nodes}
    return [
        replace(
            node,
            name=f"{node.name}.{rank}" if rank else node.name,
            dp_rank=rank,
            dp_size=sizes[node.name],
            load_balance=rules[node.name],
        )
        for node in nodes
        for rank in range(sizes[node.name])
    ]


def _kv_checksum(rng: random.Random, features: frozenset[str]) -> ChecksumMode:
    """Faults outside the checksum's coverage cannot be required to be noticed."""
    if "bit flip" in features:
        return ChecksumMode.FULL
    return rng.choice((ChecksumMode.FULL, ChecksumMode.FULL, ChecksumMode.SAMPLED, ChecksumMode.OFF))


def _requests(rng: random.Random, scenario: Scenario, count: int, gap_s: float) -> list[Wanted]:
    features, found = scenario.features, list[Wanted]()
    ranks = min(node.dp_size for node in scenario.nodes if node.role is Role.PREFILL)
    bases = [[rng.randrange(VOCAB) for _ in range(24)] for _ in range(4)]
    longest = rng.choice((6, 12, 24))
    at = 0.02
    shares_prefixes, follow_ups = rng.random() < 0.5, rng.random() < 0.5
    # Long answers are what a crash can cut in two.
    lengths = (1, 4, 12, 32) if "cut answers" in features else (1, 1, 2, 4, 8)
    for index in range(count):
        at += rng.expovariate(1.0 / gap_s)
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, longest))]
        if shares_prefixes and rng.random() < 0.6:
            prompt = rng.choice(bases)[: rng.randint(2, 20)] + prompt[:6]
        if found and follow_ups and rng.random() < 0.3:
            # The next turn of a conversation: what decode has cached of the last one is found again.
            last = rng.choice(found)
            said = reference(last.prompt, last.sampling, VOCAB, last.sampling.max_tokens)
            if not last.bad and len(last.prompt) < 80:
                prompt = last.prompt + said[: rng.randint(0, len(said))] + prompt[:4]
        greedy = rng.random() < 0.3
        sampling = SamplingParams(
            max_tokens=rng.choice(lengths),
            temperature=0.0 if greedy else 1.0,
            seed=rng.randrange(2**31),
        )
        abort = "client abort" in features and rng.random() < 0.3
        late = "leg delay" in features and rng.random() < 0.3
        delays = (rng.expovariate(200), rng.expovariate(200)) if late else (0.0, 0.0)
        if late and rng.random() < 0.2:
            delays = (0.0, 3.0) if rng.random() < 0.5 else (3.0, 0.0)
        bad = rng.choice(BAD) if "bad request" in features and rng.random() < 0.15 else ""
        if bad == "token outside the vocabulary":
            prompt = [*prompt, rng.choice((10**9, -1, VOCAB))]
        elif bad == "empty prompt":
            prompt = []
        elif bad == "long prompt":
            prompt = prompt * 200
        short = "short deadline" in features and rng.random() < 0.3
        if short and rng.random() < 0.2:
            sampling = structs.replace(sampling, max_tokens=60)
        found.append(
            Wanted(
                name=f"r{index}",
                at=at,
                prompt=prompt,
                sampling=sampling,
                budget_s=rng.uniform(0.002, 0.1) if short else rng.choice((8.0, 15.0)),
                front=rng.randrange(scenario.fronts),
                abort_after_s=rng.expovariate(50) if abort else None,
                leg_delay_s=delays,
                bad=bad,
                prefill_dp_rank=index // 4 % ranks if ranks > 1 and index % 4 == 3 and not bad else None,
            )
        )
    return found


def _faults(
    rng: random.Random, scenario: Scenario, features: Sequence[str] = FEATURES, first: int = 0
) -> list[Fault]:
    """The faults of those of `features` that the scenario has, named from `first` on."""
    by_role = {role: [n.name for n in scenario.nodes if n.role is role] for role in Role}
    prefills, decodes, unified = (by_role[r] for r in (Role.PREFILL, Role.DECODE, Role.UNIFIED))
    sides = [prefills, decodes]
    rng.shuffle(sides)
    names = {
        "prefill": prefills,
        "decode": decodes,
        "kv": prefills + decodes,
        "talker": decodes + unified,
        "any": prefills + decodes + unified,
        "one side": sides[0],
        "other side": sides[1],
        "front": [f"front{i}" for i in range(scenario.fronts)],
        "member": [*prefills, *decodes, *unified, *(f"front{i}" for i in range(scenario.fronts))],
        "registry": ["registry"],
        "": [""],
    }
    found: list[Fault] = []
    intensity = rng.choice((1, 2, 2, 4))
    draws = [draw for feature in features if feature in scenario.features for draw in FAULTS.get(feature, ())]
    for draw in draws:
        for _ in range(rng.randint(1, max(1, draw.times * intensity))):
            fault = Fault(
                name=f"f{first + len(found)}",
                kind=draw.kind,
                at=rng.uniform(0.02, 0.02 + scenario.busy_s),
                node=rng.choice(names[draw.where]),
                other=rng.choice(names[draw.other]),
                seconds=rng.choice(draw.seconds),
                amount=rng.randint(1, 64),
                trigger=rng.choice(draw.triggers),
            )
            found.append(fault)
    return found
