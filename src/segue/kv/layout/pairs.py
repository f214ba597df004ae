"""How the KV that two ranks share lies on either side, and the blocks that move a stretch of it.

A stretch of tokens in neighbouring pages has up to five axes on each side: layers, K and V, pages, tokens and
heads. Axes that follow one another without a gap on both sides are one axis. A stretch that is contiguous on
both sides is the row of a block. The two longest other axes are its rows and its groups; each step along
further axes is another block.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import NamedTuple

from segue.kv.ids import Span
from segue.kv.layout.blocks import CopyBlock
from segue.kv.layout.content import Part, page_pieces
from segue.kv.layout.spec import Plane, PoolSpec, planes_of

#: Blocks of stretches that are kept for each group of planes.
MAX_KEPT = 2**16


class Axis(NamedTuple):
    """`length` equal things, so many bytes apart at the source and at the destination."""

    length: int
    src: int
    dst: int


class Form(NamedTuple):
    """Equal blocks at `places` (source, destination); `shape` is the other fields of a `CopyBlock`."""

    places: list[tuple[int, int]]
    shape: tuple[int, ...]


@dataclass(slots=True)
class PlaneGroup:
    """Planes of one form, equally spaced on both sides: `src` and `dst` are the first of them."""

    src: Plane
    dst: Plane
    axes: tuple[Axis, ...]
    _forms: dict[tuple[int, int], Form] = field(default_factory=dict)

    def form(self, pages: int, tokens: int) -> Form:
        """The blocks of so many tokens of so many neighbouring pages, the first of both sides at 0."""
        known = self._forms.get((pages, tokens))
        if known is None:
            both = zip(self.src.axes(pages, tokens), self.dst.axes(pages, tokens), strict=True)
            axes = [*self.axes, *(Axis(count, src, dst) for (src, count), (dst, _) in both)]
            unit, kept = _joined(axes, self.src.head_bytes)
            known = _split(kept, unit)
            if len(self._forms) * len(known.places) >= MAX_KEPT:
                self._forms.clear()
            self._forms[pages, tokens] = known
        return known


class PairLayout:
    """The planes that a source and a target rank share."""

    def __init__(self, src: PoolSpec, dst: PoolSpec, part: Part) -> None:
        self.part = part
        self._src_tokens, self._dst_tokens = src.page_tokens, dst.page_tokens
        shape = src.shape
        self.token_bytes = part.layers * part.heads * (shape.k_dim + shape.v_dim) * shape.item_bytes
        ours, theirs = _shared_planes(src, part), _shared_planes(dst, part)
        planes = list(zip(ours, theirs, strict=True))
        self._src_linear = all(plane.linear(src.page_tokens) for plane in ours)
        self._dst_linear = all(plane.linear(dst.page_tokens) for plane in theirs)
        self._groups = list(_groups(planes, src.kinds))

    def blocks(
        self, span: Span, src_runs: Sequence[tuple[int, int, int]], dst_runs: Sequence[tuple[int, int, int]]
    ) -> list[CopyBlock]:
        """The blocks of `span`, which both runs of neighbouring pages hold (see `page_runs`)."""
        stretches = _both(span, src_runs, dst_runs)
        if not (self._src_linear and self._dst_linear):
            stretches = (inner for s, d, _, n in stretches for inner in self._stretches(s, d, n))
        out: list[CopyBlock] = []
        append, known = out.append, (0, 0)
        forms: list[tuple[tuple[int, ...], tuple[int, ...], Form]] = []
        for src_slot, dst_slot, pages, tokens in stretches:
            if (pages, tokens) != known:
                known = pages, tokens
                forms = [(group.src[:3], group.dst[:3], group.form(pages, tokens)) for group in self._groups]
            src_page, src_token = divmod(src_slot, self._src_tokens)
            dst_page, dst_token = divmod(dst_slot, self._dst_tokens)
            for (src, src_page_stride, src_stride), (dst, dst_page_stride, dst_stride), form in forms:
                src += src_page * src_page_stride + src_token * src_stride
                dst += dst_page * dst_page_stride + dst_token * dst_stride
                places, shape = form
                for a, b in places:
                    append(CopyBlock(src + a, dst + b, *shape))
        return out

    def _stretches(self, src_slot: int, dst_slot: int, tokens: int) -> Iterator[tuple[int, int, int, int]]:
        """The same tokens as boxes: (source slot, destination slot, pages, tokens of each page)."""
        src_size, dst_size = self._src_tokens, self._dst_tokens
        if src_size == dst_size and (src_slot - dst_slot) % src_size == 0:
            for at, pages, each in page_pieces(src_slot, tokens, src_size):
                yield at, at - src_slot + dst_slot, pages, each
            return
        while tokens:
            each = tokens if self._src_linear else min(tokens, src_size - src_slot % src_size)
            each = each if self._dst_linear else min(each, dst_size - dst_slot % dst_size)
            yield src_slot, dst_slot, 1, each
            src_slot, dst_slot, tokens = src_slot + each, dst_slot + each, tokens - each


def _both(
    span: Span, src_runs: Sequence[tuple[int, int, int]], dst_runs: Sequence[tuple[int, int, int]]
) -> Iterator[tuple[int, int, int, int]]:
    """The runs of both sides, cut where either ends: (source slot, destination slot, 1, tokens), as if all
    tokens of each were those of one page."""
    sources, targets = iter(src_runs), iter(dst_runs)
    src = dst = src_end = dst_end = 0
    token, end = span.start, span.end
    while token < end:
        if token >= src_end:
            first, slot, tokens = next(sources)
            src, src_end = slot - first, first + tokens
        if token >= dst_end:
            first, slot, tokens = next(targets)
            dst, dst_end = slot - first, first + tokens
        stop = min(src_end, dst_end, end)
        yield src + token, dst + token, 1, stop - token
        token = stop


def _shared_planes(spec: PoolSpec, part: Part) -> list[Plane]:
    first = (part.layer_start - spec.layer_start) * spec.kinds
    planes = planes_of(spec)[first : first + part.layers * spec.kinds]
    return [plane.part(part.head_start - spec.head_start, part.heads) for plane in planes]


def _groups(planes: Sequence[tuple[Plane, Plane]], kinds: int) -> Iterator[PlaneGroup]:
    """The planes in as few groups as their order allows: K with V where all layers have them alike."""
    layers = [planes[at : at + kinds] for at in range(0, len(planes), kinds)]
    if all(_same_forms(layer) for layer in layers):
        yield from _equally_spaced(layers)
    else:
        for kind in zip(*layers, strict=True):
            yield from _equally_spaced([[plane] for plane in kind])


def _same_forms(layer: Sequence[tuple[Plane, Plane]]) -> bool:
    """Whether K and V of a layer differ in nothing but their place, V behind K on both sides."""
    (a, b), *others = layer
    return all(
        _alike(a, c) and _alike(b, d) and c.offset > a.offset and d.offset > b.offset for c, d in others
    )


def _alike(one: Plane, other: Plane) -> bool:
    return one[1:] == other[1:]  # all but their offsets


def _equally_spaced(layers: Sequence[Sequence[tuple[Plane, Plane]]]) -> Iterator[PlaneGroup]:
    """Runs of layers that lie at one distance from each other, in which everything else is equal."""
    at = 0
    while at < len(layers):
        first = layers[at]
        steps = _steps(first, layers[at + 1]) if at + 1 < len(layers) else None
        count = 1
        while steps is not None and at + count < len(layers):
            if _steps(layers[at + count - 1], layers[at + count]) != steps:
                break
            count += 1
        (src, dst), *values = first
        axes = [Axis(count, *steps)] if steps is not None and count > 1 else []
        axes += [Axis(2, v_src.offset - src.offset, v_dst.offset - dst.offset) for v_src, v_dst in values]
        yield PlaneGroup(src, dst, tuple(axes))
        at += count


def _steps(
    one: Sequence[tuple[Plane, Plane]], other: Sequence[tuple[Plane, Plane]]
) -> tuple[int, int] | None:
    """How far `other` lies behind `one`, at the source and at the destination; None unless all of it does."""
    steps: set[tuple[int, int]] = set()
    for (a, b), (c, d) in zip(one, other, strict=True):
        if not (_alike(a, c) and _alike(b, d)):
            return None
        steps.add((c.offset - a.offset, d.offset - b.offset))
    found = steps.pop()
    return found if not steps and min(found) > 0 else None


def _joined(axes: Iterable[Axis], unit: int) -> tuple[int, list[Axis]]:
    """The bytes that are contiguous on both sides, and as few axes around them as possible."""
    kept: list[Axis] = []
    for axis in sorted((axis for axis in axes if axis.length > 1), key=lambda a: (a.dst, a.src)):
        count, src, dst = axis
        if src == dst == unit and not kept:
            unit *= count
        elif kept and (src, dst) == (kept[-1].src * kept[-1].length, kept[-1].dst * kept[-1].length):
            kept[-1] = kept[-1]._replace(length=kept[-1].length * count)
        else:
            kept.append(axis)
    return unit, kept


def _split(axes: Sequence[Axis], unit: int) -> Form:
    """The two axes that make the fewest blocks, for their rows and groups, and where each step along the
    others leads. `axes` are ordered by their distance at the destination."""
    once = Axis(1, 0, 0)
    choices = [(once, once), *((axis, once) for axis in axes)]
    choices += [pair for pair in combinations(axes, 2) if _nested(*pair, unit)]
    rows, groups = max(choices, key=lambda choice: choice[0].length * choice[1].length)
    places = [(0, 0)]
    for axis in axes:
        if axis is not rows and axis is not groups:
            places = [
                (src + i * axis.src, dst + i * axis.dst) for src, dst in places for i in range(axis.length)
            ]
    return Form(places, (rows.length, unit, *rows[1:], *(groups if groups.length > 1 else ())))


def _nested(inner: Axis, outer: Axis, unit: int) -> bool:
    """Whether all of `inner` lies within one step of `outer` at the destination."""
    return (inner.length - 1) * inner.dst + unit <= outer.dst
