"""Decode computes prompts itself: the right tokens, in order of arrival with the hand-offs, and how long."""

from __future__ import annotations

import random

import pytest
from pair import FRONT, VOCAB, Pair

from segue.kv.errors import AbortedByClient
from segue.server.schedulers.decode import DecodeScheduler
from segue.server.schedulers.local_prompts import HANDOFFS, LocalPrompts, longest

PAUSES = [(4, 0.001), (16, 0.002), (64, 0.010)]


@pytest.mark.parametrize("decode_pages", [24, 64])
def test_prompts_at_decode_and_hand_offs_beside_them_give_the_right_tokens(decode_pages: int) -> None:
    pair, rng = Pair(decode_pages=decode_pages), random.Random(7)
    wanted = {}
    for i in range(24):
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 60))]
        if rng.random() < 0.5:
            wanted[f"r{i}"] = pair.at_decode(f"r{i}", prompt, 12)
        else:
            wanted[f"r{i}"] = pair.submit(f"r{i}", prompt, 12)
    pair.run()
    assert {name: pair.tokens(name) for name in wanted} == wanted


def test_a_prompt_at_decode_begins_where_what_decode_has_cached_ends() -> None:
    pair = Pair()
    pair.at_decode("first", list(range(30)), 6)
    pair.run()
    follow_up = [*range(30), *pair.tokens("first"), 5, 6]
    wanted = pair.at_decode("second", follow_up, 4)
    pair.run()
    assert pair.tokens("second") == wanted
    usage = pair.outputs["second"][-1].usage
    assert usage is not None
    assert usage.computed == len(follow_up) - 32


def test_a_model_with_a_state_gets_a_slot_for_a_prompt_at_decode() -> None:
    pair = Pair(slots=(2, 2))
    wanted = {f"r{i}": pair.at_decode(f"r{i}", [i] * 9, 5) for i in range(4)}
    pair.run()
    assert {name: pair.tokens(name) for name in wanted} == wanted


def fill(pair: Pair, pages: int) -> list[int]:
    return pair.decode.pool.allocate(pages)


def test_small_prompts_do_not_overtake_a_hand_off_that_lacks_pages() -> None:
    pair = Pair(decode_pages=16)
    held = fill(pair, 14)
    pair.submit("large", list(range(40)), 1)
    pair.pump()
    pair.decode.turn()
    pair.at_decode("small", [1, 2], 1)
    pair.run()
    assert not pair.outputs, "two pages are free, and the small one came later"
    pair.decode.pool.release(held)
    pair.run()
    assert set(pair.outputs) == {"large", "small"}


def test_hand_offs_do_not_overtake_a_prompt_that_lacks_pages() -> None:
    pair = Pair(decode_pages=16)
    held = fill(pair, 14)
    pair.at_decode("large", list(range(40)), 1)
    pair.decode.turn()
    pair.submit("small", [1, 2], 1)
    pair.run()
    assert not pair.outputs
    pair.decode.pool.release(held)
    pair.run()
    assert set(pair.outputs) == {"large", "small"}


def test_a_prompt_that_lacks_pages_and_ends_holds_nobody_up() -> None:
    pair = Pair(decode_pages=16)
    held = fill(pair, 14)
    pair.at_decode("large", list(range(40)), 1)
    pair.decode.turn()
    pair.submit("small", [1, 2], 1)
    pair.run()
    pair.decode.scheduler.cancel(FRONT, "large", AbortedByClient("left").info, pair.clock.now())
    pair.submit("next", [1, 2], 1)
    pair.run()
    assert set(pair.outputs) == {"small", "next"}
    pair.decode.pool.release(held)


@pytest.mark.parametrize(
    ("wait_s", "tokens"), [(0.0, 0), (0.0005, 2), (0.001, 4), (0.0015, 10), (0.006, 40), (1.0, 64)]
)
def test_a_prompt_is_short_if_others_wait_no_longer_for_it_than_a_hand_off_takes(
    wait_s: float, tokens: int
) -> None:
    assert longest(PAUSES, wait_s) == tokens


def test_the_limit_is_set_by_the_median_of_the_first_hand_offs_and_stays() -> None:
    local = LocalPrompts(pauses=PAUSES)
    for i in range(HANDOFFS):
        assert local.tokens == 0
        local.handed_over(5.0 if i % 4 == 0 else 0.002)
    assert local.tokens == 16
    for _ in range(2 * HANDOFFS):
        local.handed_over(1.0)
    assert local.tokens == 16


def test_a_limit_that_was_given_is_not_measured() -> None:
    local = LocalPrompts(20)
    for _ in range(HANDOFFS):
        local.handed_over(1.0)
    assert local.tokens == 20


def test_decode_tells_frontends_its_limit_and_learns_it_from_hand_offs() -> None:
    pair = Pair()
    scheduler = pair.decode.scheduler
    assert isinstance(scheduler, DecodeScheduler)
    assert scheduler.load().local_tokens is None
    scheduler.local = LocalPrompts(pauses=[(4, 0.0), (16, 10.0)])
    assert scheduler.load().local_tokens == 0
    for i in range(HANDOFFS):
        pair.submit(f"r{i}", [i, 1], 1)
    pair.run()
    assert scheduler.load().local_tokens == 4
