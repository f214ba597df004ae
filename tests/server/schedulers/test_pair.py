"""Prefill and decode roles through the real protocol, with KV that proves its origin."""

from __future__ import annotations

import random

import pytest
from pair import FRONT, VOCAB, Pair

from segue.engine.engine_api import SequenceResult, StepHandle, StepOnCall
from segue.engine.request import Output
from segue.kv.errors import AbortedByClient, ErrorCode, Internal, PeerLost
from segue.kv.ids import Incarnation, KVPoll, RankId
from segue.kv.protocol import events
from segue.kv.protocol.messages import Metadata

#: Three steps of at most 16 tokens: 16 of `a`; 10 of `a` and 6 of `b`; 3 of `b` and all of `c`.
PROMPTS = {"a": list(range(26)), "b": list(range(100, 109)), "c": list(range(200, 207))}


@pytest.mark.parametrize("page_tokens", [(4, 4), (4, 8), (8, 4), (16, 4)])
def test_tokens_equal_the_reference(page_tokens: tuple[int, int]) -> None:
    pair, rng = Pair(page_tokens=page_tokens), random.Random(7)
    wanted = {}
    for i in range(24):
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 60))]
        count = rng.randint(1, 12)
        wanted[f"r{i}"] = pair.submit(f"r{i}", prompt, count)
    pair.run()
    assert {name: pair.tokens(name) for name in wanted} == wanted


def test_a_prefix_on_decode_is_not_sent_again() -> None:
    pair = Pair()
    prompt = list(range(30))
    pair.submit("first", prompt, 6)
    pair.run()
    sent = []
    pair.lose = lambda e: isinstance(e, events.PostWrite) and bool(sent.append(e))
    follow_up = prompt + pair.tokens("first") + [5, 6]
    wanted = pair.submit("second", follow_up, 4)
    pair.run()
    assert pair.tokens("second") == wanted
    usage = pair.outputs["second"][-1].usage
    assert usage is not None
    assert usage.prompt_tokens == usage.decode_cached + usage.prefill_cached + usage.computed
    assert usage.decode_cached == 28
    token_bytes = pair.prefill.engine.spec.page_bytes // 4
    assert sum(b.nbytes for w in sent for b in w.blocks) == (len(follow_up) - 32) * token_bytes


def test_what_one_tenant_has_asked_is_cached_for_no_other_on_either_side() -> None:
    pair, prompt = Pair(), list(range(30))
    cached: dict[str, tuple[int, int]] = {}
    for name, salt in (("ann", 7), ("ben", 8), ("anybody", 0), ("ann again", 7), ("ben again", 8)):
        if name == "ben again":
            pair.decode.scheduler.cache.tree.clear()  # then prefill's says what it knows
        wanted = pair.submit(name, prompt, 4, cache_salt=salt)
        pair.run()
        assert pair.tokens(name) == wanted
        usage = pair.outputs[name][-1].usage
        assert usage is not None
        cached[name] = usage.decode_cached, usage.prefill_cached
    assert [cached[name] for name in ("ann", "ben", "anybody")] == [(0, 0)] * 3
    assert cached["ann again"][0] == 28
    assert cached["ben again"] == (0, 28)


def test_the_destination_may_come_before_the_request() -> None:
    pair = Pair()
    wanted = pair.submit("r", [1, 2, 3], 3, to=(False, True))
    pair.run()
    pair.rooms -= 1
    pair.submit("r", [1, 2, 3], 3, to=(True, False))
    pair.run()
    assert pair.tokens("r") == wanted


@pytest.mark.parametrize(
    ("prompt", "salt"), [([1, 2, 3, 4, 6], 7), ([1, 2, 3, 4, 5], 8)], ids=["prompt", "salt"]
)
def test_kv_of_another_prompt_or_tenant_is_refused_before_a_byte_moves(prompt: list[int], salt: int) -> None:
    pair, written = Pair(), list[events.Effect]()

    def noted(effect: events.Effect) -> bool:
        written.extend([effect] if isinstance(effect, events.PostWrite) else [])
        return False

    pair.lose = noted
    pair.submit("prefill's", [1, 2, 3, 4, 5], 3, to=(True, False), cache_salt=7)
    pair.rooms -= 1  # the same room
    pair.submit("decode's", prompt, 3, to=(False, True), cache_salt=salt)
    pair.run()
    for name in ("prefill's", "decode's"):
        error = pair.outputs[name][-1].error
        assert error is not None
        assert (error.code, error.retryable) == (ErrorCode.METADATA_MISMATCH, False)
    assert written == []


def test_decode_full_holds_requests_back_and_serves_them_all() -> None:
    pair = Pair(decode_pages=12)
    wanted = {}
    for i in range(12):
        prompt = [i] * 9
        wanted[f"r{i}"] = pair.submit(f"r{i}", prompt, 20)
    pair.run()
    assert {name: pair.tokens(name) for name in wanted} == wanted


@pytest.mark.parametrize(("prefill_pages", "decode_pages"), [(4, 16), (16, 4)])
def test_the_longest_prompt_leaves_a_place_for_one_token_and_a_longer_one_is_refused_at_once(
    prefill_pages: int, decode_pages: int
) -> None:
    pair = Pair(prefill_pages, decode_pages)
    small = (prefill_pages == 4, decode_pages == 4)
    pair.submit("too long", list(range(16)), 5, to=small)
    pair.pump()
    assert pair.errors("too long") == ["INVALID_REQUEST"]
    wanted = pair.submit("just fits", list(range(15)), 5)
    pair.run()
    count = 5 if decode_pages == 16 else 1
    assert pair.tokens("just fits") == wanted[:count]


def test_lesson_01_an_unsettled_peer_changes_only_the_phase() -> None:
    pair = Pair()
    pair.part()
    pair.pump()
    wanted = pair.submit("r", [1, 2, 3], 3)
    pair.pump()
    [job] = pair.decode.scheduler.preallocation
    handle = pair.decode.handles[job.received_as]
    assert handle.poll() is KVPoll.BOOTSTRAPPING
    pair.decode.turn()
    assert list(pair.decode.scheduler.preallocation) == [job]
    pair.join()
    pair.run()
    assert pair.tokens("r") == wanted


def test_lesson_03_no_step_before_the_metadata() -> None:
    pair = Pair()
    held = []

    def hold(effect: events.Effect) -> bool:
        if isinstance(effect, events.Send) and isinstance(effect.message, Metadata):
            held.append(effect.message)
            return True
        return False

    pair.lose = hold
    wanted = pair.submit("r", list(range(9)), 3)
    pair.run()
    assert "r" not in pair.outputs, "decode answered without the metadata"
    pair.decode.post(events.Received(pair.prefill.me, held[0]))
    pair.run()
    assert pair.tokens("r") == wanted


def test_a_chunk_is_on_its_way_while_the_next_one_is_computed() -> None:
    """The write of chunk i is posted before step i + 1 runs, and that step does not wait for it to land."""
    pair, told = Pair(), list[str]()
    held: list[events.Effect] = []
    collect = pair.prefill.engine.collect

    def watched(handle: StepHandle) -> list[SequenceResult]:
        told.append("step")
        return collect(handle)

    def hold(effect: events.Effect) -> bool:
        if isinstance(effect, events.PostWrite):
            told.append("write")
            held.append(effect)
        return isinstance(effect, events.PostWrite)

    pair.prefill.engine.collect = watched  # type: ignore[method-assign]
    pair.lose = hold
    prompt = list(range(64))
    wanted = pair.submit("r", prompt, 3)
    pair.run()
    assert told == ["step", "write"] * 4, "16 tokens in each chunk"
    assert "r" not in pair.outputs, "decode answered before anything had landed"
    pair.lose = lambda _effect: False
    pair.prefill.effects.extend(held)
    pair.run()
    assert pair.tokens("r") == wanted


class Watched:
    """Prefill's forwards: what has been posted when the KV is there, and what when the forward is over."""

    def __init__(self, pair: Pair, tells: bool = True) -> None:
        self.node, self.tells = pair.prefill, tells
        self.posted: list[tuple[int, int]] = []
        self.left_out = 0
        self._store, self._draw = self.node.engine.store, self.node.engine.draw
        self.node.engine.collect = self.collect  # type: ignore[method-assign]

    def _writes(self) -> int:
        return sum(isinstance(effect, events.PostWrite) for effect in self.node.effects)

    def collect(self, handle: StepHandle) -> list[SequenceResult]:
        assert isinstance(handle, StepOnCall)
        steps = handle.steps
        computed = [step for step in steps if step.seq_id != self.left_out]
        self._store(computed)
        before = self._writes()
        if self.tells:
            handle.on_stored([step.seq_id for step in computed])
        self.posted.append((before, self._writes()))
        refused = [s for s in steps if s.seq_id == self.left_out]
        return [
            *self._draw(computed),
            *(SequenceResult(step.seq_id, error="not computed") for step in refused),
        ]


def test_kv_leaves_before_its_forward_ends() -> None:
    """The KV is there before the first token is known; only the metadata waits for that."""
    pair = Pair()
    watched = Watched(pair)
    wanted = {name: pair.submit(name, prompt, 3) for name, prompt in PROMPTS.items()}
    pair.run()
    assert watched.posted == [(0, 1), (0, 2), (0, 2)]
    assert {name: pair.tokens(name) for name in wanted} == wanted


def test_an_engine_need_not_say_when_the_kv_is_there() -> None:
    pair = Pair()
    watched = Watched(pair, tells=False)
    wanted = {name: pair.submit(name, prompt, 3) for name, prompt in PROMPTS.items()}
    pair.run()
    assert watched.posted == [(0, 0)] * 3
    assert {name: pair.tokens(name) for name in wanted} == wanted


def test_what_a_forward_left_out_is_not_sent() -> None:
    """Its pages hold whatever was there before. The others of the step go on."""
    pair = Pair()
    watched = Watched(pair)
    pair.submit("bad", list(range(5)), 3)
    wanted = pair.submit("good", list(range(50, 57)), 3)
    watched.left_out = 1
    pair.run()
    assert watched.posted == [(0, 1)]
    assert pair.errors("bad") == ["INTERNAL", "INTERNAL"], "prefill's answer and decode's"
    assert pair.tokens("good") == wanted


@pytest.mark.parametrize("chunk", range(4))
def test_an_error_in_any_chunk_of_a_prompt_ends_it_on_both_sides_and_its_chunk_is_not_sent(
    chunk: int,
) -> None:
    """Not in the last one alone: the KV of the chunk is not there."""
    pair = Pair()
    watched = Watched(pair)
    pair.submit("r", list(range(64)), 3)
    while len(watched.posted) < 4 and not pair.errors("r"):
        watched.left_out = 1 if len(watched.posted) == chunk else 0
        pair.pump()
        pair.decode.turn()
        pair.prefill.turn()
    watched.left_out = 0
    pair.run()
    assert watched.posted == [*[(0, 1)] * chunk, (0, 0)]
    assert pair.errors("r") == ["INTERNAL", "INTERNAL"]


@pytest.mark.parametrize("fails", ["the sequence", "the step"])
def test_a_forward_that_fails_after_its_kv_has_left_ends_both_sides(fails: str) -> None:
    pair = Pair()
    watched = Watched(pair)

    def failing(steps):  # type: ignore[no-untyped-def]
        if fails == "the step":
            raise Internal("the head failed")
        return [SequenceResult(step.seq_id, error="no token is allowed") for step in steps]

    draw, watched._draw = watched._draw, failing
    pair.submit("r", list(range(9)), 3)
    pair.pump()
    while not watched.posted:
        try:
            pair.decode.turn()
            pair.prefill.turn()
        except Internal as error:  # as the leader does it
            pair.prefill.scheduler.step_failed(pair.prefill.scheduler._steps, error.info, 0.0)
        pair.pump()
    assert watched.posted == [(0, 1)]
    watched._draw = draw
    pair.run()
    assert pair.errors("r") == ["INTERNAL", "INTERNAL"]
    pair.assert_at_rest()
    wanted = pair.submit("next", list(range(9)), 3)
    pair.run()
    assert pair.tokens("next") == wanted


@pytest.mark.parametrize("complete", [False, True])
@pytest.mark.parametrize("turns", range(8))
@pytest.mark.parametrize("side", ["prefill", "decode", "both"])
def test_lesson_10_a_cancel_at_any_step_ends_both_sides(turns: int, side: str, complete: bool) -> None:
    pair = Pair()
    pair.submit("r", list(range(40)), 4)
    pair.turns(turns)
    reason = AbortedByClient("the client left").info
    for node in (pair.prefill, pair.decode):
        if side in (node.kind.value, "both"):
            node.scheduler.cancel(FRONT, "r", reason, pair.clock.now(), complete=complete)
            for record in node.scheduler.admission.explain("r", pair.clock.now()):
                assert record.ended
                assert record.error in ((None,) if complete else (None, reason)), "a success has no error"


def test_the_deadline_ends_a_request_that_decode_never_saw() -> None:
    pair = Pair()
    pair.submit("r", [1, 2, 3], 3, budget_s=5, to=(True, False))
    pair.run()
    pair.clock.advance(5)
    pair.run()
    assert len(pair.errors("r")) == 1


def test_the_deadline_ends_a_generation_that_nobody_cancels() -> None:
    pair = Pair()
    pair.submit("r", [1, 2, 3], 100, budget_s=5)
    pair.turns(8)
    pair.pump()
    assert 0 < len(pair.tokens("r")) < 100
    pair.clock.advance(5)
    pair.run()
    assert pair.errors("r") == ["DEADLINE_EXCEEDED"]


def test_lesson_06_pages_stay_quarantined_until_the_fence() -> None:
    pair = Pair()
    pair.fences_proven = False
    drained = []

    def hold(effect: events.Effect) -> bool:
        return isinstance(effect, events.PostWrite) or (
            isinstance(effect, events.Fence) and effect.transfer.prefill == pair.prefill.me and not drained
        )

    pair.lose = hold
    pair.submit("r", list(range(40)), 4)
    pair.run()
    pair.decode.scheduler.cancel(FRONT, "r", AbortedByClient("left").info, 0.0)
    pair.run()
    assert pair.decode.pool.quarantined == 11
    free = pair.decode.pool.free
    drained.append(True)
    transfer = pair.transfer(next(iter(pair.prefill.scheduler.table)).room)
    pair.decode.post(events.FenceDone(transfer, 0, RankId(pair.prefill.me), False))
    pair.prefill.post(events.FenceDone(transfer, 0, RankId(pair.decode.me), True))
    pair.run()
    assert pair.decode.pool.free == free + 11


def test_a_broken_session_fails_exactly_its_transfers() -> None:
    pair = Pair()
    pair.submit("done", [1, 2, 3], 8)
    pair.turns(3)
    pair.pump()
    assert pair.tokens("done"), "the first request should be generating by now"
    pair.submit("open", list(range(40)), 4)
    pair.pump()
    pair.part()
    pair.run()
    assert len(pair.tokens("done")) == 8
    assert pair.errors("open") == ["PEER_LOST"], "of decode; prefill's half goes on for another decode"
    pair.prefill.scheduler.cancel(FRONT, "open", PeerLost("nobody else decodes").info, 0.0)


def test_a_frontend_that_leaves_takes_only_its_own_answers_along() -> None:
    scheduler = Pair().decode.scheduler
    here, gone = Incarnation("1" * 32), Incarnation("2" * 32)
    answer = Output(request_id="r", token_ids=[1])
    scheduler.outbox.extend([(gone, answer), (here, answer)])
    scheduler.frontend_gone(gone, PeerLost("left").info, 0.0)
    assert scheduler.outbox == [(here, answer)]


def test_admission_leaves_each_ready_sequence_a_page_to_grow_too() -> None:
    """B waits for its place in the batch. C would fit, and B would be retracted when it grows."""
    pair = Pair(decode_pages=7, max_batch=1)
    a, b = pair.submit("A", [1, 2, 3, 4], 8), pair.submit("B", [5, 6, 7, 8], 8)
    for _ in range(3):
        pair.pump()
        pair.prefill.turn()
        pair.pump()
        pair.decode.turn()
    generation = pair.decode.scheduler.batch
    assert (len(generation.running), len(generation.waiting)) == (1, 1)
    c = pair.submit("C", [9, 10, 11, 12], 2)
    pair.pump()
    pair.decode.turn()
    assert len(pair.decode.scheduler.preallocation) == 1
    pair.run()
    assert generation.retractions == 0
    assert [pair.tokens(name) for name in "ABC"] == [a, b, c]


def test_admission_leaves_each_running_sequence_a_page_to_grow() -> None:
    """B would fit beside A now, and A would be retracted for its next page."""
    pair = Pair(decode_pages=4)
    a = pair.submit("A", [1, 2, 3, 4], 8)
    for _ in range(3):
        pair.pump()
        pair.prefill.turn()
        pair.pump()
        pair.decode.turn()
    assert pair.decode.scheduler.batch.running
    b = pair.submit("B", [5, 6, 7, 8, 9, 10, 11], 2)
    pair.run()
    assert pair.decode.scheduler.batch.retractions == 0
    assert [pair.tokens(name) for name in "AB"] == [a, b]
