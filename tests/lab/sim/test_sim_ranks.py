"""Effects of ranks on each other: one that diverges or is late, conflicts of DP ranks, forced queries."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from segue.kv.ids import Role
from segue.kv.protocol.room_ranks import FAIL_ON_CONFLICT, FOLLOW_BOOTSTRAP_ROOM, REDIRECT_ON_CONFLICT
from segue_lab.sim.run import Outcome, run_scenario
from segue_lab.sim.scenario import Fault, Scenario, make_scenario
from segue_lab.sim.splits import EQUAL, UNEQUAL

REQUESTS = 24


def calm(leaders: int) -> Scenario:
    """The first scenario without faults whose prefill instances have so many leaders each, or one."""
    for seed in range(2000):
        scenario = make_scenario(seed)
        prefill = {node.dp_size for node in scenario.nodes if node.role is Role.PREFILL}
        decode = {node.role for node in scenario.nodes} == {Role.PREFILL, Role.DECODE}
        if not scenario.features and prefill == {leaders} and decode:
            scenario.requests = scenario.requests[:REQUESTS]
            return scenario
    raise AssertionError("there is none")


def with_fault(kind: str, role: Role, *, workers: bool, amount: int = 1) -> Outcome:
    """The outcome of one fault at an instance of several ranks."""
    scenario = replace(calm(1), splits=(EQUAL, UNEQUAL[0])[workers], workers=workers)
    node = next(node.name for node in scenario.nodes if node.role is role)
    fault = Fault("f0", kind, 0.1, node, seconds=0.3, amount=amount)
    outcome = run_scenario(replace(scenario, features=frozenset({kind}), faults=[fault]))
    assert not outcome.failed, outcome.text
    assert outcome.injected[kind] == 1
    return outcome


@pytest.mark.parametrize("workers", [False, True])
def test_what_a_rank_has_stored_that_carried_out_another_order_reaches_no_client(workers: bool) -> None:
    """Its replica ends with a typed error, and another incarnation of it serves later requests."""
    for amount in (0, 1):
        outcome = with_fault("rank diverges", Role.PREFILL, workers=workers, amount=amount)
        assert outcome.counts["ranks that diverged"] == 1
        assert outcome.counts["done"] > 0


def test_a_rank_that_is_late_for_less_than_a_silence_costs_nobody_his_answer() -> None:
    outcome = with_fault("rank late", Role.PREFILL, workers=True)
    assert outcome.counts["done"] == outcome.counts["succeeded"] > 0


def test_a_leader_that_was_stopped_itself_is_given_time_to_notice_that_its_rank_says_nothing() -> None:
    scenario = replace(calm(1), splits=UNEQUAL[0], workers=True)
    for index, wanted in enumerate(scenario.requests):
        wanted.at = 0.06 + 0.01 * index
    node = next(node.name for node in scenario.nodes if node.role is Role.PREFILL)
    faults = [Fault("f0", "rank lost", 0.1, node, seconds=0.3), Fault("f1", "pause", 0.25, node, seconds=3.0)]
    outcome = run_scenario(replace(scenario, features=frozenset({"rank lost"}), faults=faults))
    assert not outcome.failed, outcome.text


def of_two_leaders(on_conflict: str, *, force_query: bool = False) -> Scenario:
    """Without faults."""
    return by_the_room(calm(2), on_conflict, force_query=force_query)


def by_the_room(scenario: Scenario, on_conflict: str, *, force_query: bool = False) -> Scenario:
    """Every client asks for a rank, and the instance goes by the room."""
    scenario.nodes = [
        replace(node, load_balance=FOLLOW_BOOTSTRAP_ROOM, on_conflict=on_conflict, force_query=force_query)
        for node in scenario.nodes
    ]
    for index, wanted in enumerate(scenario.requests):
        wanted.prefill_dp_rank, wanted.force_query = index % 2, False
    return scenario


@pytest.mark.slow
def test_a_conflict_of_dp_ranks_ends_requests_where_the_instance_says_so_and_no_others() -> None:
    fails, redirects = (
        run_scenario(of_two_leaders(rule)) for rule in (FAIL_ON_CONFLICT, REDIRECT_ON_CONFLICT)
    )
    for outcome in (fails, redirects):
        assert not outcome.failed, outcome.text
    conflicts = fails.counts["ended by a conflict of ranks"]
    assert 0 < conflicts < REQUESTS
    assert fails.counts["failed"] == conflicts
    assert "failed" not in redirects.counts
    assert redirects.counts["done"] > fails.counts["done"]
    assert redirects.counts["sent on to another DP rank"] > 0


@pytest.mark.slow
def test_rooms_are_followed_to_another_rank_under_faults() -> None:
    seeds = (make_scenario(seed) for seed in range(6_100_000, 6_200_000))
    several = (s for s in seeds if any(n.dp_size > 1 and n.role is Role.PREFILL for n in s.nodes))
    moved = under_faults = 0
    for scenario in itertools.islice(several, 6):
        outcome = run_scenario(by_the_room(scenario, REDIRECT_ON_CONFLICT))
        assert not outcome.failed, (scenario.seed, outcome.text)
        moved += outcome.counts.get("sent on to another DP rank", 0)
        under_faults += outcome.under_faults
    assert min(moved, under_faults) >= 15


@pytest.mark.slow
def test_where_decode_is_to_ask_it_infers_nothing_and_everybody_is_served() -> None:
    outcome = run_scenario(of_two_leaders(REDIRECT_ON_CONFLICT, force_query=True))
    assert not outcome.failed, outcome.text
    assert outcome.counts["forced queries"] == outcome.counts["open ranks"] > 0
    assert "failed" not in outcome.counts
    scenario = of_two_leaders(REDIRECT_ON_CONFLICT)
    for wanted in scenario.requests:
        wanted.force_query = True
    outcome = run_scenario(scenario)
    assert not outcome.failed, outcome.text
    assert outcome.counts["open ranks"] == 2 * outcome.counts["hand-offs"]  # both halves


def test_a_room_of_which_the_registry_is_not_told_in_time_fails_for_a_cause_that_is_known() -> None:
    """Nobody has just started, and the registry is lost before each request."""
    scenario, at = of_two_leaders(REDIRECT_ON_CONFLICT, force_query=True), 40.0
    scenario.requests = scenario.requests[:6]
    faults = []
    for index, wanted in enumerate(scenario.requests):
        wanted.at, wanted.leg_budget_s = at + 0.01 + 0.2 * index, (None, 0.06)
        faults.append(Fault(f"f{index}", "registry loss", wanted.at - 0.01, "registry", "", 2.0))
    outcome = run_scenario(replace(scenario, features=frozenset({"registry"}), faults=faults))
    assert not outcome.failed, outcome.text
    assert outcome.counts["retries"] > 0
    assert "mismatches" not in outcome.counts
