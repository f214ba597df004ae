"""Legal messages of a frontend to its leaders and clients: each rule detects its violation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from msgspec import structs
from test_sim_violations import Stage

from segue.engine.request import Request
from segue.kv.errors import BootstrapUnreachable, DeadlineExceeded, PeerLost, SegueError
from segue.kv.ids import LeaderId, Role
from segue.server.fleet import call
from segue.server.fleet.replica import Replica
from segue.server.messages.ticket import Ticket
from segue_lab.sim.clients import Asked, SentAttempt
from segue_lab.sim.deployment import Deployment
from segue_lab.sim.run import load, run_scenario
from segue_lab.sim.scenario import make_scenario
from segue_lab.sim.world import Violation

#: Nothing goes wrong in it, and there are several pairs.
PAIRS = next(
    seed
    for seed in range(2000)
    if not (scenario := make_scenario(seed)).features
    and [n.role for n in scenario.nodes].count(Role.DECODE) > 1
)


class Fronts(Stage):
    """A deployment of several pairs that ran to rest."""

    def __init__(self) -> None:
        self.deployment = Deployment(make_scenario(PAIRS))
        self.deployment.run()
        self.checks = self.deployment.checks
        self.pairs = self.front.wire.pairs()

    def pair(self) -> tuple[LeaderId, LeaderId]:
        prefill, decode = self.pairs[0]
        return prefill.leader, decode.leader

    def attempt(self, asked: Asked) -> None:
        """One more attempt of which both halves run."""
        prefill, decode = self.pair()
        ticket = Ticket(room=9, attempt=0, prefill=prefill, decode=decode, budget_s=1.0)
        live = {prefill: Role.PREFILL, decode: Role.DECODE}
        asked.attempts.append(SentAttempt("r~1", "r~1", (prefill, decode), ticket, ticket, live))

    def refused(self, error: SegueError) -> None:
        self.checks.answers.refused(self.front, self.asked(), error.info)

    def places(self, asked: Asked, kept: LeaderId | None = None) -> None:
        wanted = asked.wanted
        request = Request(
            request_id="r", prompt=wanted.prompt, sampling=wanted.sampling, output=list(asked.tokens)
        )
        self.checks.answers.placed(asked, request, kept)


def places_beside_a_half_that_runs(stage: Fronts) -> None:
    asked = stage.asked()
    stage.attempt(asked)
    stage.places(asked)


def ends_late(stage: Fronts) -> None:
    stage.checks.answers.ended_at(stage.front, stage.asked())


def forgets_a_token(stage: Fronts) -> None:
    asked = stage.asked()
    request = Request(request_id="r", prompt=asked.wanted.prompt, sampling=asked.wanted.sampling)
    stage.checks.answers.placed(asked, request)


def finds_nobody_where_somebody_is(stage: Fronts) -> None:
    stage.refused(BootstrapUnreachable("nobody can serve", origin="frontend"))


def waits_for_nothing(stage: Fronts) -> None:
    waiting = Asked(replace(stage.asked().wanted, name="new"), deadline=1e9)
    stage.front.asked["new"] = waiting
    stage.checks.answers.waiting(stage.front)
    stage.checks.answers.waiting(stage.front)


def holds_tokens_at_rest(stage: Fronts) -> None:
    stage.pairs[0][0].tokens = 5
    stage.checks.at_rest()


CASES: list[tuple[str, Callable[[Fronts], None]]] = [
    ("pair", places_beside_a_half_that_runs),
    ("15", ends_late),
    ("24", forgets_a_token),
    ("25", finds_nobody_where_somebody_is),
    ("17", waits_for_nothing),
    ("21", holds_tokens_at_rest),
]


@pytest.mark.parametrize(("rule", "spoil"), CASES, ids=[f"{r}-{f.__name__}" for r, f in CASES])
def test_a_violation_is_seen(rule: str, spoil: Callable[[Fronts], None]) -> None:
    stage = Fronts()
    with pytest.raises(Violation) as caught:
        spoil(stage)
    assert caught.value.rule == rule, str(caught.value)


def test_what_is_true_may_be_told() -> None:
    stage = Fronts()
    asked = stage.asked()
    asked.deadline = stage.deployment.world.now
    stage.refused(DeadlineExceeded("late", origin="frontend"))
    asked.failure = PeerLost("gone").info
    stage.refused(PeerLost("gone (attempt 2 of 4)"))
    stage.checks.answers.ended_at(stage.front, asked)
    for _, decode in stage.pairs:
        decode.listed = False
    stage.refused(BootstrapUnreachable("nobody can serve", origin="frontend"))


def test_one_that_drains_or_left_the_list_makes_no_pair() -> None:
    stage = Fronts()
    wire = stage.front.wire

    def decodes() -> set[Replica]:
        return {decode for _, decode in wire.pairs()}

    first, second = list(decodes())[:2]
    session = wire.open[first.leader].session
    load = next(node for node in stage.deployment.leaders() if node.me == first.leader).scheduler.load()
    wire.received(session, structs.replace(load, draining=True))
    assert first not in decodes()
    wire.received(session, load)
    assert first in decodes(), "it was resumed"
    second.listed = False
    assert second not in decodes()


@pytest.mark.parametrize("halves", ["prefill", "decode"])
def test_a_fleet_that_forgets_to_end_one_half_is_seen_at_once(
    halves: str, monkeypatch: pytest.MonkeyPatch
) -> None:

    def end(self: call.Attempt, reason: object) -> None:
        for replica in self._live:
            if replica.session is not None and replica.role.value != halves:
                replica.session.send(call.Cancel(self._request.request_id, reason))  # type: ignore[arg-type]
        self._live.clear()
        self._leave(*self.route.replicas)

    monkeypatch.setattr(call.Attempt, "end", end)
    assert any(run_scenario(load(seed)).rule == "pair" for seed in range(4))
