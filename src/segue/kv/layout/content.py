"""The content of a chunk as bytes in one canonical order, however its pages lie; and its checksum.

The order: layer; then K before V; then token; then KV head; and last the sequence's state. It is over the
part of the model that a pair of ranks shares (`Part`), so both ranks of a pair hash the same bytes whatever
their page sizes, placements and splits of layers and heads: a rank that holds more heads than the pair shares
contributes, of each token, only the shared ones.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from segue.kv.errors import Internal, LayoutMismatch
from segue.kv.ids import Span
from segue.kv.layout.overlap import Box, box
from segue.kv.layout.spec import Plane, PoolSpec, planes_of, region_starts

#: Bytes given to the hash in one call. Below xxhash's threshold for releasing the interpreter's lock
#: (100 kB): taking the lock back can cost a switch interval each time, 40 times the hash itself, while
#: a piece of this size holds it for some microseconds. Measured in docs/decisions.md.
PIECE_BYTES = 64 * 1024

#: Byte ranges, one (offset, end) in each row.
Ranges = npt.NDArray[np.uint64]


class Part(NamedTuple):
    """The part of the model of a rank, or that a pair of ranks shares: `layers` layers from `layer_start` and
    `heads` KV heads from `head_start`, numbered as in the whole model."""

    layer_start: int
    layers: int
    head_start: int
    heads: int

    def shared(self, other: Part) -> Part | None:
        """The intersection of both; None if it is empty."""
        layer, head = max(self.layer_start, other.layer_start), max(self.head_start, other.head_start)
        layers = min(self.layer_start + self.layers, other.layer_start + other.layers) - layer
        heads = min(self.head_start + self.heads, other.head_start + other.heads) - head
        return Part(layer, layers, head, heads) if layers > 0 and heads > 0 else None

    def of_layers(self, layers: Span) -> Part:
        """The part of this in `layers` of the model; it may have no layer."""
        start, end = max(self.layer_start, layers.start), min(self.layer_start + self.layers, layers.end)
        return self._replace(layer_start=start, layers=max(0, end - start))


def part_of(spec: PoolSpec) -> Part:
    """The part of the model's KV that a rank holds."""
    return Part(spec.layer_start, spec.layer_count, spec.head_start, spec.head_count)


class LayerSample(NamedTuple):
    """The layers of a part that a checksum covers: one in `every`, starting at `key % every`.

    `every` 1 covers all. `key` is `room + sequence of the chunk`, so that following chunks of one
    hand-off look at other layers. A part of fewer layers than `every` is covered by one of them.
    """

    every: int = 1
    key: int = 0


@dataclass(frozen=True, slots=True)
class Content:
    """The canonical bytes of a range of tokens in one pool: for each plane, each run of token slots.

    `runs` holds (first token slot, tokens), in token order; a run may go over neighbouring pages of
    `page_tokens` slots. `state` (offset, bytes) is that of the sequence and comes last; None where there is
    none.
    """

    planes: tuple[Plane, ...]
    runs: tuple[tuple[int, int], ...]
    page_tokens: int = 1
    state: tuple[int, int] | None = None

    @property
    def nbytes(self) -> int:
        rows = sum(p.row_bytes for p in self.planes) * sum(tokens for _, tokens in self.runs)
        return rows + (self.state[1] if self.state else 0)

    def ranges(self) -> Ranges:
        """The same bytes as ranges (offset, end), ordered by offset; those that touch are one."""
        forms: dict[tuple[int, ...], list[int]] = {}
        for offset, *form in self.planes:
            forms.setdefault(tuple(form), []).append(offset)
        parts = [
            self._ranges_of(Plane(0, *form), np.array(offsets, np.uint64)) for form, offsets in forms.items()
        ]
        if self.state:
            at, nbytes = self.state
            parts.append(np.array([[at], [at + nbytes]], np.uint64))
        starts, ends = np.concatenate([np.empty((2, 0), np.uint64), *parts], axis=1)
        if (starts[1:] < ends[:-1]).any():  # planes that are interleaved
            order = starts.argsort()
            starts, ends = starts[order], ends[order]
        first = np.flatnonzero(np.append(True, starts[1:] != ends[:-1])[: len(starts)])
        last = np.append(first[1:], len(starts))[: len(first)] - 1
        return np.stack([starts[first], ends[last]], axis=1)

    def _ranges_of(self, form: Plane, offsets: Ranges) -> Ranges:
        """Starts and ends in all planes of one form, which begin at `offsets`."""
        if form.dense(self.page_tokens):
            runs = np.array(self.runs, np.uint64).reshape(-1, 2) * np.uint64(form.row_bytes)
            starts = offsets[:, None] + runs[:, 0]
            return np.stack([starts.ravel(), (starts + runs[:, 1]).ravel()])
        shapes: dict[tuple[int, int], list[int]] = {}
        for slot, tokens in self.runs:
            for at, pages, each in page_pieces(slot, tokens, self.page_tokens):
                shapes.setdefault((pages, each), []).append(form.at(at, self.page_tokens))
        found = []
        for (pages, tokens), places in shapes.items():
            rows = box(0, 0, form.head_bytes, form.axes(pages, tokens))
            assert isinstance(rows, Box)
            starts = np.add.outer(offsets, np.array(places, np.uint64)).ravel()
            for stride, count in rows.axes:
                starts = np.add.outer(starts, np.arange(count, dtype=np.uint64) * np.uint64(stride)).ravel()
            found.append(np.stack([starts, starts + np.uint64(rows.unit)]))
        return np.concatenate([np.empty((2, 0), np.uint64), *found], axis=1)


def canonical_content(
    spec: PoolSpec,
    part: Part,
    span: Span,
    pages: Sequence[int],
    first_token: int,
    sample: LayerSample,
    side: str,
    slot: int | None = None,
) -> Content:
    """The content of `span` in a pool: `pages` hold the prompt from `first_token` on. With a `slot` the state
    in it, all of it whatever the `sample`.

    `side` names the pool in errors. Raises LayoutMismatch for pages that do not hold `span`, and for
    a part or a slot that the pool does not have.
    """
    inside = (
        part.layers >= 1
        and part.heads >= 1
        and spec.layer_start <= part.layer_start
        and part.layer_start + part.layers <= spec.layer_start + spec.layer_count
        and spec.head_start <= part.head_start
        and part.head_start + part.heads <= spec.head_start + spec.head_count
        and sample.every >= 1
    )
    if not inside:
        raise LayoutMismatch(f"no {part} or {sample} in the {side} pool {spec}")
    state = None if slot is None else (spec.slot_offset(slot), spec.shape.state_bytes)
    if len(span) == 0:
        return Content((), (), state=state)
    runs: list[tuple[int, int]] = []
    for token, slot, tokens in page_runs(pages, spec, first_token, span, side):
        start, stop = max(token, span.start), min(token + tokens, span.end)
        runs.append((slot + start - token, stop - start))
    every = min(sample.every, part.layers)
    return Content(_planes(spec, part, every, sample.key % every), tuple(runs), spec.page_tokens, state)


def whole_pages(spec: PoolSpec, pages: Sequence[int], slot: int | None = None) -> Content:
    """All bytes of `pages`, and of a `slot`, in a pool: what somebody who may write into them may touch."""
    part = part_of(spec)
    span = Span(0, len(pages) * spec.page_tokens)
    return canonical_content(spec, part, span, sorted(pages), 0, LayerSample(), "granted", slot)


@lru_cache(maxsize=256)
def _planes(spec: PoolSpec, part: Part, every: int, first: int) -> tuple[Plane, ...]:
    """The planes of one in `every` layers of `part` from its layer `first` on. Kept, since every chunk of
    a pair asks for the same ones while its request waits."""
    planes, skipped = planes_of(spec), part.layer_start - spec.layer_start
    return tuple(
        planes[(skipped + index) * spec.kinds + value].part(part.head_start - spec.head_start, part.heads)
        for index in range(first, part.layers, every)
        for value in range(spec.kinds)
    )


def page_pieces(slot: int, tokens: int, page_tokens: int) -> Iterator[tuple[int, int, int]]:
    """A run of token slots as pieces (first slot, pages, tokens of each page): whole pages are one piece, the
    parts of pages at its ends are others."""
    inside = slot % page_tokens
    if inside:
        head = min(tokens, page_tokens - inside)
        yield slot, 1, head
        slot, tokens = slot + head, tokens - head
    if pages := tokens // page_tokens:
        yield slot, pages, page_tokens
    if rest := tokens % page_tokens:
        yield slot + tokens - rest, 1, rest


def page_runs(
    pages: Sequence[int], spec: PoolSpec, first_token: int, span: Span, side: str
) -> list[tuple[int, int, int]]:
    """Runs of neighbouring pages around `span`, each as (first token, first token slot, tokens)."""
    size = spec.page_tokens
    if first_token % size or span.start < first_token:
        raise LayoutMismatch(
            f"the {side} pages begin at token {first_token}, which must be a multiple of {size} "
            f"and not after the chunk's first token {span.start}"
        )
    first = (span.start - first_token) // size
    last = -(-(span.end - first_token) // size)
    used = pages[first:last]
    if len(used) < last - first:
        raise LayoutMismatch(
            f"{len(pages)} {side} pages of {size} tokens do not hold tokens {first_token} to {span.end}"
        )
    if min(used) < 0 or max(used) >= spec.pages:
        raise LayoutMismatch(f"a {side} page id is outside its pool of {spec.pages} pages: {list(used)}")
    runs: list[tuple[int, int, int]] = []
    count = len(used)
    i = 0
    while i < count:
        page = used[i]
        j = i + 1
        while j < count and used[j] - page == j - i:
            j += 1
        runs.append((first_token + (first + i) * size, page * size, (j - i) * size))
        i = j
    return runs


def checksum(regions: Sequence[memoryview], content: Content) -> int:
    """XXH3-64 over `content` in the bytes of all `regions` of a rank's memory.

    Bytes in order are hashed in place; other layouts are put into order in pieces of at most PIECE_BYTES.
    Raises Internal where a range lies outside its region: a shorter hash must not look like a checksum.
    """
    found = xxhash.xxh3_64()
    update, size = found.update, content.page_tokens
    starts = region_starts([len(region) for region in regions])
    memory, base, limit = regions[0], 0, len(regions[0])
    form: tuple[int, ...] = ()
    row_bytes = 0  # for planes of this form, if their tokens lie without gaps
    for plane in content.planes:
        if len(regions) > 1:
            index = max(bisect_right(starts, plane.offset) - 1, 0)
            memory, base, limit = regions[index], starts[index], len(regions[index])
        if plane[1:] != form:
            form, row_bytes = plane[1:], plane.row_bytes if plane.dense(size) else 0
        offset = plane.offset - base
        for slot, tokens in content.runs:
            if not row_bytes:
                for piece in _in_order(memory, plane._replace(offset=offset), slot, tokens, size):
                    update(piece)
                continue
            start = offset + slot * row_bytes
            end = start + tokens * row_bytes
            if start < 0 or end > limit:
                raise _outside(start, limit)
            if end - start <= PIECE_BYTES:
                update(memory[start:end])
            else:
                for at in range(start, end, PIECE_BYTES):
                    update(memory[at : min(at + PIECE_BYTES, end)])
    if content.state is not None:  # behind a pool of one region
        start, nbytes = content.state
        if start < 0 or start + nbytes > len(regions[0]):
            raise _outside(start, len(regions[0]))
        for at in range(start, start + nbytes, PIECE_BYTES):
            update(regions[0][at : min(at + PIECE_BYTES, start + nbytes)])
    return found.intdigest()


def _in_order(
    memory: memoryview, plane: Plane, slot: int, tokens: int, page_tokens: int
) -> Iterator[memoryview]:
    """Copies of a run of tokens in canonical order, piece by piece."""
    strides = (plane.page_stride, plane.token_stride, plane.head_stride, 1)
    for at, pages, each in page_pieces(slot, tokens, page_tokens):
        shape = (pages, each, plane.heads, plane.head_bytes)
        start = plane.at(at, page_tokens)
        last = sum(stride * (count - 1) for stride, count in zip(strides, shape, strict=True))
        if start < 0 or start + last >= len(memory):
            raise _outside(start, len(memory))
        rows = np.ndarray(shape, np.uint8, memory, start, strides)
        many = max(1, PIECE_BYTES // (each * plane.row_bytes))
        few = max(1, PIECE_BYTES // plane.row_bytes)
        for page in range(0, pages, many):
            for token in range(0, each, few):
                # Not `tobytes` of the strided view: numpy before 2.4 copies that item by item.
                yield np.ascontiguousarray(rows[page : page + many, token : token + few]).reshape(-1).data


def _outside(start: int, limit: int) -> Internal:
    return Internal(f"content at byte {start} lies outside a region of {limit} bytes")
