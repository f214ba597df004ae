"""Replaces the decoder layers of a loaded model by ones with fewer, larger operations.

The mathematics is the same: q, k and v are one product, and `cpu_products` has its parts. Tests compare
every family's fused layers with transformers' own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from segue.engine.cpu.cpu_attention import StepContext
from segue.engine.cpu.cpu_hybrid import StateLayer
from segue.engine.cpu.cpu_kernels import Kernels
from segue.engine.cpu.cpu_mla import LatentLayer
from segue.engine.cpu.cpu_products import FeedForward, Head, NormModule, ProductMaker
from segue.engine.models.model_loading import LoadedModel, has_attention
from segue.engine.ranks.collectives import Place
from segue.engine.ranks.slicing import AbsentLayer
from segue.kv import ConfigError, Internal


class FusedLayer(nn.Module):
    """One decoder layer over rows `[n, hidden]`, called by transformers' own model in place of its own.
    `index` counts the layers that are here. The `last` one computes after its attention only the rows that
    are wanted of it."""

    def __init__(self, layer: Any, index: int, loaded: LoadedModel, make: ProductMaker) -> None:
        super().__init__()
        attn = layer.self_attn
        self.last = False
        self.index = index
        self.window = loaded.windows[index]
        self.scale = float(attn.scaling)
        self.head_dim = loaded.shape.k_dim
        self.kv_heads = loaded.part.heads
        self.heads = loaded.heads
        self.qkv = make.joined(attn.q_proj, attn.k_proj, attn.v_proj)
        self.o = make.summed(attn.o_proj)
        names = {name for name, _ in attn.named_children()}
        sandwich = "pre_feedforward_layernorm" in dict(layer.named_children())
        self.out_gate = make.joined(attn.gate_proj) if "gate_proj" in names else None
        self._head_norm_weight, self._head_norm_eps, self._head_norm_at = None, 0.0, 0
        if {"q_norm", "k_norm"} <= names:
            self._head_norm_weight, self._head_norm_eps = self._head_norm(attn, make)
            self._head_norm_at = self._head_norm_weight.data_ptr()
        self.input_norm = make.norm(layer.input_layernorm)
        self.attention_norm = make.norm(layer.post_attention_layernorm) if sandwich else None
        self.mlp_norm = make.norm(
            layer.pre_feedforward_layernorm if sandwich else layer.post_attention_layernorm
        )
        self.after_norm = make.norm(layer.post_feedforward_layernorm) if sandwich else None
        self.feed_forward = FeedForward(layer.mlp, make)

    def _head_norm(self, attn: Any, make: ProductMaker) -> tuple[Tensor, float]:
        q, k = make.norm(attn.q_norm), make.norm(attn.k_norm)
        return torch.cat((q.weight.expand(self.heads, -1), k.weight.expand(self.kv_heads, -1))), q.eps

    def forward(
        self,
        hidden_states: Tensor,
        *,
        position_embeddings: tuple[Tensor, Tensor],
        segue_step: StepContext,
        **_unused: object,
    ) -> Tensor:
        x = hidden_states[0] if hidden_states.dim() == 3 else hidden_states
        rows, normed = segue_step.rows, segue_step.normed
        attended = self._attend(self.input_norm(x, rows, normed), position_embeddings, segue_step)
        wanted = segue_step.packed.wanted if self.last else None
        if wanted is None:
            return self._rest(attended, x, rows, normed)
        if not len(wanted):
            return x
        few = self._rest(attended[wanted], x[wanted], len(wanted), normed[: len(wanted)])
        return x.index_copy(0, wanted, few)

    def _rest(self, attended: Tensor, x: Tensor, rows: int, normed: Tensor) -> Tensor:
        """The layer after its attention."""
        if self.attention_norm is None:
            x = self.o.plus(attended, x)
        else:
            x = x + self.attention_norm(self.o(attended), rows, normed)
        self.mlp_norm(x, rows, normed)
        if self.after_norm is None:
            return self.feed_forward.plus(normed, x)
        return x + self.after_norm(self.feed_forward(normed), rows, normed)

    __call__ = forward  # no hooks are ever registered: spare the dispatch

    def _attend(self, x: Tensor, position_embeddings: tuple[Tensor, Tensor], step: StepContext) -> Tensor:
        qkv = self.qkv(x)
        cos, sin = position_embeddings
        for part in (cos, sin):  # the kernel trusts its addresses
            right = part.numel() == step.rows * self.head_dim and part.dtype == qkv.dtype
            if not right or not part.is_contiguous():
                raise Internal(
                    f"rotary embedding {part.dtype} {tuple(part.shape)} for heads of {self.head_dim}"
                )
        k_at, v_at = step.pool.layer_at[self.index]
        step.kernels.rotary(
            qkv.data_ptr(),
            step.rows,
            cos.data_ptr(),
            sin.data_ptr(),
            self._head_norm_at,
            self._head_norm_eps,
            k_at,
            v_at,
            step.slots_at,
        )
        attended = step.attend(self.index, qkv, self.scale, self.window)
        return attended if self.out_gate is None else attended.mul_(self.out_gate(x).sigmoid_())


def fuse(loaded: LoadedModel, kernels: Kernels, place: Place) -> Head | None:
    """Replace the layers and the last norm of `loaded`, which was cut for `place`, in place; returns what
    makes its logits, on the rank that samples."""
    make = ProductMaker(loaded, kernels, place.tp)
    body = loaded.model.model
    made = LatentLayer if loaded.shape.kind == "mla" else FusedLayer
    with_kv = with_state = 0
    for index, layer in enumerate(body.layers):
        if isinstance(layer, AbsentLayer):
            continue
        if not has_attention(layer):
            body.layers[index] = StateLayer(layer, with_state, make)
            with_state += 1
            continue
        if layer.self_attn.layer_idx != index:
            raise Internal(f"layer {index} of the model calls itself {layer.self_attn.layer_idx}")
        body.layers[index] = made(layer, with_kv, loaded, make)
        with_kv += 1
    last = body.layers[-1]
    if isinstance(last, FusedLayer) and last.feed_forward.mixture is None and place.size.ranks == 1:
        last.last = True  # other ranks, of a replica or of shared experts, do not know what is wanted
    body.norm = NormModule(make.norm(body.norm))
    setattr(body, loaded.family.last_norm, body.norm)
    if place.rank > 0:
        return None  # the leader samples
    head = loaded.model.lm_head
    if head.bias is not None:
        raise ConfigError("an output head with a bias is not supported")
    softcap = loaded.config.to_dict().get("final_logit_softcapping")
    return Head(head.weight.detach(), make.joined(head), softcap)
