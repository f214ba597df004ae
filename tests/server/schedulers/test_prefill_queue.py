"""Prompts in chunks: what a step's budget leaves to whom, and who is short of pages, and until when."""

from __future__ import annotations

from test_fair_queue import waiting

from segue.engine.pages import PagePool
from segue.server.schedulers.fair_queue import PASSED_STEPS
from segue.server.schedulers.kv_cache import KVCache
from segue.server.schedulers.prefill_queue import PrefillQueue


def test_a_step_without_budget_has_no_chunk_of_a_prompt_that_is_half_computed() -> None:
    queue = PrefillQueue(KVCache(PagePool(16, 4)), 16)
    prompt, late = waiting(9), waiting(3)
    for state in (prompt, late):
        queue.add(state)
    [step] = queue.plan(4, 0.0)
    queue.complete(prompt, step, None)
    for budget in (0, -3):
        assert queue.plan(budget, 0.0) == []
    assert [len(each.tokens) for each in queue.plan(6, 0.0)] == [5, 1]


def test_who_was_short_of_pages_is_so_no_longer_once_it_has_them() -> None:
    cache = KVCache(PagePool(4, 4))
    queue, first, second = PrefillQueue(cache, 16), waiting(9), waiting(9)
    queue.add(first)
    queue.add(second)
    [step] = queue.plan(16, 0.0)
    assert queue.short is second
    queue.complete(first, step, None)
    cache.release(first)
    [step] = queue.plan(16, 0.0)
    assert (step.seq_id, queue.short) == (second.seq_id, None)


def test_a_prompt_of_no_priority_starts_after_so_many_full_steps_of_others() -> None:
    queue = PrefillQueue(KVCache(PagePool(1024, 4)), 16)
    late = waiting(3, priority=5)
    queue.add(late)
    for _ in range(PASSED_STEPS):
        queue.add(waiting(16, priority=-5))
        [step] = queue.plan(16, 0.0)
        assert step.seq_id != late.seq_id
        queue.running.clear()
    queue.add(waiting(16, priority=-5))
    assert queue.plan(16, 0.0)[0].seq_id == late.seq_id
