"""Stands for torchvision, whose wheel does not load beside torch's CPU build: names without behaviour."""

from __future__ import annotations

import importlib.machinery
import sys
import types
from typing import Any


class _Names(type):
    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _Names(name, (), {})
        setattr(self, name, made)
        return made


__version__ = "0.0"
__path__: list[str] = []
for _name in (
    "transforms",
    "transforms.functional",
    "transforms.v2",
    "transforms.v2.functional",
    "io",
    "ops",
):
    _module = _Module(f"{__name__}.{_name}")
    _module.__path__ = []
    _module.__spec__ = importlib.machinery.ModuleSpec(_module.__name__, None, is_package=True)
    sys.modules[_module.__name__] = _module
    _parent, _, _child = f"{__name__}.{_name}".rpartition(".")
    setattr(sys.modules[_parent], _child, _module)
