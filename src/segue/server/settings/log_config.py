"""What a process logs: a branch of its settings."""

from __future__ import annotations

from dataclasses import dataclass

from segue.server.settings.layers import text

LOG_LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True, slots=True, kw_only=True)
class LogConfig:
    """What is written to standard error."""

    log_level: str = text("least severe events to log", "info", choices=LOG_LEVELS, metavar="L")
