"""The commit and machine beside every number of a bench, and the quantiles."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def commit() -> str:
    """The commit that the working tree stands on."""
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def quantile(values: Sequence[float], q: float) -> float:
    """The value at `q` (0 to 1) of `values` in order; no interpolation."""
    return sorted(values)[min(len(values) - 1, round(q * (len(values) - 1)))]
