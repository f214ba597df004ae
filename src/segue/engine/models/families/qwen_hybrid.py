"""Gives the modules of qwen3_next and qwen3_5_text the form that the engine's layers take."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def reshape_qwen(body: Any) -> None:
    """Change the modules of `body` (transformers' model without its head) in place.

    - Attention: the gates of its outputs have a product of their own, `gate_proj`.
    - The rotary embedding, which turns the first items of a head only, turns all of them: those that stay as
      they are by an angle of 0. For this the items of each head of q and k have another order, which is free
      as long as q and k share it.
    - The delta rule: qwen3_next mixes its inputs head by head; they are ordered as in qwen3_5_text.
    """
    turned = 2 * body.rotary_emb.inv_freq.numel()
    for layer in body.layers:
        parts = dict(layer.named_children())
        if "self_attn" in parts:
            _reshape_attention(layer.self_attn, turned)
        elif "in_proj_qkvz" in dict(layer.linear_attn.named_children()):
            _reorder_inputs(layer.linear_attn)
    body.rotary_emb = _WholeHeads(body.rotary_emb, body.config.head_dim)


def _reshape_attention(attn: Any, turned: int) -> None:
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
        norm.weight = nn.Parameter(norm.weight[order], requires_grad=False)


def _reorder_inputs(mixer: Any) -> None:
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
    rows = rows.flatten()
    made = nn.Linear(linear.in_features, len(rows), linear.bias is not None, device="meta")
    made.weight = nn.Parameter(linear.weight[rows], requires_grad=False)
    if linear.bias is not None:
        made.bias = nn.Parameter(linear.bias[rows], requires_grad=False)
    return made


class _WholeHeads(nn.Module):
    """cos and sin of `rotary` for heads of `size` items, the turned ones first in each half of a head."""

    def __init__(self, rotary: nn.Module, size: int) -> None:
        super().__init__()
        self._rotary = rotary
        self._size = size

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = self._rotary(x, position_ids)
        return self._spread(cos, 1.0), self._spread(sin, 0.0)

    def _spread(self, part: Tensor, still: float) -> Tensor:
        half = part.shape[-1] // 2
        first = F.pad(part[..., :half], (0, self._size // 2 - half), value=still)
        return torch.cat((first, first), -1)
