"""Rooms that a scenario opens without a placement: what prefill's engine does, and which decodes come."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

from segue.kv.ids import Role
from segue_lab.sim.node_spec import VOCAB, NodeSpec

#: When a destination of a claim is heard a second time, as it was or with other pages, epoch or claim.
REPEATS = ("", "", "", "same", "pages", "epoch", "claim")


@dataclass(frozen=True, slots=True)
class Claim:
    """One decode that comes for a room, `after_s` seconds after prefill's engine opens it (before, if that is
    negative); or, if it `follows`, after that has sent its metadata."""

    node: str
    attempt: int
    after_s: float
    follows: bool = False
    budget_s: float = 12.0
    publish_s: float = 0.001
    #: its claim is not the room's
    wrong: bool = False
    #: its engine says that prefill's room names it; right or wrong
    placed: bool = True
    #: when the placer gives it the room
    given_s: float | None = None
    #: share of the prompt that decode has already
    prefix: float = 0.0
    #: it leaves the DP rank of prefill open
    open_rank: bool = False
    #: and the request names another rank
    hint: bool = False
    #: its destination is heard again so much later, and how it differs
    repeat: str = ""
    repeat_s: float = 0.01
    #: prefill's acceptance is heard as `Moved`
    moved: bool = False
    #: it declines the room and publishes nothing, if it has not read the request without a claim; else it
    #: ends its half after so many seconds
    declines: bool = False
    unread: bool = False
    abort_s: float | None = None

    @property
    def comes(self) -> bool:
        """Whether it publishes a destination that may bind the room."""
        return not self.wrong and not self.declines


@dataclass(frozen=True, slots=True)
class RoomPlan:
    """One room of the prefill leader `node`."""

    name: str
    at: float
    node: str
    prompt: tuple[int, ...]
    claims: tuple[Claim, ...]
    chunk_s: tuple[float, ...] = (0.001, 0.001)
    budget_s: float = 12.0
    retain_s: float = 0.0
    generation: int = 0
    #: the decode that it is placed for
    placed: str = ""
    announce: bool = False
    #: another rank of the instance opens it, too, so much later
    twin: str = ""
    #: prefill's engine opens it once more under the same key, after so many seconds
    again_s: float | None = None
    evict_s: float | None = None
    #: prefill's engine refuses the request of this room unopened
    refuses: bool = False
    close_s: float | None = None

    @property
    def plain(self) -> bool:
        """One decode comes for it in time, and nobody does anything that could keep it away."""
        [first, *rest] = self.claims or (None,)
        return (
            first is not None
            and first.comes
            and not (first.repeat or first.moved or first.open_rank)
            and first.abort_s is None
            and self.evict_s is None
            and self.close_s is None
            and not self.twin
            and self.placed in ("", first.node)
            and not any(claim.comes or claim.declines for claim in rest)
            and min(self.budget_s, first.budget_s) >= 8.0
            and first.publish_s < 1.0
        )


def draw_rooms(rng: random.Random, nodes: list[NodeSpec], busy_s: float) -> list[RoomPlan]:
    """Some tens of rooms, each with one story, some with a second one."""
    prefills = [node for node in nodes if node.role is Role.PREFILL]
    decodes = [node.name for node in nodes if node.role is Role.DECODE]
    found = []
    for index in range(rng.choice((12, 24, 48))):
        node = rng.choice(prefills)
        prompt = tuple(rng.randrange(VOCAB) for _ in range(rng.randint(2, 24)))
        first = Claim(
            rng.choice(decodes),
            0,
            rng.choice((-0.05, -0.003, 0.0, 0.002, 0.02)),
            publish_s=rng.choice((0.0, 0.001, 0.02)),
            placed=rng.random() < 0.3,
            prefix=rng.choice((0.0, 0.0, 0.5, 0.9)),
        )
        plan = RoomPlan(
            f"o{index}",
            rng.uniform(0.02, 0.02 + busy_s),
            node.name,
            prompt,
            (first,),
            chunk_s=tuple(rng.choice((0.0, 0.001, 0.02)) for _ in range(rng.randint(1, 4))),
            retain_s=rng.choice((0.0, 0.0, 2.0)),
            announce=node.dp_size > 1,
            generation=rng.choice((0, 0, 0, 1)),
        )
        for story in rng.sample(STORIES, rng.choice((1, 1, 2))):
            plan = story(rng, plan, decodes, nodes)
        if node.dp_size > 1 and rng.random() < 0.3:
            plan = _open_rank(rng, plan, decodes, nodes)
        found.append(plan)
    return found


# ---- stories -----------------------------------------------------------------------------------------


def _first(plan: RoomPlan, **changed: Any) -> RoomPlan:
    return (
        replace(plan, claims=(replace(plan.claims[0], **changed), *plan.claims[1:])) if plan.claims else plan
    )


def _also(plan: RoomPlan, claim: Claim) -> RoomPlan:
    return replace(plan, claims=(*plan.claims, claim))


def _next(rng: random.Random, plan: RoomPlan, decodes: list[str], after: tuple[float, ...]) -> Claim:
    """One more attempt, of this decode or another."""
    return Claim(
        rng.choice(decodes),
        max((claim.attempt for claim in plan.claims), default=0) + 1,
        rng.choice(after),
        placed=rng.random() < 0.3,
        prefix=rng.choice((0.0, 0.5)),
    )


def _nothing(rng: random.Random, plan: RoomPlan, decodes: list[str], nodes: list[NodeSpec]) -> RoomPlan:
    return plan


def _placed(rng: random.Random, plan: RoomPlan, decodes: list[str], nodes: list[NodeSpec]) -> RoomPlan:
    """The room is placed for a decode, mostly the one that comes."""
    comes = plan.claims[0].node if plan.claims else decodes[0]
    return replace(plan, placed=comes if rng.random() < 0.8 else rng.choice(decodes))


def _nobody(rng: random.Random, plan: RoomPlan, decodes: list[str], nodes: list[NodeSpec]) -> RoomPlan:
    """Nobody comes, or too late for the room, or for one of the two."""
    late = rng.choice((None, 0.6, 1.5))
    claims = () if late is None else (replace(plan.claims[0], after_s=late),)
    return replace(plan, claims=claims, budget_s=0.5)


def _early(rng: random.Random, plan: RoomPlan, decodes: list[str], nodes: list[NodeSpec]) -> RoomPlan:
    """Decode comes long before prefill's engine, and perhaps gives up before that."""
    plan = _first(plan, after_s=-rng.choice((0.3, 1.0)), budget_s=rng.choice((0.2, 12.0)))
    return replace(plan, at=plan.at + 1.0)


def _bad_first(rng: random.Random, plan: RoomPlan, decodes: list[str], nodes: list[NodeSpec]) -> RoomPlan:
    """The first that comes has another claim."""
    before = (plan.claims[0].after_s if plan.claims else 0.0) - rng.choice((0.001, 0.01))
    return _also(plan, replace(_next(rng, plan, decodes, (before,)), wrong=True))


def _two(rng: random.Random, plan: RoomPlan, decodes: list[str], nodes: list[NodeSpec]) -> RoomPlan:
    """Another decode comes while the first has the room, or after."""
    claim = _next(rng, plan, decodes, (-0.002, 0.0, 0.003, 0.01, 0.1, 1.0))
    return _also(plan, replace(claim, publish_s=0.0, follows=rng.random() < 0.3))


def _placed_again(rng: random.Random, plan: RoomPlan, decodes: list[str], nodes: list[NodeSpec]) -> RoomPlan:
    """The placer gives a retained room to the next attempt: in time, late or never."""
    claim = _next(rng, plan, decodes, (0.0, 0.001, 0.005, 0.03))
    plan = replace(plan, placed=plan.claims[0].node if plan.claims else claim.node, retain_s=2.0)
    given_s = rng.choice((None, 0.0, claim.after_s + 0.005))
    return _also(plan, replace(claim, publish_s=0.0, given_s=given_s, follows=rng.random() < 0.5))


def _retained(rng: random.Random, plan: RoomPlan, decodes: list[str], nodes: list[NodeSpec]) -> RoomPlan:
    """The room survives its bindings, and other decodes follow one after the other."""
    plan = replace(plan, retain_s=2.0, close_s=rng.choice((None, 1.5)))
    for after_s in (0.3, 0.6, 0.9, 1.2)[: rng.randint(1, 4)]:
        plan = _also(plan, replace(_next(rng, plan, decodes, (after_s,)), abort_s=rng.choice((None, 0.03))))
    return plan


def _given_up(rng: random.Random, plan: RoomPlan, decodes: list[str], nodes: list[NodeSpec]) -> RoomPlan:
    """Decode ends its half, perhaps after all has landed."""
    return _first(plan, abort_s=rng.choice((0.001, 0.005, 0.02, 0.05)))


def _doubled(rng: random.Random, plan: RoomPlan, decodes: list[str], nodes: list[NodeSpec]) -> RoomPlan:
    """A destination is heard twice, the second time perhaps another one."""
    claims = tuple(
        replace(claim, repeat=rng.choice(REPEATS), repeat_s=rng.choice((0.0, 0.002, 0.03, 0.3)))
        for claim in plan.claims
    )
    return replace(plan, claims=claims)


def _evicted(rng: random.Random, plan: RoomPlan, decodes: list[str], nodes: list[NodeSpec]) -> RoomPlan:
    """Prefill's engine lacks memory: while nobody has bound the room, or when somebody has."""
    plan = replace(plan, evict_s=rng.choice((0.0, 0.005, 0.05)))
    return _first(plan, after_s=rng.choice((0.0, 0.01, 0.2)))


def _declined(rng: random.Random, plan: RoomPlan, decodes: list[str], nodes: list[NodeSpec]) -> RoomPlan:
    """A decode declines it: before it is opened, unbound or bound, with the claim, another one or none."""
    claim = _next(rng, plan, decodes, (-0.01, 0.0, 0.01, 0.05))
    kind = rng.random()
    return _also(plan, replace(claim, declines=True, wrong=kind < 0.3, unread=kind > 0.8))


def _open_rank(rng: random.Random, plan: RoomPlan, decodes: list[str], nodes: list[NodeSpec]) -> RoomPlan:
    """Decode is not told the DP rank of prefill; prefill sends it on, perhaps twice."""
    instance = next(node.instance for node in nodes if node.name == plan.node)
    others = [node.name for node in nodes if node.instance == instance and node.name != plan.node]
    plan = replace(plan, announce=rng.random() < 0.9)
    if others and rng.random() < 0.2:
        plan = replace(plan, twin=rng.choice(others))
    changed = {"hint": bool(others) and rng.random() < 0.6, "moved": bool(others) and rng.random() < 0.5}
    return _first(plan, open_rank=True, **changed)


def _refused(rng: random.Random, plan: RoomPlan, decodes: list[str], nodes: list[NodeSpec]) -> RoomPlan:
    """Prefill's engine refuses it. Decode's destination waits for it by then, or comes later."""
    return _first(replace(plan, refuses=True), after_s=rng.choice((-0.05, -0.003, 0.0, 0.02, 0.5)))


def _again(rng: random.Random, plan: RoomPlan, decodes: list[str], nodes: list[NodeSpec]) -> RoomPlan:
    """Its number is used a second time."""
    return replace(plan, again_s=rng.choice((0.01, 0.2, 1.0)))


STORIES = (
    _nothing,
    _placed,
    _nobody,
    _early,
    _bad_first,
    _two,
    _placed_again,
    _placed_again,
    _retained,
    _given_up,
    _doubled,
    _doubled,
    _evicted,
    _declined,
    _open_rank,
    _refused,
    _again,
)
