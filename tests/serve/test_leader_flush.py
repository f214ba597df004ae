"""What is known before a forward is sent before it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from segue.conn.io import MonotonicClock
from segue.core.control import Load
from segue.core.limits import Limits
from segue.core.request import Output
from segue.core.types import Incarnation
from segue.engine.api import SequenceResult, SequenceStep
from segue.serve.leader import Drain, Leader

FRONT = Incarnation("f" * 32)


class OneStep:
    """A role that has a first token to send and one step to run."""

    def __init__(self) -> None:
        self.outbox = [(FRONT, Output(request_id="r", token_ids=[7]))]
        self.idle = False

    def advance(self, now: float) -> None: ...

    def plan(self, now: float) -> list[SequenceStep]:
        return [] if self.idle else [SequenceStep(1, [7], 0, [0], True)]

    def complete(self, results: Sequence[SequenceResult], now: float) -> None:
        self.outbox.append((FRONT, Output(request_id="r", position=1, token_ids=[8])))
        self.idle = True

    def step_failed(self, steps: Sequence[SequenceStep], error: Any, now: float) -> None:
        raise AssertionError(error)

    def drain(self) -> None: ...

    def next_deadline(self) -> None:
        return None

    def load(self) -> Load:
        return Load(dp_rank=0, running=0, waiting=0, tokens=0, pages_free=1, pages_total=1)


def test_lesson_15_the_first_token_does_not_wait_for_the_next_forward() -> None:
    sent: list[int] = []
    seen_by_the_engine: list[list[int]] = []

    class Engine:
        def step(self, steps: Sequence[SequenceStep]) -> list[SequenceResult]:
            seen_by_the_engine.append(list(sent))
            return [SequenceResult(1, 8)]

    leader = Leader(
        OneStep(),  # type: ignore[arg-type]
        Engine(),  # type: ignore[arg-type]
        limits=Limits(),
        clock=MonotonicClock(),
        send=lambda _origin, outputs: sent.extend(t for o in outputs for t in o.token_ids),
        report=lambda _load: None,
    )
    leader.inbox.put(Drain())
    leader.run()
    assert seen_by_the_engine == [[7]]
    assert sent == [7, 8]
