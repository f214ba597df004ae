"""No role ever stands still: what fits alone finishes in a bounded number of steps, without a deadline."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from pair import Pair

from segue.engine.engine_api import SequenceResult, StepHandle, StepOnCall, run_step
from segue.engine.pages import PagePool
from segue.engine.request import Request, SamplingParams
from segue.kv.ids import Incarnation, LeaderId
from segue.kv.limits import Limits
from segue.server.messages.control import Submit
from segue.server.messages.ticket import Ticket
from segue.server.schedulers.admission import SchedulerConfig
from segue.server.schedulers.unified import UnifiedScheduler
from segue_lab.sim.sim_engine import LineageEngine, lineage_spec

ME, FRONT = LeaderId(Incarnation("a" * 32)), Incarnation("f" * 32)
NEVER_S = 1e6


class CountingEngine(LineageEngine):
    """A forward that only draws: which tokens come is no matter here, and the lineage costs time."""

    def collect(self, handle: StepHandle) -> list[SequenceResult]:
        assert isinstance(handle, StepOnCall)
        return [SequenceResult(step.seq_id, 1) for step in handle.steps if step.sample]


def unified(pages: int, page_tokens: int, chunk_tokens: int, max_batch: int = 8) -> UnifiedScheduler:
    return UnifiedScheduler(
        CountingEngine(lineage_spec(pages, page_tokens, layers=1)),
        PagePool(pages, page_tokens),
        SchedulerConfig(
            me=ME,
            name="unified",
            limits=Limits(max_batch=max_batch, request_budget_s=NEVER_S),
            chunk_tokens=chunk_tokens,
        ),
    )


def submit(scheduler: UnifiedScheduler, name: str, prompt: list[int], max_tokens: int, room: int) -> None:
    here = ME
    ticket = Ticket(room=room, attempt=0, prefill=here, decode=here, budget_s=NEVER_S)
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    scheduler.submit(FRONT, Submit(Request(request_id=name, prompt=prompt, sampling=sampling), ticket), 0.0)


def finishes(scheduler: UnifiedScheduler) -> bool:
    """Whether everything that was submitted ends, each step doing something."""
    while not scheduler.idle:
        scheduler.advance(0.0)
        steps = scheduler.plan(0.0)
        if not steps:
            return False
        scheduler.complete(run_step(scheduler.engine, steps), 0.0)
        assert not any(output.error for _, output in scheduler.outbox)
        scheduler.outbox.clear()
    return True


@pytest.mark.slow
def test_two_requests_near_the_limit_never_wait_for_each_other() -> None:
    """16 pages of 4 tokens: A generates and grows while B's prompt is computed, and both do not fit."""
    stuck, tried = [], 0
    for a, more, b, after in itertools.product(range(2, 33, 2), range(2, 31, 2), range(34, 62, 2), (2,)):
        if a + more > 63 or b + after > 63 or -(-(a + more) // 4) - (-b // 4) <= 16:
            continue
        scheduler = unified(pages=16, page_tokens=4, chunk_tokens=6)
        submit(scheduler, "A", list(range(a)), more, room=1)
        submit(scheduler, "B", list(range(100, 100 + b)), after, room=2)
        tried += 1
        if not finishes(scheduler):
            stuck.append((a, more, b, after))
        else:
            scheduler.check_integrity()
    assert tried > 1000
    assert not stuck, f"{len(stuck)} of {tried} stand still, first {stuck[:3]}"


@dataclass(frozen=True)
class Mix:
    """A pool, a step and requests `(prompt, tokens to generate, shares a prefix, step at which it comes)`."""

    pages: int
    page_tokens: int
    chunk_tokens: int
    max_batch: int
    requests: list[tuple[int, int, bool, int]]

    @property
    def bound(self) -> int:
        """Steps in which everything must have ended: each computes a token at least, and some only wait."""
        work = sum(prompt + generated for prompt, generated, _, _ in self.requests)
        return 3 * work + max((at for *_, at in self.requests), default=0) + 20

    def prompt(self, number: int) -> list[int]:
        length, _, shared, _ = self.requests[number]
        return [*range(length)] if shared else [*range(100 * number + 100, 100 * number + 100 + length)]


@st.composite
def mixes(draw: st.DrawFn) -> Mix:
    """Requests of which each fits alone and a few together do not, in pools from one page on."""
    page_tokens, pages = draw(st.integers(1, 4)), draw(st.integers(1, 12))
    room = pages * page_tokens
    requests: list[tuple[int, int, bool, int]] = []
    if room > 1:
        length = st.integers(1, room - 1)
        request = st.tuples(length, length, st.booleans(), st.integers(0, 12))
        requests = draw(st.lists(request, min_size=1, max_size=6))
    return Mix(pages, page_tokens, draw(st.integers(1, 9)), draw(st.integers(1, 5)), requests)


@pytest.mark.slow
@given(mixes())
@settings(max_examples=300, deadline=None)
def test_the_unified_role_ends_whatever_fits_alone(mix: Mix) -> None:
    scheduler = unified(mix.pages, mix.page_tokens, mix.chunk_tokens, mix.max_batch)
    for step in range(mix.bound):
        for number, (_, generated, _, at) in enumerate(mix.requests):
            if at == step:
                submit(scheduler, f"r{number}", mix.prompt(number), generated, number + 1)
        scheduler.advance(0.0)
        steps = scheduler.plan(0.0)
        assert len(scheduler.batch.running) <= mix.max_batch
        assert steps or not scheduler.admission.requests, (
            f"{len(scheduler.admission.requests)} requests and nothing to do: {scheduler.sizes()}"
        )
        scheduler.complete(run_step(scheduler.engine, steps), 0.0)
    event(f"retracted: {scheduler.batch.retractions > 0}")
    assert scheduler.idle
    ended = [
        output for _, output in scheduler.outbox if output.finish is not None or output.error is not None
    ]
    assert len(ended) == len(mix.requests)
    assert not any(output.error for output in ended)
    scheduler.check_integrity()


@pytest.mark.slow
@given(mixes(), st.integers(0, 8), st.integers(0, 8), st.sampled_from([1, 2, 4]))
@settings(max_examples=200, deadline=None)
def test_the_pair_ends_whatever_fits_each_half_alone(
    mix: Mix, more: int, less: int, decode_page: int
) -> None:
    """Prefill has as many pages as there must be for the longest prompt, and a few `more`; decode's pages
    may be of another size."""
    decode_pages = -(-mix.pages * mix.page_tokens // decode_page)
    longest = max((prompt for prompt, *_ in mix.requests), default=1)
    pair = Pair(
        max(mix.pages + more - less, -(-(longest + 1) // mix.page_tokens)),
        decode_pages,
        (mix.page_tokens, decode_page),
        chunk_tokens=mix.chunk_tokens,
        max_batch=mix.max_batch,
    )
    for step in range(mix.bound):
        for number, (_, generated, _, at) in enumerate(mix.requests):
            if at == step:
                pair.submit(f"r{number}", mix.prompt(number), generated, budget_s=600.0)
        pair.pump()
        moved = [node.turn() for node in (pair.prefill, pair.decode)]
        quiet = not pair.prefill.effects and not pair.decode.effects
        still = pair.prefill.scheduler.admission.requests or pair.decode.scheduler.admission.requests
        assert any(moved) or not quiet or not still, (
            f"standstill at step {step}: {pair.decode.scheduler.sizes()}"
        )
    pair.pump()
    for number, (prompt, generated, _, _) in enumerate(mix.requests):
        assert pair.errors(f"r{number}") == []
        assert len(pair.tokens(f"r{number}")) == min(generated, decode_pages * decode_page - prompt)


def test_the_oldest_request_gives_way_to_nobody_and_comes_back_first() -> None:
    """A, the oldest, comes back behind B and C; it is not the first to be retracted again."""
    scheduler = unified(pages=12, page_tokens=1, chunk_tokens=16)
    for room, name in enumerate("ABC", 1):
        submit(scheduler, name, [room], 9, room)
    finished: list[str] = []
    waited = []
    while not scheduler.idle:
        scheduler.advance(0.0)
        scheduler.complete(run_step(scheduler.engine, scheduler.plan(0.0)), 0.0)
        waited.append([job.request.request_id for job, _ in scheduler.batch.retracted])
        finished += [output.request_id for _, output in scheduler.outbox if output.finish]
        scheduler.outbox.clear()
    assert finished == ["A", "B", "C"]
    assert ["B", "C"] in waited
    assert all("A" not in names and names == sorted(names) for names in waited)


def test_a_retracted_sequence_comes_back_only_with_room_for_all_to_go_on() -> None:
    """Without a page of slack for whoever runs, it would be copied in and out again at each step."""
    scheduler = unified(pages=8, page_tokens=4, chunk_tokens=64)
    for room, name in enumerate("ABCDE", 1):
        submit(scheduler, name, [room] * room, min(20 + 2 * room, 32 - room), room)
    assert finishes(scheduler)
    assert scheduler.batch.retractions == 6  # 7 without


def test_no_prompt_starts_while_a_retracted_sequence_waits() -> None:
    """A stream of short requests would take each page that the retracted one needs to come back."""
    scheduler = unified(pages=12, page_tokens=1, chunk_tokens=16)
    submit(scheduler, "A", [1], 9, 1)
    submit(scheduler, "B", [2], 9, 2)
    finished: list[str] = []
    for room in range(3, 40):
        if scheduler.batch.retractions:
            submit(scheduler, f"short {room}", [room], 1, room)
        scheduler.advance(0.0)
        steps = scheduler.plan(0.0)
        if scheduler.batch.retracted:
            working = {scheduler.admission.by_seq[step.seq_id].request.request_id for step in steps}
            assert working <= {"A", "B"}
        scheduler.complete(run_step(scheduler.engine, steps), 0.0)
        finished += [output.request_id for _, output in scheduler.outbox if output.finish]
        scheduler.outbox.clear()
    assert scheduler.batch.retractions == 1
    assert finished[0] == "A"
    assert "B" in finished
    assert len(finished) > 10


def test_decode_admits_nobody_while_a_retracted_sequence_waits() -> None:
    pair = Pair(decode_pages=12, page_tokens=(4, 1))
    for name in "AB":
        pair.submit(name, [ord(name)], 9)
    generation, seen = pair.decode.scheduler.batch, False
    for turn in range(60):
        if generation.retracted:
            pair.submit(f"short {turn}", [turn], 1)
        pair.turns()
        if generation.retracted and pair.decode.pool.free > 2:
            seen = seen or len(pair.decode.scheduler.preallocation) > 0
            assert not [name for name in pair.outputs if name.startswith("short")]
    pair.run()
    assert seen
