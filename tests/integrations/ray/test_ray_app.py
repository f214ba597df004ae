"""The application of Ray Serve that a plan becomes, without a cluster. `make test-ray` runs it."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("ray.serve", exc_type=ImportError)


@pytest.mark.parametrize(
    "config",
    [
        {"prefill": {"replicas": 2, "one_per_node": True}},
        {"unified": {"replicas": 2, "cpus": 0.5, "resources": {"work": 1}}},
        {"pairs": 2, "prefill": {"replicas": 1, "one_per_node": True}, "decode": {"cpus": 3}},
        {"registry": "http://10.0.0.1:8998"},
    ],
    ids=["one_per_node", "unified", "pairs", "registry"],
)
def test_ray_takes_the_deployments_of_a_plan(config: dict[str, Any]) -> None:
    from ray.serve import Application

    from segue.integrations.ray import build_app

    assert isinstance(build_app({"model": "m", **config}), Application)
