"""Each rule of rooms has a story in the simulator that puts it to work, without any luck of the draw."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from segue.kv.ids import Role
from segue.kv.protocol.room_ranks import REDIRECT_ON_CONFLICT
from segue.kv.protocol.rooms import Room, Rooms
from segue.kv.protocol.sender import SenderMachine
from segue_lab.sim.room_checks import RULES, rule_name
from segue_lab.sim.room_plans import Claim, RoomPlan
from segue_lab.sim.run import Outcome, run_scenario
from segue_lab.sim.scenario import Fault, make_scenario

PROMPT = tuple(range(1, 21))
#: Two chunks, each long under way.
SLOW = (0.02, 0.02)
FIRST = Claim("decode0", 0, 0.0)
#: Prefill's clock of a story's room begins here.
AT = 0.5
#: Deployments without faults: one prefill and two decodes over `tcp`; two or three leaders each.
PLAIN, RANKS, THREE_RANKS = 3, 53, 136


@dataclass(frozen=True)
class Story:
    """One room, who comes for it, and what rules (`RULES`) are at work for it then. `succeed`: how many
    decodes have its KV in the end."""

    claims: tuple[Claim, ...]
    works: tuple[tuple[int, str], ...] = ()
    succeed: int = 1
    faults: tuple[Fault, ...] = ()
    seed: int = PLAIN
    #: the rate of decode's clocks
    rate: float = 1.0
    room: dict[str, Any] = field(default_factory=dict)

    def play(self) -> Outcome:
        """Run it alone, without requests."""
        plan = RoomPlan("o0", AT, "prefill0", PROMPT, self.claims, **self.room)
        features = frozenset({"unplaced rooms", *(fault.kind for fault in self.faults)})
        whole = replace(make_scenario(self.seed), requests=[], rooms=[plan], faults=list(self.faults))
        for at, node in enumerate(whole.nodes):
            rate = self.rate if node.role is Role.DECODE else 1.0
            whole.nodes[at] = replace(node, clock_rate=rate, on_conflict=REDIRECT_ON_CONFLICT)
        return run_scenario(replace(whole, features=features), timeline=True)


def second(node: str = "decode1", after_s: float = 0.01, **changed: Any) -> Claim:
    """The next attempt."""
    return replace(Claim(node, 1, after_s, publish_s=0.0), **changed)


def fault(kind: str, after_s: float, node: str, other: str = "", seconds: float = 1.0, **more: Any) -> Fault:
    """A fault so long after prefill's engine has opened the room."""
    return Fault("f0", kind, AT + after_s, node, other, seconds, **more)


#: A room that its placer may give to another decode.
KEPT: dict[str, Any] = {"placed": "decode0", "retain_s": 2.0}

STORIES = {
    "late": Story(
        (replace(FIRST, after_s=1.0),),
        ((1, "nobody came"), (6, "destination of a closed room")),
        succeed=0,
        room={"budget_s": 0.5},
    ),
    "a destination after the end": Story(
        (FIRST, second(after_s=0.3)), ((6, "destination of a closed room"), (5, "gone"))
    ),
    **{
        f"doubled: {how}": Story(
            (replace(FIRST, repeat=how, repeat_s=after_s),), room={"chunk_s": SLOW}, seed=PLAIN
        )
        for how, after_s in (("same", 0.01), ("pages", 0.01), ("epoch", 0.01), ("claim", 0.01))
    },
    "early": Story((replace(FIRST, after_s=-0.3),), ((7, "parked"), (7, "bound when opened"))),
    "prefill restarts at its address before decode comes": Story(
        (replace(FIRST, after_s=1.0, budget_s=12.0),),
        ((7, "parked"), (7, "expired")),
        succeed=0,
        faults=(fault("crash", 0.1, "prefill0", seconds=0.05),),
        rate=0.9,
    ),
    "prefill restarts at its address under a binding": Story(
        (FIRST,),
        succeed=0,
        faults=(fault("crash", 0.05, "prefill0", seconds=0.05),),
        room={"chunk_s": (0.1, 0.1)},
    ),
    "a bad first claimant": Story(
        (replace(FIRST, attempt=1, after_s=0.005), Claim("decode1", 0, 0.0, wrong=True)),
        ((2, "another claim refused"), (2, "bound after another claim")),
    ),
    "a bad first claimant, who says it again with the right claim": Story(
        (replace(FIRST, wrong=True, repeat="claim"), second(after_s=0.1)),
        ((2, "another claim refused"), (2, "bound after another claim")),
    ),
    "two decodes": Story((FIRST, second()), ((3, "refused beside a binding"),), room={"chunk_s": SLOW}),
    "another attempt of the same decode": Story(
        (FIRST, second("decode0")), ((3, "refused beside a binding"),), room={"chunk_s": SLOW}
    ),
    "another decode than the placed one, without the placer's word": Story(
        (second(after_s=0.0, budget_s=1.0),), succeed=0, room={"placed": "decode0", "retain_s": 2.0}
    ),
    "placed again while writes run": Story(
        (FIRST, second(given_s=0.015)),
        ((3, "placed again"), (1, "replayed"), (5, "drained")),
        room={**KEPT, "chunk_s": SLOW},
    ),
    "placed again before the next decode comes": Story(
        (FIRST, second(given_s=0.005)), ((3, "placed again"),), room={**KEPT, "chunk_s": SLOW}
    ),
    "a commit that the session has lost": Story(
        (FIRST,),
        ((4, "committed late"),),
        faults=(fault("break", 0.0, "decode0", "prefill0", trigger="Committed"),),
        room=KEPT,
    ),
    "another decode after a commit": Story(
        (FIRST, second(after_s=0.05, follows=True)),
        ((9, "bound after a commit"), (1, "metadata replayed")),
        succeed=2,
        room={"retain_s": 2.0},
    ),
    "another decode after the first gave up": Story(
        (replace(FIRST, abort_s=0.015), second(after_s=0.05, follows=True)),
        ((1, "replayed"), (1, "metadata replayed")),
        room={"chunk_s": SLOW, "retain_s": 2.0},
    ),
    "as many failures as bindings": Story(
        tuple(Claim("decode0", k, 0.1 * k, abort_s=0.05) for k in range(4)),
        ((9, "bindings spent"), (10, "closed before its proof")),
        succeed=0,
        room={"chunk_s": (0.5, 0.5), "retain_s": 5.0},
    ),
    "evicted": Story((replace(FIRST, after_s=0.5),), ((9, "evicted"),), succeed=0, room={"evict_s": 0.1}),
    "bound and not evicted": Story(
        (FIRST,), ((9, "bound and not evicted"),), room={"evict_s": 0.01, "chunk_s": SLOW}
    ),
    "given up while writes run": Story(
        (replace(FIRST, abort_s=0.01),),
        ((10, "closed before its proof"), (5, "drained")),
        succeed=0,
        room={"chunk_s": SLOW},
    ),
    "declined": Story((Claim("decode0", 0, 0.05, declines=True),), ((11, "declined"),), succeed=0),
    "declined beside a binding": Story(
        (FIRST, second(declines=True)), ((11, "no right to decline"),), room={"chunk_s": SLOW}
    ),
    "opened twice": Story((FIRST,), ((6, "closed room opened again"),), room={"again_s": 0.2}),
    "refused by prefill's engine": Story(
        (replace(FIRST, after_s=-0.05),),
        ((6, "refused while it waited"),),
        succeed=0,
        room={"refuses": True},
    ),
    "a wrong hint, and the registry is late": Story(
        (replace(FIRST, open_rank=True, hint=True),),
        ((8, "registry asked"), (8, "sent on"), (5, "moved")),
        faults=(fault("registry pause", -0.1, "registry"),),
        seed=RANKS,
        room={"announce": True},
    ),
    "sent on twice": Story(
        (replace(FIRST, open_rank=True, hint=True, moved=True),),
        ((8, "sent on"), (8, "sent on twice")),
        succeed=0,
        seed=RANKS,
        room={"announce": True},
    ),
    "sent on twice, to a third rank": Story(
        (replace(FIRST, open_rank=True, hint=True, moved=True),),
        ((8, "sent on"), (8, "sent on twice")),
        succeed=0,
        seed=THREE_RANKS,
        room={"announce": True},
    ),
    "two ranks open it": Story(
        (replace(FIRST, open_rank=True),),
        ((8, "owned by another rank"),),
        seed=RANKS,
        room={"announce": True, "twin": "prefill0.1"},
    ),
}


@functools.cache
def outcome_of(name: str) -> Outcome:
    return STORIES[name].play()


@pytest.mark.parametrize("name", STORIES)
def test_a_story_puts_its_rules_to_work_and_breaks_none(name: str) -> None:
    story, outcome = STORIES[name], outcome_of(name)
    assert not outcome.failed, outcome.text
    assert [work for work in story.works if not outcome.counts.get(rule_name(*work))] == []
    assert outcome.counts.get("succeeded", 0) == story.succeed
    assert sum(outcome.injected.values()) == len(story.faults)


def test_each_rule_and_each_of_its_uses_has_a_story() -> None:
    told = {work for story in STORIES.values() for work in story.works}
    assert told == {(rule, use) for rule, uses in RULES.items() for use in uses}


@pytest.mark.parametrize("name", ["another decode after a commit", "another decode after the first gave up"])
@pytest.mark.parametrize("lost", ["metadata", "spans"])
def test_a_later_binding_that_is_not_given_everything_is_noticed(
    name: str, lost: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole: Callable[[Rooms, Room, SenderMachine], None] = Rooms._replay

    def part(rooms: Rooms, room: Room, machine: SenderMachine) -> None:
        kept = getattr(room, lost)
        setattr(room, lost, type(kept)() if lost == "spans" else None)
        whole(rooms, room, machine)
        setattr(room, lost, kept)

    monkeypatch.setattr(Rooms, "_replay", part)
    outcome = STORIES[name].play()
    assert outcome.rule == "room 1", outcome.text
