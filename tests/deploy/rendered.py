"""The objects that the chart and the kustomize overlays make, and the tools that make them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
CHART = DEPLOY / "chart"
KUSTOMIZE = DEPLOY / "kubernetes"
#: `make cluster` installs it.
CLUSTER = Path(os.environ.get("CLUSTER_VENV") or Path(sys.prefix) / "cluster")
#: By kind and name.
Objects = dict[tuple[str, str], dict[str, Any]]


def missing() -> str:
    """The reason why a test of the manifests cannot run here; empty: it can."""
    return "" if (CLUSTER / "bin" / "helm").exists() else "helm and kubectl are not installed: make cluster"


def tool(name: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run one of the tools."""
    command = [str(CLUSTER / "bin" / name), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def objects(text: str) -> Objects:
    """The objects of a stream of YAML; no two may have the same kind and name."""
    found = [each for each in yaml.safe_load_all(text) if each]
    by_name = {(each["kind"], each["metadata"]["name"]): each for each in found}
    assert len(by_name) == len(found)
    return by_name


def chart(*values: str, release: str = "segue") -> str:
    """The chart's objects as YAML; each of `values` is a `--set`."""
    done = tool("helm", "template", release, str(CHART), *(word for one in values for word in ("--set", one)))
    assert done.returncode == 0, done.stderr
    return done.stdout


def kustomize(folder: Path) -> str:
    """The objects of a kustomization as YAML."""
    done = tool("kubectl", "kustomize", "--load-restrictor=LoadRestrictionsNone", str(folder))
    assert done.returncode == 0, done.stderr
    return done.stdout


def ordered(value: Any) -> Any:
    """`value` with lists of named things in the order of their names, as Kubernetes treats them."""
    if isinstance(value, dict):
        return {key: ordered(one) for key, one in value.items()}
    if isinstance(value, list):
        items = [ordered(one) for one in value]
        for key in ("name", "mountPath", "containerPort"):
            if items and all(isinstance(one, dict) and key in one for one in items):
                return sorted(items, key=lambda one: str(one[key]))
        return items
    return value
