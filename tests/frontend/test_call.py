"""Bodies of requests: what is held of them is counted, and given back exactly once."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from segue.core.errors import AbortedByClient, OutOfCapacity, RequestTooLarge, SegueError
from segue.frontend.http_call import BodyBudget, HttpCall

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
