"""The costs of a model, from its description alone (`config.json`): parameters, KV, attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from segue.cli.commands.models import model_size
from segue.engine.model_names import DEFAULT_MODEL, is_hub_name
from segue.engine.models.folders import read_json
from segue.engine.models.model_registry import ModelFamily, known_families, type_of
from segue.kv import ConfigError
from segue_lab.advise.costs import ModelCosts

#: The remedy for a model whose costs are not known.
INSTEAD = "give --parameters and --kv-bytes-per-token in its place"


def found(model: str) -> Path:
    """The folder of `model`, with a description: one that is on this machine. Raises ConfigError."""
    path = Path(model).expanduser()
    if path.name == "config.json":
        path = path.parent
    if model != DEFAULT_MODEL and (path / "config.json").is_file():
        return path
    if model == DEFAULT_MODEL:
        from segue.engine.models.model_store import resolve_model

        return Path(resolve_model(model))
    if is_hub_name(model):
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(model, "config.json")
        if isinstance(cached, str):
            return Path(cached).parent
    raise ConfigError(
        f"{model} is no folder with a config.json, and no model of the Hub that is on this machine; {INSTEAD}"
    )


def costs(folder: Path, dtype: str) -> ModelCosts:
    """The costs of the model in `folder` with weights and KV in `dtype`. Raises ConfigError for a family
    whose description is not known."""
    values = read_json(folder / "config.json", f"{folder} has no config.json")
    values = values.get("text_config", values)
    size, known = model_size(folder, dtype), _known()
    if (family := known.get(type_of(values) or "")) is None:
        raise ConfigError(
            f"segue advise cannot tell the costs of models of type {type_of(values)!r} ({', '.join(known)}); "
            f"{INSTEAD}"
        )
    try:
        if size is None:
            raise KeyError("max_position_embeddings, num_attention_heads or num_hidden_layers")
        return _costs(family, values, folder.name, 4 if dtype == "float32" else 2, size.token_bytes)
    except (KeyError, TypeError, ValueError) as exc:
        raise ConfigError(f"{folder / 'config.json'} does not say {exc}; {INSTEAD}") from exc


def _known() -> dict[str, ModelFamily]:
    """The families whose costs are known: the work of a layer without attention is not."""
    return {name: family for name, family in known_families().items() if not family.has_state}


def _costs(
    family: ModelFamily, values: dict[str, Any], name: str, item_bytes: int, token_bytes: int
) -> ModelCosts:
    hidden, layers = int(values["hidden_size"]), int(values["num_hidden_layers"])
    attention, pair_flops = family.attention_costs(values)
    head = hidden * int(values["vocab_size"])
    expert = shared = experts = per_token = 0
    sparse = family.expert_layers(values)
    if (options := family.experts) is not None:
        experts, per_token = int(values[options.count]), int(values["num_experts_per_tok"])
        expert = 3 * hidden * int(values[options.width])
        shared = expert * int(values.get(options.shared) or 0) if options.shared else 0
    dense = 3 * hidden * int(values["intermediate_size"]) if sparse < layers else 0
    always = layers * attention + (layers - sparse) * dense + sparse * shared
    return ModelCosts(
        name=name,
        parameters=always + sparse * expert * per_token,
        weight_bytes=float(item_bytes * (always + head)),
        expert_bytes=float(item_bytes * sparse * experts * expert),
        experts=experts,
        experts_per_token=per_token,
        pair_flops=family.kv_layers(values) * pair_flops,
        kv_token_bytes=token_bytes,
        context_tokens=family.context_tokens(values),
    )


def explicit(parameters: float, active: float | None, kv_bytes: int, item_bytes: int) -> ModelCosts:
    """A model of which only sizes are known: each forward reads all parameters, and a row is multiplied with
    the `active` ones."""
    return ModelCosts(
        name=f"{parameters:.3g} parameters",
        parameters=active or parameters,
        weight_bytes=item_bytes * parameters,
        kv_token_bytes=kv_bytes,
        context_tokens=10**9,
    )
