"""docs/metrics.md lists what the code publishes, and nothing else."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
TOOL = "python tools/metrics_page.py"


def test_the_page_of_metrics_has_the_tables_that_the_code_makes() -> None:
    tables = runpy.run_path(str(ROOT / "tools" / "metrics_page.py"))["tables"]()
    page = (ROOT / "docs" / "metrics.md").read_text()
    written = dict(re.findall(r"^## (.+?)\n.*?\n\n(\| name \|.*?)(?=\n\n|\n?\Z)", page, re.M | re.S))
    assert written == tables, f"put the output of {TOOL} into docs/metrics.md"
