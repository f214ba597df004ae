"""Peers that say something wrong inside of a hand-off, in virtual time: each kind by itself."""

from __future__ import annotations

from dataclasses import replace

import pytest

from segue.kv.ids import Role
from segue.kv.protocol.messages import Destination
from segue_lab.sim.faulty import KINDS
from segue_lab.sim.node_spec import NodeSpec
from segue_lab.sim.run import load, run_scenario
from segue_lab.sim.scenario import Fault
from segue_lab.sim.splits import Splits

#: Over tcp and over shm.
SEEDS = (1, 3)
#: The places of what prefill is told, and of what decode is.
TOLD = {
    role: [at for at, (kind, _) in enumerate(KINDS) if (kind is Destination) == (role is Role.PREFILL)]
    for role in (Role.PREFILL, Role.DECODE)
}


@pytest.mark.parametrize(("role", "place"), [(role, at) for role in TOLD for at in range(len(TOLD[role]))])
def test_a_wrong_message_ends_its_own_hand_off_at_most(role: Role, place: int) -> None:
    for seed in SEEDS:
        scenario = load(seed)
        scenario.features, scenario.requests = frozenset({"wrong messages"}), scenario.requests[:6]
        scenario.faults = [
            Fault(f"w{i}{again}", "wrong message", 0.0, node.name, amount=place)
            for i, node in enumerate(scenario.nodes)
            for again in range(2)
            if node.role is role
        ]
        outcome = run_scenario(scenario)
        assert not outcome.failed, f"seed {seed}: {outcome.text}"
        assert outcome.counts["wrong messages"] >= 1
        assert outcome.counts["done"] >= 1


def test_a_fence_that_is_refused_again_and_again_holds_its_pages_for_as_long() -> None:
    found = (s for s in map(load, range(500)) if s.transports == ("shm",) and s.splits == Splits())
    scenario = next(s for s in found if len({(node.role, node.dp_size) for node in s.nodes}) == 2)
    scenario.nodes = [replace(node, local_tokens=None) for node in scenario.nodes]
    scenario.features, scenario.requests = frozenset({"fence exception"}), scenario.requests[:1]
    scenario.faults = [of(node, "wrong message", 3) for node in scenario.nodes if node.role is Role.DECODE]
    for node in scenario.nodes:
        if node.role is Role.PREFILL:
            scenario.faults += [of(node, "fence exception", place) for place in range(24)]
    outcome = run_scenario(scenario)
    assert not outcome.failed, outcome.text
    assert outcome.counts["fences not taken"] >= 24


def of(node: NodeSpec, kind: str, amount: int = 0) -> Fault:
    """A fault that waits for its moment from the beginning."""
    return Fault(f"{kind} {amount} of {node.name}", kind, 0.0, node.name, amount=amount)
