"""docs/protocol.md shows the tables that the machines run on; `python tools/diagram.py` rewrites it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from segue.kv.errors import ConfigError
from segue.kv.protocol.link import PeerLink
from segue.kv.protocol.sender import SenderMachine

_FILE = Path(__file__).resolve().parents[3] / "tools" / "diagram.py"
_SPEC = importlib.util.spec_from_file_location("diagram", _FILE)
assert _SPEC is not None
assert _SPEC.loader is not None
diagram = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(diagram)


def test_the_document_shows_the_tables_as_they_are() -> None:
    text = diagram.DOC.read_text(encoding="utf-8")
    assert diagram.splice(text) == text, f"{diagram.DOC} is out of date: run `python tools/diagram.py`"


def test_every_transition_is_drawn_once() -> None:
    drawing = diagram.mermaid(diagram.moves_of(SenderMachine), frozenset())
    moves = [
        (state, after, "PeerUp" if event is PeerLink else event.__name__)
        for state, table in SenderMachine.TABLE.items()
        for event, row in table.items()
        for after in row[1:]
    ]
    moves += [(state, after, name(holds)) for state, (holds, _, after) in SenderMachine.FOLLOWS.items()]
    for state, after, label in moves:
        lines = [line for line in drawing.splitlines() if line.strip().startswith(f"{state} --> {after}:")]
        assert len(lines) == 1
        assert label in lines[0]


def name(condition: object) -> str:
    return f"({condition.__name__.strip('_')})"  # type: ignore[attr-defined]


def test_only_the_generated_part_is_replaced() -> None:
    text = f"before\n{diagram.BEGIN}\nold\n{diagram.END}\nafter\n"
    assert diagram.splice(text) == f"before\n{diagram.render()}\nafter\n"
    with pytest.raises(ConfigError):
        diagram.splice("no markers")
