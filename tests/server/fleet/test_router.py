"""The choice of replicas, without a network or a clock."""

from __future__ import annotations

from typing import Any

import pytest
from fleet_records import load
from msgspec import structs

from segue.engine.request import RankHints, Request, SamplingParams
from segue.kv.errors import (
    DpRankOutOfRange,
    ErrorCode,
    Internal,
    LayoutMismatch,
    OutOfCapacity,
    PeerLost,
    SegueError,
    TransferFailed,
    status_of,
)
from segue.kv.ids import Incarnation, LeaderId, Role
from segue.server.balance.attempts import Attempts, Next
from segue.server.balance.policy import PlacementRequest
from segue.server.fleet.fleet_settings import FleetSettings
from segue.server.fleet.replica import Replica, Route
from segue.server.fleet.router import FIRST_COOL_S, LONGEST_COOL_S, Router
from segue.server.registry.registry_records import InstanceRecord, ReplicaRecord

REQUEST = Request(request_id="r", prompt=[1, 2], sampling=SamplingParams())


class Fleet:
    """A table of replicas, all with a session, and the router over it."""

    def __init__(self, *replicas: tuple[str, Role], **settings: Any) -> None:
        self.replicas: dict[LeaderId, Replica] = {}
        settings.setdefault("policy", "round_robin")
        self.router = Router(self.replicas, FleetSettings(served_model="m", **settings), lambda n: 0)
        self.made: dict[str, Replica] = {}
        for name, role in replicas:
            self.add(name, role)

    def add(self, name: str, role: Role, model: str = "one", rank: int = 0, **kw: Any) -> Replica:
        where = ReplicaRecord(dp_rank=rank, host="127.0.0.1", port=1)
        kw = {"served_model": "m", "context_tokens": 64, "model": model, **kw}
        record = InstanceRecord(incarnation=Incarnation(name[0] * 32), role=role, replicas=[where], **kw)
        replica = Replica(record, where, session=object())  # type: ignore[arg-type]
        self.replicas[replica.leader] = self.made[name] = replica
        self.router.membership_changed()
        return replica

    def choose(
        self, attempts: Attempts | None = None, now: float = 0.0, patient: bool = False
    ) -> tuple[str, str] | None:
        wanted = PlacementRequest(1, REQUEST.prompt)
        route = self.router.choose(attempts or Attempts(REQUEST), wanted, now, patient=patient)
        return None if route is None else (self.name(route.prefill), self.name(route.decode))

    def name(self, replica: Replica) -> str:
        return next(name for name, made in self.made.items() if made is replica)

    def fail(self, prefill: str, decode: str, error: SegueError, attempts: Attempts | None = None) -> Next:
        attempts = attempts or Attempts(REQUEST)
        route = Route(1, self.made[prefill], self.made[decode])
        attempts.begin(*route.pair)
        return self.router.after_failure(attempts, route, self.made[decode], error.info, 0.0)


def pairs(**settings: Any) -> Fleet:
    sides = (("a", Role.PREFILL), ("b", Role.PREFILL), ("d", Role.DECODE), ("e", Role.DECODE))
    return Fleet(*sides, **settings)


def test_a_pair_that_refused_one_another_is_not_chosen_and_others_of_its_two_are() -> None:
    fleet = pairs()
    assert fleet.fail("a", "d", LayoutMismatch("unequal")) is Next.PLACE_AGAIN
    chosen = {fleet.choose() for _ in range(12)}
    assert ("a", "d") not in chosen
    assert {("a", "e"), ("b", "d")} <= chosen


def test_a_refusal_is_forgotten_with_either_of_the_two() -> None:
    fleet = Fleet(("a", Role.PREFILL), ("d", Role.DECODE), ("e", Role.DECODE))
    fleet.fail("a", "d", LayoutMismatch("unequal"))
    assert {fleet.choose() for _ in range(4)} == {("a", "e")}
    gone = fleet.replicas.pop(fleet.made["d"].leader)
    fleet.router.membership_changed()
    fleet.replicas[gone.leader] = gone
    fleet.router.membership_changed()
    assert ("a", "d") in {fleet.choose() for _ in range(4)}


def test_a_refusal_ends_the_request_where_there_is_no_other_pair() -> None:
    fleet = Fleet(("a", Role.PREFILL), ("d", Role.DECODE))
    assert fleet.fail("a", "d", LayoutMismatch("unequal")) is Next.END
    assert fleet.choose() == ("a", "d"), "still the least bad one"
    fleet.add("u", Role.UNIFIED)
    assert fleet.fail("a", "d", LayoutMismatch("unequal")) is Next.PLACE_AGAIN
    assert {fleet.choose() for _ in range(4)} == {("u", "u")}


def test_a_full_worker_is_not_asked_again_unless_there_is_another() -> None:
    fleet = Fleet(("a", Role.PREFILL), ("d", Role.DECODE))
    full = OutOfCapacity("full", retryable=True)
    assert fleet.fail("a", "d", full) is Next.END
    fleet.add("u", Role.UNIFIED)
    assert fleet.fail("a", "d", full) is Next.PLACE_AGAIN, "a unified one can decode as well"
    named = full.info.exception().at(origin=fleet.made["a"].name)
    assert fleet.fail("a", "d", named) is Next.END, "nobody else prefills"


def test_a_replica_that_failed_is_passed_over_for_longer_each_time_if_there_is_a_choice() -> None:
    fleet = pairs()
    d = fleet.made["d"]
    for times in range(12):
        fleet.router.record_failure(d, Internal("a bug").info, 100.0)
        cooling = fleet.router.cooling(d.leader)
        assert cooling.failures == times + 1
        assert cooling.until == 100.0 + min(FIRST_COOL_S * 2**times, LONGEST_COOL_S)
    assert {fleet.choose(now=100.0 + LONGEST_COOL_S - 0.01) for _ in range(6)} <= {("a", "e"), ("b", "e")}
    assert "d" in {
        found[1] for found in (fleet.choose(now=100.0 + LONGEST_COOL_S) for _ in range(6)) if found
    }
    fleet.router.record_success(Route(1, fleet.made["a"], d))
    assert fleet.router.cooling(d.leader).failures == 0


def test_a_fleet_is_proven_by_a_pair_that_is_still_usable_and_has_not_failed_since() -> None:
    fleet = pairs()
    assert not fleet.router.proven
    fleet.router.record_success(Route(1, fleet.made["a"], fleet.made["d"]))
    fleet.router.record_success(Route(1, fleet.made["b"], fleet.made["e"]))
    fleet.router.record_failure(fleet.made["d"], Internal("a bug").info, 0.0)
    assert fleet.router.proven, "the other pair has served"
    fleet.made["b"].session = None
    assert not fleet.router.proven


def test_each_success_gives_a_part_of_a_retry_back_up_to_the_budget() -> None:
    fleet = pairs(retry_budget=1.0, retry_refill=0.5)
    route = Route(1, fleet.made["a"], fleet.made["d"])
    broken = TransferFailed("broken")
    assert fleet.fail("a", "d", broken) is Next.PLACE_AGAIN
    assert fleet.fail("a", "d", broken) is Next.END
    fleet.router.record_success(route)
    assert fleet.fail("a", "d", broken) is Next.END
    for _ in range(9):
        fleet.router.record_success(route)
    assert fleet.fail("a", "d", broken) is Next.PLACE_AGAIN
    assert fleet.fail("a", "d", broken) is Next.END
    assert fleet.fail("a", "d", PeerLost("gone")) is Next.PLACE_AGAIN, "one worker's end costs no budget"


def test_while_draining_only_what_has_begun_goes_on() -> None:
    fleet = pairs()
    fleet.router.draining = True
    assert not fleet.router.can_serve
    assert fleet.router.lacking().info.code is ErrorCode.DRAINING
    assert fleet.fail("a", "d", PeerLost("gone")) is Next.END
    begun = Attempts(REQUEST)
    begun.output.append(7)
    assert fleet.fail("a", "d", PeerLost("gone"), begun) is Next.CONTINUE


def test_the_longest_context_is_the_shortest_of_those_who_serve() -> None:
    fleet = Fleet()
    assert fleet.router.context_tokens is None
    fleet.add("a", Role.PREFILL, context_tokens=10)
    assert fleet.router.context_tokens is None, "half a pair serves nobody"
    fleet.add("d", Role.DECODE, context_tokens=7)
    assert fleet.router.context_tokens == 7
    fleet.add("o", Role.DECODE, model="other", context_tokens=3)
    assert fleet.router.context_tokens == 7


def test_the_room_names_the_rank_where_prefill_follows_it() -> None:
    fleet = Fleet(("d", Role.DECODE))
    for rank in range(2):
        where = ReplicaRecord(dp_rank=rank, host="127.0.0.1", port=1)
        replica = fleet.add("ab"[rank], Role.PREFILL, dp_size=2, load_balance="follow_bootstrap_room")
        replica.where = where
    assert {fleet.choose() for _ in range(4)} == {("b", "d")}, "room 1 of two ranks"


def test_one_that_its_peer_says_is_gone_is_waited_for_and_then_asked() -> None:
    fleet = Fleet(("a", Role.PREFILL), ("d", Role.DECODE))
    attempts = Attempts(REQUEST)
    gone = PeerLost("the link broke", origin=fleet.made["d"].name).at(peer=fleet.made["a"].name)
    assert fleet.fail("a", "d", gone, attempts) is Next.PLACE_AGAIN
    assert fleet.choose(attempts, patient=True) is None
    assert fleet.choose(attempts) == ("a", "d")


@pytest.mark.parametrize("shared", [True, False])
def test_a_rank_that_is_lost_takes_those_with_it_that_share_its_experts_and_no_others(shared: bool) -> None:
    fleet = Fleet(("a", Role.PREFILL))
    for rank in range(3):
        fleet.add(f"d{rank}", Role.DECODE, rank=rank, dp_size=3, shared_experts=shared)
    attempts = Attempts(REQUEST)
    gone = PeerLost("its session ended").at(peer=fleet.made["d1"].name)
    assert fleet.fail("a", "d1", gone, attempts) is Next.PLACE_AGAIN
    assert attempts.reported_by_peer is shared
    assert (fleet.choose(attempts, patient=True) is None) is shared
    fleet.add("e", Role.DECODE)
    chosen = {fleet.choose(attempts, patient=True) for _ in range(6)}
    assert chosen == ({("a", "e")} if shared else {("a", "e"), ("a", "d0"), ("a", "d2")})


def test_one_that_the_registry_flags_as_draining_or_does_not_list_gets_nothing_new() -> None:
    fleet = pairs()
    flagged, unlisted = fleet.made["a"], fleet.made["d"]
    flagged.where = structs.replace(flagged.where, draining=True)
    unlisted.listed = False
    assert {fleet.choose() for _ in range(4)} == {("b", "e")}


def ranks(fleet: Fleet, instance: str, role: Role, size: int, **kw: Any) -> None:
    """An instance of `size` DP ranks; they are named a0, a1, …"""
    for rank in reversed(range(size)):
        fleet.add(f"{instance}{rank}", role, rank=rank, dp_size=size, **kw)


def placed(fleet: Fleet, room: int = 1, **hints: Any) -> Route | None:
    wanted = PlacementRequest(room, REQUEST.prompt, RankHints(**hints))
    return fleet.router.choose(Attempts(REQUEST), wanted, 0.0, patient=False)


def test_a_client_may_ask_for_the_ranks_of_either_half() -> None:
    fleet = Fleet()
    ranks(fleet, "p", Role.PREFILL, 4)
    ranks(fleet, "d", Role.DECODE, 2)
    for _ in range(4):
        route = placed(fleet, routed_dp_rank=1, disagg_prefill_dp_rank=3)
        assert route is not None
        assert (fleet.name(route.prefill), fleet.name(route.decode)) == ("p3", "d1")
    fleet.made["p3"].session = None
    assert placed(fleet, disagg_prefill_dp_rank=3) is None, "no other rank is taken for it"


@pytest.mark.parametrize(
    ("hints", "fragment"),
    [
        ({"routed_dp_rank": 2}, "routed_dp_rank 2: the decode instances have ranks 0 to 1"),
        ({"disagg_prefill_dp_rank": 4}, "ranks 0 to 3"),
        ({"disagg_prefill_dp_rank": -1}, "ranks 0 to 3"),
    ],
)
def test_a_rank_that_no_instance_has_is_refused_at_the_door(hints: dict[str, int], fragment: str) -> None:
    fleet = Fleet()
    ranks(fleet, "p", Role.PREFILL, 4)
    ranks(fleet, "d", Role.DECODE, 2)
    with pytest.raises(DpRankOutOfRange, match=fragment) as caught:
        fleet.router.check_ranks(RankHints(**hints))
    assert status_of(caught.value.code) == 400
    fleet.router.check_ranks(RankHints(routed_dp_rank=1, disagg_prefill_dp_rank=3))
    Fleet().router.check_ranks(RankHints(**hints))  # nobody is there who knows


def test_where_the_rank_that_is_asked_for_is_gone_a_unified_replica_serves() -> None:
    fleet = Fleet(("u", Role.UNIFIED))
    ranks(fleet, "p", Role.PREFILL, 2)
    ranks(fleet, "d", Role.DECODE, 2)
    fleet.made["p1"].session = None
    for _ in range(3):
        route = placed(fleet, disagg_prefill_dp_rank=1)
        assert route is not None
        assert fleet.name(route.decode) == "u"


def test_of_one_instance_the_rank_is_chosen_by_its_own_rule() -> None:
    fleet = Fleet(("d", Role.DECODE), policy="total_requests")
    ranks(fleet, "p", Role.PREFILL, 3, load_balance="round_robin")
    fleet.made["p0"].running = dict.fromkeys("abc")  # type: ignore[assignment]
    chosen = [fleet.name(route.prefill) for _ in range(6) if (route := placed(fleet)) is not None]
    assert sorted(chosen) == ["p0", "p0", "p1", "p1", "p2", "p2"]


def test_where_the_rank_that_the_room_names_is_gone_the_room_is_fitted_to_the_one_that_is_chosen() -> None:
    fleet = Fleet(("d", Role.DECODE))
    ranks(fleet, "p", Role.PREFILL, 4, load_balance="follow_bootstrap_room")
    fleet.made["p2"].session = None
    for room in (2, 6, 2**63 - 2):
        route = placed(fleet, room=room)
        assert route is not None
        assert route.prefill is not fleet.made["p2"]
        assert route.room % 4 == route.prefill.where.dp_rank
        assert route.room > 0
    pinned = placed(fleet, room=6, disagg_prefill_dp_rank=1)
    assert pinned is not None
    assert pinned.room == 6, "whoever asks for a rank has a conflict, and prefill's rule for it"


def at_decode(limit: int | None, *more: tuple[str, Role], **settings: Any) -> Fleet:
    """A fleet of which `d` computes prompts of at most `limit` uncached tokens itself."""
    fleet = Fleet(("d", Role.DECODE), *more, **settings)
    computes(fleet, "d", limit)
    return fleet


def computes(fleet: Fleet, name: str, limit: int | None) -> None:
    fleet.made[name].load = load(local_tokens=limit)
    fleet.router.membership_changed()


def route(fleet: Fleet, attempts: Attempts | None = None, **asked: Any) -> tuple[str, str, str] | None:
    attempts = attempts or Attempts(REQUEST)
    wanted = PlacementRequest(1, attempts.request.prompt, **asked)
    made = fleet.router.choose(attempts, wanted, 0.0, patient=False)
    return None if made is None else (fleet.name(made.prefill), fleet.name(made.decode), made.reason)


@pytest.mark.parametrize(
    ("limit", "chosen"),
    [
        (2, ("d", "d", "short")),
        (1, ("a", "d", "long")),
        (0, ("a", "d", "long")),
        (None, ("a", "d", "never")),
    ],
)
def test_decode_computes_what_is_at_most_as_long_as_it_says(
    limit: int | None, chosen: tuple[str, str, str]
) -> None:
    assert route(at_decode(limit, ("a", Role.PREFILL))) == chosen


def test_decode_computes_long_prompts_where_no_prefill_is_there_if_it_computes_any() -> None:
    assert route(at_decode(0)) == ("d", "d", "no_prefill")
    fleet = at_decode(None)
    assert route(fleet) is None
    assert not fleet.router.can_serve
    computes(fleet, "d", 0)
    assert fleet.router.can_serve


def test_decode_computes_what_failed_on_every_prefill_and_what_none_can_hand_over() -> None:
    fleet = at_decode(0, ("a", Role.PREFILL))
    attempts = Attempts(REQUEST)
    attempts.begin(fleet.made["a"].leader, fleet.made["d"].leader)
    attempts.failed(
        Internal("a bug", retryable=True).at(origin=fleet.made["a"].name).info, fleet.made["a"].leader
    )
    assert route(fleet, attempts) == ("d", "d", "no_prefill")
    fleet = at_decode(0, ("a", Role.PREFILL))
    assert fleet.fail("a", "d", LayoutMismatch("unequal")) is Next.PLACE_AGAIN
    assert route(fleet) == ("d", "d", "no_prefill")
    full = OutOfCapacity("full", retryable=True).at(origin=fleet.made["a"].name)
    assert fleet.fail("a", "d", full) is Next.PLACE_AGAIN, "decode is asked without it"


def test_who_names_the_prefill_side_gets_a_hand_off_or_nothing() -> None:
    fleet = at_decode(100, ("a", Role.PREFILL))
    asked: list[dict[str, Any]] = [
        {"ranks": RankHints(disagg_prefill_dp_rank=0)},
        {"ranks": RankHints(force_query_prefill_dp_rank=True)},
    ]
    assert [route(fleet, **one) for one in asked] == [("a", "d", "asked")] * 2
    fleet = at_decode(100)
    assert [route(fleet, **one) for one in asked] == [None] * 2


def test_tokens_that_were_given_count_and_those_that_decode_was_sent_before_do_not() -> None:
    fleet = at_decode(3, ("a", Role.PREFILL))
    attempts = Attempts(structs.replace(REQUEST, output=[7]))
    assert route(fleet, attempts) == ("d", "d", "short")
    attempts = Attempts(structs.replace(REQUEST, output=[7, 8]))
    assert route(fleet, attempts) == ("a", "d", "long")
    fleet = at_decode(3, ("a", Role.PREFILL), policy="prefix_aware")
    long = Attempts(structs.replace(REQUEST, prompt=list(range(66))))
    assert route(fleet, long) == ("a", "d", "long")
    assert route(fleet, long) == ("d", "d", "short"), "64 of 66 tokens were sent there before"


def test_a_unified_instance_stands_beside_decode_instances_that_compute_prompts() -> None:
    fleet = at_decode(2, ("a", Role.PREFILL), ("u", Role.UNIFIED))
    assert {route(fleet) for _ in range(4)} == {("d", "d", "short"), ("u", "u", "unified")}


def test_prefill_s_failure_takes_the_proof_away_as_decode_s_does() -> None:
    for name in "ad":
        fleet = pairs()
        fleet.router.record_success(Route(1, fleet.made["a"], fleet.made["d"]))
        fleet.router.record_failure(fleet.made[name], Internal("a bug").info, 0.0)
        assert not fleet.router.proven, name


def test_in_direct_mode_a_leader_that_takes_nothing_new_refuses_its_half_itself() -> None:
    fleet = Fleet(("u", Role.UNIFIED))
    wanted = PlacementRequest(7)
    fleet.made["u"].where = structs.replace(fleet.made["u"].where, draining=True)
    assert fleet.router.choose(Attempts(REQUEST), wanted, 0.0, patient=False) is None
    found = fleet.router.refuser(wanted)
    assert found is not None
    assert (found.room, found.replicas) == (7, (fleet.made["u"],))
    other_rank = PlacementRequest(7, ranks=RankHints(routed_dp_rank=1))
    assert fleet.router.refuser(other_rank) is None, "another rank than was asked for might take it"
    fleet.made["u"].session = None
    assert fleet.router.refuser(wanted) is None
    assert Fleet(("u", Role.UNIFIED)).router.refuser(wanted) is None, "it takes requests"


def test_a_rank_that_the_largest_instance_has_may_be_asked_for_also_of_unified_ones() -> None:
    fleet = Fleet()
    ranks(fleet, "p", Role.PREFILL, 2)
    ranks(fleet, "q", Role.PREFILL, 4)
    ranks(fleet, "u", Role.UNIFIED, 3)
    fleet.router.check_ranks(RankHints(routed_dp_rank=2, disagg_prefill_dp_rank=3))
    for hints in (RankHints(routed_dp_rank=3), RankHints(disagg_prefill_dp_rank=4)):
        with pytest.raises(DpRankOutOfRange):
            fleet.router.check_ranks(hints)


def test_a_room_that_is_fitted_to_rank_0_is_never_room_0_which_is_none() -> None:
    fleet = Fleet(("d", Role.DECODE))
    ranks(fleet, "p", Role.PREFILL, 2, load_balance="follow_bootstrap_room")
    fleet.made["p1"].session = None
    made = placed(fleet, room=1)
    assert made is not None
    assert (made.room, made.prefill.where.dp_rank) == (2, 0)
