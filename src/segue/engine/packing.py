"""Packs the sequences of one step into one row of tokens, after checking each of them.

A sequence whose pages or positions are wrong gets an error of its own and is left out: attention
never reads a page that its sequence was not given, and no two sequences share a page that one of
them writes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch

from segue.engine.engine_api import SequenceStep
from segue.engine.kvpool import KVPool

#: More runs than this are gathered into one copy; fewer are attended one by one. Each run costs a kernel call
#: and a merge, a gather costs a pass over the KV. Both take the same at 2 and 3 runs (within 1 %); from 4 on
#: the gather takes 6 % less, at 12 runs 24 % (`bench/layout.py`: a chunk of 128 tokens after 1,024).
MAX_RUNS = 3
#: Rows of queries that share one mask under a sliding window: bounds the mask's memory.
WINDOW_ROWS = 512


@dataclass(frozen=True, slots=True)
class StepLimits:
    """What a step's sequences are checked against."""

    vocab_size: int
    context_tokens: int
    pages: int
    page_tokens: int
    slots: int = 0


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
    """What the layers of one window see of one segment.

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
class Segment:
    """One sequence's rows `[row, row + rows)` of the step, at positions `start …` of the sequence.

    `views` is empty for a single row, which is attended with all others of its kind (`Singles`).
    """

    step: SequenceStep
    row: int
    rows: int
    start: int
    views: dict[int | None, View]


@dataclass(frozen=True, slots=True)
class Singles:
    """The sequences of one row each, as the kernel wants them (int32): their rows of the step, the
    ends of their contexts in tokens, all their pages, and where in `pages` each one's begin."""

    at: np.ndarray[tuple[int], np.dtype[np.int32]]
    ends: np.ndarray[tuple[int], np.dtype[np.int32]]
    pages: np.ndarray[tuple[int], np.dtype[np.int32]]
    first_page: np.ndarray[tuple[int], np.dtype[np.int32]]


@dataclass(frozen=True, slots=True)
class Packed:
    """A step ready to run. `slots` says where in the pool each row's K and V go. Of what the last layer gives
    only the rows `wanted` are looked at; None: all."""

    tokens: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    segments: list[Segment]
    singles: Singles | None
    errors: dict[int, str] = field(default_factory=dict)
    wanted: torch.Tensor | None = None

    @property
    def rows(self) -> int:
        return self.tokens.shape[1]


def check(steps: Sequence[SequenceStep], known: Mapping[int, object], limits: StepLimits) -> dict[int, str]:
    """The error of each sequence that cannot be run, by its index in `steps`."""
    errors: dict[int, str] = {}
    seen: set[int] = set()
    twice: set[int] = set()
    for step in steps:
        (twice if step.seq_id in seen else seen).add(step.seq_id)
    for index, step in enumerate(steps):
        text = f"sequence {step.seq_id} twice in a step" if step.seq_id in twice else _fault(step, limits)
        if text is None and step.seq_id not in known:
            text = f"sequence {step.seq_id} is not open"
        if text is not None:
            errors[index] = text
    _check_shared_pages(steps, errors, limits.page_tokens)
    _check_shared_slots(steps, errors)
    return errors


def _fault(step: SequenceStep, limits: StepLimits) -> str | None:
    end = step.start + len(step.tokens)
    if not step.tokens or step.start < 0:
        return f"a step needs tokens at positions from 0, not {len(step.tokens)} at {step.start}"
    if end > limits.context_tokens:
        return f"{end} tokens exceed the model's context of {limits.context_tokens}"
    if not 0 <= min(step.tokens) <= max(step.tokens) < limits.vocab_size:
        return f"a token id lies outside the vocabulary of {limits.vocab_size}"
    needed = -(-end // limits.page_tokens)
    if len(step.pages) < needed:
        return f"{end} tokens need {needed} pages of {limits.page_tokens}, {len(step.pages)} were given"
    if not 0 <= min(step.pages) <= max(step.pages) < limits.pages:
        return f"a page id lies outside the pool of {limits.pages}"
    if len(set(step.pages)) != len(step.pages):
        return "a page was given twice to one sequence"
    if (step.slot is None) != (limits.slots == 0) or (step.slot or 0) not in range(max(1, limits.slots)):
        return f"slot {step.slot} in a pool of {limits.slots} slots"
    return None


def _check_shared_pages(steps: Sequence[SequenceStep], errors: dict[int, str], page_tokens: int) -> None:
    """A page that one sequence writes must not be used by another: both would be in doubt."""
    if len(steps) == 1:
        return
    writer: dict[int, int] = {}
    clashes: list[tuple[int, int, int]] = []
    for index, step in enumerate(steps):
        if index in errors:
            continue
        last = (step.start + len(step.tokens) - 1) // page_tokens
        for page in step.pages[step.start // page_tokens : last + 1]:
            other = writer.setdefault(page, index)
            if other != index:
                clashes.append((page, index, other))
    for index, step in enumerate(steps):
        if index in errors:
            continue
        used = writer.keys() & set(step.pages)
        clashes.extend((page, index, writer[page]) for page in used if writer[page] != index)
    for page, one, other in clashes:
        text = f"page {page} is written by one sequence of the step and used by another"
        errors[one] = errors[other] = text


def _check_shared_slots(steps: Sequence[SequenceStep], errors: dict[int, str]) -> None:
    """Every sequence writes its slot, so nobody else may use it."""
    owner: dict[int, int] = {}
    for index, step in enumerate(steps):
        if index in errors or step.slot is None:
            continue
        other = owner.setdefault(step.slot, index)
        if other != index:
            errors[index] = errors[other] = f"slot {step.slot} is used by two sequences of the step"


def pack(
    steps: Sequence[SequenceStep], errors: dict[int, str], pool: KVPool, windows: Sequence[int | None]
) -> Packed:
    """Pack the sequences without an error. `windows` are the model's distinct sliding windows
    in tokens (None is full attention)."""
    page_tokens = pool.spec.page_tokens
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    segments: list[Segment] = []
    for index, step in enumerate(steps):
        if index in errors:
            continue
        end = step.start + len(step.tokens)
        runs = _runs(step.pages[: -(-end // page_tokens)])
        rows = len(step.tokens)
        if rows == 1:
            views = {}
        else:
            views = {window: _view(step, len(tokens), runs, pool, window) for window in windows}
        segments.append(Segment(step, len(tokens), rows, step.start, views))
        tokens.extend(step.tokens)
        positions.extend(range(step.start, end))
        if len(runs) == 1:
            first = runs[0][0] * page_tokens
            slots.extend(range(first + step.start, first + end))
        else:
            slots.extend(
                step.pages[at // page_tokens] * page_tokens + at % page_tokens
                for at in range(step.start, end)
            )
    return Packed(
        tokens=torch.tensor([tokens], dtype=torch.int64),
        positions=torch.tensor([positions], dtype=torch.int64),
        slots=torch.tensor(slots, dtype=torch.int64),
        segments=segments,
        singles=_singles([segment for segment in segments if segment.rows == 1], page_tokens),
        errors={steps[index].seq_id: text for index, text in errors.items()},
    )


def _singles(segments: list[Segment], page_tokens: int) -> Singles | None:
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


def _runs(pages: Sequence[int]) -> list[tuple[int, int]]:
    """Runs of neighbouring pages as (first page, number of pages)."""
    first, count = pages[0], len(pages)
    if pages[-1] - first == count - 1 and list(pages) == list(range(first, first + count)):
        return [(first, count)]
    breaks = [i + 1 for i, (a, b) in enumerate(pairwise(pages)) if b != a + 1]
    return [(pages[a], b - a) for a, b in pairwise([0, *breaks, count])]


def _view(
    step: SequenceStep, row: int, runs: list[tuple[int, int]], pool: KVPool, window: int | None
) -> View:
    rows, start = len(step.tokens), step.start
    end = start + rows
    if rows > 1 and window is not None and end > window:
        blocks = _window_blocks(row, rows, start, window, pool.kv.dtype)
        return _located(step, runs, pool, blocks[0].low, end, blocks=blocks)
    low = max(0, end - window) if window is not None else 0
    return _located(step, runs, pool, low, start, causal=True)


def _located(
    step: SequenceStep,
    runs: list[tuple[int, int]],
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
    for first, count in runs:
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
