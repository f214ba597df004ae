"""deepseek_v2 and deepseek_v3 (DeepSeek-AI): multi-head latent attention; experts after some dense layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from segue.engine.models.model_registry import ExpertOptions, ModelFamily
from segue.kv import ConfigError, KVShape

_TOPK_METHODS = ("greedy", "group_limited_greedy")


class DeepSeek(ModelFamily):
    """Version 3; see the module's text."""

    only: ClassVar = {"moe_layer_freq": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}
    sizes = (*ModelFamily.sizes, "kv_lora_rank", "qk_rope_head_dim")
    experts = ExpertOptions("n_routed_experts", "moe_intermediate_size", "n_shared_experts")

    def check(self, values: Mapping[str, Any]) -> None:
        """See `ModelFamily.check`."""
        super().check(values)
        heads, kv_heads = values.get("num_attention_heads"), values.get("num_key_value_heads")
        if kv_heads not in (None, heads):
            raise ConfigError(
                f"the model sets num_key_value_heads = {kv_heads} beside num_attention_heads = {heads}, "
                "which is not supported: with latent attention they are equal"
            )

    def kv_items(self, values: Mapping[str, Any]) -> int:
        """See `ModelFamily.kv_items`."""
        return int(values["kv_lora_rank"]) + int(values["qk_rope_head_dim"])

    def expert_layers(self, values: Mapping[str, Any]) -> int:
        """See `ModelFamily.expert_layers`."""
        return max(0, int(values["num_hidden_layers"]) - int(values.get("first_k_dense_replace") or 0))

    def attention_costs(self, values: Mapping[str, Any]) -> tuple[int, float]:
        """See `ModelFamily.attention_costs`."""
        hidden, heads = int(values["hidden_size"]), int(values["num_attention_heads"])
        rank, rope = int(values["kv_lora_rank"]), int(values["qk_rope_head_dim"])
        own, value = int(values["qk_nope_head_dim"]), int(values["v_head_dim"])
        query_rank = int(values.get("q_lora_rank") or 0)
        query = query_rank * (hidden + heads * (own + rope)) if query_rank else hidden * heads * (own + rope)
        kept = rank + rope
        parameters = query + hidden * kept + rank * heads * (own + value) + heads * value * hidden
        return parameters, 2.0 * heads * (kept + rank)  # absorbed: over the latent itself

    def kv_shape(
        self, attentions: Sequence[Any], values: Mapping[str, Any], dtype: str, item_bytes: int
    ) -> KVShape:
        """See `ModelFamily.kv_shape`."""
        return KVShape(
            kind="mla",
            layers=len(attentions),
            kv_heads=1,
            k_dim=self.kv_items(values),
            v_dim=0,
            dtype=dtype,
            item_bytes=item_bytes,
        )

    def turns_pairs(self, config: Any) -> bool:
        """See `ModelFamily.turns_pairs`."""
        return bool(config.rope_interleave)


class DeepSeekV2(DeepSeek):
    """Version 2; see the module's text."""

    only: ClassVar = {"moe_layer_freq": 1, "norm_topk_prob": False, "scoring_func": "softmax"}

    def check(self, values: Mapping[str, Any]) -> None:
        """See `ModelFamily.check`."""
        super().check(values)
        method = values.get("topk_method")
        if method not in (None, *_TOPK_METHODS):
            raise ConfigError(
                f"the model sets topk_method = {method!r}, which is not supported: of deepseek_v2, "
                f"{' and '.join(map(repr, _TOPK_METHODS))} are"
            )

    def turns_pairs(self, config: Any) -> bool:
        """See `ModelFamily.turns_pairs`."""
        return True


FAMILIES = {"deepseek_v2": DeepSeekV2(), "deepseek_v3": DeepSeek()}
