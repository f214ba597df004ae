"""docs/protocol.md shows the tables that the machines run on. Run this file to rewrite it."""

from __future__ import annotations

from pathlib import Path

import pytest

from segue.core.errors import ConfigError
from segue.handoff.diagram import BEGIN, END, mermaid, render, splice
from segue.handoff.sender import SENDER_TABLE, SenderMachine

DOC = Path(__file__).resolve().parents[2] / "docs" / "protocol.md"


def test_the_document_shows_the_tables_as_they_are() -> None:
    text = DOC.read_text(encoding="utf-8")
    assert splice(text) == text, f"{DOC} is out of date: run `python {Path(__file__).name}`"


def test_every_transition_is_drawn_once() -> None:
    drawing = mermaid(SENDER_TABLE, SenderMachine.ENDS)
    for state, steps in SENDER_TABLE.items():
        for step, after in steps.items():
            lines = [
                line for line in drawing.splitlines() if line.strip().startswith(f"{state} --> {after}:")
            ]
            assert len(lines) == 1
            assert str(step) in lines[0]


def test_only_the_generated_part_is_replaced() -> None:
    assert splice(f"before\n{BEGIN}\nold\n{END}\nafter\n") == f"before\n{render()}\nafter\n"
    with pytest.raises(ConfigError):
        splice("no markers")


if __name__ == "__main__":
    DOC.write_text(splice(DOC.read_text(encoding="utf-8")), encoding="utf-8")
