"""A generation that goes on where another instance left it."""

from __future__ import annotations

import pytest
from pair import FRONT, VOCAB, Pair
from test_roles_replaced import ask

from segue.engine.engine_api import run_step
from segue.engine.pages import PagePool
from segue.engine.request import FinishReason, Output, Request, SamplingParams
from segue.kv.clock import VirtualClock
from segue.kv.errors import ErrorCode
from segue.kv.ids import Incarnation, LeaderId
from segue.server.messages.control import Submit
from segue.server.messages.ticket import Ticket
from segue.server.schedulers.admission import SchedulerConfig
from segue.server.schedulers.unified import UnifiedScheduler
from segue_lab.sim.sim_engine import LineageEngine, lineage_spec, reference

COUNT = 9


def assert_goes_on(outputs: list[Output], wanted: list[int], given: int, prompt_tokens: int) -> None:
    assert [t for o in outputs for t in o.token_ids] == wanted[given:]
    assert [o.position for o in outputs] == list(range(given, len(wanted)))
    assert outputs[-1].finish is FinishReason.LENGTH
    usage = outputs[-1].usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.output_tokens) == (prompt_tokens, len(wanted))
    assert usage.prompt_tokens == usage.decode_cached + usage.prefill_cached + usage.computed


@pytest.mark.parametrize("given", range(1, COUNT))
@pytest.mark.parametrize("page_tokens", [(4, 4), (8, 4)])
def test_apart(given: int, page_tokens: tuple[int, int]) -> None:
    pair, prompt = Pair(page_tokens=page_tokens), list(range(13))
    wanted = ask(pair, "whole", prompt, count=COUNT)
    pair.run()
    assert pair.tokens("whole") == wanted
    ask(pair, "rest", prompt, count=COUNT, attempt=1, output=wanted[:given])
    pair.run()
    assert_goes_on(pair.outputs["rest"], wanted, given, 13)


class Alone:
    """One unified role."""

    def __init__(self, pages: int = 64) -> None:
        self.clock = VirtualClock()
        self.me = LeaderId(Incarnation("e" * 32))
        self.engine = LineageEngine(lineage_spec(pages, 4), vocab_size=VOCAB, context_tokens=200)
        self.scheduler = UnifiedScheduler(
            self.engine, PagePool(pages, 4), SchedulerConfig(me=self.me, name="unified", chunk_tokens=16)
        )
        self.rooms = 0

    def run(self, output: list[int], count: int = COUNT, prompt_tokens: int = 13) -> list[Output]:
        self.rooms += 1
        here = self.me
        ticket = Ticket(room=self.rooms, attempt=0, prefill=here, decode=here, budget_s=10.0)
        request = Request(
            request_id=f"r{self.rooms}",
            prompt=list(range(prompt_tokens)),
            sampling=SamplingParams(max_tokens=count, seed=3),
            output=output,
        )
        self.scheduler.submit(FRONT, Submit(request, ticket), self.clock.now())
        for _ in range(200):
            steps = self.scheduler.plan(0.0)
            if not steps:
                break
            self.scheduler.complete(run_step(self.engine, steps), 0.0)
        found = [o for _, o in self.scheduler.outbox]
        self.scheduler.outbox.clear()
        self.scheduler.check_integrity()
        return found


@pytest.mark.parametrize("given", range(1, COUNT))
def test_on_a_unified_instance(given: int) -> None:
    wanted = reference(list(range(13)), SamplingParams(seed=3), VOCAB, COUNT)
    assert_goes_on(Alone().run(wanted[:given]), wanted, given, 13)


@pytest.mark.parametrize("output", [[5] * COUNT, [5] * (COUNT + 1), [-1], [VOCAB]])
def test_what_is_no_output_is_refused(output: list[int]) -> None:
    [answer] = Alone().run(output)
    assert answer.error is not None
    assert answer.error.code is ErrorCode.INVALID_REQUEST


def test_one_that_is_too_long_for_this_instance_may_go_to_another() -> None:
    small = Alone(pages=8)
    [answer] = small.run([5] * 19, count=40)
    assert answer.error is not None
    assert answer.error.code is ErrorCode.OUT_OF_CAPACITY
    assert answer.error.retryable
    # One token less fits, and ends where the pool does.
    outputs = small.run([5] * 18, count=40)
    assert outputs[-1].finish is FinishReason.LENGTH
    assert outputs[-1].position == 18


def test_what_was_given_takes_nothing_from_what_the_instance_still_has_room_for() -> None:
    outputs = Alone(pages=8).run([5] * 10, count=40)
    # The whole answer ends where the pool does, wherever its first tokens were computed.
    assert [o.position for o in outputs] == list(range(10, 32 - 13))
    assert outputs[-1].finish is FinishReason.LENGTH
