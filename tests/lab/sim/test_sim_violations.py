"""Each rule of the simulator can fail: a violation made by hand is reported under its number."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from segue.engine.request import Request, SamplingParams, Usage
from segue.kv.errors import (
    ErrorCode,
    ErrorInfo,
    Internal,
    TransferFailed,
)
from segue.kv.ids import KVPoll, Role, TransferId
from segue.kv.protocol import events
from segue.kv.protocol.messages import Destination, Drained
from segue.server.messages.ticket import Ticket
from segue.server.schedulers.decode import DecodeScheduler
from segue.server.schedulers.request_state import RequestState
from segue_lab.sim.clients import Asked
from segue_lab.sim.deployment import Deployment
from segue_lab.sim.front import FrontNode
from segue_lab.sim.run import describe, run_scenario, tell
from segue_lab.sim.scenario import make_scenario
from segue_lab.sim.sim_node import KVNode
from segue_lab.sim.world import Violation

CALM = next(seed for seed in range(500) if not make_scenario(seed).features)


class Stage:
    """A deployment that ran to rest, and what a test needs to spoil it."""

    def __init__(self) -> None:
        self.deployment = Deployment(make_scenario(CALM))
        self.deployment.run()
        self.checks = self.deployment.checks
        nodes = [n for n in self.deployment.leaders() if isinstance(n, KVNode)]
        self.prefill = next(n for n in nodes if n.spec.role is Role.PREFILL)
        self.decode = next(n for n in nodes if n.spec.role is Role.DECODE)
        self.transfer = TransferId(77, 0, self.prefill.me, self.decode.me)

    def phases(self, node: KVNode, *phases: KVPoll) -> None:
        for phase in phases:
            error = Internal("injected", origin="x", phase="y").info if phase is KVPoll.FAILED else None
            metadata = None
            if phase is KVPoll.SUCCESS and node is self.decode:
                metadata = b"1"
                self.checks._contents[self.transfer.room] = metadata
            self.checks.effect(
                node, events.HandoffPhase(self.transfer, phase, error=error, metadata=metadata)
            )

    def destination(self, pages: list[int], epoch: int = 5) -> events.Send:
        message = Destination(
            transfer=self.transfer,
            epoch=epoch,
            budget_s=1.0,
            prompt_tokens=4,
            prefix_tokens=0,
            pages=pages,
            transport="tcp",
            plan_hash=0,
        )
        return events.Send(self.prefill.me, message)

    @property
    def front(self) -> FrontNode:
        return self.deployment.fronts["front0"]

    def job(self, node: KVNode) -> RequestState:
        """A request of the first frontend, in the tables of `node` as if it were served."""
        prefill, decode = self.prefill.me, self.decode.me
        job = RequestState(
            origin=self.front.me.incarnation,
            request=Request(request_id="left", prompt=[1, 2], sampling=SamplingParams()),
            ticket=Ticket(room=self.transfer.room, attempt=0, prefill=prefill, decode=decode, budget_s=1.0),
            seq_id=1,
            entered=0.0,
            deadline=1e9,
            max_tokens=1,
        )
        node.scheduler.admission.requests[job.key] = job
        return job

    def asked(self) -> Asked:
        return next(c for c in self.deployment.asked.values() if c.tokens)


@pytest.fixture(scope="module")
def ran() -> None:
    Stage()  # the calm scenario itself holds


B, W, T, S, F = (
    KVPoll.BOOTSTRAPPING,
    KVPoll.WAITING_FOR_INPUT,
    KVPoll.TRANSFERRING,
    KVPoll.SUCCESS,
    KVPoll.FAILED,
)


def joined_with_its_own_role(stage: Stage) -> None:
    stage.checks.joined(stage.decode, stage.decode)


def second_half(stage: Stage) -> None:
    stage.phases(stage.decode, B, B)


def skipped_phase(stage: Stage) -> None:
    stage.phases(stage.decode, B, T)


def released_alive(stage: Stage) -> None:
    stage.phases(stage.decode, B, W)
    stage.checks.effect(stage.decode, events.HandoffReleased(stage.transfer))


def leaked_page(stage: Stage) -> None:
    stage.decode.pool.allocate(1)
    stage.checks._page_owners(stage.decode)


def epoch_used_again(stage: Stage) -> None:
    stage.phases(stage.decode, B, W)
    [page] = stage.decode.pool.allocate(1)
    for _ in range(2):
        stage.checks.effect(stage.decode, stage.destination([page]))


def write_after_release(stage: Stage) -> None:
    stage.prefill.paths_to(stage.decode.me)[0].land(99, [(0, b"x")])


def false_drained(stage: Stage) -> None:
    stage.phases(stage.prefill, B)
    stage.checks.halves[stage.prefill.me, stage.transfer].epoch = 5
    path: Any = stage.prefill.paths_to(stage.decode.me)[0]
    path.busy_with = lambda epoch: epoch == 5
    stage.checks.effect(stage.prefill, events.Send(stage.decode.me, Drained(stage.transfer)))


def commits_a_flipped_page(stage: Stage) -> None:
    stage.checks.flips.spoiled.add(stage.transfer)
    stage.phases(stage.decode, B, W, T, S)


def foreign_metadata(stage: Stage) -> None:
    stage.phases(stage.decode, B, W, T)
    event = events.SendMetadata(stage.transfer.sent_as, b"1")
    stage.checks.scope(stage.prefill, event, [])
    stage.checks.effect(stage.decode, events.HandoffPhase(stage.transfer, S, metadata=b"2"))


def placed(stage: Stage) -> None:
    """The attempt of `stage.transfer` begins, by way of the first frontend."""
    who = {stage.front.me, stage.prefill.me, stage.decode.me}
    asked = stage.asked()
    asked.deadline = stage.deployment.world.now + 8.0
    stage.deployment.causes.placed(stage.transfer.room, asked, who)


def fails(stage: Stage, code: ErrorCode, text: str = "?") -> None:
    stage.phases(stage.decode, B)
    error = ErrorInfo(code=code, text=text, origin="x", phase="y", room=stage.transfer.room)
    stage.checks.effect(stage.decode, events.HandoffPhase(stage.transfer, F, error=error))


def stands_still(stage: Stage) -> None:
    job = stage.job(stage.decode)
    stage.decode.scheduler.batch.retracted.append((job, None))
    stage.checks.requests.nothing_to_do(stage.decode)


def serves_the_dead(stage: Stage) -> None:
    stage.job(stage.decode)
    stage.front.kill()
    stage.deployment.world.now += 10.0
    stage.checks.requests.node(stage.decode)


def writes_without_being_told(stage: Stage) -> None:
    stage.phases(stage.prefill, B, W, T)
    stage.checks.effect(stage.prefill, events.PostWrite(stage.transfer, 0, 5, 0, 0, ()))


def without_a_cause(stage: Stage) -> None:
    stage.phases(stage.decode, B, F)


def without_an_origin(stage: Stage) -> None:
    stage.phases(stage.decode, B)
    nameless = ErrorInfo(code=ErrorCode.PEER_LOST, text="?")
    stage.checks.effect(stage.decode, events.HandoffPhase(stage.transfer, F, error=nameless))


def outlived_its_deadline(stage: Stage) -> None:
    deadline = stage.decode.clock.now() + 5.0
    opened = events.OpenReceiver(
        key=stage.transfer.received_as, prefill=stage.prefill.me, prompt_tokens=4, deadline=deadline
    )
    stage.decode.exchange.handle(opened, stage.decode.clock.now())
    stage.deployment.world.now += 10.0
    stage.checks._deadlines(stage.decode)


def peer_not_told(stage: Stage) -> None:
    stage.phases(stage.prefill, B, W, T)
    stage.deployment.world.now += 1.0
    stage.phases(stage.decode, B, W, T, S)
    stage.checks.effect(stage.decode, events.HandoffReleased(stage.transfer))
    stage.deployment.world.now += 100.0
    stage.checks.sweep()


def memory_not_given_back(stage: Stage) -> None:
    stage.phases(stage.decode, B, W, T, S)
    stage.deployment.world.now += 100.0
    stage.checks.sweep()


def after_the_first_token(stage: Stage) -> None:
    stage.deployment.causes.unexplained = lambda *_: ""  # type: ignore[method-assign]
    lost = ErrorInfo(code=ErrorCode.PEER_LOST, text="gone", origin="x", phase="y")
    stage.checks.answers.error(stage.asked(), lost, Role.DECODE)


def wrong_token(stage: Stage) -> None:
    asked = stage.asked()
    asked.tokens[-1] = (asked.tokens[-1] + 1) % 1000
    stage.checks.answers.tokens(asked)


def usage_does_not_add_up(stage: Stage) -> None:
    asked = stage.asked()
    asked.usage = Usage(prompt_tokens=len(asked.wanted.prompt), computed=len(asked.wanted.prompt) + 1)
    stage.checks.answers.tokens(asked)


def too_many_jobs(stage: Stage) -> None:
    scheduler: Any = stage.decode.scheduler
    scheduler.admission.requests = dict.fromkeys(range(10_000))
    stage.checks._bounds(stage.decode)


def peers_remembered(stage: Stage) -> None:
    stage.decode.peers.clear()
    stage.checks._bounds(stage.decode)


def handle_left(stage: Stage) -> None:
    stage.decode.manager.receive(stage.transfer.received_as, stage.prefill.me, 4, 1e9)
    stage.checks.at_rest()


CASES: list[tuple[str, Callable[[Stage], None]]] = [
    ("1", second_half),
    ("9", joined_with_its_own_role),
    ("2", skipped_phase),
    ("3", released_alive),
    ("3", leaked_page),
    ("13", epoch_used_again),
    ("4", write_after_release),
    ("4", false_drained),
    ("5", commits_a_flipped_page),
    ("7", foreign_metadata),
    ("17", stands_still),
    ("16", serves_the_dead),
    ("8", writes_without_being_told),
    ("12", without_a_cause),
    ("25", without_an_origin),
    ("15", outlived_its_deadline),
    ("16", peer_not_told),
    ("18", memory_not_given_back),
    ("19", after_the_first_token),
    ("24", wrong_token),
    ("23", usage_does_not_add_up),
    ("20", too_many_jobs),
    ("22", peers_remembered),
    ("21", handle_left),
]


@pytest.mark.usefixtures("ran")
@pytest.mark.parametrize(("rule", "spoil"), CASES, ids=[f"{r}-{f.__name__}" for r, f in CASES])
def test_a_violation_is_seen(rule: str, spoil: Callable[[Stage], None]) -> None:
    stage = Stage()
    with pytest.raises(Violation) as caught:
        spoil(stage)
    assert caught.value.rule == rule, str(caught.value)


@pytest.mark.usefixtures("ran")
def test_what_has_a_cause_is_none() -> None:
    """A break of its own two halves explains a lost peer, and what follows from that is explained with it."""
    stage = Stage()
    placed(stage)
    stage.deployment.causes.record("broken", stage.prefill, stage.decode)
    fails(stage, ErrorCode.PEER_LOST)
    chained = ErrorInfo(code=ErrorCode.TRANSFER_FAILED, text="?", room=stage.transfer.room)
    assert stage.deployment.causes.unexplained(chained, (stage.transfer.room,)) == ""


@pytest.mark.usefixtures("ran")
def test_somebody_may_be_late_where_one_sequence_at_a_time_has_a_place_for_its_state() -> None:
    stage = Stage()
    next(iter(stage.deployment.asked.values())).outcome = "late"
    with pytest.raises(Violation, match="late though nothing went wrong"):
        stage.checks.at_rest()
    engine: Any = stage.decode.engine
    engine.spec = SimpleNamespace(slots=1, pages=engine.spec.pages, page_tokens=engine.spec.page_tokens)
    stage.checks.at_rest()


def test_a_failure_that_a_retry_heals_needs_a_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    """One hand-off fails for no reason, in a seed whose features could give that code somewhere."""
    scenario = next(
        found
        for seed in range(500)
        if "path cut" in (found := make_scenario(seed)).features
        and found.features.isdisjoint({"bad request", "client abort", "mismatch", "unequal budgets"})
    )
    calm = scenario.only(frozenset(r.name for r in scenario.requests))
    assert not run_scenario(calm).failed
    reserve, failed = DecodeScheduler._reserve, []

    def fails_once(self: DecodeScheduler, job: RequestState) -> bool:
        if failed:
            return reserve(self, job)
        failed.append(job)
        self.fail(job, TransferFailed("spurious").info, self.table.get(job.received_as).handle.changed_at)  # type: ignore[union-attr]
        return False

    monkeypatch.setattr(DecodeScheduler, "_reserve", fails_once)
    outcome = run_scenario(calm)
    assert (outcome.rule, "TRANSFER_FAILED without a cause" in outcome.text) == ("12", True)


def test_the_story_of_a_room_is_readable() -> None:
    stage = Stage()
    asked = stage.asked()
    lines = tell(stage.deployment, tuple(asked.rooms))
    story = "\n".join(lines)
    for word in ("submit", "Publish", "→ Destination", "← Destination", "SUCCESS", "done"):
        assert word in story
    others = [r for r in stage.deployment.rooms if r not in asked.rooms]
    assert not any(f"{room:x}." in story for room in others)
    assert describe(events.Release(stage.transfer.received_as)).strip().startswith("Release")
