"""Packs the sequences of one step into one row of tokens, after checking each of them.

A sequence whose pages or positions are wrong gets an error of its own and is left out: attention
never reads a page that its sequence was not given, and no two sequences share a page that one of
them writes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from segue.engine.engine_api import SequenceStep


@dataclass(frozen=True, slots=True)
class StepLimits:
    """Limits for a step's sequences."""

    vocab_size: int
    context_tokens: int
    pages: int
    page_tokens: int
    slots: int = 0


@dataclass(frozen=True, slots=True)
class Segment:
    """One sequence's rows `[row, row + rows)` of the step, at positions `start …` of the sequence."""

    step: SequenceStep
    row: int
    rows: int
    start: int


@dataclass(frozen=True, slots=True)
class Packed:
    """A step ready to run. `slots` says where in the pool each row's K and V go. Only the rows `wanted` of
    the last layer's output are used; None: all."""

    tokens: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    segments: list[Segment]
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


def pack(steps: Sequence[SequenceStep], errors: dict[int, str], page_tokens: int) -> Packed:
    """Pack the sequences without an error."""
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    segments: list[Segment] = []
    for index, step in enumerate(steps):
        if index in errors:
            continue
        end = step.start + len(step.tokens)
        segments.append(Segment(step, len(tokens), len(step.tokens), step.start))
        tokens.extend(step.tokens)
        positions.extend(range(step.start, end))
        slots.extend(
            step.pages[at // page_tokens] * page_tokens + at % page_tokens for at in range(step.start, end)
        )
    return Packed(
        tokens=torch.tensor([tokens], dtype=torch.int64),
        positions=torch.tensor([positions], dtype=torch.int64),
        slots=torch.tensor(slots, dtype=torch.int64),
        segments=segments,
    )
