"""The doubles of libraries have the signatures of the libraries: as recorded
(`tools/record_signatures.py`), and where a library can be imported here, as it is."""

from __future__ import annotations

import importlib
import inspect
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import double_memfabric
import double_mori

ROOT = Path(__file__).parents[3]
RECORDED: dict[str, Any] = json.loads((Path(__file__).parent / "library_signatures.json").read_text())
DOUBLES = {
    "mori.io": double_mori,
    "memfabric_hybrid": double_memfabric,
}
NAMES = [(module, name) for module in RECORDED for name in RECORDED[module]["signatures"]]


def found(module: ModuleType, name: str) -> Any:
    value: Any = module
    for part in name.split("."):
        value = inspect.getattr_static(value, part)
        value = value.__func__ if isinstance(value, staticmethod) else value
    return value


def parameters(function: Any) -> list[str]:
    kinds = inspect.signature(function).parameters.values()
    return [("*" if p.kind is p.VAR_POSITIONAL else "") + p.name for p in kinds]


@pytest.mark.parametrize(("module", "name"), NAMES)
def test_a_double_has_the_recorded_parameters(module: str, name: str) -> None:
    told = RECORDED[module]["signatures"][name]
    own = parameters(found(DOUBLES[module], name))
    # Of `unpack` the source names no parameter.
    assert (own if name.partition(".")[2] != "unpack" else own[1:]) == told


@pytest.mark.parametrize("module", RECORDED)
def test_a_double_has_the_recorded_values(module: str) -> None:
    for name, value in RECORDED[module]["values"].items():
        got: Any = DOUBLES[module]
        for part in name.split("."):
            got = getattr(got, part)
        assert int(got) == value, name


def test_each_function_and_class_of_a_double_is_recorded_or_of_the_double_alone() -> None:
    own = {"Faults", "Stream", "Event", "reset", "device_memory", "modules"}
    for module, double in DOUBLES.items():
        public = {
            name
            for name, value in vars(double).items()
            if inspect.isfunction(value) and value.__module__ == double.__name__
        }
        recorded = {n for m in RECORDED if DOUBLES[m] is double for n in RECORDED[m]["signatures"]}
        assert public - own <= recorded, module


def test_the_record_is_what_an_installed_library_says(monkeypatch: pytest.MonkeyPatch) -> None:
    module = "memfabric_hybrid"
    pytest.importorskip(module, reason=f"{module} is not installed", exc_type=ImportError)
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    recorder = importlib.import_module("record_signatures")
    try:
        for name, told in recorder.record("memfabric", []).items():
            assert {k: told[k] for k in ("signatures", "values")} == {
                k: RECORDED[name][k] for k in ("signatures", "values")
            }
    finally:
        sys.modules.pop("record_signatures", None)
