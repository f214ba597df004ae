"""`/openapi.json` and `/docs`: made of the types that read the bodies. No address outside is needed."""

from __future__ import annotations

import html
import re
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from segue.server.frontend.body_reader import BODIES, USED_FIELDS, refused_in
from segue.server.frontend.request_fields import HOMES


@dataclass(frozen=True, slots=True)
class Operation:
    """One endpoint: `body` is the type of what it reads, `handler` what answers, or a line about it."""

    path: str
    method: str
    handler: Callable[..., Any] | str
    body: type[msgspec.Struct] | None = None

    @property
    def summary(self) -> str:
        """One line about it."""
        return self.handler if isinstance(self.handler, str) else (self.handler.__doc__ or "")

    @property
    def shown_path(self) -> str:
        """The path as OpenAPI has it."""
        return self.path.replace(":path", "")


def document(operations: Sequence[Operation], version: str) -> dict[str, Any]:
    """The OpenAPI 3.1 document. `x-refused` has the names that a body may not use."""
    bodies = [BODIES[operation.body].kind for operation in operations if operation.body is not None]
    _, components = msgspec.json.schema_components(bodies, ref_template="#/components/schemas/{name}")
    for base, api in HOMES.items():
        if (schema := components.get(base.__name__)) is not None:
            schema["x-refused"] = refused_in(api)
            for name in schema["x-refused"]:
                del schema["properties"][name]
            for row in USED_FIELDS:
                if api in row.names:
                    schema["properties"][row.names[api]]["description"] = row.about
    paths: dict[str, Any] = {}
    for operation in operations:
        entry: dict[str, Any] = {
            "summary": operation.summary,
            "responses": {"200": {"description": "the answer"}, "default": {"description": "an error"}},
        }
        if operation.body is not None:
            schema = {"$ref": f"#/components/schemas/{operation.body.__name__}"}
            entry["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
        if "{" in operation.path:
            name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
            entry["parameters"] = [name]
        paths.setdefault(operation.shown_path, {})[operation.method.lower()] = entry
    return {
        "openapi": "3.1.0",
        "info": {"title": "segue", "version": version},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def page(operations: Sequence[Operation], version: str) -> str:
    """The same as one HTML page without scripts."""
    parts = [
        "<!doctype html><meta charset=utf-8><title>segue</title>",
        "<style>body{font:15px sans-serif;max-width:60em;margin:2em auto}td{padding:.2em 1em .2em 0;"
        "vertical-align:top}code{background:#eee}</style>",
        f"<h1>segue {html.escape(version)}</h1><p><a href=openapi.json>openapi.json</a></p>",
    ]
    for operation in operations:
        parts.append(f"<h2><code>{operation.method} {html.escape(operation.shown_path)}</code></h2>")
        parts.append(f"<p>{html.escape(operation.summary)}</p>")
        if operation.body is None:
            continue
        api = HOMES[operation.body]
        rows = [
            f"<tr><td><code>{row.names[api]}</code><td>{'required' if row.required else ''}"
            f"<td>{html.escape(_kind(row.kind))}<td>{html.escape(row.about)}"
            for row in USED_FIELDS
            if api in row.names
        ]
        parts.append(f"<table>{''.join(rows)}</table>")
        if names := refused_in(api):
            parts.append(f"<p>Refused: <code>{html.escape(', '.join(names))}</code></p>")
    return "\n".join(parts)


def _kind(found: Any) -> str:
    plain = found.__name__ if isinstance(found, type) and typing.get_origin(found) is None else str(found)
    return re.sub(r"\b(?:\w+\.)+", "", plain)
