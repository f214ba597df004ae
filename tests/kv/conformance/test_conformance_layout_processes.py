"""Pairs of layouts between two real processes: whatever the sizes of the two sides, decode's ranks hold every
byte afterwards and nothing else, and no byte crosses the wire twice."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from layouts import SHAPES, TOKENS, Sizes
from segue.kv.ids import Role, new_room
from segue.kv.layout.planner import PairPlan, plan_pair

#: Published with the results: `docs/results.md`.
SEED = 11
PAIRS = 200
PROCESS = Path(__file__).with_name("layout_process.py")


class Drawn(NamedTuple):
    """A pair of layouts, the tokens that decode has already, and where the second chunk begins."""

    kind: str
    prefill: Sizes
    decode: Sizes
    prefix: int
    cut: int

    @property
    def plan(self) -> PairPlan:
        """The copy plan: each source rank with its targets."""
        pages = [-(-TOKENS // sizes.page) + 3 for sizes in (self.prefill, self.decode)]
        return plan_pair(self.prefill.ranks(self.kind, pages[0]), self.decode.ranks(self.kind, pages[1]))


def drawn(seed: int, count: int) -> list[Drawn]:
    """So many pairs that differ."""
    rng, found = random.Random(f"layouts {seed}"), dict[Drawn, None]()
    while len(found) < count:
        sides = [
            Sizes(
                rng.choice((1, 2, 3, 4, 8)),
                rng.choice((1, 2, 4)),
                rng.choice((1, 2)) if role is Role.PREFILL else 1,
                rng.choice((1, 16, 64)),
            )
            for role in (Role.PREFILL, Role.DECODE)
        ]
        found[Drawn(rng.choice(list(SHAPES)), *sides, rng.choice((0, 17)), rng.randint(18, TOKENS - 1))] = (
            None
        )
    return list(found)


class SideProcess:
    """One side, driven by lines of JSON."""

    def __init__(self, role: Role, transport: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(PROCESS), role.value, transport],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def tell(self, what: str, **order: Any) -> None:
        """Have it do something."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": what, **order}) + "\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """The answer to the oldest open order; fails if the process has ended."""
        assert self.process.stdout is not None
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answer

    def ask(self, what: str, **order: Any) -> dict[str, Any]:
        """Both."""
        self.tell(what, **order)
        return self.answer()


@contextmanager
def two_processes(transport: str) -> Iterator[tuple[SideProcess, SideProcess]]:
    sides = SideProcess(Role.PREFILL, transport), SideProcess(Role.DECODE, transport)
    try:
        yield sides
    finally:
        for side in sides:
            for pipe in (side.process.stdin, side.process.stdout):
                assert pipe is not None
                pipe.close()
            side.process.kill()
            side.process.wait(10)


def hand_over(prefill: SideProcess, decode: SideProcess, pair: Drawn) -> None:
    for side, sizes in ((prefill, pair.prefill), (decode, pair.decode)):
        side.tell("open", kind=pair.kind, sizes=sizes)
    ours, theirs = prefill.answer(), decode.answer()
    decode.ask("meet", leader=ours["me"], address=ours["address"])
    transfer = [new_room(), 0, ours["me"], theirs["me"]]
    for side in (prefill, decode):
        side.tell("hand over", transfer=transfer, prefix=pair.prefix, cut=pair.cut)
    sent, landed = prefill.answer(), decode.answer()
    assert landed["wrong"] == [], pair
    assert sent["wire"] == (TOKENS - pair.prefix) * SHAPES[pair.kind].token_bytes, pair
    for side in (prefill, decode):
        side.tell("close")
    for side in (prefill, decode):
        side.answer()


#: What must be among the pairs, so often at least.
AMONG: dict[str, Callable[[Drawn], bool]] = {
    "KV that crosses once and is passed on": lambda p: bool(p.plan.relays),
    "prefill ranks that hold the same": lambda p: p.prefill.tp > SHAPES[p.kind].kv_heads,
    "context parallelism": lambda p: p.prefill.cp > 1,
    "cut heads": lambda p: (
        SHAPES[p.kind].kv_heads > 1 and p.prefill.tp != p.decode.tp and 1 not in (p.prefill.tp, p.decode.tp)
    ),
    "cut layers": lambda p: p.prefill.pp != p.decode.pp,
    "unequal pages": lambda p: p.prefill.page != p.decode.page,
    "tokens that decode has": lambda p: p.prefix > 0,
} | {kind: lambda p, kind=kind: p.kind == kind for kind in SHAPES}  # type: ignore[misc]


def test_every_sort_of_pair_is_among_those_that_real_processes_hand_over() -> None:
    pairs = drawn(SEED, PAIRS)
    found = Counter(name for pair in pairs for name, is_one in AMONG.items() if is_one(pair))
    assert len(pairs) >= 200
    assert {name for name in AMONG if found[name] < 20} == set(), found
    for side, values in (("prefill", (1, 2)), ("decode", (1,))):
        sizes = [getattr(pair, side) for pair in pairs]
        assert {s.tp for s in sizes} == {1, 2, 3, 4, 8}
        assert {s.pp for s in sizes} == {1, 2, 4}
        assert {s.cp for s in sizes} == set(values)
        assert {s.page for s in sizes} == {1, 16, 64}


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_two_hundred_pairs_of_layouts_move_every_byte_once_between_real_processes(transport: str) -> None:
    with two_processes(transport) as (prefill, decode):
        for pair in drawn(SEED, PAIRS):
            hand_over(prefill, decode, pair)


@pytest.mark.slow
@pytest.mark.parametrize(("transport", "pairs"), [("shm", 40), ("tcp", 3)])
def test_some_pairs_of_layouts_move_every_byte_once_between_real_processes(
    transport: str, pairs: int
) -> None:
    with two_processes(transport) as (prefill, decode):
        for pair in drawn(SEED + 1, pairs):
            hand_over(prefill, decode, pair)
