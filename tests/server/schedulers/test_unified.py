"""The unified role over the lineage engine: right tokens under batching, pressure, cancels, deadlines."""

from __future__ import annotations

import itertools
import random

import pytest
from msgspec import structs

from segue.engine.engine_api import SequenceResult, run_step
from segue.engine.pages import PagePool
from segue.engine.request import FinishReason, Output, Request, SamplingParams
from segue.kv.errors import AbortedByClient, ErrorCode
from segue.kv.ids import Incarnation, LeaderId
from segue.kv.limits import Limits
from segue.server.messages.control import Submit
from segue.server.messages.ticket import Ticket
from segue.server.schedulers.admission import SchedulerConfig
from segue.server.schedulers.unified import UnifiedScheduler
from segue_lab.sim.sim_engine import LineageEngine, lineage_spec, reference

ROOMS = itertools.count(1)
ME = LeaderId(Incarnation("a" * 32))
FRONT = Incarnation("f" * 32)
VOCAB = 1000


def make(pages: int = 64, chunk_tokens: int = 16, slots: int = 0) -> UnifiedScheduler:
    engine = LineageEngine(lineage_spec(pages, slots=slots), vocab_size=VOCAB)
    limits = Limits(max_batch=8, max_queue=64)
    config = SchedulerConfig(me=ME, name="unified", limits=limits, chunk_tokens=chunk_tokens)
    return UnifiedScheduler(engine, PagePool(pages, 4), config)


def submit(
    scheduler: UnifiedScheduler,
    name: str,
    prompt: list[int],
    max_tokens: int,
    budget_s: float = 100,
    now: float = 0,
) -> SamplingParams:
    sampling = SamplingParams(max_tokens=max_tokens, seed=len(prompt))
    here = ME
    ticket = Ticket(room=next(ROOMS), attempt=0, prefill=here, decode=here, budget_s=budget_s)
    scheduler.submit(FRONT, Submit(Request(request_id=name, prompt=prompt, sampling=sampling), ticket), now)
    return sampling


def run(scheduler: UnifiedScheduler, now: float = 0.0, steps: int = 10_000) -> dict[str, list[Output]]:
    """Drive the role until nothing is left to do; outputs by request."""
    outputs: dict[str, list[Output]] = {}
    for _ in range(steps):
        scheduler.advance(now)
        plan = scheduler.plan(now)
        if plan:
            scheduler.complete(run_step(scheduler.engine, plan), now)
        for _origin, output in scheduler.outbox:
            outputs.setdefault(output.request_id, []).append(output)
        scheduler.outbox.clear()
        if not plan:
            break
    return outputs


def tokens(outputs: list[Output]) -> list[int]:
    """All tokens in order; positions must have no gap."""
    result: list[int] = []
    for output in outputs:
        assert output.position == len(result) or not output.token_ids
        result += output.token_ids
    return result


def test_tokens_equal_the_reference_for_mixed_lengths() -> None:
    scheduler, rng = make(), random.Random(1)
    wanted = {}
    for i in range(20):
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 70))]
        count = rng.randint(1, 20)
        wanted[f"r{i}"] = reference(prompt, submit(scheduler, f"r{i}", prompt, count), VOCAB, count)
    outputs = run(scheduler)
    assert {name: tokens(out) for name, out in outputs.items()} == wanted
    assert all(out[-1].finish is FinishReason.LENGTH for out in outputs.values())
    scheduler.check_integrity()
    assert not any(scheduler.sizes().values())


def test_retraction_keeps_the_tokens_right() -> None:
    scheduler = make(pages=12)
    wanted = {}
    for i in range(4):
        prompt = [i * 10 + k for k in range(7)]
        wanted[f"r{i}"] = reference(prompt, submit(scheduler, f"r{i}", prompt, 30), VOCAB, 30)
    outputs = run(scheduler)
    assert scheduler.batch.retractions > 0, "the pool was chosen too large to need a retraction"
    assert {name: tokens(out) for name, out in outputs.items()} == wanted
    scheduler.check_integrity()


@pytest.mark.parametrize("slots", [0, 5])
@pytest.mark.parametrize("call", ["copy_out", "copy_in"])
def test_an_engine_that_cannot_retract_fails_that_request_alone(call: str, slots: int) -> None:
    scheduler = make(pages=12, slots=slots)
    right, broke = getattr(scheduler.engine, call), []

    def breaks_once(*args: object) -> object:
        if broke:
            return right(*args)
        broke.append(call)
        raise KeyError("a bug")

    setattr(scheduler.engine, call, breaks_once)
    wanted = {}
    for i in range(4):
        prompt = [i * 10 + k for k in range(7)]
        wanted[f"r{i}"] = reference(prompt, submit(scheduler, f"r{i}", prompt, 30), VOCAB, 30)
    outputs = run(scheduler)
    failed = [name for name, out in outputs.items() if out[-1].error is not None]
    assert len(failed) == 1
    error = outputs[failed[0]][-1].error
    assert error is not None
    assert (error.code, call in error.text) == (ErrorCode.INTERNAL, True)
    assert all(tokens(out) == wanted[name] for name, out in outputs.items() if name not in failed)
    assert [type(bug) for _, bug in scheduler.bugs] == [KeyError]
    assert not any(scheduler.sizes().values())
    scheduler.check_integrity()


def test_an_engine_that_breaks_on_the_end_of_a_request_ends_nothing_else() -> None:
    scheduler = make()
    submit(scheduler, "late", [4, 5, 6], 50, budget_s=5)
    sampling = submit(scheduler, "good", [1, 2, 3], 9)

    def broken(_seq_id: int) -> None:
        raise KeyError("a bug")

    scheduler.engine.close = broken  # type: ignore[method-assign]
    scheduler.complete(run_step(scheduler.engine, scheduler.plan(1.0)), 1.0)
    scheduler.advance(5.0)
    assert tokens(run(scheduler, 5.0)["good"]) == reference([1, 2, 3], sampling, VOCAB, 9)
    assert [what.split()[0] for what, _ in scheduler.bugs] == ["close", "close"]
    assert not any(scheduler.sizes().values())
    scheduler.check_integrity()


def test_an_error_in_a_chunk_that_is_not_the_last_ends_its_request_alone() -> None:
    scheduler = make()
    submit(scheduler, "bad", list(range(40)), 3)
    sampling = submit(scheduler, "good", [1, 2, 3], 3)
    [first] = scheduler.plan(1.0)
    assert not first.sample
    scheduler.complete([SequenceResult(first.seq_id, error="not computed")], 1.0)
    outputs = run(scheduler)
    assert [o.error.code for o in outputs["bad"] if o.error] == [ErrorCode.INTERNAL]
    assert tokens(outputs["good"]) == reference([1, 2, 3], sampling, VOCAB, 3)
    assert not any(scheduler.sizes().values())
    scheduler.check_integrity()


def test_a_prefix_is_computed_once() -> None:
    scheduler = make()
    prompt = list(range(40))
    submit(scheduler, "first", prompt, 2)
    run(scheduler)
    before = scheduler.engine.computed_tokens
    submit(scheduler, "second", [*prompt, 7], 2)
    outputs = run(scheduler)
    usage = outputs["second"][-1].usage
    assert usage is not None
    assert usage.prefill_cached == 40
    assert usage.prompt_tokens == usage.decode_cached + usage.prefill_cached + usage.computed
    assert scheduler.engine.computed_tokens - before == 1 + 1


def test_cancel_and_deadline_give_everything_back() -> None:
    scheduler = make()
    submit(scheduler, "cancelled", [1, 2, 3], 50)
    submit(scheduler, "late", [4, 5, 6], 50, budget_s=5)
    for _ in range(3):
        scheduler.complete(run_step(scheduler.engine, scheduler.plan(1.0)), 1.0)
    scheduler.cancel(FRONT, "cancelled", AbortedByClient("left").info, 1.0)
    scheduler.outbox.clear()
    assert scheduler.next_deadline() == 5
    scheduler.advance(5.0)
    assert [(o.request_id, o.error.code) for _, o in scheduler.outbox if o.error] == [
        ("late", ErrorCode.DEADLINE_EXCEEDED)
    ]
    assert not any(scheduler.sizes().values())
    scheduler.check_integrity()


def test_frontend_gone_ends_its_requests_only() -> None:
    scheduler = make()
    submit(scheduler, "orphan", [1, 2, 3], 5)
    scheduler.frontend_gone(FRONT, AbortedByClient("left").info, 0.0)
    assert not any(scheduler.sizes().values())
    assert scheduler.outbox == []


@pytest.mark.parametrize(
    ("prompt", "text"),
    [([], "empty"), ([VOCAB], "vocabulary"), (list(range(300)), "shorten it"), ([1] * 256, "shorten it")],
)
def test_bad_prompts_get_one_typed_error(prompt: list[int], text: str) -> None:
    scheduler = make()
    submit(scheduler, "bad", prompt, 5)
    [(_, output)] = scheduler.outbox
    assert output.error is not None
    assert output.error.code is ErrorCode.INVALID_REQUEST
    assert text in output.error.text
    assert not any(scheduler.sizes().values())


def test_a_full_queue_is_said_at_once() -> None:
    scheduler = make()
    for i in range(65):
        submit(scheduler, f"r{i}", [1], 1)
    assert [o.error.code for _, o in scheduler.outbox if o.error] == [ErrorCode.OUT_OF_CAPACITY]


def test_one_request_that_fills_the_pool_ends_by_length() -> None:
    scheduler = make(pages=4)
    prompt = [1, 2, 3]
    wanted = reference(prompt, submit(scheduler, "long", prompt, 1000), VOCAB, 13)
    outputs = run(scheduler)
    assert tokens(outputs["long"]) == wanted
    assert outputs["long"][-1].finish is FinishReason.LENGTH


@pytest.mark.parametrize("ignore_eos", [False, True])
@pytest.mark.parametrize("by_request", [False, True], ids=["eos", "stop token"])
@pytest.mark.parametrize("min_tokens", range(5))
def test_an_answer_ends_with_the_first_stop_after_min_tokens_others(
    min_tokens: int, by_request: bool, ignore_eos: bool
) -> None:
    """The tokens 0, 1, 3 and 6 of the answer are stops."""
    prompt, sampling = [7, 8, 9], SamplingParams(max_tokens=9, min_tokens=min_tokens, ignore_eos=ignore_eos)
    said = reference(prompt, sampling, VOCAB, 9)
    assert len(set(said)) == 9
    stops = [said[at] for at in (0, 1, 3, 6)]
    engine = LineageEngine(
        lineage_spec(8), vocab_size=VOCAB, eos_token_ids=frozenset(() if by_request else stops)
    )
    scheduler = UnifiedScheduler(engine, PagePool(8, 4), SchedulerConfig(me=ME, name="unified"))
    here = ME
    if by_request:
        sampling = structs.replace(sampling, stop_token_ids=stops)
    ticket = Ticket(room=next(ROOMS), attempt=0, prefill=here, decode=here, budget_s=9.0)
    scheduler.submit(FRONT, Submit(Request(request_id="r", prompt=prompt, sampling=sampling), ticket), 0.0)
    outputs = run(scheduler)["r"]
    last = {0: 0, 1: 1, 2: 3, 3: 3, 4: 6}[min_tokens] if by_request or not ignore_eos else 8
    assert tokens(outputs) == said[: last + 1]
    ended = outputs[-1]
    assert (ended.finish, ended.stop_token) == (
        (FinishReason.LENGTH, None) if last == 8 else (FinishReason.STOP, said[last])
    )
    assert ended.usage is not None
    assert ended.usage.output_tokens == last + 1
