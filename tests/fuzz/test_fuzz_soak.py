"""The same targets for long. SEGUE_FUZZ_SECONDS is shared by all of them (default 600)."""

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
    seconds = float(os.environ.get("SEGUE_FUZZ_SECONDS", "600")) / len(TARGETS)
    fuzzer = Fuzzer(TARGETS[name], seed=time.time_ns(), save=CORPUS / name, keep=True)
    fuzzer.prime()
    fuzzer.run(seconds)
    assert fuzzer.runs > len(corpus_of(name)), "not one new input was tried"
