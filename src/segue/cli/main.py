"""The `segue` command. Importing this module imports neither torch nor an HTTP library.

Exit status: 0 after a clean end, 2 for a wrong setting (one sentence on standard error), 1 otherwise.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence

from segue import __version__
from segue.cli import flags
from segue.core.config import COMMANDS, FrontendConfig, InstanceConfig, ServeConfig
from segue.core.errors import ConfigError, SegueError
from segue.core.settings import nearest
from segue.core.types import Role

Handler = Callable[[argparse.Namespace], int]

#: Commands that other versions have or will have; saying so is better than "invalid choice".
ABSENT = ("advise", "explain")

_EXAMPLES = {
    "serve": "segue serve Qwen/Qwen3-0.6B --prefill 1 --decode 2",
    "prefill": "segue prefill --model smollm2 --bootstrap-port 8998",
    "decode": "segue decode --model smollm2 --registry http://127.0.0.1:8998",
    "unified": "segue unified --model smollm2 --registry http://127.0.0.1:8998",
    "frontend": "segue frontend --registry http://127.0.0.1:8998 --port 8000",
    "sim": "segue sim --seeds 200",
    "bench": "segue bench http://127.0.0.1:8000 --requests 64 --concurrency 8 --json result.json",
    "doctor": "segue doctor",
    "version": "segue version",
}


def parser() -> tuple[flags.Parser, dict[str, flags.Parser]]:
    """The parser of `segue` and those of its commands."""
    top = flags.Parser(
        prog="segue",
        description="Serves large language models with prefill and decode on separate workers.",
        epilog=f"example:\n  {_EXAMPLES['serve']}",
    )
    top.add_argument("--version", action="version", version=f"segue {__version__}")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", parser_class=flags.Parser)
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
    _bench_arguments(command("bench", "measure a server that speaks the OpenAI API", _bench))
    _sim_arguments(command("sim", "run the control plane in virtual time, under faults", _sim))
    doctor = command("doctor", "look at this host: what works, what is missing, what is slow", _doctor)
    doctor.add_argument("--json", action="store_true", help="print the findings as JSON")
    doctor.add_argument("--cache", metavar="DIR", help="folder for fetched and converted models")
    command("version", "print the version", _version)
    return top, made


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return _run(words)
    except ConfigError as exc:
        print(f"segue: {exc}", file=sys.stderr)
        return 2
    except SegueError as exc:
        print(f"segue: {exc}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("segue: interrupted", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # Who read our output is gone; the interpreter must not try to flush into it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _run(words: list[str]) -> int:
    top, commands = parser()
    first = next((w for w in words if not w.startswith("-")), "")
    if first in ABSENT:
        raise ConfigError(f"segue {first} is not part of version {__version__}")
    if first and first not in commands:
        raise ConfigError(f"segue has no command {first}{nearest(first, commands)}; see segue --help")
    args, rest = top.parse_known_args(words)
    if rest:
        raise flags.unknown(commands.get(first, top), rest)
    if args.command is None:
        top.print_help()
        return 2
    handler: Handler = args.handler
    return handler(args)


def _serve(args: argparse.Namespace) -> int:
    config = flags.load(ServeConfig, "serve", args)
    from segue.cli.processes import serve

    return serve(config)


def _instance(args: argparse.Namespace) -> int:
    from segue.cli.processes import instance

    return instance(args)


def _frontend(args: argparse.Namespace) -> int:
    from segue.cli.processes import frontend

    return frontend(args)


def _bench_arguments(command: argparse.ArgumentParser) -> None:
    from segue.cli.bench_flags import add_arguments

    add_arguments(command)


def _bench(args: argparse.Namespace) -> int:
    from segue.cli.bench import bench

    return bench(args)


def _sim_arguments(command: argparse.ArgumentParser) -> None:
    from segue.cli.sim_flags import add_arguments

    add_arguments(command)


def _sim(args: argparse.Namespace) -> int:
    from segue.cli.sim import sim

    return sim(args)


def _doctor(args: argparse.Namespace) -> int:
    from segue.cli.doctor import doctor

    return doctor(cache=args.cache, as_json=args.json)


def _version(args: argparse.Namespace) -> int:
    print(f"segue {__version__}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
