"""The cost of a prompt's computation on decode for the sequences that it generates meanwhile."""

from __future__ import annotations

import time

from segue.engine.engine_api import Engine, SequenceStep, run_step
from segue.engine.request import SamplingParams
from segue.server.schedulers.kv_cache import KVCache

#: Longer pauses are not measured: a hand-off costs less.
LONGEST_S = 0.25
#: Each step is repeated so often, and the shortest counts.
REPEATS = 3


def measure_pauses(engine: Engine, cache: KVCache, chunk_tokens: int) -> list[tuple[int, float]]:
    """Prompts of 4, 16, … tokens, at most a chunk, and by how many seconds each makes a step longer. To be
    called before there are requests."""
    longest = min(chunk_tokens, cache.pool.free * cache.pool.page_tokens, engine.info.context_tokens - 1)
    step_s, found = _step_s(engine, cache, 1), list[tuple[int, float]]()
    tokens = 4
    while tokens <= longest and (not found or found[-1][1] < LONGEST_S):
        found.append((tokens, max(0.0, _step_s(engine, cache, tokens) - step_s)))
        tokens *= 4
    return found


def _step_s(engine: Engine, cache: KVCache, tokens: int) -> float:
    pages = cache.pool.allocate(cache.pool.pages_for(tokens))
    slot = cache.take_slot()
    prompt = [token % engine.info.vocab_size for token in range(1, tokens + 1)]
    took_s = LONGEST_S * 1000
    for _ in range(REPEATS):
        engine.open(0, prompt, SamplingParams(max_tokens=1))
        began = time.perf_counter()
        run_step(engine, [SequenceStep(0, prompt, 0, pages, True, slot)])
        took_s = min(took_s, time.perf_counter() - began)
        engine.close(0)
    cache.pool.release(pages)
    if cache.slots is not None and slot is not None:
        cache.slots.release([slot])
    return took_s
