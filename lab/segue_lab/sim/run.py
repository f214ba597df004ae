"""Running seeds: one seed, many, shrinking a failing one, telling its story."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from segue.kv.errors import ChecksumMismatch
from segue.kv.protocol import events
from segue_lab.sim.deployment import CHECK_EVERY, Deployment
from segue_lab.sim.scenario import Fault, Scenario, make_scenario
from segue_lab.sim.sim_engine import WrongKV
from segue_lab.sim.world import Injected, Violation, World


@dataclass(slots=True)
class Outcome:
    """The outcome of one run of one scenario. `rule` is empty when every invariant held."""

    seed: int
    events: int
    virtual_s: float
    counts: dict[str, int]
    features: list[str]
    rule: str = ""
    text: str = ""
    rooms: tuple[int, ...] = ()
    timeline: list[str] = field(default_factory=list)
    digest: str = ""
    injected: dict[str, int] = field(default_factory=dict)

    @property
    def failed(self) -> bool:
        """An invariant was broken."""
        return bool(self.rule)

    @property
    def under_faults(self) -> int:
        """The hand-offs of this run if it had at least one fault, else 0. Odd clients and odd
        deployments (aborts, bad requests, skew, small pools, …) are no faults here."""
        return self.counts.get("hand-offs", 0) if self.injected else 0


class _Watcher(logging.Handler):
    """An exception that production caught and logged is a bug, unless the simulator threw it."""

    def __init__(self, world: World) -> None:
        super().__init__(logging.ERROR)
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if (
            error is None
            or isinstance(error, Injected | Violation | WrongKV | ChecksumMismatch)
            or "injected" in str(error)
        ):
            return
        if isinstance(error, GeneratorExit):  # its process was killed
            return
        self._world.fail(Violation("12", f"{record.getMessage()}: {error!r}"))


@contextmanager
def watched(world: World) -> Iterator[None]:
    """Production's log, read by the simulator instead of being written."""
    log = logging.getLogger("segue")
    level, propagate, handlers = log.level, log.propagate, log.handlers[:]
    log.handlers[:], log.propagate = [_Watcher(world)], False
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)
        log.propagate, log.handlers[:] = propagate, handlers


def run_scenario(
    scenario: Scenario,
    *,
    timeline: bool = False,
    digest: bool = False,
    check_every: int = CHECK_EVERY,
) -> Outcome:
    """Run one scenario to its end, or to the first invariant that does not hold. The tables of a node are
    looked at each `check_every` turns of leaders; everything else is at each effect."""
    deployment = Deployment(scenario, check_every, records=timeline or digest)
    world = deployment.world
    rule = text = ""
    rooms: tuple[int, ...] = ()
    try:
        with watched(world):
            try:
                deployment.run()
            finally:
                deployment.close()
    except Violation as exc:
        rule, text, rooms = exc.rule, str(exc), exc.rooms
    except WrongKV as exc:
        rule, text = "5", str(exc)
    except Exception as exc:
        rule, text = "crash", f"{type(exc).__name__}: {exc}"
        if timeline:
            import traceback

            text += "\n" + "".join(traceback.format_tb(exc.__traceback__)[-6:])
    outcome = Outcome(
        seed=scenario.seed,
        events=world.events,
        virtual_s=world.now,
        counts=dict(deployment.counts),
        features=sorted(scenario.features),
        rule=rule,
        text=text,
        rooms=rooms,
        digest=world.digest() if digest else "",
        injected=dict(deployment.injected),
    )
    if timeline:
        outcome.timeline = tell(deployment, rooms)
    return outcome


def tell(deployment: Deployment, rooms: tuple[int, ...], limit: int = 200) -> list[str]:
    """The events of these rooms, and everything that has none; the last `limit` lines."""
    # All rooms of the request: an earlier attempt is part of the story.
    wanted = set(rooms)
    for room in rooms:
        asked = deployment.rooms.get(room)
        if asked is not None:
            wanted.update(asked.rooms)
    lines: list[str] = []
    for time, who, what in deployment.world.trace:
        if isinstance(what, events.Tick) or not _concerns(what, wanted):
            continue
        text = what if isinstance(what, str) else describe(what)
        lines.append(f"{time * 1e3:12.3f} ms  {who:<12} {text}")
    return lines[-limit:]


def _concerns(what: Any, rooms: set[int]) -> bool:
    """Whether a note belongs to one of `rooms`, or to none at all. No rooms: everything does."""
    if not rooms:
        return True
    if isinstance(what, str):
        return "room" not in what or any(f"{room:x}" in what for room in rooms)
    message = getattr(what, "message", what)
    about = getattr(message, "transfer", None) or getattr(message, "key", None)
    return about is None or about.room in rooms


def describe(what: Any) -> str:
    """One line for an event, an effect or a fault."""
    if isinstance(what, Fault):
        return (
            f"{what.kind} {what.name}: {what.node} {what.other} {what.seconds:.3f} s after {what.trigger!r}"
        )
    if isinstance(what, events.Send):
        return f"  → {describe(what.message)}"
    if isinstance(what, events.Received):
        return f"← {describe(what.message)}"
    if isinstance(what, events.PeerUp | events.PeerDown):
        why = f" dead={what.dead} ({what.error.text})" if isinstance(what, events.PeerDown) else ""
        return f"{type(what).__name__} {what.peer}{why}"
    parts = [type(what).__name__]
    if isinstance(what, events.Effect):
        parts.insert(0, " ")
    about = getattr(what, "transfer", None) or getattr(what, "key", None)
    if about is not None:
        parts.append(str(about))
    for name in ("phase", "epoch", "tag", "span", "pages", "prefix_tokens", "proven", "sequence", "final"):
        value = getattr(what, name, None)
        if value is not None:
            shown = f"{value:x}" if name == "epoch" else getattr(value, "name", None) or str(value)
            parts.append(f"{name}={shown}")
    problem = getattr(what, "error", None)
    if problem is not None:
        parts.append(f"{problem.code}: {problem.text}")
    return " ".join(parts)


def shrink(
    scenario: Scenario, rule: str, *, budget: int = 150, run: Callable[[Scenario], Outcome] = run_scenario
) -> Scenario:
    """Fewer requests and faults that still break the same rule (delta debugging, at most `budget` runs)."""
    names = scenario.names
    size = max(1, len(names) // 2)
    while budget > 0 and names:
        start, smaller = 0, False
        while start < len(names) and budget > 0:
            rest = names[:start] + names[start + size :]
            budget -= 1
            if run(scenario.only(frozenset(rest))).rule == rule:
                names, smaller = rest, True
            else:
                start += size
        if size == 1 and not smaller:
            break
        size = max(1, size // 2) if not smaller or size > 1 else 1
    return scenario.only(frozenset(names))


def replay_command(scenario: Scenario, whole: Scenario, check_every: int = CHECK_EVERY) -> str:
    """The one command that shows this run again."""
    words = ["segue sim --seed", str(scenario.seed)]
    if len(scenario.names) != len(whole.names):
        words += ["--only", ",".join(scenario.names)]
    if check_every != CHECK_EVERY:
        words += ["--check-every", str(check_every)]
    return " ".join(words)


def load(seed: int, only: str = "") -> Scenario:
    """The scenario of `seed`, cut down to the named requests and faults if there are any."""
    scenario = make_scenario(seed)
    return scenario.only(frozenset(only.split(","))) if only else scenario
