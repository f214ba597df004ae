"""While a forward runs, what it reads and writes stays where it is; and what of it fails ends alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from msgspec.structs import replace
from pair import FRONT, VOCAB, Node, Pair
from test_roles_admission import finish, made, step, submitted

from segue.engine.engine_api import SequenceResult, SequenceStep, run_step
from segue.engine.request import Output, SamplingParams, TokenLogprob
from segue.kv.errors import AbortedByClient, ErrorCode, Internal, OutOfCapacity
from segue.kv.ids import KVPoll, RoomKey
from segue.kv.protocol import events
from segue.server.schedulers.scheduler import Scheduler
from segue_lab.sim.sim_engine import LineageEngine, reference

LEFT = AbortedByClient("left").info


def sequences(scheduler: Scheduler) -> int:
    assert isinstance(scheduler.engine, LineageEngine)
    return scheduler.engine.sizes()["sequences"]


def launch(scheduler: Scheduler, now: float = 0.0) -> Sequence[SequenceStep]:
    scheduler.advance(now)
    steps = scheduler.plan(now)
    scheduler.launched(steps)
    return steps


@pytest.mark.parametrize("way", ["cancel", "gone", "late"])
@pytest.mark.parametrize("generating", [False, True])
@pytest.mark.parametrize("ends", ["complete", "failed"])
def test_what_ends_while_it_is_computed_keeps_its_pages_until_the_forward_is_over(
    way: str, generating: bool, ends: str
) -> None:
    scheduler = made()
    scheduler.submit(FRONT, submitted("ends", list(range(9)), 9, budget_s=5.0), 0.0)
    scheduler.submit(FRONT, submitted("waits", list(range(50, 90)), 3), 0.0)
    step(scheduler)
    if generating:
        step(scheduler)
    steps = launch(scheduler)
    scheduler.outbox.clear()
    used = scheduler.cache.pool.used
    if way == "cancel":
        scheduler.cancel(FRONT, "ends", LEFT, 1.0)
    elif way == "late":
        scheduler.advance(5.0)
    else:
        scheduler.frontend_gone(FRONT, LEFT, 1.0)
    assert (scheduler.cache.pool.used, sequences(scheduler)) == (used, 2), "the forward still writes there"
    assert not scheduler.idle
    if ends == "complete":
        scheduler.complete(run_step(scheduler.engine, steps), 5.0)
    else:
        scheduler.step_failed(steps, Internal("a bug").info, 5.0)
    said = [out.request_id for _, out in scheduler.outbox if out.request_id == "ends"]
    assert said == (["ends"] if way == "late" else []), "nothing comes of it any more"
    finish(scheduler, 5.0)
    assert sequences(scheduler) == 0


def test_without_requests_a_forward_that_runs_is_no_rest() -> None:
    scheduler = made()
    scheduler.submit(FRONT, submitted("r", [1, 2, 3], 9), 0.0)
    steps = launch(scheduler)
    assert scheduler.computes(RoomKey(scheduler.admission.by_seq[1].ticket.room))
    assert not scheduler.computes(RoomKey(99))
    scheduler.drain()
    scheduler.cancel(FRONT, "r", LEFT, 0.0)
    assert scheduler.load().waiting == scheduler.load().running == 0
    assert not scheduler.load().drained
    scheduler.complete(run_step(scheduler.engine, steps), 0.0)
    assert scheduler.load().drained
    assert not scheduler.computes(RoomKey(1))


def test_a_step_that_the_engine_could_not_run_ends_those_it_was_for_and_nobody_who_waits() -> None:
    scheduler = made(pages=8)
    for name, prompt in (("a", [1] * 10), ("b", [2] * 10), ("waits", [3] * 20)):
        scheduler.submit(FRONT, submitted(name, prompt, 2), 0.0)
    steps = launch(scheduler)
    assert len(steps) == 2
    scheduler.step_failed(steps, Internal("the device is gone").info, 1.0)
    failed = {out.request_id: out.error for _, out in scheduler.outbox}
    assert set(failed) == {"a", "b"}
    assert all(error is not None and error.text == "the device is gone" for error in failed.values())
    scheduler.outbox.clear()
    finish(scheduler)
    assert sum(len(out.token_ids) for _, out in scheduler.outbox) == 2


@pytest.mark.parametrize(
    ("at", "answer"),
    [
        ("prompt", "no token"),
        ("prompt", "an error"),
        ("prompt", "left out"),
        ("generation", "no token"),
        ("generation", "an error"),
        ("prompt", "refused"),
        ("generation", "refused"),
    ],
)
def test_a_sequence_for_which_the_engine_gives_no_token_ends_alone_and_only_a_refusal_is_the_client_s_fault(
    at: str, answer: str
) -> None:
    scheduler = made()
    scheduler.submit(FRONT, submitted("bad", [1, 2, 3], 9), 0.0)
    scheduler.submit(FRONT, submitted("good", [4, 5], 3), 0.0)
    if at == "generation":
        step(scheduler)
    results = [each for each in run_step(scheduler.engine, launch(scheduler)) if each.seq_id != 1]
    if answer != "left out":
        error = None if answer == "no token" else "no token is allowed"
        token = None if error is None else 5
        results.append(SequenceResult(1, token=token, error=error, refused=answer == "refused"))
    scheduler.outbox.clear()
    scheduler.complete(results, 0.0)
    [error_info] = [out.error for _, out in scheduler.outbox if out.error is not None]
    assert error_info.code is (ErrorCode.INVALID_REQUEST if answer == "refused" else ErrorCode.INTERNAL)
    assert not error_info.retryable
    assert (answer in ("an error", "refused")) == ("no token is allowed" in error_info.text)
    assert {s.request.request_id for s in scheduler.admission.requests.values()} == {"good"}
    finish(scheduler)


def test_generating_sequences_take_their_part_of_a_step_before_prompts_do() -> None:
    scheduler = made()
    scheduler.submit(FRONT, submitted("runs", [1, 2, 3], 9), 0.0)
    scheduler.submit(FRONT, submitted("runs too", [4, 5, 6], 9), 0.0)
    step(scheduler)
    scheduler.submit(FRONT, submitted("long", list(range(40)), 2), 0.0)
    steps = launch(scheduler)
    assert [len(each.tokens) for each in steps] == [1, 1, 14], "16 tokens in all"
    scheduler.complete(run_step(scheduler.engine, steps), 0.0)
    finish(scheduler)


# ---- bugs -------------------------------------------------------------------------------------------


def test_a_bug_that_is_one_request_s_ends_that_one_known_or_not_and_once() -> None:
    scheduler = made()
    for name in ("a", "b"):
        scheduler.submit(FRONT, submitted(name, [1, 2, 3], 3), 0.0)
    bug = Internal("a bug").info
    room = scheduler.admission.by_seq[2].ticket.room
    for attempt in (1, 0, 0):
        scheduler.broken_handoff(RoomKey(room, attempt=attempt), bug, float(attempt))
        assert (len(scheduler.admission.requests) == 2) is (attempt == 1), "another attempt is another one"
    scheduler.broken(FRONT, "never came", bug, 1.0)
    told = [(out.request_id, out.error.phase) for _, out in scheduler.outbox if out.error is not None]
    assert told == [("b", "queue"), ("never came", "submit")]
    scheduler.outbox.clear()
    scheduler.broken(FRONT, "a", bug, 1.0)
    assert [out.request_id for _, out in scheduler.outbox] == ["a"]
    finish(scheduler)


def test_a_bug_that_is_nobody_s_alone_ends_everything_though_the_end_of_one_breaks_too() -> None:
    scheduler = made()
    for name in "abc":
        scheduler.submit(FRONT, submitted(name, [1, 2, 3], 3), 0.0)
    normal: Callable[..., None] = scheduler._drop

    def drop(state: Any, *more: Any) -> None:
        normal(state, *more)
        if state.request.request_id == "a":
            raise KeyError("another bug")

    scheduler._drop = drop  # type: ignore[method-assign]
    scheduler.fail_all(Internal("planning broke").info, 1.0)
    assert not scheduler.admission.requests
    assert {out.request_id for _, out in scheduler.outbox} >= {"b", "c"}
    assert [type(bug) for _, bug in scheduler.bugs] == [KeyError]
    scheduler.submit(FRONT, submitted("next", [1, 2, 3], 2), 1.0)
    finish(scheduler, 1.0)


@pytest.mark.parametrize("call", ["copy_out", "copy_in"])
def test_an_engine_that_says_itself_why_it_cannot_retract_is_believed_and_that_is_no_bug(call: str) -> None:
    scheduler = made(pages=8)
    right = getattr(scheduler.engine, call)

    def full(*args: object) -> object:
        setattr(scheduler.engine, call, right)
        raise OutOfCapacity("no host memory is left")

    setattr(scheduler.engine, call, full)
    for name in ("a", "b"):
        scheduler.submit(FRONT, submitted(name, [1, 2, 3], 20), 0.0)
    finish(scheduler)
    errors = [out.error for _, out in scheduler.outbox if out.error is not None]
    assert [error.code for error in errors] == [ErrorCode.OUT_OF_CAPACITY]
    assert scheduler.bugs == []
    assert sum(len(out.token_ids) for _, out in scheduler.outbox) > 20


# ---- prefill and decode -----------------------------------------------------------------------------


def until(
    pair: Pair, side: str, computing: Callable[[Sequence[SequenceStep]], bool]
) -> Sequence[SequenceStep]:
    """Take steps on both sides until the next forward of `side` is such a one; it runs now."""
    node, other = (pair.prefill, pair.decode) if side == "prefill" else (pair.decode, pair.prefill)
    for _ in range(50):
        pair.pump()
        other.turn()
        pair.pump()
        steps = launch(node.scheduler)
        if steps and computing(steps):
            return steps
        node.scheduler.complete(run_step(node.engine, steps, node.scheduler.on_stored()), 0.0)
    raise AssertionError("it did not come to that")


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("ends", ["complete", "failed"])
def test_neither_half_gives_pages_back_under_a_forward_that_has_them(side: str, ends: str) -> None:
    pair = Pair()
    pair.submit("r", list(range(40)), 9)
    steps = until(pair, side, lambda steps: steps[0].start > 0)
    node: Node = getattr(pair, side)
    [state] = node.scheduler.admission.requests.values()
    key = node.scheduler.key_of(state)
    assert node.scheduler.computes(key)
    used = node.pool.used
    node.scheduler.cancel(FRONT, "r", LEFT, 0.0)
    assert node.scheduler.computes(key), "what the protocol says of it waits all the same"
    assert not node.scheduler.computes(replace(key, generation=1))
    assert node.pool.used == used
    assert node.engine.sizes()["sequences"] == 1
    if ends == "complete":
        node.scheduler.complete(run_step(node.engine, steps, node.scheduler.on_stored()), 0.0)
    else:
        node.scheduler.step_failed(steps, Internal("a bug").info, 0.0)
    assert node.engine.sizes()["sequences"] == 0


@pytest.mark.parametrize("answer", ["no token", "left out"])
def test_a_prompt_without_a_first_token_fails_both_sides_and_its_metadata_is_not_sent(answer: str) -> None:
    pair = Pair()
    pair.submit("r", list(range(9)), 3)
    node = pair.prefill
    steps = until(pair, "prefill", lambda steps: steps[0].sample)
    run_step(node.engine, steps, node.scheduler.on_stored())
    node.scheduler.complete([SequenceResult(steps[0].seq_id)] if answer == "no token" else [], 0.0)
    pair.run()
    assert pair.errors("r") == ["INTERNAL", "INTERNAL"]


def test_layers_of_a_chunk_leave_as_they_are_told_and_the_rest_when_the_forward_is_over() -> None:
    pair = Pair(send_layers=1)
    wanted = pair.submit("r", list(range(20)), 3)
    node = pair.prefill
    for chunk in range(2):
        steps = until(pair, "prefill", lambda _: True)
        written = [sum(isinstance(effect, events.PostWrite) for effect in node.effects)]
        node.engine.store(steps)
        ids = [each.seq_id for each in steps]
        stored = node.scheduler.on_stored()
        for layers in (1, None):
            stored(ids, layers)
            written.append(sum(isinstance(effect, events.PostWrite) for effect in node.effects))
        stored(ids)
        written.append(sum(isinstance(effect, events.PostWrite) for effect in node.effects))
        assert written == [0, 1, 2, 2], f"chunk {chunk}: each layer once"
        node.scheduler.complete(node.engine.draw(steps), 0.0)
    pair.run()
    assert pair.tokens("r") == wanted


def test_what_was_told_of_some_layers_alone_is_sent_whole_at_the_end_of_the_forward() -> None:
    pair = Pair(send_layers=1)
    wanted = pair.submit("r", list(range(9)), 3)
    node = pair.prefill
    steps = until(pair, "prefill", lambda _: True)
    node.engine.store(steps)
    node.scheduler.on_stored()([each.seq_id for each in steps], 1)
    node.scheduler.complete(node.engine.draw(steps), 0.0)
    pair.run()
    assert pair.tokens("r") == wanted


def test_what_the_protocol_says_of_a_request_that_has_ended_begins_nothing() -> None:
    """The word that decode has told where to write may come after the client has left."""
    pair = Pair()
    pair.submit("r", list(range(9)), 3, to=(True, False))
    [key] = pair.prefill.scheduler.table
    pair.prefill.scheduler.cancel(FRONT, "r", LEFT, 0.0)
    pair.prefill.scheduler.on_change(events.Phase(key, KVPoll.WAITING_FOR_INPUT), 0.0)
    assert pair.prefill.scheduler.plan(0.0) == []
    assert len(pair.prefill.scheduler.queue) == 0
    unknown = RoomKey(key.room + 1)
    for node in (pair.prefill, pair.decode):
        node.scheduler.on_change(events.Phase(unknown, KVPoll.WAITING_FOR_INPUT), 0.0)
        node.scheduler.on_change(events.Release(unknown), 0.0)


# ---- load -------------------------------------------------------------------------------------------


def test_a_load_says_what_runs_what_waits_and_what_is_free() -> None:
    scheduler = made(pages=16)
    scheduler.submit(FRONT, submitted("runs", list(range(9)), 9), 0.0)
    step(scheduler)
    scheduler.submit(FRONT, submitted("waits", list(range(100, 156)), 2), 0.0)
    load = scheduler.load()
    assert (load.running, load.waiting, load.tokens) == (0, 2, 9 + 1 + 56)
    step(scheduler)
    load = scheduler.load()
    assert (load.running, load.waiting, load.tokens) == (1, 1, 9 + 2 + 56)
    # 3 pages are with the sequence, whose 2 whole ones the prefix tree shares.
    assert (load.pages_total, load.pages_free, load.pages_quarantined) == (16, 13, 0)
    assert (load.slots_total, load.draining, load.drained, load.local_tokens) == (0, False, False, None)
    finish(scheduler)
    load = scheduler.load()
    assert (load.running, load.waiting, load.tokens, load.pages_free) == (0, 0, 0, 16), "cached is free"
    assert not load.drained, "nobody has told it to"
    scheduler.drain()
    assert (scheduler.load().draining, scheduler.load().drained) == (True, True)
    held = scheduler.cache.pool.allocate(1)
    scheduler.cache.pool.quarantine(held)
    assert not scheduler.load().drained, "somebody may still write here"
    scheduler.cache.pool.unquarantine(held)


def test_prefill_counts_what_is_still_to_be_computed() -> None:
    pair = Pair()
    pair.submit("r", list(range(40)), 3)
    steps = until(pair, "prefill", lambda _: True)
    assert pair.prefill.scheduler.load().tokens == 40
    pair.prefill.scheduler.complete(
        run_step(pair.prefill.engine, steps, pair.prefill.scheduler.on_stored()), 0.0
    )
    load = pair.prefill.scheduler.load()
    assert (load.tokens, load.running, load.waiting) == (24, 1, 0)
    pair.run()


# ---- what a frontend is told of a generation --------------------------------------------------------


def test_the_first_output_tells_of_the_prompt_and_the_last_one_of_the_whole() -> None:
    pair = Pair()
    pair.submit("first", list(range(20)), 1)
    pair.run()
    pair.submit("r", [*range(20), 7], 4)
    pair.run()
    outputs: list[Output] = pair.outputs["r"]
    assert [out.position for out in outputs] == [0, 1, 2, 3]
    first, *between, last = outputs
    for usage in (first.usage, last.usage):
        assert usage is not None
        assert (usage.prompt_tokens, usage.decode_cached, usage.prefill_cached, usage.computed) == (
            21,
            20,
            0,
            1,
        )
    assert first.usage is not None
    assert last.usage is not None
    assert (first.usage.output_tokens, last.usage.output_tokens) == (0, 4)
    assert [out.usage for out in between] == [None, None]
    assert {
        "queue",
        "bootstrap",
        "prefill",
        "reserve",
        "wire",
        "commit",
        "at_ready",
        "at_forward_end",
    } <= set(first.timeline)
    assert [out.timeline for out in outputs[1:]] == [{}] * 3
    assert [out.finish is not None for out in outputs] == [False, False, False, True]


@pytest.mark.parametrize("cancelled", [0, 1])
def test_of_those_whose_kv_was_moved_out_the_one_that_is_cancelled_stays_away_and_the_other_comes_back(
    cancelled: int,
) -> None:
    scheduler = made(pages=8)
    prompts = {"a": [1, 2, 3], "b": [4, 5, 6], "c": [7, 8, 9]}
    for name, prompt in prompts.items():
        scheduler.submit(FRONT, submitted(name, prompt, 20), 0.0)
    while len(scheduler.batch.retracted) < 2:
        step(scheduler)
    gone, back = (scheduler.batch.retracted[at][0].request.request_id for at in (cancelled, 1 - cancelled))
    scheduler.cancel(FRONT, gone, LEFT, 0.0)
    assert [state.request.request_id for state, _ in scheduler.batch.retracted] == [back]
    finish(scheduler)
    for name in ("a", back):
        said = [token for _, out in scheduler.outbox if out.request_id == name for token in out.token_ids]
        assert said == reference(prompts[name], SamplingParams(), VOCAB, 20)
    [record] = scheduler.admission.explain(back, 0.0)
    assert [each.name for each in record.steps][-3:] == ["decode", "retracted", "decode"]


def test_what_prefill_knows_of_the_prompt_s_tokens_reaches_the_client_with_the_first_one() -> None:
    """Two chunks, and the token that prefill has sampled."""
    pair = Pair()
    pair.submit("r", list(range(20)), 2)
    node, told = pair.prefill, list[TokenLogprob | None]()
    for count in (16, 4):
        steps = until(pair, "prefill", lambda _: True)
        [result] = run_step(node.engine, steps, node.scheduler.on_stored()) or [
            SequenceResult(steps[0].seq_id)
        ]
        entries = [TokenLogprob(len(told) + at, -float(at), []) for at in range(count)]
        told += entries
        drawn = None if result.token is None else TokenLogprob(result.token, -0.25, [(result.token, -0.25)])
        result = SequenceResult(result.seq_id, result.token, drawn, prompt_logprobs=list(entries))
        node.scheduler.complete([result], 0.0)
    [state] = node.scheduler.admission.requests.values()
    assert state.result is not None
    assert (state.result.prefill_cached, state.result.computed) == (0, 20)
    pair.run()
    first, last = pair.outputs["r"]
    assert first.prompt_logprobs == told
    assert [each.logprob for each in first.logprobs] == [-0.25]
    assert last.prompt_logprobs is None
    pair.submit("again", [*range(20), 7], 2)
    steps = until(pair, "prefill", lambda steps: steps[0].sample)
    [state] = node.scheduler.admission.requests.values()
    node.scheduler.complete(run_step(node.engine, steps, node.scheduler.on_stored()), 0.0)
    assert state.result is not None
    assert (state.result.prefill_cached, state.result.computed) == (20, 1)
