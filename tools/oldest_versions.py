"""Print pip constraints that hold each direct dependency to the lowest version that pyproject.toml allows.

    python tools/oldest_versions.py serve engine otel > constraints-oldest.txt

The arguments are extras. A requirement without a lower bound is an error: nobody knows what it runs with.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

PYPROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"


def oldest(extras: list[str]) -> list[str]:
    """One `name==version` for each dependency of the project and of `extras` that applies to this Python."""
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    optional = project["optional-dependencies"]
    found = []
    for text in [*project["dependencies"], *(text for extra in extras for text in optional[extra])]:
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate():
            continue
        floors = [spec.version for spec in requirement.specifier if spec.operator in (">=", "==", "~=")]
        if len(floors) != 1:
            raise SystemExit(f"{text}: give one lower bound in {PYPROJECT.name}")
        found.append(f"{requirement.name}=={floors[0]}")
    return found


if __name__ == "__main__":
    print("\n".join(oldest(sys.argv[1:])))
