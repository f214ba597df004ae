"""The diagrams of docs/protocol.md, drawn from the transition tables that the machines run on.

Text in, text out; run as a program it rewrites the generated part of that file. A test fails when the
file is out of date.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from segue.core.errors import ConfigError
from segue.core.types import KVPoll
from segue.handoff.lease import LEASE_TABLE, LeaseState
from segue.handoff.receiver import RECEIVER_TABLE, ReceiverMachine
from segue.handoff.sender import SENDER_TABLE, SenderMachine

DOC = Path(__file__).resolve().parents[1] / "docs" / "protocol.md"
BEGIN = "<!-- begin generated: python tools/diagram.py -->"
END = "<!-- end generated -->"

Table = Mapping[Any, Mapping[Any, Any]]


def mermaid(table: Table, ends: frozenset[Any]) -> str:
    """One table as a mermaid state diagram."""
    lines = ["stateDiagram-v2", f"    [*] --> {_id(next(iter(table)))}"]
    for state, steps in table.items():
        merged: dict[enum.StrEnum, list[str]] = {}
        for step, after in steps.items():
            merged.setdefault(after, []).append(str(step))
        lines += [
            f"    {_id(state)} --> {_id(after)}: {' / '.join(names)}" for after, names in merged.items()
        ]
    lines += [f"    {_id(state)} --> [*]" for state in table if state in ends]
    return "\n".join(lines)


def _id(state: enum.StrEnum) -> str:
    return state.value


def _phases(phases: Mapping[Any, KVPoll]) -> str:
    rows = [f"| `{state}` | `{phase.name}` |" for state, phase in phases.items()]
    return "\n".join(["| state | what `poll` answers |", "|---|---|", *rows])


def render() -> str:
    """The generated part of docs/protocol.md."""
    parts = [BEGIN, ""]
    for title, machine, table in (
        ("Sender (prefill)", SenderMachine, SENDER_TABLE),
        ("Receiver (decode)", ReceiverMachine, RECEIVER_TABLE),
    ):
        parts += [f"### {title}", "", "```mermaid", mermaid(table, machine.ENDS), "```", ""]
        parts += [_phases(machine.PHASES), ""]
    ends = frozenset({LeaseState.RELEASED})
    parts += ["### Lease (the pages of either half)", "", "```mermaid", mermaid(LEASE_TABLE, ends), "```", ""]
    return "\n".join([*parts, END])


def splice(text: str) -> str:
    """`text` with its generated part replaced. Raises ConfigError if it has none."""
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ConfigError(f"no generated part between '{BEGIN}' and '{END}'")
    return head + render() + tail


if __name__ == "__main__":
    DOC.write_text(splice(DOC.read_text(encoding="utf-8")), encoding="utf-8")
