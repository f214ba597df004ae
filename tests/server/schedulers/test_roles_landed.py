"""Decode after a hand-off, and the requests of each half: budgets, hints, ranks, credits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs
from pair import FRONT, VOCAB, Node, Pair

from segue.engine.request import RankHints, Request, SamplingParams
from segue.kv.errors import AbortedByClient, ErrorCode
from segue.kv.ids import OPEN_RANK, Incarnation, KVPoll, LeaderId, RoomKey
from segue.kv.protocol import events
from segue.kv.protocol.messages import Drained, Gone, Metadata
from segue.kv.protocol.room_ranks import (
    FAIL_ON_CONFLICT,
    FOLLOW_BOOTSTRAP_ROOM,
    REDIRECT_ON_CONFLICT,
    DpRanks,
)
from segue.server.messages.control import Submit
from segue.server.schedulers.decode import DecodeScheduler
from segue.server.schedulers.fair_queue import PASSED_STEPS
from segue.server.schedulers.local_prompts import LocalPrompts
from segue.server.schedulers.prefill_result import PrefillResult, decode_result
from segue.server.schedulers.request_state import first_usage

LEFT = AbortedByClient("left").info
STRANGER = LeaderId(Incarnation("9" * 32))


def decode_of(pair: Pair) -> DecodeScheduler:
    assert isinstance(pair.decode.scheduler, DecodeScheduler)
    return pair.decode.scheduler


class Posted:
    """Notes what a node's handles say to the protocol."""

    def __init__(self, node: Node) -> None:
        self.events: list[Any] = []
        normal = node.post

        def post(*batch: events.Event) -> None:
            self.events += batch
            normal(*batch)

        node.post = post  # type: ignore[method-assign]

    def of(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


# ---- what came is looked at ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "lied",
    [
        lambda result: structs.replace(result, first_token=VOCAB).encode(),
        lambda result: structs.replace(result, first_token=-1).encode(),
        lambda result: result.encode()[:-1],
        lambda result: b"",
    ],
)
def test_a_result_of_prefill_that_cannot_be_is_refused_and_nothing_is_given_to_the_client(
    lied: Callable[[PrefillResult], bytes],
) -> None:
    pair = Pair()

    def lie(effect: events.Effect) -> bool:
        if not isinstance(effect, events.Send) or not isinstance(effect.message, Metadata):
            return False
        pair.lose = lambda _effect: False
        said = structs.replace(effect.message, content=lied(decode_result(effect.message.content)))
        pair.decode.post(events.Received(pair.prefill.me, said))
        return True

    pair.lose = lie
    pair.submit("r", list(range(9)), 3)
    pair.run()
    [error] = [out.error for out in pair.outputs["r"] if out.error is not None]
    assert (error.code, error.retryable) == (ErrorCode.METADATA_MISMATCH, True)
    assert pair.tokens("r") == []
    assert len(decode_of(pair).cache.tree.match(list(range(9))).pages) == 0, "nobody else gets these pages"


def test_an_end_without_metadata_or_reason_is_a_bug_of_that_request() -> None:
    pair = Pair()
    for name in ("success", "failed"):
        pair.submit(name, list(range(9)), 3, to=(False, True))
    first, second = decode_of(pair).table
    pair.decode.scheduler.on_change(events.Phase(first, KVPoll.SUCCESS), 0.0)
    pair.decode.scheduler.on_change(events.Phase(second, KVPoll.FAILED), 0.0)
    pair.run()
    assert (pair.errors("success"), pair.errors("failed")) == (["INTERNAL"], ["INTERNAL"])


def test_a_hand_off_that_lands_after_its_client_has_left_gives_nothing_and_keeps_nothing() -> None:
    pair = Pair()
    held: list[events.Effect] = []

    def late(effect: events.Effect) -> bool:
        if isinstance(effect, events.Phase | events.Release):
            if isinstance(effect, events.Phase) and effect.phase is KVPoll.SUCCESS and effect.metadata:
                held.append(effect)
                return True
            if held and isinstance(effect, events.Release) and len(held) == 1:
                held.append(effect)
                return True
        return False

    pair.lose = late
    pair.submit("r", list(range(9)), 3)
    pair.run()
    assert [type(effect) for effect in held] == [events.Phase, events.Release]
    pair.decode.scheduler.cancel(FRONT, "r", LEFT, 0.0)
    pair.lose = lambda _effect: False
    for effect in held:
        pair.decode.changed(effect)  # type: ignore[arg-type]
    pair.run()
    assert "r" not in pair.outputs
    assert len(decode_of(pair).batch) == 0


@pytest.mark.parametrize(
    ("prompt", "decode", "prefill", "expected"),
    [
        (10, 0, 0, (0, 0, 10)),
        (10, 4, 0, (0, 0, 10)),
        (10, 0, 4, (0, 4, 6)),
        (10, 4, 8, (4, 4, 2)),
        (10, 8, 4, (4, 0, 6)),
        (10, 12, 12, (10, 0, 0)),
        (10, 4, 16, (4, 6, 0)),
    ],
)
def test_where_each_token_s_kv_came_from_adds_up(
    prompt: int, decode: int, prefill: int, expected: tuple[int, int, int]
) -> None:
    """Tokens that decode had cached and prefill computed all the same count as computed."""
    usage = first_usage(prompt, decode, prefill)
    assert usage.prompt_tokens == prompt
    assert (usage.decode_cached, usage.prefill_cached, usage.computed) == expected


def test_a_prefix_that_has_landed_serves_the_next_request_while_the_first_still_generates() -> None:
    pair = Pair()
    pair.submit("first", list(range(20)), 40)
    while len(decode_of(pair).batch.running) < 1:
        pair.turns()
    pair.submit("second", [*range(20), 7], 1)
    pair.run()
    usage = pair.outputs["second"][0].usage
    assert usage is not None
    assert usage.decode_cached == 20
    assert len(pair.tokens("first")) == 40


def test_what_a_hand_off_adds_is_counted_without_what_prefill_took_for_the_prompt() -> None:
    pair = Pair()
    waits: list[float] = []

    class Noted(LocalPrompts):
        def handed_over(self, wait_s: float) -> None:
            waits.append(wait_s)

    decode_of(pair).local = Noted(0)
    pair.submit("r", list(range(9)), 1)
    pair.pump()
    pair.clock.advance(1.0)
    pair.decode.turn()
    pair.pump()  # prefill knows where to write: its queue begins
    pair.clock.advance(2.0)
    steps = pair.prefill.scheduler.plan(pair.clock.now())  # and its forward
    pair.clock.advance(4.0)
    pair.prefill.scheduler.launched(steps)
    results = pair.prefill.engine.collect(
        pair.prefill.engine.launch(steps, pair.prefill.scheduler.on_stored(), lambda: None)
    )
    pair.prefill.scheduler.complete(results, pair.clock.now())
    pair.clock.advance(0.5)
    pair.run()
    assert waits == [1.5], "of 7.5 s prefill's queue took 2 and its forward 4"
    pair.submit("again", list(range(9)), 1)
    pair.run()
    assert waits[1:] == [0.0]


# ---- what each half asks for ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "hints", [RankHints(), RankHints(disagg_prefill_dp_rank=2), RankHints(force_query_prefill_dp_rank=True)]
)
def test_both_halves_wait_no_longer_than_the_request_has_and_decode_passes_the_client_s_hints_on(
    hints: RankHints,
) -> None:
    pair = Pair()
    posted = {node: Posted(node) for node in (pair.prefill, pair.decode)}
    pair.clock.advance(5.0)
    ticket = pair.ticket(9, budget_s=30.0)
    request = Request(request_id="r", prompt=[1, 2, 3], sampling=SamplingParams(), output=[4], ranks=hints)
    for node in posted:
        node.scheduler.submit(FRONT, Submit(request, ticket), pair.clock.now())
    [sender] = posted[pair.prefill].of(events.ExpectRoom)
    [receiver] = posted[pair.decode].of(events.OpenReceiver)
    for opened in (sender, receiver):
        assert (opened.prompt_tokens, opened.deadline) == (4, 35.0)
    assert sender.claim == receiver.claim != b""
    assert (sender.decode, receiver.prefill) == (pair.decode.me, pair.prefill.me)
    assert (receiver.hint, receiver.force_query) == (
        hints.disagg_prefill_dp_rank,
        hints.force_query_prefill_dp_rank,
    )


PLAIN, FOLLOWS = DpRanks(size=4), DpRanks(size=4, load_balance=FOLLOW_BOOTSTRAP_ROOM)
FORCED = structs.replace(FOLLOWS, force_query=True)
OURS, ANOTHER = 100, 101  # rooms that name DP rank 0, which is asked, and rank 1


@pytest.mark.parametrize(
    ("dp", "named", "room", "hints", "announced", "conflict"),
    [
        (DpRanks(), OPEN_RANK, ANOTHER, {}, False, False),
        (PLAIN, OPEN_RANK, OURS, {}, True, False),
        (PLAIN, OPEN_RANK, ANOTHER, {"disagg_prefill_dp_rank": 0}, False, False),
        (PLAIN, OPEN_RANK, OURS, {"disagg_prefill_dp_rank": 2}, True, True),
        (PLAIN, 0, ANOTHER, {}, False, False),
        (FOLLOWS, OPEN_RANK, OURS, {}, False, False),
        (FOLLOWS, OPEN_RANK, ANOTHER, {}, True, True),
        (FOLLOWS, OPEN_RANK, OURS, {"force_query_prefill_dp_rank": True}, True, False),
        (FORCED, OPEN_RANK, OURS, {}, True, False),
        (FOLLOWS, 0, OURS, {}, False, False),
        (FOLLOWS, 0, ANOTHER, {}, False, True),
    ],
)
@pytest.mark.parametrize("rule", [REDIRECT_ON_CONFLICT, FAIL_ON_CONFLICT])
def test_prefill_registers_a_room_that_decode_cannot_infer_and_ends_a_conflict_only_where_it_is_told_to(
    dp: DpRanks, named: int, room: int, hints: dict[str, Any], announced: bool, conflict: bool, rule: str
) -> None:
    pair = Pair(rests=conflict and rule == FAIL_ON_CONFLICT)
    node = pair.prefill
    node.scheduler.config = replace(node.scheduler.config, dp=structs.replace(dp, on_conflict=rule))
    pair.clock.advance(5.0)
    posted = Posted(node)
    prefill = LeaderId(node.me.incarnation, named)
    ticket = pair.ticket(room, budget_s=30.0, prefill=prefill)
    request = Request(request_id="r", prompt=[1, 2], sampling=SamplingParams(), ranks=RankHints(**hints))
    node.scheduler.submit(FRONT, Submit(request, ticket), pair.clock.now())
    key = RoomKey(room)
    assert [(event.key, event.announce) for event in posted.of(events.ExpectRoom)] == [(key, announced)]
    registered = [effect for effect in node.effects if isinstance(effect, events.RegisterRoom)]
    assert registered == ([events.RegisterRoom(key, 30.0)] if announced else [])
    errors = [out.error.code for _, out in node.scheduler.outbox if out.error is not None]
    assert errors == ([ErrorCode.DP_RANK_CONFLICT] if conflict and rule == FAIL_ON_CONFLICT else [])
    assert [event.key for event in posted.of(events.EndRoom)] == [key] * len(errors)


def test_a_hint_that_names_no_rank_of_ours_is_refused_before_anything_is_opened() -> None:
    pair = Pair()
    node = pair.prefill
    node.scheduler.config = replace(node.scheduler.config, dp=PLAIN)
    prefill = LeaderId(node.me.incarnation, OPEN_RANK)
    ticket = pair.ticket(OURS, prefill=prefill)
    hints = RankHints(disagg_prefill_dp_rank=4)
    request = Request(request_id="r", prompt=[1, 2], sampling=SamplingParams(), ranks=hints)
    node.scheduler.submit(FRONT, Submit(request, ticket), pair.clock.now())
    pair.pump()
    assert pair.errors("r") == ["DP_RANK_OUT_OF_RANGE"]
    assert not node.handles


# ---- who may be given pages -------------------------------------------------------------------------


def drive(pair: Pair) -> None:
    """Decode alone takes steps."""
    for _ in range(20):
        pair.pump()
        pair.decode.turn()


def test_what_waits_in_quarantine_takes_no_credits_from_those_who_may_still_be_served() -> None:
    """Two hand-offs of this prefill whose proof never comes: the third goes on."""
    pair = Pair(decode_pages=16)
    pair.fences_proven = False
    pair.lose = lambda e: isinstance(e, events.Send) and isinstance(e.message, Drained | Gone)
    for name in ("a", "b"):
        pair.submit(name, list(range(9)), 2)
    drive(pair)
    for name in ("a", "b"):
        for node in (pair.decode, pair.prefill):
            node.scheduler.cancel(FRONT, name, LEFT, 0.0)
    pair.run()
    assert pair.decode.pool.quarantined == 6
    wanted = pair.submit("c", list(range(50, 59)), 2)
    pair.run()
    assert pair.tokens("c") == wanted
    for key in list(decode_of(pair).table):
        pair.decode.post(events.Received(pair.prefill.me, Drained(pair.transfer(key.room))))


def test_a_room_whose_pages_wait_for_a_proof_is_in_use_though_its_ticket_is_forgotten() -> None:
    pair = Pair()
    pair.fences_proven = False
    pair.lose = lambda e: isinstance(e, events.Send) and isinstance(e.message, Drained | Gone)
    pair.submit("r", list(range(9)), 2, budget_s=5.0)
    drive(pair)
    pair.clock.advance(5.0)
    pair.run()
    assert pair.decode.pool.quarantined == 3
    [key] = decode_of(pair).table
    pair.rooms -= 1
    pair.submit("again", list(range(9)), 2, to=(False, True))
    pair.pump()
    assert pair.errors("again") == ["INVALID_REQUEST"]
    assert pair.decode.pool.quarantined == 3
    pair.decode.post(events.Received(pair.prefill.me, Drained(pair.transfer(key.room))))


def test_pages_that_decode_has_cached_take_no_credits() -> None:
    pair = Pair(prefill_pages=256, decode_pages=64)
    prefix = list(range(40))
    pair.submit("first", prefix, 1)
    pair.run()
    for n in range(9):
        pair.submit(f"r{n}", [*prefix, 100 + n], 1)
    drive(pair)
    # 11 pages each, of which 10 are shared: one of their own, and 16 may be reserved ahead.
    assert decode_of(pair).sizes()["preallocation"] == 0


def test_a_prompt_at_decode_that_came_later_holds_no_earlier_hand_off_up() -> None:
    pair = Pair(decode_pages=16)
    pair.part()
    pair.pump()
    pair.submit("first", [1, 2], 1)
    held = pair.decode.pool.allocate(14)
    pair.at_decode("large", list(range(40)), 1)
    pair.decode.turn()
    assert decode_of(pair).queue.short is not None
    pair.join()
    pair.run()
    assert set(pair.outputs) == {"first"}
    pair.decode.pool.release(held)
    pair.run()
    assert set(pair.outputs) == {"first", "large"}


def test_a_hand_off_that_lacks_pages_and_came_later_holds_no_earlier_prompt_at_decode_up() -> None:
    """Nor does one that has ended hold up anybody."""
    pair = Pair(decode_pages=16)
    held = pair.decode.pool.allocate(11)
    pair.at_decode("first", list(range(16)), 1)
    pair.submit("large", list(range(100, 140)), 1)
    pair.run()
    assert set(pair.outputs) == {"first"}
    pair.at_decode("next", [5, 6], 1)
    pair.run()
    assert set(pair.outputs) == {"first"}, "the large one came before it"
    for node in (pair.decode, pair.prefill):
        node.scheduler.cancel(FRONT, "large", LEFT, 0.0)
    pair.run()
    assert set(pair.outputs) == {"first", "next"}
    pair.decode.pool.release(held)


def test_hand_offs_leave_a_page_to_grow_to_a_prompt_that_decode_computes() -> None:
    pair = Pair(decode_pages=8)
    here = pair.at_decode("here", list(range(20)), 4)
    pair.decode.turn()
    assert len(decode_of(pair).queue.running) == 1, "five pages, and the sixth is for its answer"
    prompt = list(range(50, 61))  # three pages, as many as are free
    there = pair.submit("there", prompt, 1)
    pair.run()
    assert decode_of(pair).batch.retractions == 0
    assert pair.tokens("here") == here
    assert pair.tokens("there") == there


def test_who_waits_for_a_place_in_the_batch_gives_its_pages_up_before_anybody_who_runs() -> None:
    pair = Pair(decode_pages=7, max_batch=1)
    wanted = {name: pair.submit(name, [ord(name)] * 4, 20) for name in "ab"}
    generation = decode_of(pair).batch
    seen = False
    for _ in range(60):
        pair.turns()
        if generation.retracted:
            assert [state.request.request_id for state, _ in generation.retracted] == ["b"]
            assert [state.request.request_id for state in generation.running] in (["a"], [])
            seen = True
    assert seen
    pair.run()
    assert {name: pair.tokens(name) for name in wanted} == wanted


# ---- whose turn it is, and what is told of it ----------------------------------------------------------


def test_a_hand_off_whose_prefill_is_not_there_yet_holds_nobody_up_who_came_later() -> None:
    pair = Pair(rests=False)
    pair.submit("unsettled", list(range(9)), 2, prefill=STRANGER)
    wanted = pair.submit("later", list(range(50, 59)), 2)
    pair.turns(9)
    pair.pump()
    assert pair.tokens("later") == wanted
    [waiting] = decode_of(pair).preallocation
    assert waiting.request.request_id == "unsettled"


def test_decode_reserves_for_whom_prefill_would_compute_first() -> None:
    pair = Pair(decode_pages=8, rests=False)
    for name, priority in (("late", 5), ("urgent", -5), ("as urgent", -5)):
        pair.submit(name, list(range(9)), 2, to=(False, True), priority=priority)
    drive(pair)
    phases = {s.request.request_id: s.phase for s in decode_of(pair).admission.requests.values()}
    assert phases == {"late": "credit", "urgent": "transfer", "as urgent": "transfer"}


def test_a_low_priority_is_served_beside_an_older_request_whose_prefill_never_comes() -> None:
    """Eight full steps of urgent prompts may pass it: what passes the older one is not its concern."""
    pair, urgent = Pair(chunk_tokens=16, rests=False), 0
    pair.submit("unsettled", list(range(9)), 2, prefill=STRANGER, priority=5)
    pair.submit("first", list(range(9)), 1)
    pair.run()
    queue = decode_of(pair).preallocation

    def turn() -> int:
        """One step of both, with four urgent requests in decode's queue; how many have come."""
        come = urgent
        while sum(state.request.priority < 0 for state in queue) < 4:
            pair.submit(f"urgent {come}", [300 + come] * 16, 2, priority=-5)
            come += 1
        pair.pump()
        for node in (pair.prefill, pair.decode):
            node.turn()
        return come

    urgent = turn()
    pair.submit("low", list(range(9)), 2, priority=5)
    while any(state.request.request_id == "low" for state in queue):
        urgent = turn()
        assert urgent < 40, "it is passed by everybody"
    assert urgent >= PASSED_STEPS


def test_that_pages_wait_for_a_proof_is_said_twice_and_done_once() -> None:
    """After a bug the protocol says it again; a prefix of theirs is shared, and stays with who has it."""
    pair = Pair(rests=False)
    pair.submit("first", list(range(8)), 1)
    pair.run()
    pair.submit("r", list(range(12)), 2)
    drive(pair)
    [key] = decode_of(pair).table
    for _ in range(2):
        decode_of(pair).on_change(events.Quarantined(key, 2), 0.0)
        assert (pair.decode.pool.quarantined, decode_of(pair).cache.tree.pages) == (2, 2)
    pair.decode.pool.check_integrity()


def test_how_long_the_wire_and_the_commit_took_and_when_it_was_ready_is_told_with_the_bytes() -> None:
    pair, held = Pair(), list[Any]()

    def late(effect: events.Effect) -> bool:
        landed = isinstance(effect, events.Phase) and effect.metadata is not None
        if landed or (held and isinstance(effect, events.Release) and len(held) == 1):
            held.append(effect)
            return True
        return False

    pair.lose = late
    pair.submit("r", list(range(9)), 2)
    pair.run()
    success, release = held
    pair.lose = lambda _effect: False
    pair.clock.advance(3.0)
    pair.decode.handles[success.key].apply(structs.replace(success, wire_s=0.25))
    pair.clock.advance(0.5)
    decode_of(pair).on_change(success, pair.clock.now())
    decode_of(pair).on_change(release, pair.clock.now())
    pair.run()
    told = pair.outputs["r"][0].timeline
    assert (told["wire"], told["commit"], told["at_ready"]) == (0.25, 0.5, 3.5)
    for node in (pair.prefill, pair.decode):
        [record] = node.scheduler.admission.explain("r", pair.clock.now())
        assert record.facts["handed_bytes"] == 9 * pair.prefill.engine.spec.shape.token_bytes
