"""Permanent objects are neither collected nor scanned."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from segue.server.instance.gc import frozen_imports


class Node:
    """Something that holds itself."""

    def __init__(self) -> None:
        self.me = self


@pytest.fixture(autouse=True)
def _nothing_is_kept_for_good() -> Iterator[None]:
    """But what `tests/conftest.py` keeps, which is out of the collector's sight again."""
    yield
    gc.unfreeze()
    gc.collect()
    gc.freeze()


@pytest.mark.slow
def test_what_is_made_inside_is_out_of_the_collectors_sight_and_the_rest_is_not() -> None:
    with frozen_imports():
        assert not gc.isenabled()
        inside = Node()
    assert gc.isenabled()
    assert not any(o is inside for o in gc.get_objects())
    outside = Node()
    assert any(o is outside for o in gc.get_objects())
    kept, lost = weakref.ref(inside), weakref.ref(outside)
    del inside, outside
    gc.collect()
    assert kept() is not None
    assert lost() is None


@pytest.mark.slow
def test_a_failure_inside_leaves_the_collector_at_work() -> None:
    with pytest.raises(ImportError), frozen_imports():
        raise ImportError("no such module")
    assert gc.isenabled()
