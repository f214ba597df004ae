"""The leader's loop with other DP ranks that compute every step with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from test_leader_flush import Busy, OnCall, leader_of

from segue.engine.engine_api import SequenceResult, StepHandle, StepOnCall
from segue.kv.errors import SegueError
from segue.server.instance.leader import Drain, Leader, NextRole, PeersAdvanced


class Others:
    """`ExpertPeers` that wait in `ahead` steps; `alone` says that they are all done."""

    def __init__(self) -> None:
        self.ahead = 0
        self.alone = False
        self.told_done = 0

    @property
    def behind(self) -> bool:
        return self.ahead > 0

    def done(self) -> bool:
        self.told_done += 1
        return self.alone

    def listen(
        self, wake: Callable[[], None], leave: Callable[[], None], lost: Callable[[SegueError], None]
    ) -> None: ...

    def stop_listening(self) -> None: ...

    def close(self) -> None: ...


class Engine(OnCall):
    """Keeps how many sequences each of its steps had."""

    def __init__(self, others: Others) -> None:
        self.others = others
        self.computed: list[int] = []

    def collect(self, handle: StepHandle) -> list[SequenceResult]:
        assert isinstance(handle, StepOnCall)
        self.others.ahead -= 1
        self.computed.append(len(handle.steps))
        return [SequenceResult(step.seq_id, 8) for step in handle.steps]


class Some(Busy):
    """A role with so many steps."""

    def complete(self, results: Sequence[SequenceResult], now: float) -> None:
        self.steps -= len(results)


def leader_with(others: Others, steps: int = 0) -> Leader:
    return leader_of(Some(steps), engine=Engine(others), expert_peers=others)


def test_a_leader_computes_what_it_has_and_then_along_with_others_and_then_sleeps() -> None:
    others = Others()
    leader = leader_with(others, steps=1)
    others.ahead = 3
    assert [leader.turn() for _ in range(4)] == [True, True, True, False]
    assert leader.engine.computed == [1, 0, 0]  # type: ignore[attr-defined]


def test_a_leader_that_drains_leaves_when_the_others_do() -> None:
    others = Others()
    leader = leader_with(others)
    assert not leader.drained()
    assert others.told_done == 0, "it does not drain yet"
    leader.scheduler.idle = True  # type: ignore[misc]
    leader.inbox.put(Drain())
    leader.decide()
    assert not leader.drained()
    others.alone = True
    leader.inbox.put(PeersAdvanced())
    leader.run()
    assert others.told_done == 2
    assert leader.engine.computed == []  # type: ignore[attr-defined]


def test_a_leader_that_stays_for_another_role_says_to_nobody_that_it_is_done() -> None:
    others = Others()
    leader = leader_with(others)
    refused: list[str] = []
    leader.inbox.put(NextRole(lambda: refused.append("it has a request")))
    leader.decide()
    assert not leader.drained()
    assert len(refused) == 1
    leader.scheduler.idle = leader.scheduler.drained = True  # type: ignore[misc]
    leader.inbox.put(NextRole(lambda: refused.append("it has none")))
    leader.run()
    assert len(refused) == 1
    assert others.told_done == 0
    leader.inbox.put(Drain())
    leader.decide()
    assert not leader.drained(), "a signal came: it leaves with the others after all"
    assert leader.engine.computed == []  # type: ignore[attr-defined]
