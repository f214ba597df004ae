"""The signatures of vLLM's connector base class: `python vllm_api.py VERSION PATH/TO/base.py` records them in
vllm_api.json, which `test_vllm_api.py` holds our class to."""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path

RECORDED = Path(__file__).with_name("vllm_api.json")
BASE = "KVConnectorBase_V1"


def signatures(source: str, name: str = BASE) -> dict[str, str]:
    """Each public method of the class `name`, with its parameters as they can be called."""
    found = next(
        node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == name
    )
    return {
        node.name: _signature(node)
        for node in found.body
        if isinstance(node, ast.FunctionDef) and (node.name == "__init__" or not node.name.startswith("_"))
    }


def _signature(method: ast.FunctionDef) -> str:
    """Names of the parameters, `=` behind one with a default; the decorators that change how it is called."""
    args = method.args
    first_default = len(args.args) - len(args.defaults)
    names = [arg.arg + ("=" if i >= first_default else "") for i, arg in enumerate(args.args)]
    names += [f"*{args.vararg.arg}"] if args.vararg else []
    names += [f"**{args.kwarg.arg}"] if args.kwarg else []
    kinds = [f"@{node.id} " for node in method.decorator_list if isinstance(node, ast.Name)]
    return f"{''.join(sorted(kinds))}({', '.join(names)})"


def difference(recorded: dict[str, str], found: dict[str, str]) -> list[str]:
    """A line for each method that is new, gone or called in another way."""
    lines = []
    for name in sorted({*recorded, *found}):
        before, now = recorded.get(name, "is not there"), found.get(name, "is not there")
        if before != now:
            lines.append(f"{name}: recorded {before}, found {now}")
    return lines


if __name__ == "__main__":
    recorded = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    recorded[sys.argv[1]] = signatures(Path(sys.argv[2]).read_text())
    RECORDED.write_text(json.dumps(recorded, indent=1, sort_keys=True) + "\n")
