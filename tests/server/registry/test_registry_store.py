"""The store, in virtual time."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from registry_records import A, B, C, names, record, store

from segue.kv.errors import (
    DpRankConflict,
    DpRankOutOfRange,
    Draining,
    InvalidRequest,
    NotFound,
    OutOfCapacity,
    PeerRestarted,
)
from segue.kv.ids import Incarnation, LeaderId, Role
from segue.server.registry.registry_records import InstanceRecord, ReplicaRecord, RoomRecord
from segue.server.registry.registry_store import TIMERS, TOPOLOGY


def room(incarnation: Incarnation = A, dp_rank: int = 0, ttl_s: float = 5.0) -> RoomRecord:
    return RoomRecord(incarnation=incarnation, dp_rank=dp_rank, ttl_s=ttl_s)


def test_roles_are_filtered_and_every_visible_change_has_a_version() -> None:
    registry, _ = store()
    versions = [registry.version]
    registry.register(record(A), 0)
    versions.append(registry.version)
    registry.register(record(B, role=Role.DECODE), 0)
    versions.append(registry.version)
    registry.register(record(B, role=Role.DECODE), 0)
    assert registry.version == versions[-1], "saying the same again is no change"
    registry.set_draining(A, True)
    versions.append(registry.version)
    registry.set_draining(A, True)
    assert registry.version == versions[-1]
    registry.leave(LeaderId(B))
    versions.append(registry.version)
    assert len(set(versions)) == len(versions)
    assert names(registry.instances(Role.PREFILL).instances) == [A]
    assert registry.instances().instances[0].draining
    assert not registry.instances(Role.DECODE).instances


#: Another value for every field of a registration; a field that is added and not named here fails the test.
OTHERS: dict[str, Any] = {
    "role": Role.DECODE,
    "model": "other",
    "served_model": "other",
    "context_tokens": 4096,
    "source": "elsewhere",
    "dp_size": 3,
    "tp_size": 2,
    "pp_size": 2,
    "cp_size": 2,
    "load_balance": "total_tokens",
    "http_host": "10.0.0.1",
    "http_port": 9,
    "bootstrap_port": 8998,
    "shared_experts": True,
}
RANK_OTHERS: dict[str, Any] = {"host": "10.0.0.1", "port": 1, "version": "9", "transports": ["tcp"]}


def test_lesson_18_each_field_of_a_registration_is_immutable_for_an_incarnation() -> None:
    # `draining` may change, by its own query, and `complete` with the ranks; the incarnation is the key, the
    # ranks have their own list.
    changeable = {"incarnation", "complete", "draining", "replicas"}
    assert set(OTHERS) == set(InstanceRecord.__struct_fields__) - changeable
    assert set(RANK_OTHERS) == set(ReplicaRecord.__struct_fields__) - {"dp_rank", "draining"}
    first = record(dp_size=2)
    (rank,) = first.replicas
    changed = [msgspec.structs.replace(first, **{name: value}) for name, value in OTHERS.items()]
    changed += [
        msgspec.structs.replace(first, replicas=[msgspec.structs.replace(rank, **{name: value})])
        for name, value in RANK_OTHERS.items()
    ]
    for other in changed:
        registry, clock = store(ttl_s=10)
        registry.register(first, 0)
        before, version = registry.instances().instances, registry.version
        with pytest.raises(DpRankConflict):
            registry.register(other, 0)
        with pytest.raises((DpRankConflict, DpRankOutOfRange, InvalidRequest)):
            # Nor does another rank of the same incarnation say something else.
            registry.register(
                msgspec.structs.replace(
                    other, replicas=[msgspec.structs.replace(r, dp_rank=1) for r in other.replicas]
                )
                if other.replicas == first.replicas
                else msgspec.structs.replace(first, replicas=[msgspec.structs.replace(rank, dp_rank=1)]),
                1,
            )
        assert registry.instances().instances == before
        assert registry.version == version
        clock.advance(6)
        with pytest.raises(DpRankConflict):  # nor by being repeated, nor later
            registry.register(other, 0)
        clock.advance(6)
        assert not registry.instances().instances  # and a refused one keeps nothing alive


def test_lesson_18_a_rank_that_fell_silent_cannot_come_back_elsewhere_while_its_incarnation_lives() -> None:
    registry, clock = store(ttl_s=10)
    registry.register(record(dp_rank=0, dp_size=2), 0)
    clock.advance(6)
    registry.register(record(dp_rank=1, dp_size=2), 1)
    clock.advance(6)
    (instance,) = registry.instances().instances
    assert [r.dp_rank for r in instance.replicas] == [1]
    with pytest.raises(DpRankConflict, match="cannot move"):
        registry.register(record(dp_rank=0, dp_size=2, port=7777), 0)
    registry.register(record(dp_rank=0, dp_size=2), 0)
    assert registry.instances().instances[0].ready


def test_all_ranks_of_an_incarnation_agree_on_its_size() -> None:
    registry, _ = store()
    registry.register(record(dp_rank=0, dp_size=2), 0)
    with pytest.raises(DpRankConflict, match="dp_size"):
        registry.register(record(dp_rank=1, dp_size=4), 1)
    with pytest.raises(DpRankConflict, match="both claim"):
        registry.register(record(dp_rank=1, dp_size=2, port=9000), 1)


@pytest.mark.parametrize("dp_rank", [1, -1])
def test_a_rank_beyond_the_size_of_its_instance_is_out_of_range(dp_rank: int) -> None:
    registry, _ = store()
    with pytest.raises(DpRankOutOfRange):
        registry.register(record(), dp_rank)
    assert not registry.instances().instances


def at(host: str = "h", port: int = 1, **more: Any) -> dict[str, Any]:
    return {"replicas": [ReplicaRecord(dp_rank=0, host=host, port=port, **more)]}


@pytest.mark.parametrize(
    ("most", "more"),
    [
        ({"incarnation": "x" * 64}, {"incarnation": "x" * 65}),
        ({"model": "x" * 512}, {"model": "x" * 513}),
        ({"served_model": "x" * 512}, {"served_model": "x" * 513}),
        ({"http_host": "x" * 512}, {"http_host": "x" * 513}),
        ({"source": "x" * 4096}, {"source": "x" * 4097}),
        ({"dp_size": 2**16}, {"dp_size": 2**16 + 1}),
        ({"cp_size": 1}, {"cp_size": 0}),
        ({"http_port": 65535}, {"http_port": 65536}),
        ({"bootstrap_port": 0}, {"bootstrap_port": -1}),
        (at(port=65535), at(port=65536)),
        (at("x" * 255), at("x" * 256)),
        (at("node-1"), at("node\n1")),
        (at(version="x" * 512), at(version="x" * 513)),
        (at(transports=["x"]), at(transports=["x" * 600])),
        (at(), {"replicas": [ReplicaRecord(dp_rank=0, host="h", port=port) for port in (1, 2)]}),
        (at(), {"replicas": []}),
        (at(), {"replicas": [ReplicaRecord(dp_rank=3, host="h", port=1)]}),
        (at("h"), at("")),
        (at(port=1), at(port=0)),
        ({"incarnation": "x"}, {"incarnation": ""}),
    ],
)
def test_each_bound_of_a_record_is_where_it_is(most: dict[str, Any], more: dict[str, Any]) -> None:
    registry, _ = store()
    with pytest.raises(InvalidRequest):
        registry.register(msgspec.structs.replace(record(), **more), 0)
    assert not registry.instances().instances
    registry.register(msgspec.structs.replace(record(), **most), 0)
    assert len(registry.instances().instances) == 1


#: Of each number and text of a registration that is bounded: a value that nobody can mean.
WRONG: dict[str, list[object]] = {
    **{key: [0, -1, 2**16 + 1] for key in ("dp_size", "tp_size", "pp_size", "cp_size")},
    **{key: [-1, 2**16] for key in ("http_port", "bootstrap_port")},
    **{key: ["x" * 513] for key in ("model", "served_model", "load_balance", "http_host")},
}


@pytest.mark.parametrize("name", sorted(WRONG))
def test_no_number_and_no_text_of_a_registration_is_without_a_bound(name: str) -> None:
    # `source` may be as long as a path is; the body that it comes in has its own bound.
    free = {
        "incarnation",
        "role",
        "source",
        "context_tokens",
        "shared_experts",
        "complete",
        "draining",
        "replicas",
    }
    assert set(WRONG) | free == set(InstanceRecord.__struct_fields__)
    registry, _ = store()
    for value in WRONG[name]:
        with pytest.raises(InvalidRequest):
            registry.register(msgspec.structs.replace(record(), **{name: value}), 0)
    assert not registry.instances().instances


def test_a_version_that_was_seen_before_a_restart_means_nothing_after_it() -> None:
    versions = {store(random_bytes=lambda n, b=b: bytes([b]) * n)[0].version for b in range(1, 9)}
    assert len(versions) == 8, "else who waits for another one than it has seen could wait in vain"


@pytest.mark.parametrize(
    ("ranks", "dp_size", "complete", "ready"),
    [
        ([0], 1, False, True),
        ([1, 0], 2, False, True),
        ([0], 2, False, False),
        ([0, 0], 2, False, False),
        ([1, 2], 2, False, False),
        ([1], 2, True, True),
        ([], 2, True, False),
    ],
)
def test_an_instance_that_is_ready_has_its_ranks_or_had_them_and_still_has_one(
    ranks: list[int], dp_size: int, complete: bool, ready: bool
) -> None:
    replicas = [ReplicaRecord(dp_rank=rank, host="h", port=9 + at) for at, rank in enumerate(ranks)]
    assert record(dp_size=dp_size, complete=complete, replicas=replicas).ready is ready


def test_who_may_not_come_back_is_remembered_within_a_bound_and_the_latest_stay() -> None:
    registry, _ = store(max_instances=2)
    for who in (A, B, C):
        registry.register(record(who), 0)
        registry.leave(LeaderId(who))
    for who in (B, C):
        with pytest.raises(Draining):
            registry.register(record(who), 0)
    registry.register(record(A), 0)


def test_a_rank_that_is_silent_leaves_its_rooms_to_the_others_only_when_all_are() -> None:
    registry, clock = store(ttl_s=10)
    for dp_rank in (0, 1):
        registry.register(record(dp_rank=dp_rank, dp_size=2), dp_rank)
        registry.register_room(7 + dp_rank, room(dp_rank=dp_rank, ttl_s=100))
    clock.advance(6)
    registry.register(record(dp_rank=1, dp_size=2), 1)
    clock.advance(6)
    assert registry.room(7) == LeaderId(A, 0), "it may only be slow, and is told so by its own sessions"
    clock.advance(6)
    assert not registry.instances().instances
    assert registry.rooms_held == 0
    registry.register(record(B, port=9000), 0)  # nothing is left at its address either
    assert names(registry.instances().instances) == [B]
    registry.register(record(dp_rank=0, dp_size=2, port=9000), 0)


def test_a_rank_that_fell_silent_and_is_back_is_a_change_that_watchers_hear_of() -> None:
    registry, clock = store(ttl_s=10.0)
    heard: list[int] = []
    registry.subscribe(TOPOLOGY, lambda: heard.append(registry.version))
    for dp_rank in (0, 1):
        registry.register(record(dp_rank=dp_rank, dp_size=2), dp_rank)
    for back in (False, True, False, True):
        before, count = registry.version, len(heard)
        if back:
            registry.register(record(dp_rank=1, dp_size=2), 1)
        else:  # only the other one is heard of
            for _ in range(2):
                clock.advance(6.0)
                registry.register(record(dp_rank=0, dp_size=2), 0)
        [shown] = registry.instances().instances
        assert [r.dp_rank for r in shown.replicas] == ([0, 1] if back else [0])
        assert shown.ready, "the others go on without it"
        assert registry.version != before
        assert len(heard) > count


def test_the_first_of_two_ranks_that_leaves_does_not_take_the_other_out() -> None:
    registry, clock = store()
    for dp_rank in (0, 1):
        registry.register(record(dp_rank=dp_rank, dp_size=2), dp_rank)
        registry.register_room(7 + dp_rank, room(dp_rank=dp_rank, ttl_s=100))
    registry.leave(LeaderId(A, 0))
    [shown] = registry.instances().instances
    assert [r.dp_rank for r in shown.replicas] == [1]
    assert shown.ready
    assert registry.room(7) is None, "nobody is sent to a rank that has left"
    assert registry.room(8) == LeaderId(A, 1)
    clock.advance(6)
    with pytest.raises(Draining, match="rank 0"):
        registry.register(record(dp_rank=0, dp_size=2), 0)
    registry.register(record(dp_rank=1, dp_size=2), 1)
    registry.leave(LeaderId(A, 0))
    registry.leave(LeaderId(A, 1))
    assert not registry.instances().instances
    with pytest.raises(Draining):
        registry.register(record(dp_rank=1, dp_size=2), 1)


def test_an_instance_is_not_ready_before_all_its_ranks_were_there_even_if_one_leaves() -> None:
    registry, _ = store()
    for dp_rank in (0, 1):
        registry.register(record(dp_rank=dp_rank, dp_size=3), dp_rank)
    registry.leave(LeaderId(A, 0))
    registry.register(record(dp_rank=2, dp_size=3), 2)
    assert not registry.instances().instances[0].ready


def test_a_registry_that_forgot_an_instance_learns_from_any_rank_that_it_was_complete() -> None:
    registry, _ = store()
    answer = registry.register(record(dp_rank=0, dp_size=2), 0)
    assert not answer.complete
    assert registry.register(record(dp_rank=1, dp_size=2), 1).complete
    young, _ = store()
    assert not young.register(record(dp_rank=0, dp_size=2), 0).complete
    assert young.register(record(dp_rank=1, dp_size=2, complete=True), 1).complete
    young.leave(LeaderId(A, 0))
    assert young.instances().instances[0].ready


def test_one_rank_drains_and_the_others_do_not() -> None:
    registry, _ = store()
    for dp_rank in (0, 1):
        registry.register(record(dp_rank=dp_rank, dp_size=2), dp_rank)
    registry.set_draining(A, True, 1)
    [shown] = registry.instances().instances
    assert [r.draining for r in shown.replicas] == [False, True]
    assert not shown.draining
    registry.set_draining(A, True, 0)
    assert registry.instances().instances[0].draining
    with pytest.raises(NotFound, match="rank 2"):
        registry.set_draining(A, True, 2)


def test_a_new_process_at_the_address_of_one_rank_takes_only_that_one_out() -> None:
    registry, _ = store()
    for dp_rank in (0, 1):
        registry.register(record(dp_rank=dp_rank, dp_size=2, port=9000 + dp_rank), dp_rank)
    registry.register(record(B, port=9000), 0)
    old, new = registry.instances().instances
    assert ([r.dp_rank for r in old.replicas], new.incarnation) == ([1], B)
    with pytest.raises(PeerRestarted):
        registry.register(record(dp_rank=0, dp_size=2, port=9000), 0)
    registry.register(record(C, port=9000), 0)  # of a rank that is gone nothing is left at its address
    assert [r.dp_rank for r in registry.instances().instances[0].replicas] == [1]


def test_lesson_09_a_new_incarnation_at_the_same_address_replaces_the_old_at_once() -> None:
    registry, _ = store()
    registry.register(record(A, port=9000), 0)
    registry.register_room(7, room(A))
    registry.register(record(B, port=9000), 0)
    assert names(registry.instances().instances) == [B]
    assert registry.room(7) is None
    with pytest.raises(PeerRestarted):
        registry.register(record(A, port=9000), 0)
    assert names(registry.instances().instances) == [B]


def test_rooms_of_nobody_out_of_range_or_beyond_the_bound_are_typed_errors() -> None:
    registry, clock = store(max_rooms=3, max_room_ttl_s=50)
    with pytest.raises(NotFound):
        registry.register_room(1, room())
    registry.register(record(A, dp_size=2), 0)
    for wrong in (0, -1, 2**64):
        with pytest.raises(InvalidRequest):
            registry.register_room(wrong, room())
    for ttl_s in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(InvalidRequest):
            registry.register_room(1, room(ttl_s=ttl_s))
    with pytest.raises(DpRankOutOfRange):
        registry.register_room(1, room(dp_rank=2))
    for number in (1, 2, 2**64 - 1):
        registry.register_room(number, room(ttl_s=1e9))
    with pytest.raises(OutOfCapacity):
        registry.register_room(4, room())
    registry.register_room(2, room())  # which is there already
    for _ in range(10):  # the owner stays alive; the rooms' time is cut to the limit
        clock.advance(5)
        registry.register(record(A, dp_size=2), 0)
    assert registry.rooms_held == 0
    registry.register_room(4, room())


def test_instances_are_bounded() -> None:
    registry, _ = store(max_instances=2)
    registry.register(record(B), 0)
    registry.register(record(A), 0)
    with pytest.raises(OutOfCapacity):
        registry.register(record(C), 0)
    assert names(registry.instances().instances) == [A, B]
    registry.register(record(A), 0)  # who is there stays


def test_the_drain_flag_is_the_one_thing_that_changes() -> None:
    registry, _ = store()
    registry.register(record(A, draining=True), 0)
    assert registry.instances().instances[0].draining
    registry.set_draining(A, False)
    registry.register(record(A, draining=True), 0)  # a heartbeat made before
    assert not registry.instances().instances[0].draining
    with pytest.raises(NotFound):
        registry.set_draining(B, True)


def test_watchers_hear_their_topic_only_and_stop_when_they_say_so() -> None:
    registry, _ = store()
    heard: list[str] = []
    stops = [
        registry.subscribe(TOPOLOGY, lambda: heard.append("topology")),
        registry.subscribe(7, lambda: heard.append("room 7")),
        registry.subscribe(TIMERS, lambda: heard.append("timers")),
    ]
    registry.register(record(A), 0)
    assert heard == ["timers", "topology"]
    registry.register_room(8, room(ttl_s=50))
    registry.register_room(7, room(ttl_s=1))
    assert heard[2:] == ["timers", "room 7"]
    for stop in stops:
        stop()
    registry.leave(LeaderId(A))
    assert len(heard) == 4


class StoreModel(RuleBasedStateMachine):
    """Any order of operations against a model that remembers only what must be true."""

    def __init__(self) -> None:
        super().__init__()
        self.registry, self.clock = store(ttl_s=10.0, max_rooms=8)
        self.left: set[LeaderId] = set()
        self.alive_until: dict[LeaderId, float] = {}
        self.owners: dict[int, tuple[int, float]] = {}
        self.heard = 0
        self.registry.subscribe(TOPOLOGY, self.hear)
        self.last = (self.registry.instances(), self.heard)

    def hear(self) -> None:
        self.heard += 1

    def ranks(self) -> dict[Incarnation, list[int]]:
        """The living ranks of each instance."""
        found: dict[Incarnation, list[int]] = {}
        for leader, until in sorted(self.alive_until.items()):
            if until > self.clock.now():
                found.setdefault(leader.incarnation, []).append(leader.dp_rank)
        return found

    def alive(self) -> set[Incarnation]:
        return set(self.ranks())

    @rule(who=st.sampled_from([A, B, C]), dp_rank=st.integers(0, 2))
    def register(self, who: Incarnation, dp_rank: int) -> None:
        if LeaderId(who, dp_rank) in self.left:
            with pytest.raises(Draining):
                self.registry.register(record(who, dp_rank, dp_size=3), dp_rank)
        else:
            self.registry.register(record(who, dp_rank, dp_size=3), dp_rank)
            self.alive_until[LeaderId(who, dp_rank)] = self.clock.now() + 10.0

    @rule(who=st.sampled_from([A, B, C]), dp_rank=st.integers(0, 2))
    def leave(self, who: Incarnation, dp_rank: int) -> None:
        leader = LeaderId(who, dp_rank)
        there = who in self.alive() and leader in self.alive_until
        self.registry.leave(leader)
        if not there:
            return
        self.left.add(leader)
        del self.alive_until[leader]
        if who == A:
            self.owners = {r: (d, t) for r, (d, t) in self.owners.items() if d != dp_rank}
        self._deserted(who)

    def _deserted(self, who: Incarnation) -> None:
        """An incarnation without a living rank is forgotten, with its silent ranks."""
        if who not in self.alive():
            self.alive_until = {a: t for a, t in self.alive_until.items() if a.incarnation != who}
            if who == A:
                self.owners.clear()

    @rule(seconds=st.floats(0.1, 9.9))
    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.owners = {r: (d, t) for r, (d, t) in self.owners.items() if t > self.clock.now()}
        for who in (A, B, C):
            self._deserted(who)

    @precondition(lambda self: A in self.alive())
    @rule(number=st.integers(1, 4), dp_rank=st.integers(0, 2))
    def claim(self, number: int, dp_rank: int) -> None:
        owner = self.owners.get(number)
        if owner is not None and owner[0] != dp_rank:
            with pytest.raises(DpRankConflict):
                self.registry.register_room(number, room(dp_rank=dp_rank))
            return
        self.registry.register_room(number, room(dp_rank=dp_rank))
        if owner is None:
            self.owners[number] = (dp_rank, self.clock.now() + 5.0)

    @invariant()
    def agrees(self) -> None:
        seen = self.registry.instances()
        assert {i.incarnation: [r.dp_rank for r in i.replicas] for i in seen.instances} == self.ranks()
        before, heard = self.last
        if seen.instances != before.instances:
            assert seen.version != before.version, "who waits for a change is answered by the version"
            assert self.heard > heard, "who waits for a change must be woken"
        self.last = (seen, self.heard)
        for number in range(1, 5):
            owner = self.owners.get(number)
            assert self.registry.room(number) == (LeaderId(A, owner[0]) if owner else None)
        assert self.registry.rooms_held == len(self.owners)
        due = self.registry.next_expiry()
        times = [t for t in self.alive_until.values() if t > self.clock.now()]
        times += [t for _, t in self.owners.values()]
        assert not times or (due is not None and due <= min(times))


StoreModel.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestStoreModel = StoreModel.TestCase
