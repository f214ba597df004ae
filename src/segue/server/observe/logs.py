"""Log lines on standard error, one event a line: as text for people, or as JSON for programs.

A line that concerns a request has its id: `log.info("event=…", extra=about(request_id))`. Text ends with
`request_id=ID`, JSON has the key `request_id`.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from types import TracebackType
from typing import Protocol

from segue.kv.printable import printable
from segue.server.messages.records import RequestRecord
from segue.server.settings.shared_config import LogConfig

log = logging.getLogger("segue.requests")
#: Ends of requests that nobody needs to look at.
_ORDINARY = {"INVALID_REQUEST", "ABORTED_BY_CLIENT"}
#: Characters of one line; what a client sends may be in it.
_LINE_CHARS = 16 * 2**10


class TextStream(Protocol):
    """The stream of a log handler: each event is one call of `write`."""

    def write(self, text: str, /) -> object:
        """Write whole lines."""
        ...

    def flush(self) -> object:
        """Write what is kept back."""
        ...


class TextFormatter(logging.Formatter):
    """`2026-11-21T03:43:40.123Z INFO  decode-0 segue.leader event=… request_id=…`. Newlines and all other
    characters that a terminal does not print are escaped; a traceback keeps its lines."""

    def __init__(self, part: str) -> None:
        super().__init__()
        self._part = f"{part} " if part else ""

    def format(self, record: logging.LogRecord) -> str:
        head = f"{_when(record.created)} {record.levelname:<7} {self._part}{record.name}"
        line = f"{head} {printable(record.getMessage(), _LINE_CHARS)}"
        if request_id := record.__dict__.get("request_id"):
            line += f" request_id={printable(request_id)}"
        if record.exc_info:
            line += "\n" + printable_lines(self.formatException(record.exc_info))
        return line


class JsonFormatter(logging.Formatter):
    """One JSON object a line: `ts`, `level`, `part`, `logger`, `message`; `request_id`, `rank` and
    `exception` (a traceback) where there is one. Without a `part` whoever forwards the line adds it."""

    def __init__(self, part: str, rank: int = 0) -> None:
        super().__init__()
        self._part = {"part": part} if part else {}
        self._rank = {"rank": rank} if rank else {}

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "ts": _when(record.created),
            "level": record.levelname.lower(),
            **self._part,
        }
        line |= {**self._rank, "logger": record.name, "message": record.getMessage()}
        if request_id := record.__dict__.get("request_id"):
            line["request_id"] = request_id
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def configure(config: LogConfig, part: str = "", stream: TextStream | None = None, *, rank: int = 0) -> None:
    """Send all events of at least the configured level to `stream` (default: standard error). `part` names
    the process, and is left out where a supervisor adds it to each line."""
    handler = logging.StreamHandler(sys.stderr if stream is None else stream)
    if config.log_format == "json":
        handler.setFormatter(JsonFormatter(part, rank))
        sys.excepthook, threading.excepthook = _uncaught, _uncaught_in_thread
    else:
        handler.setFormatter(TextFormatter(f"{part} rank {rank}" if rank else part))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("segue").setLevel(config.log_level.upper())
    logging.captureWarnings(True)


def event(logger: logging.Logger, name: str, **parts: object) -> None:
    """Log `event=name` with its parts as `key=value`; a value with spaces is quoted."""
    words = [f"{k}={v!r}" if isinstance(v, str) and " " in v else f"{k}={v}" for k, v in parts.items()]
    logger.info("%s", " ".join([f"event={name}", *words]))


def printable_lines(text: str) -> str:
    """`text` for a terminal: its lines stay, and what else a terminal does not print is escaped."""
    if text.isprintable():
        return text
    return "\n".join(printable(line, _LINE_CHARS) for line in text.split("\n"))


def say(text: str, level: int = logging.ERROR) -> None:
    """Print a sentence of a command on standard error, as `segue: …` or as the log's JSON."""
    if any(isinstance(handler.formatter, JsonFormatter) for handler in logging.getLogger().handlers):
        logging.getLogger("segue.cli").log(level, "%s", text)
    else:
        sys.stderr.write(f"segue: {printable_lines(text)}\n")
        sys.stderr.flush()


def log_record(record: RequestRecord) -> None:
    """Log the end of a request in an instance: a failure as a warning, the rest at level debug."""
    code = record.error.code.value if record.error is not None else "none"
    level = logging.DEBUG if record.error is None or code in _ORDINARY else logging.WARNING
    text = record.error.text if record.error is not None else ""
    parts = record.seconds, code, text
    log.log(level, "event=ended seconds=%.3f code=%s reason=%r", *parts, extra=about(record.request_id))


def about(request_id: str) -> dict[str, str]:
    """The `extra` of a log line that concerns a request."""
    return {"request_id": request_id}


def forwarded(part: str, text: str, level: str = "warning") -> str:
    """The JSON line of a child's line: its own with `part`, or a wrapping of what it has not logged."""
    wrapped = {"ts": _when(time.time()), "level": level, "part": part, "message": text}
    return json.dumps({**wrapped, **_logged(text), "part": part})


def as_text(line: str) -> str:
    """A line of a log for people: of a JSON line its message and traceback."""
    found = _logged(line)
    return "; ".join(str(found[key]) for key in ("message", "exception") if key in found) or line


def _logged(line: str) -> dict[str, object]:
    """The object of a line that a `JsonFormatter` has written; empty for another line."""
    try:
        found = json.loads(line) if line.startswith('{"ts"') else {}
    except (ValueError, RecursionError):  # a line that was cut
        return {}
    return found if isinstance(found, dict) and "message" in found else {}


def _when(seconds: float) -> str:
    whole, ms = divmod(int(seconds * 1000), 1000)
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(whole))}.{ms:03d}Z"


def _uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    log.critical("uncaught %s", kind.__name__, exc_info=(kind, error, trace))


def _uncaught_in_thread(args: threading.ExceptHookArgs) -> None:
    if args.exc_value is not None:
        _uncaught(args.exc_type, args.exc_value, args.exc_traceback)
