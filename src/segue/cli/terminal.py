"""Consoles and progress bars of rich that print text as it is, and JSON for a terminal.

Names, paths and other programs' messages hold brackets and colons, which rich takes for markup and emoji
codes: `pip install 'segue[nixl]'` was printed as `pip install 'segue'`. Texts of
clients and other programs can hold control characters, which a terminal obeys: they are escaped.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.live import Live
from rich.progress import Progress, ProgressColumn, TextColumn
from rich.segment import Segment

from segue.kv import ConfigError
from segue.server.observe.logs import printable_lines


class _Terminal(Console):
    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Text before it is cut to a column's width; what rich tells the terminal itself is no text."""
        for segment in super().render(renderable, options):
            plain = segment.text
            if segment.control or plain.isprintable():
                yield segment
            else:
                yield Segment(printable_lines(plain), segment.style)


def terminal(*, stderr: bool = False) -> Console:
    """A console without markup and emoji codes, also in tables and their titles; `style=` gives colours."""
    return _Terminal(stderr=stderr, markup=False, emoji=False)


def print_json(value: object) -> None:
    """Print `value` as JSON in lines, with what a terminal does not print as JSON's escape sequences."""
    text = msgspec.json.format(msgspec.json.encode(value)).decode()
    print("".join(char if char == "\n" or char.isprintable() else _escaped(char) for char in text))


def write_json(file: str, value: object) -> None:
    """Write `value` as JSON in lines to `file`, `--json FILE` of a command. Raises ConfigError."""
    try:
        Path(file).write_bytes(msgspec.json.format(msgspec.json.encode(value)) + b"\n")
    except OSError as exc:
        raise ConfigError(f"--json {file} cannot be written: {exc.strerror}") from exc


def _escaped(char: str) -> str:
    units = char.encode("utf-16-be")
    return "".join(f"\\u{units[at : at + 2].hex()}" for at in range(0, len(units), 2))


def progress(*columns: ProgressColumn) -> Progress:
    """A bar on standard error: each task's description, then `columns`. Off unless that is a terminal."""
    console = terminal(stderr=True)
    text = TextColumn("{task.description}", markup=False)
    return Progress(text, *columns, console=console, transient=True, disable=not console.is_terminal)


def live(console: Console) -> Live:
    """A display on a `terminal` that is replaced as a whole; it takes the whole screen if there is one."""
    return Live(console=console, screen=console.is_terminal, auto_refresh=False)


__all__ = ["Console", "Group", "RenderableType", "live", "print_json", "progress", "terminal", "write_json"]
