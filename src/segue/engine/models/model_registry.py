"""Which models the engine runs, by their config.json alone: before weights are fetched, and without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from segue.engine.models.families.deepseek import DEEPSEEK_FAMILIES, DEEPSEEK_ONLY, refuse_deepseek_options
from segue.engine.models.hybrid import HYBRID_FAMILIES, HYBRID_ONLY, QWEN_FAMILIES, refuse_hybrid_options
from segue.kv import ConfigError

#: model_type in config.json, by which a family is known.
FAMILIES = (
    *DEEPSEEK_FAMILIES,
    "gemma3_text",
    "lfm2",
    "llama",
    "mistral",
    "mixtral",
    "qwen2",
    "qwen3",
    *QWEN_FAMILIES,
    "qwen3_moe",
)

#: What says how many experts a layer has, in one family or another.
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")

#: By family: options and the only value of each that transformers computes; it ignores others without a word.
_ONLY = {**DEEPSEEK_ONLY, **HYBRID_ONLY}

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
        text = f"{model_type}_text"
        hint = f" (its text model alone is {text})" if text in FAMILIES else ""
        raise ConfigError(
            f"models of type {model_type!r} are not supported{hint}; supported are {', '.join(FAMILIES)}"
        )
    refuse_options(values)


def check_experts(folder: Path, ranks: int) -> None:
    """Raise a ConfigError unless the model in `folder` has at least one expert for each of `ranks`."""
    refuse_unsupported(folder)
    values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    experts = max(int(values.get(name) or 0) for name in _EXPERTS)
    if not experts:
        raise ConfigError(
            "--enable-expert-parallel shares out experts, and a model of type "
            f"{values['model_type']} has none; drop it, and the DP ranks are independent"
        )
    if experts < ranks:
        raise ConfigError(
            f"--enable-expert-parallel cannot share out {experts} experts over {ranks} DP ranks; give at "
            f"most --dp {experts}"
        )


def refuse_options(values: dict[str, Any]) -> None:
    """Raise a ConfigError for an option of a supported family that would change results."""
    for name in _OPTIONS:
        if values.get(name):
            raise ConfigError(f"the model sets {name} = {values[name]}, which is not supported")
    family = str(values.get("model_type"))
    for name, only in _ONLY.get(family, {}).items():
        if values.get(name) not in (None, only):
            raise ConfigError(
                f"the model sets {name} = {values[name]!r}, which is not supported: of {family}, {only!r} is"
            )
    if family in DEEPSEEK_FAMILIES:
        refuse_deepseek_options(values)
    if family in HYBRID_FAMILIES:
        refuse_hybrid_options(values)
