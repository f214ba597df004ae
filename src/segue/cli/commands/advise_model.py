"""What a model costs, from its description alone (`config.json`): parameters, KV, attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from segue.cli.commands.models import model_size
from segue.engine.model_names import DEFAULT_MODEL, is_hub_name
from segue.engine.models.families.deepseek import DEEPSEEK_FAMILIES, latent_items
from segue.engine.models.folders import read_json
from segue.engine.models.hybrid import kv_layers
from segue.kv import ConfigError
from segue.lab.advise.costs import ModelCosts

_DENSE = ("gemma3_text", "llama", "mistral", "qwen2", "qwen3")
#: Of each family with experts: how many there are, and how wide one is.
_EXPERTS = {
    "mixtral": ("num_local_experts", "intermediate_size"),
    "qwen3_moe": ("num_experts", "moe_intermediate_size"),
    **dict.fromkeys(DEEPSEEK_FAMILIES, ("n_routed_experts", "moe_intermediate_size")),
}
KNOWN = tuple(sorted((*_DENSE, *_EXPERTS)))
#: What to do about a model whose costs are not known.
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
    """What the model in `folder` costs with weights and KV in `dtype`. Raises ConfigError for a family whose
    description is not known."""
    values = read_json(folder / "config.json", f"{folder} has no config.json")
    values = values.get("text_config", values)
    family, size = values.get("model_type"), model_size(folder, dtype)
    if family not in KNOWN:
        raise ConfigError(
            f"segue advise cannot tell the costs of models of type {family!r} ({', '.join(KNOWN)}); {INSTEAD}"
        )
    try:
        if size is None:
            raise KeyError("max_position_embeddings, num_attention_heads or num_hidden_layers")
        return _costs(values, folder.name, 4 if dtype == "float32" else 2, size.token_bytes)
    except (KeyError, TypeError, ValueError) as exc:
        raise ConfigError(f"{folder / 'config.json'} does not say {exc}; {INSTEAD}") from exc


def _costs(values: dict[str, Any], name: str, item_bytes: int, token_bytes: int) -> ModelCosts:
    hidden, layers = int(values["hidden_size"]), int(values["num_hidden_layers"])
    attention, pair_flops = _attention(values, hidden)
    head = hidden * int(values["vocab_size"])
    expert = used = experts = per_token = sparse = 0
    if values["model_type"] in _EXPERTS:
        count, width = _EXPERTS[values["model_type"]]
        experts, per_token = int(values[count]), int(values["num_experts_per_tok"])
        expert = 3 * hidden * int(values[width])
        sparse = _sparse_layers(values, layers)
        used = expert * per_token + expert * int(values.get("n_shared_experts") or 0)
    dense = 3 * hidden * int(values["intermediate_size"]) if sparse < layers else 0
    shared = sparse * (used - expert * per_token)
    always = layers * attention + (layers - sparse) * dense + shared
    return ModelCosts(
        name=name,
        parameters=always + sparse * expert * per_token,
        weight_bytes=float(item_bytes * (always + head)),
        expert_bytes=float(item_bytes * sparse * experts * expert),
        experts=experts,
        experts_per_token=per_token,
        pair_flops=kv_layers(values) * pair_flops,
        kv_token_bytes=token_bytes,
        context_tokens=int(values["max_position_embeddings"]),
    )


def _attention(values: dict[str, Any], hidden: int) -> tuple[int, float]:
    """Parameters of one layer's attention, and its operations for one token and one earlier one."""
    heads = int(values["num_attention_heads"])
    if (latent := latent_items(values)) is None:
        dim = int(values.get("head_dim") or hidden // heads)
        kv_heads = int(values.get("num_key_value_heads") or heads)
        return 2 * hidden * dim * (heads + kv_heads), 4.0 * heads * dim
    rank, rope = int(values["kv_lora_rank"]), int(values["qk_rope_head_dim"])
    own, value = int(values["qk_nope_head_dim"]), int(values["v_head_dim"])
    query_rank = int(values.get("q_lora_rank") or 0)
    query = query_rank * (hidden + heads * (own + rope)) if query_rank else hidden * heads * (own + rope)
    parameters = query + hidden * latent + rank * heads * (own + value) + heads * value * hidden
    return parameters, 2.0 * heads * (latent + rank)  # absorbed: over the latent itself


def _sparse_layers(values: dict[str, Any], layers: int) -> int:
    """Layers with experts."""
    dense = set(values.get("mlp_only_layers") or ())
    step = int(values.get("decoder_sparse_step") or 1)
    first = int(values.get("first_k_dense_replace") or 0)
    return sum(i >= first and i not in dense and (i + 1) % step == 0 for i in range(layers))


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
