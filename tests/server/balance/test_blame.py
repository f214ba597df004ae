"""The half that caused an error, and the replicas that the next attempt avoids: by names, by pair, by
instance."""

from __future__ import annotations

import pytest
from test_attempts import D1, D2, P1, P2, REQUEST, attempts, name, pick, said, token

from segue.engine.request import FinishReason, Output, Usage
from segue.kv.errors import (
    BootstrapTimeout,
    BootstrapUnreachable,
    ChecksumMismatch,
    DeadlineExceeded,
    Draining,
    Internal,
    InvalidRequest,
    LayoutMismatch,
    OutOfCapacity,
    PeerLost,
    PeerRefused,
    PeerRestarted,
    SegueError,
    TransferFailed,
)
from segue.kv.ids import OPEN_RANK, LeaderId
from segue.server.balance.attempts import Attempts, Next


@pytest.mark.parametrize(
    ("error", "again"),
    [
        (PeerRefused("no common transport"), True),
        (LayoutMismatch("unequal"), True),
        (ChecksumMismatch("a doubt"), True),
        (TransferFailed("broke"), True),
        (TransferFailed("broke", retryable=False), False),
        (BootstrapUnreachable("x"), True),
        (InvalidRequest("x"), False),
        (DeadlineExceeded("x", retryable=True), True),
        (DeadlineExceeded("x"), False),
        (PeerLost("x"), True),
        (Draining("x"), True),
        (OutOfCapacity("x"), True),
        (Internal("x"), False),
    ],
)
def test_another_pair_is_tried_where_the_error_says_that_it_may_do_or_the_two_do_not_fit(
    error: SegueError, again: bool
) -> None:
    assert (attempts().failed(error.info, D1) is Next.PLACE_AGAIN) is again


@pytest.mark.parametrize(
    "error", [TransferFailed("x"), ChecksumMismatch("x"), PeerRefused("x"), LayoutMismatch("x")]
)
def test_what_went_wrong_between_two_costs_decode_its_place_first_whoever_says_it(error: SegueError) -> None:
    for reporter in (P1, D1):
        made = attempts()
        made.failed(said(type(error)("x"), name("prefill", P1), name("decode", D1)), reporter)
        assert (made.avoid, made.lost, made.kv_holder) == ({D1}, set(), P1)


def test_a_prefill_is_blamed_for_its_own_pairs_only() -> None:
    """Another prefill's first failure is decode's again."""
    made = attempts()
    made.failed(said(TransferFailed("x"), name("prefill", P1)), P1)
    made.begin(P2, D2)
    made.failed(said(TransferFailed("x"), name("prefill", P2)), P2)
    assert made.avoid == {D1, D2}


@pytest.mark.parametrize("kind", [BootstrapUnreachable, BootstrapTimeout])
def test_who_cannot_be_reached_is_avoided_and_not_taken_for_gone(kind: type[SegueError]) -> None:
    made = attempts()
    made.failed(said(kind("x"), name("prefill", P1), name("decode", D1)), P1)
    assert (made.avoid, made.lost, made.reported_by_peer) == ({D1}, set(), False)
    made.begin(P1, D2)
    made.failed(said(kind("x"), name("prefill", P1), name("decode", D2)), P1)
    assert made.avoid == {D1, P1}, "the second time it is prefill itself"


@pytest.mark.parametrize("kind", [PeerLost, PeerRestarted])
def test_a_loss_is_of_whom_it_names_again_and_again(kind: type[SegueError]) -> None:
    made = attempts()
    for decode in (D1, D2):
        made.failed(said(kind("x"), name("prefill", P1), name("decode", decode)), P1)
        assert made.reported_by_peer
        made.begin(P1, D2)
    assert made.avoid == made.lost == {D1, D2}
    made.failed(kind("we saw it").info, D2)
    assert not made.reported_by_peer, "we saw it ourselves"


def test_of_two_ranks_of_one_instance_the_one_that_is_named_is_meant() -> None:
    other = LeaderId(D1.incarnation, 1)
    made = Attempts(REQUEST)
    made.begin(P1, other)
    made.failed(said(PeerLost("x"), name("prefill", P1), name("decode", D1)), P1)
    assert made.avoid == {P1}, "dp0 is not of this pair: then it is who says so"
    made = Attempts(REQUEST)
    made.begin(P1, other)
    made.failed(said(PeerLost("x"), name("prefill", P1), name("decode", other)), P1)
    assert made.avoid == {other}
    made = Attempts(REQUEST)
    made.begin(P1, other)
    made.failed(said(PeerLost("x"), "", f"decode {other.incarnation[:8]}"), P1)
    assert made.avoid == {other}, "without a rank the whole instance is meant"


def test_a_prefill_whose_rank_was_open_is_meant_and_not_the_decode_that_misses_it() -> None:
    """It has the KV, so it was asked again by each decode in turn until no attempt was left."""
    made = attempts()
    missed = f"prefill {LeaderId(P1.incarnation, OPEN_RANK)}"
    made.failed(said(PeerLost("not there"), name("decode", D1), missed), D1)
    assert (made.avoid, made.kv_holder) == ({P1}, None)


def test_before_an_attempt_whoever_reports_is_meant() -> None:
    made = Attempts(REQUEST)
    assert made.failed_replica(said(PeerLost("x"), "", name("decode", D1)), P2) == P2


def test_who_is_lost_together_is_avoided_and_waited_for_and_holds_no_kv() -> None:
    made = attempts()
    made.failed(PeerLost("gone").info, D1)
    assert not made.reported_by_peer
    made.lost_together([P1, D2])
    assert made.avoid == made.lost == {D1, P1, D2}
    assert made.reported_by_peer
    assert made.kv_holder is None
    assert pick(made, D1, P1, patient=True) is None
    made = attempts()
    made.failed(PeerLost("gone").info, D1)
    made.lost_together([D2])
    assert made.kv_holder == P1


def test_the_kv_is_with_the_prefill_of_the_last_attempt() -> None:
    made = attempts()
    made.failed(OutOfCapacity("full").info, D1)
    made.begin(P2, D2)
    assert made.kv_holder == P2
    assert pick(made, P1, P2, prefill=True) == P2
    assert pick(made, P1, P2) == P1, "that is for the prefill half alone"


def test_an_output_without_tokens_has_no_position() -> None:
    """The last word of a stream that ends with a stop string, say."""
    made = attempts()
    made.arrived(token(0))
    shown = made.arrived(Output(request_id="x", finish=FinishReason.STOP))
    assert (shown.request_id, shown.finish, made.output) == ("r", FinishReason.STOP, [0])


def test_usage_that_comes_before_anything_was_told_is_the_attempt_s_own() -> None:
    """The first attempt gave no token: what the second one says of the prompt is what the client is told."""
    made = attempts()
    made.failed(PeerLost("gone").info, D1)
    made.begin(P1, D2)
    usage = Usage(prompt_tokens=3, prefill_cached=3)
    shown = made.arrived(token(0, usage=usage, timeline={"queue": 9.0}))
    assert (shown.usage, shown.timeline) == (usage, {"queue": 9.0})
    assert (made.number, made.delivered, made.continuing) == (1, True, False)
