"""A bug in the handling of one item ends the request that it belongs to, on both sides, and no other."""

from __future__ import annotations

from collections.abc import Callable
from threading import Event
from typing import Any

import httpx2 as httpx
import pytest
from deployment import VOCAB, Front, deployment

from segue.kv.errors import ErrorCode
from segue.kv.ids import KVPoll, Role
from segue.kv.protocol import events
from segue_lab.sim.sim_engine import reference


def break_once(
    owner: object, name: str, when: Callable[..., bool] = lambda *_: True, late: bool = False
) -> list[str]:
    """The first call of `owner.name` for which `when` holds raises, as a bug would, before it has done
    anything or (`late`) after it. Returns a list that has an entry from then on."""
    right = getattr(owner, name)
    said: list[str] = []

    def broken(*args: Any) -> Any:
        if when(*args):
            setattr(owner, name, right)
            said.append(name)
            if late:
                right(*args)
            raise KeyError("a bug")
        return right(*args)

    setattr(owner, name, broken)
    return said


def told(owner: object, name: str, when: Callable[..., bool] = lambda *_: True) -> Event:
    """Set once a call of `owner.name` for which `when` holds has returned."""
    right, done = getattr(owner, name), Event()

    def watched(*args: Any) -> Any:
        result = right(*args)
        if when(*args):
            done.set()
        return result

    setattr(owner, name, watched)
    return done


def phase_is(phase: KVPoll) -> Callable[..., bool]:
    return lambda change, _now: isinstance(change, events.Phase) and change.phase is phase


@pytest.mark.parametrize(
    ("side", "method", "when"),
    [
        (Role.PREFILL, "submit", lambda *_: True),
        (Role.DECODE, "submit", lambda *_: True),
        (Role.PREFILL, "on_change", phase_is(KVPoll.WAITING_FOR_INPUT)),
        (Role.DECODE, "on_change", phase_is(KVPoll.SUCCESS)),
        (Role.DECODE, "on_change", phase_is(KVPoll.WAITING_FOR_INPUT)),
    ],
)
def test_a_bug_ends_its_own_request_at_once_and_typed(
    side: Role, method: str, when: Callable[..., bool]
) -> None:
    with deployment(Role.PREFILL, Role.DECODE) as made:
        [p], [d] = made.by_role(Role.PREFILL), made.by_role(Role.DECODE)
        [broken] = made.by_role(side)
        break_once(broken.scheduler, method, when)
        made.front.submit("bad", list(range(40)), p, d, max_tokens=900)
        # Its budget is a minute; the answer comes long before.
        error = made.front.wait("bad", 50)[-1].error
        assert error is not None
        assert error.code is ErrorCode.INTERNAL, error
        assert "a bug" in error.text
        assert error.origin
        assert error.phase
        # What the frontend does with an error on one leg; a half that was never told must not stay.
        made.front.cancel("bad", p, d)
        made.assert_comes_to_rest()
        sampling = made.front.submit("good", [1, 2, 3], p, d)
        assert made.front.tokens("good") == reference([1, 2, 3], sampling, VOCAB, 4)
        made.assert_comes_to_rest()


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(
    ("side", "word"),
    [(Role.PREFILL, events.Release), (Role.DECODE, events.Release), (Role.DECODE, events.Quarantined)],
    ids=["prefill-Release", "decode-Release", "decode-Quarantined"],
)
def test_a_last_word_on_which_the_role_breaks_gives_the_pages_back_all_the_same(
    side: Role, word: type, late: bool
) -> None:
    with deployment(Role.PREFILL, Role.DECODE) as made:
        [p], [d] = made.by_role(Role.PREFILL), made.by_role(Role.DECODE)
        [broken] = made.by_role(side)
        said = break_once(broken.scheduler, "on_change", lambda change, _now: isinstance(change, word), late)
        p.scheduler.plan = (
            lambda _now: []
        )  # it computes nothing: decode has published its pages and takes them back
        published = told(p.scheduler, "on_change", phase_is(KVPoll.WAITING_FOR_INPUT))
        made.front.submit("bad", list(range(40)), p, d, max_tokens=900)
        assert published.wait(60)
        made.front.cancel("bad", p, d)
        made.assert_comes_to_rest()
        assert said, "it never broke"


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
def test_a_frontend_s_end_on_which_the_role_breaks_ends_its_requests_all_the_same(late: bool) -> None:
    with deployment(Role.PREFILL, Role.DECODE) as made:
        [p], [d] = made.by_role(Role.PREFILL), made.by_role(Role.DECODE)
        said = break_once(d.scheduler, "frontend_gone", late=late)
        d.scheduler.plan = lambda _now: []  # the request never ends by itself
        landed = told(d.scheduler, "on_change", phase_is(KVPoll.SUCCESS))
        other = Front()
        other.join(p)
        other.join(d)
        other.submit("r", list(range(40)), p, d, max_tokens=900)
        assert landed.wait(60)
        other.close()
        made.assert_comes_to_rest()
        assert said, "it never broke"


def test_an_engine_that_breaks_on_the_end_of_a_request_keeps_none_of_its_pages() -> None:
    with deployment(Role.PREFILL, Role.DECODE) as made:
        [p], [d] = made.by_role(Role.PREFILL), made.by_role(Role.DECODE)
        break_once(d.engine, "close")
        made.front.submit("bad", list(range(40)), p, d, max_tokens=900)
        made.front.cancel("bad", p, d)
        made.assert_comes_to_rest()


@pytest.mark.parametrize("method", ["advance", "plan"])
@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("side", [Role.PREFILL, Role.DECODE])
def test_a_step_that_cannot_be_planned_ends_what_is_there_and_not_the_loop(
    method: str, late: bool, side: Role
) -> None:
    with deployment(Role.PREFILL, Role.DECODE) as made:
        [p], [d] = made.by_role(Role.PREFILL), made.by_role(Role.DECODE)
        [broken] = made.by_role(side)
        # With the job there, or there would be nobody to tell.
        said = break_once(
            broken.scheduler, method, lambda *_: bool(broken.scheduler.admission.requests), late
        )
        made.front.submit("bad", list(range(40)), p, d, max_tokens=900)
        error = made.front.wait("bad", 50)[-1].error
        assert error is not None
        assert said
        assert (error.code, "planning a step" in error.text) == (ErrorCode.INTERNAL, True), error
        made.front.cancel("bad", p, d)
        made.assert_comes_to_rest()
        sampling = made.front.submit("good", [1, 2, 3], p, d)
        assert made.front.tokens("good") == reference([1, 2, 3], sampling, VOCAB, 4)
        made.assert_comes_to_rest()


def test_an_engine_that_breaks_on_a_late_request_does_not_end_the_loop() -> None:
    with deployment(Role.PREFILL, Role.DECODE) as made:
        [p], [d] = made.by_role(Role.PREFILL), made.by_role(Role.DECODE)
        said = break_once(p.engine, "close")
        p.scheduler.plan = lambda _now: []  # it computes nothing: the request ends by its deadline
        made.front.submit("late", list(range(40)), p, d, max_tokens=9, budget_s=0.3)
        error = made.front.wait("late", 50)[-1].error
        assert error is not None
        made.assert_comes_to_rest()
        del p.scheduler.plan
        sampling = made.front.submit("good", [1, 2, 3], p, d)
        assert made.front.tokens("good") == reference([1, 2, 3], sampling, VOCAB, 4)
        assert said


def test_every_instance_says_what_it_holds() -> None:
    with deployment(Role.PREFILL, Role.DECODE, http_port=0) as made:
        [p], [d] = made.by_role(Role.PREFILL), made.by_role(Role.DECODE)
        d.scheduler.plan = lambda _now: []  # it holds the request and computes nothing, so it cannot end
        made.front.submit("r", list(range(50)), p, d, max_tokens=700)
        while "r" not in made.front.outputs:
            assert not made.front.done["r"].wait(0.01)
        states = {i.config.role: look(i) for i in (p, d)}
        assert not states[Role.DECODE]["at_rest"]
        assert states[Role.DECODE]["pages"]["used"] > 0
        made.front.cancel("r", p, d)
        made.assert_comes_to_rest()
        for instance, peer in ((p, d), (d, p)):
            state = look(instance)
            assert state["at_rest"], state
            assert state["problems"] == []
            assert state["pages"]["used"] == state["pages"]["quarantined"] == 0
            assert state["pages"]["free"] == state["pages"]["total"] == 256
            assert state["sessions"] == sorted([str(made.front.me), str(peer.me)])
            assert state["descriptors"] > 0


def test_what_is_wrong_is_said() -> None:
    with deployment(Role.PREFILL, Role.DECODE, http_port=0) as made:
        [d] = made.by_role(Role.DECODE)
        [leaked] = d.scheduler.cache.pool.allocate(1)
        state = look(d)
        assert state["at_rest"]
        assert any("used at rest" in problem for problem in state["problems"]), state
        d.scheduler.cache.pool.release([leaked])
        assert look(d)["problems"] == []


def look(instance: Any) -> dict[str, Any]:
    host, port = instance.http.address
    answer = httpx.get(f"http://{host}:{port}/integrity", timeout=60)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())
