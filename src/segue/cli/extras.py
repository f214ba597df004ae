"""What a command needs beyond the packages that every installation has."""

from __future__ import annotations

import importlib.util

from segue.kv import ConfigError

#: Modules of the `engine` extra by what they are needed for. `pip` fetches the default model alone.
ENGINE = (
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
#: A frontend runs no model: a tokenizer and chat templates are all.
FRONTEND = ("transformers", "tokenizers", "jinja2")


def need(command: str, modules: tuple[str, ...]) -> None:
    """Raise a ConfigError, in one sentence, if `command` lacks one of `modules`; imports none of them."""
    missing = [name for name in modules if not _installed(name)]
    if missing:
        raise ConfigError(
            f"segue {command} needs the engine extra ({', '.join(missing)} not installed): "
            "pip install 'segue[engine]'"
        )


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:
        return False
