"""The KV in the pool that the rows of one step attend to.

A sequence of one row (decode) needs the list of its pages alone. One of several rows reads the KV before them
in place where it lies in a few runs of pages, else gathered into one copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from segue.engine.engine_api import SequenceStep
from segue.engine.kvpool import KVPool
from segue.engine.packing import Segment
from segue.engine.pages import runs

#: More runs than this are gathered into one copy; fewer are attended one by one. Each run costs a kernel call
#: and a merge, a gather costs a pass over the KV. Both take the same at 2 and 3 runs (within 1 %); from 4 on
#: the gather takes 6 % less, at 12 runs 24 % (`bench/layout.py`: a chunk of 128 tokens after 1,024).
MAX_RUNS = 3
#: Rows of queries that share one mask under a sliding window: bounds the mask's memory.
WINDOW_ROWS = 512


@dataclass(frozen=True, slots=True)
class WindowBlock:
    """Some query rows of a segment (`[row, row + rows)` of the step) under a sliding window.

    They see context tokens `[low, high)` through `mask` (`[rows, high - low]`, added to the scores).
    """

    row: int
    rows: int
    low: int
    high: int
    mask: torch.Tensor


@dataclass(frozen=True, slots=True)
class View:
    """The KV of one segment that the layers of one window attend to.

    The KV read from the pool are tokens `[low, high)`: either as `parts`, one per run of
    neighbouring pages, each a tuple over layers of K, V, K, V, … (`[1, kv_heads, tokens, head_dim]`,
    views without a copy), or gathered by `pages`, of which the first token is `low - skip`.
    With `causal` the rows' own K and V follow, read from the step itself under the causal rule;
    `blocks` replace all that where a window cuts into the rows.
    """

    low: int
    high: int
    parts: tuple[tuple[torch.Tensor, ...], ...] = ()
    pages: torch.Tensor | None = None
    skip: int = 0
    causal: bool = False
    blocks: tuple[WindowBlock, ...] = ()


@dataclass(frozen=True, slots=True)
class Singles:
    """The sequences of one row each, as the kernel wants them (int32): their rows of the step, the
    ends of their contexts in tokens, all their pages, and where in `pages` each one's begin."""

    at: np.ndarray[tuple[int], np.dtype[np.int32]]
    ends: np.ndarray[tuple[int], np.dtype[np.int32]]
    pages: np.ndarray[tuple[int], np.dtype[np.int32]]
    first_page: np.ndarray[tuple[int], np.dtype[np.int32]]


def singles_of(segments: Sequence[Segment], page_tokens: int) -> Singles | None:
    """The segments of one row; None without such."""
    segments = [segment for segment in segments if segment.rows == 1]
    if not segments:
        return None
    pages: list[int] = []
    first_page: list[int] = []
    for segment in segments:
        first_page.append(len(pages))
        pages.extend(segment.step.pages[: segment.start // page_tokens + 1])
    return Singles(
        at=np.array([segment.row for segment in segments], dtype=np.int32),
        ends=np.array([segment.start + 1 for segment in segments], dtype=np.int32),
        pages=np.array(pages, dtype=np.int32),
        first_page=np.array(first_page, dtype=np.int32),
    )


def view_of(segment: Segment, pool: KVPool, window: int | None) -> View:
    """The view of a segment of several rows for layers with this sliding window in tokens (None: full
    attention)."""
    step, start = segment.step, segment.start
    end = start + segment.rows
    if window is not None and end > window:
        blocks = _window_blocks(segment.row, segment.rows, start, window, pool.kv.dtype)
        return _located(step, pool, blocks[0].low, end, blocks=blocks)
    low = max(0, end - window) if window is not None else 0
    return _located(step, pool, low, start, causal=True)


def _located(
    step: SequenceStep,
    pool: KVPool,
    low: int,
    high: int,
    causal: bool = False,
    blocks: tuple[WindowBlock, ...] = (),
) -> View:
    """The view of tokens `[low, high)`, as runs where they are few, else by pages.
    `blocks` need one range that can be sliced, so they take one run only."""
    page_tokens = pool.spec.page_tokens
    parts: list[tuple[torch.Tensor, ...]] = []
    at = 0
    pieces: list[tuple[int, int]] = []
    for first, count in runs(step.pages[: -(-high // page_tokens)]):
        a, b = max(low, at), min(high, at + count * page_tokens)
        if a < b:
            slot = first * page_tokens + a - at
            pieces.append((slot, b - a))
        at += count * page_tokens
    if len(pieces) > (1 if blocks else MAX_RUNS):
        first_page = low // page_tokens
        index = torch.tensor(step.pages[first_page : -(-high // page_tokens)], dtype=torch.int64)
        return View(low, high, pages=index, skip=low - first_page * page_tokens, causal=causal, blocks=blocks)
    for slot, count in pieces:
        parts.append(pool.run(slot, count))
    return View(low, high, parts=tuple(parts), causal=causal, blocks=blocks)


def _window_blocks(
    row: int, rows: int, start: int, window: int, dtype: torch.dtype
) -> tuple[WindowBlock, ...]:
    blocks = []
    for first in range(0, rows, WINDOW_ROWS):
        count = min(WINDOW_ROWS, rows - first)
        low = max(0, start + first - window + 1)
        high = start + first + count
        query = torch.arange(start + first, high).unsqueeze(1)
        key = torch.arange(low, high).unsqueeze(0)
        hidden = (key > query) | (key <= query - window)
        mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))
        blocks.append(WindowBlock(row + first, count, low, high, mask))
    return tuple(blocks)
