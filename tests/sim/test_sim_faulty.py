"""Peers that say something wrong inside of a hand-off, in virtual time: each kind by itself."""

from __future__ import annotations

import pytest

from segue.core.types import Role
from segue.handoff.messages import Destination
from segue.sim.faulty import KINDS
from segue.sim.run import load, run_scenario
from segue.sim.scenario import Fault

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
