"""Decode serves a request of low priority within a bound of work, also while older ones cannot start."""

from __future__ import annotations

import pytest
from pair import Pair

from segue.kv.ids import LeaderId, new_incarnation
from segue.server.schedulers.fair_queue import PASSED_STEPS

TOKENS = 14
#: Requests that wait at a time.
WAITING = 12


def submit(pair: Pair, name: str, priority: int, *, settles: bool = True, local: bool = False) -> None:
    """`settles`: its prefill is there, and has the request; `local`: decode computes the prompt itself."""
    prefill = pair.decode.me if local else None if settles else LeaderId(new_incarnation())
    prompt = [5 + (pair.rooms + n) % 900 for n in range(TOKENS)]
    pair.submit(name, prompt, 2, budget_s=1e6, prefill=prefill, priority=priority)


@pytest.mark.parametrize("local", ["none", "others", "itself"])
@pytest.mark.parametrize("pages", [16, 64])
@pytest.mark.parametrize("unsettled", [0, 1, 5])
def test_a_low_priority_is_passed_by_a_bounded_number_of_prompts(
    unsettled: int, pages: int, local: str
) -> None:
    pair = Pair(decode_pages=pages, rests=not unsettled)
    for number in range(unsettled):
        submit(pair, f"silent-{number}", 5, settles=False)
    submit(pair, "low", 5, local=local == "itself")
    urgent = 0
    bound = PASSED_STEPS * pair.decode.scheduler.config.chunk_tokens // TOKENS + 1 + WAITING
    for _ in range(1000):
        if "low" in pair.outputs:
            break
        while len(pair.decode.scheduler.admission.requests) < WAITING + unsettled:
            urgent += 1
            submit(pair, f"urgent-{urgent}", -1, local=local == "others" and urgent % 2 == 0)
        pair.pump()
        pair.prefill.turn()
        pair.pump()
        pair.decode.turn()
        pair.pump()
        passed = sum(name.startswith("urgent") for name in pair.outputs)
        # Decode and prefill each have a queue in which it may be passed.
        assert passed <= 2 * bound, "it starves"
    assert "low" in pair.outputs
    assert not any(name.startswith("silent") for name in pair.outputs)
