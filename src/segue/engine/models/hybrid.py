"""What the families whose sequences keep a state beside their KV say in their configuration. No torch here.

lfm2 (Liquid AI): layers of gated short convolution between layers of attention.
qwen3_next and qwen3_5_text (Alibaba): layers of the gated delta rule (Yang et al., Gated Delta Networks,
2024) between layers of gated attention.
"""

from __future__ import annotations

from typing import Any

from segue.kv import ConfigError, StateTensor

QWEN_FAMILIES = ("qwen3_5_text", "qwen3_next")

#: By family: what transformers calls its layers that keep a state, and the option that says how many
#: positions their convolution sees.
_STATE_LAYERS = {
    "lfm2": ("conv", "conv_L_cache"),
    **dict.fromkeys(QWEN_FAMILIES, ("linear_attention", "linear_conv_kernel_dim")),
}

HYBRID_FAMILIES = tuple(_STATE_LAYERS)

#: See `engine.models.model_registry`.
HYBRID_ONLY: dict[str, dict[str, Any]] = {
    family: {"attn_output_gate": True, "mamba_ssm_dtype": "float32", "output_gate_type": "swish"}
    for family in QWEN_FAMILIES
}


def refuse_hybrid_options(values: dict[str, Any]) -> None:
    """Raise a ConfigError for what the configuration of such a model asks for and is not computed."""
    kinds = layer_types(values)
    kind, width = _STATE_LAYERS[values["model_type"]]
    other = set(kinds) - {kind, "full_attention"}
    if other:
        raise ConfigError(f"the model has layers of type {sorted(other)}, which are not supported")
    if "full_attention" not in kinds:
        raise ConfigError("the model has no layer of full attention, which is not supported: it has no KV")
    if kind in kinds and values.get(width, 2) < 2:
        raise ConfigError(f"the model sets {width} = {values[width]}; at least 2 is supported")


def layer_types(values: dict[str, Any]) -> list[str]:
    """What each layer is, by transformers' names."""
    found = values.get("layer_types")
    if found is not None:
        return list(found)
    kind, _ = _STATE_LAYERS[values["model_type"]]
    every = range(values["num_hidden_layers"])
    attentions = values.get("full_attn_idxs")
    if values["model_type"] in QWEN_FAMILIES:
        interval = values.get("full_attention_interval") or 4
        attentions = every[interval - 1 :: interval]
    elif attentions is None:
        attentions = every
    return ["full_attention" if index in attentions else kind for index in every]


def kv_layers(values: dict[str, Any]) -> int:
    """How many layers of a model have KV."""
    if values.get("model_type") in HYBRID_FAMILIES:
        return layer_types(values).count("full_attention")
    return int(values["num_hidden_layers"])


def state_tensors(values: dict[str, Any], dtype: str, item_bytes: int) -> tuple[StateTensor, ...]:
    """What a model keeps of each sequence beside its KV, computed in `dtype`; empty for most.

    `conv` has the inputs of the last positions of each convolution, the oldest first, `[positions,
    channels]`; `delta` the sums of the delta rule, `[heads, items of a key, items of a value]`, in float32
    whatever `dtype` is.
    """
    family = values.get("model_type")
    if family not in HYBRID_FAMILIES:
        return ()
    kind, width = _STATE_LAYERS[family]
    layers = layer_types(values).count(kind)
    if not layers:
        return ()
    channels, sums = values["hidden_size"], list[StateTensor]()
    if family in QWEN_FAMILIES:
        heads, key, value = (
            values[f"linear_{name}"] for name in ("num_value_heads", "key_head_dim", "value_head_dim")
        )
        channels = 2 * values["linear_num_key_heads"] * key + heads * value
        sums.append(
            StateTensor(name="delta", layers=layers, shape=(heads, key, value), dtype="float32", item_bytes=4)
        )
    shape = (values[width] - 1, channels)
    return (StateTensor(name="conv", layers=layers, shape=shape, dtype=dtype, item_bytes=item_bytes), *sums)
