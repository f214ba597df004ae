"""The leader's orders and its ranks' words: what ends a replica, and what ends nobody. Ranks are threads."""

import gc
import socket
from dataclasses import replace

import msgspec
import pytest
import torch
from engine_models import GreedySampler, generate, save_model
from rank_threads import RankThreads

from segue.engine.engine_api import SequenceStep, run_step
from segue.engine.parallel import ParallelSize
from segue.engine.ranks.parallel_replica import _carry_out
from segue.engine.ranks.rank_orders import DoneWord, OrderFrame, RankMessage, TellOrder
from segue.engine.request import SamplingParams
from segue.kv.errors import (
    ChecksumMismatch,
    ErrorCode,
    Internal,
    OutOfCapacity,
    PeerLost,
    RankDivergence,
    TransferFailed,
)
from segue.kv.process_link import encode
from segue.kv.ranks.rank_link import RankLink

PROMPT = [5, 9, 33, 7, 21, 60, 2, 2, 90]
STEP = SequenceStep(1, PROMPT, 0, [0], True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.set_num_threads(1)
    return save_model(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture
def pair(folder):
    made = []

    def make(**options):
        made.append(RankThreads(folder, ParallelSize(tp=2), GreedySampler(), **options))
        made[0].engine.open(1, PROMPT, SamplingParams(temperature=0.0))
        return made[0]

    yield make
    made[0].close()


def test_a_listener_that_fails_fails_its_step_and_no_rank(pair, folder):
    made = pair()

    def stored(_):
        raise Internal("a bug in the listener")

    with pytest.raises(Internal, match="in the listener"):
        run_step(made.engine, [STEP], stored)
    (result,) = run_step(made.engine, [STEP])
    assert [result.token] == generate(folder, [PROMPT], 1)[0]
    assert made.lost == []


def test_an_order_that_was_changed_on_the_way_is_found_at_its_step(pair):
    count = 0

    def change_the_third(frame):
        nonlocal count
        count += 1
        if count < 3:
            return frame
        (step,) = frame.order.steps
        other = msgspec.structs.replace(
            frame.order, steps=[SequenceStep(1, [1, *step.tokens[1:]], 0, [0], True)]
        )
        return msgspec.structs.replace(frame, order=other)

    made = pair(between=change_the_third)
    run_step(made.engine, [STEP])
    run_step(made.engine, [STEP])
    with pytest.raises(RankDivergence, match="up to step 3 rank 1 has carried out other orders"):
        run_step(made.engine, [STEP])
    with pytest.raises(RankDivergence, match="step 3"):
        run_step(made.engine, [STEP])
    assert [error.code for error in made.lost] == [ErrorCode.RANK_DIVERGENCE], "it is said once"


def test_an_order_that_is_missing_ends_the_rank(pair):
    frames = iter([False, True])

    def swallow_the_second(frame):
        return msgspec.structs.replace(frame, number=3) if next(frames) else frame

    made = pair(between=swallow_the_second)
    run_step(made.engine, [STEP])
    with pytest.raises(RankDivergence, match="rank 1 failed at step 2: order 3 came where 2 was due"):
        made.engine.copy_out([0])


def test_the_bug_of_another_rank_is_named_and_not_what_the_leader_saw_of_it(pair):
    made = pair(timeout_s=1.0)
    run = made.forwards[1].run

    def broken(packed, stored):
        raise ZeroDivisionError("a bug")

    made.forwards[1].run = broken
    with pytest.raises(Internal, match=r"rank 1 failed at step 1: .*a bug"):
        run_step(made.engine, [STEP])
    made.forwards[1].run = run
    with pytest.raises(Internal, match="rank 1 failed at step 1"):
        made.engine.copy_out([0])
    assert len(made.lost) == 1
    assert len(made.died) == 1


def test_a_rank_that_has_ended_ends_the_next_step(pair):
    made = pair(timeout_s=1.0)
    made.far[0].close()
    with pytest.raises(PeerLost, match="rank 1"):
        run_step(made.engine, [STEP])


def test_copies_are_made_and_given_back_on_every_rank_and_go_with_the_leaders(pair, folder):
    made = pair()
    run_step(made.engine, [STEP])
    before = [forward.pool.by_page[:, :, 0].clone() for forward in made.forwards]
    host = made.engine.copy_out([0])
    assert host.nbytes == sum(part.nbytes for part in before)
    for forward in made.forwards:
        forward.pool.kv.zero_()
    made.engine.copy_in(host, [3])
    for forward, part in zip(made.forwards, before, strict=True):
        assert torch.equal(forward.pool.by_page[:, :, 3], part)
    del host
    gc.collect()
    assert list(made.forward._dropped) == [1]
    made.engine.copy_out([0])
    assert list(made.forward._dropped) == [2]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_copy_that_changed_on_one_rank_fails_alone(pair, rank):
    made = pair()
    run_step(made.engine, [STEP])
    copy_in = made.forwards[rank].copy_in

    def flip(host, pages, *slot):
        host.data.view(torch.uint8).view(-1)[0] ^= 1
        copy_in(host, pages, *slot)

    made.forwards[rank].copy_in = flip
    with pytest.raises(ChecksumMismatch):
        made.engine.copy_in(made.engine.copy_out([0]), [3])
    (result,) = run_step(made.engine, [STEP])
    assert result.error is None
    assert made.lost == []


def test_words_reach_whoever_serves_a_rank_between_two_steps_and_its_refusal_ends_nobody(pair):
    made = pair()
    made.forward.tell(b"one role")
    run_step(made.engine, [STEP])
    made.forward.tell(b"another")
    assert made.told == [b"one role", b"another"]

    made.refuse = OutOfCapacity("no port is free")
    with pytest.raises(OutOfCapacity, match="no port is free"):
        made.forward.tell(b"a third")
    (result,) = run_step(made.engine, [STEP])
    assert result.error is None
    assert made.lost == []


def test_each_rank_signals_the_moments_of_a_step_that_have_come(pair):
    made = pair()
    (result,) = run_step(made.engine, [replace(STEP, ready=((2, 7), (9, 8)))])
    assert result.error is None
    assert made.signals == [7, 8]


@pytest.mark.parametrize(
    ("said", "error"),
    [
        (b"\0\0\0\1\xc1", TransferFailed),
        (encode(DoneWord(1, b"other")), RankDivergence),
        (encode(DoneWord(2, b"other")), RankDivergence),
    ],
)
def test_a_rank_that_says_nonsense_ends_the_replica(pair, said, error):
    made = pair()
    ours, theirs = socket.socketpair()
    theirs.sendall(said)
    link = RankLink(ours, "rank 1", messages=RankMessage)
    made.forward._workers = [link]
    with pytest.raises(error):
        made.engine.copy_out([0])
    link.close()
    theirs.close()


def test_what_the_leader_needs_no_more_goes_before_the_next_order_of_any_kind():
    copies, told = {1: "a", 2: "b", 3: "c"}, []
    frame = OrderFrame(7, TellOrder(b"words"), [1, 3, 9])
    assert _carry_out(frame, 7, None, copies, told.append, None) is None
    assert (copies, told) == ({2: "b"}, [b"words"])
