"""Each case in `scripts/` has the log that stands there. `REWRITE_SCRIPTS=1` writes what it is now."""

from __future__ import annotations

import itertools
import os
import re
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from script_driver import Desk

FOLDER = Path(__file__).with_name("scripts")


@dataclass
class Case:
    """A case or a setup: its lines but for the logs, and for each command its log as it is written."""

    title: str
    base: str
    with_: str = ""
    values: dict[str, list[str]] = field(default_factory=dict)
    commands: list[str] = field(default_factory=list)
    logs: list[list[str]] = field(default_factory=list)


def parsed(text: str) -> dict[str, Case]:
    """The setups and cases of a file, by their titles."""
    found: dict[str, Case] = {}
    case = None
    for line in text.splitlines():
        if head := re.fullmatch(r"(?:case|setup) (.+?)(?: from (\S+)(?: with (.+))?)?", line):
            assert head[1] not in found, f"two cases are {head[1]}"
            case = found[head[1]] = Case(head[1], head[2] or "", head[3] or "")
        elif line.startswith("#") or not line.strip():
            continue
        elif case is None:
            raise ValueError(f"before the first case: {line}")
        elif values := re.fullmatch(r"for (\w+) in (.+)", line):
            case.values[values[1]] = [each.strip() for each in values[2].split("|")]
        elif line.startswith("  "):
            case.logs[-1].append(line)
        else:
            case.commands.append(line)
            case.logs.append([])
    return found


def before(cases: dict[str, Case], case: Case, chosen: dict[str, str]) -> list[str]:
    """The commands of what a case builds on."""
    base = filled(case.base, chosen)
    return [*before(cases, cases[base], chosen), *cases[base].commands] if base else []


def filled(line: str, chosen: dict[str, str]) -> str:
    return re.sub(r"\$(\w+)", lambda found: chosen[found[1]], line)


def run(cases: dict[str, Case], case: Case) -> list[list[str]]:
    """The logs of a case's commands, equal for all its values."""
    found: list[list[str]] = []
    for values in itertools.product(*case.values.values()):
        chosen = dict(zip(case.values, values, strict=True))
        chosen["with"] = filled(case.with_, chosen)
        logs = once([filled(line, chosen) for line in before(cases, case, chosen)], case, chosen)
        assert not found or logs == found, f"{chosen} has another log than the first value"
        found = logs
    return found


def once(base: list[str], case: Case, chosen: dict[str, str]) -> list[list[str]]:
    commands = [filled(line, chosen) for line in case.commands]
    ways = [at for at, line in enumerate(commands) if line.startswith("- ")]
    shared = base + commands[: ways[0]] if ways else []
    desk, logs = Desk(), []
    for line in base:
        desk.do(line)
    for line in commands:
        if line.startswith("- "):
            desk.rest()
            desk = Desk()
            for earlier in shared:
                desk.do(earlier)
        logs.append(desk.do(line.removeprefix("- ")))
    desk.rest()
    return logs


def rewritten(text: str) -> str:
    cases, lines = parsed(text), []
    logs = iter([log for case in cases.values() for log in run(cases, case)])
    for line in text.splitlines():
        if line.startswith("  "):
            continue
        lines.append(line)
        if line and not re.match(r"#|case |setup |for ", line):
            lines += next(logs)
    return "\n".join(lines) + "\n"


FILES = {path.stem: path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("*.txt"))}
ALL = [(name, title) for name, text in FILES.items() for title in parsed(text)]


@pytest.mark.parametrize(
    ("name", "title"), ALL, ids=[f"{name}-{title.replace(' ', '_')}" for name, title in ALL]
)
def test_script(name: str, title: str) -> None:
    cases = parsed(FILES[name])
    found = run(cases, cases[title])
    if os.environ.get("REWRITE_SCRIPTS"):
        FOLDER.joinpath(f"{name}.txt").write_text(rewritten(FILES[name]), encoding="utf-8")
        return
    wanted = cases[title]
    told = list(zip(wanted.commands, found, strict=True))
    assert told == list(zip(wanted.commands, wanted.logs, strict=True))
