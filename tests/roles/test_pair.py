"""Prefill and decode roles through the real protocol, with KV that proves its origin."""

from __future__ import annotations

import random

import pytest
from pair import FRONT, VOCAB, Pair

from segue.core.errors import AbortedByClient
from segue.core.types import KVPoll
from segue.handoff import api
from segue.handoff.messages import Metadata
from segue.sim.engine import reference


@pytest.mark.parametrize("page_tokens", [(4, 4), (4, 8), (8, 4), (16, 4)])
def test_tokens_equal_the_reference(page_tokens: tuple[int, int]) -> None:
    pair, rng = Pair(page_tokens=page_tokens), random.Random(7)
    wanted = {}
    for i in range(24):
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 60))]
        count = rng.randint(1, 12)
        wanted[f"r{i}"] = reference(prompt, pair.submit(f"r{i}", prompt, count), VOCAB, count)
    pair.run()
    assert {name: pair.tokens(name) for name in wanted} == wanted
    pair.assert_at_rest()


def test_a_prefix_on_decode_is_not_sent_again() -> None:
    pair = Pair()
    prompt = list(range(30))
    pair.submit("first", prompt, 6)
    pair.run()
    sent = []
    pair.lose = lambda e: isinstance(e, api.PostWrite) and bool(sent.append(e))
    follow_up = prompt + pair.tokens("first") + [5, 6]
    wanted = reference(follow_up, pair.submit("second", follow_up, 4), VOCAB, 4)
    pair.run()
    assert pair.tokens("second") == wanted
    usage = pair.outputs["second"][-1].usage
    assert usage is not None
    assert usage.prompt_tokens == usage.decode_cached + usage.prefill_cached + usage.computed
    assert usage.decode_cached == 28
    token_bytes = pair.prefill.engine.spec.page_bytes // 4
    assert sum(b.nbytes for w in sent for b in w.blocks) == (len(follow_up) - 32) * token_bytes
    pair.assert_at_rest()


def test_the_destination_may_come_before_the_request() -> None:
    pair = Pair()
    sampling = pair.submit("r", [1, 2, 3], 3, to=(False, True))
    pair.run()
    pair.rooms -= 1
    pair.submit("r", [1, 2, 3], 3, to=(True, False))
    pair.run()
    assert pair.tokens("r") == reference([1, 2, 3], sampling, VOCAB, 3)
    pair.assert_at_rest()


def test_decode_full_holds_requests_back_and_serves_them_all() -> None:
    pair = Pair(decode_pages=12)
    wanted = {}
    for i in range(12):
        prompt = [i] * 9
        wanted[f"r{i}"] = reference(prompt, pair.submit(f"r{i}", prompt, 20), VOCAB, 20)
    pair.run()
    assert {name: pair.tokens(name) for name in wanted} == wanted
    pair.assert_at_rest()


def test_lesson_01_an_unsettled_peer_changes_only_the_phase() -> None:
    pair = Pair()
    pair.part()
    pair.pump()
    sampling = pair.submit("r", [1, 2, 3], 3)
    pair.pump()
    [job] = pair.decode.role.preallocation
    handle = pair.decode.handles[job.transfer]
    assert handle.poll() is KVPoll.BOOTSTRAPPING
    pair.decode.turn()
    assert list(pair.decode.role.preallocation) == [job]
    pair.join()
    pair.run()
    assert pair.tokens("r") == reference([1, 2, 3], sampling, VOCAB, 3)
    pair.assert_at_rest()


def test_lesson_03_no_step_before_the_metadata() -> None:
    pair = Pair()
    held = []

    def hold(effect: api.Effect) -> bool:
        if isinstance(effect, api.Send) and isinstance(effect.message, Metadata):
            held.append(effect.message)
            return True
        return False

    pair.lose = hold
    sampling = pair.submit("r", list(range(9)), 3)
    pair.run()
    assert "r" not in pair.outputs, "decode answered without the metadata"
    pair.decode.post(api.Received(pair.prefill.me, held[0]))
    pair.run()
    assert pair.tokens("r") == reference(list(range(9)), sampling, VOCAB, 3)
    pair.assert_at_rest()


def test_a_chunk_is_on_its_way_while_the_next_one_is_computed() -> None:
    """The write of chunk i is posted before step i + 1 runs, and that step does not wait for it to land."""
    pair, told = Pair(), list[str]()
    held: list[api.Effect] = []
    step = pair.prefill.engine.step

    def watched(batch):  # type: ignore[no-untyped-def]
        told.append("step")
        return step(batch)

    def hold(effect: api.Effect) -> bool:
        if isinstance(effect, api.PostWrite):
            told.append("write")
            held.append(effect)
        return isinstance(effect, api.PostWrite)

    pair.prefill.engine.step = watched  # type: ignore[method-assign]
    pair.lose = hold
    prompt = list(range(64))
    sampling = pair.submit("r", prompt, 3)
    pair.run()
    assert told == ["step", "write"] * 4, "16 tokens in each chunk"
    assert "r" not in pair.outputs, "decode answered before anything had landed"
    pair.lose = lambda _effect: False
    pair.prefill.effects.extend(held)
    pair.run()
    assert pair.tokens("r") == reference(prompt, sampling, VOCAB, 3)
    pair.assert_at_rest()


@pytest.mark.parametrize("turns", range(8))
@pytest.mark.parametrize("side", ["prefill", "decode", "both"])
def test_lesson_10_a_cancel_at_any_step_ends_both_sides(turns: int, side: str) -> None:
    pair = Pair()
    pair.submit("r", list(range(40)), 4)
    for _ in range(turns):
        pair.pump()
        pair.prefill.turn()
        pair.decode.turn()
    reason = AbortedByClient("the client left").info
    for node in (pair.prefill, pair.decode):
        if side in (node.kind.value, "both"):
            node.role.cancel(FRONT, "r", reason, pair.clock.now())
    pair.run()
    pair.assert_at_rest()


def test_the_deadline_ends_a_request_that_decode_never_saw() -> None:
    pair = Pair()
    pair.submit("r", [1, 2, 3], 3, budget_s=5, to=(True, False))
    pair.run()
    pair.clock.advance(5)
    pair.run()
    assert len(pair.errors("r")) == 1
    pair.assert_at_rest()


def test_lesson_06_pages_stay_quarantined_until_the_fence() -> None:
    pair = Pair()
    pair.fences_proven = False
    drained = []

    def hold(effect: api.Effect) -> bool:
        return isinstance(effect, api.PostWrite) or (
            isinstance(effect, api.Fence) and effect.transfer.prefill == pair.prefill.me and not drained
        )

    pair.lose = hold
    pair.submit("r", list(range(40)), 4)
    pair.run()
    pair.decode.role.cancel(FRONT, "r", AbortedByClient("left").info, 0.0)
    pair.run()
    assert pair.decode.pool.quarantined == 11
    free = pair.decode.pool.free
    drained.append(True)
    transfer = next(iter(pair.prefill.role.table._entries))
    pair.prefill.post(api.FenceDone(transfer, True))
    pair.run()
    assert pair.decode.pool.free == free + 11
    pair.assert_at_rest()


def test_a_broken_session_fails_exactly_its_transfers() -> None:
    pair = Pair()
    pair.submit("done", [1, 2, 3], 8)
    for _ in range(3):
        pair.pump()
        pair.prefill.turn()
        pair.decode.turn()
    pair.pump()
    assert pair.tokens("done"), "the first request should be generating by now"
    pair.submit("open", list(range(40)), 4)
    pair.pump()
    pair.part()
    pair.run()
    assert len(pair.tokens("done")) == 8
    assert set(pair.errors("open")) == {"PEER_LOST"}
    pair.assert_at_rest()
