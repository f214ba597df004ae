"""`/openapi.json` and `/docs`: made of the types that read the bodies. No address outside is needed."""

from __future__ import annotations

import html
import re
import typing
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

#: The fields that each kind of body refuses by name.
RefusedFields = Mapping[type[msgspec.Struct], Collection[str]]


@dataclass(frozen=True, slots=True)
class Operation:
    """One endpoint: `body` is the type of what it reads, `summary` one line about it."""

    path: str
    method: str
    summary: str
    body: type[msgspec.Struct] | None = None


def document(operations: Sequence[Operation], refused: RefusedFields, version: str) -> dict[str, Any]:
    """The OpenAPI 3.1 document. `refused` are names that a body may not use."""
    bodies = [operation.body for operation in operations if operation.body is not None]
    _, components = msgspec.json.schema_components(bodies, ref_template="#/components/schemas/{name}")
    for body in bodies:
        components[body.__name__]["x-refused"] = sorted(refused.get(body, ()))
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
        paths.setdefault(operation.path, {})[operation.method.lower()] = entry
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


def page(operations: Sequence[Operation], refused: RefusedFields, version: str) -> str:
    """The same as one HTML page without scripts."""
    parts = [
        "<!doctype html><meta charset=utf-8><title>segue</title>",
        "<style>body{font:15px sans-serif;max-width:60em;margin:2em auto}td{padding:.2em 1em .2em 0;"
        "vertical-align:top}code{background:#eee}</style>",
        f"<h1>segue {html.escape(version)}</h1><p><a href=openapi.json>openapi.json</a></p>",
    ]
    for operation in operations:
        parts.append(f"<h2><code>{operation.method} {html.escape(operation.path)}</code></h2>")
        parts.append(f"<p>{html.escape(operation.summary)}</p>")
        if operation.body is None:
            continue
        rows = [
            f"<tr><td><code>{field.encode_name}</code><td>{'required' if field.required else ''}"
            f"<td>{html.escape(_kind(field.type))}"
            for field in msgspec.structs.fields(operation.body)
        ]
        parts.append(f"<table>{''.join(rows)}</table>")
        if names := sorted(refused.get(operation.body, ())):
            parts.append(f"<p>Refused: <code>{html.escape(', '.join(names))}</code></p>")
    return "\n".join(parts)


def _kind(found: Any) -> str:
    plain = found.__name__ if isinstance(found, type) and typing.get_origin(found) is None else str(found)
    return re.sub(r"\b(?:\w+\.)+", "", plain)
