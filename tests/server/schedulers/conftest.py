"""The check at the end of each test of the two roles."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pair import Pair


@pytest.fixture(autouse=True)
def pairs_are_at_rest() -> Iterator[None]:
    """Nothing is held by any request, once all that may still move has done so."""
    Pair.made.clear()
    yield
    for pair in Pair.made:
        if pair.rests:
            pair.run()
            pair.assert_at_rest()
