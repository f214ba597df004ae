"""The list of instances, or the error in its place, for those who wait for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

import pytest
from registry_records import A, B, C, names, record

from segue.kv.errors import BootstrapUnreachable, InvalidRequest, SegueError
from segue.kv.ids import Role
from segue.server.registry.listed import FollowedList, listed
from segue.server.registry.registry_records import InstanceRecord


@asynccontextmanager
async def a_list(*first: Iterable[InstanceRecord]) -> AsyncIterator[FollowedList]:
    """A list of which the test itself shows what there is."""
    made = FollowedList(asyncio.Event().wait, "a list of a test")
    for records in first:
        made.show(records)
    yield made
    made.close()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert len(asyncio.all_tasks()) == 1, "a list that was closed follows nothing any more"


async def test_an_error_is_told_until_there_is_a_list_again_even_the_same_one() -> None:
    async with a_list([record(A)]) as shown:
        before = (await shown.instances(None, None, 0.0)).version
        shown.fail(BootstrapUnreachable("away"))
        for _ in range(2):
            with pytest.raises(BootstrapUnreachable, match="away"):
                await shown.instances(None, None, 0.0)
        shown.show([record(A)])
        assert names((await shown.instances(None, before, 0.0)).instances) == [A]
        shown.show([record(A), record(B, role=Role.DECODE)])
        assert names((await shown.instances(None, before, 0.0)).instances) == [A, B]
        assert names((await shown.instances(Role.DECODE, None, 0.0)).instances) == [B]


def test_of_records_that_contradict_each_other_the_first_one_counts() -> None:
    records = [
        record(A, dp_rank=0, dp_size=2),
        record(A, dp_rank=1, dp_size=2, model="another"),
        record(B, port=0),
        record(C),
    ]
    found = listed(records).instances().instances
    assert names(found) == [A, C]
    assert [where.dp_rank for where in found[0].replicas] == [0]


async def test_who_waits_for_another_list_hears_of_it_at_once_and_of_none_after_its_time() -> None:
    async with a_list() as shown:
        first = asyncio.ensure_future(shown.instances(None, None, 0.0))
        for _ in range(3):
            await asyncio.sleep(0)
        assert not first.done(), "before there is a list it is waited for, however short the time"
        shown.show([])
        assert ((await first).version, (await first).instances) == (1, [])
        assert (await shown.instances(None, 1, 0.01)).version == 1
        waiting = [asyncio.ensure_future(shown.instances(None, 1, 60.0)) for _ in range(2)]
        await asyncio.sleep(0)
        shown.show([])
        await asyncio.sleep(0)
        assert not any(task.done() for task in waiting), "the same list is no news"
        shown.show([record(A)])
        assert [names(found.instances) for found in await asyncio.gather(*waiting)] == [[A], [A]]


async def test_an_error_in_the_place_of_the_first_list_is_told_to_who_waits_for_it() -> None:
    async with a_list() as shown:
        said = InvalidRequest("no", room=5)
        waiting = asyncio.ensure_future(shown.instances(None, None, 60.0))
        await asyncio.sleep(0)
        shown.fail(said)
        raised: list[SegueError] = []
        for wait in (waiting, shown.instances(None, None, 0.0)):
            with pytest.raises(InvalidRequest) as caught:
                await wait
            raised.append(caught.value)
        assert [error.info for error in raised] == [said.info] * 2
        assert len({id(error) for error in (*raised, said)}) == 3, "each has a traceback of its own"
