"""Layered settings: one declaration per setting, read from flags, `SEGUE_*` variables, a TOML file.

A configuration is a tree of frozen dataclasses. A leaf is made by one of the functions below
(`text`, `integer`, …); a field without one is a sub-tree. Keys are unique in a tree, so flags and
variables are flat: `page_tokens` is `--page-tokens`, `SEGUE_PAGE_TOKENS` and `page_tokens = 16`.

Pure: the caller passes the variables and the file's text in.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, get_type_hints

from segue.kv import ConfigError
from segue.server.settings.flag_aliases import OLD_NAMES, explain, is_service_link

PREFIX = "SEGUE_"
_TRUE = {"1", "true", "yes", "on"}
_FALSE = {"0", "false", "no", "off"}

Tree = TypeVar("Tree")


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting: what it means, how its text is read and which values are legal.

    `low` and `high` are inclusive; a `required` one has no default. `metavar` stands for
    the value in `--help`, which does not list a `hidden` one. The value of a `secret` one is never shown,
    nor put on a command line.
    """

    key: str
    kind: Literal["text", "integer", "number", "switch"]
    help: str
    default: object = None
    required: bool = False
    choices: tuple[str, ...] = ()
    low: float = -math.inf
    high: float = math.inf
    metavar: str = ""
    hidden: bool = False
    secret: bool = False

    @property
    def flag(self) -> str:
        """The flag, `--page-tokens`."""
        return "--" + self.key.replace("_", "-")

    @property
    def variable(self) -> str:
        """The environment variable, `SEGUE_PAGE_TOKENS`."""
        return PREFIX + self.key.upper()

    def read(self, raw: object, source: str) -> object:
        """The value of `raw` (text, or a TOML value); `source` names it in the ConfigError."""
        value = self._typed(raw, source)
        if self.choices and value not in self.choices:
            near = nearest(str(value), self.choices)
            raise ConfigError(f"{source} must be one of {', '.join(self.choices)}, not {value!r}{near}")
        if isinstance(value, int | float) and not isinstance(value, bool) and not self._inside(value):
            raise ConfigError(f"{source} must be {self._bounds()}, not {value:g}")
        return value

    def _typed(self, raw: object, source: str) -> object:
        if self.kind == "switch":
            if isinstance(raw, bool):
                return raw
            if isinstance(raw, str) and raw.lower() in _TRUE | _FALSE:
                return raw.lower() in _TRUE
            raise ConfigError(f"{source} must be true or false, not {raw!r}")
        if self.kind == "text":
            if isinstance(raw, str) and raw.strip():
                return raw
            shown = "" if self.secret else f", not {raw!r}"
            raise ConfigError(f"{source} must be a text that is not empty{shown}")
        if isinstance(raw, str | int | float) and not isinstance(raw, bool):
            try:
                return int(raw, 10) if isinstance(raw, str) and self.kind == "integer" else self._number(raw)
            except ValueError:
                pass
        what = "a whole number" if self.kind == "integer" else "a number"
        raise ConfigError(f"{source} must be {what}, not {raw!r}")

    def _number(self, raw: str | int | float) -> int | float:
        if self.kind == "integer":
            if not isinstance(raw, int):
                raise ValueError(raw)
            return raw
        return float(raw)

    def _inside(self, value: float) -> bool:
        return math.isfinite(value) and self.low <= value <= self.high

    def _bounds(self) -> str:
        if math.isinf(self.high):
            return f"at least {self.low:g}"
        return f"between {self.low:g} and {self.high:g}"


def text(
    help: str,
    default: str | None = None,
    *,
    choices: Sequence[str] = (),
    metavar: str = "",
    hidden: bool = False,
) -> Any:
    """A text setting; without a default it is None."""
    return _leaf("text", help, default, choices=tuple(choices), metavar=metavar, hidden=hidden)


def secret(help: str, metavar: str = "") -> Any:
    """A text that nobody may see; None unless given."""
    made = Setting("", "text", help, metavar=metavar, secret=True)
    return field(default=None, repr=False, metadata={"setting": made})


def required(help: str, metavar: str = "") -> Any:
    """A text setting that somebody must give."""
    return field(metadata={"setting": Setting("", "text", help, required=True, metavar=metavar)})


def integer(
    help: str,
    default: int | None = None,
    low: int = 0,
    high: int = 2**31 - 1,
    metavar: str = "N",
    hidden: bool = False,
) -> Any:
    """A whole number in `low … high`; without a default it is None and derived."""
    return _leaf("integer", help, default, low=low, high=high, metavar=metavar, hidden=hidden)


def number(
    help: str, default: float | None = None, low: float = 0.0, high: float = math.inf, metavar: str = "X"
) -> Any:
    """A finite number in `low … high`; without a default it is None and derived."""
    return _leaf("number", help, default, low=low, high=high, metavar=metavar)


def switch(help: str) -> Any:
    """Off unless asked for."""
    return _leaf("switch", help, False)


def _leaf(
    kind: Literal["text", "integer", "number", "switch"], help: str, default: object, **more: Any
) -> Any:
    return field(default=default, metadata={"setting": Setting("", kind, help, default=default, **more)})


def branches(cls: type) -> dict[str, type]:
    """The sub-trees of a configuration class, by field name."""
    hints = get_type_hints(cls)
    return {
        f.name: hints[f.name]
        for f in dataclasses.fields(cls)
        if f.init and "setting" not in f.metadata and dataclasses.is_dataclass(hints[f.name])
    }


def leaves(cls: type) -> dict[str, Setting]:
    """The settings that are fields of `cls` itself, by key."""
    return {
        f.name: dataclasses.replace(f.metadata["setting"], key=f.name)
        for f in dataclasses.fields(cls)
        if "setting" in f.metadata
    }


def settings(cls: type) -> dict[str, Setting]:
    """All settings of the tree `cls`, by key. A key that occurs twice is a ValueError."""
    found = leaves(cls)
    for branch in branches(cls).values():
        for key, setting in settings(branch).items():
            if key in found:
                raise ValueError(f"the setting {key} occurs twice in {cls.__name__}")
            found[key] = setting
    return found


@dataclass(frozen=True, slots=True)
class Layers:
    """The sources of settings, the earlier one wins: `flags` (key to text, or True), the process's variables,
    and the tables of a TOML file."""

    flags: Mapping[str, object] = field(default_factory=dict)
    environ: Mapping[str, str] = field(default_factory=dict)
    file: Mapping[str, object] = field(default_factory=dict)
    file_name: str = ""


def parse_toml(text_: str, name: str) -> dict[str, object]:
    """The tables of a TOML file; a ConfigError names the file and the place of a mistake."""
    try:
        return tomllib.loads(text_)
    except tomllib.TOMLDecodeError as exc:
        raise ConfigError(f"{name} is not valid TOML: {exc}") from exc
    except RecursionError:
        raise ConfigError(f"{name} is not valid TOML: its lists are nested too deeply") from None


def build(
    cls: type[Tree],
    layers: Layers,
    *,
    command: str,
    known: Mapping[str, Iterable[str]],
    also: Iterable[str] = (),
    fixed: Mapping[str, object] | None = None,
    warn: Callable[[str], object] = lambda _text: None,
) -> Tree:
    """Make a `cls` from `layers`. Raises ConfigError, one sentence that says what to change.

    `known` maps every command to its keys: a file or an environment may serve several commands,
    but a key that no command knows is refused with the nearest one that exists. An environment belongs
    to others too: of a variable that is no setting `warn` hears one sentence, and those that Kubernetes
    makes of Services are ignored. `also` are variables with a meaning of their own (`SEGUE_CONFIG`),
    `fixed` fields that are no settings.
    """
    own = settings(cls)
    everywhere = {key for keys in known.values() for key in keys}
    values: dict[str, object] = dict(fixed or {})
    for key, raw, source in _file_entries(layers, command, known):
        if key in own:
            values[key] = own[key].read(raw, source)
    names = {old: key for old, key in OLD_NAMES.items() if key in everywhere} | {
        key: key for key in everywhere
    }
    variables = {PREFIX + name.upper(): key for name, key in names.items()}
    for name, raw_text in sorted(layers.environ.items()):
        if not name.startswith(PREFIX) or name in also:
            continue
        if is_service_link(name.removeprefix(PREFIX), raw_text):
            continue
        if name not in variables:
            warn(f"the variable {name} is not a setting and is ignored{hint(name, [*variables, *also])}")
        elif variables[name] in own:
            values[variables[name]] = own[variables[name]].read(raw_text, f"the variable {name}")
    for key, raw in layers.flags.items():
        if raw is not None:
            values[key] = own[key].read(raw, own[key].flag)
    missing = [s for s in own.values() if s.required and s.key not in values]
    if missing:
        s = missing[0]
        raise ConfigError(
            f"segue {command} needs {s.flag} {s.metavar or 'VALUE'} ({s.help}), or {s.variable}"
        )
    return _assemble(cls, values)


def _file_entries(
    layers: Layers, command: str, known: Mapping[str, Iterable[str]]
) -> Iterator[tuple[str, object, str]]:
    """Entries of the file that concern `command`: first the shared ones, then those of its own table."""
    everywhere = {key for keys in known.values() for key in keys}
    tables = {k: v for k, v in layers.file.items() if isinstance(v, dict)}
    for name, raw in layers.file.items():
        if name not in tables:
            yield _key(name, everywhere, layers.file_name), raw, f"{name} in {layers.file_name}"
    for table, entries in tables.items():
        if table not in known:
            near = nearest(table, known)
            raise ConfigError(f"[{table}] in {layers.file_name} is not a command of segue{near}")
        for name, raw in entries.items():
            key = _key(name, set(known[table]), f"[{table}] of {layers.file_name}")
            if table == command:
                yield key, raw, f"{name} in [{table}] of {layers.file_name}"


def _key(name: str, legal: set[str], place: str) -> str:
    key = name.replace("-", "_")
    key = OLD_NAMES.get(key, key)
    if key not in legal:
        raise ConfigError(f"{name} in {place} is not a setting{hint(key, legal)}; remove or rename it")
    return key


#: How alike two names must be (0 to 1) for one to be taken for a slip of the other. At 0.6, `--api-key` was
#: taken for `--tls-key`.
_ALIKE = 0.76


def nearest(name: str, names: Iterable[str]) -> str:
    """` (did you mean X?)` for the one of `names` that `name` is a slip of, or nothing. Their common prefix
    (`--`, `SEGUE_`) does not count."""
    by_core = {_core(other): other for other in names}
    close = difflib.get_close_matches(_core(name), list(by_core), n=1, cutoff=_ALIKE)
    return f" (did you mean {by_core[close[0]]}?)" if close else ""


def hint(name: str, names: Iterable[str]) -> str:
    """A hint for `name` where one of `names` is legal: its name here or the reason why it is missing, else
    the nearest name, else an empty text."""
    return explain(name) or nearest(name, names)


def _core(name: str) -> str:
    return name.lstrip("-").removeprefix(PREFIX).replace("-", "_").lower()


def _assemble(cls: type[Tree], values: Mapping[str, object]) -> Tree:
    names = {f.name for f in dataclasses.fields(cls)} - set(branches(cls))  # type: ignore[arg-type]
    own = {key: values[key] for key in names if key in values}
    parts: dict[str, object] = {name: _assemble(branch, values) for name, branch in branches(cls).items()}
    return cls(**own, **parts)


def flatten(config: object) -> dict[str, object]:
    """Every setting of a configuration with its value, by key; secrets are left out."""
    cls = type(config)
    flat = {key: getattr(config, key) for key, setting in leaves(cls).items() if not setting.secret}
    for name in branches(cls):
        flat |= flatten(getattr(config, name))
    return flat


def argv(config: object) -> list[str]:
    """Flags that build `config` again, but for secrets: those that differ from their defaults."""
    own = settings(type(config))
    flags: list[str] = []
    for key, value in flatten(config).items():
        if value is None or value == own[key].default:
            continue
        # One word per setting, so that a value that begins with a dash stays a value.
        flags.append(own[key].flag if value is True else f"{own[key].flag}={value}")
    return flags
