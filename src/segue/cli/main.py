"""The `segue` command. Importing this module imports neither torch nor an HTTP library.

Exit status: 0 after a clean end, 2 for a wrong setting (one sentence on standard error), 1 otherwise.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence

from segue import __version__
from segue.cli import extras, flags
from segue.kv import ConfigError, Role, SegueError
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

    def command(name: str, help: str, handler: Handler) -> flags.Parser:
        example = f"example:\n  {_EXAMPLES[name]}"
        usage = f"segue {name} [MODEL] [--FLAG VALUE …]" if name in COMMANDS else None
        made[name] = commands.add_parser(name, help=help, description=help, epilog=example, usage=usage)
        made[name].set_defaults(handler=handler)
        return made[name]

    flags.add_settings(command("serve", "run a whole deployment on this host", _serve), ServeConfig)
    for role, what in (
        (Role.PREFILL, "computes prompts"),
        (Role.DECODE, "generates from handed-over prompts"),
    ):
        flags.add_settings(command(role, f"run one instance that {what}", _instance), InstanceConfig)
    flags.add_settings(
        command("unified", "run one instance that does both, without a hand-off", _instance), InstanceConfig
    )
    flags.add_settings(command("frontend", "run the HTTP server of a deployment", _frontend), FrontendConfig)
    for name in ("prefill", "decode", "unified", "frontend"):
        for pipe in ("--lifeline-fd", "--report-fd"):
            made[name].add_argument(pipe, type=int, help=argparse.SUPPRESS)
    for name, text in _OPERATOR.items():
        _operator_arguments(command(name, text, _operate))
    _top_arguments(command("top", "show a running fleet in the terminal, live", _top))
    _bench_arguments(command("bench", "measure a server that speaks the OpenAI API", _bench))
    _sim_arguments(command("sim", "run the control plane in virtual time, under faults", _sim))
    _advise_arguments(
        command(
            "advise",
            "estimate the number of prefill and decode workers for a workload, or advise a unified one",
            _advise,
        )
    )
    doctor = command(
        "doctor", "check this host: problems, remedies, and the speed of its transports", _doctor
    )
    flags.add_settings(doctor, DoctorConfig)
    doctor.add_argument(
        "--json", metavar="FILE", nargs="?", const="-", help="write the report as JSON (default: print it)"
    )
    _keys_arguments(command("keys", "issue certificates for mutual TLS between the parts", _keys))
    command("version", "print the version", _version)
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
    if first in COMMANDS and flags.asks_for_json(words):
        logs.configure(LogConfig(log_format="json"), first)  # also errors of the settings are JSON then
    args, rest = top.parse_known_args(words)
    if rest:
        raise flags.unknown(commands.get(first, top), rest, commands)
    if args.command is None:
        top.print_help()
        return 2
    extras.need(args.command)
    handler: Handler = args.handler
    return handler(args)


def _serve(args: argparse.Namespace) -> int:
    config = flags.with_secret(flags.load(ServeConfig, "serve", args))
    from segue.cli.commands.processes import serve

    return serve(config)


def _instance(args: argparse.Namespace) -> int:
    from segue.cli.commands.processes import instance

    return instance(args)


def _frontend(args: argparse.Namespace) -> int:
    from segue.cli.commands.processes import frontend

    return frontend(args)


def _top_arguments(command: argparse.ArgumentParser) -> None:
    from segue.cli.commands.client_flags import add_top_arguments

    add_top_arguments(command)


def _top(args: argparse.Namespace) -> int:
    from segue.cli.commands.top_command import top

    return top(args)


def _bench_arguments(command: argparse.ArgumentParser) -> None:
    from segue.cli.commands.bench_flags import add_arguments

    add_arguments(command)


def _bench(args: argparse.Namespace) -> int:
    from segue.cli.commands.bench import bench

    return bench(args)


def _operator_arguments(command: flags.Parser) -> None:
    from segue.cli.commands.operate_flags import add_arguments

    add_arguments(command)


def _operate(args: argparse.Namespace) -> int:
    from segue.cli.commands.operate_commands import operate

    return operate(args)


def _sim_arguments(command: argparse.ArgumentParser) -> None:
    from segue.cli.commands.sim_flags import add_arguments

    add_arguments(command)


def _sim(args: argparse.Namespace) -> int:
    from segue.cli.commands.sim import sim

    return sim(args)


def _advise_arguments(command: flags.Parser) -> None:
    from segue.cli.commands.advise_flags import add_arguments

    add_arguments(command)


def _advise(args: argparse.Namespace) -> int:
    from segue.cli.commands.advise import run

    return run(args)


def _keys_arguments(command: argparse.ArgumentParser) -> None:
    from segue.cli.commands.keys_flags import add_arguments

    add_arguments(command)


def _keys(args: argparse.Namespace) -> int:
    from segue.cli.commands.issue_keys import keys

    return keys(args)


def _doctor(args: argparse.Namespace) -> int:
    config = flags.with_secret(flags.load(DoctorConfig, "doctor", args))
    from segue.cli.doctor.doctor_command import doctor

    return doctor(config, args.json)


def _version(args: argparse.Namespace) -> int:
    print(f"segue {__version__}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
