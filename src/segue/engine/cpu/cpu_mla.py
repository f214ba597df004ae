"""Decoder layers with multi-head latent attention (DeepSeek-AI, DeepSeek-V2, 2024, section 2.1).

The pool holds one row per token and layer: the normed latent of `kv_lora_rank` items, then the rotated key
of `qk_rope_head_dim` items that all heads share. The products that expand the latent into each head's K and
V are absorbed: K's into the query, V's into what comes out. So attention is that of many query heads over
one KV head, whose K is the row and whose V is the row cut to its latent. The tests compare tokens with those
of transformers, which expands K and V.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from segue.engine.cpu.cpu_attention import StepContext
from segue.engine.cpu.cpu_products import FeedForward, FusedNorm, Product, ProductMaker
from segue.engine.models.model_loading import LoadedModel


class LatentLayer(nn.Module):
    """One decoder layer over rows `[n, hidden]`, called by transformers' own model in place of its own."""

    def __init__(self, layer: Any, index: int, loaded: LoadedModel, make: ProductMaker) -> None:
        super().__init__()
        attn = layer.self_attn
        self.index = index
        self.scale = float(attn.scaling)
        self.heads = loaded.heads
        self.row_items = loaded.shape.k_dim
        self.rank: int = attn.kv_lora_rank
        self.nope: int = attn.qk_nope_head_dim
        self.in_pairs = loaded.family.turns_pairs(loaded.config)
        self.query = _Query(attn, make)
        self.kv_a = make.joined(attn.kv_a_proj_with_mqa)
        self.kv_norm = make.norm(attn.kv_a_layernorm)
        expand = attn.kv_b_proj.weight.detach().view(self.heads, -1, self.rank)
        #: `[heads, nope, rank]`: what a query's part without a position becomes against the latent
        self.absorb_k = expand[:, : self.nope].contiguous()
        #: `[heads, rank, v_head_dim]`: what a weighted sum of latents becomes
        self.expand_v = expand[:, self.nope :].transpose(1, 2).contiguous()
        self.o = make.summed(attn.o_proj)
        self.input_norm = make.norm(layer.input_layernorm)
        self.mlp_norm = make.norm(layer.post_attention_layernorm)
        self.feed_forward = FeedForward(layer.mlp, make)

    def forward(
        self,
        hidden_states: Tensor,
        *,
        position_embeddings: Tensor | tuple[Tensor, Tensor],
        segue_step: StepContext,
        **_unused: object,
    ) -> Tensor:
        x = hidden_states[0] if hidden_states.dim() == 3 else hidden_states
        normed = self.input_norm(x, segue_step.rows, segue_step.normed)
        x = self.o.plus(self._attend(normed, _turns(position_embeddings), segue_step), x)
        return self.feed_forward.plus(self.mlp_norm(x, segue_step.rows, segue_step.normed), x)

    __call__ = forward  # no hooks are ever registered: spare the dispatch

    def _attend(self, x: Tensor, turns: tuple[Tensor, Tensor], step: StepContext) -> Tensor:
        rows, rank = step.rows, self.rank
        query = self.query(x, rows).view(rows, self.heads, -1)
        latent = self.kv_a(x)
        # The query heads, the K and the V of each row, as `attend` takes them. K and V are the same here.
        together = x.new_empty(rows, self.heads + 2, self.row_items)
        absorbed = torch.bmm(query[:, :, : self.nope].transpose(0, 1), self.absorb_k)
        together[:, : self.heads, :rank] = absorbed.transpose(0, 1)
        together[:, : self.heads, rank:] = self._turned(query[:, :, self.nope :], turns)
        row = together[:, self.heads]
        row[:, :rank] = _normed(self.kv_norm, latent[:, :rank], rows)
        row[:, rank:] = self._turned(latent[:, None, rank:], turns)[:, 0]
        together[:, self.heads + 1] = row
        step.pool.kv[self.index, 0, :, 0].index_copy_(0, step.packed.slots, row)
        attended = step.attend(self.index, together, self.scale, None)
        summed = attended.view(rows, self.heads, self.row_items)[:, :, :rank]
        return torch.bmm(summed.transpose(0, 1), self.expand_v).transpose(0, 1).reshape(rows, -1)

    def _turned(self, part: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
        """`part` (`[rows, heads, rope]`) rotated by cos and sin (`[rows, 1, rope / 2]`), in float32.

        The result has halves, whether the model's weights give pairs or halves. Any order of items works as
        long as queries and keys share it."""
        part = part.float()
        low, high = (part[..., 0::2], part[..., 1::2]) if self.in_pairs else part.chunk(2, -1)
        cos, sin = turns
        return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)


class _Query:
    """The queries of all heads, by one product or by two with a norm between them."""

    def __init__(self, attn: Any, make: ProductMaker) -> None:
        self._low: tuple[Product, FusedNorm] | None = None
        if attn.q_lora_rank is not None:
            self._low = make.joined(attn.q_a_proj), make.norm(attn.q_a_layernorm)
        self._out = make.joined(attn.q_proj if self._low is None else attn.q_b_proj)

    def __call__(self, x: Tensor, rows: int) -> Tensor:
        if self._low is not None:
            product, norm = self._low
            x = _normed(norm, product(x), rows)
        return self._out(x)


def _normed(norm: FusedNorm, x: Tensor, rows: int) -> Tensor:
    x = x.contiguous()
    return norm(x, rows, torch.empty_like(x))


def _turns(embeddings: Tensor | tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """cos and sin in float32, `[rows, 1, rope / 2]`: version 2 gives one complex number per pair, version 3
    cos and sin, of which the second half repeats the first."""
    if isinstance(embeddings, Tensor):
        angles = embeddings[0].unsqueeze(1)
        return angles.real, angles.imag
    cos, sin = (part[0, :, None, : part.shape[-1] // 2].float() for part in embeddings)
    return cos, sin
