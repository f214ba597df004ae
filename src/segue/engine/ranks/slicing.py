"""Cuts a loaded model down to one rank's part of it, before its layers are fused.

Tensor parallelism as Megatron-LM has it (Shoeybi et al., 2019): each rank computes some heads and some of the
MLP's inner items, and the sums after `o` and `down` make the rows whole again. KV heads need not divide by
the ranks; where there are more ranks than KV heads, several ranks hold one head and share its queries out.
transformers' own plans cut rows in equal chunks that know no heads: 3 KV heads on 2 ranks fail in them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from segue.engine.kvpool import DTYPES
from segue.engine.models.model_loading import LoadedModel, convert
from segue.engine.parallel import ParallelSize, share
from segue.kv import ConfigError, KVShape, RankCoord
from segue.kv.layout.content import Part

#: Items of an expert that stay together: torch's grouped product wants rows of a multiple of 16 bytes.
_ALIGNED = 8


@dataclass(frozen=True, slots=True)
class Heads:
    """Heads of one tensor-parallel rank, numbered as in the whole model."""

    query: range
    kv: range


def heads_of(heads: int, kv_heads: int, tp: int, size: int) -> Heads:
    """The heads of rank `tp` of `size`, of a model whose `heads` query heads share `kv_heads` KV heads."""
    group = heads // kv_heads
    if size <= kv_heads:
        kv = share(kv_heads, tp, size)
        return Heads(range(kv.start * group, kv.stop * group), kv)
    head, index = divmod(tp, size // kv_heads)
    part = share(group, index, size // kv_heads)
    return Heads(range(head * group + part.start, head * group + part.stop), range(head, head + 1))


def part_of(shape: KVShape, heads: int, size: ParallelSize, coord: RankCoord) -> Part:
    """The layers and KV heads that a rank holds."""
    kv = heads_of(heads, shape.kv_heads, coord.tp, size.tp).kv
    layers = share(shape.layers, coord.pp, size.pp)
    return Part(layers.start, len(layers), kv.start, len(kv))


def check_size(shape: KVShape, heads: int, size: ParallelSize) -> None:
    """Raises ConfigError, with the sizes that would do, for one that cannot share the model out."""
    if shape.state and size.ranks > 1:
        raise ConfigError(
            "this model keeps a state beside its KV, which is not shared out over ranks: "
            "start it with --tp 1 --pp 1 --cp 1"
        )
    legal = [n for n in range(1, heads + 1) if _divides(heads, shape.kv_heads, n)]
    if size.tp not in legal:
        raise ConfigError(
            f"--tp {size.tp} cannot share out {heads} query heads over {shape.kv_heads} KV heads; "
            f"of this model --tp may be {', '.join(map(str, legal))}"
        )
    if size.pp > shape.layers:
        raise ConfigError(f"--pp {size.pp} is more than the model's {shape.layers} layers; give at most that")


def _divides(heads: int, kv_heads: int, tp: int) -> bool:
    return tp <= kv_heads or (tp % kv_heads == 0 and heads // kv_heads % (tp // kv_heads) == 0)


def cut(loaded: LoadedModel, size: ParallelSize, coord: RankCoord) -> LoadedModel:
    """`loaded` with the part of a rank left of it, cut in place, and with its weights in the dtype of its KV.
    Raises ConfigError (see `check_size`)."""
    check_size(loaded.shape, loaded.heads, size)
    if loaded.shape.state:
        return loaded
    part = part_of(loaded.shape, loaded.heads, size, coord)
    heads = heads_of(loaded.heads, loaded.shape.kv_heads, coord.tp, size.tp)
    layers = loaded.model.model.layers
    held = range(part.layer_start, part.layer_start + part.layers)
    as_stored = loaded.model.dtype != DTYPES[loaded.shape.dtype]
    for index, layer in enumerate(layers):
        if index not in held:
            layers[index] = AbsentLayer()
        elif size.tp > 1:
            if loaded.shape.kind == "mla":
                _cut_latent_attention(layer.self_attn, heads.query, coord.tp)
            else:
                _cut_attention(layer.self_attn, heads, loaded.shape.k_dim, coord.tp)
            _cut_mlp(layer.mlp, coord.tp, size.tp)
        if as_stored:
            convert(layers[index], loaded.shape.dtype)  # before the next one is read
    if coord != RankCoord():
        loaded.model.lm_head = nn.Identity()  # the leader samples
    if coord.pp > 0:
        loaded.model.model.embed_tokens = nn.Identity()  # rows come from the stage before
    if as_stored:
        convert(loaded.model, loaded.shape.dtype)
    windows = loaded.windows[held.start : held.stop]
    return replace(loaded, part=part, heads=len(heads.query), windows=windows)


class AbsentLayer(nn.Module):
    """A layer of another pipeline stage: the model's own loop goes through it, so that indices stay."""

    def forward(self, hidden_states: torch.Tensor, **_unused: object) -> torch.Tensor:
        return hidden_states


def _cut_attention(attn: Any, heads: Heads, head_dim: int, tp: int) -> None:
    query, kv = _items(heads.query, head_dim), _items(heads.kv, head_dim)
    _keep_rows(attn.q_proj, query)
    _keep_rows(attn.k_proj, kv)
    _keep_rows(attn.v_proj, kv)
    keep_columns(attn.o_proj, query, tp)


def _cut_latent_attention(attn: Any, query: range, tp: int) -> None:
    """The products that make the latents stay whole: every rank holds the latent of every token."""
    of_query = attn.q_proj if attn.q_lora_rank is None else attn.q_b_proj
    _keep_rows(of_query, _items(query, attn.qk_head_dim))
    _keep_rows(attn.kv_b_proj, _items(query, attn.qk_nope_head_dim + attn.v_head_dim))
    keep_columns(attn.o_proj, _items(query, attn.v_head_dim), tp)


def _items(heads: range, head_dim: int) -> slice:
    return slice(heads.start * head_dim, heads.stop * head_dim)


def _cut_mlp(mlp: Any, tp: int, size: int) -> None:
    parts = dict(mlp.named_children())
    if "experts" in parts:
        _cut_experts(mlp.experts, tp, size)
        if "shared_experts" in parts:
            _cut_mlp(mlp.shared_experts, tp, size)
        return
    inner = share(mlp.gate_proj.out_features, tp, size)
    rows = slice(inner.start, inner.stop)
    _keep_rows(mlp.gate_proj, rows)
    _keep_rows(mlp.up_proj, rows)
    keep_columns(mlp.down_proj, rows, tp)


def _cut_experts(experts: Any, tp: int, size: int) -> None:
    """Keep the same part of every expert's inner items; `gate_up_proj` holds all of gate, then all of up."""
    gate, up = experts.gate_up_proj.chunk(2, 1)
    units = share(gate.shape[1] // _ALIGNED, tp, size)
    last = gate.shape[1] if tp == size - 1 else units.stop * _ALIGNED
    rows = slice(units.start * _ALIGNED, last)
    experts.gate_up_proj = parameter(torch.cat([gate[:, rows], up[:, rows]], 1))
    experts.down_proj = parameter(experts.down_proj[:, :, rows])


def _keep_rows(linear: nn.Linear, rows: slice) -> None:
    linear.weight = parameter(linear.weight[rows])
    linear.out_features = linear.weight.shape[0]
    if linear.bias is not None:
        linear.bias = parameter(linear.bias[rows])


def keep_columns(linear: nn.Linear, columns: slice, tp: int) -> None:
    """Keep `columns` of the weight. Only the first rank keeps the bias: the products of all are summed."""
    linear.weight = parameter(linear.weight[:, columns])
    linear.in_features = linear.weight.shape[1]
    if tp > 0:
        linear.register_parameter("bias", None)


def parameter(part: torch.Tensor) -> nn.Parameter:
    """A copy of `part`, so that the rest of the whole can go."""
    return nn.Parameter(part.detach().clone(memory_format=torch.contiguous_format), requires_grad=False)
