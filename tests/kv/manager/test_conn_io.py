"""How another thread waits for what it has asked of the I/O thread."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import Future

import pytest

from segue.kv.io import SLICE_S, IoThread


class StoodStill(Future[str]):
    """Its waiter wakes up late, as one whose process was stopped: the loop has had no time meanwhile."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times
        self.waited: list[float | None] = []

    def result(self, timeout: float | None = None) -> str:
        self.waited.append(timeout)
        if len(self.waited) <= self.times:
            raise TimeoutError
        if not self.done():
            self.set_result("there")
        return super().result(timeout)


@pytest.fixture
def io() -> Iterator[IoThread]:
    made = IoThread()
    made.start()
    yield made
    made.stop()


def test_what_the_loop_had_no_time_for_is_not_late(io: IoThread) -> None:
    future = StoodStill(1)
    assert io.wait(future, 5.0) == "there"
    assert future.waited == [SLICE_S] * 2


def test_what_has_come_at_the_very_end_of_the_time_is_not_late() -> None:
    class AtLast(Future[str]):
        def result(self, timeout: float | None = None) -> str:
            if not self.done():
                self.set_result("there")
                raise TimeoutError
            return super().result(timeout)

    io = IoThread()
    assert io.wait(AtLast(), SLICE_S) == "there"
    io.stop()


def test_a_wait_ends_after_all_of_its_time() -> None:
    io, future = IoThread(), StoodStill(10**6)
    with pytest.raises(TimeoutError):
        io.wait(future, 5 * SLICE_S / 2)
    assert future.waited == [SLICE_S, SLICE_S, SLICE_S / 2]
    io.stop()


def test_an_error_of_the_work_itself_is_raised_also_if_it_is_a_timeout(io: IoThread) -> None:
    async def late() -> None:
        raise TimeoutError("its own")

    with pytest.raises(TimeoutError, match="its own"):
        io.call(late(), 60.0)

    async def never() -> None:
        await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        io.call(never(), 0.01)
