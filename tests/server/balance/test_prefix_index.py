"""Placement by what prefix caches hold, as their replicas say."""

from __future__ import annotations

from segue.engine.kv_events import Prefixes, page_hashes
from segue.kv.ids import Incarnation, LeaderId
from segue.server.balance.policies import PrefixAware, make_policy
from segue.server.balance.policy import Candidate, PlacementRequest
from segue.server.balance.prefix_index import PrefixIndex
from segue.server.messages.control import Load

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
    assert index.heard(A, said(2, HASHES[:1], (HASHES[3],), cleared=True))
    assert (index.cached([A], PROMPT), index.blocks) == ({A: 16}, 1)
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


def test_the_policy_of_that_name_goes_by_the_index_that_it_is_given() -> None:
    index = PrefixIndex()
    index.heard(A, said(0, []))
    index.heard(B, said(0, HASHES))
    policy = make_policy("prefix_aware", lambda _: 0, index)
    assert policy.choose([Candidate(A), Candidate(B)], PlacementRequest(1, PROMPT)).leader == B


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


def test_what_is_under_way_is_counted_over_all_replicas() -> None:
    """The prompt that was sent first is still computed while one that came later runs elsewhere."""
    index = PrefixIndex()
    policy = PrefixAware(block_tokens=16, index=index)
    for leader in (A, B):
        index.heard(leader, said(0, []))
    first = choose(policy)
    policy.choose([Candidate(A if first == B else B)], PlacementRequest(2, [7] * 64))
    busy = [Candidate(leader, in_flight=1, in_flight_tokens=99 * (leader == first)) for leader in (A, B)]
    assert policy.choose(busy, PlacementRequest(3, PROMPT)).leader == first


def test_a_replica_has_what_it_says_or_was_just_sent_whichever_is_more() -> None:
    index = PrefixIndex()
    policy = PrefixAware(block_tokens=16, index=index)
    index.heard(A, said(0, HASHES))
    index.heard(B, said(0, HASHES[:3]))
    policy.choose([Candidate(A)], PlacementRequest(1, PROMPT[:32]))
    fleet = [Candidate(A, in_flight=1), Candidate(B)]
    assert policy.choose(fleet, PlacementRequest(2, PROMPT)).leader == A
    assert policy.known_tokens == 64


def test_a_replica_that_others_have_filled_is_passed_over_whatever_it_holds() -> None:
    index = PrefixIndex()
    policy = PrefixAware(block_tokens=16, index=index)
    index.heard(A, said(0, HASHES))
    full = Load(dp_rank=0, running=5, waiting=4, tokens=9, pages_free=0, pages_total=9)
    for known in (64, 64):
        assert policy.choose([Candidate(A), Candidate(B)], PlacementRequest(1, PROMPT)).leader == A
        assert policy.known_tokens == known
        assert policy.choose([Candidate(A, load=full), Candidate(B)], PlacementRequest(2, PROMPT)).leader == B
        assert policy.known_tokens < known


def test_pages_are_found_by_prompts_of_their_salt_alone() -> None:
    index = PrefixIndex()
    index.heard(A, Prefixes(seq=0, page_tokens=16, stored=list(page_hashes(PROMPT, 16, 5))))
    index.heard(B, Prefixes(seq=0, page_tokens=16, stored=HASHES))
    assert index.cached([A, B], PROMPT, 5) == {A: len(HASHES) * 16, B: 0}
    assert index.cached([A, B], PROMPT) == {A: 0, B: len(HASHES) * 16}
    assert index.cached([A, B], PROMPT, 6) == {A: 0, B: 0}
