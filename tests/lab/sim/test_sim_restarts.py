"""Instances that come back elsewhere, or as something else: who is where, and who is talked to."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from segue.kv.ids import Role
from segue_lab.sim.deployment import Deployment
from segue_lab.sim.run import load, run_scenario
from segue_lab.sim.scenario import Fault, Scenario, make_scenario
from segue_lab.sim.sim_addresses import Addresses
from segue_lab.sim.splits import ALONE, EQUAL
from segue_lab.sim.vocabulary import ALL_FEATURES, FAULTS


def calm_seed(leaders: int) -> int:
    """The first seed without faults in which one prefill and three decode instances have, at most, so many
    leaders each."""
    for seed in range(2000):
        scenario = make_scenario(seed)
        instances = [node for node in scenario.nodes if not node.dp_rank]
        roles = [node.role for node in instances]
        most = max(node.dp_size for node in instances)
        if not scenario.features and roles == [Role.PREFILL] + 3 * [Role.DECODE] and most == leaders:
            return seed
    raise AssertionError("there is none")


CALM = calm_seed(1)


def with_faults(*faults: Fault) -> Scenario:
    """A calm deployment, and these faults in it."""
    features = frozenset(fault.kind for fault in faults)
    return replace(make_scenario(CALM), features=features, faults=list(faults))


def fault(kind: str, node: str, at: float, amount: int, name: str = "f0") -> Fault:
    return Fault(name, kind, at, node, seconds=0.01, amount=amount)


def restarting(scenario: Scenario) -> Deployment:
    deployment = Deployment(scenario)
    try:
        deployment.run()
    finally:
        deployment.close()
    return deployment


@pytest.mark.slow
@pytest.mark.parametrize("ends", [1, 2], ids=["crashes", "drains"])
def test_an_instance_that_moves_is_served_at_its_new_address(ends: int) -> None:
    spec = make_scenario(CALM).nodes[0]
    first = spec.name
    deployment = restarting(with_faults(fault("move", first, 0.05, ends)))
    node = deployment.nodes[first]
    assert (node.host, node.port) != Addresses([spec], random.Random(0)).of(first)
    assert node.name == f"{first}#1"
    assert node.me in deployment.fronts["front0"].view
    assert deployment.counts["done"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("ends", [1, 2], ids=["crashes", "drains"])
def test_a_role_changes_at_the_same_address_and_the_other_side_keeps_one(ends: int) -> None:
    scenario = make_scenario(CALM)
    prefills = [n.name for n in scenario.nodes if n.role is Role.PREFILL]
    decodes = [n.name for n in scenario.nodes if n.role is Role.DECODE]
    faults = [fault("role change", name, 0.05 + i, ends, f"f{i}") for i, name in enumerate(prefills)]
    deployment = restarting(with_faults(*faults))
    before = Addresses(scenario.nodes, random.Random(0))
    roles = {name: node.spec.role for name, node in deployment.nodes.items()}
    assert all(roles[name] is not Role.PREFILL for name in prefills)
    assert Role.PREFILL in {roles[name] for name in decodes}  # one took the place of the last one
    assert Role.DECODE in roles.values()
    for name, node in deployment.nodes.items():
        assert (node.host, node.port) == before.of(name)
        assert node.me in deployment.fronts["front0"].view
    assert deployment.counts["done"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "amount"), [("crash", 1), ("drain", 3), ("drain", 4), ("power loss", 1), ("role change", 3)]
)
def test_an_instance_of_several_leaders_comes_back_as_a_whole_in_one_new_incarnation(
    kind: str, amount: int
) -> None:
    scenario = make_scenario(calm_seed(2))
    [first, *_] = mine = [node.name for node in scenario.nodes if node.dp_size == 2][:2]
    injected = fault(kind, first, 0.05, amount)
    deployment = restarting(replace(scenario, features=frozenset({kind}), faults=[injected]))
    nodes = [deployment.nodes[name] for name in mine]
    assert {node.instance_restart for node in nodes} == {2}
    assert len({node.me.incarnation for node in nodes}) == 1
    assert [node.me.dp_rank for node in nodes] == [0, 1]
    assert len({node.spec.role for node in nodes}) == 1
    view = deployment.fronts["front0"].view
    assert all(node.me in view for node in nodes)
    assert deployment.counts["done"] > 0


@pytest.mark.slow
def test_every_fault_belongs_to_a_feature_and_one_seed_shows_both_new_ones() -> None:
    assert set(FAULTS) <= ALL_FEATURES
    both = [s for s in range(300) if {"move", "role change"} <= make_scenario(s).features][:6]
    seen = set[str]()
    for seed in both:
        outcome = run_scenario(load(seed))
        assert not outcome.failed, outcome.text
        seen |= set(outcome.injected)
        if {"move", "role change"} <= seen:
            return
    raise AssertionError(f"only {seen} were injected")


@pytest.mark.slow
def test_an_instance_whose_address_is_taken_says_so_and_comes_back_when_it_is_free() -> None:
    taken = Fault("f0", "address taken", 0.1, make_scenario(CALM).nodes[0].name, seconds=0.5)
    outcome = run_scenario(with_faults(taken))
    assert not outcome.failed, outcome.text
    assert outcome.counts["addresses taken"] > 1


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_pair_whose_memory_cannot_be_had_goes_on_over_the_other_transport(ranks: int) -> None:
    nodes = {role: [n.name for n in make_scenario(CALM).nodes if n.role is role] for role in Role}
    prefill, decode = nodes[Role.PREFILL][0], nodes[Role.DECODE][0]
    scenario = with_faults(Fault("f0", "no memory", 0.05, prefill, decode))
    scenario.transports, scenario.splits = ("shm", "tcp"), (ALONE, EQUAL)[ranks - 1]
    outcome = run_scenario(scenario)
    assert not outcome.failed, outcome.text
    assert outcome.counts["pools that could not be mapped"] == 1
    assert outcome.counts["pairs that went on without shm"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["crash", "thread death", "fence exception"])
def test_what_strikes_decode_as_its_transport_is_chosen_costs_no_request_more(kind: str) -> None:
    nodes = {role: [n.name for n in make_scenario(CALM).nodes if n.role is role] for role in Role}
    here, there = nodes[Role.DECODE][0], nodes[Role.PREFILL][0]
    scenario = with_faults(Fault("f0", kind, 0.0, here, there, seconds=1.0, trigger="<PathChosen"))
    scenario.transports, scenario.splits = ("shm", "tcp"), ALONE
    outcome = run_scenario(scenario)
    assert not outcome.failed, outcome.text
    assert outcome.injected[kind] == 1
    assert outcome.counts["pairs with a choice that took shm"] > 0


@pytest.mark.slow
def test_a_leader_that_has_lost_its_rank_ends_its_hand_offs_at_once() -> None:
    decode = next(n.name for n in make_scenario(CALM).nodes if n.role is Role.DECODE)
    outcome = run_scenario(
        with_faults(Fault("f0", "rank lost", 0.05, decode, seconds=0.3, trigger="Destination"))
    )
    assert not outcome.failed, outcome.text
    assert outcome.injected["rank lost"] == 1
