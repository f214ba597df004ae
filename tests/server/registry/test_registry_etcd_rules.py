"""The rules of the registry on etcd, on an etcd in memory: what is written, by whom, and who may not."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from memory_etcd import MemoryEtcd, backend_on
from registry_records import DEADLINE_S, SECRET, A, B, C, names, record

from segue.kv.clock import VirtualClock
from segue.kv.errors import (
    BootstrapTimeout,
    DpRankConflict,
    DpRankOutOfRange,
    Draining,
    InvalidRequest,
    NotFound,
    PeerRestarted,
)
from segue.kv.ids import Incarnation, LeaderId, Role
from segue.server.registry.etcd_backend import EtcdBackend
from segue.server.registry.registry_records import DrainFlag, InstanceRecord, RoomRecord
from segue.server.registry.sealed import Seal

SEAL = Seal(SECRET)
RANKS = SEAL.prefix + b"ranks/"


def process(etcd: MemoryEtcd, clock: VirtualClock | None = None, ttl_s: float = 2.0) -> EtcdBackend:
    return backend_on(etcd, SECRET, clock, ttl_s)


def stored(etcd: MemoryEtcd) -> list[InstanceRecord]:
    """The records that others read, the oldest first."""
    kvs = sorted(etcd.keys.values(), key=lambda kv: kv.create_revision)
    opened = (SEAL.open(kv.key, kv.value, InstanceRecord) for kv in kvs if kv.key.startswith(RANKS))
    return list(filter(None, opened))


def two(rank: int, **changes: Any) -> InstanceRecord:
    return record(A, dp_rank=rank, dp_size=2, **changes)


async def test_saying_the_same_again_prolongs_a_life_and_writes_nothing() -> None:
    etcd = MemoryEtcd()
    mine = process(etcd, ttl_s=1.5)
    first = await mine.put_rank(record(A))
    assert etcd.granted == [2], "whole seconds, and none less than the TTL"
    before = etcd.revision
    assert (await mine.put_rank(record(A))).epoch == first.epoch
    assert etcd.revision == before, "every watcher would hear of it"
    assert etcd.kept == [101]
    assert etcd.granted == [2]


async def test_a_lease_that_was_lost_is_taken_anew_and_the_client_hears_that_much_is_forgotten() -> None:
    etcd = MemoryEtcd()
    mine = process(etcd)
    first = await mine.put_rank(record(A))
    etcd.end(101)
    assert stored(etcd) == []
    etcd.between.append(lambda: etcd.leases.discard(102))  # also one that ends before the first write
    again = await mine.put_rank(record(A))
    assert again.epoch != first.epoch, "it says its rooms again"
    assert {kv.lease for kv in etcd.keys.values()} == {103}
    assert names(stored(etcd)) == [A]


async def test_an_instance_is_complete_once_all_its_ranks_were_there_and_stays_so() -> None:
    etcd = MemoryEtcd()
    ranks = [process(etcd) for _ in range(2)]
    assert not (await ranks[0].put_rank(two(0))).complete
    for rank in range(2):
        await process(etcd).put_rank(record(B, dp_rank=rank, dp_size=2))
    assert not (await ranks[0].put_rank(two(0))).complete, "the other rank is another instance's"
    assert (await ranks[1].put_rank(two(1))).complete
    assert (await ranks[0].put_rank(two(0))).complete
    await ranks[1].delete(LeaderId(A, 1))
    assert (await ranks[0].put_rank(two(0))).complete, "it says what it said before"
    etcd.end(101)  # what was stored is lost; the client still knows
    assert (await ranks[0].put_rank(two(0, complete=True))).complete
    assert (await process(MemoryEtcd()).put_rank(record(C))).complete


async def test_a_drain_flag_is_that_of_one_rank_or_of_all_and_a_heartbeat_does_not_undo_it() -> None:
    etcd = MemoryEtcd()
    ranks = [process(etcd) for _ in range(2)]
    for rank, one in enumerate(ranks):
        await one.put_rank(two(rank))
    await process(etcd).put_rank(record(B))

    def flags() -> list[bool]:
        return [one.draining for one in stored(etcd)]

    await ranks[0].put_draining(A, DrainFlag(draining=True, dp_rank=1))
    assert flags() == [False, True, False]
    for rank, one in enumerate(ranks):
        await one.put_rank(two(rank))  # made before the flag changed
    assert flags() == [False, True, False]
    await ranks[0].put_draining(A, DrainFlag(draining=True))
    assert flags() == [True, True, False]
    leases = {kv.lease for kv in etcd.keys.values()}
    assert leases == {101, 102, 103}, "under the lease of its own process each"
    for who, dp_rank in ((A, 2), (C, None)):
        with pytest.raises(NotFound):
            await ranks[0].put_draining(who, DrainFlag(draining=False, dp_rank=dp_rank))
    assert flags() == [True, True, False]


async def test_who_writes_between_our_read_and_our_write_is_read_again() -> None:
    etcd = MemoryEtcd()
    mine = process(etcd)
    await mine.put_rank(record(A))
    [key] = etcd.keys
    drained = SEAL.close(key, record(A, draining=True, complete=True))
    etcd.between.append(lambda: etcd.write(key, drained, 101))
    await mine.put_draining(A, DrainFlag(draining=True))
    assert stored(etcd)[0].draining
    for _ in range(3):
        etcd.between.append(lambda: etcd.write(key, etcd.keys[key].value, 101))
    await mine.put_draining(A, DrainFlag(draining=False))
    assert not stored(etcd)[0].draining
    etcd.between[:] = [lambda: etcd.write(key, etcd.keys[key].value, 101)] * 99
    with pytest.raises(BootstrapTimeout, match="changed under our hands"):
        await mine.put_draining(A, DrainFlag(draining=True))


async def test_whose_address_has_another_incarnation_was_replaced_and_a_newcomer_replaces() -> None:
    etcd = MemoryEtcd()
    old, new = process(etcd), process(etcd)
    await old.put_rank(record(A, port=9000))
    await new.put_rank(record(B, port=9000))
    assert names(stored(etcd)) == [B]
    with pytest.raises(PeerRestarted):
        await old.put_rank(record(A, port=9000))
    assert names(stored(etcd)) == [B]
    assert (await new.put_rank(record(B, port=9000))).complete


async def test_one_rank_that_leaves_says_so_and_is_gone_with_its_lease_and_the_others_stay() -> None:
    etcd = MemoryEtcd()
    ranks = [process(etcd) for _ in range(2)]
    for rank, one in enumerate(ranks):
        await one.put_rank(two(rank))
    said: list[list[Incarnation]] = []
    revoke = etcd.revoke

    async def seen(lease: int) -> None:
        said.append([one.incarnation for one in stored(etcd) if not one.replicas])
        await revoke(lease)

    etcd.revoke = seen  # type: ignore[method-assign]
    await ranks[0].delete(LeaderId(A, 0))
    assert said == [[A]], "watchers are to know that it did not just fall silent"
    assert [one.replicas[0].dp_rank for one in stored(etcd)] == [1]
    with pytest.raises(Draining):
        await ranks[0].put_rank(two(0))
    await ranks[1].put_rank(two(1))
    assert 102 in etcd.leases


async def test_a_rank_that_somebody_else_took_out_does_not_come_back() -> None:
    etcd = MemoryEtcd()
    mine = process(etcd)
    await mine.put_rank(record(A))
    await process(etcd).delete(LeaderId(A))
    with pytest.raises(Draining):
        await mine.put_rank(record(A))
    assert stored(etcd)[0].replicas == []
    # Its last word, which is there until its lease ends, is in nobody's way.
    await process(etcd).put_rank(record(B))
    await process(etcd).put_rank(record(C, dp_rank=1, dp_size=2))
    assert names(stored(etcd)) == [A, B, C]


async def test_a_rank_does_not_move_within_one_incarnation_also_not_in_its_own_process() -> None:
    etcd = MemoryEtcd()
    mine = process(etcd)
    await mine.put_rank(record(A))
    with pytest.raises(DpRankConflict):
        await mine.put_rank(record(A, port=1234))
    assert len(stored(etcd)) == 1
    await mine.put_rank(record(A))


async def test_a_rank_that_leaves_while_its_registration_is_on_the_way_leaves_nothing_behind() -> None:
    etcd = MemoryEtcd()
    mine, grant = process(etcd), etcd.grant

    async def leaves(ttl_s: int) -> int:
        await mine.delete(LeaderId(A))
        return await grant(ttl_s)

    etcd.grant = leaves  # type: ignore[method-assign]
    with pytest.raises(Draining):
        await mine.put_rank(record(A))
    assert not etcd.keys, "a lease would show it to frontends until it ends"


async def test_what_contradicts_a_rank_that_is_alive_is_refused_and_writes_nothing() -> None:
    etcd = MemoryEtcd()
    await process(etcd).put_rank(two(0))
    other, before = process(etcd), etcd.revision
    with pytest.raises(DpRankConflict):
        await other.put_rank(two(1, model="another"))
    with pytest.raises(DpRankConflict):
        await other.put_rank(two(0, port=1234))
    assert etcd.revision == before
    assert etcd.granted == [2]


async def test_what_somebody_without_the_secret_wrote_is_neither_read_nor_in_the_way() -> None:
    etcd, clock = MemoryEtcd(), VirtualClock()
    mine = process(etcd, clock)
    key = RANKS + b"127.0.0.1:9000"
    etcd.write(key, Seal(b"another secret of others").close(key, record(B, port=9000)))
    etcd.write(RANKS + b"nonsense", b"\x00" * 80)
    await mine.put_rank(record(A))
    assert names((await mine.instances(None, None, 0.0)).instances) == [A]


# ---- the list ----------------------------------------------------------------------------------------


async def test_the_list_follows_what_is_written_by_role_and_with_a_new_version() -> None:
    etcd, clock = MemoryEtcd(), VirtualClock()
    one, other, watcher = process(etcd), process(etcd), process(etcd, clock)
    await one.put_rank(record(A))
    first = await watcher.instances(None, None, 0.0)
    assert names(first.instances) == [A]
    waiting = asyncio.ensure_future(watcher.instances(None, first.version, DEADLINE_S))
    await asyncio.sleep(0)
    await other.put_rank(record(B, role=Role.DECODE))
    second = await waiting
    assert names(second.instances) == [A, B]
    assert second.version != first.version
    assert names((await watcher.instances(Role.DECODE, None, 0.0)).instances) == [B]
    await one.delete(LeaderId(A))
    left = await watcher.instances(None, second.version, DEADLINE_S)
    assert names(left.instances) == [B]
    assert left.epoch == first.epoch, "it said that it leaves: nobody may wait for it to come back"
    await watcher.close()


async def test_who_vanishes_without_a_word_begins_a_new_life_of_the_list() -> None:
    """Then watchers keep showing it for half a TTL, in which whoever lives has come back."""
    etcd, clock = MemoryEtcd(), VirtualClock()
    one, watcher = process(etcd), process(etcd, clock)
    await one.put_rank(record(A))
    first = await watcher.instances(None, None, 0.0)
    assert first.age_s > 1e9, "at first nothing is missing"
    clock.advance(5.0)
    etcd.end(101)
    gone = await watcher.instances(None, first.version, DEADLINE_S)
    assert (gone.instances, gone.epoch != first.epoch) == ([], True)
    assert gone.age_s == pytest.approx(1.0), "half of the TTL of two seconds is over already"
    clock.advance(0.25)
    assert (await watcher.instances(None, None, 0.0)).age_s == pytest.approx(1.25)
    await watcher.close()


async def test_a_list_that_was_compacted_or_silent_is_read_again_and_nobody_hears_an_error() -> None:
    etcd = MemoryEtcd()
    one, watcher = process(etcd), process(etcd, VirtualClock())
    await one.put_rank(record(A))
    etcd.lapses += [etcd.compact, lambda: None, etcd.compact]
    first = await watcher.instances(None, None, 0.0)
    assert (names(first.instances), etcd.lapses) == ([A], [])
    await one.put_rank(record(B, port=9100))
    assert names((await watcher.instances(None, first.version, DEADLINE_S)).instances) == [A, B]
    await watcher.close()
    await asyncio.sleep(0)
    assert len(asyncio.all_tasks()) == 1, "a client that was closed follows nothing any more"


@pytest.mark.parametrize("left", [False, True])
async def test_who_vanished_while_nobody_watched_may_come_back_and_who_had_left_does_not(left: bool) -> None:
    etcd = MemoryEtcd()
    one, watcher = process(etcd), process(etcd, VirtualClock())
    await one.put_rank(record(A))
    [key] = etcd.keys
    if left:
        etcd.write(key, SEAL.close(key, record(A, replicas=[])), 101)
    etcd.lapses.append(lambda: etcd.end(101))
    found = await watcher.instances(None, None, 0.0)
    assert (found.instances, found.epoch) == ([], "0" if left else "1")
    await watcher.close()


async def test_of_two_that_contradict_each_other_the_first_is_shown_also_after_it_has_changed() -> None:
    etcd = MemoryEtcd()
    one, watcher = process(etcd), process(etcd, VirtualClock())
    await one.put_rank(two(0))
    first = await watcher.instances(None, None, 0.0)
    key = RANKS + b"127.0.0.1:9001"
    etcd.write(key, SEAL.close(key, two(1, model="another")))
    for _ in range(5):
        await asyncio.sleep(0)
    assert (await watcher.instances(None, None, 0.0)).instances == first.instances
    await one.put_draining(A, DrainFlag(draining=True, dp_rank=0))
    [shown] = (await watcher.instances(None, first.version, DEADLINE_S)).instances
    assert (shown.model, [where.dp_rank for where in shown.replicas], shown.draining) == ("m", [0], True)
    await watcher.close()


async def test_a_record_over_which_a_stranger_has_written_is_shown_no_more() -> None:
    etcd = MemoryEtcd()
    one, watcher = process(etcd), process(etcd, VirtualClock())
    await one.put_rank(record(A))
    first = await watcher.instances(None, None, 0.0)
    [key] = etcd.keys
    etcd.write(key, Seal(b"another secret of others").close(key, record(A)), 101)
    assert (await watcher.instances(None, first.version, DEADLINE_S)).instances == []
    await watcher.close()


# ---- rooms -------------------------------------------------------------------------------------------


def room(dp_rank: int = 0, ttl_s: float = 10.0, who: Incarnation = A) -> RoomRecord:
    return RoomRecord(incarnation=who, dp_rank=dp_rank, ttl_s=ttl_s)


async def test_a_room_has_one_owner_that_registered_here_and_is_waited_for() -> None:
    etcd = MemoryEtcd()
    mine, other = process(etcd), process(etcd)
    with pytest.raises(NotFound):
        await mine.put_room(5, room())
    await mine.put_rank(record(A, dp_size=2))
    with pytest.raises(NotFound):
        await other.put_room(5, room())
    etcd.lapses += [etcd.compact, lambda: None]
    waiting = asyncio.ensure_future(other.room(5, DEADLINE_S))
    await asyncio.sleep(0)
    for dp_rank in (2, -1):
        with pytest.raises(DpRankOutOfRange):
            await mine.put_room(5, room(dp_rank))
    for wrong in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(InvalidRequest):
            await mine.put_room(5, room(ttl_s=wrong))
    for wrong_room in (0, 2**64):
        with pytest.raises(InvalidRequest):
            await mine.put_room(wrong_room, room())
        with pytest.raises(InvalidRequest):
            await mine.room(wrong_room, 0.0)
    assert await other.room(5, 0.0) is None
    assert await other.room(5, 0.01) is None
    assert not waiting.done()
    await mine.put_room(5, room(1))
    assert await waiting == LeaderId(A, 1)
    before = etcd.revision
    await mine.put_room(5, room(1))
    assert etcd.revision == before
    with pytest.raises(DpRankConflict):
        await mine.put_room(5, room(0))
    assert await mine.room(5, 0.0) == LeaderId(A, 1)
    etcd.between[:] = [lambda: etcd.write(mine._room_key(6), b"somebody's", 101)] * 99
    with pytest.raises(BootstrapTimeout, match="changed under our hands"):
        await mine.put_room(6, room())


async def test_rooms_share_a_lease_as_long_as_it_lasts_for_each_of_them() -> None:
    etcd, clock = MemoryEtcd(), VirtualClock()
    mine = process(etcd, clock)
    await mine.put_rank(record(A))
    leases = []
    for number, advance_s, ttl_s in ((1, 0.0, 10.0), (2, 60.0, 10.0), (3, 0.5, 10.0), (4, 0.0, 1e9)):
        clock.advance(advance_s)
        await mine.put_room(number, room(ttl_s=ttl_s))
        leases.append(etcd.keys[SEAL.prefix + b"rooms/%d" % number].lease)
    assert etcd.granted[1:] == [70, 70, 3660], "for a minute of others, and an hour at most"
    assert leases[0] == leases[1]
    assert len(set(leases)) == 3
    etcd.end(leases[3])
    await mine.put_room(5, room())
    assert await mine.room(5, 0.0) == LeaderId(A), "a lease that was lost is replaced"
