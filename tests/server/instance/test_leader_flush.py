"""The order of a leader's messages: outputs before the next forward, the load after them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from segue.engine.engine_api import OnStored, SequenceResult, SequenceStep, StepHandle, StepOnCall
from segue.engine.kv_events import FollowPrefixes
from segue.engine.request import Output
from segue.kv.clock import VirtualClock
from segue.kv.errors import ErrorCode, PeerLost
from segue.kv.ids import Incarnation, KVPoll, RoomKey
from segue.kv.io import MonotonicClock
from segue.kv.limits import Limits
from segue.kv.protocol import events
from segue.server.instance.leader import (
    ABANDON_S,
    LOAD_INTERVAL_S,
    QUIET_S,
    Abandon,
    Drain,
    FromFrontend,
    Hold,
    Inspect,
    Leader,
    NextRole,
)
from segue.server.messages.control import FlushCache, Load

FRONT = Incarnation("f" * 32)


class OnCall:
    """An engine that computes within `collect`."""

    formats = None

    def launch(
        self, steps: Sequence[SequenceStep], on_stored: OnStored, on_ready: Callable[[], None]
    ) -> StepHandle:
        return StepOnCall(steps, on_stored)


class OneStep:
    """A role that has a first token to send and one step to run."""

    def __init__(self) -> None:
        self.outbox = [(FRONT, Output(request_id="r", token_ids=[7]))]
        self.bugs: list[tuple[str, Exception]] = []
        self.idle = self.drained = False

    def advance(self, now: float) -> None: ...

    def plan(self, now: float) -> list[SequenceStep]:
        return [] if self.idle else [SequenceStep(1, [7], 0, [0], True)]

    def complete(self, results: Sequence[SequenceResult], now: float) -> None:
        self.outbox.append((FRONT, Output(request_id="r", position=1, token_ids=[8])))
        self.idle = True

    def launched(self, steps: Sequence[SequenceStep]) -> None: ...

    def on_stored(self) -> OnStored:
        return lambda seq_ids, layers=None: None

    def step_failed(self, steps: Sequence[SequenceStep], error: Any, now: float) -> None:
        raise AssertionError(error)

    def drain(self) -> None: ...

    def sizes(self) -> dict[str, int]:
        return {}

    def next_deadline(self) -> None:
        return None

    def load(self) -> Load:
        return Load(dp_rank=0, running=0, waiting=0, tokens=0, pages_free=1, pages_total=1)


def test_lesson_15_the_first_token_does_not_wait_for_the_next_forward() -> None:
    sent: list[int] = []
    seen_by_the_engine: list[list[int]] = []

    class Engine(OnCall):
        def collect(self, handle: StepHandle) -> list[SequenceResult]:
            seen_by_the_engine.append(list(sent))
            return [SequenceResult(1, 8)]

    leader = leader_of(
        OneStep(),
        MonotonicClock(),
        engine=Engine(),
        send=lambda _origin, outputs: sent.extend(t for o in outputs for t in o.token_ids),
    )
    leader.inbox.put(Drain())
    leader.run()
    assert seen_by_the_engine == [[7]]
    assert sent == [7, 8]


def test_the_role_hears_of_kv_that_is_there_before_the_forward_ends() -> None:
    told: list[str] = []

    class Listening(OneStep):
        def on_stored(self) -> OnStored:
            return lambda seq_ids, layers=None: told.append(f"stored {list(seq_ids)}")

        def complete(self, results: Sequence[SequenceResult], now: float) -> None:
            told.append("complete")

    class Telling(Clocked):
        def collect(self, handle: StepHandle) -> list[SequenceResult]:
            assert isinstance(handle, StepOnCall)
            handle.on_stored([step.seq_id for step in handle.steps])
            told.append("forward ends")
            return super().collect(handle)

    leader = leader_of(Listening())
    leader.engine = Telling(VirtualClock(), 0.1)  # type: ignore[assignment]
    leader.turn()
    assert told == ["stored [1]", "forward ends", "complete"]


class Busy(OneStep):
    """A role that always has a step to run while `steps` last."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.steps = steps

    def plan(self, now: float) -> list[SequenceStep]:
        return [SequenceStep(1, [7], 0, [0], True)] if self.steps else []

    def complete(self, results: Sequence[SequenceResult], now: float) -> None:
        self.steps -= 1

    def load(self) -> Load:
        return Load(dp_rank=0, running=self.steps, waiting=0, tokens=0, pages_free=1, pages_total=1)


class Clocked(OnCall):
    """An engine whose forwards take `step_s` of a virtual clock."""

    def __init__(self, clock: VirtualClock, step_s: float) -> None:
        self.clock = clock
        self.step_s = step_s

    def collect(self, handle: StepHandle) -> list[SequenceResult]:
        self.clock.advance(self.step_s)
        return [SequenceResult(1, 8)]


def leader_of(
    scheduler: OneStep, clock: Any = None, step_s: float = 0.1, told: Any = None, **changes: Any
) -> Leader:
    """A leader whose steps take `step_s` of `clock`; the loads that it tells are in `told`, with the time."""
    clock, told = clock or VirtualClock(), [] if told is None else told
    options = {
        "engine": Clocked(clock, step_s),
        "limits": Limits(),
        "clock": clock,
        "send": lambda _origin, _outputs: None,
        "report": lambda load: told.append((clock.now(), load.running)),
    }
    return Leader(scheduler, **options | changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("step_s", [0.001, 0.03, 0.2])
def test_a_busy_leader_tells_its_load_within_an_interval_and_a_step(step_s: float) -> None:
    clock, told = VirtualClock(), list[tuple[float, int]]()
    leader = leader_of(Busy(1000), clock, step_s, told)
    for _ in range(300):
        leader.turn()
    moments = [at for at, _ in told]
    assert len(moments) >= 3
    gaps = [later - earlier for earlier, later in pairwise(moments)]
    assert max(gaps) <= LOAD_INTERVAL_S + step_s + 1e-9


def test_the_load_after_the_last_forward_is_told_once_its_results_have_left() -> None:
    clock, told = VirtualClock(), list[tuple[float, int]]()
    leader = leader_of(Busy(1), clock, 0.2, told)
    leader.turn()
    ended_at = clock.now()
    assert not leader.decide()
    assert [running for _, running in told] == [1]
    patience_s = leader.patience_s()
    assert patience_s == pytest.approx(QUIET_S)
    clock.advance(patience_s)
    assert not leader.decide()
    assert told[1:] == [(ended_at + patience_s, 0)]
    assert leader.patience_s() is None


class Held(OneStep):
    """A role without work that notes what it is told of new requests, and never comes to rest."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[bool] = []

    def plan(self, now: float) -> list[SequenceStep]:
        return []

    def drain(self, draining: bool = True) -> None:
        self.told.append(draining)


def test_an_operator_may_hold_and_resume_a_leader_but_not_one_that_leaves() -> None:
    role = Held()
    leader = leader_of(role)
    for item in (Hold(True), Hold(False), Drain(), Hold(False)):
        leader.inbox.put(item)
        leader.turn()
    assert role.told == [True, False, True, True]


@pytest.mark.parametrize("drained", [True, False])
def test_a_leader_turns_by_what_it_holds_now_and_takes_nothing_again_once_it_does(drained: bool) -> None:
    role = Held()
    role.drained = drained
    leader = leader_of(role)
    refused: list[int] = []
    for item in (Hold(True), NextRole(lambda: refused.append(1)), Hold(False)):  # all in one turn
        leader.inbox.put(item)
    leader.turn()
    assert leader.drained() is drained
    assert len(refused) == (not drained)
    assert role.told == [True, drained]
    assert leader.patience_s() is None


def test_a_leader_that_leaves_sleeps_no_longer_than_it_may_drain() -> None:
    """Its remaining work may have no deadline of its own: pages in quarantine, a silent rank."""
    clock = VirtualClock()
    leader = leader_of(Held(), clock, 0.1, [])
    leader.turn()
    assert leader.patience_s() is None
    leader.inbox.put(Drain())
    clock.advance(1.0)
    leader.turn()
    assert leader.patience_s() == leader.limits.drain_s
    assert not leader.drained()
    clock.advance(leader.limits.drain_s)
    assert leader.drained()


def test_that_bytes_move_does_not_wake_a_leader_but_every_other_change_does() -> None:
    leader = leader_of(Busy(0))
    key = RoomKey(1)
    leader.changed(events.Phase(key, KVPoll.TRANSFERRING))
    assert leader.inbox.empty()
    changes = [
        *(events.Phase(key, phase) for phase in KVPoll if phase is not KVPoll.TRANSFERRING),
        events.Quarantined(key, (1,)),
        events.Release(key),
    ]
    for change in changes:
        leader.changed(change)
    assert [leader.inbox.get_nowait() for _ in changes] == changes


def test_what_ends_while_a_step_is_planned_makes_room_for_others_at_once() -> None:
    """Or they would wait for the next thing that happens, with the pages free: a standstill."""
    planned = [SequenceStep(1, [1], 0, [0], True)]
    sent: list[Output] = []

    class EndsOneFirst(OneStep):
        def plan(self, now: float) -> list[SequenceStep]:
            if "ended" in [output.request_id for _, output in self.outbox]:
                return planned
            self.outbox.append((FRONT, Output(request_id="ended")))
            return []

    leader = leader_of(EndsOneFirst(), send=lambda _origin, outputs: sent.extend(outputs))
    assert leader.decide() == planned
    assert [output.request_id for output in sent] == ["r", "ended"]


def test_the_load_is_told_in_time_also_while_a_request_has_a_far_deadline() -> None:
    class Waiting(Busy):
        def next_deadline(self) -> float:  # type: ignore[override]
            return 600.0

    clock, told = VirtualClock(), list[tuple[float, int]]()
    leader = leader_of(Waiting(1), clock, 0.01, told)
    leader.turn()
    assert told == [(0.0, 1)]
    patience_s = leader.patience_s()
    assert patience_s is not None
    assert patience_s <= LOAD_INTERVAL_S
    clock.advance(patience_s)
    leader.decide()
    assert [running for _, running in told] == [1, 0]


def test_a_load_that_is_as_it_was_is_not_told_again() -> None:
    clock, told = VirtualClock(), list[tuple[float, int]]()
    leader = leader_of(Busy(0), clock, 0.01, told)
    for _ in range(3):
        leader.decide()
        clock.advance(2 * LOAD_INTERVAL_S)
    assert len(told) == 1


def test_a_drain_that_is_asked_for_again_does_not_take_longer() -> None:
    clock = VirtualClock()
    leader = leader_of(Busy(0), clock, 0.01, [])
    leader.inbox.put(Drain())
    leader.decide()
    clock.advance(leader.limits.drain_s / 2)
    leader.inbox.put(Drain())
    leader.decide()
    assert not leader.drained()
    clock.advance(leader.limits.drain_s / 2)
    assert leader.drained()


class Abandoned(Held):
    """Keeps what everything ended with."""

    def __init__(self) -> None:
        super().__init__()
        self.ended: list[ErrorCode] = []

    def fail_all(self, error: Any, now: float) -> None:
        self.ended.append(error.code)


@pytest.mark.parametrize(("drained_for_s", "left_s"), [(None, ABANDON_S), (1.0, ABANDON_S), (28.0, 2.0)])
def test_a_leader_that_cannot_compute_ends_everything_now_and_leaves_no_later_than_it_would(
    drained_for_s: float | None, left_s: float
) -> None:
    """It waits until both sides of its hand-offs have ended; the time to drain is for leaders that
    compute."""
    role, clock = Abandoned(), VirtualClock()
    leader = leader_of(role, clock, 0.1, [])
    leader.turn()
    if drained_for_s is not None:
        leader.inbox.put(Drain())
        leader.turn()
    clock.advance(drained_for_s or 1.0)
    leader.inbox.put(Abandon(PeerLost("a rank is gone").info))
    leader.turn()
    assert role.ended == [ErrorCode.PEER_LOST]
    assert role.told[-1] is True
    assert leader.patience_s() == left_s
    clock.advance(left_s - 0.01)
    assert not leader.drained()
    clock.advance(0.01)
    assert leader.drained()


def journal(leader: Leader, *, pending: bool = True) -> list[tuple[object, list[Any]]]:
    """The events of the prefix cache, with their receivers; followers have not got the `pending` ones."""
    told: list[tuple[object, list[Any]]] = []
    kept = SimpleNamespace(pending=pending, whole=lambda: ["whole"])

    def take() -> list[str]:
        kept.pending = False
        return ["changed"]

    kept.take = take
    leader._journal = kept  # type: ignore[assignment]
    leader._prefixes = lambda only, events: told.append((only, events))
    return told


def test_what_changed_in_the_prefix_cache_is_told_before_the_outputs_that_it_came_with() -> None:
    """A frontend that places the next turn of a chat by them must not be a step behind."""
    leader = leader_of(OneStep())
    told = journal(leader)
    leader._send = lambda _origin, outputs: told.append(("outputs", [o.request_id for o in outputs]))
    leader.decide()
    assert told == [(None, ["changed"]), ("outputs", ["r"])]
    leader.decide()
    assert len(told) == 2, "nothing has changed since"


def test_whoever_begins_to_follow_the_prefix_cache_is_told_all_of_it_and_nothing_twice() -> None:
    """Pending events go to the followers so far: a new follower gets them with the whole content."""
    leader = leader_of(Held())
    told = journal(leader)
    leader.inbox.put(FromFrontend(FRONT, FollowPrefixes()))
    leader.turn()
    assert told == [(None, ["changed"]), (FRONT, ["whole"])]


def test_a_flush_empties_the_prefix_cache_and_a_look_that_breaks_ends_nothing() -> None:
    role, flushed = Held(), []
    role.cache = SimpleNamespace(tree=SimpleNamespace(clear=lambda: flushed.append(1)))  # type: ignore[attr-defined]
    leader = leader_of(role)
    seen: list[object] = []
    leader.inbox.put(Inspect(lambda _scheduler: {}["a bug"]))
    leader.inbox.put(FromFrontend(FRONT, FlushCache()))
    leader.inbox.put(Inspect(seen.append))
    leader.turn()
    assert flushed == [1]
    assert seen == [role]
