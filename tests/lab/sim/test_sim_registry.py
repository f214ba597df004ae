"""The registry of a deployment in virtual time: its faults and its checks."""

from __future__ import annotations

import pytest

from segue.kv.errors import PeerRestarted
from segue.kv.ids import Role
from segue.server.registry.registry_records import InstanceRecord, Registered
from segue.server.registry.registry_store import RegistryStore
from segue_lab.sim.run import load, run_scenario
from segue_lab.sim.scenario import Fault, Scenario
from segue_lab.sim.vocabulary import AT_THE_DOORS, FAULTS

#: Signed and not, one frontend and several, with and without an address translator.
SEEDS = (1, 3, 6)


def calm(seed: int, *faults: Fault) -> Scenario:
    """A scenario without other faults than these."""
    scenario = load(seed)
    scenario.features, scenario.faults = frozenset(), list(faults)
    scenario.requests = scenario.requests[:5]
    scenario.long_rest = True
    return scenario


@pytest.mark.parametrize(
    "kind",
    [
        "loss",
        "silent loss",
        "close",
        "pause",
        "slow",
        "partition",
        "break",
    ],
)
@pytest.mark.parametrize("seed", SEEDS)
def test_while_the_registry_is_in_trouble_those_who_know_each_other_go_on(kind: str, seed: int) -> None:
    node = load(seed).nodes[0].name
    fault = Fault("f0", f"registry {kind}", 0.1, node, seconds=12.0, amount=3)
    scenario = calm(seed, fault)
    for place, wanted in enumerate(scenario.requests):
        wanted.at = 0.2 + place
    outcome = run_scenario(scenario)
    assert not outcome.failed, outcome.text
    assert outcome.counts["done"] == 5
    assert outcome.injected == {f"registry {kind}": 1}


def test_every_trouble_of_a_seed_is_one_that_something_brings() -> None:
    for feature in AT_THE_DOORS:
        assert FAULTS[feature], feature


@pytest.mark.parametrize("kind", ["crash", "power loss"])
def test_the_query_of_a_watcher_that_has_just_died_may_still_wait(kind: str) -> None:
    """Everything is looked at once a second."""
    node = next(node.name for node in load(3).nodes if node.role is Role.DECODE)
    scenario = calm(3, Fault("f0", kind, 39.995, node, seconds=3.0))
    scenario.features = frozenset({kind})
    scenario.requests[-1].at = 45.0
    outcome = run_scenario(scenario)
    assert not outcome.failed, outcome.text
    assert outcome.injected[kind] == 1


def test_a_registry_that_sends_away_a_living_instance_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    normal, heard = RegistryStore.register, set[str]()

    def forgetful(self: RegistryStore, record: InstanceRecord, dp_rank: int) -> Registered:
        if record.incarnation in heard:
            raise PeerRestarted("somebody else is there")
        heard.add(record.incarnation)
        return normal(self, record, dp_rank)

    monkeypatch.setattr(RegistryStore, "register", forgetful)
    outcome = run_scenario(calm(1))
    assert outcome.rule == "registry"
    assert "was told that it is over" in outcome.text


def test_an_instance_that_drains_before_the_registry_has_heard_of_it_leaves() -> None:
    node = load(1).nodes[0].name
    away = Fault("f0", "registry pause", 0.0, "registry", seconds=12.0)
    scenario = calm(1, away, Fault("f1", "drain", 1.0, node))
    scenario.requests = []
    outcome = run_scenario(scenario)
    assert not outcome.failed, outcome.text
