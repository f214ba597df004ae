"""The scheduler side on decode: each row of the contract with vLLM, and each trap."""

from __future__ import annotations

from typing import Any

import pytest
from vllm_bench import (
    ADDRESS,
    CONCURRENT_TO_DECODE,
    LOST,
    MODEL,
    SECRET,
    TO_PREFILL,
    decode_engine,
    request,
    to_decode,
)
from vllm_model import BLOCK, ModelEngine

from segue.integrations.prompt_claim import claim_of
from segue.integrations.vllm.vllm_orders import (
    AbortOrder,
    BlocksReleased,
    DeclineOrder,
    HandoffEnded,
    ReceiveOrder,
    RefuseOrder,
    decode_orders,
)
from segue.integrations.vllm.vllm_params import PeerAddress, room_of
from segue.integrations.vllm.vllm_settings import LoadFailurePolicy
from segue.integrations.vllm.vllm_table import RequestEnd
from segue.kv import ErrorCode, RoomKey

RECOMPUTE, FAIL = LoadFailurePolicy.RECOMPUTE, LoadFailurePolicy.FAIL


def step(engine: ModelEngine, budget: int = 64) -> list[Any]:
    """Schedule and run one step; the orders that went with it."""
    engine.schedule(budget)
    orders: list[Any] = decode_orders(engine.steps[-1].orders)
    engine.complete()
    engine.check()
    return orders


def begun(params: Any = None, prefix: int = 0, **more: Any) -> ModelEngine:
    engine = decode_engine(**more)
    engine.add(request("r1", 10, params or to_decode()), prefix)
    return engine


def test_a_load_asks_for_all_tokens_and_publishes_all_blocks() -> None:
    engine = begun()
    assert engine.table.matched("r1", 0) == (10, True)
    (order,) = step(engine)
    assert order == ReceiveOrder(
        handoff=1,
        request_id="r1",
        room=RoomKey(77),
        peer=ADDRESS,
        prompt_tokens=10,
        prefix_tokens=0,
        blocks=[0, 1, 2],
        claim=claim_of(request("r1"), MODEL),
        budget_s=60.0,
    )
    assert order.peer.leader == ADDRESS.leader
    engine.worker.end(1, None)
    engine.worker.release(1)
    step(engine)
    step(engine)
    assert engine.loaded == ["r1"]
    assert engine.ends == {"r1": RequestEnd.LENGTH}
    engine.quiet()


def test_a_prefix_of_the_cache_is_not_loaded() -> None:
    engine = begun(prefix=2 * BLOCK)
    (order,) = step(engine)
    assert (order.prefix_tokens, order.blocks) == (8, [2])
    engine.quiet()


def test_the_concurrent_flow_asks_for_the_session_at_query() -> None:
    engine = begun(CONCURRENT_TO_DECODE)
    (order,) = step(engine)
    assert order.room == RoomKey(room_of("t1"))
    assert order.peer == PeerAddress(ADDRESS.leader, "127.0.0.1", 8998, query=True)
    engine.quiet()


def test_asking_again_changes_nothing_and_after_the_load_nothing_is_matched() -> None:
    engine = begun()
    assert [engine.table.matched("r1", c) for c in (0, 0, 8, 0)] == [
        (10, True),
        (10, True),
        (2, True),
        (10, True),
    ]
    assert engine.table.matched("r1", 10) == (0, False), "never True with 0"
    step(engine)
    assert engine.table.matched("r1", 0) == (0, False)
    engine.quiet()


def test_the_allocation_after_the_load_begins_no_second_one() -> None:
    engine = begun()
    step(engine)
    engine.table.allocated("r1", engine.requests["r1"].blocks, 0)
    engine.table.allocated("r1", engine.requests["r1"].blocks, 10)
    assert engine.table.take_orders() == []
    engine.quiet()


def test_preempted_after_the_load_the_prompt_is_computed_here() -> None:
    engine = begun()
    step(engine)
    engine.worker.end(1, None)
    engine.worker.release(1)
    step(engine)
    engine.schedule(64)
    engine.preempt(engine.running.pop())
    engine.complete()
    assert engine.table.matched("r1", 0) == (0, False)
    engine.quiet()
    assert engine.ends == {"r1": RequestEnd.LENGTH}


def test_prefill_hears_that_nothing_is_loaded() -> None:
    engine = begun()
    engine.table.allocated("r1", [0, 1, 2], 0)
    (decline,) = engine.table.take_orders()
    assert isinstance(decline, DeclineOrder)
    assert (decline.room, decline.claim) == (RoomKey(77), claim_of(request("r1"), MODEL))
    assert engine.table.matched("r1", 0) == (0, False)


@pytest.mark.parametrize("policy", [RECOMPUTE, FAIL])
def test_a_failed_load_ends_at_once_and_its_blocks_wait_for_their_release(policy: LoadFailurePolicy) -> None:
    engine = begun(policy=policy, blocks=8)
    (order,) = step(engine)
    engine.worker.end(1, LOST)
    step(engine)
    step(engine)
    ended = {"r1": RequestEnd.LENGTH if policy is RECOMPUTE else RequestEnd.ERROR}
    assert engine.ends == ended
    assert not engine.loaded
    assert not engine.requests
    assert [engine.pool.blocks[b].refs for b in order.blocks] == [1, 1, 1], "a peer may still write there"
    engine.worker.write(engine.worker.handoffs[1])
    engine.add(request("r2", 24))
    step(engine)
    assert engine.requests["r2"].status == "WAITING"
    engine.worker.release(1)
    step(engine)
    step(engine)
    assert engine.ends == ended | {"r2": RequestEnd.LENGTH}
    assert engine.table.take_figures().outcomes == {"PEER_LOST": 1}
    engine.quiet()


def test_the_blocks_of_a_failed_load_are_counted_in_quarantine_until_the_release() -> None:
    engine = begun(blocks=8)
    step(engine)
    engine.worker.end(1, LOST)
    step(engine)
    figures = engine.table.take_figures()
    assert (figures.pinned, figures.quarantined, figures.outcomes) == (3, 3, {"PEER_LOST": 1})
    engine.worker.release(1)
    step(engine)
    figures = engine.table.take_figures()
    assert (figures.pinned, figures.quarantined, figures.outcomes) == (0, 0, {})
    engine.quiet()


def test_recompute_uses_other_blocks_before_the_release() -> None:
    engine = begun(blocks=8)
    (order,) = step(engine)
    engine.worker.end(1, LOST)
    step(engine)
    engine.schedule(64)
    assert not set(engine.requests["r1"].blocks) & set(order.blocks)
    engine.quiet()


def test_a_request_that_ends_before_it_has_pages_is_declined() -> None:
    engine = begun()
    engine.abort("r1")
    assert engine.table.has_work(), "the order waits for a step"
    (decline,) = step(engine)
    assert isinstance(decline, DeclineOrder)
    assert decline.error.code is ErrorCode.ABORTED_BY_CLIENT
    assert engine.worker.declined == [decline]
    engine.quiet()


def test_a_request_that_ends_while_it_loads_is_owed_once_and_then_free() -> None:
    engine = begun()
    step(engine)
    engine.abort("r1")
    assert "r1" in engine.requests, "vLLM waits for finished_recving"
    (abort,) = step(engine)
    assert isinstance(abort, AbortOrder)
    assert abort.handoff == 1
    engine.worker.end(1, abort.error)
    step(engine)
    assert "r1" not in engine.requests
    assert len(engine.pool.free) == 13, "pinned until the release"
    engine.worker.release(1)
    engine.quiet()


def test_an_abort_in_the_step_of_the_order_comes_after_it() -> None:
    engine = begun()
    engine.schedule(64)
    engine.abort("r1")
    engine.complete()
    (abort,) = step(engine)
    assert isinstance(abort, AbortOrder)
    engine.quiet(LOST)


def test_an_abort_after_finished_recving_owes_nothing() -> None:
    engine = begun()
    step(engine)
    engine.worker.end(1, None)
    engine.schedule(1)
    engine.complete()
    engine.abort("r1")
    assert not engine.requests
    passed = engine.table.results([], {"r1"})
    assert passed.finished_recving == set()
    engine.worker.release(1)
    engine.quiet()


def test_an_abort_that_meets_the_end_of_the_load_is_reported_once() -> None:
    engine = begun(depth=2)
    step(engine)
    engine.schedule(1)
    engine.schedule(1)
    engine.worker.end(1, None)
    engine.abort("r1")
    engine.complete()
    engine.complete()
    assert not engine.requests
    engine.quiet()


def test_a_failure_of_a_request_that_has_ended_is_no_failure() -> None:
    engine = begun(policy=FAIL)
    step(engine)
    engine.abort("r1")
    passed = engine.table.results([HandoffEnded(1, LOST)], {"r1"}, {"r1"})
    assert (passed.finished_recving, passed.failed_recving) == ({"r1"}, set())


def test_an_id_reaches_vllm_once_and_not_before_its_hand_off_has_ended() -> None:
    engine = begun()
    step(engine)
    assert engine.table.results([], {"r1", "r2"}).finished_recving == set()
    assert engine.table.results([HandoffEnded(1)]).finished_recving == set(), "the worker does not name it"
    assert engine.table.results([], {"r1", "r2"}).finished_recving == {"r1"}
    assert engine.table.results([BlocksReleased(1)], {"r1"}).finished_recving == set()


def test_ids_of_another_connector_reach_vllm() -> None:
    """MultiConnector gives each connector the ids of all."""
    engine = begun()
    step(engine)
    passed = engine.table.results([], {"r1", "loaded", "lost"}, {"lost"}, named=["r1"])
    assert (passed.finished_recving, passed.failed_recving) == ({"loaded", "lost"}, {"lost"})
    assert len(engine.table.take_warnings()) == 1, "r1, whose hand-off has not ended"
    passed = engine.table.results([HandoffEnded(1)], {"r1", "other"}, named=["r1"])
    assert passed.finished_recving == {"r1", "other"}


def test_a_hand_off_that_failed_is_a_failure_whatever_the_worker_names() -> None:
    engine = begun()
    step(engine)
    passed = engine.table.results([HandoffEnded(1, LOST)], {"r1"})
    assert passed.failed_recving == {"r1"}


def test_an_id_that_the_worker_fails_is_a_failure_whatever_it_reports() -> None:
    engine = begun()
    step(engine)
    passed = engine.table.results([HandoffEnded(1)], {"r1"}, {"r1"})
    assert passed.failed_recving == {"r1"}


BAD: list[tuple[Any, dict[str, Any], str]] = [
    ({"do_remote_prefill": True, "typo": 1}, {}, "typo"),
    ({"do_remote_prefill": True}, {}, "segue"),
    (dict(TO_PREFILL), {}, "kv_consumer"),
    (to_decode(tokens=11), {}, "11 tokens"),
    (to_decode(), {"lora_name": "l"}, "LoRA"),
    (CONCURRENT_TO_DECODE | {"remote_bootstrap_addr": "http://10.0.0.1:8998"}, {}, "10.0.0.1"),
]


@pytest.mark.parametrize(("params", "more", "why"), BAD)
def test_a_load_that_cannot_be_made_is_computed_here_under_recompute(
    params: Any, more: dict[str, Any], why: str
) -> None:
    engine = decode_engine(policy=RECOMPUTE)
    engine.add(request("r1", 10, params, **more))
    (warning,) = engine.table.take_warnings()
    assert why in warning
    assert step(engine) == []
    assert engine.ends == {"r1": RequestEnd.LENGTH}
    engine.quiet()


@pytest.mark.parametrize(("params", "more", "why"), BAD)
def test_a_load_that_cannot_be_made_ends_its_request_under_fail(
    params: Any, more: dict[str, Any], why: str
) -> None:
    engine = decode_engine(policy=FAIL)
    engine.add(request("r1", 10, params, **more))
    (refuse,) = step(engine)
    assert isinstance(refuse, RefuseOrder)
    assert why in refuse.error.text
    step(engine)
    assert engine.ends == {"r1": RequestEnd.ERROR}
    assert not engine.worker.handoffs, "nobody was contacted"
    engine.quiet()


def test_a_refused_load_that_is_aborted_is_owed_once() -> None:
    engine = begun({"do_remote_prefill": True}, policy=FAIL)
    engine.schedule(64)
    engine.abort("r1")
    assert engine.table.has_work(), "the order goes with a step that runs"
    engine.complete()
    assert not engine.requests
    engine.quiet()


def test_a_host_that_no_signature_names_is_not_contacted_and_one_warning_is_given() -> None:
    engine = decode_engine(secret=SECRET)
    for number in range(3):
        engine.add(request(f"r{number}", 10, to_decode()))
    (warning,) = engine.table.take_warnings()
    assert "extra_config.peers" in warning
    engine.add(request("signed", 10, to_decode(secret=SECRET)))
    orders = step(engine)
    assert [o.request_id for o in orders] == ["signed"]
    engine.quiet()


def test_the_same_room_again_is_another_attempt() -> None:
    engine = decode_engine()
    for name in ("r1", "r2"):
        engine.add(request(name, 10, to_decode()))
    engine.add(request("r3", 10, to_decode(room=78)))
    assert [o.room for o in step(engine)] == [RoomKey(77), RoomKey(77, attempt=1), RoomKey(78)]
    engine.quiet()


def test_blocks_that_are_not_those_of_the_prompt_are_not_published() -> None:
    for blocks, external in (([0, 1], 10), ([0, 1, 1], 10), ([0, 1, 2], 9)):
        engine = begun()
        engine.table.allocated("r1", blocks, external)
        (order,) = engine.table.take_orders()
        assert isinstance(order, RefuseOrder)
        assert order.error.code is ErrorCode.INTERNAL
        passed = engine.table.results([], {"r1"}, {"r1"})
        assert passed.failed_recving == passed.finished_recving == {"r1"}


def test_vllm_steps_until_the_last_release() -> None:
    engine = begun()
    assert not engine.table.has_work()
    step(engine)
    assert engine.table.has_work()
    engine.abort("r1")
    engine.worker.end(1, LOST)
    step(engine)
    assert engine.table.has_work(), "blocks are pinned"
    engine.worker.release(1)
    step(engine)
    assert not engine.table.has_work()


def test_a_second_request_of_one_id_leaves_the_first_alone() -> None:
    engine = begun()
    step(engine)
    engine.table.new_request(request("r1", 10, to_decode(room=99)))
    assert engine.table.matched("r1", 0) == (0, False)
    engine.quiet()
    assert engine.loaded == ["r1"]
