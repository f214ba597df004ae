"""The examples run as the documentation says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_handover(transport: str) -> None:
    command = [sys.executable, str(ROOT / "examples" / "handover.py"), transport]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "first token 42, KV equal\n"


def test_the_example_is_short() -> None:
    source = (ROOT / "examples" / "handover.py").read_text()
    assert sum(1 for line in source.splitlines() if line.strip()) < 60
