"""SGLang's senders and receivers over real sessions: each end of a request, seen as its queues see it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from itertools import count
from types import SimpleNamespace

import numpy as np
import pytest
from sglang_pair import ADDRESS, PAGE, PAGES, Rank, agreed, at_rest, wait_for
from sglang_pair import ranks_end as ranks_end  # a fixture

from segue.integrations.prompt_claim import ClaimedPrompt, Media
from segue.integrations.sglang.sglang_handoffs import (
    Intake,
    PrefillRow,
    RankHooks,
    ReceiverHalf,
    SenderHalf,
)
from segue.integrations.sglang.sglang_phases import RoomUses, SglPoll, digest_of
from segue.kv import DpRanks, ErrorCode, KVPoll, Role, RoomKey, TransferFailed, new_room

#: what SGLang's queues accept
BOOTSTRAP = {SglPoll.FAILED, SglPoll.BOOTSTRAPPING, SglPoll.WAITING_FOR_INPUT}
INFLIGHT = {SglPoll.FAILED, SglPoll.WAITING_FOR_INPUT, SglPoll.TRANSFERRING, SglPoll.SUCCESS}


@pytest.fixture
def pair() -> tuple[Rank, Rank]:
    return Rank(Role.PREFILL), Rank(Role.DECODE)


def publish(decode: Rank, receiver: ReceiverHalf, prefill: Rank, pages: list[int], prefix: int = 0) -> None:
    receiver.init(prefill.row)
    assert receiver.poll() is SglPoll.WAITING_FOR_INPUT
    receiver.send_metadata(pages, 1, prefix)


def bootstrap(sender: SenderHalf, receiver: ReceiverHalf, pages: int) -> None:
    """The bootstrap queue, until the sender leaves it."""

    def poll() -> None:
        assert sender.poll() in BOOTSTRAP
        receiver.poll()

    wait_for(lambda: sender.poll() is SglPoll.WAITING_FOR_INPUT, poll)
    sender.init(pages, 2)


def finish(sender: SenderHalf, receiver: ReceiverHalf) -> tuple[SglPoll, SglPoll]:
    def ended() -> bool:
        phases = {sender.poll(), receiver.poll()}
        assert phases <= INFLIGHT
        return phases <= {SglPoll.SUCCESS, SglPoll.FAILED}

    wait_for(ended)
    return sender.poll(), receiver.poll()


@pytest.mark.parametrize(("mla", "on_device"), [(False, False), (True, False), (False, True)])
def test_a_prompt_in_two_chunks_to_scattered_pages(mla: bool, on_device: bool) -> None:
    prefill, decode = (Rank(role, mla=mla, on_device=on_device) for role in (Role.PREFILL, Role.DECODE))
    source, target, room = [3, 4, 9, 1, 20], [7, 2, 3, 11, 12], new_room()
    prefill.compute(source, 1)
    prefill.output_ids[2, 0], prefill.rooms[2, 0] = 4711, room
    sender, receiver = prefill.sender(room, 5 * PAGE - 3), decode.receiver(room, 5 * PAGE - 3)
    assert (sender.poll(), receiver.poll()) == (SglPoll.BOOTSTRAPPING, SglPoll.BOOTSTRAPPING)
    publish(decode, receiver, prefill, target)
    bootstrap(sender, receiver, 5)
    sender.send(source[:2])
    sender.send(source[2:], SimpleNamespace(synchronize=lambda: None))
    assert finish(sender, receiver) == (SglPoll.SUCCESS, SglPoll.SUCCESS)
    assert all(map(np.array_equal, prefill.kv_of(source), decode.kv_of(target)))
    assert (decode.output_ids[1, 0], decode.rooms[1, 0]) == (4711, room)
    assert sender.metric()[1] == 5 * len(prefill.kv) * prefill.kv[0][0].nbytes
    sender.clear()
    receiver.clear()
    at_rest(prefill, decode)


def test_the_prefix_that_decode_has_is_not_sent(pair: tuple[Rank, Rank]) -> None:
    prefill, decode = pair
    room = new_room()
    prefill.compute(range(4), 1)
    sender, receiver = prefill.sender(room, 4 * PAGE), decode.receiver(room, 4 * PAGE)
    publish(decode, receiver, prefill, [8, 9], prefix=2 * PAGE)
    bootstrap(sender, receiver, 4)
    sender.send([0, 1, 2, 3])
    assert finish(sender, receiver) == (SglPoll.SUCCESS, SglPoll.SUCCESS)
    assert all(map(np.array_equal, prefill.kv_of([2, 3]), decode.kv_of([8, 9])))
    assert sender.metric()[1] == 2 * len(prefill.kv) * prefill.kv[0][0].nbytes


def test_decode_aborts_and_gets_its_pages_back_by_proof(pair: tuple[Rank, Rank]) -> None:
    prefill, decode = pair
    room = new_room()
    sender, receiver = prefill.sender(room, 4 * PAGE), decode.receiver(room, 4 * PAGE)
    publish(decode, receiver, prefill, [1, 2, 3, 4])
    bootstrap(sender, receiver, 4)
    sender.send([0, 1])
    receiver.abort()
    assert receiver.poll() is SglPoll.FAILED
    assert receiver.failure().text == "ABORTED_BY_CLIENT: SGLang aborted the request"
    receiver.ensure_abort_notified()
    assert receiver.abort_notified
    wait_for(lambda: decode.handoffs.release_safe(room))
    wait_for(lambda: sender.poll() is SglPoll.FAILED)
    assert sender.failure().text == "ABORTED_BY_CLIENT: SGLang aborted the request"
    at_rest(prefill, decode)


def test_pages_of_a_failed_receiver_are_not_safe_before_the_proof(pair: tuple[Rank, Rank]) -> None:
    prefill, decode = pair
    room = new_room()
    sender, receiver = prefill.sender(room, PAGE), decode.receiver(room)
    publish(decode, receiver, prefill, [1])
    bootstrap(sender, receiver, 1)
    receiver.abort()
    # The proof comes later than this line: it needs prefill's answer.
    assert receiver.handle is not None
    assert decode.handoffs.release_safe(room) == receiver.handle.released
    receiver.failure()
    assert decode.handoffs.release_safe(room) or decode.handoffs.sizes()["halves"] == 1
    wait_for(lambda: decode.handoffs.release_safe(room))
    assert decode.handoffs.release_safe(new_room())
    at_rest(decode)


def test_a_failure_of_prefill_has_the_same_reason_on_both_sides(pair: tuple[Rank, Rank]) -> None:
    prefill, decode = pair
    room = new_room()
    sender, receiver = prefill.sender(room, 4 * PAGE), decode.receiver(room, 4 * PAGE)
    publish(decode, receiver, prefill, [1, 2, 3, 4])
    bootstrap(sender, receiver, 4)
    sender.fail(TransferFailed("ECC error on GPU 3"))
    assert finish(sender, receiver) == (SglPoll.FAILED, SglPoll.FAILED)
    texts = {sender.failure().text, receiver.failure().text}
    assert texts == {"TRANSFER_FAILED: ECC error on GPU 3"}
    at_rest(prefill, decode)


def test_a_senders_failure_is_told_after_its_ranks_fence(pair: tuple[Rank, Rank]) -> None:
    prefill, decode = pair
    room = new_room()
    sender, receiver = prefill.sender(room, 4 * PAGE), decode.receiver(room, 4 * PAGE)
    publish(decode, receiver, prefill, [1, 2, 3, 4])
    bootstrap(sender, receiver, 4)
    sender.send([0, 1])
    sender.fail(TransferFailed("stop"))
    seen = []
    wait_for(lambda: sender.poll() is SglPoll.FAILED, lambda: seen.append(sender.poll()))
    assert sender.released
    assert set(seen) <= {SglPoll.WAITING_FOR_INPUT, SglPoll.TRANSFERRING, SglPoll.FAILED}


def test_a_receiver_that_ends_before_it_has_pages_ends_prefills_room(pair: tuple[Rank, Rank]) -> None:
    """A bootstrap failure that both sides hear (SGLang #24772)."""
    prefill, decode = pair
    room = new_room()
    sender, receiver = prefill.sender(room, PAGE), decode.receiver(room)
    receiver.init(prefill.row)
    wait_for(lambda: decode.handoffs.sizes()["peers"] == 1)
    receiver.abort()
    receiver.clear()
    wait_for(lambda: sender.poll() is SglPoll.FAILED)
    assert sender.failure().text.startswith("ABORTED_BY_CLIENT")
    at_rest(prefill, decode)


@pytest.mark.parametrize("late", [False, True], ids=["prefill waits", "prefill comes later"])
@pytest.mark.parametrize("allocated", [False, True], ids=["no pages", "pages"])
def test_a_receiver_that_ends_before_the_first_session_ends_prefills_room(
    pair: tuple[Rank, Rank], allocated: bool, late: bool
) -> None:
    """Prefill is told over the session that opens later, and does not wait for its bootstrap timeout."""
    prefill, decode = pair
    room = new_room()
    sender = None if late else prefill.sender(room, PAGE)
    receiver = decode.receiver(room)
    receiver.init(prefill.row)
    if allocated:
        receiver.send_metadata([1], 0, 0)
    receiver.abort()
    if sender is None:
        wait_for(lambda: prefill.handoffs.sizes()["peers"] == 1)
        sender = prefill.sender(room, PAGE)
    wait_for(lambda: sender.poll() is SglPoll.FAILED)
    assert sender.failure().text == "ABORTED_BY_CLIENT: SGLang aborted the request"
    at_rest(prefill, decode)


@pytest.mark.parametrize("late", [False, True], ids=["prefill waits", "prefill comes later"])
def test_a_receiver_that_ends_before_its_prefill_rank_is_known_ends_prefills_room(late: bool) -> None:
    """Each DP rank of prefill is told: the room is on any of them, or will be."""
    prefills = [
        Rank(Role.PREFILL, dp=DpRanks(size=2, load_balance="round_robin"), dp_rank=rank) for rank in (0, 1)
    ]

    def ranks(address: str, answer: Callable[[PrefillRow], None]) -> None:
        for prefill in prefills:
            answer(prefill.row)

    decode = Rank(Role.DECODE, hooks=RankHooks(ranks=ranks))
    room = new_room()
    sender = None if late else prefills[1].sender(room, PAGE)
    receiver = decode.receiver(room)
    assert receiver.poll() is SglPoll.BOOTSTRAPPING
    receiver.abort()
    if sender is None:
        wait_for(lambda: all(prefill.handoffs.sizes()["peers"] for prefill in prefills))
        sender = prefills[1].sender(room, PAGE)
    wait_for(lambda: sender.poll() is SglPoll.FAILED)
    assert sender.failure().text == "ABORTED_BY_CLIENT: SGLang aborted the request"


def test_a_room_that_decode_does_not_take_ends_after_sglangs_timeout() -> None:
    prefill = Rank(Role.PREFILL, bootstrap_s=0.05)
    sender = prefill.sender(new_room(), PAGE)
    wait_for(lambda: sender.poll() is SglPoll.FAILED)
    assert "BOOTSTRAP_TIMEOUT" in sender.failure().text
    at_rest(prefill)


def test_a_rank_that_fails_after_another_ones_success_fails_both() -> None:
    """Rank 1 fails after rank 0's SUCCESS: Failed on all ranks of both sides."""
    prefills, decodes = [[Rank(role) for _ in range(2)] for role in (Role.PREFILL, Role.DECODE)]
    room = new_room()
    senders = [rank.sender(room, 2 * PAGE) for rank in prefills]
    receivers = [rank.receiver(room, 2 * PAGE) for rank in decodes]
    for prefill, decode, sender, receiver in zip(prefills, decodes, senders, receivers, strict=True):
        publish(decode, receiver, prefill, [1, 2])
        bootstrap(sender, receiver, 2)
    senders[0].send([3, 4])
    assert finish(senders[0], receivers[0]) == (SglPoll.SUCCESS, SglPoll.SUCCESS)
    senders[1].send([3])
    # Metadata that is late on one rank holds all of them (SGLang #26394).
    assert agreed(receivers) in (SglPoll.WAITING_FOR_INPUT, SglPoll.TRANSFERRING)
    senders[1].fail(TransferFailed("rank 1"))
    for halves in (senders, receivers):
        wait_for(lambda halves=halves: agreed(halves) is SglPoll.FAILED)
        failures = [half.failure() for half in halves]
        assert [failure.from_another_rank for failure in failures] == [True, False]
        assert "rank 1" in failures[1].text
        assert [half.poll() for half in halves] == [SglPoll.FAILED] * 2
    for decode in decodes:
        wait_for(lambda decode=decode: decode.handoffs.release_safe(room))
    at_rest(*prefills, *decodes)


def test_samples_of_one_request_share_a_room(pair: tuple[Rank, Rank]) -> None:
    prefill, decode = pair
    room = new_room()
    senders = [prefill.sender(room, PAGE) for _ in range(3)]
    receivers = [decode.receiver(room) for _ in range(3)]
    for number, (sender, receiver) in enumerate(zip(senders, receivers, strict=True)):
        prefill.compute([number], number)
        publish(decode, receiver, prefill, [10 + number])
        bootstrap(sender, receiver, 1)
        sender.send([number])
    for number, (sender, receiver) in enumerate(zip(senders, receivers, strict=True)):
        assert finish(sender, receiver) == (SglPoll.SUCCESS, SglPoll.SUCCESS)
        assert all(map(np.array_equal, prefill.kv_of([number]), decode.kv_of([10 + number])))
        sender.clear()
        receiver.clear()
    # A rebootstrap: prefill gets the recomputed samples in the other order.
    firsts = [1, 2, 3]  # the tokens so far differ
    receivers = [decode.receiver(room, first=first) for first in firsts]
    senders = [prefill.sender(room, first=first) for first in firsts[::-1]][::-1]
    for number, (sender, receiver) in enumerate(zip(senders, receivers, strict=True)):
        prefill.compute([number], 9 - number)
        publish(decode, receiver, prefill, [10 + number])
        bootstrap(sender, receiver, 1)
        sender.send([number])
    for number, (sender, receiver) in enumerate(zip(senders, receivers, strict=True)):
        assert finish(sender, receiver) == (SglPoll.SUCCESS, SglPoll.SUCCESS)
        assert all(map(np.array_equal, prefill.kv_of([number]), decode.kv_of([10 + number])))


OTHER = {
    "another prompt": {"first": 7},
    "another salt": {"cache_salt": "b"},
    "an adapter": {"lora_name": "a", "lora_weights": "w"},
    "an image": {"media": (Media("hash", 0, 4),)},
}


@pytest.mark.parametrize("used", [False, True], ids=["first use", "later use"])
@pytest.mark.parametrize("other", OTHER)
def test_decode_with_another_prompt_than_prefills_room_ends_both_before_a_byte_moves(
    pair: tuple[Rank, Rank], other: str, used: bool
) -> None:
    prefill, decode = pair
    room = new_room()
    prefill.compute([0, 1], 1)
    if used:
        hand_over(prefill, decode, room)
    before = decode.kv_of(range(PAGES))
    changes = OTHER[other]
    if used and "first" in changes:
        # A later use with other tokens has another name, which may be the same by chance: 1 in 65,535.
        changes = {"first": same_generation(2 * PAGE, 7)}
        sender = prefill.sender(room, 2 * PAGE, first=7)
    else:
        sender = prefill.sender(room, 2 * PAGE)
    receiver = decode.receiver(room, 2 * PAGE, **changes)
    publish(decode, receiver, prefill, [8, 9])
    for half in (receiver, sender):
        wait_for(lambda half=half: half.poll() is SglPoll.FAILED)
        assert half.failure().text.startswith("METADATA_MISMATCH: decode asks for another prompt")
    assert all(map(np.array_equal, decode.kv_of(range(PAGES)), before))
    wait_for(lambda: decode.handoffs.release_safe(room))
    hand_over(prefill, decode, new_room())
    at_rest(prefill, decode)


def hand_over(prefill: Rank, decode: Rank, room: int) -> None:
    sender, receiver = prefill.sender(room, 2 * PAGE), decode.receiver(room, 2 * PAGE)
    publish(decode, receiver, prefill, [8, 9])
    bootstrap(sender, receiver, 2)
    sender.send([0, 1])
    assert finish(sender, receiver) == (SglPoll.SUCCESS, SglPoll.SUCCESS)
    sender.clear()
    receiver.clear()


def same_generation(tokens: int, first: int) -> int:
    """The first token of another prompt whose later use of a room has the same name."""

    def generation(first: int) -> int:
        uses = RoomUses()
        uses.next(1, b"")
        return uses.next(1, digest_of(range(first, first + tokens))).generation

    wanted = generation(first)
    return next(other for other in count(first + 1) if generation(other) == wanted)


UNKNOWN = {
    "no tokens": ({"tokens": ()}, "without prompt tokens"),
    "embeddings": ({"tokens": range(5), "embeds": True}, "a prompt of embeddings"),
    "adapter": ({"tokens": range(5), "lora_name": "a"}, "the weights of LoRA 'a' are not known"),
}


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("unknown", UNKNOWN)
def test_a_prompt_that_has_no_claim_ends_both_halves_at_once(
    pair: tuple[Rank, Rank], unknown: str, side: str
) -> None:
    prefill, decode = pair
    changes, text = UNKNOWN[unknown]
    odd, plain = ClaimedPrompt(**changes), ClaimedPrompt(tokens=changes["tokens"] or range(5))
    room = new_room()
    sender = SenderHalf(prefill.handoffs, room, Intake(odd if side == "prefill" else plain))
    receiver = ReceiverHalf(decode.handoffs, ADDRESS, room, odd if side == "decode" else plain)
    failed = sender if side == "prefill" else receiver
    assert failed.poll() is SglPoll.FAILED
    assert failed.failure().text.startswith("INVALID_REQUEST")
    assert text in failed.failure().text
    if side == "prefill" and changes["tokens"]:  # the other half has another name without tokens
        publish(decode, receiver, prefill, [1])
        wait_for(lambda: receiver.poll() is SglPoll.FAILED)
        assert text in receiver.failure().text


def test_a_decode_without_a_claim_is_refused(pair: tuple[Rank, Rank]) -> None:
    """A segue that cannot make one."""
    prefill, decode = pair
    room = new_room()
    sender = prefill.sender(room)
    manager = decode.handoffs.manager
    manager.add_peer(prefill.row.leader, prefill.row.host, prefill.row.port)
    receiver = manager.receive(RoomKey(room), prefill.row.leader, 1, 20.0, placed=False)
    wait_for(lambda: receiver.poll() is KVPoll.WAITING_FOR_INPUT)
    receiver.publish([1])
    wait_for(lambda: receiver.poll() is KVPoll.FAILED)
    assert receiver.error is not None
    assert receiver.error.code is ErrorCode.METADATA_MISMATCH
    wait_for(lambda: sender.poll() is SglPoll.FAILED)
    assert "METADATA_MISMATCH" in sender.failure().text


def test_nothing_raises_and_nothing_is_left(pair: tuple[Rank, Rank]) -> None:
    prefill, decode = pair
    for room in (0, -1, 2**70, None):
        halves = [SenderHalf(prefill.handoffs, room, None), ReceiverHalf(decode.handoffs, "x", room, None)]
        assert [half.poll() for half in halves] == [SglPoll.FAILED] * 2
        assert all(half.failure().text for half in halves)
    room = new_room()
    sender, receiver = prefill.sender(room, 2 * PAGE), decode.receiver(room, 2 * PAGE)
    publish(decode, receiver, prefill, [1, 2, 3])  # one page more than the prompt has
    for half in (receiver, sender):
        wait_for(lambda half=half: half.poll() is SglPoll.FAILED)
        assert "3 tokens" in half.failure().text
    sender = prefill.sender(new_room(), 2 * PAGE)
    assert sender.poll() is SglPoll.BOOTSTRAPPING
    sender.init(9, 0)
    sender.send([1])
    sender.send([1], SimpleNamespace(synchronize=None))
    wait_for(lambda: sender.poll() is SglPoll.FAILED)
    assert "9 pages of a prompt of 2" in sender.failure().text
    at_rest(prefill, decode)


def test_a_slot_that_does_not_exist_ends_the_request(pair: tuple[Rank, Rank]) -> None:
    prefill, decode = pair
    room = new_room()
    sender, receiver = prefill.sender(room, PAGE), decode.receiver(room)
    publish(decode, receiver, prefill, [1])
    bootstrap(sender, receiver, 1)
    sender.init(1, 99)
    sender.send([0])
    assert finish(sender, receiver) == (SglPoll.FAILED, SglPoll.FAILED)
    assert "metadata slot 99 of 4" in receiver.failure().text


def test_more_sends_wait_for_the_device_than_there_may_be_threads() -> None:
    """SGLang's scheduler would end with an exception. One thread waits for all of them."""
    computed, rank = threading.Event(), Rank(Role.PREFILL)
    try:
        halves = [rank.sender(room, PAGE) for room in range(1, 1101)]
        before = threading.active_count()
        for half in halves:
            half.init(1, 0)
            half.send([0], SimpleNamespace(synchronize=computed.wait))
        assert threading.active_count() == before + 1
        assert {half.poll() for half in halves} == {SglPoll.WAITING_FOR_INPUT}
    finally:
        computed.set()


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_the_end_of_the_io_thread_fails_every_half_at_once(pair: tuple[Rank, Rank], role: Role) -> None:
    """On both sides, with the reason. The pages are kept: nothing proves that they are not used any more."""
    prefill, decode = pair
    sender, receiver = prefill.sender(7, 2 * PAGE), decode.receiver(7, 2 * PAGE)
    publish(decode, receiver, prefill, [3, 4])
    bootstrap(sender, receiver, 2)
    own, other = (sender, receiver) if role is Role.PREFILL else (receiver, sender)
    more = own.handoffs
    young = prefill.sender(8, PAGE) if role is Role.PREFILL else decode.receiver(8)
    sender.send([1])
    more.manager.io.post(sys.exit)  # as a bug of the loop would end it
    for half in (own, young, other):
        wait_for(lambda half=half: half.poll() is SglPoll.FAILED)  # type: ignore[misc]
        assert "the thread of the KV hand-off has ended" in half.failure().text
    late = prefill.sender(9, PAGE) if role is Role.PREFILL else decode.receiver(9)
    assert late.poll() is SglPoll.FAILED
    if role is Role.PREFILL:
        assert more.unproven_pages() == {1}
    else:
        assert not more.release_safe(7)
