import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from segue.kv.errors import ConfigError
from segue.kv.ids import Incarnation, LeaderId
from segue.server.balance.policies import (
    POLICY_NAMES,
    FollowBootstrapRoom,
    PowerOfTwo,
    PrefixAware,
    make_policy,
)
from segue.server.balance.policy import Candidate, PlacementRequest
from segue.server.messages.control import Load


def load(running: int, tokens: int = 0, waiting: int = 0) -> Load:
    return Load(dp_rank=0, running=running, waiting=waiting, tokens=tokens, pages_free=1, pages_total=1)


def candidate(name: str, rank: int = 0, **kw: object) -> Candidate:
    return Candidate(LeaderId(Incarnation(name * 32), rank), **kw)  # type: ignore[arg-type]


@given(
    st.sampled_from(POLICY_NAMES),
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 999)), min_size=1, max_size=6),
    st.integers(1, 2**63 - 1),
    st.lists(st.integers(0, 5), max_size=200),
)
def test_every_policy_chooses_one_of_the_candidates(
    name: str, loads: list[tuple[int, int]], room: int, prompt: list[int]
) -> None:
    candidates = [candidate("abcdef"[i], load=load(r, t)) for i, (r, t) in enumerate(loads)]
    policy = make_policy(name, lambda n: room % n)
    assert policy.choose(candidates, PlacementRequest(room, prompt)) in candidates


def test_an_unknown_policy_is_refused_with_the_names() -> None:
    with pytest.raises(ConfigError, match="round_robin"):
        make_policy("best", lambda n: 0)


def test_round_robin_is_even_and_survives_a_change_of_membership() -> None:
    policy = make_policy("round_robin", lambda n: 0)
    three = [candidate(n) for n in "abc"]
    counts = Counter(policy.choose(three, PlacementRequest(1)).leader.incarnation[0] for _ in range(30))
    assert counts == {"a": 10, "b": 10, "c": 10}
    assert policy.choose(three, PlacementRequest(1)).leader.incarnation[0] == "a"
    assert policy.choose([three[0], three[2]], PlacementRequest(1)).leader.incarnation[0] == "c"
    assert policy.choose([three[0], three[1]], PlacementRequest(1)).leader.incarnation[0] == "a"


def test_follow_bootstrap_room_is_room_modulo_dp_size() -> None:
    ranks = [candidate("a", rank, dp_size=4) for rank in range(4)]
    policy = FollowBootstrapRoom()
    for room in range(1, 50):
        assert policy.choose(ranks, PlacementRequest(room)).leader.dp_rank == room % 4
    # A rank that is gone is not chosen, and the others still serve: each its own rooms as before.
    for room in range(1, 50):
        chosen = policy.choose(ranks[:3], PlacementRequest(room)).leader.dp_rank
        assert chosen == room % 4 or (room % 4 == 3 and chosen < 3)


def test_follow_bootstrap_room_uses_every_rank_of_instances_of_unequal_size() -> None:
    ranks = [candidate("a", rank, dp_size=4) for rank in range(4)]
    ranks += [candidate("b", rank, dp_size=2) for rank in range(2)]
    chosen = {FollowBootstrapRoom().choose(ranks, PlacementRequest(room)).leader for room in range(1, 99)}
    assert len(chosen) == 6


def test_the_least_loaded_is_chosen_by_report_and_by_own_counts() -> None:
    a, b = candidate("a", load=load(3, 10)), candidate("b", load=load(1, 900))
    assert make_policy("total_requests", lambda n: 0).choose([a, b], PlacementRequest(1)) is b
    assert make_policy("total_tokens", lambda n: 0).choose([a, b], PlacementRequest(1)) is a
    # The report is old; five requests were sent since.
    b_busy = candidate("b", load=load(1, 0), in_flight=5, in_flight_tokens=500)
    assert make_policy("total_requests", lambda n: 0).choose([a, b_busy], PlacementRequest(1)) is a
    assert make_policy("total_tokens", lambda n: 0).choose([a, b_busy], PlacementRequest(1)) is a
    # Others have sent there, too.
    a_shared = candidate("a", load=load(3, 900), in_flight=1, in_flight_tokens=10)
    assert make_policy("total_tokens", lambda n: 0).choose([a_shared, b_busy], PlacementRequest(1)) is b_busy


def test_prefix_aware_returns_to_the_prefix_until_it_is_overloaded() -> None:
    policy = PrefixAware(block_tokens=4)
    prompt = list(range(12))
    idle = [candidate(n) for n in "abc"]
    first = policy.choose(idle, PlacementRequest(1, prompt)).leader
    for room in range(2, 6):
        assert policy.choose(idle, PlacementRequest(room, [*prompt, room])).leader == first
    others = {policy.choose(idle, PlacementRequest(9, [100 + i] * 8)).leader for i in range(6)}
    assert len(others) == 3, "prompts without a known prefix are spread"
    busy = [candidate(n, in_flight=50 if c.leader == first else 0) for n, c in zip("abc", idle, strict=True)]
    assert policy.choose(busy, PlacementRequest(7, prompt)).leader != first


def test_prefix_aware_goes_by_the_longest_prefix_that_it_has_sent() -> None:
    policy = PrefixAware(block_tokens=4)
    system, question = [1, 2, 3, 4], [5, 6, 7, 8]
    # Everybody has the system prompt, and only "a" the question after it.
    policy.choose([candidate("a")], PlacementRequest(1, [*system, *question]))
    policy.choose([candidate("b")], PlacementRequest(2, [*system, 9, 9, 9, 9]))
    fleet = [candidate(n) for n in "abc"]
    assert policy.choose(fleet, PlacementRequest(3, [*system, *question, 0])).leader.incarnation[0] == "a"
    assert policy.choose(fleet, PlacementRequest(4, [*system, 9, 9, 9, 9, 0])).leader.incarnation[0] == "b"
    # Of what nobody has whole the longest part counts.
    longer = PlacementRequest(5, [*system, *question, 7, 7, 7, 7])
    assert policy.choose(fleet, longer).leader.incarnation[0] == "a"


def test_prefix_aware_forgets_within_its_bound() -> None:
    policy = PrefixAware(block_tokens=1, max_blocks=10)
    for i in range(50):
        policy.choose([candidate("a")], PlacementRequest(1, [i, i + 1]))
    known = []
    for i in reversed(range(44, 50)):  # each has two blocks
        policy.choose([candidate("a")], PlacementRequest(1, [i, i + 1]))
        known.append(policy.known_tokens)
    assert known == [2, 2, 2, 2, 2, 0]


def test_a_prompt_follows_only_prompts_of_its_salt() -> None:
    policy = PrefixAware(block_tokens=4)
    prompt, both = list(range(8)), [candidate("a"), candidate("b")]
    first = policy.choose(both, PlacementRequest(1, prompt, cache_salt=7)).leader
    assert policy.known_tokens == 0
    assert policy.choose(both, PlacementRequest(2, prompt, cache_salt=7)).leader == first
    assert policy.known_tokens == 8
    for salt in (0, 8):
        policy.choose(both, PlacementRequest(3, prompt, cache_salt=salt))
        assert policy.known_tokens == 0


def test_lesson_23_prefix_hashes_are_equal_in_another_process() -> None:
    code = (
        "from segue.server.balance.policies import PrefixAware\n"
        "print(PrefixAware(block_tokens=4)._hashes(list(range(9))))"
    )
    run = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": s},
            capture_output=True,
            text=True,
            check=True,
        )
        for s in ("1", "2")
    ]
    assert run[0].stdout == run[1].stdout == f"{PrefixAware(block_tokens=4)._hashes(list(range(9)))}\n"


def in_turn(name: str, candidates: list[Candidate], times: int = 4) -> str:
    policy = make_policy(name, lambda n: 0)
    return "".join(policy.choose(candidates, PlacementRequest(1)).leader.incarnation[0] for _ in range(times))


def test_equally_loaded_ones_are_told_apart_by_the_other_measure_and_then_take_turns() -> None:
    few = [
        candidate("a", load=load(2, 90)),
        candidate("b", load=load(2, 10)),
        candidate("c", load=load(3, 1)),
    ]
    assert in_turn("total_requests", few) == "bbbb"
    tokens = [
        candidate("a", load=load(3, 10)),
        candidate("b", load=load(1, 10)),
        candidate("c", load=load(0, 11)),
    ]
    assert in_turn("total_tokens", tokens) == "bbbb"
    equal = [candidate(n, load=load(1, 10)) for n in "abc"]
    for name in ("total_requests", "total_tokens"):
        assert in_turn(name, equal) == "abca"


def test_who_waits_counts_as_who_runs_and_what_we_sent_counts_before_it_is_reported() -> None:
    waits = candidate("a", load=load(1, 5, waiting=3))
    runs = candidate("b", load=load(3, 5))
    assert in_turn("total_requests", [waits, runs], 1) == "b"
    assert (waits.requests, runs.requests) == (4, 3)
    sent = candidate("a", in_flight=2, in_flight_tokens=70)
    assert (sent.requests, sent.tokens) == (2, 70)
    assert in_turn("total_tokens", [sent, candidate("b", load=load(9, 69))], 1) == "b"
    assert in_turn("total_tokens", [sent, candidate("b", load=load(9, 71))], 1) == "a"


def test_two_of_many_are_drawn_each_pair_alike_and_never_one_twice() -> None:
    candidates = [candidate(n, load=load(i)) for i, n in enumerate("abc")]
    drawn: Counter[str] = Counter()
    for first in range(3):
        for second in range(2):
            draws = iter([first, second])
            limits: list[int] = []

            def randbelow(n: int, draws: object = draws, limits: list[int] = limits) -> int:
                limits.append(n)
                return next(draws)  # type: ignore[call-overload, no-any-return]

            chosen = PowerOfTwo(randbelow).choose(candidates, PlacementRequest(1))
            assert limits == [3, 2]
            drawn[chosen.leader.incarnation[0]] += 1
    assert drawn == {"a": 4, "b": 2}, "of each pair the less busy one; c never is"
    tie = [candidate("a", load=load(1, 9)), candidate("b", load=load(1, 3))]
    assert in_turn("power_of_two", tie, 1) == "b"
    assert in_turn("power_of_two", candidates[:1], 1) == "a"


@pytest.mark.parametrize(
    ("least", "busy", "stays"), [(0, 4, True), (0, 5, False), (3, 10, True), (3, 11, False)]
)
def test_a_prefix_keeps_its_replica_up_to_twice_the_least_load_and_a_few(
    least: int, busy: int, stays: bool
) -> None:
    policy = PrefixAware(block_tokens=4)
    prompt = list(range(8))
    first = policy.choose([candidate("a")], PlacementRequest(1, prompt)).leader
    fleet = [candidate("a", in_flight=busy), candidate("b", in_flight=least)]
    chosen = policy.choose(fleet, PlacementRequest(2, prompt)).leader
    assert (chosen == first) is stays
    assert policy.known_tokens == (8 if stays else 0)


def test_a_block_is_known_by_all_that_comes_before_it_and_a_part_of_one_is_not() -> None:
    fleet = [candidate(n) for n in "ab"]
    for prompt, known in (
        ([9, 9, 9, 9, 5, 6, 7, 8], 0),
        ([1, 2, 3], 0),
        ([1, 2, 3, 4, 5, 6, 7], 4),
        ([1, 2, 3, 4, 5, 6, 7, 8, 9], 8),
    ):
        policy = PrefixAware(block_tokens=4)
        policy.choose([candidate("b")], PlacementRequest(1, [1, 2, 3, 4, 5, 6, 7, 8]))
        chosen = policy.choose(fleet, PlacementRequest(2, prompt))
        assert policy.known_tokens == known
        assert (chosen.leader.incarnation[0] == "b") is (known > 0)


def test_a_prefix_that_is_used_is_not_forgotten_for_those_that_are_not() -> None:
    policy = PrefixAware(block_tokens=1, max_blocks=3)
    policy.choose([candidate("b")], PlacementRequest(1, [7]))
    for other in range(20, 30):
        policy.choose([candidate("a")], PlacementRequest(1, [other]))
        chosen = policy.choose([candidate(n) for n in "ab"], PlacementRequest(1, [7]))
        assert (chosen.leader.incarnation[0], policy.known_tokens) == ("b", 1)
