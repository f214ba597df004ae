"""Log lines that say what an instance does while it starts, and how far it is."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

log = logging.getLogger("segue.engine")

#: Time between two lines about one step.
EVERY_S = 2.0
T = TypeVar("T")


@contextlib.contextmanager
def step(name: str, facts: str = "", *, clock: Callable[[], float] = time.monotonic) -> Iterator[None]:
    """Log that the step `name` begins, with `facts` about it, and when it is done how long it took."""
    began = clock()
    log.info("event=%s_begins%s", name, f" {facts}" if facts else "")
    yield
    log.info("event=%s_done seconds=%.1f", name, clock() - began)


def counted(
    name: str, items: Iterable[T], of: int, *, clock: Callable[[], float] = time.monotonic
) -> Iterator[T]:
    """`items`, of which a line says each `EVERY_S` how many are done."""
    said = clock()
    for done, item in enumerate(items):
        if clock() - said >= EVERY_S:
            said = clock()
            log.info("event=%s done=%d of=%d", name, done, of)
        yield item
