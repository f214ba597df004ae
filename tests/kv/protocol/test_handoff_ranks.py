"""Sides with several ranks: each answers for itself, in any order, late, twice, or never."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from handoff_world import Case, kinds

from segue.kv.errors import ErrorCode
from segue.kv.ids import ChecksumMode, Incarnation, KVPoll, LeaderId, RankId, Role
from segue.kv.protocol import events
from segue.kv.protocol.tally import Fences

COUNTS = [1, 2, 3]
PEER = LeaderId(Incarnation("8" * 32))
#: ranks of prefill and of decode; the pairs are those that share a layer
SIDES = list(itertools.product(COUNTS, COUNTS))


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
