"""The order of computation: priorities, tenants by turns, and no starvation."""

from __future__ import annotations

import itertools
import random

import pytest

from segue.engine.request import Request, SamplingParams
from segue.kv.ids import Incarnation, LeaderId
from segue.server.messages.ticket import Ticket
from segue.server.schedulers import fair_queue
from segue.server.schedulers.fair_queue import FairQueue
from segue.server.schedulers.request_state import RequestState

ME = LeaderId(Incarnation("a" * 32))
IDS = itertools.count(1)


def waiting(tokens: int = 10, priority: int = 0, tenant: str = "") -> RequestState:
    number = next(IDS)
    return RequestState(
        origin=Incarnation("f" * 32),
        request=Request(
            request_id=f"r{number}",
            prompt=[0] * tokens,
            sampling=SamplingParams(),
            priority=priority,
            tenant=tenant,
        ),
        ticket=Ticket(room=number, attempt=0, prefill=ME, decode=ME, budget_s=1.0),
        seq_id=number,
        entered=0.0,
        deadline=1.0,
        max_tokens=1,
    )


def queue(*states: RequestState, passed_tokens: int = 10**9) -> FairQueue:
    made = FairQueue(passed_tokens)
    for state in states:
        made.add(state)
    return made


def served(waits: FairQueue, count: int = 10**9) -> list[RequestState]:
    found: list[RequestState] = []
    while len(found) < count and (state := waits.first) is not None:
        waits.start(state)
        found.append(state)
    return found


def test_without_priorities_and_tenants_it_is_the_order_of_arrival() -> None:
    states = [waiting(tokens) for tokens in (30, 1, 500, 2, 2)]
    assert served(queue(*states)) == states


def test_a_lower_priority_is_earlier_and_equals_come_by_arrival() -> None:
    states = [waiting(priority=p) for p in (0, 3, -1, 0, -1)]
    made = queue(*states)
    assert list(made) == [states[i] for i in (2, 4, 0, 3, 1)]
    assert served(made) == [states[i] for i in (2, 4, 0, 3, 1)]


def test_tenants_take_turns_by_tokens_however_many_requests_one_has() -> None:
    many = [waiting(10, tenant="a") for _ in range(8)]
    few = [waiting(20, tenant="b") for _ in range(2)]
    order = served(queue(*many, *few))
    assert [state.request.tenant for state in order] == list("abaabaaaaa")


def test_a_tenant_that_comes_late_begins_where_the_others_are() -> None:
    made = queue(*(waiting(10, tenant="a") for _ in range(6)))
    served(made, 4)
    for _ in range(4):
        made.add(waiting(10, tenant="b"))
    assert [state.request.tenant for state in served(made)] == list("bababb")


def test_a_tenant_that_was_quiet_meanwhile_is_owed_nothing() -> None:
    made = queue(waiting(10, tenant="a"), *(waiting(10, tenant="b") for _ in range(20)))
    served(made, 16)
    for _ in range(5):
        made.add(waiting(10, tenant="a"))
    assert [state.request.tenant for state in served(made)] == list("ababababab")


@pytest.mark.parametrize(("limit", "most"), [(50, 60), (60, 60), (61, 80)])
def test_the_oldest_is_passed_by_no_more_than_the_limit_and_one_prompt(limit: int, most: int) -> None:
    late = waiting(7, priority=5)
    made = queue(late, passed_tokens=limit)
    passed = 0
    while late in made:
        made.add(waiting(20, priority=-1))
        state = made.first
        assert state is not None
        passed += len(state.prompt) if state is not late else 0
        said = made.start(state)
    assert passed == most
    assert f"the oldest, after {most} tokens of others had passed it" in said


@pytest.mark.parametrize("starts", [True, False], ids=["started", "gone"])
def test_once_the_oldest_has_left_priorities_count_again(starts: bool) -> None:
    late = waiting(7, priority=5)
    made = queue(late, passed_tokens=50)
    made.add(waiting(60, priority=-1))
    served(made, 1)
    for priority in (5, -1):
        made.add(waiting(1, priority=priority))
    assert made.first is late
    (made.start if starts else made.remove)(late)
    assert made.first is not None
    assert made.first.request.priority == -1


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("settling", [False, True], ids=["all can start", "some cannot yet"])
def test_everybody_is_started_within_a_bound_of_work_whoever_comes(seed: int, settling: bool) -> None:
    """Counted is the work that was started while a request could have been."""
    rng, limit = random.Random(seed), 60
    made, since, longest = FairQueue(limit), dict[RequestState, list[int]](), 0
    held = set[RequestState]()
    for _ in range(600):
        if rng.random() < 0.55:
            state = waiting(rng.randint(1, 30), rng.choice((-5, -5, 0, 2)), rng.choice("aaaab"))
            since[state] = [len(since), 0]
            made.add(state)
            longest = max(longest, len(state.prompt))
            if settling and rng.random() < 0.3:
                held.add(state)
        elif since and rng.random() < 0.1:
            gone = rng.choice(list(since))
            made.remove(gone)
            del since[gone]
            held.discard(gone)
        elif (first := next((state for state in made if state not in held), None)) is not None:
            made.start(first, lambda state: state not in held)
            del since[first]
            for state, older_work in since.items():
                older_work[1] += 0 if state in held else len(first.prompt)
        if held and rng.random() < 0.05:
            held.discard(rng.choice(sorted(held, key=lambda state: state.seq_id)))
        for older, work in since.values():
            assert work <= (older + 1) * (limit + longest) + older * longest
        assert set(made) == set(since)
        assert len(list(made)) == len(made) == len(since)


def test_a_request_that_cannot_start_keeps_its_count_and_the_next_one_is_passed() -> None:
    stuck, low = waiting(7, priority=5), waiting(7, priority=5)
    made = queue(stuck, low, passed_tokens=30)
    for can_start, passed in ((None, stuck), (None, stuck), (stuck, low), (stuck, low)):
        urgent = waiting(20, priority=-1)
        made.add(urgent)
        if can_start is None:
            made.start(urgent)
        else:
            made.start(urgent, lambda state: state is not stuck)
        assert passed in made
    made.add(waiting(20, priority=-1))
    assert list(made)[:2] == [stuck, low]
    assert made.start(low, lambda state: state is not stuck) == (
        "chosen of 3 waiting, 1 of them older, after 40 tokens of others had passed it"
    )
    assert made.start(stuck) == "chosen of 2 waiting, the oldest, after 40 tokens of others had passed it"


def test_what_is_known_of_tenants_is_bounded_and_forgotten_at_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fair_queue, "MAX_TENANTS", 4)
    made = queue(*(waiting(tenant=str(i)) for i in range(9)))
    assert len(made._ends) == 4
    served(made)
    assert not made._ends
    made.remove(waiting())
    assert made.first is None


def test_of_tenants_the_one_that_came_longest_ago_is_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fair_queue, "MAX_TENANTS", 2)
    made = queue(*(waiting(10, tenant=name) for name in "abcca"))
    # Of c it is known that it was given its part; a, which came before b and c, begins anew.
    assert [state.request.tenant for state in served(made)] == list("abcac")


def test_it_is_said_how_a_request_came_to_its_turn() -> None:
    first, second = waiting(7, priority=1, tenant="a"), waiting(5, priority=0)
    made = queue(first, second)
    assert made.start(second) == "chosen of 2 waiting, 1 of them older; priority 0"
    assert made.start(first) == "chosen of 1 waiting, 0 of them older; priority 1, tenant a"


def test_what_has_passed_the_oldest_counts_anew_for_the_next_one() -> None:
    first, second = waiting(7, priority=5), waiting(7, priority=5)
    made = queue(first, second, passed_tokens=30)
    for _ in range(2):
        made.add(waiting(20, priority=-1))
        served(made, 1)
    assert made.first is first, "40 tokens have passed it"
    made.start(first)
    made.add(waiting(20, priority=-1))
    assert made.first is not second, "the second one was passed by nobody since it is the oldest"
    served(made, 1)
    made.add(waiting(20, priority=-1))
    served(made, 1)
    assert made.first is second


def test_a_tenant_that_comes_late_begins_where_the_farthest_was_though_another_one_s_turn_came_after() -> (
    None
):
    """Among tenants with other priorities one may have begun long before: virtual time does not go back."""
    made = queue(waiting(10, tenant="early", priority=1), waiting(10, tenant="early", priority=1))
    for _ in range(4):
        made.add(waiting(10, tenant="urgent", priority=-1))
    served(made, 5)  # the last of them is an early one, which began at 0
    ahead = waiting(10, tenant="early", priority=1)
    made.add(ahead)
    late = [waiting(10, tenant="late", priority=1) for _ in range(3)]
    for state in late:
        made.add(state)
    assert served(made)[1:3] == [ahead, late[0]], "early is at 20 and 30, late begins at 30 and not at 0"
