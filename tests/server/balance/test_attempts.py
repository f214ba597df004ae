"""The steps after a failed attempt, decided without a network."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from segue.engine.request import Output, Request, SamplingParams, Usage
from segue.kv.errors import (
    BootstrapUnreachable,
    Draining,
    ErrorInfo,
    Internal,
    OutOfCapacity,
    PeerLost,
    SegueError,
    TransferFailed,
)
from segue.kv.ids import Incarnation, LeaderId
from segue.server.balance.attempts import Attempts, Next
from segue.server.balance.policies import make_policy
from segue.server.balance.policy import Candidate, PlacementRequest
from segue.server.settings.shared_config import MAX_ATTEMPTS

P1, P2, D1, D2, U = (LeaderId(Incarnation(c * 32)) for c in "abdef")
REQUEST = Request(
    request_id="r", prompt=[1, 2, 3], sampling=SamplingParams(max_tokens=9, seed=7, prompt_logprobs=2)
)


def attempts(limit: int = MAX_ATTEMPTS) -> Attempts:
    made = Attempts(REQUEST, limit)
    made.begin(P1, D1)
    return made


def said(error: SegueError, origin: str = "", peer: str = "") -> ErrorInfo:
    return error.at(origin=origin, peer=peer).info


def name(role: str, leader: LeaderId) -> str:
    return f"{role} {leader.incarnation[:8]} dp{leader.dp_rank}"


def token(position: int, **more: object) -> Output:
    return Output(request_id="x", position=position, token_ids=[position], **more)  # type: ignore[arg-type]


def test_the_first_attempt_is_the_request_itself() -> None:
    made = Attempts(REQUEST)
    assert made.begin(P1, D1) is REQUEST
    assert (made.number, made.delivered, made.continuing) == (0, False, False)


def test_a_prefill_replica_that_failed_is_not_kept_whoever_names_it() -> None:
    made = attempts()
    assert made.kv_holder == P1
    made.failed(said(OutOfCapacity("full")), LeaderId(P1.incarnation, P1.dp_rank))
    assert made.kv_holder is None


def test_each_attempt_has_an_id_of_its_own() -> None:
    """A worker may still be ending the one before under its id."""
    made = Attempts(REQUEST, limit=4)
    assert len({made.begin(P1, D1).request_id for _ in range(4)}) == 4


@pytest.mark.parametrize("given", range(4))
def test_the_next_attempt_is_given_every_token_and_the_same_sampling(given: int) -> None:
    made = attempts()
    for i in range(given):
        made.arrived(token(i))
    follows = made.failed(PeerLost("gone").info, D1)
    assert follows is (Next.CONTINUE if given else Next.PLACE_AGAIN)
    again = made.begin(P1, D2)
    assert again.output == list(range(given))
    assert (again.prompt, again.request_id) == ([1, 2, 3], "r~1")
    assert again.sampling.seed == 7
    assert again.sampling.prompt_logprobs == (None if given else 2)
    assert made.continuing == bool(given)


def test_tokens_that_come_later_do_not_change_the_request_that_was_sent() -> None:
    """It waits to be encoded, or in a simulator's queue, while another output comes."""
    made = attempts()
    made.arrived(token(0))
    made.failed(PeerLost("gone").info, D1)
    again = made.begin(P1, D2)
    made.arrived(token(1))
    assert (again.output, made.output) == ([0], [0, 1])


def test_a_request_that_comes_with_output_goes_on_after_it_and_has_been_given_nothing_yet() -> None:
    made = Attempts(replace(REQUEST, output=[8, 9]))
    assert made.begin(P1, D1).output == [8, 9]
    assert (made.delivered, made.continuing) == (False, False)
    assert made.failed(PeerLost("gone").info, D1) is Next.PLACE_AGAIN, "nothing was sent: no continuation"
    again = made.begin(P1, D2)
    assert (again.output, again.sampling.prompt_logprobs) == ([8, 9], 2)
    usage = Usage(prompt_tokens=3, computed=3)
    shown = made.arrived(token(2, usage=usage, timeline={"queue": 1.0}))
    assert (shown.usage, shown.timeline) == (usage, {"queue": 1.0})
    assert (made.output, made.delivered) == ([8, 9, 2], True)


def test_usage_and_timeline_are_those_of_the_first_attempt() -> None:
    made = attempts()
    first = Usage(prompt_tokens=3, computed=3)
    assert made.arrived(token(0, usage=first, timeline={"queue": 1.0})).timeline == {"queue": 1.0}
    made.failed(PeerLost("gone").info, D1)
    made.begin(P1, D2)
    again = Usage(prompt_tokens=3, prefill_cached=3, output_tokens=2)
    shown = made.arrived(token(1, usage=again, timeline={"queue": 9.0}))
    assert (shown.request_id, shown.timeline) == ("r", {})
    assert shown.usage == Usage(prompt_tokens=3, computed=3, output_tokens=2)


@pytest.mark.parametrize("position", [0, 2])
def test_a_token_that_was_lost_or_repeated_is_an_error(position: int) -> None:
    made = attempts()
    made.arrived(token(0))
    with pytest.raises(Internal, match=f"begins at token {position} where 1"):
        made.arrived(token(position))
    assert made.output == [0]


def test_the_bound_holds_whatever_happens() -> None:
    made = Attempts(REQUEST, limit=3)
    follows = []
    for i in range(3):
        made.begin(P1, D1)
        made.arrived(token(i))
        follows.append(made.failed(PeerLost("gone").info, D1))
    assert follows == [Next.CONTINUE, Next.CONTINUE, Next.END]
    with pytest.raises(Internal, match="attempt 4 of 3"):
        made.begin(P1, D1)


@pytest.mark.parametrize(
    ("info", "reporter", "failed_replica"),
    [
        (said(PeerLost("x")), D1, D1),
        (said(PeerLost("x"), name("prefill", P1), name("decode", D1)), P1, D1),
        (said(PeerLost("x"), name("mine", D1), name("prefill", P1)), D1, P1),
        (said(OutOfCapacity("x"), name("decode", D1)), D1, D1),
        (said(OutOfCapacity("x"), name("decode", D1)), P1, D1),
        (said(TransferFailed("x"), name("prefill", P1)), P1, D1),
        (said(Draining("x"), "frontend"), P1, P1),
    ],
)
def test_who_is_avoided(info: ErrorInfo, reporter: LeaderId, failed_replica: LeaderId) -> None:
    made = attempts()
    made.failed(info, reporter)
    assert made.avoid == {failed_replica}
    assert made.kv_holder == (None if failed_replica == P1 else P1)


def test_a_pair_that_fails_twice_loses_its_prefill_too() -> None:
    made = attempts()
    broken = said(TransferFailed("x"), name("prefill", P1))
    made.failed(broken, P1)
    made.begin(P1, D2)
    made.failed(broken, P1)
    assert made.avoid == {D1, P1}


def test_a_prefill_that_cannot_be_reached_is_changed_first_and_then_the_decode_that_says_so() -> None:
    made = attempts()
    unreached = said(BootstrapUnreachable("x"), name("decode", D1), f"prefill {P1.incarnation[:8]}")
    assert made.failed(unreached, D1) is Next.PLACE_AGAIN
    assert (made.avoid, made.kv_holder) == ({P1}, None)
    made.begin(P1, D1)  # there is no other prefill, and decode was not known to be at fault
    made.failed(unreached, D1)
    assert made.avoid == {P1, D1}
    assert made.lost == set(), "neither is known to be gone"


def pick(made: Attempts, *there: LeaderId, prefill: bool = False, patient: bool = False) -> LeaderId | None:
    found = made.candidates([Candidate(p) for p in there], patient=patient)
    if not found:
        return None
    policy = make_policy("round_robin", lambda n: 0)
    return made.choose(policy, found, PlacementRequest(1), prefill=prefill).leader


def test_the_prefill_that_has_the_prompt_is_asked_first() -> None:
    made = attempts()
    made.failed(PeerLost("gone").info, D1)
    for _ in range(3):
        assert pick(made, P2, P1, prefill=True) == P1
    assert pick(made, P2, prefill=True) == P2
    assert pick(made, D1, D2) == D2


def test_a_unified_replica_has_no_prompt_to_go_back_to() -> None:
    made = Attempts(REQUEST)
    made.begin(U, U)
    made.failed(PeerLost("gone").info, U)
    assert made.kv_holder is None


def test_the_least_bad_one_and_patience_with_a_reported_loss() -> None:
    made = attempts()
    made.failed(said(PeerLost("x"), name("prefill", P1), name("decode", D1)), P1)
    assert made.reported_by_peer
    assert pick(made, D1, patient=True) is None
    assert pick(made, D1) == D1
    made.begin(P1, D2)
    made.failed(OutOfCapacity("full").info, D2)
    assert not made.reported_by_peer
    assert pick(made, D1, D2) == D2, "a full one is better than one that is gone"


def test_the_last_error_is_the_one_record_and_tells_of_the_others() -> None:
    made = attempts()
    first = said(PeerLost("gone"), name("decode", D1))
    assert made.root_cause(first) is first
    made.failed(first, D1)
    assert made.root_cause(first) is first
    made.begin(P1, D2)
    made.arrived(token(0))
    last = said(OutOfCapacity("no page"), name("decode", D2))
    made.failed(last, D2)
    told = made.root_cause(last)
    assert (told.code, told.origin, told.retryable) == (last.code, last.origin, True)
    expected = f"no page (attempt 2 of 4, after 1 tokens; before it: PEER_LOST at {name('decode', D1)})"
    assert told.text == expected
