"""Fixtures of all end-to-end tests: the check at the end of each, and a model that loads quickly."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny_model
from leftovers import MARK, mapped, strangers
from served import Served, rest


@pytest.fixture(scope="module", autouse=True)
def _nobody_outlives_its_module() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(MARK, str(os.getpid()))
        yield
        assert strangers() == [], "left behind by the module"


@pytest.fixture(autouse=True)
def _everything_is_at_rest_after_each_test(_nobody_outlives_its_module: None) -> Iterator[None]:
    """Every node that still runs holds nothing (see `holdings.faults`); of all others no process is left.

    No segment or socket has a name in a file system: without the processes that hold one it is gone.
    """
    before = mapped()
    yield
    if Served.live:
        rest(Served.live)
    assert strangers() == [], "left behind by the test"
    assert mapped() <= before, "the process of the tests maps shared memory that it did not map before"


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with a tokenizer; see `tiny_model`."""
    return tiny_model.save(tmp_path_factory.mktemp("tiny"))
