"""The sessions of a decode leader: exactly with the prefill leaders that the registry lists now."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import cast

import msgspec
from fleet_records import instance_record

from segue.kv.ids import Incarnation, LeaderId, Role
from segue.kv.manager import KVManager
from segue.kv.protocol.room_ranks import PrefillInstance
from segue.server.instance.registry_link import follow_prefill
from segue.server.registry.client import InstanceWatch
from segue.server.registry.registry_records import InstanceRecord


def record(letter: str, *ports: int) -> InstanceRecord:
    return instance_record(Incarnation(letter * 32), *ports, role=Role.PREFILL)


class Lists:
    """A registry that names these, one list after the other."""

    def __init__(self, *lists: list[InstanceRecord]) -> None:
        self.lists = lists

    async def watch(self, role: Role) -> AsyncIterator[list[InstanceRecord]]:
        assert role is Role.PREFILL
        for records in self.lists:
            yield records


class Peers:
    """The peers that a manager was given."""

    def __init__(self) -> None:
        self.kept: dict[LeaderId, int] = {}
        self.ranks: dict[Incarnation, set[int]] = {}

    def prefill_instances(self, there: Mapping[Incarnation, PrefillInstance]) -> None:
        self.ranks = {who: set(instance.ranks) for who, instance in there.items()}

    def add_peer(self, leader: LeaderId, host: str, port: int) -> None:
        assert leader not in self.kept
        self.kept[leader] = port

    def remove_peer(self, leader: LeaderId) -> None:
        del self.kept[leader]


def test_who_left_the_registry_is_dialled_no_more_and_newcomers_are() -> None:
    a, b, c = record("a", 1), record("b", 2, 3), record("c", 1)
    half = msgspec.structs.replace(b, replicas=b.replicas[1:])
    wanted: list[list[InstanceRecord]] = [[a], [a, b], [a, b], [b, c], [], [half], [b]]
    for count in range(1, len(wanted) + 1):
        peers = Peers()
        lists = Lists(*wanted[:count])
        asyncio.run(follow_prefill(cast(InstanceWatch, lists), cast(KVManager, peers)))
        assert peers.kept == {
            LeaderId(each.incarnation, where.dp_rank): where.port
            for each in wanted[count - 1]
            for where in each.replicas
        }
        assert peers.ranks == {
            each.incarnation: {where.dp_rank for where in each.replicas} for each in wanted[count - 1]
        }, "those that are there, also of one that is not complete"
        assert {LeaderId(who, rank) for who, ranks in peers.ranks.items() for rank in ranks} == set(
            peers.kept
        )
