"""The registry and the ports of a deployment in virtual time: each visitor and guest, and what is checked."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest
from msgspec.structs import replace

from segue.kv.errors import PeerRestarted
from segue.kv.ids import LeaderId, Role
from segue.lab.sim.run import Outcome, load, run_scenario
from segue.lab.sim.scenario import Fault, Scenario
from segue.lab.sim.sim_registry import TTL_S
from segue.lab.sim.visits import GUEST_KINDS, MISFIT_KINDS, NODE_KINDS, VISITOR_KINDS
from segue.lab.sim.vocabulary import AT_THE_DOORS, FAULTS
from segue.lab.sim.web_clients import WEB_KINDS
from segue.server.registry import registry_store as store
from segue.server.registry.registry_records import InstanceList, InstanceRecord, Registered
from segue.server.registry.registry_store import RegistryStore
from segue.server.registry.waiting import StoreWaiter

#: Signed and not, one frontend and several, with and without an address translator.
SEEDS = (1, 3, 6)


def calm(seed: int, *faults: Fault) -> Scenario:
    """A scenario without other faults than these."""
    scenario = load(seed)
    scenario.features, scenario.faults = frozenset(), list(faults)
    scenario.requests = scenario.requests[:5]
    return scenario


def comes(kind: str, what: str, place: int) -> Outcome:
    """Somebody comes to each instance in turn."""
    found = []
    for seed in SEEDS:
        faults = [
            Fault(f"v{i}", what, 0.2 + 0.2 * i, node.name, amount=place)
            for i, node in enumerate(load(seed).nodes)
        ]
        found.append(run_scenario(calm(seed, *faults)))
        assert not found[-1].failed, f"{kind}, seed {seed}: {found[-1].text}"
        assert found[-1].counts[f"{what}: {kind}"] == len(faults)
        assert found[-1].counts["guests" if what == "guest" else "visits"] == len(faults), "one did not end"
        assert found[-1].counts["done"] == 5
    return found[-1]


@pytest.mark.parametrize("kind", VISITOR_KINDS)
def test_each_visitor_is_told_why_or_cut_and_harms_nobody(kind: str) -> None:
    comes(kind, "visitor", VISITOR_KINDS.index(kind))


@pytest.mark.parametrize("kind", MISFIT_KINDS)
def test_each_leader_that_does_not_fit_is_told_why_and_harms_nobody(kind: str) -> None:
    comes(kind, "misfit", MISFIT_KINDS.index(kind))


@pytest.mark.parametrize("kind", NODE_KINDS)
def test_nodes_meet_fill_up_and_end_as_they_should(kind: str) -> None:
    for seed in SEEDS:
        node, place = load(seed).nodes[0].name, NODE_KINDS.index(kind)
        faults = [Fault(f"v{i}", "node visit", 0.2 + 0.2 * i, node, amount=place) for i in range(3)]
        outcome = run_scenario(calm(seed, *faults))
        assert not outcome.failed, f"{kind}, seed {seed}: {outcome.text}"
        assert outcome.counts[f"visitor: {kind}"] == outcome.counts["visits"] == 3


def web(seed: int, *kinds: str, stop_s: float | None = None) -> Scenario:
    """A calm scenario with a public server and these clients, one after the other."""
    faults = [
        Fault(f"w{i}", "web client", 0.1 + 0.05 * i, "", amount=WEB_KINDS.index(k))
        for i, k in enumerate(kinds)
    ]
    faults += [Fault("stop", "web stop", stop_s, "")] if stop_s is not None else []
    scenario = calm(seed, *faults)
    scenario.features = frozenset({"web clients"})
    return scenario


@pytest.mark.parametrize("kind", WEB_KINDS)
def test_each_web_client_is_answered_or_cut_in_time_and_the_server_stays_bounded(kind: str) -> None:
    outcome = run_scenario(web(1, kind))
    assert not outcome.failed, outcome.text
    assert outcome.counts[f"http: {kind}"] == outcome.counts["web clients"] == 1


@pytest.mark.parametrize("seed", SEEDS)
def test_web_clients_of_all_kinds_at_once_harm_no_honest_one_and_the_server_stops_in_time(seed: int) -> None:
    outcome = run_scenario(web(seed, *WEB_KINDS, *WEB_KINDS, stop_s=1.5))
    assert not outcome.failed, outcome.text
    assert outcome.counts["web clients"] == 2 * len(WEB_KINDS)


@pytest.mark.parametrize("kind", GUEST_KINDS)
def test_each_guest_of_the_registry_is_told_what_it_did_wrong_and_harms_nobody(kind: str) -> None:
    comes(kind, "guest", GUEST_KINDS.index(kind))


@pytest.mark.parametrize(
    "kind",
    [
        "loss",
        "silent loss",
        "close",
        "impostor",
        "pause",
        "slow",
        "partition",
        "break",
        "flip",
        "cut",
        "noise",
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
    assert outcome.struck == {f"registry {kind}": 1}


def test_a_visitor_waits_where_no_connection_can_be_accepted() -> None:
    node = load(1).nodes[0].name
    full = Fault("f0", "no descriptors", 1.0, node, seconds=5.0)
    comes_in = Fault("f1", "visitor", 1.1, node, amount=VISITOR_KINDS.index("hello twice"))
    outcome = run_scenario(calm(1, full, comes_in))
    assert not outcome.failed, outcome.text


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
    assert outcome.struck[kind] == 1


def test_a_registry_that_forgets_too_early_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    normal = RegistryStore.register

    def hasty(self: RegistryStore, record: InstanceRecord, dp_rank: int) -> Registered:
        answer = normal(self, record, dp_rank)
        rank = self._entries[record.incarnation].ranks[dp_rank]
        rank.expires_at -= 0.8 * TTL_S
        self._expect_expiry(rank.expires_at, LeaderId(record.incarnation, dp_rank))
        return answer

    monkeypatch.setattr(RegistryStore, "register", hasty)
    outcome = run_scenario(calm(1))
    assert outcome.rule == "registry"
    assert "of silence" in outcome.text


def test_a_watcher_that_is_never_told_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    async def blind(waiter: StoreWaiter, role: Role | None, *_: object) -> InstanceList:
        await asyncio.sleep(1.0)
        return replace(waiter.store.instances(role), instances=[])

    monkeypatch.setattr(StoreWaiter, "instances", blind)
    outcome = run_scenario(calm(1))
    assert outcome.rule == "registry"
    assert "does not know of" in outcome.text


def test_a_registry_that_believes_a_second_writer_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_check_same", lambda *_: None)
    node = load(1).nodes[0].name
    second = Fault("f0", "guest", 1.0, node, amount=GUEST_KINDS.index("second writer"))
    outcome = run_scenario(calm(1, second))
    assert outcome.rule == "registry"
    assert " took " in outcome.text


@pytest.mark.parametrize("seed", SEEDS)
def test_a_second_writer_is_not_believed_by_a_registry_that_has_just_started(seed: int) -> None:
    """The instance in question has not been heard yet: that must not make the guest's word its own."""
    place = GUEST_KINDS.index("second writer")
    faults = [Fault("f", "registry loss", 1.0, "registry", seconds=0.05)]
    faults += [Fault(f"v{node.name}", "guest", 1.06, node.name, amount=place) for node in load(seed).nodes]
    scenario = calm(seed, *faults)
    scenario.nodes = [dataclasses.replace(node, model="another") for node in scenario.nodes]
    outcome = run_scenario(scenario)
    assert not outcome.failed, outcome.text


def test_a_word_for_a_dead_instance_does_not_end_the_one_in_its_place() -> None:
    """A registry that stands still hears of the next life first, and then of the last one from a guest."""
    node = load(1).nodes[0].name
    place = GUEST_KINDS.index("second writer")
    faults = [
        Fault("f0", "registry loss", 1.0, "registry", seconds=0.01),
        Fault("v0", "guest", 1.05, node, amount=place),
        Fault("f1", "crash", 1.051, node, seconds=0.0),
    ]
    outcome = run_scenario(calm(1, *faults))
    assert not outcome.failed, outcome.text


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


def test_who_comes_to_a_registry_that_is_closing_may_find_nobody() -> None:
    scenario = load(1)
    node = scenario.nodes[0].name
    closes = Fault("f", "registry close", 1.0, "registry", seconds=0.01)
    guests = [
        Fault(f"v{place}", "guest", 1.05, node, amount=GUEST_KINDS.index(kind))
        for place, kind in enumerate(("past", "drips", "queries"))
    ]
    outcome = run_scenario(calm(1, closes, *guests))
    assert not outcome.failed, outcome.text


@pytest.mark.parametrize("seed", SEEDS)
def test_whom_the_flood_of_another_guest_has_cost_his_place_is_not_told_why(seed: int) -> None:
    node = load(seed).nodes[0].name
    faults = [
        Fault(f"v{place}", "guest", 1.0 + 0.1 * place, node, amount=GUEST_KINDS.index(kind))
        for place, kind in enumerate(("half a query", "registry flood"))
    ]
    outcome = run_scenario(calm(seed, *faults))
    assert not outcome.failed, outcome.text
    assert outcome.counts["guests"] == 2


def test_whoever_comes_is_told_from_all_others_by_name() -> None:
    kinds = [*VISITOR_KINDS, *GUEST_KINDS, *MISFIT_KINDS]
    assert len(set(kinds)) == len(kinds)
