"""Objects that the garbage collector need not scan: import heavy modules with the collector off, then freeze
them."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def frozen_imports() -> Iterator[None]:
    """Run the imports with the collector off, then freeze all objects, modules above all, until the process
    ends.

    torch and transformers are half a million objects. While they are imported the collector goes through
    all of them again and again, a fifth of an instance's start; and while it serves, a full collection
    stops every stream for 0.2 to 0.3 s. Garbage that is made inside is kept as well, so nothing
    large belongs there: weights are loaded after it.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
