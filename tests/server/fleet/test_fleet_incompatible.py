"""Halves that cannot be joined are not paired: known from the registry's records, or learnt once."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from fleet_rig import Leader, Rig

from segue.engine.request import Output
from segue.kv.errors import ErrorCode, ErrorInfo, SegueError
from segue.kv.ids import Role
from segue.server.messages.control import Outputs, Submit


class Refusing(Leader):
    """A leader that cannot be joined with the replica `incompatible` (a `LeaderId`)."""

    incompatible = ""

    def answer(self, session: Any, submit: Submit) -> None:
        if self.incompatible in (submit.ticket.prefill, submit.ticket.decode):
            info = ErrorInfo(code=ErrorCode.PEER_REFUSED, text="no common transport", retryable=False)
            session.send(Outputs([Output(request_id=submit.request.request_id, error=info)]))
        else:
            super().answer(session, submit)


async def add(rig: Rig, leader: Leader, **record: Any) -> None:
    rig.leaders.append(leader)
    rig.registry.put(msgspec.structs.replace(await leader.start(), **record))
    await rig.until(
        lambda: any(r.leader == leader.node.me and r.usable for r in rig.fleet.membership.replicas.values())
    )


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
async def test_a_half_of_another_model_gets_no_request_and_does_not_shorten_the_context(
    rig: Rig, role: Role
) -> None:
    await rig.add(Role.PREFILL)
    await rig.add(Role.DECODE)
    assert await rig.run() == [5, 6, 7]
    other = Leader(role)
    await add(rig, other, model="other/float16", context_tokens=3)
    for _ in range(8):
        assert await rig.run() == [5, 6, 7]
    assert other.submits == []
    assert rig.fleet.context_tokens == 100
    assert rig.fleet.proven


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ("other/bfloat16", "start both with the same --model, --revision and --dtype"),
        (
            "m/float32",
            "prefill serves this model in bfloat16, decode in float32; start both with --dtype float32",
        ),
    ],
)
async def test_two_halves_of_different_models_serve_nobody_and_say_what_to_change(
    rig: Rig, other: str, said: str
) -> None:
    await add(rig, Leader(Role.PREFILL), model="m/bfloat16")
    await add(rig, Leader(Role.DECODE), model=other)
    assert not rig.fleet.can_serve
    assert said in rig.fleet.lacking().info.text, "/ready"
    with pytest.raises(SegueError, match="one of each with the same model and dtype") as caught:
        await rig.run()
    assert said in str(caught.value)


async def test_two_models_are_served_side_by_side_each_by_its_own_pair(rig: Rig) -> None:
    made = {}
    for model in ("a", "b"):
        for role in (Role.PREFILL, Role.DECODE):
            made[model, role] = Leader(role)
            await add(rig, made[model, role], model=model)
    for _ in range(12):
        assert await rig.run() == [5, 6, 7]
    for model in ("a", "b"):
        p, d = made[model, Role.PREFILL], made[model, Role.DECODE]
        await p.until(lambda p=p, d=d: len(p.submits) == len(d.submits))
        assert p.submits == d.submits != []


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
async def test_a_pair_that_refuses_one_another_costs_one_attempt_in_its_life(rig: Rig, role: Role) -> None:
    """More requests than the fleet's budget of retries has: none fails, and the good pair stays proven."""

    made = [Refusing(Role.PREFILL), Refusing(Role.DECODE)]
    for leader in made:
        await add(rig, leader)
    assert await rig.run() == [5, 6, 7]
    incompatible = Refusing(role)
    for leader in (*made, incompatible):
        leader.incompatible = incompatible.node.me
    await add(rig, incompatible)
    for _ in range(30):
        assert await rig.run() == [5, 6, 7]
        assert rig.fleet.proven
    assert len(incompatible.submits) == 1
