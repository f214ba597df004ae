"""`segue sim`: which seeds it runs until when, what it counts, and what it makes of one that broke a rule."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from segue.kv.errors import ConfigError
from segue_lab.commands import sim

#: These seeds have a fault; each has 10 hand-offs.
FAULTED, BROKEN = {2, 3, 5}, {3, 5}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Any, ...]]]:
    """The runs, shrinks and replays that were started."""
    found: list[tuple[Any, ...]] = []

    def load(seed: int, only: str = "") -> Any:
        return SimpleNamespace(seed=seed, only=only, faults=[], requests=[], rooms=[])

    def run_scenario(scenario: Any, *, check_every: int, timeline: bool = False) -> Any:
        found.append(("shown" if timeline else "run", scenario.seed, scenario.only, check_every))
        seed = scenario.seed
        return SimpleNamespace(
            seed=seed,
            counts={"hand-offs": 10, "kills": seed},
            under_faults=10 if seed in FAULTED else 0,
            events=100,
            virtual_s=1800.0,
            failed=seed in BROKEN,
            rule="a rule",
            text=f"a rule of {seed}",
            timeline=["what happened"],
            features=[],
        )

    def shrink(scenario: Any, rule: str, *, budget: int, run: Any) -> Any:
        found.append(("shrunk", scenario.seed, rule))
        return scenario

    for name, double in {
        "load": load,
        "run_scenario": run_scenario,
        "shrink": shrink,
        "replay_command": lambda small, whole, check_every: f"again {small.seed} {small.only}",
    }.items():
        monkeypatch.setattr(sim, name, double)
    before = gc.get_threshold()
    yield found
    gc.set_threshold(*before)


def seeds(asked: list[tuple[Any, ...]]) -> list[int]:
    return [seed for what, seed, *_ in asked if what == "run"]


@pytest.mark.parametrize(
    ("words", "ran"),
    [
        ("", [0]),
        ("--seeds 3", [0, 1, 2]),
        ("--seed 7 --seeds 2", [7, 8]),
        ("--seed 6 --hand-offs 30", [6, 7, 8]),
        ("--seed 6 --hand-offs 31", [6, 7, 8, 9]),
        ("--seed 6 --hand-offs 10 --seeds 3", [6, 7, 8]),
        ("--seed 1 --hand-offs 10 --under-faults", [1, 2]),
        ("--seed 1 --hand-offs 20 --under-faults", [1, 2, 3]),
    ],
)
def test_seeds_are_run_until_what_was_asked_for_is_there(
    asked: list[tuple[Any, ...]], words: str, ran: list[int], tmp_path: Path
) -> None:
    file = tmp_path / "result.json"
    status = sim.main([*words.split(), "--json", str(file)])
    assert seeds(asked) == ran
    assert status == (1 if BROKEN & set(ran) else 0)
    result = json.loads(file.read_text())
    assert (result["first_seed"], result["seeds"]) == (ran[0], len(ran))
    assert (result["hand_offs"], result["events"]) == (10 * len(ran), 100 * len(ran))
    assert result["hand_offs_under_faults"] == 10 * len(FAULTED & set(ran))
    assert (result["virtual_hours"], result["counts"]["kills"]) == (len(ran) / 2, sum(ran))
    assert result["failed_seeds"] == [seed for seed in ran if seed in BROKEN]
    assert result["broken_rules"] == ({"a rule": len(BROKEN & set(ran))} if status else {})


def test_the_first_seed_that_broke_a_rule_is_made_small_and_told_and_the_others_are_counted(
    asked: list[tuple[Any, ...]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert sim.main(["--seed", "2", "--seeds", "5", "--check-every", "3"]) == 1
    assert [each for each in asked if each[0] != "run"] == [("shrunk", 3, "a rule"), ("shown", 3, "", 3)]
    assert {each[-1] for each in asked if each[0] == "run"} == {3}
    said = capsys.readouterr().out
    assert "seed 3 broke invariant a rule of 3\nwhat happened\n" in said
    assert "replay: again 3" in said
    assert said.endswith("2 seeds broke an invariant\n")


def test_of_one_seed_some_requests_and_faults_alone_are_run_as_they_were_asked_for(
    asked: list[tuple[Any, ...]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert sim.main(["--seed", "5", "--only", "r3,f1"]) == 1
    assert asked == [("run", 5, "r3,f1", 8), ("shown", 5, "r3,f1", 8)], "nothing is left to be made smaller"
    assert "replay: again 5 r3,f1" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words",
    [
        "--only r1 --seeds 2",
        "--only r1 --hand-offs 5",
        "--seeds 0",
        "--hand-offs 0",
        "--under-faults",
        "--check-every 0",
    ],
)
def test_what_cannot_be_meant_is_refused_before_anything_runs(
    asked: list[tuple[Any, ...]], words: str
) -> None:
    with pytest.raises(ConfigError):
        sim.main(words.split())
    assert asked == []
