"""Which models the engine runs, by their config.json alone: before weights are fetched, and without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from segue.core.errors import ConfigError
from segue.engine.deepseek import DEEPSEEK_FAMILIES, refuse_deepseek_options

#: model_type in config.json, by which a family is known.
FAMILIES = (*DEEPSEEK_FAMILIES, "gemma3_text", "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe")

#: Options that would change results and that nothing here honours.
_OPTIONS = ("attn_logit_softcapping", "use_bidirectional_attention", "quantization_config")


def refuse_unsupported(folder: Path) -> None:
    """Raise a ConfigError if the model in `folder` is no model or of a family or with an option that is not
    supported. What only transformers can tell is checked when it is loaded."""
    path = folder / "config.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        model_type = values.get("model_type")
    except (OSError, ValueError, AttributeError) as exc:
        raise ConfigError(f"{folder} is not a model folder: config.json cannot be read ({exc})") from exc
    if model_type not in FAMILIES:
        hint = " (its text model alone is gemma3_text)" if model_type == "gemma3" else ""
        raise ConfigError(
            f"models of type {model_type!r} are not supported{hint}; supported are {', '.join(FAMILIES)}"
        )
    refuse_options(values)


def refuse_options(values: dict[str, Any]) -> None:
    """Raise a ConfigError for an option of a supported family that would change results."""
    for name in _OPTIONS:
        if values.get(name):
            raise ConfigError(f"the model sets {name} = {values[name]}, which is not supported")
    if values.get("model_type") in DEEPSEEK_FAMILIES:
        refuse_deepseek_options(values)
