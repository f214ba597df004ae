"""The same targets for long. FUZZ_SECONDS is shared by all of them (default 600).

(Not SEGUE_…: every part that a test starts refuses a variable of that kind which is no setting.)
"""

from __future__ import annotations

import os
import time

import pytest
from fuzz_loop import CORPUS, Fuzzer, corpus_of
from targets import TARGETS


@pytest.mark.soak
@pytest.mark.parametrize("name", TARGETS)
def test_lesson_17_long(name: str) -> None:
    """New crashes and new kinds of inputs are written into `tests/fuzz/corpus`, to be committed."""
    seconds = float(os.environ.get("FUZZ_SECONDS", "600")) / len(TARGETS)
    fuzzer = Fuzzer(TARGETS[name], seed=time.time_ns(), save=CORPUS / name, keep=True)
    fuzzer.prime()
    fuzzer.run(seconds)
    assert fuzzer.runs > len(corpus_of(name)), "not one new input was tried"
