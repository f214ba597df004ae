"""Packages that only some hosts have: importing them late, and saying why one is not there."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

from segue.kv.errors import ConfigError

#: `importlib.import_module`, or a test's.
Modules = Callable[[str], Any]


def missing(module: str, package: str) -> str:
    """Why `module` cannot be imported, with what to install (`package`), or ""."""
    top = module.partition(".")[0]
    if importlib.util.find_spec(top) is None:
        return f"{top} is not installed: pip install {package}"
    try:
        importlib.import_module(module)
    except (ImportError, OSError, RuntimeError) as exc:  # a shared library that it loads is not there
        return f"{module} cannot be imported: {exc}"
    return ""


def device_number(device: str, kind: str) -> int:
    """The number in the name of a device as torch has it: 1 of `cuda:1`. Raises ConfigError for a device that
    is not of `kind`."""
    found, _, number = device.partition(":")
    if found != kind or (number and not number.isdigit()):
        raise ConfigError(f"memory of {device} was given where memory of {kind}:N is needed")
    return int(number or 0)
