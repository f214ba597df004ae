"""An instance with two leaders: one incarnation, and for each an engine, a pool, a loop and a port."""

from __future__ import annotations

import threading
import time

import pytest
from deployment import VOCAB, Deployment, Running, deployment

from segue.kv.errors import ErrorCode, PeerLost
from segue.kv.ids import LeaderId, Role, new_incarnation
from segue.server.instance.instance import Instance
from segue_lab.sim.sim_engine import reference

PROMPT = list(range(1, 40))


def two_leaders(made: Deployment, role: Role) -> list[Instance]:
    """Two leaders of one instance, that the frontend and their counterparts have sessions with."""
    url, incarnation = f"http://127.0.0.1:{made.registry.port}", new_incarnation()
    two = [Running(role, url, me=LeaderId(incarnation, rank), dp=2) for rank in (0, 1)]
    made.running += two
    for running in two:
        made.front.join(running.instance)
    return [running.instance for running in two]


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_both_leaders_serve_at_the_same_time(role: Role) -> None:
    with deployment(Role.DECODE if role is Role.PREFILL else Role.PREFILL) as made:
        [one] = [running.instance for running in made.running]
        two = two_leaders(made, role)
        asked = {}
        for number in range(8):
            pair = (two[number % 2], one) if role is Role.PREFILL else (one, two[number % 2])
            prompt = [*PROMPT, number]
            asked[f"r{number}"] = prompt, made.front.submit(f"r{number}", prompt, *pair)
        for name, (prompt, sampling) in asked.items():
            assert made.front.tokens(name) == reference(prompt, sampling, VOCAB, 4)
        assert all(instance.leader.steps for instance in two), "each computes something"
        made.assert_comes_to_rest()


@pytest.mark.parametrize("dies", [0, 1])
def test_one_leader_ends_its_sessions_and_paths_and_only_its_own_requests_fail(dies: int) -> None:
    with deployment(Role.DECODE) as made:
        [decode] = [running.instance for running in made.running]
        two = two_leaders(made, Role.PREFILL)
        for rank, prefill in enumerate(two):  # they have met
            made.front.submit(f"first{rank}", PROMPT, prefill, decode)
            made.front.tokens(f"first{rank}")
        # Decode alone is asked: what waits for either leader's part waits.
        for rank, prefill in enumerate(two):
            made.front.submit(f"waits{rank}", PROMPT, prefill, decode, only=decode, budget_s=30)
        until = time.monotonic() + 60
        while made.running[0].ask()["handles"] < 2:
            assert time.monotonic() < until
        kill(two[dies])
        error = made.front.wait(f"waits{dies}")[-1].error
        assert error is not None
        assert error.code is ErrorCode.PEER_LOST
        assert error.peer == f"prefill {two[dies].me}"
        assert not made.front.done[f"waits{1 - dies}"].is_set()
        sampling = made.front.submit("after", PROMPT, two[1 - dies], decode)
        assert made.front.tokens("after") == reference(PROMPT, sampling, VOCAB, 4)
        made.front.cancel(f"waits{1 - dies}", decode)
        made.assert_comes_to_rest()


def kill(instance: Instance) -> None:
    """End its sessions and its paths at once, and let nobody in any more."""
    manager, done = instance.manager, threading.Event()
    assert manager is not None

    async def cut() -> None:
        await instance.plane.node.close(PeerLost("it was killed"))
        done.set()

    manager.io.post(lambda: manager.io.loop.create_task(cut()))
    assert done.wait(60)
    manager._ranks.close()
