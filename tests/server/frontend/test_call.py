"""Bodies of requests: what is held of them is counted."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import selectors
import weakref
from collections.abc import Coroutine
from typing import Any

import pytest
from frontend_rig import Wire, cycle_over

from segue.kv.errors import AbortedByClient, Internal, OutOfCapacity, RequestTooLarge, SegueError
from segue.server.frontend.http_call import HttpCall
from segue.server.frontend.request_memory import LARGE_BYTES_PER_S, SMALL_BYTES, MemoryBudget, RequestMemory
from segue.server.http.http_exchange import EXCHANGE, HttpExchange

PIECES = [b"x" * 6, b"y" * 6, b"z" * 6]


class VirtualTime(selectors.DefaultSelector):
    """Waits by moving the clock of its loop; each round takes a millisecond."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.now += max(timeout or 0.0, 0.001)
        return super().select(0)


def in_virtual_time(main: Coroutine[Any, Any, None]) -> float:
    """Runs `main`; how many seconds it took."""
    selector = VirtualTime()
    loop = asyncio.SelectorEventLoop(selector)
    loop.time = lambda: selector.now  # type: ignore[method-assign]
    with contextlib.closing(loop):
        loop.run_until_complete(main)
    return selector.now


def called(exchange: HttpExchange, receive: Any = None) -> HttpCall:
    return HttpCall({"headers": [(b"x-request-id", b"r")], EXCHANGE: lambda: exchange}, receive)


async def read(limit_bytes: int, held: RequestMemory, *, leaves: bool = False) -> bytes:
    messages: list[dict[str, Any]] = [
        {"type": "http.request", "body": piece, "more_body": piece is not PIECES[-1]} for piece in PIECES
    ]
    if leaves:
        messages[-1] = {"type": "http.disconnect"}

    async def receive() -> dict[str, Any]:
        return messages.pop(0)

    call = called(HttpExchange(cycle_over(Wire())), receive)
    return await call.body(limit_bytes, held, timeout_s=10)


@pytest.mark.parametrize(
    ("limit_bytes", "budget_bytes", "leaves", "error"),
    [(18, 18, False, None), (10, 18, False, RequestTooLarge), (18, 10, False, OutOfCapacity),
     (18, 18, True, AbortedByClient)],
)  # fmt: skip
def test_what_is_held_of_a_body_is_counted_however_it_ends(
    limit_bytes: int, budget_bytes: int, leaves: bool, error: type[SegueError] | None
) -> None:
    budget = MemoryBudget(budget_bytes)
    held = RequestMemory(budget)
    if error is None:
        assert asyncio.run(read(limit_bytes, held, leaves=leaves)) == b"".join(PIECES)
        assert budget.used_bytes == 18
    else:
        with pytest.raises(error):
            asyncio.run(read(limit_bytes, held, leaves=leaves))
    assert held.nbytes == budget.used_bytes <= budget_bytes
    held.set(0)
    assert budget.used_bytes == 0


@pytest.mark.parametrize(("limit_bytes", "fits"), [(6, True), (5, False)])
def test_a_body_that_has_come_already_is_taken_as_it_is(limit_bytes: int, fits: bool) -> None:
    async def main() -> None:
        cycle = cycle_over(Wire())
        cycle.body, cycle.more_body = bytearray(b"x" * 6), False
        held = RequestMemory(MemoryBudget(6))
        reading = called(HttpExchange(cycle)).body(limit_bytes, held, timeout_s=10)
        if fits:
            assert await reading == b"x" * 6
            assert held.nbytes == 6
        else:
            with pytest.raises(RequestTooLarge):
                await reading

    asyncio.run(main())


def test_of_all_large_bodies_one_piece_is_taken_in_a_round_of_the_loop() -> None:
    """Else 80 clients that send without a pause are all read before anybody's next token."""
    clients, pieces, piece = 20, 16, b"x" * SMALL_BYTES
    taken = rounds = 0
    most = 0

    async def main() -> None:
        nonlocal rounds, most
        budget = MemoryBudget(clients * pieces * len(piece) * 2)

        async def body() -> bytes:
            left = pieces

            async def receive() -> dict[str, Any]:
                nonlocal left, taken
                left -= 1
                taken += 1
                return {"type": "http.request", "body": piece, "more_body": left > 0}

            call = called(HttpExchange(cycle_over(Wire())), receive)
            return await call.body(2**30, RequestMemory(budget), timeout_s=60)

        bodies = [asyncio.ensure_future(body()) for _ in range(clients)]
        await asyncio.sleep(0)  # each takes what is no large body yet
        before = taken
        while not all(task.done() for task in bodies):
            await asyncio.sleep(0)
            rounds += 1
            most, before = max(most, taken - before), taken
        assert {len(await task) for task in bodies} == {pieces * len(piece)}

    seconds = in_virtual_time(main())
    assert taken == clients * pieces
    assert seconds >= (taken - clients) * len(piece) / LARGE_BYTES_PER_S - 1, "they are paced"
    assert most <= 2, "the small beginning of a body, and one piece"
    assert rounds >= clients * (pieces - 2)


@pytest.mark.parametrize("length_is_said", [True, False])
def test_large_bodies_come_in_at_a_pace_and_the_one_with_the_least_to_come_first(
    length_is_said: bool,
) -> None:
    """A client with bodies of the greatest size does not hold up an ordinary long prompt."""
    piece, largest, whole = b"x" * SMALL_BYTES, 2**23, list[int]()
    budget = MemoryBudget(2**30)

    async def body(nbytes: int) -> None:
        left = nbytes

        async def receive() -> dict[str, Any]:
            nonlocal left
            left -= len(piece)
            return {"type": "http.request", "body": piece, "more_body": left > 0}

        headers = [(b"content-length", b"%d" % nbytes)] if length_is_said else []
        call = HttpCall({"headers": headers, EXCHANGE: lambda: HttpExchange(cycle_over(Wire()))}, receive)
        await call.body(largest, RequestMemory(budget), timeout_s=60)
        whole.append(nbytes)

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(20):
                group.create_task(body(largest))
            given_up = group.create_task(body(largest))
            await asyncio.sleep(0.1)
            given_up.cancel()
            group.create_task(body(largest // 16))

    seconds = in_virtual_time(main())
    assert seconds == pytest.approx(20 * largest / LARGE_BYTES_PER_S, rel=0.2)
    assert sorted(whole) == [largest // 16, *[largest] * 20]
    if length_is_said:
        assert whole.index(largest // 16) <= 1, "at most the one that was nearly whole comes before it"


def test_a_call_that_is_over_leaves_nothing_to_the_garbage_collector() -> None:
    async def main() -> None:
        call = called(HttpExchange(cycle_over(Wire())))
        async with call:
            await asyncio.sleep(0)
        seen = weakref.ref(call)
        del call
        await asyncio.sleep(0)
        assert seen() is None

    gc.disable()
    try:
        asyncio.run(main())
    finally:
        gc.enable()


@pytest.mark.parametrize("when", ["before", "inside", "after the answer"])
def test_a_client_that_leaves_ends_what_is_done_for_it_and_nothing_later(when: str) -> None:
    async def main() -> None:
        exchange = HttpExchange(cycle_over(Wire()))
        call = called(exchange)
        if when == "before":
            exchange.leave()
        try:
            async with call:
                if when == "after the answer":
                    await call.answer(200, {})
                if when != "before":
                    asyncio.get_running_loop().call_soon(exchange.leave)
                await asyncio.sleep(0)
                await asyncio.sleep(0)
        except AbortedByClient:
            assert call.gone
        else:
            assert not call.gone
        assert call.gone is (when != "after the answer")
        await asyncio.sleep(0)  # the task goes on

    asyncio.run(main())


def test_a_slow_model_is_no_slow_client() -> None:
    """Between two tokens nobody is waited for, nor while a client that is behind reads again."""
    wire = Wire()

    async def main() -> None:
        exchange = HttpExchange(cycle := cycle_over(wire))
        stream = called(exchange).stream(stall_s=30)
        assert stream.events(b"data: 1\n\n") is None
        cycle.flow.pause_writing()
        wait = stream.events(b"data: 2\n\n")
        assert wait is not None
        asyncio.get_running_loop().call_soon(cycle.flow.resume_writing)
        await wait()
        assert stream.events(b"data: 3\n\n") is None
        await stream.end()

    asyncio.run(main())
    assert not wire.aborted
    assert wire.said.count(b"HTTP/1.1 200") == 1
    assert [wire.said.count(b"data: %d" % n) for n in (1, 2, 3)] == [1, 1, 1]


def test_a_client_that_reads_nothing_is_cut() -> None:
    wire = Wire()

    async def main() -> None:
        exchange = HttpExchange(cycle := cycle_over(wire))
        stream = (call := called(exchange)).stream(stall_s=0.01)
        stream.events(b"data: 1\n\n")
        cycle.flow.pause_writing()
        with pytest.raises(AbortedByClient, match="read nothing"):
            await stream.end()
        assert call.gone

    asyncio.run(main())
    assert wire.aborted
    assert b"DONE" not in wire.said


@pytest.mark.parametrize("sent", ["nothing", "an event", "an answer"])
def test_an_error_is_the_status_then_an_event_and_after_the_answer_nothing(sent: str) -> None:
    wire = Wire()

    async def main() -> None:
        call = called(HttpExchange(cycle_over(wire)))
        if sent == "an event":
            call.stream(stall_s=1).events(b"data: 1\n\n")
        elif sent == "an answer":
            await call.answer(200, {})
        await call.fail(Internal("a bug"))

    asyncio.run(main())
    assert wire.said.startswith(b"HTTP/1.1 500" if sent == "nothing" else b"HTTP/1.1 200")
    assert wire.said.count(b"a bug") == (sent != "an answer")
    assert wire.said.count(b"HTTP/1.1") == 1
