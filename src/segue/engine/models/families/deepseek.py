"""What the DeepSeek families (multi-head latent attention) say in their configuration. No torch here."""

from __future__ import annotations

from typing import Any

from segue.kv import ConfigError

DEEPSEEK_FAMILIES = ("deepseek_v2", "deepseek_v3")

#: See `engine.models.model_registry`.
DEEPSEEK_ONLY: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"moe_layer_freq": 1, "norm_topk_prob": False, "scoring_func": "softmax"},
    "deepseek_v3": {"moe_layer_freq": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid"},
}
_TOPK_METHODS = ("greedy", "group_limited_greedy")


def refuse_deepseek_options(values: dict[str, Any]) -> None:
    """Raise a ConfigError for what the configuration of a DeepSeek model asks for and is not computed."""
    family = values["model_type"]
    method = values.get("topk_method")
    if family == "deepseek_v2" and method not in (None, *_TOPK_METHODS):
        raise ConfigError(
            f"the model sets topk_method = {method!r}, which is not supported: of {family}, "
            f"{' and '.join(map(repr, _TOPK_METHODS))} are"
        )
    heads, kv_heads = values.get("num_attention_heads"), values.get("num_key_value_heads")
    if kv_heads not in (None, heads):
        raise ConfigError(
            f"the model sets num_key_value_heads = {kv_heads} beside num_attention_heads = {heads}, which is "
            "not supported: with latent attention they are equal"
        )


def latent_items(values: dict[str, Any]) -> int | None:
    """The items of KV per token and layer, if the configuration is that of latent attention; else None."""
    if values.get("model_type") not in DEEPSEEK_FAMILIES:
        return None
    return int(values["kv_lora_rank"]) + int(values["qk_rope_head_dim"])
