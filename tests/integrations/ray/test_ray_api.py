"""Our use of Ray against the names and parameters that were recorded from its package.

`make test-ray` compares the record with the Ray that is installed there.
"""

from __future__ import annotations

import ast
import json
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import pytest
from ray_api import PLACES, RECORDED, record, signatures

VERSIONS: dict[str, dict[str, dict[str, str]]] = json.loads(RECORDED.read_text())
found = find_spec("segue.integrations.ray")
assert found is not None
assert found.origin is not None
OURS = Path(found.origin).parent
BACKEND = signatures((OURS / "ray_connector.py").read_text(), "SegueConnectorBackend")
BASE, _, FACTORY, CONFIG, DEPLOYMENT = (f"{path}:{cls}" for path, cls, _ in PLACES)


@pytest.mark.parametrize("ray", sorted(VERSIONS))
def test_the_backend_is_called_as_this_version_calls_it(ray: str) -> None:
    base = VERSIONS[ray][BASE]
    assert set(BACKEND) <= set(base)
    flags = ("requires_peer_binding", "concurrent_handoff")
    assert {name: BACKEND[name] for name in flags} == dict.fromkeys(flags, "True")
    calls = {name: text.removeprefix("abstract ") for name, text in base.items() if name not in flags}
    assert {name: text for name, text in BACKEND.items() if name not in flags}.items() <= calls.items()
    assert {name for name, text in base.items() if text.startswith("abstract ")} <= set(BACKEND)


@pytest.mark.parametrize("ray", sorted(VERSIONS))
def test_the_configuration_takes_what_the_backend_fills_in(ray: str) -> None:
    assert VERSIONS[ray][CONFIG] == {"update_engine_kwargs": "(self)"}


@pytest.mark.parametrize("ray", sorted(VERSIONS))
def test_each_option_of_a_deployment_exists(ray: str) -> None:
    """`_internal` with `version` is Ray's own: without it each `serve.run` replaces every actor."""
    known = VERSIONS[ray][DEPLOYMENT]["options"].strip("()").split(", ")
    calls = [
        node
        for node in ast.walk(ast.parse((OURS / "ray_app.py").read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "options"
    ]
    given = {keyword.arg for call in calls for keyword in call.keywords if keyword.arg is not None}
    assert {"version", "_internal", "num_replicas", "gang_scheduling_config"} <= given <= set(known)


def test_the_record_is_that_of_the_installed_ray() -> None:
    try:
        installed = version("ray")
    except PackageNotFoundError:
        pytest.skip("Ray is not installed here; make test-ray has it")
    spec = find_spec("ray")
    assert spec is not None
    assert spec.origin is not None
    assert record(Path(spec.origin).parents[1]) == VERSIONS[installed]
