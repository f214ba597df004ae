"""The diagrams of docs/protocol.md, drawn from the tables that the machines run on.

Text in, text out; run as a program it rewrites the generated part of that file. A test fails when the
file is out of date.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from segue.kv.errors import ConfigError
from segue.kv.protocol.events import Event
from segue.kv.protocol.lease import LEASE_TABLE, Lease
from segue.kv.protocol.link import PeerLink
from segue.kv.protocol.machine import Machine
from segue.kv.protocol.receiver import ReceiverMachine
from segue.kv.protocol.sender import SenderMachine

DOC = Path(__file__).resolve().parents[1] / "docs" / "protocol.md"
BEGIN = "<!-- begin generated: python tools/diagram.py -->"
END = "<!-- end generated -->"

#: state → what leads on → the next states
Moves = Mapping[Any, Mapping[str, tuple[Any, ...]]]


def mermaid(moves: Moves, ends: frozenset[Any]) -> str:
    """One machine as a mermaid state diagram."""
    lines = ["stateDiagram-v2", f"    [*] --> {next(iter(moves)).value}"]
    for state, labels in moves.items():
        merged: dict[enum.StrEnum, list[str]] = {}
        for label, afters in labels.items():
            for after in afters:
                merged.setdefault(after, []).append(label)
        for after, names in merged.items():
            lines.append(f"    {state.value} --> {after.value}: {' / '.join(names)}")
    lines += [f"    {state.value} --> [*]" for state in moves if state in ends]
    return "\n".join(lines)


def moves_of(machine: type[Machine]) -> Moves:
    """The transitions from each state of `machine`: events, and those that follow by themselves."""
    found: dict[Any, dict[str, tuple[Any, ...]]] = {}
    for state, table in machine.TABLE.items():
        found[state] = {_label(event): row[1:] for event, row in table.items()}
        if state in machine.FOLLOWS:
            condition, _, after = machine.FOLLOWS[state]
            found[state][f"({condition.__name__.strip('_')})"] = (after,)
    return found


def _label(event: type[Any]) -> str:
    if event is PeerLink:
        return "PeerUp"
    return event.__name__ if event in get_args(Event) else f"{event.__name__} received"


def _states(machine: type[Machine]) -> str:
    rows = [f"| `{state}` | `{phase.name}` | {lease} |" for state, (phase, lease) in machine.STATES.items()]
    return "\n".join(["| state | answer of `poll` | pages |", "|---|---|---|", *rows])


def render() -> str:
    """The generated part of docs/protocol.md."""
    parts = [BEGIN, ""]
    for title, machine in (("Sender (prefill)", SenderMachine), ("Receiver (decode)", ReceiverMachine)):
        ends = frozenset(state for state, (_, lease) in machine.STATES.items() if lease is Lease.RELEASED)
        parts += [f"### {title}", "", "```mermaid", mermaid(moves_of(machine), ends), "```", ""]
        parts += [_states(machine), ""]
    leases = {lease: {why: (after,) for why, after in moves.items()} for lease, moves in LEASE_TABLE.items()}
    drawing = mermaid(leases, frozenset({Lease.RELEASED}))
    parts += ["### Lease (the pages of either half)", "", "```mermaid", drawing, "```", ""]
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
