"""An engine's own tensors as a pool: what `PoolSpec` and `Memory` say of them is read off the tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from segue.kv.errors import ConfigError
from segue.kv.ids import RankCoord
from segue.kv.layout.spec import KVShape, PlaneSpec, PoolSpec
from segue.kv.transport.memory.pool_memory import Memory, Region


class TorchTensor(Protocol):
    """The used methods of a torch tensor."""

    shape: Sequence[int]
    device: Any

    def data_ptr(self) -> int: ...
    def stride(self) -> Sequence[int]: ...
    def element_size(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PointerView:
    """K or V of one layer that an engine knows by its `address` on a `device` alone: what `pool_of` would
    read off a tensor.

    `shape` and `strides` (in bytes) are `[page, token, head, item]`, `item_bytes` the size of an item.
    `owner` is kept alive. Where a token is no row of its own (K that is transposed within a block), a page is
    the unit: one token, and all its bytes are items.
    """

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    item_bytes: int
    device: str = "cpu"
    owner: object = field(default=None, repr=False, compare=False)


_FIRST = RankCoord()
_AXES = ("pages", "tokens", "heads", "items")


def _check_axes(name: str, view: PointerView) -> None:
    if len(view.shape) != len(_AXES) or min(view.shape) < 1:
        raise ConfigError(f"{name}.shape is {view.shape} where [page, token, head, item] are needed")


def _check(
    name: str, view: PointerView, wanted: tuple[int, ...], item_bytes: int, first: PointerView
) -> None:
    """Raises ConfigError with the field that is wrong."""
    _check_axes(name, view)
    for axis, (found, due) in enumerate(zip(view.shape, wanted, strict=True)):
        if found != due:
            raise ConfigError(f"{name}.shape[{axis}] ({_AXES[axis]}) is {found} where {due} are needed")
    if view.item_bytes != item_bytes:
        raise ConfigError(
            f"{name} has items of {view.item_bytes} bytes where shape.item_bytes is {item_bytes}"
        )
    for axis, stride in enumerate(view.strides):
        if stride < 0 or (axis == 3 and stride != item_bytes and view.shape[3] > 1):
            raise ConfigError(
                f"{name}.strides[{axis}] ({_AXES[axis]}) is {stride} bytes: items must follow one another, "
                "and nothing lies backwards"
            )
    if view.device != first.device:
        raise ConfigError(f"{name}.device is {view.device}, and layers[0][0] lies on {first.device}")


def _end(view: PointerView) -> int:
    """The address behind its last byte."""
    last = sum(stride * (count - 1) for stride, count in zip(view.strides, view.shape, strict=True))
    return view.address + last + view.item_bytes


def _view(tensor: npt.NDArray[Any] | TorchTensor | PointerView) -> PointerView:
    if isinstance(tensor, PointerView):
        return tensor
    if isinstance(tensor, np.ndarray):
        address, device, item, strides = tensor.ctypes.data, "cpu", tensor.itemsize, tensor.strides
    else:
        address, device, item = tensor.data_ptr(), str(tensor.device), tensor.element_size()
        strides = tuple(stride * item for stride in tensor.stride())
    shape = tuple(tensor.shape)
    return PointerView(
        address=address, shape=shape, strides=strides, item_bytes=item, device=device, owner=tensor
    )


def pool_of(
    shape: KVShape,
    layers: Sequence[Sequence[npt.NDArray[Any] | TorchTensor | PointerView]],
    *,
    memory: Memory | None = None,
    coord: RankCoord = _FIRST,
    layer_start: int = 0,
    head_start: int = 0,
) -> tuple[PoolSpec, Memory]:
    """The pool that lies in an engine's own tensors, and their memory; nothing is copied.

    `shape` is the KV of the whole model. This rank's part begins at layer `layer_start` and KV head
    `head_start`; `coord` are its coordinates in the replica.

    `layers` holds K and V of each layer of this rank (MLA: the latent alone) as views `[page, token,
    head, item]` of any strides, of numpy or torch: `t[0]`, `t[1]` of `[2, pages, tokens, heads, items]`; or
    as `PointerView`, where there is no tensor.
    Without `memory` the tensors are regions of host or device memory as they are; with it they must lie in
    its regions (of `allocate`, for `shm`). Raises ConfigError, with the field, for tensors that do not fit
    together, and LayoutMismatch for ones that overlap.
    """
    views = [[_view(tensor) for tensor in layer] for layer in layers]
    dims = (shape.k_dim, shape.v_dim)[: 2 if shape.v_dim else 1]
    if not views or not views[0]:
        raise ConfigError("layers: there is none, or none with a tensor")
    first = views[0][0]
    _check_axes("layers[0][0]", first)
    pages, tokens, heads = first.shape[:3]
    for index, layer in enumerate(views):
        if len(layer) != len(dims):
            raise ConfigError(f"layers[{index}] has {len(layer)} tensors where {len(dims)} are needed")
        for kind, (view, dim) in enumerate(zip(layer, dims, strict=True)):
            _check(f"layers[{index}][{kind}]", view, (pages, tokens, heads, dim), shape.item_bytes, first)
    if memory is None:
        memory = Memory(_regions([view for layer in views for view in layer]))
    spec = PoolSpec(
        shape=shape,
        coord=coord,
        page_tokens=tokens,
        pages=pages,
        layer_start=layer_start,
        layer_count=len(layers),
        head_start=head_start,
        head_count=heads,
        regions=tuple(region.nbytes for region in memory.regions),
        planes=tuple(
            _plane(view, memory.regions, f"layers[{index}][{kind}]")
            for index, layer in enumerate(views)
            for kind, view in enumerate(layer)
        ),
    )
    return spec, memory


def _regions(views: Sequence[PointerView]) -> list[Region]:
    """The memory of all views: a region each, or one for those that are interleaved. In the order of the
    layers, so that equal ones are equally spaced."""
    found: list[tuple[int, Region]] = []
    for index in sorted(range(len(views)), key=lambda i: views[i].address):
        view = views[index]
        region = Region(view.address, _end(view) - view.address, view.device, owner=view.owner)
        if found and region.address < found[-1][1].address + found[-1][1].nbytes:
            first, other = found.pop()
            end = max(_end(view), other.address + other.nbytes)
            owners = (other.owner, view.owner)
            region = Region(other.address, end - other.address, view.device, owner=owners)
            index = min(index, first)
        found.append((index, region))
    return [region for _, region in sorted(found, key=lambda pair: pair[0])]


def _plane(view: PointerView, regions: Sequence[Region], name: str = "a tensor") -> PlaneSpec:
    for index, region in enumerate(regions):
        offset = view.address - region.address
        if offset >= 0 and _end(view) <= region.address + region.nbytes and view.device == region.device:
            return PlaneSpec(index, offset, *view.strides[:3])
    raise ConfigError(f"{name} at {view.address:#x} on {view.device} lies in none of the memory's regions")
