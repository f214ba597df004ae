"""The face of what answers requests: one stream of outputs per request, and a way to end it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from segue.engine.request import Output, Request, Wait
from segue.kv import ErrorInfo, SegueError


class Generation(Protocol):
    """The outputs of one request."""

    async def deliver(self, take: Callable[[Output], Wait | None]) -> None:
        """Call `take` with each output, in order, until one has `finish`: at the moment it arrives, unless
        what `take` has returned last is still awaited. An exception of `take` ends it.

        A failure is raised as the SegueError it is, exactly once, at the latest after the budget of `submit`.
        """
        ...


class Generator(Protocol):
    """Runs generations. Used on one event loop."""

    def submit(self, request: Request, *, budget_s: float) -> Generation:
        """Run `request`. Raises OutOfCapacity, Draining and DpRankOutOfRange before anything was started.

        It has `budget_s` seconds. A caller that does not read it to its end calls `complete` or `cancel`.
        """
        ...

    def complete(self, request_id: str) -> None:
        """The caller has all that it wants, as after a stop string: end the request on all workers now, as a
        success. Unknown and ended ids are ignored."""
        ...

    def cancel(self, request_id: str, reason: ErrorInfo) -> None:
        """End the request on all workers now. Unknown and ended ids are ignored."""
        ...


class Backend(Generator, Protocol):
    """A `Generator` that knows who is there."""

    def start(self) -> None:
        """Begin to look for workers."""
        ...

    def drain(self) -> None:
        """Take no new requests from now on."""
        ...

    async def close(self) -> None:
        """End everything; what still runs fails with Draining."""
        ...

    @property
    def context_tokens(self) -> int | None:
        """The longest sequence everybody who serves now can take; None while nobody does."""
        ...

    @property
    def can_serve(self) -> bool:
        """Somebody is there to whom a request could be given."""
        ...

    @property
    def proven(self) -> bool:
        """A generation has succeeded on workers that are still there."""
        ...

    def lacking(self) -> SegueError:
        """The error for clients while `can_serve` is false: it lists present and missing instances."""
        ...

    def sizes(self) -> dict[str, int]:
        """Resources that requests hold here, by table; all zero at rest."""
        ...

    async def changed(self) -> None:
        """Returns when `can_serve` or `proven` may have changed."""
        ...
