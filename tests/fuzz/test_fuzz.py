"""Every decoder of bytes from outside gives a value or a typed error, whatever comes (lesson 17).

Hypothesis makes messages of the right types, changes them, and shrinks a finding. `make test` tries the same
inputs each time; `make test-slow` tries more, and others each time.
"""

from __future__ import annotations

import re
import resource

import pytest
from fuzz_changes import Target, changed
from fuzz_typed import TYPED
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from targets import TARGETS

from segue.kv.errors import SegueError

#: All inputs of a target may add this much to the memory of the process.
GROWTH_KIB = 512 * 1024


def fuzz(target: Target, examples: int, *, derandomize: bool) -> None:
    """Run `examples` inputs through the target."""
    outcomes = set[str]()
    messages = st.sampled_from(target.seeds()) | TYPED[target.name]

    @settings(
        max_examples=examples,
        derandomize=derandomize,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(changed(messages, target.value_change))
    def one(data: bytes) -> None:
        try:
            outcomes.add(target.run(data))
        except SegueError as error:
            outcomes.add(f"{error.info.code} {re.sub(r'[^a-zA-Z ]+', '', error.info.text)[:40]}")

    for data in (*target.seeds(), *target.found):
        one = example(data)(one)
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    one()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < GROWTH_KIB
    assert len(outcomes) >= 2, "every input ended alike: the target tests nothing"


@pytest.mark.parametrize("name", TARGETS)
def test_lesson_17_every_decoder_gives_a_value_or_a_typed_error(name: str) -> None:
    fuzz(TARGETS[name], 75, derandomize=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_lesson_17_more_inputs(name: str) -> None:
    fuzz(TARGETS[name], 250, derandomize=False)
