"""Whole deployments under faults, in virtual time: a slice of what `make soak` does for longer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from segue.cli.sim import main
from segue.sim.run import Outcome, load, replay_command, run_scenario, shrink
from segue.sim.scenario import FEATURES, make_scenario

#: About a minute on one core.
SLICE_SEEDS = 480
SOAK_HAND_OFFS = 1_000_000


@pytest.mark.parametrize("part", range(8))
def test_no_invariant_breaks_under_faults(part: int) -> None:
    size = SLICE_SEEDS // 8
    counts: Counter[str] = Counter()
    for seed in range(part * size, (part + 1) * size):
        outcome = run_scenario(load(seed))
        assert not outcome.failed, f"segue sim --seed {seed}: {outcome.text}"
        counts.update(outcome.counts)
    # A simulator in which nothing happens finds nothing.
    assert counts["hand-offs"] > 50 * size
    assert counts["succeeded"] > counts["hand-offs"] // 3
    expected = ("retries", "quarantined", "done", "failed", "late", "aborted", "mismatches")
    for happened in (*expected, "continued", "sent again without a forward"):
        assert counts[happened] > 0, happened


def test_every_feature_is_drawn_and_every_fault_strikes() -> None:
    features: Counter[str] = Counter()
    struck: Counter[str] = Counter()
    drawn: Counter[str] = Counter()
    for seed in range(400):
        scenario = make_scenario(seed)
        features.update(scenario.features)
        drawn.update(fault.kind for fault in scenario.faults)
    assert set(features) == set(FEATURES)
    for seed in range(60):
        struck.update(run_scenario(load(seed)).struck)
    assert set(drawn) == set(struck)


def digest_in_a_process(seed: int, hash_seed: str) -> str:
    code = (
        "import sys\nfrom segue.sim.run import load, run_scenario\n"
        "print(run_scenario(load(int(sys.argv[1])), digest=True).digest)"
    )
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    done = subprocess.run(
        [sys.executable, "-c", code, str(seed)],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return done.stdout.strip()


@pytest.mark.parametrize("seed", [3, 8, 21])
def test_the_same_seed_is_the_same_run_in_every_process(seed: int) -> None:
    first, second = digest_in_a_process(seed, "1"), digest_in_a_process(seed, "2")
    assert first == second != ""
    assert run_scenario(load(seed + 1), digest=True).digest != first


def test_a_calm_deployment_serves_everybody() -> None:
    calm = [s for s in range(200) if not make_scenario(s).features][:10]
    assert len(calm) == 10
    for seed in calm:
        scenario = load(seed)
        outcome = run_scenario(scenario)
        assert not outcome.failed, outcome.text
        assert outcome.counts["done"] == len(scenario.requests)


def test_shrinking_keeps_what_matters() -> None:
    scenario = load(5)
    needed = {scenario.requests[3].name, scenario.requests[40 % len(scenario.requests)].name}

    def run(candidate: object) -> Outcome:
        fails = needed <= {r.name for r in candidate.requests}  # type: ignore[attr-defined]
        return Outcome(5, 0, 0.0, {}, [], rule="4" if fails else "")

    small = shrink(scenario, "4", run=run)
    assert {r.name for r in small.requests} == needed
    assert not small.faults
    command = replay_command(small, scenario)
    assert command.startswith("segue sim --seed 5 --only ")
    assert set(command.split()[-1].split(",")) == needed


def test_the_command_reports_what_it_did(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "sim.json"
    assert main(["--seed", "11", "--seeds", "2", "--json", str(file)]) == 0
    result = json.loads(file.read_text())
    assert (result["first_seed"], result["seeds"], result["failed_seeds"]) == (11, 2, [])
    assert result["hand_offs"] > 0
    assert "2 seeds" in capsys.readouterr().out


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_a_million_hand_offs(capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["--seed", "2000000", "--hand-offs", str(SOAK_HAND_OFFS)])
    with capsys.disabled():
        sys.stdout.write(capsys.readouterr().out)
    assert status == 0
