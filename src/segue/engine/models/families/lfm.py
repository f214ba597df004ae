"""lfm2 (Liquid AI): layers of gated short convolution between layers of attention."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from segue.engine.models.hybrid import HybridFamily


class Lfm(HybridFamily):
    """See the module's text."""

    sizes = (*HybridFamily.sizes, "conv_L_cache")
    state_layer = "conv"
    width = "conv_L_cache"
    last_norm = "embedding_norm"

    def attentions(self, values: Mapping[str, Any]) -> Collection[int]:
        """See `HybridFamily.attentions`."""
        found: Collection[int] | None = values.get("full_attn_idxs")
        return range(values["num_hidden_layers"]) if found is None else found

    def channels(self, values: Mapping[str, Any]) -> int:
        """See `HybridFamily.channels`."""
        return int(values["hidden_size"])

    def activation(self, config: Any) -> str:
        """See `ModelFamily.activation`."""
        return "silu"  # there is no choice, and no option

    def reshape(self, body: Any) -> None:
        """Give the modules the names that they have in other families."""
        from torch import nn

        for layer in body.layers:
            layer.input_layernorm, layer.post_attention_layernorm = layer.operator_norm, layer.ffn_norm
            mlp = layer.mlp = layer.feed_forward
            mlp.gate_proj, mlp.up_proj, mlp.down_proj, mlp.act_fn = mlp.w1, mlp.w3, mlp.w2, nn.SiLU()
            del layer.operator_norm, layer.ffn_norm, layer.feed_forward, mlp.w1, mlp.w2, mlp.w3
            if "self_attn" in dict(layer.named_children()):
                attn = layer.self_attn
                attn.q_norm, attn.k_norm, attn.o_proj = attn.q_layernorm, attn.k_layernorm, attn.out_proj
                del attn.q_layernorm, attn.k_layernorm, attn.out_proj
        body.norm = body.embedding_norm


FAMILIES = {"lfm2": Lfm()}
