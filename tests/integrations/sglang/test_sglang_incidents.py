"""Incidents of disaggregated serving, each by its number in SGLang's tracker, with doubles of its queues.

A double calls what the queue calls, in its order, and accepts the phases that it accepts.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from sglang_pair import ADDRESS, PAGE, Rank, at_rest, wait_for
from sglang_pair import ranks_end as ranks_end  # a fixture

from segue.integrations.sglang.sglang_handoffs import (
    FENCE_S,
    RankHooks,
    ReceiverHalf,
    SenderHalf,
)
from segue.integrations.sglang.sglang_phases import SglPoll
from segue.integrations.sglang.sglang_pinned import PinnedPages
from segue.kv import DpRanks, KVPoll, Role, new_room

FOLLOW = DpRanks(size=2, load_balance="follow_bootstrap_room")


class BootstrapServer:
    """Which DP rank has which room; answers when it is told to."""

    def __init__(self) -> None:
        self.ranks: dict[int, int] = {}
        self.questions: list[tuple[int, Callable[[int], None]]] = []

    def hooks(self, rank: int = 0) -> RankHooks:
        return RankHooks(
            register=lambda room: self.ranks.__setitem__(room, rank),
            ask=lambda address, room, answer: self.questions.append((room, answer)),
        )

    def answer(self) -> None:
        for room, answer in self.questions:
            if room in self.ranks:
                answer(self.ranks[room])


def hand_over(prefill: Rank, decode: Rank, room: int) -> None:
    """One request of one page from intake to `clear`."""
    sender, receiver = prefill.sender(room, PAGE), decode.receiver(room)
    receiver.init(prefill.row)
    receiver.send_metadata([1], 0, 0)
    wait_for(lambda: sender.poll() is SglPoll.WAITING_FOR_INPUT, receiver.poll)
    sender.init(1, 0)
    sender.send([2])
    wait_for(lambda: receiver.poll() is SglPoll.SUCCESS)
    wait_for(lambda: sender.poll() is SglPoll.SUCCESS)
    sender.clear()
    receiver.clear()


def test_21299_a_receiver_exists_before_its_prefill_rank_is_known() -> None:
    """It is polled in the queue meanwhile, and does not hold the others up."""
    prefill, decode = Rank(Role.PREFILL), Rank(Role.DECODE)
    early = decode.receiver(new_room())
    assert [early.poll() for _ in range(3)] == [SglPoll.BOOTSTRAPPING] * 3
    hand_over(prefill, decode, new_room())
    sender = prefill.sender(early.room, PAGE)
    assert early.poll() is SglPoll.BOOTSTRAPPING
    early.init(prefill.row)
    assert early.poll() is SglPoll.WAITING_FOR_INPUT
    early.send_metadata([3], 0, 0)
    wait_for(lambda: sender.poll() is SglPoll.WAITING_FOR_INPUT, early.poll)
    for half in (sender, early):
        half.abort()
        half.clear()
    at_rest(prefill, decode)


@pytest.mark.slow
@pytest.mark.parametrize("hint", [None, 1])
def test_a_room_on_another_rank_than_decode_infers_ends_on_both_sides(hint: int | None) -> None:
    """The request is on DP rank 0; its room (odd), or its hint, names rank 1."""
    server = BootstrapServer()
    room = new_room() | 1
    true, inferred = [
        Rank(Role.PREFILL, dp=FOLLOW, dp_rank=rank, hooks=server.hooks(rank)) for rank in (0, 1)
    ]
    decode = Rank(Role.DECODE, hooks=server.hooks())
    receiver = decode.receiver(room)
    receiver.init(inferred.row)
    receiver.send_metadata([1], 0, 0)
    sender = true.sender(room, PAGE, hint)
    assert sender.poll() is SglPoll.FAILED
    assert "DP_RANK_CONFLICT: the request is on DP rank 0" in sender.failure().text
    wait_for(lambda: bool(server.questions), receiver.poll)
    server.answer()
    wait_for(lambda: receiver.poll() is SglPoll.FAILED)
    text = receiver.failure().text
    assert "DP_RANK_CONFLICT: the request is on DP rank 0 of prefill, decode looked on DP rank 1" in text
    at_rest(true, inferred, decode)


def test_22901_the_registration_of_a_rank_costs_no_time_to_first_token() -> None:
    """The constructor tells the bootstrap server and does not wait; a rank that decode infers is not told."""
    calls: list[int] = []
    hooks = RankHooks(register=calls.append)
    balanced = Rank(Role.PREFILL, dp=DpRanks(size=2, load_balance="round_robin"), hooks=hooks)
    follows = Rank(Role.PREFILL, dp=FOLLOW, hooks=hooks)
    room, even = new_room(), new_room() & ~1
    assert balanced.sender(room, PAGE).poll() is SglPoll.BOOTSTRAPPING
    assert calls == [room]
    assert follows.sender(even, PAGE).poll() is SglPoll.BOOTSTRAPPING
    assert balanced.sender(even, PAGE, hint=0).poll() is SglPoll.BOOTSTRAPPING
    assert calls == [room]


@pytest.mark.slow
def test_24601_nothing_is_left_after_1000_rooms() -> None:
    prefill, decode = Rank(Role.PREFILL), Rank(Role.DECODE)
    for number in range(1000):
        room = new_room()
        if number % 4:
            sender, receiver = prefill.sender(room, PAGE), decode.receiver(room)
            ends: list[SenderHalf | ReceiverHalf] = [sender, receiver]
            if number % 4 > 1:
                receiver.init(prefill.row)
            if number % 4 > 2:
                receiver.send_metadata([number % 20], 0, 0)
                sender.poll()
            first, second = ends if number % 3 else ends[::-1]
            first.abort()  # SGLang does not clear each aborted sender
            second.clear()
            second.clear()
        else:
            hand_over(prefill, decode, room)
    at_rest(prefill, decode)


def test_a_prefill_that_dies_fails_its_requests_and_its_successor_serves() -> None:
    """A restart at the same bootstrap address, under a new incarnation."""
    forgotten: list[str] = []
    prefill, decode = Rank(Role.PREFILL), Rank(Role.DECODE, hooks=RankHooks(forget=forgotten.append))
    hand_over(prefill, decode, new_room())
    room = new_room()
    sender, receiver = prefill.sender(room, PAGE), decode.receiver(room)
    receiver.init(prefill.row)
    receiver.send_metadata([1], 0, 0)
    wait_for(lambda: sender.poll() is SglPoll.WAITING_FOR_INPUT, receiver.poll)
    prefill.close()
    wait_for(lambda: receiver.poll() is SglPoll.FAILED)
    assert forgotten == [ADDRESS]
    receiver.ensure_abort_notified()
    assert receiver.failure().text
    wait_for(lambda: decode.handoffs.release_safe(room))
    again = Rank(Role.PREFILL)
    hand_over(again, decode, new_room())
    wait_for(lambda: not decode.handoffs.sizes()["replaced_peers"])
    at_rest(decode)


def test_a_prefill_with_another_model_is_refused_with_the_reason() -> None:
    forgotten: list[str] = []
    prefill = Rank(Role.PREFILL, model="a/bfloat16")
    decode = Rank(Role.DECODE, model="b/bfloat16", hooks=RankHooks(forget=forgotten.append))
    receiver = decode.receiver(new_room())
    receiver.init(prefill.row)
    receiver.send_metadata([1], 0, 0)
    wait_for(lambda: receiver.poll() is SglPoll.FAILED)
    assert "different weights" in receiver.failure().text
    assert forgotten == ["127.0.0.1:8998"]
    at_rest(decode)


class Unproven:
    """A failed hand-off whose fence is not answered."""

    released = False
    error = None

    def poll(self) -> KVPoll:
        return KVPoll.FAILED

    def send(self, *args: object, **kwargs: object) -> None: ...

    def abort(self, error: object) -> None: ...

    def clear(self) -> None: ...


class Allocator:
    """SGLang's allocator of pages."""

    page_size = PAGE
    device = "cpu"

    def __init__(self) -> None:
        self.free_pages: list[int] = []

    def free(self, tokens: torch.Tensor) -> None:
        self.free_pages += torch.unique(tokens // PAGE).tolist()

    def free_page_ids(self, pages: torch.Tensor) -> None:
        self.free_pages += pages.tolist()


def unproven_sender(prefill: Rank, pages: list[int]) -> SenderHalf:
    """A sender of pages that nothing proves to be no longer read."""
    sender = prefill.sender(new_room(), len(pages) * PAGE)
    sender.init(len(pages), 0)
    sender.handle = Unproven()  # type: ignore[assignment]
    sender.send(pages)
    return sender


@pytest.mark.parametrize("end", ["deadline", "abort", "another rank"])
def test_pages_that_may_still_be_read_are_kept_from_the_allocator_until_the_proof(end: str) -> None:
    prefill = Rank(Role.PREFILL, bootstrap_s=1.0, waiting_s=1.0)
    allocator = Allocator()
    pinned = PinnedPages(allocator, prefill.handoffs.unproven_pages)
    sender = unproven_sender(prefill, [3, 5, 6])
    assert sender.poll() is SglPoll.TRANSFERRING
    if end == "deadline":
        now = prefill.handoffs.now()
        prefill.handoffs.now = lambda: now + 2.0 + FENCE_S  # type: ignore[method-assign]
        assert sender.poll() is SglPoll.FAILED
    if end == "abort":
        sender.abort()
    else:
        sender.failure()
    assert prefill.handoffs.sizes()["unproven_pages"] == 3
    allocator.free(torch.arange(4 * PAGE, 6 * PAGE))
    allocator.free_page_ids(torch.tensor([3, 7]))
    assert allocator.free_pages == [4, 7]
    pinned.give_back()
    assert (allocator.free_pages, pinned.pages) == ([4, 7], {3, 5})
    sender.handle.released = True  # type: ignore[union-attr]
    prefill.handoffs.settle(sender)
    pinned.give_back()
    assert (allocator.free_pages, pinned.pages) == ([4, 7, 3, 5], set())
    allocator.free(torch.arange(6 * PAGE, 7 * PAGE))
    assert allocator.free_pages[-1] == 6
    assert prefill.handoffs.sizes()["unproven_pages"] == 0


def test_a_client_that_leaves_ends_both_sides() -> None:
    prefill, decode = Rank(Role.PREFILL), Rank(Role.DECODE)
    room = new_room()
    sender, receiver = prefill.sender(room, PAGE), decode.receiver(room)
    receiver.init(prefill.row)
    receiver.send_metadata([1], 0, 0)
    wait_for(lambda: sender.poll() is SglPoll.WAITING_FOR_INPUT, receiver.poll)
    sender.abort()  # SGLang frees prefill's pages without another poll
    sender.clear()
    wait_for(lambda: receiver.poll() is SglPoll.FAILED)
    assert receiver.failure().text == "ABORTED_BY_CLIENT: SGLang aborted the request"
    wait_for(lambda: decode.handoffs.release_safe(room))
    at_rest(prefill, decode)
