"""Sides with several ranks: each answers for itself, in any order, late, twice, or never."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest
from test_handoff_transitions import PROMPT, Case, kinds

from segue.kv.errors import ErrorCode, PeerLost
from segue.kv.ids import ChecksumMode, Incarnation, KVPoll, LeaderId, RankId, Role
from segue.kv.protocol import events
from segue.kv.protocol.messages import Drained
from segue.kv.protocol.tally import Fences

COUNTS = [1, 2, 3]
PEER = LeaderId(Incarnation("8" * 32))
#: ranks of prefill and of decode; the pairs are those that share a layer
SIDES = list(itertools.product(COUNTS, COUNTS))


def quarantined(targets: int, *, one_sided: bool = False) -> Case:
    """Decode has published and failed; nothing has answered yet."""
    w = Case(ranks=(1, targets), one_sided=one_sided).waiting()
    w.abort(w.decode, w.r)
    assert w.receiver_state == "QUARANTINED"
    return w


def draining(sources: int, **options: Any) -> Case:
    """Prefill has posted writes of every rank and failed; nothing has answered yet."""
    w = Case(ranks=(sources, 1), **options).in_flight()
    w.abort(w.prefill, w.s)
    assert w.sender_state == "DRAINING"
    return w


def fenced(w: Case, half: Role, rank: int, proven: bool = True) -> list[str]:
    node = w.prefill if half is Role.PREFILL else w.decode
    """A rank answers for each rank that it exchanges bytes with."""
    partners = w.partners(node, rank) if rank in range(len(node.specs)) else [RankId(w.other(node).me)]
    told = [w.tell(node, events.FenceDone(w.transfer, rank, partner, proven)) for partner in partners]
    return [word for effects in told for word in kinds(effects)]


@pytest.mark.parametrize(("sources", "targets"), SIDES)
@pytest.mark.parametrize("mode", ChecksumMode)
def test_a_hand_off_between_any_numbers_of_ranks_moves_every_layer(
    sources: int, targets: int, mode: ChecksumMode
) -> None:
    for seed in range(3):
        w = Case(seed=seed, ranks=(sources, targets), page_tokens=(4, 3), kv_checksum=mode).waiting()
        w.work()  # the world compares every byte of every layer
        assert w.s.phases[-1] is w.r.phases[-1] is KVPoll.SUCCESS
        pairs = {(e.rank, e.target) for _, e in w.log if isinstance(e, events.PostWrite)}
        assert {s for s, _ in pairs} == set(range(sources))
        assert {t for _, t in pairs} == set(range(targets))
        w.come_to_rest()


@pytest.mark.parametrize("ranks", COUNTS)
def test_every_rank_is_granted_fenced_and_asked_by_its_number(ranks: int) -> None:
    w = Case(ranks=(ranks, ranks), kv_checksum=ChecksumMode.FULL).in_flight()
    w.abort(w.prefill, w.s)
    w.abort(w.decode, w.r)
    every = list(range(ranks))
    for kind, side in ((events.Grant, "decode"), (events.Fence, "decode"), (events.Fence, "prefill")):
        assert [e.rank for who, e in w.log if who == f"  {side}" and isinstance(e, kind)] == every
    for asked in (events.PostWrite, events.ComputeChecksum):
        assert [e.rank for who, e in w.log if who == "  prefill" and isinstance(e, asked)] == every


@pytest.mark.parametrize("order", [*itertools.permutations(range(3)), (1, 0), (0, 1), (0,)])
def test_prefill_says_drained_and_releases_when_the_last_rank_has_answered_in_any_order(
    order: tuple[int, ...],
) -> None:
    w = draining(len(order))
    for rank in order[:-1]:
        assert fenced(w, Role.PREFILL, rank) == []
        assert w.sender_state == "DRAINING"
    assert fenced(w, Role.PREFILL, order[-1], proven=False) == ["Drained", "Release"]


@pytest.mark.parametrize("order", [*itertools.permutations(range(3)), (1, 0), (0, 1), (0,)])
@pytest.mark.parametrize("unproven", [None, 0, -1])
def test_decode_releases_when_the_last_rank_has_answered_and_every_answer_was_a_proof(
    order: tuple[int, ...], unproven: int | None
) -> None:
    w = quarantined(len(order), one_sided=True)
    for rank in order[:-1]:
        assert fenced(w, Role.DECODE, rank, proven=unproven is None or rank != order[unproven]) == []
    last = fenced(w, Role.DECODE, order[-1], proven=unproven is None or order[-1] != order[unproven])
    assert last == (["Release"] if unproven is None else [])
    if unproven is not None:
        assert w.decode.exchange.quarantined_pages() == 3
        assert kinds(w.from_prefill(Drained(w.transfer))) == ["Release"]


@pytest.mark.parametrize("proof", ["word", "death"])
def test_no_word_or_death_of_the_peer_replaces_the_answer_of_a_rank_of_our_own(proof: str) -> None:
    w = quarantined(3, one_sided=True)
    assert fenced(w, Role.DECODE, 2, proven=False) == []
    if proof == "word":
        assert kinds(w.from_prefill(Drained(w.transfer))) == []
    else:
        down = events.PeerDown(w.prefill.me, PeerLost("dead").info, dead=True)
        assert kinds(w.tell(w.decode, down)) == []
    assert fenced(w, Role.DECODE, 0, proven=False) == []
    w.now = 1e6
    assert kinds(w.tell(w.decode, events.Tick())) == []
    assert w.decode.exchange.sizes()["quarantined"] == 1, "a rank that never answers keeps them"
    assert fenced(w, Role.DECODE, 1, proven=False) == ["Release"]


@pytest.mark.parametrize("half", [Role.PREFILL, Role.DECODE])
@pytest.mark.parametrize("rank", [-1, 2, 7])
def test_the_answer_of_a_rank_that_was_not_asked_is_late_and_proves_nothing(half: Role, rank: int) -> None:
    w = draining(2) if half is Role.PREFILL else quarantined(2)
    node = w.prefill if half is Role.PREFILL else w.decode
    assert fenced(w, half, rank) == []
    assert fenced(w, half, 0) == []
    assert node.exchange.counters["late_events"] == 1
    assert fenced(w, half, 1)[-1] == "Release"


@pytest.mark.parametrize("half", [Role.PREFILL, Role.DECODE])
@pytest.mark.parametrize("proven", [False, True])
def test_a_rank_that_answers_twice_does_not_answer_for_another_one(half: Role, proven: bool) -> None:
    w = draining(2) if half is Role.PREFILL else quarantined(2)
    node = w.prefill if half is Role.PREFILL else w.decode
    for _ in range(3):
        assert fenced(w, half, 1, proven) == []
    assert node.exchange.counters["late_events"] == 2
    assert fenced(w, half, 0)[-1:] == (["Release"] if proven or half is Role.PREFILL else [])


def test_a_proof_may_come_after_an_answer_that_was_none() -> None:
    one, other = RankId(PEER), RankId(PEER, 1)
    fences = Fences({0: (one,), 4: (one, other)}, PEER)
    assert fences.answer(4, other, False)
    assert not fences.answer(4, other, False)
    assert (fences.waiting, fences.unproven) == ({(0, one), (4, one)}, {(0, one), (4, one), (4, other)})
    assert fences.answer(4, other, True)
    assert not fences.answer(4, other, False), "a proof is not taken back"
    assert not fences.answer(0, other, True), "it was not asked"
    assert (fences.waiting, fences.unproven) == ({(0, one), (4, one)}, {(0, one), (4, one)})


def test_that_ranks_of_our_own_have_answered_is_enough_and_prefill_s_must_be_proven() -> None:
    """Both ends of what is passed on are fenced; the peer's end is not ours."""
    ours = RankId(LeaderId(Incarnation("9" * 32)), 1)
    fences = Fences({0: (RankId(PEER), ours)}, PEER)
    assert fences.answer(0, ours, False)
    assert fences.answer(0, RankId(PEER), True)
    assert (fences.waiting, fences.unproven) == (set(), set())


def test_a_write_of_the_rank_that_has_not_answered_lands_in_quarantine_and_nowhere_else() -> None:
    """Two source ranks, of which one is through: its word alone would free pages under the other's write."""
    w = Case(ranks=(2, 1), one_sided=True).in_flight()
    w.abort(w.prefill, w.s)
    w.deliver(Role.DECODE)
    w.deliver(Role.DECODE)
    assert w.receiver_state == "QUARANTINED"
    while w.answer_fence(w.decode):  # one for each of prefill's ranks
        pass
    w.land(0)
    assert fenced(w, Role.PREFILL, 0) == []
    assert not w.queues[Role.DECODE]
    w.land(0)  # the world fails where a byte lands in pages of nobody
    assert fenced(w, Role.PREFILL, 1) == ["Drained", "Release"]
    w.deliver(Role.DECODE)
    assert w.receiver_state == "-"


@pytest.mark.parametrize("half", [Role.PREFILL, Role.DECODE])
def test_one_rank_s_checksum_is_not_taken_for_another_s(half: Role) -> None:
    """Each answer is for the rank and the tag that were asked, on both sides and whatever else is right."""
    w = Case(ranks=(2, 2), kv_checksum=ChecksumMode.FULL).in_flight()
    node = w.prefill
    if half is Role.DECODE:
        w.send_metadata(w.s)
        w.arrive()
        node = w.decode
    first, second = node.checksums
    assert (first.rank, second.rank) == (0, 1)
    before = node.exchange.counters["late_events"]
    for asked, other in ((first, second), (second, first)):
        answer = events.ChecksumReady(w.transfer, other.rank, asked.tag, 1)
        assert w.tell(node, answer) == []
    assert node.exchange.counters["late_events"] == before + 2
    w.work()
    assert w.s.phases[-1] is w.r.phases[-1] is KVPoll.SUCCESS
    w.come_to_rest()


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_bit_that_flips_at_any_rank_is_seen_and_named(rank: int) -> None:
    w = Case(seed=rank, ranks=(3, 3), kv_checksum=ChecksumMode.FULL).in_flight()
    w.send_metadata(w.s)
    w.arrive()
    assert w.decode.checksums[rank].rank == rank
    w.flip(rank)
    w.settle()
    assert [e.code for e in w.r.errors] == [ErrorCode.CHECKSUM_MISMATCH]
    assert f"ranks {rank} to {rank}" in w.r.errors[0].text
    w.come_to_rest()


@pytest.mark.parametrize("half", [Role.PREFILL, Role.DECODE])
def test_pages_wait_for_the_checksum_of_every_rank(half: Role) -> None:
    w = Case(ranks=(2, 2), kv_checksum=ChecksumMode.FULL).in_flight()
    node, job = w.prefill, w.s
    if half is Role.DECODE:
        w.arrive()
        node, job = w.decode, w.r
    asked = list(node.checksums)
    assert [a.rank for a in asked] == [0, 1]
    w.abort(node, job)
    for rank in (0, 1):
        fenced(w, half, rank)
    right = events.ChecksumReady(w.transfer, 1, asked[1].tag, 1)
    assert w.tell(node, right) == []
    assert w.tell(node, right) == [], "twice by one rank is not once by each"
    assert job.releases == 0
    assert w.tell(node, msgspec.structs.replace(right, rank=0)) == []
    assert kinds(w.tell(node, events.ChecksumReady(w.transfer, 0, asked[0].tag, 1))) == ["Release"]


@pytest.mark.parametrize("broken", [False, True])
def test_a_write_is_of_the_rank_that_was_given_it(broken: bool) -> None:
    w = Case(ranks=(2, 1)).in_flight()
    first, second = (e for _, e in w.log if isinstance(e, events.PostWrite))
    assert (first.rank, second.rank) == (0, 1)
    event: events.Event = events.WriteLanded(w.transfer, 1, first.tag, 0.1)
    if broken:
        event = events.WriteBroken(w.transfer, 1, first.tag, PeerLost("x").info)
    assert w.tell(w.prefill, event) == []
    assert w.prefill.exchange.counters["late_events"] == 1
    assert w.sender_state == "TRANSFERRING"
    assert kinds(w.tell(w.prefill, events.WriteLanded(w.transfer, 1, second.tag, 0.1))) == ["ChunkPosted"]


def test_the_prompt_that_decode_has_already_needs_no_fence_of_prefill() -> None:
    w = Case(ranks=(3, 2)).waiting(prefix=PROMPT)
    w.send_chunk(w.s, PROMPT)
    assert w.sender_state == "ALL_CACHED"
    w.abort(w.prefill, w.s)
    assert w.s.releases == 1
    assert not w.prefill.fences
    w.come_to_rest()


def test_what_is_asked_again_are_fences_without_a_proof_of_the_transport_that_had_the_writes() -> None:
    w = quarantined(2, one_sided=True)
    exchange, peer = w.decode.exchange, w.prefill.me
    used = exchange.machines[w.transfer].transport
    epoch = exchange.machines[w.transfer].epoch
    asked = [events.Fence(w.transfer, rank, RankId(peer), epoch) for rank in (0, 1)]
    assert exchange.unproven_fences(peer, used) == asked, "an answer on its way may say what was known before"
    fenced(w, Role.DECODE, 0, proven=False)
    fenced(w, Role.DECODE, 1, proven=False)
    assert exchange.unproven_fences(peer, used) == asked
    assert exchange.unproven_fences(peer, f"not {used}") == [], "it knows nothing of these writes"
    fenced(w, Role.DECODE, 0)
    assert exchange.unproven_fences(peer, used) == asked[1:]
    assert fenced(w, Role.DECODE, 1) == ["Release"]
    assert exchange.unproven_fences(peer, used) == []
