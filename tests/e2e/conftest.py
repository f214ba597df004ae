"""What all end-to-end tests share: the check at the end of each, and a model that is quick to load."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny_model
from served import Served, rest


@pytest.fixture(autouse=True)
def _everything_is_at_rest_after_each_test() -> Iterator[None]:
    """Zero rooms, zero quarantined pages, no session with the dead, on every node that still runs."""
    segments = _segments()
    yield
    if Served.live:
        rest(Served.live)
    else:
        assert _segments() <= segments, "a shared memory segment was left behind"


def _segments() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if "segue" in name}


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with a tokenizer; see `tiny_model`."""
    return tiny_model.save(tmp_path_factory.mktemp("tiny"))
