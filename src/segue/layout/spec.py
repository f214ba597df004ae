"""Where the KV of a token lies in a rank's pool: pure arithmetic, shared by engine and planner."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from segue.core.errors import LayoutMismatch
from segue.core.types import RankCoord

#: Regions of one rank's memory begin at multiples of this, and so much at least lies between two of them.
REGION_GAP = 4096


def region_starts(sizes: Sequence[int]) -> tuple[int, ...]:
    """Where each region of these sizes (bytes) begins in the flat space of offsets of a rank's memory.

    Regions of equal sizes are equally spaced, so that tensors of equal layers are rows of one block.
    """
    starts, at = [], 0
    for size in sizes:
        starts.append(at)
        at += -(-size // REGION_GAP) * REGION_GAP + REGION_GAP
    return tuple(starts)


class KVShape(msgspec.Struct, frozen=True, kw_only=True):
    """The KV of the whole model, whatever its parallel sizes: equal on both sides or no hand-off.

    `kind` "mha" stores K and V per KV head (MQA and GQA included); "mla" one latent of
    `k_dim` per token (then `kv_heads == 1` and `v_dim == 0`). Layers with other head
    counts or sizes than the rest are not described by this version and refused by the engine.
    """

    kind: Literal["mha", "mla"] = "mha"
    layers: int
    kv_heads: int
    k_dim: int
    v_dim: int
    dtype: str
    item_bytes: int

    def __post_init__(self) -> None:
        sizes = (self.layers, self.kv_heads, self.k_dim, self.item_bytes)
        if min(sizes) < 1 or self.v_dim < 0 or (self.kind == "mla") != (self.v_dim == 0):
            raise LayoutMismatch(f"not a KV shape: {self}")

    @property
    def token_bytes(self) -> int:
        """Bytes of one token over all layers and heads."""
        return self.layers * self.kv_heads * (self.k_dim + self.v_dim) * self.item_bytes


class PoolSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's pool: its part of the model and how it lies in memory.

    Layer-major: for each layer of this rank, first all K pages, then all V pages; a page is
    `page_tokens` tokens, a token is `head_count` heads of `k_dim` (`v_dim`) items. So a run of
    neighbouring pages is one contiguous range per (layer, K or V), which attention reads
    without a gather and a transport moves in one block.
    """

    shape: KVShape
    coord: RankCoord = RankCoord()
    page_tokens: int = 16
    pages: int
    layer_start: int = 0
    layer_count: int
    head_start: int = 0
    head_count: int

    def __post_init__(self) -> None:
        inside = (
            self.page_tokens >= 1
            and self.pages >= 1
            and self.layer_start >= 0
            and self.head_start >= 0
            and self.layer_count >= 1
            and self.head_count >= 1
            and self.layer_start + self.layer_count <= self.shape.layers
            and self.head_start + self.head_count <= self.shape.kv_heads
        )
        if not inside:
            raise LayoutMismatch(f"not a part of the model's KV: {self}")

    @property
    def k_token_bytes(self) -> int:
        """Bytes of one token's K in one layer on this rank."""
        return self.head_count * self.shape.k_dim * self.shape.item_bytes

    @property
    def v_token_bytes(self) -> int:
        """Bytes of one token's V in one layer on this rank."""
        return self.head_count * self.shape.v_dim * self.shape.item_bytes

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer: K of all pages, then V of all pages."""
        return self.pages * self.page_tokens * (self.k_token_bytes + self.v_token_bytes)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers of this rank."""
        return self.page_tokens * (self.k_token_bytes + self.v_token_bytes) * self.layer_count

    @property
    def nbytes(self) -> int:
        return self.layer_count * self.layer_bytes

    def offset(self, layer: int, value: bool, token_slot: int) -> int:
        """Byte offset of a token's K (or V, if `value`) in `layer` (counted from `layer_start`).

        `token_slot` is `page * page_tokens + token in page`.
        """
        base = layer * self.layer_bytes
        if value:
            base += self.pages * self.page_tokens * self.k_token_bytes
            return base + token_slot * self.v_token_bytes
        return base + token_slot * self.k_token_bytes
