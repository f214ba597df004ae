"""Requests whose ticket does not name the DP rank of prefill: two prefill ranks, a real registry."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from deployment import LIMITS, VOCAB, Deployment, Running, deployment

from segue.engine.request import RankHints
from segue.kv.errors import ErrorCode, ErrorInfo
from segue.kv.ids import LeaderId, Role, new_incarnation
from segue.server.instance.instance import Instance
from segue.server.registry.registry_server import serve as serve_registry
from segue_lab.sim.sim_engine import reference

PROMPT = list(range(1, 40))
FOLLOW = "follow_bootstrap_room"
Two = tuple[Deployment, list[Instance], Instance]
TOO_LATE = (ErrorCode.DEADLINE_EXCEEDED, ErrorCode.BOOTSTRAP_TIMEOUT)


@contextmanager
def two_ranks(**settings: Any) -> Iterator[Two]:
    """A deployment of two prefill ranks of one instance, and one decode instance."""
    with deployment(Role.DECODE) as made:
        url, incarnation = f"http://127.0.0.1:{made.registry.port}", new_incarnation()
        for rank in (0, 1):
            me = LeaderId(incarnation, rank)
            made.running.append(Running(Role.PREFILL, url, me=me, dp=2, **settings))
            made.front.join(made.running[-1].instance)
        [decode] = made.by_role(Role.DECODE)
        yield made, made.by_role(Role.PREFILL), decode


def restart_registry(made: Deployment) -> None:
    port = made.registry.port
    made.io.call(made.registry.close(), 60)
    serve = serve_registry("127.0.0.1", port, secret=None, limits=LIMITS.limits())
    made.registry = made.io.call(serve, 60)


def answer_is_right(made: Deployment, name: str, sampling: Any) -> None:
    assert made.front.tokens(name) == reference(PROMPT, sampling, VOCAB, 4)


def failure(made: Deployment, name: str) -> ErrorInfo:
    error = made.front.wait(name)[-1].error
    assert error is not None
    return error


@pytest.mark.parametrize(
    ("load_balance", "force", "registered"),
    [("total_requests", False, 8), (FOLLOW, False, 0), (FOLLOW, True, 8)],
)
def test_decode_finds_each_rank_and_only_what_it_cannot_infer_is_registered(
    load_balance: str, force: bool, registered: int
) -> None:
    ranks = RankHints(force_query_prefill_dp_rank=force)
    with two_ranks(load_balance=load_balance) as (made, two, decode):
        for room in range(1, 9):
            name, prefill = f"r{room}", two[room % 2]
            sampling = made.front.submit(name, PROMPT, prefill, decode, room=room, is_open=True, ranks=ranks)
            answer_is_right(made, name, sampling)
        hint = RankHints(disagg_prefill_dp_rank=1)
        sampling = made.front.submit("hint", PROMPT, two[1], decode, room=21, is_open=True, ranks=hint)
        answer_is_right(made, "hint", sampling)
        assert made.registry.store.rooms_held == registered
        made.assert_comes_to_rest()


@pytest.mark.parametrize("first", ["prefill", "decode"])
def test_a_request_on_another_rank_than_its_room_names_is_followed_there(first: str) -> None:
    with two_ranks(load_balance=FOLLOW) as (made, two, decode):
        order = [two[1], decode] if first == "prefill" else [decode, two[1]]
        for only in order:
            sampling = made.front.submit("r", PROMPT, two[1], decode, room=10, is_open=True, only=only)
        answer_is_right(made, "r", sampling)
        assert two[0].leader.steps == 0
        made.assert_comes_to_rest()


def test_or_it_fails_on_both_sides_at_once_and_names_both_ranks_and_the_setting() -> None:
    with two_ranks(load_balance=FOLLOW, dp_rank_conflict="fail") as (made, two, decode):
        for name, only in (("at prefill", two[1]), ("at decode", decode)):
            made.front.submit(name, PROMPT, two[1], decode, room=10, is_open=True, only=only)
        for name in ("at prefill", "at decode"):
            error = failure(made, name)
            assert error.code is ErrorCode.DP_RANK_CONFLICT
            assert "rank 1" in error.text
            assert "rank 0" in error.text
            assert "--dp-rank-conflict redirect" in error.text
        # Also where decode was told: the instance does not do it, whoever asks.
        made.front.submit("told", PROMPT, two[1], decode, room=10 + 2**40, only=two[1])
        assert failure(made, "told").code is ErrorCode.DP_RANK_CONFLICT
        made.assert_comes_to_rest()


def test_a_hint_out_of_range_is_a_typed_error_on_both_sides() -> None:
    with two_ranks() as (made, two, decode):
        hint = RankHints(disagg_prefill_dp_rank=2)
        for name, only in (("at prefill", two[1]), ("at decode", decode)):
            made.front.submit(name, PROMPT, two[1], decode, is_open=True, only=only, ranks=hint)
            assert failure(made, name).code is ErrorCode.DP_RANK_OUT_OF_RANGE
        made.assert_comes_to_rest()


@pytest.mark.slow
def test_a_registry_that_restarts_is_told_the_rooms_again() -> None:
    with two_ranks() as (made, two, decode):
        made.front.submit("r", PROMPT, two[1], decode, room=10, is_open=True, only=two[1])
        while not made.registry.store.rooms_held:
            made.running[1].ask()
        restart_registry(made)
        sampling = made.front.submit("r", PROMPT, two[1], decode, room=10, is_open=True, only=decode)
        answer_is_right(made, "r", sampling)
        made.assert_comes_to_rest()


@pytest.mark.slow
def test_with_the_registry_away_who_must_ask_waits_for_it_and_no_longer_than_its_deadline() -> None:
    with two_ranks() as (made, two, decode):
        port = made.registry.port
        made.io.call(made.registry.close(), 60)
        made.front.submit("late", PROMPT, two[0], decode, is_open=True, budget_s=1.0, only=decode)
        sampling = made.front.submit("r", PROMPT, two[0], decode, is_open=True)
        told = made.front.submit("told", PROMPT, two[0], decode)
        answer_is_right(made, "told", told)  # whoever needs no registry goes on without it
        assert failure(made, "late").code in TOO_LATE
        assert not made.front.done["r"].is_set()
        serve = serve_registry("127.0.0.1", port, secret=None, limits=LIMITS.limits())
        made.registry = made.io.call(serve, 60)
        answer_is_right(made, "r", sampling)
        made.assert_comes_to_rest()


@pytest.mark.slow
def test_an_answer_after_the_deadline_is_nobodys_and_leaves_nothing() -> None:
    with two_ranks() as (made, two, decode):
        made.front.submit("r", PROMPT, two[0], decode, room=10, is_open=True, only=decode, budget_s=0.5)
        assert failure(made, "r").code in TOO_LATE
        made.front.submit("late", PROMPT, two[0], decode, room=10, is_open=True, only=two[0], budget_s=1.0)
        assert failure(made, "late").code in TOO_LATE
        made.assert_comes_to_rest()
