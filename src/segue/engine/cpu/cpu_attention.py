"""Attention of one step over the paged pool.

K and V of the step's rows are written into the pool first. Sequences of one row (decode) are attended
together, by a compiled loop that follows their pages. The others are attended one by one, by torch's
flash kernel for CPUs over strided views of the pool: no copy for a sequence that lies in a few runs of
pages. Several parts are merged by their log-sum-exp (Dao et al., FlashAttention, 2022, section 3.1).
"""

from __future__ import annotations

import torch

from segue.engine.cpu.cpu_context import OtherRows
from segue.engine.cpu.cpu_kernels import Kernels
from segue.engine.cpu.cpu_state import StepState
from segue.engine.cpu.cpu_views import View, singles_of, view_of
from segue.engine.forward import Stored
from segue.engine.kvpool import KVPool
from segue.engine.packing import Packed, Segment

_flash = torch._scaled_dot_product_flash_attention_for_cpu


class StepContext:
    """The state of the running step that the layers need; passed through the forward as a keyword."""

    __slots__ = (
        "_attended",
        "_left",
        "_on_stored",
        "_only_singles",
        "_others",
        "_singles",
        "_singles_at",
        "_views",
        "kernels",
        "normed",
        "packed",
        "pool",
        "rows",
        "slots_at",
        "state",
    )

    def __init__(
        self,
        packed: Packed,
        pool: KVPool,
        kernels: Kernels,
        hidden_size: int,
        heads: int,
        on_stored: Stored,
        others: OtherRows | None = None,
    ) -> None:
        self.packed = packed
        self.pool = pool
        self.kernels = kernels
        self.rows = packed.rows
        self.slots_at = packed.slots.data_ptr()
        #: Room for the norm of all rows, `[rows, hidden_size]`, which the next product consumes.
        self.normed = pool.kv.new_empty(self.rows, hidden_size)
        self._attended = pool.kv.new_empty(self.rows, heads * pool.spec.shape.k_dim)
        #: called once KV and state of all layers are in the pool, of which so many are missing, and before
        #: that with each layer's KV
        self._on_stored = on_stored
        self._left = pool.spec.layer_count + pool.spec.shape.state_layers
        #: the recurrent states of the step's sequences
        self.state = StepState(packed, pool)
        self._others = others
        self._views: dict[int | None, list[tuple[Segment, View]]] = {}
        self._singles_at: tuple[int, ...] | None = None
        self._singles = singles = singles_of(packed.segments, pool.spec.page_tokens)
        self._only_singles = singles is not None and len(singles.at) == self.rows
        if singles is not None:
            arrays = (singles.at, singles.ends, singles.pages, singles.first_page)
            addresses = (array.ctypes.data for array in arrays)
            self._singles_at = (*addresses, len(singles.at), pool.spec.page_tokens)

    def layer_stored(self, layers: int | None = None) -> None:
        """Another layer has what it keeps of the step in the pool; of KV so many `layers` have it now."""
        self._left -= 1
        if self._left == 0:
            self._on_stored()
        elif layers is not None and layers < self.pool.spec.layer_count:  # a state may be the last to come
            self._on_stored(layers)

    def attend(self, layer: int, qkv: torch.Tensor, scale: float, window: int | None) -> torch.Tensor:
        """Attention of all rows of `qkv` (`[rows, (heads + 2 kv_heads) * head_dim]`, contiguous, rotated),
        of which K and V are in `layer` of the pool already. Returns `[rows, heads * head_dim]`, which
        the next layer's attention overwrites."""
        if self._others is not None:
            self._others.fetch(layer, qkv)
        self.layer_stored(layer + 1)
        out = self._attended
        if self._singles_at is not None:
            k_at, v_at = self.pool.layer_at[layer]
            self.kernels.attend(
                qkv.data_ptr(), out.data_ptr(), k_at, v_at, *self._singles_at, window or 0, scale
            )
        if not self._only_singles:
            head_dim, kv_heads = self.pool.spec.shape.k_dim, self.pool.spec.head_count
            together = qkv.view(self.rows, -1, head_dim)
            heads = together.shape[1] - 2 * kv_heads
            query, key, value = torch.split(together, [heads, kv_heads, kv_heads], 1)
            by_head = out.view(self.rows, heads, head_dim)
            for segment, view in self._views_through(window):
                result = self._segment(segment, view, layer, query, key, value, scale)
                by_head[segment.row : segment.row + segment.rows] = result
        return out

    def _views_through(self, window: int | None) -> list[tuple[Segment, View]]:
        """The sequences of several rows, and what the layers with this window see of each."""
        found = self._views.get(window)
        if found is None:
            several = [segment for segment in self.packed.segments if segment.rows > 1]
            found = self._views[window] = [
                (segment, view_of(segment, self.pool, window)) for segment in several
            ]
        return found

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
        planes = gathered.view(len(gathered), -1, heads, head_dim)
        tokens = planes[:, view.skip : view.skip + view.high - view.low]
        both = tokens.transpose(1, 2).unsqueeze(1)
        return [(both[0], both[-1])]

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
