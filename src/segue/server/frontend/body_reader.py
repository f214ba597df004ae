"""Reads bodies by the table of request fields: their types, their ranges, and what is refused by name."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar, get_args, get_type_hints

import msgspec

from segue.server.frontend.problems import unparsable
from segue.server.frontend.request_fields import (
    HOMES,
    OTHER_FIELDS,
    As,
    BodyPart,
    Constrains,
    Ignored,
    Most,
    Range,
    Refused,
)

Body = TypeVar("Body", bound=msgspec.Struct)


def read_float(text: str) -> float:
    """A JSON number that is no integer. For decoders' `float_hook`."""
    value = float(text)
    if math.isinf(value):
        raise ValueError("Number out of range")
    return value


# ---- the rows -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Used:
    """A row of a field that is used: its name in each of its APIs, its type, a sentence, its checks, and the
    kind of the constraint that it is."""

    names: Mapping[BodyPart, str]
    kind: Any
    about: str
    checks: tuple[Range | Most, ...]
    required: bool
    constrains: Constrains | None


def _used(home: type[msgspec.Struct], where: BodyPart) -> Iterator[Used]:
    hints = get_type_hints(home, include_extras=True)
    for row in msgspec.structs.fields(home):
        if row.name in home.__annotations__:
            kind, about, *more = get_args(hints[row.name])
            names = dict.fromkeys(where, row.name)
            for each in more:
                if isinstance(each, BodyPart):
                    names[each] = row.name
                elif isinstance(each, As):
                    names[each.part] = each.name
            checks = tuple(each for each in more if isinstance(each, Range | Most))
            constrains = next((each for each in more if isinstance(each, Constrains)), None)
            yield Used(names, kind, about, checks, row.required, constrains)


USED_FIELDS: Final = tuple(row for home, where in HOMES.items() for row in _used(home, where))


def same_fields(body: msgspec.Struct, api: BodyPart, other: BodyPart) -> dict[str, Any]:
    """The fields of `body`, of `api`, that `other` has with the same meaning, by their names in `other`."""
    rows = [row.names for row in USED_FIELDS if api in row.names and other in row.names]
    return {names[other]: getattr(body, names[api]) for names in rows}


def names_in(api: BodyPart, other: BodyPart) -> dict[str, str]:
    """The names in `api` of fields that `other` calls otherwise, by their names in `other`."""
    rows = [row.names for row in USED_FIELDS if api in row.names and other in row.names]
    return {names[other]: names[api] for names in rows if names[other] != names[api]}


#: The range of each number of a chat, by its name.
RANGES: Final = {
    row.names[BodyPart.CHAT]: check
    for row in USED_FIELDS
    for check in row.checks
    if isinstance(check, Range) and BodyPart.CHAT in row.names
}


def constraints_in(part: BodyPart) -> list[tuple[str, Constrains]]:
    """The fields of `part` that are constraints on the answer."""
    return [
        (row.names[part], row.constrains)
        for row in USED_FIELDS
        if row.constrains is not None and part in row.names
    ]


def refused_in(api: BodyPart) -> list[str]:
    """The names of the fields that `api` refuses."""
    return sorted(row.name for row in OTHER_FIELDS if isinstance(row, Refused) and api in row.where)


# ---- the types ----------------------------------------------------------------------------------


class FieldCheck(Protocol):
    """Raises BadParam if the field `name` has a wrong `value`."""

    def check(self, name: str, value: Any, /) -> None: ...


@dataclass(frozen=True, slots=True)
class BodyType:
    """A body, or an object in one, with all its rows. `kind` is a subclass of the struct that code knows.

    `known` are the names of all its fields, also of ignored ones; `inner` has its fields that are structs.
    """

    kind: type[msgspec.Struct]
    checks: Sequence[tuple[str, FieldCheck]]
    known: frozenset[str]
    inner: Mapping[str, BodyType]

    def check(self, name: str, value: Any) -> None:
        """Raises BadParam for a field of `value` that is refused, or out of its range. `name` is the place of
        `value` in the body; empty for the body itself."""
        for each, row in self.checks:
            if (found := getattr(value, each)) is not None:
                # A number that is out of its range is named as it is where the body is planned.
                row.check(f"{name}.{each}" if name and not isinstance(row, Range | Most) else each, found)


@functools.cache
def _body_type(base: type[msgspec.Struct], ignored: frozenset[str]) -> BodyType:
    api, own = HOMES.get(base, BodyPart(0)), base.__struct_fields__
    refused = [(row.name, row) for row in OTHER_FIELDS if isinstance(row, Refused) and api & row.where]
    used = [(row.names[api], row) for row in USED_FIELDS if api in row.names]
    more = {name: row.kind for name, row in used if name not in own} | {name: Any for name, _ in refused}
    inner = {}
    for name, hint in get_type_hints(base).items():
        for part in _structs(hint):
            inner[name] = _body_type(part, ignored)
            if part in HOMES:
                more[name] = inner[name].kind | None
    fields = [(name, each, None) for name, each in more.items()]
    kind = msgspec.defstruct(base.__name__, fields, bases=(base,), frozen=True, kw_only=True)
    checks: list[tuple[str, FieldCheck]] = [*refused]
    checks += [(name, found) for name, found in inner.items() if found.checks and name in more]
    checks += [(name, check) for name, row in used for check in row.checks]
    return BodyType(kind, checks, ignored.union(kind.__struct_fields__), inner)


def _structs(hint: Any) -> list[type[msgspec.Struct]]:
    """The structs in a type such as `list[Tool] | None`."""
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return [hint]
    return [found for part in get_args(hint) for found in _structs(part)]


def _ignored(api: BodyPart) -> frozenset[str]:
    return frozenset(row.name for row in OTHER_FIELDS if isinstance(row, Ignored) and api in row.where)


#: The type of each body, by the struct that code knows.
BODIES: Final = {
    base: _body_type(base, _ignored(api)) for base, api in HOMES.items() if base.__name__.endswith("Body")
}
_decoders: Final[dict[type, msgspec.json.Decoder[Any]]] = {
    base: msgspec.json.Decoder(found.kind, float_hook=read_float) for base, found in BODIES.items()
}
_decode_names: Final = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_items: Final = msgspec.json.Decoder(list[msgspec.Raw]).decode


def read_body(raw: bytes, base: type[Body]) -> Body:
    """The body `raw`. Raises BadParam for what is no such body, or asks for what is not built."""
    try:
        body: Body = _decoders[base].decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise unparsable(error) from None
    BODIES[base].check("", body)
    return body


def unknown_fields(raw: bytes, base: type[msgspec.Struct]) -> list[str]:
    """The names in a body that no row has, also those in its objects, each once. Read the body before."""
    found: dict[str, None] = {}
    _collect(raw, BODIES[base], "", found)
    return list(found)


def _collect(raw: bytes, body: BodyType, within: str, found: dict[str, None]) -> None:
    for name, value in _decode_names(raw).items():
        if name not in body.known:
            found[within + name] = None
        elif name in body.inner:
            inner = bytes(value).lstrip()
            for one in _decode_items(inner) if inner[:1] == b"[" else [value]:
                if bytes(one).lstrip()[:1] == b"{":
                    _collect(one, body.inner[name], f"{within}{name}.", found)
