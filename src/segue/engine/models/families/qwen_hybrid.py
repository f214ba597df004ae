"""qwen3_next and qwen3_5_text (Alibaba): layers of the gated delta rule (Yang et al., Gated Delta Networks,
2024) between layers of gated attention; qwen3_next has experts."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from segue.engine.models.families.qwen import EXPERTS, sparse_layers
from segue.engine.models.hybrid import HybridFamily
from segue.kv import StateTensor

if TYPE_CHECKING:
    from torch import Tensor, nn


class QwenHybrid(HybridFamily):
    """qwen3_5_text; see the module's text."""

    only: ClassVar = {"attn_output_gate": True, "mamba_ssm_dtype": "float32", "output_gate_type": "swish"}
    sizes = (
        *HybridFamily.sizes,
        "full_attention_interval",
        "linear_conv_kernel_dim",
        "linear_num_key_heads",
        "linear_num_value_heads",
        "linear_key_head_dim",
        "linear_value_head_dim",
    )
    state_layer = "linear_attention"
    width = "linear_conv_kernel_dim"
    one_plus_norms = True

    def attentions(self, values: Mapping[str, Any]) -> Collection[int]:
        """See `HybridFamily.attentions`."""
        interval = values.get("full_attention_interval") or 4
        return range(interval - 1, values["num_hidden_layers"], interval)

    def channels(self, values: Mapping[str, Any]) -> int:
        """See `HybridFamily.channels`."""
        heads, key, value = _value_sizes(values)
        return int(2 * values["linear_num_key_heads"] * key + heads * value)

    def sums(self, values: Mapping[str, Any], layers: int) -> tuple[StateTensor, ...]:
        """See `HybridFamily.sums`. `delta` has the sums of the delta rule, `[heads, items of a key, items of
        a value]`, in float32 whatever the model computes in."""
        shape = _value_sizes(values)
        return (StateTensor(name="delta", layers=layers, shape=shape, dtype="float32", item_bytes=4),)

    def reshape(self, body: Any) -> None:
        """See `ModelFamily.reshape`.

        - Attention: the gates of its outputs have a product of their own, `gate_proj`.
        - The rotary embedding, which turns the first items of a head only, turns all of them: those that stay
          as they are by an angle of 0. For this the items of each head of q and k have another order, which
          is free as long as q and k share it.
        - The delta rule: qwen3_next mixes its inputs head by head; they are ordered as in qwen3_5_text.
        """
        turned = 2 * body.rotary_emb.inv_freq.numel()
        for layer in body.layers:
            parts = dict(layer.named_children())
            if "self_attn" in parts:
                _reshape_attention(layer.self_attn, turned)
            elif "in_proj_qkvz" in dict(layer.linear_attn.named_children()):
                _reorder_inputs(layer.linear_attn)
        rotary = body.rotary_emb
        del body.rotary_emb  # its replacement is no module
        body.rotary_emb = _WholeHeads(rotary, body.config.head_dim)


class QwenNext(QwenHybrid):
    """qwen3_next; see the module's text."""

    experts = EXPERTS

    def expert_layers(self, values: Mapping[str, Any]) -> int:
        """See `ModelFamily.expert_layers`."""
        return sparse_layers(values)


def _value_sizes(values: Mapping[str, Any]) -> tuple[int, int, int]:
    """Value heads of the delta rule, items of a key and items of a value."""
    return (
        values["linear_num_value_heads"],
        values["linear_key_head_dim"],
        values["linear_value_head_dim"],
    )


def _reshape_attention(attn: Any, turned: int) -> None:
    import torch

    size, half = attn.head_dim, turned // 2
    turning = torch.arange(turned).view(2, half)
    staying = torch.arange(turned, size).view(2, size // 2 - half)
    order = torch.cat((turning, staying), 1).flatten()
    queries, gates = torch.arange(attn.q_proj.out_features).view(-1, 2, size).unbind(1)
    keys = torch.arange(attn.k_proj.out_features).view(-1, size)
    attn.gate_proj = _rows(attn.q_proj, gates)
    attn.q_proj = _rows(attn.q_proj, queries[:, order])
    attn.k_proj = _rows(attn.k_proj, keys[:, order])
    for norm in (attn.q_norm, attn.k_norm):
        norm.weight = torch.nn.Parameter(norm.weight[order], requires_grad=False)


def _reorder_inputs(mixer: Any) -> None:
    import torch

    # transformers' own function, with the numbers of the outputs in place of the outputs
    mixed = (mixer.in_proj_qkvz, mixer.in_proj_ba)
    numbers = [torch.arange(linear.out_features).view(1, 1, -1) for linear in mixed]
    query, key, value, gate, beta, decay = mixer.fix_query_key_value_ordering(*numbers)
    mixer.in_proj_qkv = _rows(mixer.in_proj_qkvz, torch.cat([part.flatten() for part in (query, key, value)]))
    mixer.in_proj_z = _rows(mixer.in_proj_qkvz, gate)
    mixer.in_proj_b, mixer.in_proj_a = _rows(mixer.in_proj_ba, beta), _rows(mixer.in_proj_ba, decay)
    del mixer.in_proj_qkvz, mixer.in_proj_ba


def _rows(linear: nn.Linear, rows: Tensor) -> nn.Linear:
    """The product that gives these outputs of `linear`, in this order."""
    from torch import nn

    rows = rows.flatten()
    made = nn.Linear(linear.in_features, len(rows), linear.bias is not None, device="meta")
    made.weight = nn.Parameter(linear.weight[rows], requires_grad=False)
    if linear.bias is not None:
        made.bias = nn.Parameter(linear.bias[rows], requires_grad=False)
    return made


class _WholeHeads:
    """cos and sin of `rotary` for heads of `size` items, the turned ones first in each half of a head."""

    def __init__(self, rotary: nn.Module, size: int) -> None:
        self._rotary = rotary
        self._size = size

    def __call__(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = self._rotary(x, position_ids)
        return self._spread(cos, 1.0), self._spread(sin, 0.0)

    def _spread(self, part: Tensor, still: float) -> Tensor:
        half = part.shape[-1] // 2
        first = part.new_full((*part.shape[:-1], self._size // 2), still)
        first[..., :half] = part[..., :half]
        return first.repeat(1, 1, 2)


FAMILIES = {"qwen3_5_text": QwenHybrid(), "qwen3_next": QwenNext()}
