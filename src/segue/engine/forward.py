"""The forward that a replica's engine calls: of all its ranks, and of its own rank."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from segue.engine.engine_api import HostPages
from segue.engine.kvpool import HostKV, KVPool
from segue.engine.packing import Packed

if TYPE_CHECKING:
    from segue.engine.models.model_loading import LoadedModel
    from segue.engine.ranks.collectives import Place
    from segue.engine.ranks.experts import SharedExperts


class Stored(Protocol):
    """Told once when KV and state of all layers of a step are in the pool; and before that, with their
    number, when the KV of the first so many layers is."""

    def __call__(self, layers: int | None = None) -> None: ...


class Forward(Protocol):
    """The forward of a whole replica, as the engine that samples asks for it."""

    @property
    def pool(self) -> KVPool:
        """The pool of the rank of this process."""
        ...

    def run(self, packed: Packed, stored: Stored) -> torch.Tensor:
        """The final hidden state of each row of a step, `[rows, hidden]`, after the model's last norm.
        `stored` is told of the pool of this process's rank; the others signal their own."""
        ...

    def along(self) -> None:
        """Our part of a step in which other DP ranks alone have rows."""
        ...

    def copy_out(self, pages: Sequence[int], slot: int | None = None) -> HostPages:
        """See `Engine.copy_out`."""
        ...

    def copy_in(self, host: HostPages, pages: Sequence[int], slot: int | None = None) -> None:
        """See `Engine.copy_in`."""
        ...


class OutputHead(Protocol):
    """Makes logits of final hidden states."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[rows, vocab]` in float32, of `hidden` `[rows, hidden]`."""
        ...


class RankForward(Forward, Protocol):
    """The forward of the rank at `place` of the model with this `fingerprint`. `loaded` is the part of the
    model that the rank computes; `experts` are the layers whose experts are spread over DP ranks. Its
    `stored` is told of the pool of this rank alone, and what `run` returns is valid on rank 0 only."""

    fingerprint: str
    loaded: LoadedModel
    place: Place
    experts: Sequence[SharedExperts]

    @property
    def head(self) -> OutputHead | None:
        """None on the ranks that do not sample."""
        ...

    def copy_out(self, pages: Sequence[int], slot: int | None = None) -> HostKV:
        """See `Engine.copy_out`."""
        ...


@contextlib.contextmanager
def raised_at_end(stored: Stored) -> Iterator[Stored]:
    """`stored` for a forward that other ranks compute with: they must not wait for who has stopped at an
    error of a listener, so that is raised when the forward has ended."""
    raised: list[Exception] = []

    def safely(layers: int | None = None) -> None:
        try:
            stored(layers)
        except Exception as exc:  # raised below
            raised.append(exc)

    yield safely
    if raised:
        raise raised[0]
