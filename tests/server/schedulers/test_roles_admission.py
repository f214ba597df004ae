"""Admission, its duration, and the messages to each frontend about its own requests."""

from __future__ import annotations

from typing import Any

import pytest
from pair import VOCAB
from test_unified import FRONT, ME, ROOMS

from segue.engine.engine_api import run_step
from segue.engine.pages import PagePool
from segue.engine.request import Request, SamplingParams
from segue.kv.errors import AbortedByClient, ErrorCode, Internal, InvalidRequest
from segue.kv.ids import OPEN_RANK, Incarnation, LeaderId, RoomKey
from segue.kv.limits import Limits
from segue.kv.protocol import events
from segue.server.messages.control import Submit
from segue.server.messages.records import MAX_FOUND
from segue.server.messages.ticket import Ticket
from segue.server.schedulers.admission import SchedulerConfig
from segue.server.schedulers.decode import DecodeScheduler
from segue.server.schedulers.prefill import PrefillScheduler
from segue.server.schedulers.scheduler import Scheduler
from segue.server.schedulers.unified import UnifiedScheduler
from segue_lab.sim.sim_engine import LineageEngine, lineage_spec, reference

OTHER_FRONT = Incarnation("e" * 32)
STRANGER = LeaderId(Incarnation("9" * 32))


def made(pages: int = 16, context_tokens: int = 4096, **limits: Any) -> UnifiedScheduler:
    engine = LineageEngine(lineage_spec(pages), vocab_size=VOCAB, context_tokens=context_tokens)
    config = SchedulerConfig(me=ME, name="unified here", limits=Limits(**limits), chunk_tokens=16)
    return UnifiedScheduler(engine, PagePool(pages, 4), config)


def submitted(
    name: str,
    prompt: list[int],
    max_tokens: int = 4,
    *,
    budget_s: float = 100.0,
    room: int = 0,
    **ticket: Any,
) -> Submit:
    shown = {"attempt": 0, "prefill": ME, "decode": ME, **ticket}
    return Submit(
        Request(request_id=name, prompt=prompt, sampling=SamplingParams(max_tokens=max_tokens)),
        Ticket(room=room or next(ROOMS), budget_s=budget_s, **shown),
    )


def step(scheduler: Scheduler, now: float = 0.0) -> None:
    scheduler.advance(now)
    steps = scheduler.plan(now)
    scheduler.launched(steps)
    scheduler.complete(run_step(scheduler.engine, steps), now)


def finish(scheduler: Scheduler, now: float = 0.0) -> None:
    while scheduler.admission.requests:
        step(scheduler, now)
    scheduler.check_integrity()
    assert scheduler.idle


def codes(scheduler: Scheduler) -> list[tuple[Incarnation, str, ErrorCode]]:
    """The errors and their receivers; clears them."""
    told = [(to, out.request_id, out.error.code) for to, out in scheduler.outbox if out.error is not None]
    scheduler.outbox.clear()
    return told


def test_a_request_lives_as_long_as_its_ticket_says_and_no_longer_than_the_instance_allows() -> None:
    scheduler = made(request_budget_s=10.0)
    scheduler.submit(FRONT, submitted("long", [1], 9, budget_s=1e6), 5.0)
    assert scheduler.next_deadline() == 15.0
    scheduler.submit(FRONT, submitted("short", [2], 9, budget_s=3.0), 5.0)
    assert scheduler.next_deadline() == 8.0
    scheduler.submit(FRONT, submitted("as short", [3], 9, budget_s=3.0), 5.0)
    scheduler.advance(7.999)
    assert codes(scheduler) == []
    scheduler.advance(8.0)
    assert codes(scheduler) == [
        (FRONT, name, ErrorCode.DEADLINE_EXCEEDED) for name in ("short", "as short")
    ], "all that are late, at once"
    assert scheduler.next_deadline() == 15.0
    scheduler.advance(14.999)
    assert "long" in {state.request.request_id for state in scheduler.admission.requests.values()}
    scheduler.advance(15.0)
    assert [name for _, name, _ in codes(scheduler)] == ["long"]
    assert scheduler.next_deadline() is None


@pytest.mark.parametrize("why", ["drains", "full"])
def test_what_is_refused_for_want_of_a_place_may_come_again_with_its_ticket(why: str) -> None:
    scheduler = made(max_queue=1)
    scheduler.submit(FRONT, submitted("first", [1, 2], 2), 0.0)
    if why == "drains":
        finish(scheduler)
        scheduler.drain()
        assert scheduler.load().draining
    scheduler.outbox.clear()
    refused = submitted("second", [3, 4], 2)
    scheduler.submit(FRONT, refused, 0.0)
    expected = ErrorCode.DRAINING if why == "drains" else ErrorCode.OUT_OF_CAPACITY
    assert codes(scheduler) == [(FRONT, "second", expected)]
    assert "second" not in str(scheduler.admission.requests)
    finish(scheduler)
    scheduler.drain(False)
    scheduler.outbox.clear()
    scheduler.submit(FRONT, refused, 0.0)
    finish(scheduler)
    assert codes(scheduler) == []


def test_two_frontends_may_use_one_id_and_each_hears_of_its_own_request_only() -> None:
    scheduler = made()
    asked = {FRONT: [1, 2, 3], OTHER_FRONT: [4, 5]}
    for origin, prompt in asked.items():
        scheduler.submit(origin, submitted("r", prompt), 0.0)
    scheduler.submit(FRONT, submitted("r", [7]), 0.0)
    assert codes(scheduler) == [(FRONT, "r", ErrorCode.INVALID_REQUEST)], "one frontend's id is used once"
    finish(scheduler)
    for origin, prompt in asked.items():
        said = [token for to, output in scheduler.outbox if to == origin for token in output.token_ids]
        assert said == reference(prompt, SamplingParams(), VOCAB, 4)


@pytest.mark.parametrize("how", ["cancel", "gone"])
def test_what_one_frontend_ends_is_none_of_another_s(how: str) -> None:
    scheduler = made()
    for origin in (FRONT, OTHER_FRONT):
        scheduler.submit(origin, submitted("r", [1, 2, 3], 9), 0.0)
    step(scheduler)
    left = AbortedByClient("left").info
    if how == "cancel":
        scheduler.cancel(FRONT, "unknown", left, 0.0)
        scheduler.cancel(FRONT, "r", left, 0.0)
        scheduler.cancel(FRONT, "r", left, 0.0)
        scheduler.outbox.clear()
    else:
        scheduler.frontend_gone(FRONT, left, 0.0)
        assert {to for to, _ in scheduler.outbox} == {OTHER_FRONT}
    assert [origin for origin, _ in scheduler.admission.requests] == [OTHER_FRONT]
    finish(scheduler)
    assert [out.finish is not None for to, out in scheduler.outbox if to == OTHER_FRONT][-1]
    assert not any(out.error for _, out in scheduler.outbox)
    assert not [out for to, out in scheduler.outbox if to == FRONT]


def test_the_model_s_context_bounds_prompt_and_answer_where_the_pool_would_hold_more() -> None:
    scheduler = made(pages=16, context_tokens=20)
    scheduler.submit(FRONT, submitted("too long", list(range(20))), 0.0)
    [(_, output)] = scheduler.outbox
    assert output.error is not None
    assert (output.error.code, output.error.retryable) == (ErrorCode.INVALID_REQUEST, False)
    assert "at most 19" in output.error.text
    scheduler.outbox.clear()
    scheduler.submit(FRONT, submitted("just", list(range(19)), 9), 0.0)
    scheduler.submit(FRONT, submitted("ends there", list(range(15)), 90), 0.0)
    finish(scheduler)
    for name, count in (("just", 1), ("ends there", 5)):
        assert sum(len(out.token_ids) for _, out in scheduler.outbox if out.request_id == name) == count


@pytest.mark.parametrize("token", [-1, VOCAB, 2**31])
@pytest.mark.parametrize("at", [0, 2])
def test_a_token_that_the_model_does_not_have_is_refused_wherever_it_stands(token: int, at: int) -> None:
    scheduler = made()
    prompt = [1, 2, 3]
    prompt[at] = token
    scheduler.submit(FRONT, submitted("bad", prompt), 0.0)
    assert codes(scheduler) == [(FRONT, "bad", ErrorCode.INVALID_REQUEST)]
    assert not any(scheduler.sizes().values())


class NoHandoffs:
    """No hand-off is to be made."""

    def sender(self, transfer: Any) -> Any:
        raise AssertionError(f"a sender for {transfer}")

    receiver = sender


@pytest.mark.parametrize("make", [UnifiedScheduler, DecodeScheduler, PrefillScheduler])
@pytest.mark.parametrize(
    "named",
    [
        {"prefill": STRANGER, "decode": LeaderId(ME.incarnation, 1)},
        {"prefill": LeaderId(ME.incarnation, 1), "decode": STRANGER},
        {"prefill": LeaderId(STRANGER.incarnation, OPEN_RANK), "decode": STRANGER},
    ],
    ids=["another of our ranks decodes", "another of our ranks prefills", "any rank of another prefills"],
)
def test_a_ticket_for_another_replica_is_refused_and_leaves_nothing(make: Any, named: dict[str, Any]) -> None:
    engine = LineageEngine(lineage_spec(8), vocab_size=VOCAB)
    config = SchedulerConfig(me=ME, name="here")
    more = () if make is UnifiedScheduler else (NoHandoffs(),)
    scheduler: Scheduler = make(engine, PagePool(8, 4), config, *more)
    scheduler.submit(FRONT, submitted("r", [1, 2, 3], 1, **named), 0.0)
    [(_, output)] = scheduler.outbox
    assert output.error is not None
    assert output.error.code is ErrorCode.INVALID_REQUEST
    assert "names another" in output.error.text
    assert not any(scheduler.sizes().values())
    assert engine.sizes() == {"sequences": 0}
    assert scheduler.plan(0.0) == []


def test_what_the_engine_refuses_to_open_is_refused_with_its_reason_and_is_nowhere() -> None:
    scheduler = made()

    def refuse(*_: object) -> None:
        raise InvalidRequest("this grammar admits nothing")

    normal, scheduler.engine.open = scheduler.engine.open, refuse  # type: ignore[method-assign]
    scheduler.submit(FRONT, submitted("bad", [1, 2]), 0.0)
    scheduler.engine.open = normal  # type: ignore[method-assign]
    [(_, output)] = scheduler.outbox
    assert output.error is not None
    assert output.error.text == "this grammar admits nothing"
    assert not any(scheduler.sizes().values())
    scheduler.submit(FRONT, submitted("good", [1, 2]), 0.0)
    finish(scheduler)


def test_an_error_says_where_when_and_in_which_phase_it_came() -> None:
    scheduler = made()
    scheduler.submit(FRONT, submitted("late", [1, 2], 9, budget_s=2.0, room=77), 5.0)
    scheduler.submit(FRONT, submitted("refused", [], room=78), 5.0)
    step(scheduler, 5.5)
    scheduler.advance(7.0)
    found = {out.request_id: out.error for _, out in scheduler.outbox if out.error is not None}
    late, refused = found["late"], found["refused"]
    assert (late.origin, late.room, late.phase, late.elapsed_s) == ("unified here", 77, "ready", 2.0)
    assert (refused.origin, refused.room) == ("unified here", 78)


def test_what_happened_to_a_request_is_told_its_ended_attempts_first_and_the_one_that_goes_on_last() -> None:
    scheduler = made(max_queue=3)
    scheduler.submit(FRONT, submitted("r", list(range(9)), 2, room=5), 1.0)
    while scheduler.admission.requests:
        step(scheduler, 3.0)
    scheduler.submit(FRONT, submitted("r~1", [], room=6, attempt=1), 4.0)
    scheduler.submit(FRONT, submitted("r~2", list(range(9)), 9, room=7, attempt=2), 6.0)
    scheduler.submit(FRONT, submitted("another", [1]), 6.0)
    step(scheduler, 7.0)
    done, refused, going = scheduler.admission.explain("r", 9.0)
    assert [(r.request_id, r.room, r.attempt, r.ended) for r in (done, refused, going)] == [
        ("r", 5, 0, True),
        ("r~1", 6, 1, True),
        ("r~2", 7, 2, False),
    ]
    assert (done.began, done.seconds, done.error, done.where) == (1.0, 2.0, None, "unified here")
    assert [each.name for each in done.steps] == ["queue", "prefill", "ready", "decode"]
    assert [each.at_s for each in done.steps] == [0.0, 2.0, 2.0, 2.0]
    assert done.pair == f"{ME} > {ME}"
    assert done.facts == {
        "prompt_tokens": 9,
        "cached_tokens": 0,
        "computed_tokens": 10,
        "pages": 3,
        "handed_bytes": 0,
        "output_tokens": 2,
    }
    assert refused.error is not None
    assert refused.error.code is ErrorCode.INVALID_REQUEST
    assert (refused.began, refused.seconds) == (4.0, 0.0)
    assert (going.began, going.seconds, going.error) == (6.0, 3.0, None)
    assert going.facts["cached_tokens"] == 8


def test_a_unified_instance_takes_no_word_of_a_hand_off_silently() -> None:
    with pytest.raises(Internal, match="no hand-off"):
        made().on_change(events.Release(RoomKey(5)), 0.0)


def test_the_next_deadline_is_of_somebody_who_is_still_here_however_many_have_left() -> None:
    scheduler = made()
    for number, budget_s in enumerate((2.0, 3.0, 4.0, 9.0)):
        scheduler.submit(FRONT, submitted(f"r{number}", [1], 9, budget_s=budget_s), 0.0)
    for number in range(3):
        scheduler.cancel(FRONT, f"r{number}", AbortedByClient("left").info, 1.0)
    assert scheduler.next_deadline() == 9.0
    scheduler.advance(8.0)
    assert codes(scheduler) == []
    scheduler.advance(9.0)
    assert [name for _, name, _ in codes(scheduler)] == ["r3"]


def test_of_an_id_that_many_requests_have_so_many_are_told_as_an_answer_holds() -> None:
    scheduler = made(max_queue=200)
    for attempt in range(MAX_FOUND + 9):
        scheduler.submit(FRONT, submitted(f"r~{attempt}", [1], 9), 0.0)
    assert len(scheduler.admission.explain("r", 1.0)) == MAX_FOUND
