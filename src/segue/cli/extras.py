"""The packages that a command needs beyond those of the library, by the extra that brings them."""

from __future__ import annotations

import importlib.util
from typing import Final

from segue.kv import ConfigError

#: Modules of the `serve` extra.
SERVE: Final = ("starlette", "uvicorn", "httptools", "httpx2", "prometheus_client", "rich", "psutil")
#: Modules of the `engine` extra. Its `pip` fetches the default model alone, and is not looked for.
ENGINE: Final = (
    "torch",
    "transformers",
    "tokenizers",
    "huggingface_hub",
    "safetensors",
    "accelerate",
    "gguf",
    "jinja2",
    "llguidance",
    "numba",
)
#: Modules of the `keys` extra.
KEYS: Final = ("cryptography",)
#: A frontend runs no model: a tokenizer and chat templates are all.
FRONTEND: Final = ("transformers", "tokenizers", "jinja2")
#: The extras of each command; a command that is not listed needs `serve` alone.
_NEEDS: Final = {
    "version": (),
    "keys": KEYS,
    "serve": (*SERVE, *ENGINE),
    "prefill": (*SERVE, *ENGINE),
    "decode": (*SERVE, *ENGINE),
    "unified": (*SERVE, *ENGINE),
    "frontend": (*SERVE, *FRONTEND),
    "advise --measure": (*SERVE, *ENGINE),
}


def need(command: str) -> None:
    """Raise a ConfigError, in one sentence, if a module that `command` needs is missing; imports none."""
    missing = [name for name in _NEEDS.get(command, SERVE) if not _installed(name)]
    if not missing:
        return
    lacking = set(missing)
    of_serve = lacking - {*ENGINE, *KEYS}
    needed = {"serve": of_serve, "engine": lacking & {*ENGINE}, "keys": lacking & {*KEYS}}
    extras = [name for name, has in needed.items() if has]
    said = "the extras serve and engine" if len(extras) > 1 else f"the {extras[0]} extra"
    raise ConfigError(
        f"segue {command} needs {said} ({', '.join(missing)} not installed): "
        f"pip install 'segue[{','.join(extras)}]'"
    )


def has_lab() -> bool:
    """Whether `segue_lab`, which has the commands `sim` and `advise`, is installed; imports nothing."""
    return _installed("segue_lab")


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:
        return False
