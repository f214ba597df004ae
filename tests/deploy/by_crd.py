"""Check the `spec` of objects by the CustomResourceDefinitions of a folder; unknown fields are faults too.

    python by_crd.py FOLDER FILE…

Prints a line for each object whose kind is known: its file, its kind and the faults. Runs in `make cluster`'s
environment, which has jsonschema.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import jsonschema
import yaml


def load(path: Path) -> list[Any]:
    with path.open() as file:
        return [one for one in yaml.load_all(file, Loader=yaml.CSafeLoader) if one]


def closed(schema: Any) -> Any:
    """`schema`, which allows no fields beside those that it lists."""
    if isinstance(schema, list):
        return [closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    new = {key: closed(one) for key, one in schema.items()}
    if "properties" in new and not new.get("x-kubernetes-preserve-unknown-fields"):
        new.setdefault("additionalProperties", False)
    return new


def main(folder: str, *files: str) -> None:
    checks = {}
    for crd in (one for path in Path(folder).glob("*.yaml") for one in load(path)):
        for version in crd["spec"]["versions"]:
            key = f"{crd['spec']['group']}/{version['name']}", crd["spec"]["names"]["kind"]
            spec = version["schema"]["openAPIV3Schema"]["properties"]["spec"]
            checks[key] = jsonschema.Draft7Validator(closed(spec))
    for name in files:
        for one in load(Path(name)):
            check = checks.get((one["apiVersion"], one["kind"]))
            if check is not None:
                faults = (error.message for error in check.iter_errors(one["spec"]))
                sys.stdout.write(" ".join([Path(name).stem, one["kind"], *faults]) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
