"""The state that the parts of one simulated deployment share. It starts nothing and checks nothing."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

from segue.kv.ids import LeaderId, TransferId
from segue.kv.limits import Limits
from segue_lab.sim.clients import Asked
from segue_lab.sim.network import Network
from segue_lab.sim.node_spec import EOS, NodeSpec
from segue_lab.sim.scenario import Scenario
from segue_lab.sim.sim_addresses import Addresses
from segue_lab.sim.sockets import Streams
from segue_lab.sim.timing import Timing
from segue_lab.sim.world import Process, World, new_leader

BUDGET_S = 20.0


class SimState:
    """The scenario, virtual time, the network, the processes, and records of what happened."""

    def __init__(self, scenario: Scenario, *, records: bool) -> None:
        self.scenario = scenario
        self.world = World(scenario.seed, records=records)
        self.timing: Timing = scenario.timing
        self.network = Network(self.world, scenario.timing)
        self.streams = Streams(scenario.timing.latency_s)
        self.transports = scenario.transports
        self.eos = EOS if "endings" in scenario.features else frozenset[int]()
        self.secret = b"a secret of the simulator" if scenario.signed else None
        #: nothing in this scenario makes a request fail
        self.calm = not scenario.features - {"client abort", "bad request", "skew", "leg delay"}

        #: all processes so far, and the present incarnation of each leader and frontend by its name
        self.by_leader: dict[LeaderId, Process] = {}
        self.nodes: dict[str, Process] = {}
        self.fronts: dict[str, Process] = {}
        #: the role and address of each leader's next incarnation
        self.specs = {spec.name: spec for spec in scenario.nodes}
        self.addresses = Addresses(scenario.nodes, self.world.rng("places"))
        self.instance_restarts: Counter[str] = Counter()

        self.counts: Counter[str] = Counter()
        #: faults that took place, by kind
        self.injected: Counter[str] = Counter()
        self.asked: dict[str, Asked] = {}
        self.rooms: dict[int, Asked] = {}
        #: rooms that were opened without a placement (`OpenRoom`)
        self.open_rooms: dict[int, Any] = {}
        #: when the last partition or the last fault ended
        self.healed_at = 0.0
        #: when something last stood in the way of the registry and any of its clients
        self.registry_trouble_at = 0.0
        #: hand-offs of which a byte that matters is wrong
        self.flipped: set[TransferId] = set()
        #: room and attempt whose metadata was spoiled on its way → what is wrong with it
        self.spoiled: dict[tuple[int, int], str] = {}
        #: hand-offs of which a handler has raised: on a proof, only the end of the process frees their pages
        self.buggy: set[TransferId] = set()
        #: rooms of which a half was told something wrong by its peer
        self.misheard: set[int] = set()

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

    @property
    def front_limits(self) -> Limits:
        """The bounds of a frontend's sessions."""
        return Limits(
            connect_s=self.timing.connect_s,
            keepalive_s=self.timing.keepalive_s,
            peer_silence_s=self.timing.silence_s,
            max_session_backlog_bytes=self.scenario.backlog_bytes,
        )

    def identity(self, spec: NodeSpec, rng: random.Random) -> LeaderId:
        """The id of a leader in the present incarnation of its instance, which all its leaders share."""
        if spec.dp_size == 1:
            return new_leader(rng)
        instance = spec.instance
        rng = self.world.rng(f"incarnation {self.instance_restarts[instance]} of {instance}")
        return LeaderId(new_leader(rng).incarnation, spec.dp_rank)
