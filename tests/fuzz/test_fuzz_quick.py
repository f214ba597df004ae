"""Every decoder of bytes from outside: a typed error or a value, whatever comes (lesson 17).

Each target replays its corpus, then takes a bounded number of new inputs. `make soak` runs the long version.
"""

from __future__ import annotations

import pytest
from fuzz_loop import Fuzzer, Target, corpus_of
from targets import TARGETS

QUICK_S = 0.4
QUICK_RUNS = 800


@pytest.mark.parametrize("name", TARGETS)
def test_lesson_17_every_decoder_gives_a_value_or_a_typed_error(name: str) -> None:
    fuzzer = Fuzzer(TARGETS[name])
    fuzzer.prime()
    fuzzer.run(QUICK_S, QUICK_RUNS)
    assert fuzzer.runs > len(corpus_of(name)) + 10
    assert len(fuzzer.seen) >= 2, "every input ended alike: the target tests nothing"


def test_the_fuzzer_finds_what_is_not_typed() -> None:
    from fuzz_loop import Finding

    def decode(data: bytes) -> str:
        return str(data[5]) if data.startswith(b"go") else "no"

    fuzzer = Fuzzer(Target("self-test", lambda: [b"go 123"], decode))
    fuzzer.prime()
    with pytest.raises(Finding, match="IndexError"):
        fuzzer.run(20.0)


def test_the_fuzzer_finds_what_hangs() -> None:
    from fuzz_loop import Finding, deadline

    def decode(data: bytes) -> str:
        with deadline(0.05):
            while True:
                pass

    fuzzer = Fuzzer(Target("self-test", lambda: [b"x"], decode))
    with pytest.raises(Finding, match="Hang"):
        fuzzer.prime()
