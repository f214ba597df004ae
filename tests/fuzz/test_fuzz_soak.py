"""The same targets for long. FUZZ_SECONDS is shared by all of them (default 600).

(Not SEGUE_…: every part that a test starts refuses a variable of that kind which is no setting.)
"""

from __future__ import annotations

import os
import time

import pytest
from fuzz_loop import CORPUS, Fuzzer, corpus_of, peak_bytes
from fuzz_typed import try_typed
from targets import TARGETS

#: Typed inputs at a time, so that no target takes more than its share.
EXAMPLES = 200


@pytest.mark.soak
@pytest.mark.parametrize("name", TARGETS)
def test_lesson_17_long(name: str) -> None:
    """New crashes and new kinds of inputs are written into `tests/fuzz/corpus`, to be committed."""
    seconds = float(os.environ.get("FUZZ_SECONDS", "600")) / len(TARGETS)
    number = time.time_ns()
    fuzzer = Fuzzer(TARGETS[name], seed=number, save=CORPUS / name, keep=True)
    fuzzer.prime()
    # Half of the time inputs made of the types; what was new of them is then changed further in the other.
    until, start_bytes = time.monotonic() + seconds / 2, peak_bytes()
    while time.monotonic() < until:
        number += 1
        try_typed(fuzzer, EXAMPLES, number)
    fuzzer.check_growth(start_bytes)
    fuzzer.run(seconds / 2)
    assert fuzzer.runs > len(corpus_of(name)), "not one new input was tried"
