"""The sabotage tool: its table fits the code, it catches, and it never touches the working tree."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[3]


def tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def mutants() -> ModuleType:
    return tool("mutants")


@pytest.fixture(scope="module")
def sabotages() -> ModuleType:
    return tool("sabotages")


def test_each_sabotage_names_one_place(mutants: ModuleType) -> None:
    table = mutants.MUTANTS
    assert len(table) >= 12
    assert len({m.name for m in table}) == len(table)
    for mutant in table:
        text = (ROOT / "src" / "segue" / mutant.file).read_text()
        times = text.count(mutant.old)
        assert times == 1, f"{mutant.name}: occurs {times} times in {mutant.file}; bring it up to date"
        assert mutant.new != mutant.old
        compile(text.replace(mutant.old, mutant.new), mutant.file, "exec")


@pytest.mark.slow
def test_a_sabotage_is_caught_in_a_copy(mutants: ModuleType) -> None:
    mutant = next(m for m in mutants.MUTANTS if m.name == "unproven fence is a proof")
    path = ROOT / "src" / "segue" / mutant.file
    before = path.read_bytes()
    catch = mutants.hunt(mutant, 0, 60, 120)
    assert catch.seeds > 0
    assert catch.rule == "4"
    assert path.read_bytes() == before


@pytest.mark.slow
def test_the_unchanged_code_survives(mutants: ModuleType) -> None:
    assert mutants.hunt(None, 0, 5, 120).seeds == 0


@pytest.mark.slow
def test_a_sabotage_without_end_is_caught_at_its_seed(mutants: ModuleType) -> None:
    late = mutants.Mutant(
        "late", "lab/sim/run.py", "    deployment = deploy(", LATE + "    deployment = deploy(", ""
    )
    catch = mutants.hunt(late, 0, 10, 12)
    assert (catch.seeds, catch.rule) == (3, "hang")


ORIGINAL = """
class Pool:
    def release(self, pages):
        self.check(pages)
        if len(pages) > self.free:
            raise ValueError
        self.free += len(pages)
"""
MOVED = """
import itertools

class PagePool(Base):
    @override
    def give_back(
        self, pages
    ):
        self.check( pages )
        if len(pages) > self.free:
            raise ValueError
        self.free += len(
            pages)
"""
OTHER_NEIGHBOUR = ORIGINAL.replace("self.check(pages)", "self.verify(pages)")


def test_a_sabotage_is_known_again_in_another_file_under_other_names(sabotages: ModuleType) -> None:
    """A verdict is of the changed statement and those around it."""
    keys = [each.key for each in sabotages.sabotages("kv/pool.py", ORIGINAL)]
    assert len(keys) == len(set(keys)) > 4
    assert [each.key for each in sabotages.sabotages("engine/pages.py", MOVED)] == keys
    changed = [each.key for each in sabotages.sabotages("kv/pool.py", OTHER_NEIGHBOUR)]
    still = [key in changed for key in keys]
    assert any(still)
    assert not all(still)


#: Endless in the third seed.
LATE = "    while scenario.seed == 2: pass\n"
