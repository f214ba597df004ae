"""The sabotages of `tools/mutants.py` fit the code: each names one place."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_each_sabotage_names_one_place() -> None:
    spec = importlib.util.spec_from_file_location("mutants", ROOT / "tools" / "mutants.py")
    assert spec is not None
    assert spec.loader is not None
    mutants = sys.modules["mutants"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(mutants)
    table = mutants.MUTANTS
    assert len({m.name for m in table}) == len(table)
    for mutant in table:
        text = (ROOT / "src" / "segue" / mutant.file).read_text()
        times = text.count(mutant.old)
        assert times == 1, f"{mutant.name}: occurs {times} times in {mutant.file}; bring it up to date"
        assert mutant.new != mutant.old
        compile(text.replace(mutant.old, mutant.new), mutant.file, "exec")
