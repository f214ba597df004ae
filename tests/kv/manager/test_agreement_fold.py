"""The agreement of symmetric ranks, without processes: the folds of all ranks run in lockstep."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from agreement_handles import receiver, sender
from hypothesis import given
from hypothesis import strategies as st

from segue.kv import agreement
from segue.kv.agreement import Agreed, Agreement, CallKind, Gather, Least, gated, least_fold, poll_fold
from segue.kv.errors import Internal, OutOfCapacity, PeerLost, RankDivergence, SegueError
from segue.kv.ids import MAX_ROOM, KVPoll

ROOMS = st.integers(1, MAX_ROOM)
PHASES = st.sampled_from(KVPoll)


def lockstep(folds: Sequence[Any]) -> tuple[list[Any], list[Gather | Least]]:
    """The outcome of each rank, a result or an error, and what rank 0 asked for.

    Whatever one rank asks for, all others must ask for, in the same size: anything else ends a process
    of Gloo or has it wait."""
    replies: list[Any] = [None] * len(folds)
    asked: list[Gather | Least] = []
    while True:
        asks, outcomes = [], []
        for fold, reply in zip(folds, replies, strict=True):
            try:
                asks.append(fold.send(reply))
            except StopIteration as done:
                outcomes.append(done.value)
            except SegueError as error:
                outcomes.append(error)
        assert not asks or not outcomes, "some ranks have ended, and others wait for them"
        if outcomes:
            return outcomes, asked
        assert len({(type(ask), len(ask.row)) for ask in asks}) == 1
        assert all(-(2**63) <= value < 2**63 for ask in asks for value in ask.row)
        asked.append(asks[0])
        rows = [list(ask.row) for ask in asks]
        reply = rows if isinstance(asks[0], Gather) else [[min(column) for column in zip(*rows, strict=True)]]
        replies = [reply] * len(folds)


def folded(values: dict[int, int]) -> agreement.Fold[dict[int, int]]:
    return least_fold(1, CallKind.POLL, values)


def shuffled(values: dict[int, Any], seed: int) -> dict[int, Any]:
    return dict(random.Random(seed).sample(list(values.items()), len(values)))


@given(st.dictionaries(ROOMS, st.lists(PHASES, min_size=4, max_size=4), max_size=20), st.integers(1, 4))
def test_each_room_has_the_phase_of_its_slowest_rank_in_whatever_order_the_ranks_hold_them(
    rooms: dict[int, list[KVPoll]], size: int
) -> None:
    folds = [
        poll_fold(1, {room: receiver(room, phases[rank]) for room, phases in shuffled(rooms, rank).items()})
        for rank in range(size)
    ]
    outcomes, _ = lockstep(folds)
    for outcome in outcomes:
        assert {room: agreed.phase for room, agreed in outcome.items()} == {
            room: min(phases[:size]) for room, phases in rooms.items()
        }


@given(st.lists(st.sets(ROOMS, max_size=12), min_size=2, max_size=4))
def test_ranks_that_hold_different_rooms_all_raise_the_same_error_that_says_who_holds_what(
    held: list[set[int]],
) -> None:
    outcomes, _ = lockstep([folded(dict.fromkeys(rooms, 4)) for rooms in held])
    if all(rooms == held[0] for rooms in held):
        assert outcomes == [dict.fromkeys(held[0], 4)] * len(held)
        return
    assert {type(error) for error in outcomes} == {RankDivergence}
    (text,) = {str(error) for error in outcomes}
    common = set.intersection(*held)
    for rank, rooms in enumerate(held):
        alone = ", ".join(map(str, sorted(rooms - common))) or "none"
        assert f"rank {rank} {alone} (of {len(rooms)})" in text


def test_rooms_are_never_matched_by_their_position() -> None:
    """As many rooms on both ranks, in the same places, and one of them another: nothing is reduced."""
    outcomes, asked = lockstep([folded({5: 4, 7: 4}), folded({5: 4, 8: 4})])
    assert [str(error) for error in outcomes] == [
        "the ranks poll different rooms; 1 are common, beside them: rank 0 7 (of 2); rank 1 8 (of 2)"
    ] * 2
    assert not [ask for ask in asked if isinstance(ask, Least)]


def test_the_text_of_a_divergence_is_short_however_many_rooms_differ() -> None:
    held = [set(range(1, 2000)), set(range(2**64 - 3000, 2**64))]
    (first, _), _ = lockstep([folded(dict.fromkeys(rooms, 1)) for rooms in held])
    assert "and 1975 more (of 1999)" in str(first)
    assert len(first.info.text) == len(str(first)) < 2000


def test_a_divergence_names_a_room_of_each_rank_however_many_ranks_there_are() -> None:
    text = str(agreement.divergence([{1, 100 + rank} for rank in range(60)]))
    for rank in range(60):
        assert f"rank {rank} {100 + rank} (of 2)" in text


def test_no_rank_acts_on_kv_whose_metadata_is_not_here() -> None:
    landed = receiver(9, KVPoll.SUCCESS, metadata=False)
    assert gated(landed) is KVPoll.TRANSFERRING
    outcomes, _ = lockstep([poll_fold(1, {9: receiver(9, KVPoll.SUCCESS)}), poll_fold(1, {9: landed})])
    assert outcomes == [{9: Agreed(KVPoll.TRANSFERRING)}] * 2


def test_a_sender_needs_no_metadata() -> None:
    assert gated(sender(9, KVPoll.SUCCESS)) is KVPoll.SUCCESS


def test_a_hand_off_that_failed_on_one_rank_fails_on_all_for_that_ranks_reason() -> None:
    reason = PeerLost("the cable", room=3, origin="prefill").info
    outcomes, _ = lockstep(
        [
            poll_fold(1, {3: receiver(3, KVPoll.SUCCESS), 4: receiver(4, KVPoll.SUCCESS)}),
            poll_fold(1, {4: receiver(4, KVPoll.SUCCESS), 3: receiver(3, KVPoll.FAILED, reason)}),
        ]
    )
    assert outcomes == [{3: Agreed(KVPoll.FAILED, reason), 4: Agreed(KVPoll.SUCCESS)}] * 2


def test_the_first_rank_that_failed_gives_the_reason() -> None:
    one, other = Internal("one").info, Internal("other").info
    folds = [poll_fold(1, {3: receiver(3, KVPoll.FAILED, reason)}) for reason in (one, other)]
    assert lockstep(folds)[0] == [{3: Agreed(KVPoll.FAILED, one)}] * 2


def test_a_failure_always_has_a_reason() -> None:
    outcomes, _ = lockstep([poll_fold(1, {3: receiver(3, KVPoll.FAILED)})])
    assert outcomes[0][3].error.text == "failed without a reason"


def test_reasons_of_many_failures_are_cut_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "MAX_REASON_BYTES", 4000)
    handles = {room: receiver(room, KVPoll.FAILED, Internal("x" * 900).info) for room in range(1, 11)}
    outcomes, _ = lockstep([poll_fold(1, handles)])
    assert {len(agreed.error.text) for agreed in outcomes[0].values()} == {100}


def test_without_rooms_a_rank_still_takes_part() -> None:
    outcomes, asked = lockstep([poll_fold(1, {}), poll_fold(1, {})])
    assert outcomes == [{}, {}]
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("other", "text"),
    [
        ((8, CallKind.POLL), "rank 0 at its call 7 (poll), rank 1 at its call 8 (poll)"),
        ((7, CallKind.RELEASED), "rank 0 at its call 7 (poll), rank 1 at its call 7 (released)"),
    ],
)
def test_ranks_that_make_different_calls_are_told_even_if_their_rooms_are_equal(
    other: tuple[int, CallKind], text: str
) -> None:
    outcomes, asked = lockstep([least_fold(7, CallKind.POLL, {1: 1}), least_fold(*other, {1: 1})])
    assert {type(error) for error in outcomes} == {RankDivergence}
    (said,) = {str(error) for error in outcomes}
    assert text in said
    assert len(asked) == 1


def test_more_rooms_than_can_be_agreed_on_end_the_call_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "MAX_ROOMS", 3)
    full = dict.fromkeys(range(1, 4), 1)
    assert lockstep([folded(full), folded(full)])[0] == [full] * 2
    outcomes, _ = lockstep([folded({1: 1}), folded(dict.fromkeys(range(1, 5), 1))])
    assert {type(error) for error in outcomes} == {OutOfCapacity}
    assert {str(error) for error in outcomes} == {"rank 1 polls 4 rooms at once, at most 3 can be agreed on"}


class Alone:
    """A group of one rank, which says what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.calls: list[int] = []

    def gather(self, row: Sequence[int]) -> list[list[int]]:
        self.asked.append("gather")
        self.calls.append(row[0])
        return [list(row)]

    def least(self, row: Sequence[int]) -> list[int]:
        self.asked.append("least")
        return list(row)


def test_pages_are_the_engines_again_when_every_rank_has_released_them() -> None:
    freed, held = receiver(1, KVPoll.FAILED), receiver(2, KVPoll.FAILED)
    freed.released = True
    group = Alone()
    alone = Agreement(group)
    assert alone.released({1: freed, 2: held}) == {1}
    assert group.asked == ["gather", "least"]
    assert group.calls == [1]
    assert alone.released({}) == set()
    assert alone.poll({}) == {}
    assert alone.released({}) == set()
    assert group.calls == [1, 2, 3, 4], "of both kinds: so a rank that leaves one out is seen at the next"
    assert alone.poll({2: held})[2].phase is KVPoll.FAILED
    outcomes, _ = lockstep([folded({1: True}), folded({1: False})])
    assert outcomes == [{1: False}] * 2
