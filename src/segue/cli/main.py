"""The `segue` command. Importing this module imports neither torch nor an HTTP library.

Exit status: 0 after a clean end, 2 for a wrong setting (one sentence on standard error), 1 otherwise.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Sequence

from segue import __version__
from segue.cli import extras, flags
from segue.cli.commands import bench_flags, client_flags, keys_flags, operate_flags
from segue.cli.home import make_home
from segue.kv import ConfigError, SegueError
from segue.server.observe import logs
from segue.server.settings.commands import COMMANDS, DoctorConfig, FrontendConfig, InstanceConfig, ServeConfig
from segue.server.settings.layers import nearest
from segue.server.settings.shared_config import LogConfig

Handler = Callable[[argparse.Namespace], int]

_EXAMPLES = {
    "serve": "segue serve Qwen/Qwen3-0.6B --prefill 1 --decode 2",
    "prefill": "segue prefill --model smollm2 --bootstrap-port 8998",
    "decode": "segue decode --model smollm2 --registry http://127.0.0.1:8998",
    "unified": "segue unified --model smollm2 --registry http://127.0.0.1:8998",
    "frontend": "segue frontend --registry http://127.0.0.1:8998 --port 8000",
    "ps": "segue ps",
    "drain": "segue drain 3f9a12c4 --timeout 120",
    "resume": "segue resume 3f9a12c4",
    "switch": "segue switch 3f9a12c4 decode",
    "top": "segue top",
    "explain": "segue explain 6f1d2c0e",
    "sim": "segue sim --seeds 200",
    "bench": "segue bench --requests 64 --concurrency 8 --json result.json",
    "advise": "segue advise smollm2 --measure --rate 0.5 --input-tokens 128-1024 --slo-itl-ms 100",
    "doctor": "segue doctor --registry http://10.0.0.1:8998 --secret-file segue.secret --json report.json",
    "keys": "segue keys tls --part prefill=10.0.0.1 --part decode=10.0.0.2,decode.example",
    "version": "segue version",
}

_PROCESSES = "segue.cli.commands.processes"
#: The module and function of each command. A module is imported when its command runs.
_RUN = {
    "serve": (_PROCESSES, "serve_command"),
    **dict.fromkeys(("prefill", "decode", "unified"), (_PROCESSES, "instance")),
    "frontend": (_PROCESSES, "frontend"),
    **dict.fromkeys(
        ("ps", "drain", "resume", "switch", "explain"), ("segue.cli.commands.operate_commands", "operate")
    ),
    "top": ("segue.cli.commands.top_command", "top"),
    "bench": ("segue.cli.commands.bench", "bench"),
    "sim": ("segue_lab.commands.sim", "run"),
    "advise": ("segue_lab.commands.advise", "run"),
    "doctor": ("segue.cli.doctor.doctor_command", "doctor_command"),
    "keys": ("segue.cli.commands.issue_keys", "keys"),
    "version": ("segue.cli.main", "version"),
}

#: The commands as `segue --help` shows them.
_GROUPS = {
    "start": ("serve", "prefill", "decode", "unified", "frontend"),
    "look at a running fleet and steer it": ("ps", "top", "explain", "drain", "resume", "switch"),
    "measure and plan": ("bench", "advise", "doctor", "sim"),
    "prepare": ("keys",),
    "about segue": ("version",),
}

#: Commands for a running fleet.
_OPERATOR = {
    "ps": "show the instances of a fleet: load, pages, and hand-offs per pair",
    "drain": "stop new requests to an instance and wait until it is empty; then it can be ended",
    "resume": "let a drained instance accept requests again",
    "switch": "drain an instance and restart it in another role, without loading its model again",
    "explain": "show the life of one request: phases, waits, attempts, bytes and errors",
}

#: Commands of segue's repository, which its wheel lacks.
_LAB = {
    "sim": "run the control plane in virtual time, under faults",
    "advise": "estimate the number of prefill and decode workers for a workload, or advise a unified one",
}


def parser() -> tuple[flags.Parser, dict[str, flags.Parser]]:
    """The parser of `segue` and those of its commands."""
    top = flags.Parser(
        prog="segue",
        description="Serves large language models with prefill and decode on separate workers.",
        usage="segue COMMAND …",
    )
    top.add_argument("--version", action="version", version=f"segue {__version__}")
    commands = top.add_subparsers(
        dest="command", prog="segue", metavar="COMMAND", help=argparse.SUPPRESS, parser_class=flags.Parser
    )
    made: dict[str, flags.Parser] = {}

    def command(name: str, help: str) -> flags.Parser:
        example = f"example:\n  {_EXAMPLES[name]}"
        usage = f"segue {name} [MODEL] [--FLAG VALUE …]" if name in COMMANDS else None
        made[name] = commands.add_parser(name, help=help, description=help, epilog=example, usage=usage)
        return made[name]

    flags.add_settings(command("serve", "run a whole deployment on this host"), ServeConfig)
    for role, what in (
        ("prefill", "computes prompts"),
        ("decode", "generates from handed-over prompts"),
        ("unified", "does both, without a hand-off"),
    ):
        flags.add_settings(command(role, f"run one instance that {what}"), InstanceConfig)
    flags.add_settings(command("frontend", "run the HTTP server of a deployment"), FrontendConfig)
    for name in ("prefill", "decode", "unified", "frontend"):
        for pipe in ("--lifeline-fd", "--report-fd"):
            made[name].add_argument(pipe, type=int, help=argparse.SUPPRESS)
    for name, text in _OPERATOR.items():
        operate_flags.add_arguments(command(name, text))
    client_flags.add_top_arguments(command("top", "show a running fleet in the terminal, live"))
    bench_flags.add_arguments(command("bench", "measure a server that speaks the OpenAI API"))
    for name, text in _LAB.items():
        lab_command = command(name, text)
        if extras.has_lab():
            importlib.import_module(f"segue_lab.commands.{name}_flags").add_arguments(lab_command)
    doctor = command("doctor", "check this host: problems, remedies, and the speed of its transports")
    flags.add_settings(doctor, DoctorConfig)
    doctor.add_argument(
        "--json", metavar="FILE", nargs="?", const="-", help="write the report as JSON (default: print it)"
    )
    keys_flags.add_arguments(command("keys", "issue certificates for mutual TLS between the parts"))
    command("version", "print the version")
    listed = "\n\n".join(
        f"{group}:\n" + "\n".join(f"  {name:<10}{made[name].description}" for name in names)
        for group, names in _GROUPS.items()
    )
    top.epilog = f"{listed}\n\nflags of a command: segue COMMAND --help\nexample:\n  {_EXAMPLES['serve']}"
    return top, made


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        make_home()
        return run_command(words)
    except ConfigError as exc:
        logs.say(str(exc))
        return 2
    except SegueError as exc:
        logs.say(str(exc))
        return 1
    except KeyboardInterrupt:
        logs.say("interrupted")
        return 1
    except BrokenPipeError:
        # The reader of our output is gone; the interpreter must not try to flush into it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def run_command(words: list[str]) -> int:
    """Run the command of `words`; its exit status. Raises its errors."""
    top, commands = parser()
    first = next((w for w in words if not w.startswith("-")), "")
    if first and first not in commands:
        raise ConfigError(f"segue has no command {first}{nearest(first, commands)}; see segue --help")
    if first in _LAB and not extras.has_lab():
        raise ConfigError(
            f"segue {first} is in segue's repository and not in its wheel: run it from a checkout, after "
            "'make setup' or 'pip install ./lab'"
        )
    if first in COMMANDS and flags.asks_for_json(words):
        logs.configure(LogConfig(log_format="json"), first)  # also errors of the settings are JSON then
    args, rest = top.parse_known_args(words)
    if rest:
        raise flags.unknown(commands.get(first, top), rest, commands)
    if args.command is None:
        top.print_help()
        return 2
    extras.need(args.command)
    module, function = _RUN[args.command]
    run: Handler = getattr(importlib.import_module(module), function)
    return run(args)


def version(_args: argparse.Namespace) -> int:
    """Print the version."""
    print(f"segue {__version__}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
