"""Consoles and progress bars of rich that print text as it is.

Names, paths and other programs' messages hold brackets and colons, which rich takes for markup and emoji
codes: `pip install 'segue[nixl]'` was printed as `pip install 'segue'`.
"""

from __future__ import annotations

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import Progress, ProgressColumn, TextColumn


def terminal(*, stderr: bool = False) -> Console:
    """A console without markup and emoji codes, also in tables and their titles; `style=` gives colours."""
    return Console(stderr=stderr, markup=False, emoji=False)


def progress(*columns: ProgressColumn) -> Progress:
    """A bar on standard error: each task's description, then `columns`. Off unless that is a terminal."""
    console = terminal(stderr=True)
    text = TextColumn("{task.description}", markup=False)
    return Progress(text, *columns, console=console, transient=True, disable=not console.is_terminal)


def live(console: Console) -> Live:
    """A display on a `terminal` that is replaced as a whole; it takes the whole screen if there is one."""
    return Live(console=console, screen=console.is_terminal, auto_refresh=False)


__all__ = ["Console", "Group", "RenderableType", "live", "progress", "terminal"]
