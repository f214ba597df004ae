"""The names of Ray that the integration uses, with their parameters.

`python ray_api.py VERSION SITE_PACKAGES` records them in ray_api.json, to which `test_ray_api.py` holds our
classes.
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path

RECORDED = Path(__file__).with_name("ray_api.json")
_KV = "ray/llm/_internal/serve/engines/vllm/kv_transfer"
#: File, class ("": a function of the module) and names; no names: all public ones.
PLACES: list[tuple[str, str, tuple[str, ...]]] = [
    (f"{_KV}/base.py", "BaseConnectorBackend", ()),
    (f"{_KV}/base.py", "", ("clamp_request_to_single_token",)),
    (f"{_KV}/factory.py", "KVConnectorBackendFactory", ("is_registered", "register_backend")),
    ("ray/llm/_internal/serve/core/configs/llm_config.py", "LLMConfig", ("update_engine_kwargs",)),
    ("ray/serve/deployment.py", "Deployment", ("options", "bind")),
]


def signatures(source: str, cls: str, names: tuple[str, ...] = ()) -> dict[str, str]:
    """The functions of the class `cls` in `source`, with their parameters; also its plain attributes."""
    body = ast.parse(source).body
    if cls:
        body = next(node for node in body if isinstance(node, ast.ClassDef) and node.name == cls).body
    found = {}
    for node in body:
        if isinstance(node, ast.FunctionDef) and (node.name in names or not names):
            found[node.name] = _signature(node)
        elif cls and not names and isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
            found[ast.unparse(target)] = ast.unparse(node.value)
    return {name: text for name, text in found.items() if not name.startswith("__")}


def _signature(method: ast.FunctionDef) -> str:
    """Names of the parameters; those behind `*` are given by name."""
    names = [arg.arg for arg in method.args.args]
    if method.args.kwonlyargs:
        names += ["*", *(arg.arg for arg in method.args.kwonlyargs)]
    abstract = any("abstractmethod" in ast.unparse(node) for node in method.decorator_list)
    return f"{'abstract ' if abstract else ''}({', '.join(names)})"


def record(site: Path) -> dict[str, dict[str, str]]:
    """What the installed Ray has."""
    return {f"{path}:{cls}": signatures((site / path).read_text(), cls, names) for path, cls, names in PLACES}


if __name__ == "__main__":
    recorded = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    recorded[sys.argv[1]] = record(Path(sys.argv[2]))
    RECORDED.write_text(json.dumps(recorded, indent=1, sort_keys=True) + "\n")
