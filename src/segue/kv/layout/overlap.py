"""Whether strided boxes of bytes share a byte: exact for boxes whose strides are nested, with work in
proportion to the number of boxes, whatever their sizes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Box(NamedTuple):
    """`unit` bytes at `offset`, repeated along each of `axes` (stride, count), the largest stride first."""

    name: int
    offset: int
    unit: int
    axes: tuple[tuple[int, int], ...]

    @property
    def end(self) -> int:
        """Behind its last byte."""
        return self.offset + self.unit + sum(stride * (count - 1) for stride, count in self.axes)


def box(name: int, offset: int, unit: int, axes: Iterable[tuple[int, int]]) -> Box | tuple[int, int]:
    """The box with as few axes as possible; or one of `axes`, along which it overlaps itself (or is
    interleaved with another axis, which is taken for that)."""
    kept: list[tuple[int, int]] = []
    extent = unit
    for stride, count in sorted(axes):
        if count == 1:
            continue
        if stride < extent:
            return stride, count
        extent += stride * (count - 1)
        if stride == unit and not kept:
            unit *= count
        elif kept and stride == kept[-1][0] * kept[-1][1]:
            kept[-1] = (kept[-1][0], kept[-1][1] * count)
        else:
            kept.append((stride, count))
    return Box(name, offset, unit, tuple(reversed(kept)))


def first_clash(boxes: Sequence[Box]) -> tuple[int, int] | None:
    """The names of two boxes that share a byte, or that are interleaved with unequal strides."""
    ordered = sorted(boxes, key=lambda b: b.offset)
    near: list[Box] = []
    end = 0
    for each in ordered:
        if near and each.offset >= end:
            if clash := _clash_of_near(near):
                return clash
            near = []
        near.append(each)
        end = max(end, each.end) if len(near) > 1 else each.end
    return _clash_of_near(near)


def _clash_of_near(near: list[Box]) -> tuple[int, int] | None:
    """A clash among boxes whose extents touch: compare one period of their common largest stride."""
    names = sorted({b.name for b in near})
    if len(names) < 2:
        return None
    strides = {b.axes[0][0] if b.axes else 0 for b in near}
    if len(strides) > 1 or 0 in strides:
        return names[0], names[1]
    [stride] = strides
    base = near[0].offset
    inner: list[Box] = []
    for b in near:
        at = (b.offset - base) % stride
        cut = Box(b.name, at, b.unit, b.axes[1:])
        inner.append(cut)
        if cut.end > stride:  # it reaches into the next period, as its predecessor does into this one
            inner.append(cut._replace(offset=at - stride))
    return first_clash(inner)
