"""The chart's own commands, environment, probes and hooks, run in namespaces through a rolling update."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pods
import pytest
import rendered

BENCH = Path(__file__).resolve().parents[2] / "bench" / "manifests.py"


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_rolling_update_fails_no_request(tmp_path: Path) -> None:
    if reason := rendered.missing() or pods.missing():
        pytest.skip(reason)
    words = ["--short", "--requests", "60", "--rate", "4", "--min-ready-s", "8", "--logs", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, str(BENCH), *words], capture_output=True, text=True, timeout=380, check=False
    )
    logs = "".join(log.read_text()[-2000:] for log in tmp_path.iterdir())
    assert done.returncode == 0, done.stdout + done.stderr[-2000:] + logs
    assert "0 failed or with other tokens; 0 parts not at rest" in done.stdout
    # Kubernetes would have started it again.
    assert "fails its livenessProbe" not in done.stdout
    # Each pod that was replaced was drained by its hook, and all ended well.
    assert done.stdout.count("has left: status 0") == done.stdout.count("has left") >= 6
    assert done.stdout.count("preStop status 0") == done.stdout.count("preStop status") >= 4
