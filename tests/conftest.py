"""What the tests of several rooms share: `tls_files` importable from each, and a log that is put back."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def log_as_before() -> Iterator[None]:
    """A test that runs a command in this process configures its log: the next test must not write to it."""
    root, ours = logging.getLogger(), logging.getLogger("segue")
    level, handlers, our_level = root.level, root.handlers[:], ours.level
    yield
    root.setLevel(level)
    ours.setLevel(our_level)
    kept = [handler for handler in root.handlers if handler in handlers]
    root.handlers[:] = kept + [handler for handler in handlers if handler not in kept]
