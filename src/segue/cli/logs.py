"""Log lines for people and machines: one event a line on standard error, `key=value` where it has parts."""

from __future__ import annotations

import logging
import sys
import time
from typing import Protocol


class TextStream(Protocol):
    """The stream of a log handler: each event is one call of `write`."""

    def write(self, text: str, /) -> object:
        """Write whole lines."""
        ...

    def flush(self) -> object:
        """Write what is kept back."""
        ...


class OneLineFormatter(logging.Formatter):
    """`2026-11-21T03:43:40.123Z INFO  decode-0 segue.leader event=… ` with newlines escaped, except
    in a traceback, which stays readable."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = f"{name} " if name else ""

    def format(self, record: logging.LogRecord) -> str:
        when = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        message = record.getMessage().replace("\r", "\\r").replace("\n", "\\n")
        head = f"{when}.{int(record.msecs):03d}Z {record.levelname:<7} {self._name}{record.name}"
        line = f"{head} {message}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


def configure(level: str, name: str = "", stream: TextStream | None = None) -> None:
    """Send all events of at least `level` to `stream` (default: standard error); `name` is the instance's
    name and is left out where a supervisor puts it before each line."""
    handler = logging.StreamHandler(sys.stderr if stream is None else stream)
    handler.setFormatter(OneLineFormatter(name))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("segue").setLevel(level.upper())
    logging.captureWarnings(True)


def event(logger: logging.Logger, name: str, **parts: object) -> None:
    """Log `event=name` with its parts as `key=value`; a value with spaces is quoted."""
    words = [f"{k}={v!r}" if isinstance(v, str) and " " in v else f"{k}={v}" for k, v in parts.items()]
    logger.info("%s", " ".join([f"event={name}", *words]))
