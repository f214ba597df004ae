"""The content of a chunk as bytes in one canonical order, however its pages lie; and its checksum.

The order: layer; then K before V; then token; then KV head. It is over the part of the model that a pair
of ranks shares (`Part`), so both ranks of a pair hash the same bytes whatever their page sizes,
placements and splits of layers and heads: a rank that holds more heads than the pair shares
contributes, of each token, only the shared ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import xxhash

from segue.core.errors import Internal, LayoutMismatch
from segue.core.types import Span
from segue.layout.spec import PoolSpec

#: Bytes given to the hash in one call. Below xxhash's threshold for releasing the interpreter's lock
#: (100 kB): taking the lock back can cost a switch interval each time, 40 times the hash itself, while
#: a piece of this size holds it for some microseconds. Measured in docs/decisions.md.
PIECE_BYTES = 64 * 1024


class Part(NamedTuple):
    """The layers and KV heads that both ranks of a pair hold, numbered as in the whole model."""

    layer_start: int
    layers: int
    head_start: int
    heads: int


class Sample(NamedTuple):
    """Which layers of a part a checksum covers: one in `every`, beginning at `key % every`.

    `every` 1 covers all. `key` is `room + sequence of the chunk`, so that following chunks of one
    hand-off look at other layers. A part of fewer layers than `every` is covered by one of them.
    """

    every: int = 1
    key: int = 0


class Plane(NamedTuple):
    """K or V of one layer: token slot `s` has `row_bytes` of content at `offset + s * token_bytes`."""

    offset: int
    token_bytes: int
    row_bytes: int


class Rows(NamedTuple):
    """`rows` byte ranges of `row_bytes`, `stride` apart, the first one at `offset`."""

    offset: int
    rows: int
    row_bytes: int
    stride: int


@dataclass(frozen=True, slots=True)
class Content:
    """The canonical bytes of a range of tokens in one pool: for each plane, each run of token slots.

    `runs` holds (first token slot, tokens), in token order.
    """

    planes: tuple[Plane, ...]
    runs: tuple[tuple[int, int], ...]

    @property
    def nbytes(self) -> int:
        return sum(p.row_bytes for p in self.planes) * sum(tokens for _, tokens in self.runs)

    def rows(self) -> Iterator[Rows]:
        """Every range in canonical order; where a plane's tokens lie without gaps, a run is one row."""
        for offset, token_bytes, row_bytes in self.planes:
            for slot, tokens in self.runs:
                at = offset + slot * token_bytes
                if row_bytes == token_bytes:
                    yield Rows(at, 1, tokens * token_bytes, 0)
                else:
                    yield Rows(at, tokens, row_bytes, token_bytes)


def canonical_content(
    spec: PoolSpec,
    part: Part,
    span: Span,
    pages: Sequence[int],
    first_token: int,
    sample: Sample,
    side: str,
) -> Content:
    """The content of `span` in a pool: `pages` hold the prompt from `first_token` on.

    `side` names the pool in errors. Raises LayoutMismatch for pages that do not hold `span`, and for
    a part that the pool does not have.
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
    if len(span) == 0:
        return Content((), ())
    runs: list[tuple[int, int]] = []
    for token, slot, tokens in page_runs(pages, spec, first_token, span, side):
        start, stop = max(token, span.start), min(token + tokens, span.end)
        runs.append((slot + start - token, stop - start))
    every = min(sample.every, part.layers)
    return Content(_planes(spec, part, every, sample.key % every), tuple(runs))


def whole_pages(spec: PoolSpec, pages: Sequence[int]) -> Content:
    """All bytes of `pages` in a pool: what somebody who may write into them may touch."""
    part = Part(spec.layer_start, spec.layer_count, spec.head_start, spec.head_count)
    span = Span(0, len(pages) * spec.page_tokens)
    return canonical_content(spec, part, span, sorted(pages), 0, Sample(), "granted")


@lru_cache(maxsize=256)
def _planes(spec: PoolSpec, part: Part, every: int, first: int) -> tuple[Plane, ...]:
    """The planes of one in `every` layers of `part` from its layer `first` on. Kept, since every chunk of
    a pair asks for the same ones while its request waits."""
    shape = spec.shape
    planes: list[Plane] = []
    for index in range(first, part.layers, every):
        layer = part.layer_start + index - spec.layer_start
        for value, dim, token_bytes in (
            (False, shape.k_dim, spec.k_token_bytes),
            (True, shape.v_dim, spec.v_token_bytes),
        ):
            if dim:
                head_bytes = dim * shape.item_bytes
                skip = (part.head_start - spec.head_start) * head_bytes
                planes.append(
                    Plane(spec.offset(layer, value, 0) + skip, token_bytes, part.heads * head_bytes)
                )
    return tuple(planes)


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


def checksum(memory: memoryview, content: Content) -> int:
    """XXH3-64 over `content` in `memory` (bytes), without copying it.

    Raises Internal where a range lies outside `memory`: a shorter hash must not look like a checksum.
    """
    found = xxhash.xxh3_64()
    update, limit = found.update, len(memory)
    for offset, token_bytes, row_bytes in content.planes:
        gaps = row_bytes != token_bytes
        for slot, tokens in content.runs:
            start = offset + slot * token_bytes
            end = start + (tokens - 1) * token_bytes + row_bytes
            if start < 0 or end > limit:
                raise Internal(f"content at byte {start} lies outside a memory of {limit} bytes")
            if gaps:
                for at in range(start, end, token_bytes):
                    update(memory[at : at + row_bytes])
            elif end - start <= PIECE_BYTES:
                update(memory[start:end])
            else:
                for at in range(start, end, PIECE_BYTES):
                    update(memory[at : min(at + PIECE_BYTES, end)])
    return found.intdigest()
