"""Attention of one step over the paged pool, called from inside transformers' own forward.

K and V of the step's rows are written into the pool first. Each sequence is then attended alone,
by torch's flash kernel for CPUs, over strided views of the pool: no copy for a sequence that lies in
a few runs of pages. Several parts are merged by their log-sum-exp (Dao et al., FlashAttention,
2022, section 3.1).
"""

from __future__ import annotations

import torch

from segue.core.errors import Internal
from segue.engine.kvpool import KVPool
from segue.engine.packing import Packed, Segment, View

ATTENTION_NAME = "segue_paged"

_flash = torch._scaled_dot_product_flash_attention_for_cpu


class StepContext:
    """What attention needs to know of the running step; travels through the forward as a keyword."""

    __slots__ = ("_rotations", "packed", "pool")

    def __init__(self, packed: Packed, pool: KVPool) -> None:
        self.packed = packed
        self.pool = pool
        self._rotations: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def rotation(
        self, position_embeddings: tuple[torch.Tensor, torch.Tensor], head_dim: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and signed sine, `[rows, 1, head_dim]`, such that the rotary embedding of x is
        `x * cosine + roll(x, head_dim / 2) * sine`. Made once per step and kind of layer."""
        cos, sin = position_embeddings
        made = self._rotations.get(id(cos))
        if made is None:
            if cos.shape[-1] != head_dim or cos.shape[0] != 1:
                raise Internal(f"rotary embedding of shape {tuple(cos.shape)} for heads of {head_dim}")
            signed = sin[0].clone()
            signed[:, : head_dim // 2].neg_()
            made = self._rotations[id(cos)] = (cos[0].unsqueeze(1), signed.unsqueeze(1))
        return made

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        """Write `key` and `value` (`[rows, kv_heads, head_dim]`) into `layer` and attend with `query`
        (`[rows, heads, head_dim]`). Returns `[rows, heads, head_dim]`, contiguous."""
        packed = self.packed
        at = 2 * layer
        if packed.targets is not None:
            packed.targets[at].copy_(key)
            packed.targets[at + 1].copy_(value)
        else:
            self.pool.layer_k[layer].index_copy_(0, packed.slots, key)
            self.pool.layer_v[layer].index_copy_(0, packed.slots, value)
        if packed.decodes is not None:
            queries = torch.split(query.unsqueeze(2), 1)
            parts = packed.decodes[window]
            outputs = [
                _flash(q, part[at], part[at + 1], scale=scale)[0]
                for q, part in zip(queries, parts, strict=True)
            ]
            together = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
            return together.squeeze(2)
        outputs = [
            self._segment(segment, segment.views[window], layer, query, key, value, scale)
            for segment in packed.segments
        ]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _segment(
        self,
        segment: Segment,
        view: View,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        row, end = segment.row, segment.row + segment.rows
        if view.blocks:
            return self._windowed(view, layer, query, scale)
        q = query[row:end].transpose(0, 1).unsqueeze(0)
        partial: list[tuple[torch.Tensor, torch.Tensor]] = [
            _flash(q, k, v, scale=scale) for k, v in self._stored(view, layer)
        ]
        if view.causal:
            k = key[row:end].transpose(0, 1).unsqueeze(0)
            v = value[row:end].transpose(0, 1).unsqueeze(0)
            partial.append(_flash(q, k, v, 0.0, True, scale=scale))
        output = partial[0][0] if len(partial) == 1 else merge(partial)
        return output[0].transpose(0, 1)

    def _stored(self, view: View, layer: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """K and V of the view's tokens in the pool, `[1, kv_heads, tokens, head_dim]` each."""
        if view.pages is None:
            return [(part[2 * layer], part[2 * layer + 1]) for part in view.parts]
        gathered = self.pool.layer_pages[layer].index_select(1, view.pages)
        _, _, _, heads, head_dim = self.pool.kv.shape
        tokens = gathered.view(2, -1, heads, head_dim)[:, view.skip : view.skip + view.high - view.low]
        both = tokens.transpose(1, 2).unsqueeze(1)
        return [(both[0], both[1])]

    def _windowed(self, view: View, layer: int, query: torch.Tensor, scale: float) -> torch.Tensor:
        ((keys, values),) = self._stored(view, layer)
        outputs = []
        for block in view.blocks:
            seen = slice(block.low - view.low, block.high - view.low)
            q = query[block.row : block.row + block.rows].transpose(0, 1).unsqueeze(0)
            out = _flash(q, keys[:, :, seen], values[:, :, seen], attn_mask=block.mask, scale=scale)[0]
            outputs.append(out[0].transpose(0, 1))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def merge(partial: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """Attention over the union of disjoint key sets, from (output, log-sum-exp) over each of them."""
    output, lse = partial[0]
    dtype = output.dtype
    total = output.float()
    for other, other_lse in partial[1:]:
        weight = torch.sigmoid(other_lse - lse).unsqueeze(-1)
        total = torch.lerp(total, other.float(), weight)
        lse = torch.logaddexp(lse, other_lse)
    return total.to(dtype)


#: What transformers passes along that changes nothing here.
_HARMLESS = frozenset({"position_ids", "use_cache", "is_causal", "output_attentions", "output_hidden_states"})


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    segue_step: StepContext,
    **other: object,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface. An argument that would change the result and is not
    understood (attention sinks, soft caps, biases) is an error, never ignored."""
    unknown = {name for name, given in other.items() if given is not None} - _HARMLESS
    if unknown or attention_mask is not None or dropout:
        raise Internal(f"attention does not support {sorted(unknown) or 'a mask or dropout'}")
    layer = module.layer_idx
    if not isinstance(layer, int):
        raise Internal(f"{type(module).__name__} has no layer_idx")
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    output = segue_step.attend(layer, q, k, v, scaling, sliding_window)
    return output.unsqueeze(0), None
