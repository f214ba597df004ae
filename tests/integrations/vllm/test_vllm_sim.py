"""vLLM's tables and worker sides in the simulator: EngineCore lives under its faults, and nothing is left."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from vllm_sim import VllmDeployment, vllm_scenario

from segue.integrations.vllm.vllm_pins import BlockPins
from segue.integrations.vllm.vllm_prefill_table import PrefillTable
from segue.integrations.vllm.vllm_worker import WorkerSide
from segue.lab.sim.run import Outcome, run_scenario


def run(seed: int) -> Outcome:
    return run_scenario(vllm_scenario(seed), deploy=VllmDeployment)


def check(seeds: range) -> Counter[str]:
    counts: Counter[str] = Counter()
    for seed in seeds:
        outcome = run(seed)
        assert not outcome.failed, f"seed {seed}: {outcome.text}"
        counts.update(outcome.counts)
    return counts


@pytest.mark.slow
def test_engine_core_lives_under_the_simulators_faults() -> None:
    counts = check(range(8))
    for what in ("loads", "preemptions", "clients that left", "ended error"):
        assert counts[f"vllm: {what}"], what


@pytest.mark.slow
def test_many_seeds() -> None:
    counts = check(range(10_000, 10_300))
    for code in ("CHECKSUM_MISMATCH", "PEER_RESTARTED", "LAYOUT_MISMATCH", "METADATA_MISMATCH", "INTERNAL"):
        assert counts[f"vllm: decode {code}"], code


def test_a_seed_is_the_same_run() -> None:
    first, again = run(3), run(3)
    assert (first.events, first.virtual_s, first.counts) == (again.events, again.virtual_s, again.counts)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "name", "text"),
    [
        (BlockPins, "hold", "a block of a hand-off is free"),
        (BlockPins, "release", "at rest holds"),
        (PrefillTable, "_preempted", "holds somebody else's KV"),
        (WorkerSide, "_release", "at rest"),
    ],
)
def test_a_bug_ends_the_run(monkeypatch: pytest.MonkeyPatch, kind: Any, name: str, text: str) -> None:
    monkeypatch.setattr(kind, name, lambda *_: False)
    # Another assert may be the first one in some of the runs.
    assert any(text in run(seed).text for seed in range(40))
