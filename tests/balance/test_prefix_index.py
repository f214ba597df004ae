"""Placement by what prefix caches hold, as their replicas say."""

from __future__ import annotations

from segue.balance.base import Candidate, PlacementRequest
from segue.balance.policies import PrefixAware
from segue.balance.prefix_index import PrefixIndex
from segue.core.kv_events import Prefixes, page_hashes
from segue.core.types import Incarnation, LeaderId

A, B, C = (LeaderId(Incarnation(letter * 32)) for letter in "abc")
PROMPT = list(range(64))
HASHES = list(page_hashes(PROMPT, 16))


def said(seq: int, stored: list[int], removed: tuple[int, ...] = (), cleared: bool = False) -> Prefixes:
    return Prefixes(seq=seq, page_tokens=16, stored=stored, removed=list(removed), cleared=cleared)


def test_the_longest_prefix_counts_and_a_page_behind_a_gap_does_not() -> None:
    index = PrefixIndex()
    assert index.heard(A, said(0, HASHES[:2]))
    assert index.heard(B, said(0, [HASHES[0], *HASHES[2:]]))
    small = Prefixes(seq=0, page_tokens=8, stored=list(page_hashes(PROMPT[:56], 8)))
    assert index.heard(C, small)
    assert index.cached([A, B, C], PROMPT) == {A: 32, B: 16, C: 56}
    assert index.cached([A, B], [7, *PROMPT]) == {A: 0, B: 0}
    assert index.cached([LeaderId(A.incarnation, 1)], PROMPT) == {}, "nothing is known, which is not nothing"


def test_changes_are_followed_and_a_lost_one_makes_everything_unknown_until_it_is_told_anew() -> None:
    index = PrefixIndex()
    assert not index.heard(A, said(1, HASHES)), "its beginning is missing"
    assert index.heard(A, said(0, HASHES))
    assert index.heard(A, said(1, [], (HASHES[3], HASHES[2])))
    assert index.cached([A], PROMPT) == {A: 32}
    assert not index.heard(A, said(3, HASHES))
    assert (index.cached([A], PROMPT), index.blocks) == ({}, 0)
    assert index.heard(A, said(0, HASHES[:1]))
    assert index.heard(A, said(1, HASHES[:3], cleared=True))
    assert (index.cached([A], PROMPT), index.blocks) == ({A: 48}, 3)
    index.forget(A)
    index.forget(A)
    assert (index.cached([A], PROMPT), index.blocks) == ({}, 0)


def test_the_index_is_bounded_and_has_room_again_when_something_goes() -> None:
    index = PrefixIndex(max_blocks=3)
    assert index.heard(A, said(0, HASHES[:2]))
    assert index.heard(B, said(0, HASHES))
    assert (index.blocks, index.cached([A, B], PROMPT)) == (3, {A: 32, B: 16})
    assert index.heard(A, said(1, [], tuple(HASHES)))
    assert index.heard(B, said(1, HASHES[1:3]))
    assert (index.blocks, index.cached([A, B], PROMPT)) == (3, {A: 0, B: 48})


def test_a_replica_that_tells_everything_anew_is_counted_once() -> None:
    index = PrefixIndex(max_blocks=4)
    for _ in range(3):
        assert index.heard(A, said(0, HASHES))
        assert (index.blocks, index.cached([A], PROMPT)) == (4, {A: 64})
    index.forget(A)
    assert index.blocks == 0


def choose(policy: PrefixAware, in_flight: int = 0) -> LeaderId:
    candidates = [Candidate(leader, in_flight=in_flight, in_flight_tokens=in_flight) for leader in (A, B)]
    return policy.choose(candidates, PlacementRequest(1, PROMPT)).leader


def test_after_an_eviction_the_replica_that_holds_the_prefix_is_chosen_where_the_guess_is_wrong() -> None:
    guess, index = PrefixAware(block_tokens=16), PrefixIndex()
    policy = PrefixAware(block_tokens=16, index=index)
    for leader in (A, B):
        index.heard(leader, said(0, []))
    first = choose(policy)
    assert choose(guess) == first
    other = B if first == A else A
    # The prefix was evicted where it was sent, and the other one has got it from another frontend.
    index.heard(other, said(1, HASHES[:3]))
    assert choose(guess) == first
    assert choose(policy) == other
    assert policy.known_tokens == 48


def test_what_was_just_sent_counts_until_its_requests_have_ended() -> None:
    index = PrefixIndex()
    policy = PrefixAware(block_tokens=16, index=index)
    for leader in (A, B):
        index.heard(leader, said(0, []))
    first = choose(policy, in_flight=1)
    # It is still computed there: the second one with its prefix goes there, too.
    assert [choose(policy, in_flight=1) for _ in range(3)] == [first] * 3
    # Nothing is in flight, and nobody says that it holds anything: there is no reason to prefer anybody.
    assert {choose(policy) for _ in range(4)} == {A, B}
