"""Ray: segue's processes as actors of Ray Serve, and the segue connector in `ray.serve.llm` (docs/ray.md).

`ray_plan` checks a configuration (pure), `ray_app` makes deployments of it, `ray_actors` has their actors.
`ray_connector` is the backend of `ray.serve.llm`; `ray_params` has what it writes into requests (pure).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from segue.integrations.ray.ray_app import build_app as build_app
    from segue.integrations.ray.ray_connector import SegueConnectorBackend as SegueConnectorBackend
    from segue.integrations.ray.ray_connector import register_connector as register_connector

_MODULE_OF = {
    "SegueConnectorBackend": "segue.integrations.ray.ray_connector",
    "build_app": "segue.integrations.ray.ray_app",
    "register_connector": "segue.integrations.ray.ray_connector",
}
__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> object:
    # A plan is checked without Ray, and `build_app` needs no vLLM.
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(module), name)
