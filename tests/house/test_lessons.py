"""docs/lessons.md names tests that exist, and no lesson is left out."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LESSONS = {f"{n:02}" for n in range(1, 26)}
ROW = re.compile(r"^\|\s*(\d\d)\s*\|[^|]+\|([^|]*)\|$", re.M)


def all_tests() -> set[str]:
    texts = (path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    return {name for text in texts for name in re.findall(r"^\s*(?:async )?def (test_\w+)", text, re.M)}


def faults(page: str, there: set[str]) -> list[str]:
    """Faults of the table in `page`."""
    rows = ROW.findall(page)
    numbers = [row[0] for row in rows]
    found = [f"lesson {n} is not in the table exactly once" for n in LESSONS if numbers.count(n) != 1]
    for number, tests in rows:
        named = re.findall(r"`(test_\w+)`", tests)
        found += [f"{name} of lesson {number} does not exist" for name in named if name not in there]
        if not any(name.startswith(f"test_lesson_{number}_") for name in named):
            found.append(f"lesson {number} has no test of its name")
    return found


def test_each_lesson_has_a_test_that_exists() -> None:
    there = all_tests()
    assert len(there) > 500
    assert faults((ROOT / "docs" / "lessons.md").read_text(), there) == []


def test_every_test_of_a_lesson_names_one_that_exists() -> None:
    named = {re.match(r"test_lesson_(\d+)", name) for name in all_tests() if "test_lesson_" in name}
    assert {match.group(1) for match in named if match} <= LESSONS
