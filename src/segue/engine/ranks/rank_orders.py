"""Messages between the leader of a replica and its other ranks, over the `RankLink` of each."""

from __future__ import annotations

import msgspec

from segue.engine.engine_api import SequenceStep
from segue.kv import ErrorInfo


class ForwardOrder(msgspec.Struct, frozen=True, tag=True):
    """One forward over these sequences, which the leader has checked."""

    steps: list[SequenceStep]


class CopyOutOrder(msgspec.Struct, frozen=True, tag=True):
    """Copy these pages out of the pool and keep them as `copy`."""

    copy: int
    pages: list[int]


class CopyInOrder(msgspec.Struct, frozen=True, tag=True):
    """Copy what is kept as `copy` into these pages."""

    copy: int
    pages: list[int]


class TellOrder(msgspec.Struct, frozen=True, tag=True):
    """Words for whoever serves the rank; the engine does not read them."""

    words: bytes


class OrderFrame(msgspec.Struct, frozen=True, tag=True):
    """The order with this number, counted from 1; copies that nobody needs any more go before it."""

    number: int
    order: ForwardOrder | CopyOutOrder | CopyInOrder | TellOrder
    dropped: list[int]


class DoneWord(msgspec.Struct, frozen=True, tag=True):
    """The order has been carried out, or could not be with nothing lost (a copy, what was told); `digest` is
    over all frames so far."""

    number: int
    digest: bytes
    error: ErrorInfo | None = None


class FailedWord(msgspec.Struct, frozen=True, tag=True):
    """The order was not carried out, and the rank ends."""

    number: int
    error: ErrorInfo


#: The engine's messages over a link.
RankMessage = OrderFrame | DoneWord | FailedWord


def due(step: SequenceStep, layers: int | None) -> list[int]:
    """The moments of a step that have come when its first `layers` layers are stored (None: all)."""
    return [number for upto, number in step.ready if layers is None or upto <= layers]
