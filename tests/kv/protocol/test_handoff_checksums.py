"""Checksums in the protocol: who hashes when, what a wrong one does, and what an abort must wait for."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import pytest
from test_handoff_transitions import CLIENT, PROMPT, Case, kinds

from segue.kv.errors import ErrorCode, OutOfCapacity, PeerLost
from segue.kv.ids import ChecksumMode, KVPoll, Role, Span
from segue.kv.protocol import events
from segue.kv.protocol.messages import Abort, ChunkPosted, Committed, Drained
from segue.kv.protocol.sender import SAMPLE_EVERY
from segue.kv.protocol.tally import Tally


def full(**options: Any) -> Case:
    return Case(kv_checksum=ChecksumMode.FULL, **options)


def sent(w: Case) -> Case:
    """Everything is posted, has landed and was announced; decode has the metadata, not yet the chunk."""
    w.waiting()
    w.send_metadata(w.s)
    w.deliver(Role.DECODE)
    w.send_chunk(w.s, PROMPT)
    w.land()
    w.finish()
    w.answer_checksum(w.prefill)
    return w


def verifying(w: Case) -> Case:
    """The chunk is known to decode, and its bytes are being hashed."""
    sent(w)
    w.deliver(Role.DECODE)
    assert len(w.decode.checksums) == 1
    return w


def answer(w: Case, **changes: Any) -> list[events.Effect]:
    """The verification ends, with another checksum than the right one where asked."""
    asked = w.decode.checksums.pop()
    right = next(
        m for side, m in w.log if isinstance(m, events.Received) and isinstance(m.message, ChunkPosted)
    )
    event = events.ChecksumReady(asked.transfer, asked.rank, asked.tag, right.message.checksum)  # type: ignore[attr-defined]
    return w.tell(w.decode, msgspec.structs.replace(event, **changes))


def test_a_verified_hand_off_effect_by_effect() -> None:
    w = full().waiting()
    w.send_metadata(w.s)
    w.deliver(Role.DECODE)
    w.log.clear()
    w.send_chunk(w.s, PROMPT)
    assert kinds([e for side, e in w.log if side == "  prefill"]) == [
        "TRANSFERRING",
        "PostWrite",
        "ComputeChecksum",
    ]  # type: ignore[misc]
    w.land()
    w.finish()
    assert not w.queues[Role.DECODE], "a chunk is announced with its checksum or not at all"
    w.answer_checksum(w.prefill)
    posted = w.queues[Role.DECODE][0][1]
    assert posted.checksum is not None
    assert posted.every == 1
    assert kinds(w.from_prefill(posted)) == ["TRANSFERRING", "ComputeChecksum"]
    assert w.receiver_state == "TRANSFERRING"
    w.queues[Role.DECODE].clear()
    assert kinds(answer(w)) == ["SUCCESS", "Committed", "Fence", "Release"]
    assert kinds(w.from_decode(Committed(w.transfer))) == ["SUCCESS", "Release"]
    w.come_to_rest()


def test_a_checksum_of_zero_is_a_checksum() -> None:
    w = full().waiting()
    w.send_chunk(w.s, PROMPT)
    w.land()
    w.finish()
    w.tell(w.prefill, events.ChecksumReady(w.transfer, 0, w.prefill.checksums.pop().tag, 0))
    posted = w.queues[Role.DECODE][0][1]
    assert posted.checksum == 0
    w.deliver(Role.DECODE)
    w.deliver(Role.DECODE)
    assert w.receiver_state == "TRANSFERRING"
    [asked] = w.decode.checksums
    w.tell(w.decode, events.ChecksumReady(w.transfer, 0, asked.tag, 1))
    assert w.r.errors[0].code is ErrorCode.CHECKSUM_MISMATCH


def test_a_checksum_that_comes_first_waits_for_the_write() -> None:
    w = full().waiting()
    w.send_chunk(w.s, PROMPT)
    w.answer_checksum(w.prefill)
    assert not w.queues[Role.DECODE]
    w.land()
    w.finish()
    assert [type(m).__name__ for _, m in w.queues[Role.DECODE]] == ["ChunkPosted"]


def test_a_wrong_checksum_fails_both_sides_and_says_everything() -> None:
    w = verifying(full())
    effects = answer(w, checksum=0xBAD)
    assert kinds(effects) == ["FAILED", "Failed", "Abort", "Fence", "Quarantined"]
    w.settle()
    (error,) = w.r.errors
    assert w.s.errors == [error]
    assert (error.code, error.retryable) == (ErrorCode.CHECKSUM_MISMATCH, True)
    for word in (f"room {w.transfer.room}", "chunk 0", f"tokens 0 to {PROMPT}", "0000000000000bad"):
        assert word in error.text
    posted = next(
        e.message for _, e in w.log if isinstance(e, events.Send) and isinstance(e.message, ChunkPosted)
    )
    assert f"{posted.checksum:016x}" in error.text
    assert KVPoll.SUCCESS not in (*w.s.phases, *w.r.phases)
    w.come_to_rest()


@pytest.fixture(autouse=True)
def mismatches_on_purpose(monkeypatch: pytest.MonkeyPatch) -> None:
    """The world refuses a mismatch without a flip; here tests make them by hand."""
    init = Case.__init__

    def with_flip(self: Case, **options: Any) -> None:
        init(self, **options)
        self.flipped.add(self.transfer)

    monkeypatch.setattr(Case, "__init__", with_flip)


@pytest.mark.parametrize("first", ["Drained", "ChecksumReady"])
def test_an_abort_while_verifying_keeps_the_pages_until_both_proof_and_reading_are_done(first: str) -> None:
    w = verifying(full(one_sided=True))
    w.abort(w.decode, w.r)
    assert w.receiver_state == "QUARANTINED"
    w.answer_fence(w.decode)
    steps = {
        "Drained": lambda: w.from_prefill(Drained(w.transfer)),
        "ChecksumReady": lambda: answer(w),
    }
    second = "ChecksumReady" if first == "Drained" else "Drained"
    assert kinds(steps[first]()) == []
    assert w.receiver_state == "QUARANTINED"
    assert w.decode.exchange.quarantined_pages() == 3
    assert kinds(steps[second]()) == ["Release"]
    assert w.receiver_state == "-"
    w.come_to_rest()


@pytest.mark.parametrize("wrong", [{"checksum": 1}, {"error": OutOfCapacity("full").info}])
def test_what_a_verification_finds_after_the_end_changes_nothing(wrong: dict[str, Any]) -> None:
    w = verifying(full(one_sided=True))
    w.abort(w.decode, w.r)
    w.answer_fence(w.decode)
    assert kinds(answer(w, **wrong)) == []
    assert [e.code for e in w.r.errors] == [ErrorCode.ABORTED_BY_CLIENT]
    assert kinds(w.from_prefill(Drained(w.transfer))) == ["Release"]


def test_the_peers_death_while_verifying_releases_after_the_reading() -> None:
    w = verifying(full())
    w.crash(Role.PREFILL)
    while w.notice():
        pass
    assert w.receiver_state == "QUARANTINED"
    w.answer_fence(w.decode)
    assert kinds(answer(w)) == ["Release"]
    w.come_to_rest()


def test_a_verdict_nobody_asked_for_is_late_and_belongs_to_nobody() -> None:
    w = verifying(full())
    asked = w.decode.checksums[0]
    late = w.decode.exchange.counters
    assert w.tell(w.decode, events.ChecksumReady(w.transfer, asked.rank, asked.tag + 1, 1)) == []
    assert w.receiver_state == "TRANSFERRING"
    other = msgspec.structs.replace(w.transfer, room=99)
    assert w.tell(w.decode, events.ChecksumReady(other, asked.rank, asked.tag, 1)) == []
    assert kinds(answer(w)) == ["SUCCESS", "Committed", "Fence", "Release"]
    assert w.tell(w.decode, events.ChecksumReady(w.transfer, asked.rank, asked.tag, 1)) == []
    assert late["late_events"] == 3
    assert w.tell(w.prefill, events.ChecksumReady(w.transfer, 0, 7, 1)) == []
    assert w.prefill.exchange.counters["late_events"] == 1


@pytest.mark.parametrize("side", [Role.PREFILL, Role.DECODE])
def test_bytes_that_cannot_be_hashed_fail_the_hand_off_on_both_sides(side: Role) -> None:
    w = full().waiting() if side is Role.PREFILL else verifying(full())
    if side is Role.PREFILL:
        w.send_chunk(w.s, PROMPT)
    node = w.prefill if side is Role.PREFILL else w.decode
    asked = node.checksums.pop()
    w.tell(
        node, events.ChecksumReady(w.transfer, asked.rank, asked.tag, 0, error=OutOfCapacity("too many").info)
    )
    w.settle()
    for job in (w.s, w.r):
        assert [e.code for e in job.errors] == [ErrorCode.OUT_OF_CAPACITY]
        assert side.value in job.errors[0].origin
    w.come_to_rest()


@pytest.mark.parametrize("first", ["FenceDone", "ChecksumReady"])
def test_a_failing_sender_keeps_its_pages_until_nothing_reads_them(first: str) -> None:
    w = full().waiting()
    w.send_chunk(w.s, PROMPT)
    w.abort(w.prefill, w.s)
    assert w.sender_state == "DRAINING"
    fenced, checksum_ready = (
        w.fence_done(w.prefill),
        events.ChecksumReady(w.transfer, 0, w.prefill.checksums.pop().tag, 1),
    )
    if first == "FenceDone":
        assert kinds(w.tell(w.prefill, fenced)) == ["Drained"], "no write runs: the word can be given at once"
        assert w.sender_state == "DRAINED"
        assert kinds(w.tell(w.prefill, fenced)) == []
        assert kinds(w.tell(w.prefill, checksum_ready)) == ["Release"]
    else:
        assert kinds(w.tell(w.prefill, checksum_ready)) == []
        assert kinds(w.tell(w.prefill, fenced)) == ["Drained", "Release"]
    assert w.sender_state == "-"


def test_the_word_that_nothing_writes_is_given_again_while_a_checksum_reads() -> None:
    """It may have gone to a session that had ended: decode would hold its pages for ever."""
    w = full().waiting()
    w.send_chunk(w.s, PROMPT)
    w.abort(w.prefill, w.s)
    assert kinds(w.tell(w.prefill, w.fence_done(w.prefill))) == ["Drained"]
    asked = events.Received(w.decode.me, Abort(w.transfer))
    assert kinds(w.tell(w.prefill, asked)) == ["Drained"]
    assert w.sender_state == "DRAINED", "the checksum still reads"
    lost = events.PeerDown(w.decode.me, PeerLost("cut").info)
    assert kinds(w.tell(w.prefill, lost)) == []
    again = events.PeerUp(w.decode.me, w.plan)
    assert kinds(w.tell(w.prefill, again)) == ["Failed"], "nor may decode wait for its deadline"


def test_each_of_several_chunks_is_verified_before_the_commit_in_any_order() -> None:
    w = full(page_tokens=(4, 3)).waiting()
    for tokens in (3, 3, 4):
        w.send_chunk(w.s, tokens)
    w.send_metadata(w.s)
    while w.land() and w.finish():
        pass
    for index in (2, 1, 0):
        w.answer_checksum(w.prefill, index)
    while w.deliver(Role.DECODE):
        pass
    assert len(w.decode.checksums) == 3
    w.answer_checksum(w.decode, 1)
    w.answer_checksum(w.decode, 1)
    assert w.r.phases[-1] is KVPoll.TRANSFERRING
    w.answer_checksum(w.decode)
    assert w.r.phases[-1] is KVPoll.SUCCESS
    w.come_to_rest()


def test_one_flipped_bit_in_any_chunk_is_seen() -> None:
    for chunk in range(3):
        w = full(seed=chunk).waiting()
        for tokens in (3, 3, 4):
            w.send_chunk(w.s, tokens)
        w.send_metadata(w.s)
        w.arrive()
        w.flip(chunk)
        w.settle()
        assert [e.code for e in w.r.errors] == [ErrorCode.CHECKSUM_MISMATCH]
        assert f"chunk {chunk} " in w.r.errors[0].text
        w.come_to_rest()


def test_the_message_says_how_much_is_covered_and_the_receiver_follows_it() -> None:
    """Prefill's setting decides; decode's own is not even looked at."""
    for mode, every in ((ChecksumMode.FULL, 1), (ChecksumMode.SAMPLED, SAMPLE_EVERY)):
        w = Case(kv_checksum=mode)
        local = w.decode.exchange.local
        w.decode.exchange.local = dataclasses.replace(local, kv_checksum=ChecksumMode.OFF)
        verifying(w)
        (posted,) = [
            e.message for _, e in w.log if isinstance(e, events.Send) and isinstance(e.message, ChunkPosted)
        ]
        assert posted.every == every
        layers = {
            p.offset * w.decode.spec.layer_count // w.decode.spec.nbytes
            for p in w.decode.checksums[0].content.planes
        }
        assert layers == ({0, 1} if mode is ChecksumMode.FULL else {w.transfer.room % 2})
        w.settle()
        assert w.r.phases[-1] is KVPoll.SUCCESS


def test_without_a_checksum_nothing_is_read() -> None:
    w = sent(Case(kv_checksum=ChecksumMode.OFF))
    assert not w.prefill.checksums
    w.settle()
    assert not any(isinstance(e, events.ComputeChecksum) for _, e in w.log)
    assert w.r.phases[-1] is KVPoll.SUCCESS


def test_a_fully_cached_prompt_has_nothing_to_verify() -> None:
    w = full().waiting(prefix=PROMPT)
    w.send_chunk(w.s, PROMPT)
    w.send_metadata(w.s)
    w.settle()
    assert w.s.phases[-1] is KVPoll.SUCCESS
    assert not any(isinstance(e, events.ComputeChecksum) for _, e in w.log)


def test_a_repeated_chunk_is_verified_once() -> None:
    w = sent(full())
    posted = w.queues[Role.DECODE][0][1]
    w.deliver(Role.DECODE)
    assert w.from_prefill(posted) == []
    assert len(w.decode.checksums) == 1


@pytest.mark.parametrize("every", [0, -3])
def test_a_sample_that_makes_no_sense_fails_its_hand_off_only(every: int) -> None:
    w = full().waiting()
    assert kinds(w.from_prefill(w.chunk(checksum=1, every=every)))[0] == "FAILED"
    assert w.r.errors[0].code is ErrorCode.TRANSFER_FAILED


def test_a_sample_of_fewer_layers_than_there_are_is_still_a_sample() -> None:
    w = full().waiting()
    effects = w.from_prefill(w.chunk(checksum=1, every=2**70))
    assert kinds(effects) == ["TRANSFERRING", "ComputeChecksum"]
    w.tell(w.decode, events.EndRoom(w.transfer.received_as, CLIENT))


def test_a_deadline_while_verifying_says_so() -> None:
    w = verifying(full())
    w.now = 61.0
    w.tell(w.decode, events.Tick())
    assert "the verification of chunk 0" in w.r.errors[0].text
    w.come_to_rest()


def test_a_handler_that_breaks_on_a_verdict_leaves_nothing_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object) -> None:
        raise RuntimeError("injected")

    w = verifying(full(one_sided=True))
    with monkeypatch.context() as patch:
        patch.setattr(Tally, "check", broken)
        assert kinds(answer(w))[0] == "FAILED"
    assert w.r.errors[0].code is ErrorCode.INTERNAL
    w.answer_fence(w.decode)
    assert kinds(w.from_prefill(Drained(w.transfer))) == ["Release"]
    w.decode.exchange.counters["internal_errors"] = 0
    w.come_to_rest()


def test_lesson_08_a_doubt_about_bytes_ends_the_request_and_frees_both_sides() -> None:
    """aws-do-eks#84: requests served from blocks that were not theirs, logged and continued."""
    w = sent(full())
    w.deliver(Role.DECODE)
    w.flip()
    w.settle()
    for job in (w.s, w.r):
        assert job.phases[-1] is KVPoll.FAILED
        assert job.errors[0].code is ErrorCode.CHECKSUM_MISMATCH
    w.come_to_rest()


def test_the_final_marker_with_a_span_of_its_own_is_judged_by_its_own_checksum() -> None:
    """A receiver takes each verdict for the chunk it was asked about, whatever came since."""
    w = full().waiting()
    w.from_prefill(w.chunk(span=Span(0, 4), nbytes=4 * 32, final=False, checksum=1))
    w.from_prefill(w.chunk(sequence=1, span=Span(4, PROMPT), nbytes=6 * 32, checksum=2))
    first, second = w.decode.checksums
    assert w.tell(w.decode, events.ChecksumReady(w.transfer, second.rank, second.tag, 2)) == []
    assert kinds(w.tell(w.decode, events.ChecksumReady(w.transfer, first.rank, first.tag, 2)))[0] == "FAILED"
    assert "chunk 0 (tokens 0 to 4" in w.r.errors[0].text
