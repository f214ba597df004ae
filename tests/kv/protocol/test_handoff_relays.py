"""Ranks that hold the same: each byte crosses the wire once, decode passes it on, and success waits for all.
And context parallelism: each source sends its share of a chunk."""

from __future__ import annotations

import pytest
from handoff_world import PROMPT, Case, Side, Sides

from segue.kv.errors import ErrorCode, TransferFailed
from segue.kv.ids import ChecksumMode, KVPoll, RankId, Role, Span
from segue.kv.protocol import events
from segue.kv.protocol.messages import ChunkPosted, Committed, Drained

SIDES: list[Sides] = [
    (1, Side(copies=3)),
    (Side(copies=2), 1),
    (Side(copies=2), Side(copies=2)),
    (2, Side(copies=2)),
    (Side(3, copies=2), Side(2, copies=2)),
    (Side(cp=2), 1),
    (Side(cp=3), Side(copies=2)),
    (Side(2, copies=2, cp=2), Side(3, copies=2)),
]


def all_of(w: Case, kind: type) -> list[events.Effect]:
    return [effect for _, effect in w.log if isinstance(effect, kind)]


@pytest.mark.parametrize("sides", SIDES)
@pytest.mark.parametrize("mode", ChecksumMode)
def test_every_rank_gets_every_byte_and_each_crosses_the_wire_once(sides: Sides, mode: ChecksumMode) -> None:
    for seed in range(3):
        w = Case(seed=seed, ranks=sides, page_tokens=(4, 3), kv_checksum=mode).waiting(prefix=seed)
        w.work()  # the world compares every byte at every rank
        assert w.s.phases[-1] is w.r.phases[-1] is KVPoll.SUCCESS
        wire = sum(b.nbytes for e in all_of(w, events.PostWrite) for b in e.blocks)  # type: ignore[union-attr]
        assert wire == (PROMPT - seed) * w.decode.specs[0].shape.token_bytes
        w.come_to_rest()


def passing_on(mode: ChecksumMode = ChecksumMode.OFF, *, one_sided: bool = False) -> Case:
    """All has landed at rank 0, which passes it on to rank 1 at this moment; the metadata is here."""
    w = Case(ranks=(1, Side(copies=2)), kv_checksum=mode, one_sided=one_sided).in_flight()
    w.send_metadata(w.s)
    w.land()
    w.finish()
    while w.answer_checksum(w.prefill):
        pass
    while w.deliver(Role.DECODE):
        pass
    while w.answer_checksum(w.decode):
        pass
    assert w.receiver_state == "TRANSFERRING"
    assert [(e.rank, e.target) for e in all_of(w, events.Relay)] == [(0, 1)]  # type: ignore[union-attr]
    return w


@pytest.mark.parametrize("mode", [ChecksumMode.OFF, ChecksumMode.FULL])
def test_success_waits_for_what_is_passed_on_and_for_its_checksum(mode: ChecksumMode) -> None:
    w = passing_on(mode)
    w.land()
    assert w.receiver_state == "TRANSFERRING"
    w.finish()
    if mode is ChecksumMode.FULL:
        assert w.receiver_state == "TRANSFERRING"
        assert [asked.rank for asked in w.decode.checksums] == [1]
        w.answer_checksum(w.decode)
    assert w.receiver_state == "-"
    assert w.r.phases[-1] is KVPoll.SUCCESS
    w.come_to_rest()


def test_success_waits_for_an_earlier_chunk_that_is_passed_on_later_than_the_last_one() -> None:
    w = Case(ranks=(1, Side(copies=2))).waiting()
    for tokens in (4, PROMPT - 4):
        w.send_chunk(w.s, tokens)
    w.send_metadata(w.s)
    for _ in range(2):
        w.land()
        w.finish()
    while w.deliver(Role.DECODE):
        pass
    assert len(all_of(w, events.Relay)) == 2
    w.land(1)
    w.finish()
    assert w.receiver_state == "TRANSFERRING", "the first chunk has not come to rank 1"
    w.land()
    w.finish()
    assert w.r.phases[-1] is KVPoll.SUCCESS
    w.come_to_rest()


def test_what_is_missing_names_the_rank_that_was_not_reached() -> None:
    w = passing_on()
    w.advance(100.0)
    assert "without ranks 0 to 1" in w.r.errors[0].text


def test_a_bit_that_flips_where_it_was_passed_on_to_is_seen_and_named() -> None:
    w = passing_on(ChecksumMode.FULL)
    w.land()
    w.finish()
    w.flip()
    w.settle()
    assert w.r.errors[0].code is ErrorCode.CHECKSUM_MISMATCH
    assert "ranks 0 to 1 by 0" in w.r.errors[0].text
    w.come_to_rest()


def test_what_cannot_be_passed_on_ends_the_hand_off_on_both_sides() -> None:
    w = passing_on()
    [relay] = all_of(w, events.Relay)
    error = TransferFailed("the path between two ranks broke").info
    for rank, tag in ((0, relay.tag + 1), (1, relay.tag)):
        assert w.tell(w.decode, events.WriteBroken(w.transfer, rank, tag, error)) == [], "nobody asked for it"
    assert w.receiver_state == "TRANSFERRING"
    w.tell(w.decode, events.WriteBroken(w.transfer, 0, relay.tag, error))
    assert w.receiver_state == "QUARANTINED"
    w.settle()
    assert [job.errors[0].text for job in (w.s, w.r)] == [error.text] * 2
    w.come_to_rest()


@pytest.mark.parametrize("one_sided", [False, True])
def test_pages_wait_until_the_rank_that_passes_on_has_stopped_whatever_the_peer_says(one_sided: bool) -> None:
    w = passing_on(one_sided=one_sided)
    w.abort(w.decode, w.r)
    w.from_prefill(Drained(w.transfer))
    assert w.answer_fence(w.decode), "of rank 1"
    assert not w.answer_fence(w.decode), "rank 0 is still writing to rank 1"
    w.land()  # the world fails where a byte lands in pages of nobody
    assert w.answer_fence(w.decode)
    assert w.receiver_state == "QUARANTINED", "rank 0 has two to answer for"
    assert w.answer_fence(w.decode)
    assert w.receiver_state == "-"
    w.come_to_rest()


def test_every_rank_is_granted_and_fenced_also_where_nothing_crosses_the_wire_to_it() -> None:
    w = passing_on()
    w.abort(w.decode, w.r)
    said = [effect for who, effect in w.log if who == "  decode"]
    assert [e.rank for e in said if isinstance(e, events.Grant)] == [0, 1]
    ours, peer = w.decode.me, RankId(w.prefill.me)
    fenced = [(e.rank, e.partner) for e in said if isinstance(e, events.Fence)]
    assert fenced == [(0, peer), (0, RankId(ours, 1)), (1, RankId(ours, 0))]


def test_a_rank_that_holds_only_what_others_send_takes_no_part() -> None:
    w = Case(ranks=(Side(copies=3), 1), kv_checksum=ChecksumMode.FULL).in_flight()
    w.abort(w.prefill, w.s)
    for kind in (events.PostWrite, events.Fence, events.ComputeChecksum):
        assert {e.rank for who, e in w.log if who == "  prefill" and isinstance(e, kind)} == {0}


def reports(w: Case) -> list[ChunkPosted]:
    """The reports of prefill."""
    received = [event.message for _, event in w.log if isinstance(event, events.Received)]
    return [message for message in received if isinstance(message, ChunkPosted)]


def posted(w: Case, source: int, sequence: int, span: Span, nbytes: int) -> ChunkPosted:
    return w.chunk(source=source, sequence=sequence, span=span, nbytes=nbytes, final=span.end == PROMPT)


@pytest.mark.parametrize("known", [[], [Span(0, 4)]], ids=["the first chunk", "a later one"])
def test_every_place_of_context_parallelism_must_send_its_share_of_the_same_chunks(known: list[Span]) -> None:
    """Each of two shares may be complete by itself, and some token in neither."""
    w = Case(ranks=(Side(cp=2), 1)).waiting()
    token = w.decode.specs[0].shape.token_bytes
    plan = w.decode.exchange.links[w.prefill.me].plan
    at, number = (known[-1].end if known else 0), len(known)
    for source, spans in ((0, [Span(at, 8), Span(8, PROMPT)]), (1, [Span(at, PROMPT)])):
        for sequence, span in enumerate([*known, *spans]):
            w.from_prefill(posted(w, source, sequence, span, len(plan.share(source, span)) * token))
    text = f"chunk {number} covers tokens {at} to {PROMPT}, for other ranks {at} to 8"
    assert text in w.r.errors[0].text


def test_a_place_of_context_parallelism_that_moved_another_share_is_refused() -> None:
    w = Case(ranks=(Side(cp=2), 1)).waiting()
    w.from_prefill(posted(w, 1, 0, Span(0, PROMPT), PROMPT * w.decode.specs[0].shape.token_bytes))
    assert "were planned" in w.r.errors[0].text


def test_a_chunk_of_one_page_is_sent_by_one_place_and_reported_by_all() -> None:
    w = Case(ranks=(Side(cp=2), Side(copies=2)), kv_checksum=ChecksumMode.FULL).waiting()
    w.send_chunk(w.s, 3)
    w.settle()
    assert len(all_of(w, events.PostWrite)) == 1
    assert sorted((m.source, m.nbytes > 0) for m in reports(w)) == [(0, False), (1, True)]
    w.work()
    assert w.r.phases[-1] is KVPoll.SUCCESS
    w.come_to_rest()


def test_a_chunk_that_comes_twice_is_passed_on_once() -> None:
    w = passing_on()
    [again] = reports(w)
    w.from_prefill(again)
    assert len(all_of(w, events.Relay)) == 1
    w.work()
    w.come_to_rest()


def test_prefill_keeps_its_pages_until_all_was_passed_on() -> None:
    w = passing_on()
    assert w.s.releases == 0
    w.land()
    w.finish()
    assert [type(m) for _, m in w.queues[Role.PREFILL]][-1:] == [Committed]
    w.settle()
    assert w.s.releases == 1
