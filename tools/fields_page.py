"""Print the tables of request fields in docs/http.md, made from `segue.server.frontend.request_fields`.

    python tools/fields_page.py

`tests/server/frontend/test_request_fields.py` compares the page with them.
"""

from __future__ import annotations

import json
import types
from collections.abc import Iterable
from typing import Any, Union, get_args, get_origin

from segue.server.frontend.body_reader import USED_FIELDS, Used
from segue.server.frontend.request_fields import OTHER_FIELDS, BodyPart, Ignored, Refused
from segue.server.frontend.sampling_defaults import OPENAI

_PLACES = {
    BodyPart.CHAT: "chat",
    BodyPart.COMPLETIONS: "text completions",
    BodyPart.RESPONSES: "Responses",
    BodyPart.MESSAGES: "Messages",
    BodyPart.GENERATE: "`/generate`",
    BodyPart.SAMPLING_PARAMS: "`sampling_params`",
    BodyPart.STREAM_OPTIONS: "`stream_options`",
    BodyPart.STRUCTURED_OUTPUTS: "`structured_outputs`",
    BodyPart.TOKENIZE: "`/tokenize`",
    BodyPart.DETOKENIZE: "`/detokenize`",
}
_TYPES = {str: "text", int: "integer", bool: "boolean", list: "list", dict: "object", Any: "number"}
_OFF: tuple[object, ...] = (False, 0, "", [], {})


def _places(where: Iterable[BodyPart]) -> str:
    return ", ".join(_PLACES[api] for api in where)


def _type(kind: Any) -> str:
    parts = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    names = (_TYPES.get(get_origin(part) or part, "object") for part in parts if part is not type(None))
    return " or ".join(dict.fromkeys(names))


def _used(row: Used) -> str:
    name = next(iter(row.names.values()))
    places = [_places(api for api, named in row.names.items() if named == name)]
    places += [f"{_PLACES[api]} as `{named}`" for api, named in row.names.items() if named != name]
    values = [_type(row.kind), *map(str, row.checks)]
    default = next((getattr(check, "default", None) for check in row.checks), None)
    if hasattr(OPENAI, name):
        values.append("default: the model's")
    elif default is not None:
        values.append(f"default {default}")
    if row.required:
        values.append("required")
    return f"| `{name}` | {'; '.join(places)} | {', '.join(values)} | {row.about} |"


def _refused(row: Refused) -> str:
    values = (
        "" if row.neutral == _OFF else ", ".join(f"`{json.dumps(value)}`" for value in row.neutral) or "none"
    )
    about = (
        row.about
        if row.instead == Refused.__dataclass_fields__["instead"].default
        else f"{row.about}: {row.instead}"
    )
    return f"| `{row.name}` | {_places(row.where)} | {values} | {about} |"


def tables() -> dict[str, str]:
    """The text of each table, by its heading."""
    others = sorted(OTHER_FIELDS, key=lambda row: row.name)
    refused = [_refused(row) for row in others if isinstance(row, Refused)]
    ignored = [
        f"| `{row.name}` | {_places(row.where)} | {row.about} |" for row in others if isinstance(row, Ignored)
    ]
    made = {
        "Used fields": ["| field | in | values | meaning |", "|---|---|---|---|", *map(_used, USED_FIELDS)],
        "Refused fields": ["| field | in | values that request nothing | |", "|---|---|---|---|", *refused],
        "Ignored fields": ["| field | in | |", "|---|---|---|", *ignored],
    }
    return {heading: "\n".join(lines) for heading, lines in made.items()}


if __name__ == "__main__":
    print("\n\n".join(f"### {heading}\n\n{table}" for heading, table in tables().items()))
