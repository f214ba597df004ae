"""The one writer of a terminal: lines of children, log events and announcements, none torn by another.

It writes from threads of its own, so that a reader that stopped (Ctrl-S, a full pipe) or a slow disk never
stops the supervisor.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections import deque
from typing import TextIO

from segue.server.observe.logs import forwarded, printable_lines

_COLOURS = (36, 33, 32, 35, 34, 31)
#: Lines that may wait for a terminal or a disk; more are dropped and counted.
WAITING_LINES = 10_000
#: The name of the process that has the terminal, in lines of its own.
OWN = "serve"
#: Characters that may wait, where lines are long.
WAITING_CHARS = 8 * 2**20
#: How long an announcement waits for lines that were before it.
PATIENCE_S = 1.0


class _Writer:
    """Writes texts to their streams, in order, in a thread of its own, until a stream raises OSError."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._items: deque[tuple[TextIO, str]] = deque()
        self._chars = 0
        self._news = threading.Condition()
        self._closed = False
        #: Nothing is queued or being written.
        self._idle = True
        self.dropped = 0
        self.thread = threading.Thread(target=self._run, name="console", daemon=True)
        self.thread.start()

    def put(self, out: TextIO, text: str, *, droppable: bool) -> bool:
        """Queue a text; False if nobody takes it any more. A droppable one is counted instead when there are
        too many."""
        with self._news:
            if self._closed or not self.thread.is_alive():
                self.dropped += droppable
                return False
            if droppable and (len(self._items) >= self._limit or self._chars >= WAITING_CHARS):
                self.dropped += 1
            else:
                self._items.append((out, text))
                self._chars += len(text)
                self._idle = False
                self._news.notify_all()
            return True

    def drain(self, timeout_s: float) -> None:
        """Wait until all that is queued is written, at most `timeout_s`."""
        with self._news:
            self._news.wait_for(lambda: self._idle or not self.thread.is_alive(), timeout_s)

    def close(self, timeout_s: float) -> None:
        """Write what is queued, within `timeout_s`. Idempotent."""
        with self._news:
            self._closed = True
            self._news.notify_all()
        self.thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            with self._news:
                if not self._items:
                    self._idle = True
                    self._news.notify_all()
                while not self._items:
                    if self._closed:
                        return
                    self._news.wait()
                out, text = self._items.popleft()
                self._chars -= len(text)
            try:
                _write(out, text)
            except (OSError, ValueError):  # nobody reads any more, or the file was closed
                return


class Console:
    """Writes whole lines to a terminal or file.

    `line` is for children, and drops lines beyond `limit`. `write` makes it the stream of a logging handler.
    With the `log_format` json each line but those of `announce` is a JSON object.
    """

    def __init__(
        self,
        out: TextIO | None = None,
        limit: int = WAITING_LINES,
        log_format: str = "text",
    ) -> None:
        self._json = log_format == "json"
        self._out = sys.stderr if out is None else out
        self._colour = self._out.isatty()
        self._colours: dict[str, int] = {}
        self._terminal = _Writer(limit)

    @property
    def dropped(self) -> int:
        """Lines of children that found no room."""
        return self._terminal.dropped

    def line(self, name: str, text: str) -> None:
        """Queue one line of the child `name`; what a terminal does not print is escaped."""
        text = printable_lines(text)
        self._terminal.put(self._out, f"{self._shown(name, text)}\n", droppable=True)

    def _shown(self, name: str, text: str) -> str:
        """A line with its origin."""
        if self._json:
            return forwarded(name, text)
        prefix = f"{name:<10} | "
        if self._colour and name != OWN:
            colour = self._colours.setdefault(name, _COLOURS[len(self._colours) % len(_COLOURS)])
            prefix = f"\x1b[{colour}m{prefix}\x1b[0m"
        return prefix + text

    def write(self, text: str) -> None:
        """Queue whole lines of our own, as they are."""
        if not self._terminal.put(self._out, text, droppable=False):
            with contextlib.suppress(OSError, ValueError):
                _write(self._out, text)

    def flush(self) -> None:
        """A stream of a logging handler has it; the thread flushes each line."""

    def say(self, text: str) -> None:
        """Queue one line of our own."""
        self.write(f"{forwarded(OWN, text, 'info') if self._json else text}\n")

    def announce(self, text: str, out: TextIO | None = None) -> None:
        """Write one line to standard output, after all others. Where that is not the same terminal, a stream
        that stands still delays it by `PATIENCE_S` at most."""
        out = sys.stdout if out is None else out
        if not (_same(out, self._out) and self._terminal.put(out, f"{text}\n", droppable=False)):
            self._terminal.drain(PATIENCE_S)
            _write(out, f"{text}\n")

    def close(self, timeout_s: float = 2.0) -> None:
        """Write what is queued, within `timeout_s`. Idempotent."""
        if self.dropped and self._terminal.put(self._out, "", droppable=False):
            self.write(self._shown(OWN, f"event=log_lines_dropped count={self.dropped}") + "\n")
        self._terminal.close(timeout_s)


def _write(out: TextIO, text: str) -> None:
    out.write(text)
    out.flush()


def _same(one: TextIO, other: TextIO) -> bool:
    """Whether both write to the same terminal or file."""
    try:
        return os.path.sameopenfile(one.fileno(), other.fileno())
    except (OSError, ValueError):
        return one is other
