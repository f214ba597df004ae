"""segue's log within another engine's: it goes where the engine's goes, with clients' text escaped."""

from __future__ import annotations

import logging
from copy import copy

from segue.kv.printable import printable

#: Characters of one line.
LINE_CHARS = 4096


class EscapedLog(logging.Handler):
    """Passes records to the handlers of `engine`, the engine's own logger. Characters that a terminal does
    not print are escaped: peers and clients give names and errors that segue writes into its log. A traceback
    keeps its lines."""

    def __init__(self, engine: logging.Logger) -> None:
        super().__init__()
        self._engine = engine

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler`."""
        shown = copy(record)
        shown.msg, shown.args = printable(record.getMessage(), LINE_CHARS), None
        if record.exc_info:
            lines = logging.Formatter().formatException(record.exc_info).splitlines()
            shown.exc_text, shown.exc_info = "\n".join(printable(line, LINE_CHARS) for line in lines), None
        for handler in self._engine.handlers:
            if record.levelno >= handler.level:
                handler.handle(shown)


def log_into(engine: logging.Logger) -> None:
    """Write segue's log by the handlers that `engine` has when a line is written. Idempotent."""
    own = logging.getLogger("segue")
    if not any(isinstance(handler, EscapedLog) for handler in own.handlers):
        own.addHandler(EscapedLog(engine))
        own.propagate = False
        own.setLevel(engine.level or logging.INFO)
