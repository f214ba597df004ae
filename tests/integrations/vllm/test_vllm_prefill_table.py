"""The scheduler side on prefill: each row of the contract with vLLM, and each trap."""

from __future__ import annotations

from typing import Any

import pytest
from vllm_bench import ADDRESS, LOST, MODEL, TO_PREFILL, prefill_engine, request
from vllm_model import ModelEngine

from segue.integrations.prompt_claim import claim_of
from segue.integrations.vllm.vllm_orders import (
    AbortOrder,
    BlocksReleased,
    EvictOrder,
    ExpectOrder,
    SendOrder,
    decode_orders,
)
from segue.integrations.vllm.vllm_params import ReceiveParams, parse_params, room_of
from segue.integrations.vllm.vllm_prefill_table import PrefillTable
from segue.integrations.vllm.vllm_table import PassedIds, RequestEnd, ScheduledChunk
from segue.kv import ErrorCode, RoomKey

CONCURRENT = TO_PREFILL | {"transfer_id": "t1"}


def step(engine: ModelEngine, budget: int = 64) -> list[Any]:
    """Schedule and run one step; the orders that went with it."""
    engine.schedule(budget)
    orders: list[Any] = decode_orders(engine.steps[-1].orders)
    engine.complete()
    engine.check()
    return orders


def begun(params: Any, tokens: int = 10, **more: Any) -> ModelEngine:
    engine = prefill_engine(**more)
    engine.add(request("r1", tokens, params))
    return engine


# ---- sequential --------------------------------------------------------------------------------


def test_sequential_the_answer_names_the_room_that_is_opened_with_the_whole_prompt() -> None:
    engine = begun(TO_PREFILL)
    assert step(engine) == []
    assert engine.ends == {"r1": RequestEnd.LENGTH}
    assert not engine.requests, "vLLM has freed the request; pins hold its blocks"
    params = parse_params(engine.answers["r1"])
    assert params == ReceiveParams(1000, ADDRESS, 10)
    assert engine.table.has_work()
    expect, send = step(engine)
    claim = claim_of(request("r1"), MODEL)
    assert expect == ExpectOrder(1, RoomKey(1000), 10, claim, budget_s=60.0, retain_s=pytest.approx(0.1))
    assert (send.start, send.end, len(send.blocks), send.last, send.ready) == (0, 10, 3, True, True)
    engine.quiet()
    assert engine.table.take_figures().outcomes == {"OK": 1}


def test_sequential_the_pages_of_a_room_are_nobody_elses_until_its_release() -> None:
    engine = begun(TO_PREFILL, blocks=6)
    step(engine)
    step(engine)
    engine.add(request("r2", 16))
    step(engine)
    assert engine.requests["r2"].status == "WAITING", "3 of 6 blocks are pinned; it needs 4"
    engine.worker.end(1, None)
    step(engine)
    assert engine.requests["r2"].status == "WAITING", "the hand-off has ended and is not released"
    engine.worker.release(1)
    step(engine)
    step(engine)
    assert engine.ends["r2"] is RequestEnd.LENGTH


@pytest.mark.parametrize("end", [RequestEnd.ABORT, RequestEnd.ERROR])
def test_sequential_a_request_that_ends_otherwise_has_no_room(end: RequestEnd) -> None:
    engine = begun(TO_PREFILL)
    step(engine, 4)
    engine.finish(engine.requests["r1"], end)
    assert engine.answers == {"r1": None}
    assert not engine.table.has_work()
    engine.quiet()


@pytest.mark.parametrize(
    ("blocks", "computed", "end"),
    [
        ([1, 2, 3], 9, RequestEnd.LENGTH),
        ([1, 2], 10, RequestEnd.LENGTH),
        ([1, 2, 3], 10, RequestEnd.ABORT),
        ([1, 2, 3], 10, RequestEnd.ERROR),
    ],
)
def test_sequential_a_room_needs_a_whole_prompt_and_a_client(
    blocks: list[int], computed: int, end: RequestEnd
) -> None:
    engine = begun(TO_PREFILL)
    assert engine.table.finished("r1", blocks, computed, end) == (False, None)
    assert not engine.table.has_work()


def test_sequential_blocks_after_the_prompts_are_not_sent() -> None:
    engine = prefill_engine()
    engine.add(request("r1", 10, TO_PREFILL))
    blocks = engine.pool.allocate(5) or []
    assert engine.table.finished("r1", blocks, 10, RequestEnd.LENGTH)[1] is not None
    _, send = engine.table.take_orders()
    assert isinstance(send, SendOrder)
    assert send.blocks == blocks[:3]
    assert engine.table.sizes()["pinned"] == 3


def test_sequential_a_preemption_has_nothing_to_undo() -> None:
    engine = begun(TO_PREFILL)
    step(engine, 4)
    engine.preempt(engine.running.pop())
    assert step(engine) == []
    assert engine.answers["r1"] is not None
    engine.quiet()


def test_sequential_before_the_workers_address_is_known_prompts_stay_here() -> None:
    engine = begun(TO_PREFILL)
    assert isinstance(engine.table, PrefillTable)
    engine.table.address = None
    step(engine)
    assert engine.answers == {"r1": None}
    assert "address" in engine.table.take_warnings()[0]
    engine.quiet()


def rooms(blocks: int, count: int) -> ModelEngine:
    """Prompts of three blocks each whose rooms are open."""
    engine = prefill_engine(blocks=blocks)
    for number in range(count):
        engine.add(request(f"r{number}", 12, TO_PREFILL))
        step(engine)
        step(engine)
    assert len(engine.pool.free) == blocks - 3 * count
    return engine


def test_a_request_that_waits_for_blocks_gets_those_of_the_oldest_rooms() -> None:
    engine = rooms(blocks=10, count=3)
    engine.add(request("late", 16, None))
    orders = step(engine)
    assert [(order.handoff, order.error.code) for order in orders] == [(1, ErrorCode.OUT_OF_CAPACITY)]
    assert step(engine) == [], "the blocks of the first room are enough"
    engine.worker.end(1, orders[0].error)
    engine.worker.release(1)
    step(engine)
    step(engine)
    assert engine.ends["late"] is RequestEnd.LENGTH
    engine.quiet()


def test_a_room_that_decode_has_is_waited_for() -> None:
    engine = rooms(blocks=10, count=3)
    engine.worker.handoffs[1].bound = True
    engine.add(request("late", 16, None))
    assert [order.handoff for order in step(engine)] == [1]
    assert not engine.worker.handoffs[1].aborted
    assert step(engine) == []
    engine.worker.end(1, None)
    engine.worker.release(1)
    engine.quiet()


def test_as_many_rooms_as_are_needed_are_given_up() -> None:
    engine = rooms(blocks=10, count=3)
    engine.add(request("late", 28, None))
    assert [order.handoff for order in step(engine)] == [1, 2]
    engine.quiet(LOST)


def test_the_room_of_a_prompt_that_is_computed_is_not_given_up() -> None:
    engine = begun(CONCURRENT, tokens=20, blocks=6)
    step(engine, 8)
    engine.add(request("late", 16, None))
    assert all(not isinstance(order, EvictOrder) for order in step(engine, 1))
    engine.quiet()


def test_a_preempted_request_gets_the_blocks_of_rooms_too() -> None:
    engine = rooms(blocks=10, count=3)
    engine.table.new_request(request("late", 16, None))
    engine.table.allocated("late", [], 0)
    engine.table.step([], ["late"])
    assert [order.handoff for order in engine.table.take_orders()] == [1]
    engine.table.finished("late", [], 0, RequestEnd.ABORT)
    engine.quiet(LOST)


def test_a_room_whose_decode_failed_is_given_up_while_a_request_waits() -> None:
    """A decode had it when it was to be given up, and prefill's engine does not hear that it failed."""
    engine = rooms(blocks=10, count=1)
    engine.worker.handoffs[1].bound = True
    engine.add(request("late", 32, None))
    assert [order.handoff for order in step(engine)] == [1]
    engine.worker.handoffs[1].bound = False
    for _ in range(20):
        step(engine)
    assert engine.worker.handoffs[1].aborted
    engine.quiet(LOST)


def waiting_after(preempted: str, *later: str) -> list[int]:
    """The rooms that are given up when a request of 8 blocks is preempted while 4 of 10 are free and `later`
    ones wait."""
    engine = rooms(blocks=10, count=2)
    table = engine.table
    table.new_request(request(preempted, 32, None))
    table.allocated(preempted, [], 0)
    for name in later:
        table.new_request(request(name, 4, None))
    table.step([], [preempted])
    return [order.handoff for order in table.take_orders() if isinstance(order, EvictOrder)]


def test_a_preempted_request_is_served_before_those_that_never_had_blocks() -> None:
    assert waiting_after("big") == waiting_after("big", "small", "small too") == [1, 2]


def test_a_preempted_request_needs_the_blocks_of_what_it_has_generated() -> None:
    engine = rooms(blocks=10, count=2)
    engine.table.new_request(request("r", 4, None, max_tokens=100))
    engine.table.allocated("r", [], 0)
    engine.table.step([ScheduledChunk("r", 0, 4, [])])
    engine.table.step([ScheduledChunk("r", 31, 1, [])])
    engine.table.step([], ["r"])
    assert [order.handoff for order in engine.table.take_orders()] == [1, 2]


def test_a_request_that_is_resumed_in_the_step_of_its_preemption_does_not_wait() -> None:
    """`reset_prefix_cache` preempts between two steps."""
    engine = rooms(blocks=10, count=1)
    engine.table.new_request(request("r", 32, None))
    for _ in range(2):
        engine.table.allocated("r", [], 0)
    engine.table.step([ScheduledChunk("r", 0, 32, [])], ["r"])
    assert engine.table.take_orders() == []
    assert engine.table.sizes()["waiting"] == 0


# ---- concurrent --------------------------------------------------------------------------------


def test_concurrent_each_step_sends_its_chunk() -> None:
    engine = begun(CONCURRENT)
    expect, first = step(engine, 6)
    assert expect.room == RoomKey(room_of("t1"))
    assert (first.start, first.end, len(first.blocks), first.last, first.ready) == (0, 6, 2, False, False)
    (second,) = step(engine, 6)
    assert (second.start, second.end, len(second.blocks), second.last) == (6, 10, 3, True)
    assert second.blocks[:2] == first.blocks
    assert engine.answers == {"r1": None}
    engine.quiet()


def test_concurrent_a_step_that_is_one_ahead_orders_its_own_chunk_only() -> None:
    engine = begun(CONCURRENT, depth=2)
    engine.schedule(6)
    engine.schedule(6)
    chunks = [[o for o in decode_orders(s.orders) if isinstance(o, SendOrder)] for s in engine.steps]
    assert [[(c.start, c.end) for c in chunk] for chunk in chunks] == [[(0, 6)], [(6, 10)]]
    engine.quiet()


def test_concurrent_a_preempted_prompt_aborts_its_hand_off_and_keeps_its_pages_pinned() -> None:
    engine = begun(CONCURRENT, blocks=4)
    step(engine, 6)
    engine.preempt(engine.running.pop())
    engine.table.step([], ["r1"])
    (abort,) = engine.table.take_orders()
    assert isinstance(abort, AbortOrder)
    assert (abort.handoff, abort.error.code, abort.error.retryable) == (1, ErrorCode.OUT_OF_CAPACITY, True)
    assert len(engine.pool.free) == 2, "two of four blocks hold a chunk that may be under way"
    engine.worker.carry_out(abort)
    assert step(engine, 8) == [], "no second hand-off of this request"
    engine.worker.end(1, abort.error)
    engine.worker.release(1)
    engine.quiet()


def test_concurrent_a_preemption_after_the_last_chunk_leaves_the_hand_off_alone() -> None:
    engine = begun(CONCURRENT, depth=2)
    engine.schedule(64)
    engine.preempt(engine.running.pop())
    engine.table.step([], ["r1"])
    assert engine.table.take_orders() == []
    engine.complete()
    assert step(engine) == [], "the prompt is computed again and sent once"
    engine.quiet()
    assert engine.table.take_figures().outcomes == {"OK": 1}


@pytest.mark.parametrize(
    ("end", "code"),
    [(RequestEnd.ABORT, ErrorCode.ABORTED_BY_CLIENT), (RequestEnd.ERROR, ErrorCode.TRANSFER_FAILED)],
)
def test_concurrent_a_request_that_ends_in_mid_prompt_aborts(end: RequestEnd, code: ErrorCode) -> None:
    engine = begun(CONCURRENT)
    step(engine, 6)
    engine.finish(engine.requests["r1"], end)
    assert len(engine.pool.free) == 14, "a chunk may be under way"
    (abort,) = step(engine)
    assert abort.error.code is code
    engine.quiet(LOST)


def test_concurrent_an_abort_after_the_last_chunk_lets_decode_have_the_kv() -> None:
    engine = begun(CONCURRENT, depth=2)
    engine.schedule(64)
    engine.abort("r1")
    assert engine.table.take_orders() == []
    engine.quiet()
    assert engine.table.take_figures().outcomes == {"OK": 1}


@pytest.mark.parametrize("released", [False, True])
def test_concurrent_a_hand_off_that_fails_stops_its_chunks_and_not_its_request(released: bool) -> None:
    engine = begun(CONCURRENT, tokens=20)
    step(engine, 6)
    engine.worker.end(1, LOST)
    if released:
        engine.worker.release(1)
    step(engine, 1)
    assert step(engine) == []
    assert engine.ends == {"r1": RequestEnd.LENGTH}
    assert engine.table.take_figures().outcomes == {"PEER_LOST": 1}
    engine.quiet()


def test_concurrent_a_hand_off_that_has_ended_is_not_aborted() -> None:
    engine = begun(CONCURRENT)
    step(engine, 6)
    engine.worker.end(1, LOST)
    step(engine, 1)
    engine.abort("r1")
    assert engine.table.take_orders() == []
    engine.quiet()


def test_concurrent_a_second_allocation_opens_no_second_room() -> None:
    engine = begun(CONCURRENT)
    step(engine, 4)
    engine.table.allocated("r1", engine.requests["r1"].blocks, 0)
    assert engine.table.take_orders() == []
    engine.quiet()


def test_blocks_that_do_not_hold_the_chunk_abort_the_hand_off() -> None:
    engine = begun(CONCURRENT)
    engine.table.allocated("r1", [], 0)
    engine.table.step([ScheduledChunk("r1", 0, 10, [1])])
    assert [type(o) for o in engine.table.take_orders()] == [ExpectOrder, AbortOrder]


# ---- both --------------------------------------------------------------------------------------


def test_nothing_is_matched_and_asking_changes_nothing() -> None:
    engine = begun(CONCURRENT)
    assert [engine.table.matched("r1", 0) for _ in range(3)] == [(0, False)] * 3
    assert engine.table.take_orders() == []


@pytest.mark.parametrize(
    ("params", "more", "why"),
    [
        ({"do_remote_decode": True, "typo": 1}, {}, "typo"),
        ({"do_remote_prefill": True, "do_remote_decode": True}, {}, "both"),
        ({**TO_PREFILL}, {"max_tokens": 2}, "max_tokens"),
        ({**TO_PREFILL}, {"lora_name": "l"}, "LoRA"),
        ({**TO_PREFILL}, {"embeds": True}, "embeddings"),
        ({"do_remote_prefill": True, "segue": {}}, {}, "segue"),
    ],
)
def test_a_request_that_cannot_be_handed_over_is_computed_with_a_warning(
    params: Any, more: dict[str, Any], why: str
) -> None:
    engine = prefill_engine()
    engine.add(request("r1", 10, params, **more))
    (warning,) = engine.table.take_warnings()
    assert why in warning
    assert step(engine) == []
    assert engine.answers == {"r1": None}
    engine.quiet()


def test_a_request_without_params_is_none_of_the_connectors() -> None:
    engine = begun(None)
    assert step(engine) == []
    assert engine.answers == {"r1": None}
    assert engine.table.take_warnings() == []


def test_an_empty_step_has_no_orders() -> None:
    engine = prefill_engine()
    assert step(engine) == []
    assert not engine.table.has_work()


def test_vllm_steps_until_the_last_release() -> None:
    engine = begun(TO_PREFILL)
    step(engine)
    assert engine.table.has_work(), "orders wait for a step"
    step(engine)
    assert engine.table.has_work(), "a room is open"
    engine.worker.end(1, None)
    step(engine)
    assert engine.table.has_work(), "blocks are pinned"
    engine.worker.release(1)
    step(engine)
    assert not engine.table.has_work()


def test_no_id_of_prefill_ever_reaches_vllm() -> None:
    engine = begun(TO_PREFILL)
    step(engine)
    passed = engine.table.results([], {"r1"}, {"r1"})
    assert passed == PassedIds()
    warnings = engine.table.take_warnings()
    assert any("finished_recving" in w for w in warnings)


def test_a_report_of_a_hand_off_that_is_not_open_frees_nothing() -> None:
    engine = begun(TO_PREFILL)
    step(engine)
    step(engine)
    held = engine.table.sizes()
    engine.table.results([BlocksReleased(2), BlocksReleased(0)])
    assert engine.table.sizes() == held
    assert len(engine.table.take_warnings()) == 2


def test_a_release_without_an_end_is_a_failure() -> None:
    engine = begun(TO_PREFILL)
    step(engine)
    step(engine)
    engine.table.results([BlocksReleased(1)])
    assert engine.table.take_figures().outcomes == {"INTERNAL": 1}
    assert len(engine.pool.free) == len(engine.pool.blocks)


def test_warnings_are_bounded() -> None:
    engine = prefill_engine()
    for number in range(300):
        engine.table.new_request(request(f"r{number}", 10, {"do_remote_decode": 1}))
    assert len(engine.table.take_warnings()) == 100
    assert engine.table.take_warnings() == []
    assert not engine.table.sizes()["prompts"]
