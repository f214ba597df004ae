"""A frontend's memory of replicas, and other messages on their sessions."""

from __future__ import annotations

from typing import Any

import pytest
from fleet_rig import Leader, a_rig
from test_router import REQUEST, Fleet, pairs, ranks

from segue.engine.kv_events import FollowPrefixes, Prefixes, page_hashes
from segue.kv.errors import (
    Draining,
    ErrorCode,
    Internal,
    OutOfCapacity,
    PeerLost,
    SegueError,
    TransferFailed,
)
from segue.kv.ids import Role
from segue.server.balance.attempts import Attempts, Next
from segue.server.fleet.replica import Route
from segue.server.fleet.router import Cooling

# ---- the router --------------------------------------------------------------------------------------


def test_only_a_retry_that_is_made_takes_from_the_fleet_s_budget() -> None:
    fleet = pairs(retry_budget=1.0)
    for _ in range(5):
        assert fleet.fail("a", "d", Internal("a bug")) is Next.END
        fleet.router.draining = True
        assert fleet.fail("a", "d", TransferFailed("broke")) is Next.END
        fleet.router.draining = False
        for code in (ErrorCode.PEER_LOST, ErrorCode.DRAINING, ErrorCode.BOOTSTRAP_TIMEOUT):
            assert fleet.router.may_retry(code, Next.PLACE_AGAIN)
    lonely = Fleet(("a", Role.PREFILL), ("d", Role.DECODE), retry_budget=1.0)
    full = OutOfCapacity("full").at(origin=lonely.made["d"].name)
    for _ in range(3):
        assert lonely.fail("a", "d", full) is Next.END, "nobody else could take it"
    for each in (fleet, lonely):
        assert each.fail("a", "d", TransferFailed("broke")) is Next.PLACE_AGAIN
        assert each.fail("a", "d", TransferFailed("broke")) is Next.END


def test_the_last_attempt_s_failure_ends_the_request_and_takes_nothing_from_the_budget() -> None:
    fleet = pairs(retry_budget=1.0)
    attempts = Attempts(REQUEST, limit=1)
    assert fleet.fail("a", "d", TransferFailed("broke"), attempts) is Next.END
    assert fleet.fail("a", "d", TransferFailed("broke")) is Next.PLACE_AGAIN


def leave(fleet: Fleet, name: str) -> None:
    """It leaves, and comes again."""
    replica = fleet.replicas.pop(fleet.made[name].leader)
    fleet.router.membership_changed()
    fleet.replicas[replica.leader] = replica
    fleet.router.membership_changed()


def test_how_a_replica_has_failed_and_served_is_forgotten_with_it_and_with_no_other() -> None:
    fleet = pairs()
    for name in "de":
        fleet.router.record_success(Route(1, fleet.made["a"], fleet.made[name]))
    for name in "be":
        fleet.router.record_failure(fleet.made[name], Internal("a bug").info, 5.0)
    leave(fleet, "e")
    assert fleet.router.cooling(fleet.made["e"].leader) == Cooling(0, 0.0)
    assert fleet.router.cooling(fleet.made["b"].leader).failures == 1
    assert fleet.router.proven, "a and d have served"
    leave(fleet, "d")
    assert not fleet.router.proven


def test_a_success_clears_the_two_that_served_and_nobody_else() -> None:
    fleet = pairs()
    for name in "abde":
        fleet.router.record_failure(fleet.made[name], Internal("a bug").info, 5.0)
    fleet.router.record_success(Route(1, fleet.made["a"], fleet.made["d"]))
    failures = {name: fleet.router.cooling(fleet.made[name].leader).failures for name in "abde"}
    assert failures == {"a": 0, "b": 1, "d": 0, "e": 1}


def test_where_all_have_failed_lately_they_are_asked_all_the_same() -> None:
    fleet = pairs()
    for name in "abde":
        fleet.router.record_failure(fleet.made[name], Internal("a bug").info, 5.0)
    assert {fleet.choose(now=5.1) for _ in range(8)} >= {("a", "d"), ("b", "e")}


@pytest.mark.parametrize(
    ("error", "counts"),
    [
        (Internal("x"), True),
        (TransferFailed("x"), True),
        (PeerLost("x"), True),
        (OutOfCapacity("x"), False),
        (Draining("x"), False),
    ],
)
def test_a_failure_counts_against_the_half_that_it_names(error: SegueError, counts: bool) -> None:
    """Not against the one whose session brought the word."""
    fleet = pairs()
    attempts = Attempts(REQUEST)
    route = Route(1, fleet.made["a"], fleet.made["d"])
    attempts.begin(*route.pair)
    info = error.at(origin=fleet.made["a"].name, peer=fleet.made["d"].name).info
    fleet.router.after_failure(attempts, route, fleet.made["a"], info, 5.0)
    failures = {name: fleet.router.cooling(fleet.made[name].leader).failures for name in "ad"}
    named = "a" if isinstance(error, Internal) else "d"
    assert failures == {"a": 0, "d": 0} | ({named: 1} if counts else {})


def test_the_rule_of_an_instance_goes_on_where_it_was_and_is_forgotten_with_it() -> None:
    fleet = Fleet(("d", Role.DECODE), policy="total_requests")
    ranks(fleet, "p", Role.PREFILL, 2, load_balance="round_robin")
    assert len(fleet.router._rank_policies) == 0
    first = fleet.choose()
    assert first is not None
    [kept] = fleet.router._rank_policies.values()
    second = fleet.choose()
    assert second is not None
    assert {first[0], second[0]} == {"p0", "p1"}
    assert list(fleet.router._rank_policies.values()) == [kept]
    for name in ("p0", "p1"):
        del fleet.replicas[fleet.made[name].leader]
    fleet.router.membership_changed()
    assert fleet.router._rank_policies == {}


def test_a_replica_is_offered_with_what_it_says_and_what_was_sent_there() -> None:
    fleet = pairs()
    replica = fleet.made["d"]
    replica.running = dict.fromkeys("xyz")  # type: ignore[assignment]
    replica.tokens = 70
    candidate = replica.candidate()
    assert (candidate.leader, candidate.in_flight, candidate.in_flight_tokens) == (replica.leader, 3, 70)
    assert (candidate.load, candidate.dp_size) == (None, 1)


# ---- sessions ----------------------------------------------------------------------------------------


class Following(Leader):
    """A leader that notes when it is asked for its prefixes."""

    def __init__(self, role: Role) -> None:
        super().__init__(role)
        self.followed = 0

    def received(self, session: Any, message: object) -> None:
        self.followed += isinstance(message, FollowPrefixes)
        super().received(session, message)


@pytest.mark.parametrize("policy", ["prefix_aware", "total_tokens"])
async def test_prefixes_are_asked_for_on_each_session_and_again_where_something_was_lost(policy: str) -> None:
    prompt = list(range(64))
    hashes = list(page_hashes(prompt, 16))

    async with a_rig(policy=policy) as rig:
        leader = Following(Role.UNIFIED)
        rig.leaders.append(leader)
        rig.registry.put(await leader.start())
        await rig.until(lambda: rig.fleet.can_serve)
        index = rig.fleet.membership.prefix_index
        assert await rig.run() == [5, 6, 7]
        if policy != "prefix_aware":
            assert (index, leader.followed) == (None, 0)
            return
        assert index is not None
        await leader.until(lambda: leader.followed == 1)
        leader.session.send(Prefixes(seq=0, page_tokens=16, stored=hashes[:2]))
        assert await rig.run() == [5, 6, 7]
        assert index.cached([leader.node.me], prompt) == {leader.node.me: 32}
        leader.session.send(Prefixes(seq=2, page_tokens=16, stored=hashes[2:]))
        await leader.until(lambda: leader.followed == 2)
        assert index.cached([leader.node.me], prompt) == {}
        leader.session.send(Prefixes(seq=0, page_tokens=16, stored=hashes))
        assert await rig.run() == [5, 6, 7]
        assert index.cached([leader.node.me], prompt) == {leader.node.me: 64}
        leader.session.close(PeerLost("the cable"))
        await rig.until(lambda: not rig.fleet.can_serve)
        assert index.cached([leader.node.me], prompt) == {}, "its process may be another one"
        await leader.until(lambda: leader.followed == 3)
