"""The one writer of a terminal: lines of children, log events and announcements, none torn by another.

It writes from threads of its own, so that a reader that stopped (Ctrl-S, a full pipe) or a slow disk never
stops the supervisor.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TextIO, TypeVar

from segue.server.observe.logs import forwarded

_COLOURS = (36, 33, 32, 35, 34, 31)
#: Lines that may wait for a terminal or a disk; more are dropped and counted.
WAITING_LINES = 10_000
#: The name of the process that has the terminal, in lines of its own.
OWN = "serve"
#: Characters that may wait, where lines are long.
WAITING_CHARS = 8 * 2**20
#: How long an announcement waits for lines that were before it.
PATIENCE_S = 1.0
#: Size at which the log file of a child begins again; the one before is kept beside it.
LOG_BYTES = 4 * 2**20
#: Folders of earlier runs that failed and are kept.
KEPT_FOLDERS = 8
#: How the folder of a run is called: its time and its process. No other folder is removed.
_RUN = re.compile(r"\d{8}T\d{6}-\d+")

T = TypeVar("T")


class _Writer(Generic[T]):
    """Calls `write` with each item and its text, in order, in a thread of its own, until `write` raises
    OSError: then `failed` is called."""

    def __init__(
        self,
        name: str,
        write: Callable[[T, str], None],
        limit: int,
        failed: Callable[[Exception], None] = lambda _: None,
    ) -> None:
        self._write = write
        self._limit = limit
        self._failed = failed
        self._items: deque[tuple[T, str]] = deque()
        self._chars = 0
        self._news = threading.Condition()
        self._closed = False
        #: Nothing is queued or being written.
        self._idle = True
        self.dropped = 0
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    def put(self, item: T, text: str, *, droppable: bool) -> bool:
        """Queue an item; False if nobody takes it any more. A droppable one is counted instead when there are
        too many."""
        with self._news:
            if self._closed or not self.thread.is_alive():
                self.dropped += droppable
                return False
            if droppable and (len(self._items) >= self._limit or self._chars >= WAITING_CHARS):
                self.dropped += 1
            else:
                self._items.append((item, text))
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
                item, text = self._items.popleft()
                self._chars -= len(text)
            try:
                self._write(item, text)
            except (OSError, ValueError) as exc:  # nobody reads any more, or the file was closed
                self._failed(exc)
                return


class Console:
    """Writes whole lines to a terminal or file, and those of children to `folder` as well.

    `line` is for children, and drops lines beyond `limit`. `write` makes it the stream of a logging handler.
    With the `log_format` json each line but those of `announce` is a JSON object.
    """

    def __init__(
        self,
        out: TextIO | None = None,
        limit: int = WAITING_LINES,
        folder: LogFolder | None = None,
        log_format: str = "text",
    ) -> None:
        self._json = log_format == "json"
        self._out = sys.stderr if out is None else out
        self._colour = self._out.isatty()
        self._colours: dict[str, int] = {}
        self._terminal: _Writer[TextIO] = _Writer("console", _write, limit)
        self._folder = folder
        self._files: _Writer[str] | None = None
        if folder is not None:
            self._files = _Writer("log-files", folder.append, limit, self._without_files)

    @property
    def dropped(self) -> int:
        """Lines of children that found no room."""
        return self._terminal.dropped

    def line(self, name: str, text: str) -> None:
        """Queue one line of the child `name`."""
        if self._files is not None:
            self._files.put(name, f"{text}\n", droppable=True)
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

    def log_of(self, name: str) -> Path | None:
        """The file with the whole log of a child, if there is one."""
        return None if self._folder is None else self._folder.file(name)

    def _without_files(self, error: Exception) -> None:
        """The disk is full, say, or the folder was removed."""
        self._folder = None
        self.write(
            self._shown(OWN, f"event=log_files_end reason={str(error)!r}; no log files from here on") + "\n"
        )

    def close(self, timeout_s: float = 2.0) -> None:
        """Write what is queued, within `timeout_s`. Idempotent."""
        if self.dropped and self._terminal.put(self._out, "", droppable=False):
            self.write(self._shown(OWN, f"event=log_lines_dropped count={self.dropped}") + "\n")
        if self._files is not None:  # its failure is said on the terminal
            self._files.close(timeout_s)
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


class LogFolder:
    """The folder of one run below `parent`, with a log file of bounded size for each child.

    Made when it is created (raises OSError). Folders of earlier runs beyond the newest `KEPT_FOLDERS` are
    removed, but for those whose process lives.
    """

    def __init__(self, parent: Path, limit_bytes: int = LOG_BYTES) -> None:
        self._limit = limit_bytes
        self._sizes: dict[str, int] = {}
        parent.mkdir(parents=True, exist_ok=True)
        _remove_old(parent)
        self.path = parent / f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{os.getpid()}"
        self.path.mkdir(mode=0o700)
        self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def file(self, name: str) -> Path:
        """The log of the child `name`."""
        return self.path / f"{name}.log"

    def append(self, name: str, text: str) -> None:
        """Add a line to the log of `name`. Raises OSError."""
        path, data = self.file(name), text.encode("utf-8", "replace")
        if self._sizes.get(name, 0) and self._sizes[name] + len(data) > self._limit:
            path.replace(path.with_suffix(".log.1"))
            self._sizes[name] = 0
        with path.open("ab", buffering=0) as out:
            out.write(data)
        self._sizes[name] = self._sizes.get(name, 0) + len(data)

    def close(self, *, keep: bool) -> None:
        """Let go of the folder; remove it if it is empty, or nobody is to read it. Idempotent."""
        if self._lock < 0:
            return
        os.close(self._lock)
        self._lock = -1
        if not keep or not self._sizes:
            shutil.rmtree(self.path, ignore_errors=True)


def _remove_old(parent: Path) -> None:
    runs = sorted((p for p in parent.iterdir() if _RUN.fullmatch(p.name)), reverse=True)
    for old in runs[KEPT_FOLDERS - 1 :]:
        with contextlib.suppress(OSError):
            lock = os.open(old, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(old, ignore_errors=True)
            finally:
                os.close(lock)
