"""Names and parameters of the libraries that `tests/double_*.py` stand for, as
`tests/kv/transport/library_signatures.json` keeps them. Nothing of the libraries but these is kept.

    python tools/record_signatures.py memfabric           # memfabric-hybrid must be importable
    python tools/record_signatures.py mori WHEEL PYBIND   # a wheel, and pybind_io.cpp of its sources
"""

from __future__ import annotations

import ast
import importlib
import json
import re
import sys
import zipfile
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

RECORD = Path(__file__).parents[1] / "tests" / "kv" / "transport" / "library_signatures.json"
Signatures = dict[str, list[str]]

MEMFABRIC = [
    "initialize",
    "get_rpc_port",
    "batch_register_memory",
    "transfer_sync_read",
    "batch_transfer_sync_write",
]
MORI = [
    "__init__",
    "get_engine_desc",
    "create_backend",
    "register_remote_engine",
    "register_memory",
    "allocate_transfer_uid",
    "_batch_single_side_transfer",
    "batch_read",
    "batch_write",
]
MORI_CLASSES = {
    "IOEngineConfig": ["__init__"],
    "RdmaBackendConfig": ["__init__"],
    "TransferStatus": ["InProgress", "Succeeded", "Failed", "Message", "WaitFor"],
    "EngineDesc": ["pack", "unpack"],
    "MemoryDesc": ["pack", "unpack"],
}


def of_pybind(cls: Any, names: Iterable[str]) -> Signatures:
    """Parameters of methods that pybind11 has described in their docstrings."""
    return {
        f"{cls.__name__}.{name}": re.findall(r"[(,] ?(\w+): ", getattr(cls, name).__doc__.split(") ->")[0])
        for name in names
    }


def of_source(text: str, cls: str, names: Iterable[str]) -> Signatures:
    """Parameters of methods in Python source."""
    (found,) = [n for n in ast.parse(text).body if isinstance(n, ast.ClassDef) and n.name == cls]
    methods = {n.name: n.args for n in found.body if isinstance(n, ast.FunctionDef)}
    return {
        f"{cls}.{name}": [a.arg for a in methods[name].args]
        + ([f"*{rest.arg}"] if (rest := methods[name].vararg) else [])
        for name in names
    }


def of_cpp(text: str) -> Signatures:
    """Parameters of the classes of `MORI_CLASSES` in pybind11 source; unnamed ones are counted as none."""
    found: Signatures = {}
    for cls, names in MORI_CLASSES.items():
        body = text.split(f'(m, "{cls}")')[1].split("py::class_")[0]
        for name in names:
            start = "py::init<" if name == "__init__" else f'"{name}"'
            call = re.split(r"\n\s*\.def", body.split(start)[1])[0]
            own = [] if name == "unpack" else ["self"]
            found[f"{cls}.{name}"] = own + re.findall(r'py::arg\("(\w+)"\)', call)
    return found


def record(kind: str, files: list[str]) -> dict[str, Any]:
    """The recorded signatures of one library, by module."""
    if kind == "memfabric":
        module = importlib.import_module("memfabric_hybrid")
        version = metadata.version("memfabric-hybrid")
        return {
            "memfabric_hybrid": {
                "from": f"memfabric-hybrid {version}: docstrings that pybind11 makes",
                "signatures": of_pybind(module.TransferEngine, MEMFABRIC),
                "values": {},
            }
        }
    wheel, pybind = files
    source = zipfile.ZipFile(wheel).read("mori/io/engine.py").decode()
    signatures = of_source(source, "IOEngine", MORI) | of_cpp(Path(pybind).read_text())
    return {
        "mori.io": {
            "from": f"{Path(wheel).name}: mori/io/engine.py; src/pybind/pybind_io.cpp of ROCm/mori 624002c",
            "signatures": signatures,
            "values": {},
        }
    }


if __name__ == "__main__":
    kept = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    kept |= record(sys.argv[1], sys.argv[2:])
    RECORD.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")
