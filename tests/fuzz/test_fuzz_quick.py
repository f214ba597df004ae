"""Every decoder of bytes from outside: a typed error or a value, whatever comes (lesson 17).

Each target replays its corpus, then takes a bounded number of new inputs. `make soak` runs the long version.
"""

from __future__ import annotations

import pytest
from fuzz_loop import Fuzzer, Target, corpus_of, peak_bytes
from fuzz_typed import TYPED, try_typed
from hypothesis import strategies as st
from targets import TARGETS

QUICK_S = 0.4
QUICK_RUNS = 800
QUICK_LEAST = 20
QUICK_EXAMPLES = 40


@pytest.mark.parametrize("name", TARGETS)
def test_lesson_17_every_decoder_gives_a_value_or_a_typed_error(name: str) -> None:
    fuzzer = Fuzzer(TARGETS[name])
    fuzzer.prime()
    fuzzer.run(QUICK_S, QUICK_RUNS, QUICK_LEAST)
    assert fuzzer.runs > len(corpus_of(name)) + 10
    assert len(fuzzer.seen) >= 2, "every input ended alike: the target tests nothing"


@pytest.mark.parametrize("name", TARGETS)
def test_lesson_17_every_decoder_bears_whatever_has_its_types(name: str) -> None:
    """Always the same inputs, made by hypothesis of the types; see `fuzz_typed`."""
    fuzzer, start_bytes = Fuzzer(TARGETS[name]), peak_bytes()
    try_typed(fuzzer, QUICK_EXAMPLES)
    fuzzer.check_growth(start_bytes)
    assert fuzzer.runs >= QUICK_EXAMPLES / 2
    assert len(fuzzer.seen) >= 2, "every input ended alike: the strategy says nothing"


def test_a_typed_finding_shrinks_to_its_least_form(monkeypatch: pytest.MonkeyPatch) -> None:
    from fuzz_loop import Finding

    def decode(data: bytes) -> str:
        if len(data) >= 4:
            raise KeyError("four")
        return "short"

    monkeypatch.setitem(TYPED, "self-test", st.binary(max_size=60))
    with pytest.raises(Finding, match="KeyError") as caught:
        try_typed(Fuzzer(Target("self-test", lambda: [b"x"], decode)), 200)
    assert repr(bytes(4)) in str(caught.value)


def test_the_fuzzer_finds_what_is_not_typed() -> None:
    from fuzz_loop import Finding

    def decode(data: bytes) -> str:
        return str(data[5]) if data.startswith(b"go") else "no"

    fuzzer = Fuzzer(Target("self-test", lambda: [b"go 123"], decode))
    fuzzer.prime()
    with pytest.raises(Finding, match="IndexError"):
        fuzzer.run(120.0)


def test_the_fuzzer_finds_what_hangs() -> None:
    from fuzz_loop import Finding, deadline

    def decode(data: bytes) -> str:
        with deadline(0.05):
            while True:
                pass

    fuzzer = Fuzzer(Target("self-test", lambda: [b"x"], decode))
    with pytest.raises(Finding, match="Hang"):
        fuzzer.prime()
