"""Incidents of the field, as far as the protocol alone can show that they cannot happen here."""

from __future__ import annotations

import msgspec
import pytest
from handoff_world import Job, World, expect, receive

from segue.kv.errors import AbortedByClient, ErrorCode, InvalidRequest, PeerLost, TransferFailed
from segue.kv.ids import KVPoll, Role, RoomKey, Span
from segue.kv.protocol import events
from segue.kv.protocol.messages import ChunkPosted, Drained, Failed, HandoffMessage, Metadata

PROMPT = 12


def pair(world: World) -> tuple[Job, Job]:
    transfer = world.new_transfer()
    s, r = world.open_sender(transfer, PROMPT), world.open_receiver(transfer, PROMPT)
    return s, r


def test_lesson_01_a_receiver_exists_at_once_though_its_prefill_is_not_known_yet() -> None:
    w = World()
    w.lose()
    job = w.open_receiver(w.new_transfer(), PROMPT)
    assert job.phases == [KVPoll.BOOTSTRAPPING]
    assert w.decode.exchange.sizes()["transfers"] == 1
    w.connect()
    assert job.phases == [KVPoll.BOOTSTRAPPING, KVPoll.WAITING_FOR_INPUT]
    assert w.decode.exchange.sizes()["transfers"] == 1


def name(job: Job, role: Role) -> RoomKey:
    """The key of this side's half."""
    return job.transfer.sent_as if role is Role.PREFILL else job.transfer.received_as


@pytest.mark.parametrize("metadata_first", [True, False])
def test_lesson_03_no_success_before_both_kv_and_metadata(metadata_first: bool) -> None:
    w = World()
    s, r = pair(w)
    w.publish(r)
    w.settle()
    steps = [lambda: w.send_metadata(s), lambda: w.send_chunk(s, PROMPT)]
    for step in steps if metadata_first else reversed(steps):
        assert r.phases[-1] is not KVPoll.SUCCESS
        assert s.phases[-1] is not KVPoll.SUCCESS
        step()
        w.settle()
    assert r.phases[-1] is s.phases[-1] is KVPoll.SUCCESS
    w.come_to_rest()


def test_lesson_04_a_failed_bootstrap_is_not_overwritten_by_a_later_peer() -> None:
    w = World()
    w.lose()
    job = w.open_receiver(w.new_transfer(), PROMPT)
    w.tell(w.decode, events.PeerDown(w.prefill.me, PeerLost("connection refused").info))
    assert job.phases[-1] is KVPoll.FAILED
    w.connect()
    w.tell(w.decode, events.Publish(job.transfer.received_as, (1, 2, 3), 0))
    assert job.phases == [KVPoll.BOOTSTRAPPING, KVPoll.FAILED]
    assert not w.decode.epochs, "nothing may be granted after a failure"
    assert w.decode.exchange.phase(job.transfer) is KVPoll.FAILED
    w.come_to_rest()


@pytest.mark.slow
def test_lesson_05_every_table_is_empty_after_many_hand_offs_of_every_outcome() -> None:
    w = World(one_sided=True)
    for i in range(200):
        s, r = pair(w)
        w.publish(r)
        w.settle()
        w.send_chunk(s, 5)
        if i % 4 == 1:
            w.abort(w.decode, r)
        elif i % 4 == 2:
            w.abort(w.prefill, s)
        elif i % 4 == 3:
            w.cut()
        w.work()
        w.settle()
    counts = {phase: sum(j.phases[-1] is phase for j in w.decode.jobs.values()) for phase in KVPoll}
    assert counts[KVPoll.SUCCESS] == 50
    assert counts[KVPoll.FAILED] == 150
    w.come_to_rest()  # asserts that all tables are empty and all pages are back


@pytest.mark.parametrize("one_sided", [True, False])
def test_lesson_06_a_late_write_cannot_meet_pages_of_another_request(one_sided: bool) -> None:
    w = World(one_sided=one_sided)
    s, r = pair(w)
    w.publish(r)
    w.settle()
    w.send_chunk(s, PROMPT)
    w.abort(w.decode, r)
    assert r.releases == 0
    w.advance(1e5)  # no time limit replaces a proof
    assert r.releases == 0
    assert w.decode.exchange.quarantined_pages() == 3
    if one_sided:
        w.answer_fence(w.decode)
        assert r.releases == 0, "a transport that cannot stop the write proves nothing"
        while w.deliver(Role.PREFILL):
            pass
        assert not w.answer_fence(w.prefill), "the write is still in flight"
        w.land()  # the world asserts that these pages still belong to this hand-off
        w.answer_fence(w.prefill)
        while w.deliver(Role.DECODE):
            pass
    else:
        w.answer_fence(w.decode)
        assert r.releases == 1
        w.land()  # dropped by its epoch
        assert all(write.cut for write in w.writes)
    assert r.releases == 1
    w.come_to_rest()


def test_lesson_07_pages_of_an_ended_transfer_are_never_granted_again_under_its_epoch() -> None:
    w = World()
    epochs = []
    for _ in range(3):
        s, r = pair(w)
        w.publish(r)
        epoch = max(w.decode.epochs)
        assert w.decode.epochs[epoch]
        w.work()
        assert s.phases[-1] is r.phases[-1] is KVPoll.SUCCESS
        assert not w.decode.epochs[epoch], "a success closes its epoch too"
        epochs.append(epoch)
    assert len(set(epochs)) == 3


def test_lesson_09_a_restarted_peer_fails_the_old_transfers_and_serves_the_next() -> None:
    w = World(one_sided=True)
    old = pair(w)[1]
    w.publish(old)
    w.crash(Role.PREFILL)
    w.settle()
    assert old.phases[-1] is KVPoll.FAILED
    assert old.releases == 1
    w.connect()
    s, r = pair(w)
    w.work()
    assert s.phases[-1] is r.phases[-1] is KVPoll.SUCCESS
    w.come_to_rest()


@pytest.mark.parametrize("failing", [Role.PREFILL, Role.DECODE])
def test_lesson_10_the_peer_learns_of_a_failure_with_the_next_message(failing: Role) -> None:
    w = World()
    s, r = pair(w)
    w.publish(r)
    w.settle()
    w.send_chunk(s, 5)
    node, job, other = (w.prefill, s, r) if failing is Role.PREFILL else (w.decode, r, s)
    error = TransferFailed("the model crashed").info
    w.tell(node, events.EndRoom(name(job, failing), error))
    w.deliver(w.other(node).role)
    assert other.phases[-1] is KVPoll.FAILED
    assert other.errors == job.errors, "one root cause, carried unchanged"
    assert other.errors[0].origin == node.exchange.local.origin
    w.come_to_rest()


@pytest.mark.parametrize("failing", [Role.PREFILL, Role.DECODE])
def test_lesson_10_even_if_the_other_half_is_opened_later(failing: Role) -> None:
    w = World()
    transfer = w.new_transfer()
    if failing is Role.PREFILL:
        first, node = w.open_sender(transfer, PROMPT), w.prefill
    else:
        first, node = w.open_receiver(transfer, PROMPT), w.decode
    w.tell(node, events.EndRoom(name(first, failing), AbortedByClient("closed").info))
    w.settle()
    second = (w.open_receiver if failing is Role.PREFILL else w.open_sender)(transfer, PROMPT)
    assert second.phases == [KVPoll.BOOTSTRAPPING, KVPoll.FAILED]
    assert second.errors == first.errors
    assert second.errors[0].code is ErrorCode.ABORTED_BY_CLIENT
    w.come_to_rest()


def test_lesson_14_metadata_is_one_message_that_names_its_transfer() -> None:
    """Many hand-offs at once, their metadata mixed: each gets its own, a foreign one is refused."""
    w = World()
    pairs = [pair(w) for _ in range(6)]
    for _, r in pairs:
        w.publish(r)
    w.settle()
    for s, _ in reversed(pairs):
        w.send_metadata(s)
    for s, _ in pairs:
        w.send_chunk(s, PROMPT)
    w.settle()
    ends = [e for _, e in w.log if isinstance(e, events.Phase) and e.metadata is not None]
    assert len(ends) == 6
    for end in ends:
        assert end.metadata == str(end.key.room).encode()
    wire = msgspec.msgpack.encode(Metadata(transfer=pairs[0][0].transfer, prompt_tokens=1, content=b"2"))
    assert msgspec.msgpack.decode(wire, type=HandoffMessage).transfer == pairs[0][0].transfer


def test_invariant_19_every_single_lost_message_fails_nobody_who_had_finished() -> None:
    """A loss is a broken session. Cut it before each message of a whole hand-off in turn."""
    for cut_at in range(12):
        w = World(one_sided=True)
        s, r = pair(w)
        count = 0
        for _ in range(60):
            if count == cut_at:
                w.cut()
                count += 1
            moved = w.publish(r)
            for role in (Role.PREFILL, Role.DECODE):
                if count != cut_at and w.deliver(role):
                    moved, count = True, count + 1
            moved = w.send_chunk(s, 7) or w.send_metadata(s) or w.land() or w.finish() or moved
            if not moved:
                break
        finished = [job for job in (s, r) if job.phases[-1] is KVPoll.SUCCESS]
        w.come_to_rest()
        assert all(job.phases[-1] is KVPoll.SUCCESS for job in finished)
        if s.phases[-1] is KVPoll.SUCCESS:
            assert r.phases[-1] is KVPoll.SUCCESS, "prefill may only succeed after decode did"


def test_lesson_21_samples_that_share_a_room_are_refused_and_an_attempt_is_another_transfer() -> None:
    w = World()
    s, r = pair(w)
    retry = msgspec.structs.replace(s.transfer, attempt=1)
    for node, event in (
        (w.prefill, expect(s.transfer, PROMPT, 60.0)),
        (w.decode, receive(s.transfer, PROMPT, 60.0)),
        # Prefill keeps one room for all attempts: another attempt is no second request.
        (w.prefill, expect(retry, PROMPT, 60.0)),
    ):
        with pytest.raises(InvalidRequest, match="a room of its own"):
            node.exchange.handle(event, w.now)
    again = w.open_receiver(retry, PROMPT)
    assert again.phases[-1] is KVPoll.WAITING_FOR_INPUT, "decode numbers them"
    w.work()
    assert {job.phases[-1] for job in (s, r)} == {KVPoll.SUCCESS}
    assert again.phases[-1] is KVPoll.FAILED, "and only one may have the room"
    w.come_to_rest()


def test_an_ordinal_or_a_generation_is_another_room() -> None:
    w = World()
    s, r = pair(w)
    others = [
        msgspec.structs.replace(s.transfer, ordinal=1),
        msgspec.structs.replace(s.transfer, generation=1),
    ]
    jobs = [opened(t, PROMPT) for t in others for opened in (w.open_sender, w.open_receiver)]
    w.work()
    assert {job.phases[-1] for job in (s, r, *jobs) if job} == {KVPoll.SUCCESS}
    w.come_to_rest()


def test_no_message_for_a_finished_transfer_starts_an_endless_exchange() -> None:
    """After any repeated message the two sides fall silent again."""
    w = World()
    s, r = pair(w)
    w.work()
    transfer = s.transfer
    chunk = ChunkPosted(
        transfer=transfer, source=0, target=0, sequence=0, span=Span(0, 1), nbytes=32, final=False
    )
    error = TransferFailed("late").info
    for role, message in (
        (Role.DECODE, chunk),
        (Role.DECODE, Failed(transfer, error)),
        (Role.DECODE, Drained(transfer)),
        (Role.PREFILL, Failed(transfer, error)),
    ):
        sender = w.prefill if role is Role.DECODE else w.decode
        w.queues[role].append((sender.me, message))
        for _ in range(4):
            w.deliver(Role.PREFILL)
            w.deliver(Role.DECODE)
        assert not any(w.queues.values())
    assert s.phases[-1] is r.phases[-1] is KVPoll.SUCCESS
