"""The place of a token's KV in a rank's pool: pure arithmetic, shared by engine and planner."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Annotated, Literal, NamedTuple

import msgspec

from segue.kv.errors import LayoutMismatch
from segue.kv.ids import RankCoord
from segue.kv.layout.overlap import Box, box, first_clash

#: Planes, and regions, that one rank may describe.
MAX_PLANES = 8192
#: Bytes; more than any address space has.
_Size = Annotated[int, msgspec.Meta(ge=0, lt=2**56)]

#: Regions of one rank's memory begin at multiples of this, and so much at least lies between two of them.
REGION_GAP = 4096


def region_starts(sizes: Sequence[int]) -> tuple[int, ...]:
    """The start of each region of these sizes (bytes) in the flat space of offsets of a rank's memory.

    Regions of equal sizes are equally spaced, so that tensors of equal layers are rows of one block.
    """
    starts, at = [], 0
    for size in sizes:
        starts.append(at)
        at += -(-size // REGION_GAP) * REGION_GAP + REGION_GAP
    return tuple(starts)


#: Tensors of state begin at multiples of this many bytes, and so do slots.
STATE_ALIGN = 64


class StateTensor(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor of the state of a sequence in layers without KV, of a size that does not depend on its
    length: `shape` items of `item_bytes` bytes and of `dtype` in each of `layers` layers, layer after layer.
    `name` tells it from others: both sides need the same."""

    name: str
    layers: Annotated[int, msgspec.Meta(ge=1, lt=2**16)]
    shape: Annotated[tuple[Annotated[int, msgspec.Meta(ge=1, lt=2**32)], ...], msgspec.Meta(max_length=8)]
    dtype: str
    item_bytes: Annotated[int, msgspec.Meta(ge=1, le=16)]

    @property
    def nbytes(self) -> int:
        """Bytes of one sequence."""
        return self.layers * math.prod(self.shape) * self.item_bytes


class KVShape(msgspec.Struct, frozen=True, kw_only=True):
    """The KV of the whole model, whatever its parallel sizes: equal on both sides or no hand-off.

    `kind` "mha" stores K and V per KV head (MQA and GQA included); "mla" one latent of
    `k_dim` per token (then `kv_heads == 1` and `v_dim == 0`). Layers with other head
    counts or sizes than the rest are not described by this version and refused by the engine.

    `layers` counts those with KV. `k_dim` and `v_dim` count items of one head of one token, each of
    `item_bytes` bytes; `dtype` is their type as torch names it ("bfloat16"). Raises LayoutMismatch for sizes
    below 1. Layers that keep a state of fixed size instead (short convolution, linear attention) are
    described by `state`.
    """

    kind: Literal["mha", "mla"] = "mha"
    layers: int
    kv_heads: int
    k_dim: int
    v_dim: int
    dtype: str
    item_bytes: int
    state: Annotated[tuple[StateTensor, ...], msgspec.Meta(max_length=64)] = ()

    def __post_init__(self) -> None:
        sizes = (self.layers, self.kv_heads, self.k_dim, self.item_bytes)
        if min(sizes) < 1 or self.v_dim < 0 or (self.kind == "mla") != (self.v_dim == 0):
            raise LayoutMismatch(f"not a KV shape: {self}")

    @property
    def token_bytes(self) -> int:
        """Bytes of one token over all layers and heads."""
        return self.layers * self.kv_heads * (self.k_dim + self.v_dim) * self.item_bytes

    @property
    def state_bytes(self) -> int:
        """Bytes of a slot, which holds the state of one sequence: its tensors one after the other, each at a
        multiple of `STATE_ALIGN`. 0 where there is none."""
        return sum(_aligned(tensor.nbytes) for tensor in self.state)

    @property
    def state_layers(self) -> int:
        """Layers that keep a state."""
        return max((tensor.layers for tensor in self.state), default=0)

    @property
    def state_offsets(self) -> tuple[int, ...]:
        """The start of each state tensor within a slot."""
        sizes = [_aligned(tensor.nbytes) for tensor in self.state]
        return tuple(sum(sizes[:index]) for index in range(len(sizes)))


def _aligned(nbytes: int) -> int:
    return -(-nbytes // STATE_ALIGN) * STATE_ALIGN


class PlaneSpec(msgspec.Struct, frozen=True):
    """The place of K (or V) of one layer: in bytes, but for `region`, an index into `PoolSpec.regions`.

    Head `h` of token `t` of page `p` begins at byte `offset` + p × `page_stride` + t × `token_stride` +
    h × `head_stride` of the region; its items lie one behind the other. NHD and HND differ in which of the
    last two strides is the larger one.
    """

    region: _Size
    offset: _Size
    page_stride: _Size
    token_stride: _Size
    head_stride: _Size


class Plane(NamedTuple):
    """K or V of one layer, or some heads of it, in the flat space of offsets of a rank's memory (`Memory`).

    In bytes: the first head at `offset`, from page to page `page_stride`, from token to token `token_stride`,
    from head to head `head_stride`; `heads` heads of `head_bytes` each.
    """

    offset: int
    page_stride: int
    token_stride: int
    head_stride: int
    heads: int
    head_bytes: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one token."""
        return self.heads * self.head_bytes

    def axes(self, pages: int, tokens: int) -> tuple[tuple[int, int], ...]:
        """How `tokens` tokens of each of some neighbouring pages repeat a head: (stride, count) each."""
        return (self.page_stride, pages), (self.token_stride, tokens), (self.head_stride, self.heads)

    def part(self, first_head: int, heads: int) -> Plane:
        """Only `heads` heads from `first_head` on."""
        return self._replace(offset=self.offset + first_head * self.head_stride, heads=heads)

    def at(self, slot: int, page_tokens: int) -> int:
        """The start of the first head of the token in `slot` (`page * page_tokens + token in page`)."""
        page, inside = divmod(slot, page_tokens)
        return self.offset + page * self.page_stride + inside * self.token_stride

    def linear(self, page_tokens: int) -> bool:
        """True where a token's distance to the next is the same across the end of a page."""
        return self.page_stride == page_tokens * self.token_stride

    def dense(self, page_tokens: int) -> bool:
        """True where all tokens of neighbouring pages lie without gaps, in order."""
        together = self.heads == 1 or self.head_stride == self.head_bytes
        return together and self.token_stride == self.row_bytes and self.linear(page_tokens)


class PoolSpec(msgspec.Struct, frozen=True, kw_only=True, cache_hash=True):
    """One rank's pool: its part of the model and how it lies in memory.

    The rank holds `layer_count` layers from `layer_start` and `head_count` KV heads from `head_start` of
    `shape`, in `pages` pages, numbered from 0, of `page_tokens` tokens. `coord` are its coordinates in the
    replica, `nbytes` the memory that it needs. Raises LayoutMismatch for a part that the model does not have.

    `planes` say where: K of the first layer, V of it, K of the second layer and so on (MLA: only the latent
    of each), in `regions` of so many bytes. A description that overlaps itself or leaves its region is
    refused: LayoutMismatch names the field.

    Without `planes` the pool is layer-major, in one region: for each layer of this rank, first all K pages,
    then all V pages; a page is `page_tokens` tokens, a token is `head_count` heads of `k_dim` (`v_dim`)
    items. So a run of neighbouring pages is one contiguous range per (layer, K or V), which attention
    reads without a gather and a transport moves in one block.

    For a model with a state `slots` of `shape.state_bytes` follow the pages, one beside the other.
    This version describes them behind a layer-major pool only.
    """

    shape: KVShape
    coord: RankCoord = RankCoord()
    page_tokens: int = 16
    pages: int
    layer_start: int = 0
    layer_count: int
    head_start: int = 0
    head_count: int
    regions: Annotated[tuple[_Size, ...], msgspec.Meta(max_length=MAX_PLANES)] = ()
    planes: Annotated[tuple[PlaneSpec, ...], msgspec.Meta(max_length=MAX_PLANES)] = ()
    slots: _Size = 0

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
        if bool(self.slots) != bool(self.shape.state):
            raise LayoutMismatch(
                f"slots: {self.slots} of them for a state of {len(self.shape.state)} tensors per sequence"
            )
        if self.planes or self.regions:
            if self.slots:
                raise LayoutMismatch("slots: they are described behind a pool without planes only")
            self._check_planes()

    @property
    def k_token_bytes(self) -> int:
        """Bytes of one token's K in one layer on this rank."""
        return self.head_count * self.shape.k_dim * self.shape.item_bytes

    @property
    def v_token_bytes(self) -> int:
        """Bytes of one token's V in one layer on this rank."""
        return self.head_count * self.shape.v_dim * self.shape.item_bytes

    @property
    def page_bytes(self) -> int:
        """Bytes of KV in one page over all layers of this rank."""
        return self.page_tokens * (self.k_token_bytes + self.v_token_bytes) * self.layer_count

    @property
    def nbytes(self) -> int:
        """Bytes of the rank's memory, from its first offset to behind its last."""
        if self.planes:
            return region_starts(self.regions)[-1] + self.regions[-1]
        if self.slots:
            return self.slots_at + self.slots * self.shape.state_bytes
        return self.pages * self.page_bytes

    @property
    def slots_at(self) -> int:
        """Offset of the first slot, behind the pages."""
        return _aligned(self.pages * self.page_bytes)

    def slot_offset(self, slot: int) -> int:
        """Offset of a slot in the rank's memory. Raises LayoutMismatch for one that it does not have."""
        if not 0 <= slot < self.slots:
            raise LayoutMismatch(f"slot {slot} is not one of the {self.slots} of the pool")
        return self.slots_at + slot * self.shape.state_bytes

    @property
    def kinds(self) -> int:
        """Planes of each layer: 2 for K and V, 1 for MLA."""
        return 2 if self.shape.v_dim else 1

    def plane(self, layer: int, value: bool) -> Plane:
        """K (or V, if `value`) of `layer` (counted from `layer_start`)."""
        return planes_of(self)[layer * self.kinds + value]

    def offset(self, layer: int, value: bool, token_slot: int) -> int:
        """Offset in the rank's memory of a token's K (or V, if `value`) in `layer` (from `layer_start`)."""
        return self.plane(layer, value).at(token_slot, self.page_tokens)

    def _check_planes(self) -> None:
        due = self.layer_count * self.kinds
        if len(self.planes) != due:
            raise LayoutMismatch(
                f"planes: {len(self.planes)} of them where {self.layer_count} layers need {due}"
            )
        boxes: dict[int, list[Box]] = {}
        for index, plane in enumerate(self.planes):
            if plane.region >= len(self.regions):
                raise LayoutMismatch(
                    f"planes[{index}].region is {plane.region} of {len(self.regions)} regions"
                )
            dim = self.shape.v_dim if self.kinds == 2 and index % 2 else self.shape.k_dim
            axes = {
                "page_stride": (plane.page_stride, self.pages),
                "token_stride": (plane.token_stride, self.page_tokens),
                "head_stride": (plane.head_stride, self.head_count),
            }
            found = box(index, plane.offset, dim * self.shape.item_bytes, axes.values())
            if not isinstance(found, Box):
                name = next(name for name, axis in axes.items() if axis == found)
                raise LayoutMismatch(
                    f"planes[{index}].{name} is {found[0]} bytes, so its parts overlap: {plane}"
                )
            if found.end > self.regions[plane.region]:
                raise LayoutMismatch(
                    f"planes[{index}].offset: {plane} ends at byte {found.end}, outside "
                    f"regions[{plane.region}] of {self.regions[plane.region]} bytes"
                )
            boxes.setdefault(plane.region, []).append(found)
        for region, inside in boxes.items():
            if clash := first_clash(inside):
                one, other = clash
                raise LayoutMismatch(
                    f"planes[{other}].offset: {self.planes[other]} overlaps planes[{one}], "
                    f"{self.planes[one]}, in regions[{region}]"
                )


@lru_cache(maxsize=256)
def planes_of(spec: PoolSpec) -> tuple[Plane, ...]:
    """Every plane of a pool, in the order of `PoolSpec.planes`."""
    shape, tokens, slots = spec.shape, spec.page_tokens, spec.pages * spec.page_tokens
    widths = [dim * shape.item_bytes for dim in (shape.k_dim, shape.v_dim)[: spec.kinds]]
    found: list[Plane] = []
    if not spec.planes:
        at = 0
        for index in range(spec.layer_count * len(widths)):
            width = widths[index % len(widths)]
            row = spec.head_count * width
            found.append(Plane(at, tokens * row, row, width, spec.head_count, width))
            at += slots * row
        return tuple(found)
    starts = region_starts(spec.regions)
    for index, plane in enumerate(spec.planes):
        page, token, width = plane.page_stride, plane.token_stride, widths[index % len(widths)]
        # A stride along which there is only one thing may be anything; these make what follows simple.
        if tokens == 1:
            token = page
        elif spec.pages == 1:
            page = tokens * token
        at = starts[plane.region] + plane.offset
        found.append(Plane(at, page, token, plane.head_stride, spec.head_count, width))
    return tuple(found)
