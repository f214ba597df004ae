"""Parses a command line into a configuration: the parsers are made from the settings themselves."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from segue.kv import ConfigError
from segue.server.observe import logs
from segue.server.settings.commands import (
    COMMANDS,
    DoctorConfig,
    FrontendConfig,
    InstanceConfig,
    OperatorConfig,
    ServeConfig,
)
from segue.server.settings.flag_aliases import IN_SERVE, OLD_NAMES
from segue.server.settings.layers import Layers, Setting, branches, build, hint, leaves, parse_toml, settings

Config = TypeVar("Config")

CONFIG_VARIABLE = "SEGUE_CONFIG"
#: Variables that mean something and are no settings; the second is the model store's.
OTHER_VARIABLES = (CONFIG_VARIABLE, "SEGUE_MODEL_WHEEL")
KNOWN = {command: list(settings(cls)) for command, cls in COMMANDS.items()}
MAX_SECRET_BYTES = 4096
_GROUPS = {
    "engine": "model and memory",
    "ranks": "ranks of each side",
    "answers": "answers",
    "access": "access",
    "clients": "public port",
    "events": "events of prefix caches",
    "tls": "TLS between the parts",
    "limit": "limits",
    "log": "log",
}
#: Settings that `segue serve --help` shows before all others.
_FIRST = ("port", "host", "api_key_file", "prefill", "decode", "kv_gib")


class Parser(argparse.ArgumentParser):
    """An argparse parser whose mistakes are ConfigErrors: one sentence, the nearest legal word."""

    def __init__(self, **arguments: Any) -> None:
        arguments.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(allow_abbrev=False, **arguments)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{self.prog}: {message}; see {self.prog} --help")

    def words(self) -> list[str]:
        """The flags that exist and are shown."""
        return [o for a in self._actions if a.help != argparse.SUPPRESS for o in a.option_strings]


def add_settings(parser: argparse.ArgumentParser, cls: type) -> None:
    """One flag for each setting of the tree `cls`, grouped as the tree is."""
    first = _FIRST if cls is ServeConfig else ()
    if first:
        group = parser.add_argument_group("first")
        for key in first:
            _add(group, settings(cls)[key])
    groups: dict[str, tuple[argparse._ArgumentGroup, Mapping[str, Setting]]] = {
        "": (parser.add_argument_group("settings"), leaves(cls))
    }
    for name, branch in branches(cls).items():
        groups[name] = (parser.add_argument_group(_GROUPS.get(name, name)), leaves(branch))
    for group, members in groups.values():
        for key, setting in members.items():
            if key not in first:
                _add(group, setting)
    if "model" in settings(cls):
        parser.add_argument("model_word", nargs="?", metavar="MODEL", help="the same as --model")
    parser.add_argument(
        "--config", metavar="FILE", help=f"TOML file with settings ({CONFIG_VARIABLE}); flags and SEGUE_* win"
    )


def _add(group: argparse._ArgumentGroup, setting: Setting) -> None:
    if setting.kind == "switch":
        group.add_argument(
            setting.flag, dest=setting.key, action="store_true", default=None, help=setting.help
        )
        return
    text = setting.help
    if setting.choices:
        text += f": {', '.join(setting.choices)}"
    if setting.default is not None:
        default = f"{setting.default:g}" if isinstance(setting.default, float) else setting.default
        text += f" (default: {default})"
    if setting.required:
        text += " (required)"
    old = [f"--{name.replace('_', '-')}" for name, key in OLD_NAMES.items() if key == setting.key]
    if old:
        text += f" ({', '.join(old)}: the old name)"
    shown = argparse.SUPPRESS if setting.hidden else text.replace("%", "%%")
    group.add_argument(setting.flag, *old, dest=setting.key, metavar=setting.metavar or "TEXT", help=shown)


def load(cls: type[Config], command: str, args: argparse.Namespace, **fixed: object) -> Config:
    """The configuration of `command`. Raises ConfigError, also for a file that cannot be read."""
    file_name = args.config or os.environ.get(CONFIG_VARIABLE, "")
    file = parse_toml(_read(file_name, "--config").decode("utf-8", "replace"), file_name) if file_name else {}
    flags = {key: getattr(args, key) for key in settings(cls)}
    word = vars(args).get("model_word")
    if word is not None and flags["model"] not in (None, word):
        raise ConfigError(f"segue {command} was given two models, {word} and --model {flags['model']}")
    if word is not None:
        flags["model"] = word
    layers = Layers(flags, os.environ, file, file_name)
    return build(cls, layers, command=command, known=KNOWN, also=OTHER_VARIABLES, fixed=fixed, warn=_warn)


def asks_for_json(words: Sequence[str]) -> bool:
    """Whether a flag or the variable asks for a log in JSON, before the settings are read."""
    pairs = itertools.pairwise(words)
    flag = "--log-format=json" in words or ("--log-format", "json") in pairs
    return flag or os.environ.get("SEGUE_LOG_FORMAT") == "json"


def _warn(text: str) -> None:
    logs.say(f"warning: {text}", logging.WARNING)


Joined = TypeVar("Joined", ServeConfig, InstanceConfig, FrontendConfig, OperatorConfig, DoctorConfig)


def with_secret(config: Joined) -> Joined:
    """`config` with the content of its secret file, if it names one."""
    if config.secret_file is None:
        return config
    secret = _read(config.secret_file, "--secret-file").strip()
    if not 16 <= len(secret) <= MAX_SECRET_BYTES:
        raise ConfigError(
            f"--secret-file {config.secret_file} must hold 16 to {MAX_SECRET_BYTES} bytes, not {len(secret)}"
        )
    return dataclasses.replace(config, secret=secret)


def _read(name: str, flag: str) -> bytes:
    try:
        return Path(name).read_bytes()
    except OSError as exc:
        raise ConfigError(f"{flag} {name} cannot be read: {exc.strerror}") from exc


def unknown(parser: Parser, words: list[str], others: Mapping[str, Parser] | None = None) -> ConfigError:
    """The error for words that `parser` does not know; `others` are the commands that may know them."""
    word = words[0].partition("=")[0]
    there = [f"segue {name}" for name in COMMANDS if others and word in others[name].words()]
    if not there:
        return ConfigError(f"{parser.prog} does not know {word}{hint(word, parser.words())}")
    text = f"{parser.prog} does not know {word}: it is a flag of {', '.join(there)}"
    here = IN_SERVE.get(word.lstrip("-").replace("-", "_"))
    return ConfigError(f"{text}; here it is {here}" if here and parser.prog == "segue serve" else text)
