"""Bodies of requests: what is held of them is counted, and given back exactly once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from segue.core.errors import AbortedByClient, OutOfCapacity, RequestTooLarge, SegueError
from segue.frontend.http_call import BodyBudget, EventStream, HttpCall

PIECES = [b"x" * 6, b"y" * 6, b"z" * 6]


async def read(limit_bytes: int, budget: BodyBudget, *, leaves: bool = False) -> bytes:
    messages: list[dict[str, Any]] = [
        {"type": "http.request", "body": piece, "more_body": piece is not PIECES[-1]} for piece in PIECES
    ]
    if leaves:
        messages[-1] = {"type": "http.disconnect"}

    async def receive() -> dict[str, Any]:
        return messages.pop(0)

    async def send(_message: Any) -> None: ...

    return await HttpCall({"headers": []}, receive, send).body(limit_bytes, budget, timeout_s=10)


@pytest.mark.parametrize(
    ("limit_bytes", "budget_bytes", "leaves", "error"),
    [(18, 18, False, None), (10, 18, False, RequestTooLarge), (18, 10, False, OutOfCapacity),
     (18, 18, True, AbortedByClient)],
)  # fmt: skip
def test_what_was_held_of_a_body_is_given_back_however_it_ends(
    limit_bytes: int, budget_bytes: int, leaves: bool, error: type[SegueError] | None
) -> None:
    budget = BodyBudget(budget_bytes)
    if error is None:
        assert asyncio.run(read(limit_bytes, budget, leaves=leaves)) == b"".join(PIECES)
    else:
        with pytest.raises(error):
            asyncio.run(read(limit_bytes, budget, leaves=leaves))
    assert budget.used_bytes == 0


class Alarms:
    """The clock and the one timer of a stream."""

    def __init__(self) -> None:
        self.now = 0.0
        self.due: tuple[float, Callable[[], None]] | None = None

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, call: Callable[[], None]) -> None:
        self.due = (when, call)

    def call_later(self, delay_s: float, call: Callable[[], None]) -> None:
        self.call_at(self.now + delay_s, call)

    def wait(self, seconds: float) -> None:
        self.now += seconds
        if self.due is not None and self.due[0] <= self.now:
            _, call = self.due
            call()


class Wire:
    aborted = False

    def abort(self) -> None:
        self.aborted = True


@pytest.mark.parametrize("reads", [True, False])
def test_a_slow_model_is_no_slow_client(reads: bool) -> None:
    """Between two tokens nothing is being sent, so nobody is waited for."""
    wire, alarms = Wire(), Alarms()

    async def main() -> None:
        taken = asyncio.Event()

        async def receive() -> dict[str, Any]:
            raise AssertionError("nothing is read here")

        async def send(_message: Any) -> None:
            await taken.wait()

        stream = EventStream(HttpCall({"headers": []}, receive, send), send, wire, stall_s=1.0)
        stream._loop = alarms  # type: ignore[assignment]
        taken.set()
        await stream.events([{"token": 1}])
        if reads:
            alarms.wait(5.0)
        else:
            taken.clear()
            sending = asyncio.ensure_future(stream.events([{"token": 2}]))
            await asyncio.sleep(0)
            alarms.wait(1.0)
            sending.cancel()
        assert stream.stalled is not reads

    asyncio.run(main())
    assert wire.aborted is not reads
