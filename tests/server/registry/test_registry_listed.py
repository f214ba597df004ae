"""The list of instances, or the error in its place, for those who wait for it."""

from __future__ import annotations

import asyncio

import pytest
from registry_records import A, B, C, names, record

from segue.kv.errors import BootstrapUnreachable, InvalidRequest, SegueError
from segue.server.registry.listed import Shown, listed


def test_an_error_is_told_until_there_is_a_list_again_even_the_same_one() -> None:
    async def main() -> None:
        shown = Shown()
        shown.show([record(A)])
        before = shown.version
        shown.fail(BootstrapUnreachable("away"))
        for _ in range(2):
            with pytest.raises(BootstrapUnreachable, match="away"):
                await shown.other_than(None, 0.0)
        shown.show([record(A)])
        await shown.other_than(before, 0.0)
        assert names(shown.instances) == [A]
        shown.show([record(A), record(B)])
        await shown.other_than(before, 0.0)
        assert names(shown.instances) == [A, B]

    asyncio.run(main())


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


def test_who_waits_for_another_list_hears_of_it_at_once_and_of_none_after_its_time() -> None:
    async def main() -> None:
        shown = Shown()
        first = asyncio.ensure_future(shown.other_than(None, 0.0))
        for _ in range(3):
            await asyncio.sleep(0)
        assert not first.done(), "before there is a list it is waited for, however short the time"
        shown.show([])
        await first
        assert (shown.version, shown.instances) == (1, [])
        await shown.other_than(1, 0.01)
        waiting = [asyncio.ensure_future(shown.other_than(1, 60.0)) for _ in range(2)]
        await asyncio.sleep(0)
        shown.show([])
        await asyncio.sleep(0)
        assert not any(task.done() for task in waiting), "the same list is no news"
        shown.show([record(A)])
        await asyncio.gather(*waiting)
        await shown.other_than(1, 60.0)

    asyncio.run(main())


def test_an_error_in_the_place_of_the_first_list_is_told_to_who_waits_for_it() -> None:
    async def main() -> None:
        shown, said = Shown(), InvalidRequest("no", room=5)
        waiting = asyncio.ensure_future(shown.other_than(None, 60.0))
        await asyncio.sleep(0)
        shown.fail(said)
        raised: list[SegueError] = []
        for wait in (waiting, shown.other_than(None, 0.0)):
            with pytest.raises(InvalidRequest) as caught:
                await wait
            raised.append(caught.value)
        assert [error.info for error in raised] == [said.info] * 2
        assert len({id(error) for error in (*raised, said)}) == 3, "each has a traceback of its own"

    asyncio.run(main())
