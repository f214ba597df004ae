"""Decode reserves with credits: prompts that queue for prefill do not take its memory from what runs."""

from __future__ import annotations

from msgspec.structs import replace
from pair import Pair

from segue.kv.ids import LeaderId, new_incarnation
from segue.server.schedulers.credits import ALWAYS, SHARE, Credits

PROMPT = [5 + i for i in range(14)]  # 4 pages with the first token


def held(pair: Pair) -> int:
    """Pages of decode that are not free."""
    return pair.decode.pool.total - pair.decode.pool.free


def standing(pair: Pair) -> None:
    """Decode alone takes steps: prefill has its queue, and computes nothing."""
    for _ in range(40):
        pair.pump()
        pair.decode.turn()


def test_what_queues_for_prefill_holds_a_part_of_the_pool_and_all_are_served_in_order() -> None:
    pair = Pair(prefill_pages=64, decode_pages=64)
    wanted = {name: pair.submit(name, [n, *PROMPT[1:]], 3) for n, name in enumerate("abcdefghijkl", 1)}
    standing(pair)
    assert 0 < held(pair) <= 64 // SHARE
    assert pair.decode.scheduler.sizes()["preallocation"] == 12 - 64 // SHARE // 4
    pair.run()
    assert {name: pair.tokens(name) for name in wanted} == wanted
    assert list(pair.outputs) == list(wanted), "somebody overtook another one"


def test_two_hand_offs_go_on_with_each_prefill_however_small_the_pool_is() -> None:
    pair = Pair(prefill_pages=64, decode_pages=16)
    for name in "abcd":
        pair.submit(name, PROMPT, 2)
    standing(pair)
    assert held(pair) == ALWAYS * 4
    pair.run()
    assert all(len(pair.tokens(name)) == 2 for name in "abcd")


def test_a_prefill_that_stands_still_keeps_no_credits_from_another_one() -> None:
    pair = Pair(prefill_pages=64, decode_pages=64)
    scheduler = pair.decode.scheduler
    for name in "abcdef":
        pair.submit(name, PROMPT, 2)
    standing(pair)
    waiting = [state for state in scheduler.admission.requests.values() if not state.pages]
    assert len(waiting) == 2
    reserved = [state for state in scheduler.admission.requests.values() if state.pages]
    credits = Credits(pair.decode.pool, reserved)
    assert not credits.allow(waiting[0])
    assert {state.phase for state in waiting} == {"credit"}
    for state in waiting:
        assert [each.name for each in state.path.steps()].count("credit") == 1, "once, however long it waits"
    waiting[0].ticket = replace(waiting[0].ticket, prefill=LeaderId(new_incarnation()))
    for _ in range(ALWAYS):
        assert credits.allow(waiting[0])
        credits.take(waiting[0])
    assert not credits.allow(waiting[0])


def test_a_full_decode_holds_prefill_back_and_then_requests_are_refused_and_the_others_served() -> None:
    pair = Pair(prefill_pages=64, decode_pages=16)
    names = [f"r{n}" for n in range(70)]  # six more than `max_queue`
    for name in names:
        pair.submit(name, PROMPT, 2)
    pair.pump()
    refused = [name for name in names if pair.errors(name)]
    assert refused == names[-6:]
    assert {code for name in refused for code in pair.errors(name)} == {"OUT_OF_CAPACITY"}
    pair.decode.turn()
    for _ in range(20):
        pair.pump()
        pair.prefill.turn()
    # Without decode's credits prefill computes nothing, and has no memory for what it may not compute.
    begun = [s for s in pair.prefill.scheduler.admission.requests.values() if s.phase != "bootstrap"]
    assert len(begun) <= ALWAYS
    pair.run()
    assert all(len(pair.tokens(name)) == 2 for name in names[:-6])
