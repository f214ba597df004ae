"""Several frontends over one fleet, killed and started while they serve; instances that change roles."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import soak_changes
import tiny_model
import traffic
from cluster import Cluster
from engine_models import HYBRIDS
from soak_changes import FRONTENDS, NAMES
from soak_kills import Report, leaks

from segue.kv.ids import Role

pytestmark = pytest.mark.timeout(300)

#: No request ends by its deadline before a test does: who holds nothing in the end has been told so.
LIMITS = ("--request-budget-s", "200")
PLAN = [
    ("decode-1", Role.PREFILL),
    ("decode-1", Role.UNIFIED),
    ("decode-1", Role.DECODE),
    ("prefill-1", Role.DECODE),
]
TOTAL = 100


@pytest.fixture(scope="module")
def fleet(_nobody_outlives_its_module: None, tiny: Path) -> Iterator[Cluster]:
    with Cluster(tiny, NAMES, limits=LIMITS, frontends=FRONTENDS) as cluster:
        yield cluster


async def changed(cluster: Cluster, act: Any, acts: int, **more: Any) -> tuple[Report, soak_changes.Spread]:
    asks = traffic.asks(61, 24, vocab=tiny_model.VOCAB - 8, longest=200, max_tokens=40)
    return await soak_changes.run(cluster, asks, act, total=TOTAL, acts=acts, clients=8, **more)


def check(report: Report) -> None:
    assert report.wrong == [], "\n".join(report.wrong[:5])
    assert report.failed == {}, report.untyped
    assert report.failed_begun == {}, report.untyped
    assert report.hangs == 0
    assert report.completed >= TOTAL
    assert leaks(report) == []


def test_frontends_are_killed_under_load_and_what_they_had_begun_is_ended_everywhere(fleet: Cluster) -> None:
    killed: list[dict[str, float]] = []
    act = soak_changes.frontend_killer(fleet, killed)
    report, load = asyncio.run(changed(fleet, act, 2, met=lambda load: any(load.cut.values())))
    check(report)
    assert len(killed) >= 2
    assert sum(load.cut.values()) > 0, "no frontend streamed when it was killed"


def test_roles_are_switched_under_load_and_no_request_fails(fleet: Cluster) -> None:
    switch(fleet, PLAN)


@pytest.mark.soak
def test_roles_are_switched_of_instances_whose_model_keeps_a_state(tmp_path: Path) -> None:
    make, sizes = HYBRIDS["lfm2"]
    folder = tiny_model.save(tmp_path / "model", make(**{**sizes, "vocab_size": tiny_model.VOCAB}))
    with Cluster(folder, NAMES, limits=LIMITS, frontends=FRONTENDS) as cluster:
        switch(cluster, PLAN)


def switch(cluster: Cluster, plan: list[tuple[str, Role]]) -> None:
    switched: list[dict[str, Any]] = []

    async def soak() -> Report:
        report, _ = await changed(cluster, soak_changes.switcher(cluster, switched, plan), len(plan))
        await soak_changes.back(cluster, switched)
        report.after = await asyncio.to_thread(cluster.rest)
        return report

    check(asyncio.run(soak()))
    assert [(one["name"], one["to"]) for one in switched][: len(plan)] == plan
