"""Incidents of lessons.md that the two roles and the protocol between them can show, in virtual time."""

from __future__ import annotations

import pytest
from pair import FRONT, Pair

from segue.engine.engine_api import run_step
from segue.kv.errors import AbortedByClient
from segue.kv.ids import KVPoll, RankId
from segue.kv.protocol import events

YEAR_S = 365 * 24 * 3600.0


def test_lesson_12_timers_and_aborts_work_while_nothing_can_be_admitted() -> None:
    """Decode is full and stays so: what waits behind still ends by its own deadline, on both sides."""
    pair = Pair(decode_pages=12)
    pair.submit("holder", [1] * 20, 28, budget_s=1000)
    pair.turns(6)
    pair.submit("late", [2] * 40, 4, budget_s=5)
    pair.submit("left", [3] * 40, 4, budget_s=1000)
    pair.pump()
    pair.decode.scheduler.advance(pair.clock.now())
    assert len(pair.decode.scheduler.preallocation) == 2, "the pool was meant to be full"
    # No step runs and nothing new comes from here on: only the clock moves, and a client leaves.
    pair.clock.advance(5)
    for node in (pair.prefill, pair.decode):
        node.scheduler.advance(pair.clock.now())
        node.scheduler.cancel(FRONT, "left", AbortedByClient("left").info, pair.clock.now())
    pair.pump()
    assert set(pair.errors("late")) == {"DEADLINE_EXCEEDED"}
    assert {job.request.request_id for job in pair.decode.scheduler.admission.requests.values()} == {"holder"}
    assert not pair.prefill.scheduler.admission.requests
    pair.run()
    assert len(pair.tokens("holder")) == 28


@pytest.mark.parametrize("reverse", [False, True])
def test_lesson_12_both_sides_take_in_one_order_and_nobody_waits_in_a_circle(reverse: bool) -> None:
    """Both pools hold two requests. Prefill takes pages only for what decode has a place for, so
    requests that arrive in opposite orders cannot hold each other up."""
    pair = Pair(prefill_pages=8, decode_pages=12)
    names = [f"r{i}" for i in range(10)]
    wanted = {}
    for name in names:
        pair.submit(name, [int(name[1:])] * 14, 3, to=(False, True))
    pair.rooms = 0
    order = names[::-1] if reverse else names
    for name in order:
        # the same room as on the decode side
        pair.rooms = names.index(name)
        wanted[name] = pair.submit(name, [int(name[1:])] * 14, 3, to=(True, False))
    pair.run()
    assert {name: pair.tokens(name) for name in names} == wanted


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_lesson_12_nobody_overtakes_a_large_request_that_waits_for_pages(side: str) -> None:
    """Small ones that came later would fit, and each would take what the large one waits for."""
    pair = Pair(prefill_pages=12, decode_pages=12)
    pool = (pair.prefill if side == "prefill" else pair.decode).pool
    held = pool.allocate(8)
    prompts = {"large": [1] * 28, "small": [2] * 3, "smaller": [3]}
    wanted = {}
    for name, prompt in prompts.items():
        wanted[name] = pair.submit(name, prompt, 2)
    pair.run()
    assert not pair.outputs
    pool.release(held)
    pair.run()
    assert {name: pair.tokens(name) for name in prompts} == wanted
    assert next(iter(pair.outputs)) == "large"


def test_lesson_15_the_first_token_comes_with_the_commit_and_the_next_step_includes_it() -> None:
    """No tick lies between the last byte and the client, nor between the commit and decode's first step."""
    pair, steps = Pair(), []
    collect = pair.decode.engine.collect
    pair.decode.engine.collect = lambda handle: steps.append(handle) or collect(handle)
    pair.submit("r", list(range(9)), 3)
    while not pair.decode.scheduler.batch.waiting:
        pair.pump()
        pair.prefill.turn()
        if not pair.outputs.get("r"):
            pair.decode.scheduler.advance(pair.clock.now())
        assert not steps, "decode ran a step to find out that the KV is there"
    pair.pump()
    assert len(pair.tokens("r")) == 1, "the first token waits for a step of decode"
    [step] = pair.decode.scheduler.plan(pair.clock.now())
    assert not steps
    assert step.start == 9, "decode's very next step goes on from the hand-off"
    assert list(step.tokens) == pair.tokens("r")
    pair.decode.scheduler.complete(run_step(pair.decode.engine, [step]), pair.clock.now())


@pytest.mark.parametrize("side", ["decode", "prefill"])
def test_lesson_25_no_lease_ends_by_time_alone(side: str) -> None:
    """A year without the proof frees nothing; the proof frees everything at once."""
    pair = Pair()
    pair.fences_proven = False
    proven = []

    def hold(effect: events.Effect) -> bool:
        if isinstance(effect, events.PostWrite):
            return True  # the write is on its way, for ever
        return isinstance(effect, events.Fence) and effect.transfer.prefill == pair.prefill.me and not proven

    pair.lose = hold
    pair.submit("r", list(range(40)), 4, budget_s=50)
    pair.run()
    key = next(iter(pair.prefill.scheduler.table))
    transfer = pair.transfer(key.room)
    pair.clock.advance(50)
    pair.run()
    assert pair.errors("r")
    for _ in range(12):
        pair.clock.advance(YEAR_S / 12)
        pair.run()
    node = getattr(pair, side)
    assert node.scheduler.table.get(key) is not None, "the hand-off was forgotten"
    held = node.pool.quarantined if side == "decode" else node.pool.used
    assert held > 0, "time alone freed pages that somebody may still touch"
    proven.append(True)
    pair.decode.post(events.FenceDone(transfer, 0, RankId(pair.prefill.me), False))
    pair.prefill.post(events.FenceDone(transfer, 0, RankId(pair.decode.me), True))
    pair.run()
    assert node.exchange.phase(transfer) in (None, KVPoll.FAILED)
