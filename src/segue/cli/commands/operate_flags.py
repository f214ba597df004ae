"""The flags of the commands that look at a running fleet and steer it."""

from __future__ import annotations

import math

from segue.cli import flags
from segue.kv import ConfigError
from segue.server.settings.commands import OperatorConfig

#: Default of `--timeout` for `drain` and `resume`, in seconds.
TIMEOUT_S = 600.0


def add_arguments(command: flags.Parser) -> None:
    """The flags of one of the commands."""
    name = command.prog.rpartition(" ")[2]
    flags.add_settings(command, OperatorConfig)
    if name == "explain":
        command.add_argument(
            "request_id", metavar="REQUEST_ID", help="the X-Request-ID of the request's answer"
        )
    if name in ("ps", "explain"):
        command.add_argument("--json", action="store_true", help="print all that is known, as JSON")
        return
    named = command.add_mutually_exclusive_group(required=True) if name == "drain" else command
    named.add_argument(
        "instance",
        metavar="INSTANCE",
        nargs="?" if name == "drain" else None,
        help="first digits of its name, as segue ps shows it",
    )
    if name == "drain":
        named.add_argument(
            "--self",
            dest="self_",
            action="store_true",
            help="drain the instance of this pod or host, by what it has written about itself: for a preStop "
            "hook, or ExecStop= of systemd; needs no --registry",
        )
    if name == "switch":
        roles = ("prefill", "decode", "unified")
        command.add_argument("role", metavar="ROLE", choices=roles, help=f"its new role: {', '.join(roles)}")
    command.add_argument(
        "--timeout", metavar="S", default=str(TIMEOUT_S), help="seconds to wait (default: %(default)s)"
    )


def seconds(text: str) -> float:
    """The value of `--timeout`. Raises ConfigError."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise ConfigError(f"--timeout must be a number of seconds above 0, not {text!r}")
    return value
