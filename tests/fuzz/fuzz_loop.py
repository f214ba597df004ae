"""The loop that feeds mutated inputs to a target, and keeps what was new or broke it.

    python tests/fuzz/fuzz_loop.py TARGET SECONDS     by hand
    python tests/fuzz/fuzz_loop.py TARGET FILE        one input again

No coverage of the interpreter is measured (the decoders are C). What is new is told from the outside: the
kind of the value, or the code and the text (without its digits) of the error. `fuzz_typed` gives the same
fuzzer inputs that hypothesis makes of the types.
"""

from __future__ import annotations

import hashlib
import random
import re
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from fuzz_mutate import Mutation, mutated

from segue.kv.errors import SegueError

CORPUS = Path(__file__).parent / "corpus"
#: A single input may take this long; the slowest decoder needs milliseconds.
HANG_S = 60.0
#: What all runs of a target may add to the memory of the process.
GROWTH_BYTES = 512 * 2**20
MAX_POOL = 400
MAX_SAVED = 64
MAX_SAVED_BYTES = 1024


class Hang(BaseException):
    """An input took longer than `HANG_S`; not an Exception, so that no target swallows it."""


@dataclass(frozen=True)
class Target:
    """One decoder of bytes from outside.

    `run` returns what became of an input, as short text, or raises a SegueError; anything else that
    it raises is a finding. `seeds` are valid inputs.
    """

    name: str
    seeds: Callable[[], list[bytes]]
    run: Callable[[bytes], str]
    structured: Mutation | None = None


class Finding(AssertionError):
    """An input that broke a target; it was saved."""


@dataclass
class Fuzzer:
    """One target's pool of inputs. `save` is where crashes, and with `keep` new inputs, are written."""

    target: Target
    seed: int = 0
    save: Path | None = None
    keep: bool = False
    pool: list[bytes] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)
    runs: int = 0

    def prime(self) -> None:
        """Seeds, which must be good, and what was kept before."""
        for data in self.target.seeds():
            self._try(data)
            self.pool.append(data)
        for file in corpus_of(self.target.name):
            data = file.read_bytes()
            self._try(data)
            self.pool.append(data)

    def run(self, seconds: float, max_runs: int = 10**9, min_new: int = 0) -> None:
        """Mutate for a while, but at least `min_new` inputs. Raises Finding for the first input that breaks
        the target."""
        rng = random.Random(self.seed)
        start_bytes = peak_bytes()
        until, least = time.monotonic() + seconds, self.runs + min_new
        while self.runs < max_runs and (self.runs < least or time.monotonic() < until):
            self.offer(mutated(rng, self.pool, self.target.structured))
        self.check_growth(start_bytes)

    def offer(self, data: bytes) -> None:
        """Run one input, and keep it if what became of it is new. Raises Finding."""
        if self._try(data) and len(self.pool) < MAX_POOL:
            self.pool.append(data)
            if self.keep:
                self._keep(data)

    def check_growth(self, start_bytes: int) -> None:
        """Raises Finding if the memory of this process has grown by more than all inputs may add."""
        grown = peak_bytes() - start_bytes
        if grown > GROWTH_BYTES:
            raise Finding(f"{self.target.name}: memory grew by {grown >> 20} MiB")

    def _try(self, data: bytes) -> bool:
        """Run one input; True if what became of it is new."""
        self.runs += 1
        try:
            with deadline(HANG_S):
                outcome = self.target.run(data)
        except SegueError as error:
            outcome = f"{error.info.code} {re.sub(r'[^a-zA-Z ]+', '', error.info.text)[:40]}"
        except (Exception, Hang) as error:
            where = self._crash(data)
            raise Finding(f"{self.target.name}: {type(error).__name__}: {error}\n  input: {where}") from error
        new = outcome not in self.seen
        self.seen.add(outcome)
        return new

    def _crash(self, data: bytes) -> str:
        if self.save is None:
            return repr(data[:500])
        self.save.mkdir(parents=True, exist_ok=True)
        file = self.save / f"crash-{hashlib.sha256(data).hexdigest()[:12]}"
        file.write_bytes(data)
        return str(file)

    def _keep(self, data: bytes) -> None:
        assert self.save is not None
        self.save.mkdir(parents=True, exist_ok=True)
        if len(data) <= MAX_SAVED_BYTES and len(list(self.save.iterdir())) < MAX_SAVED:
            (self.save / hashlib.sha256(data).hexdigest()[:12]).write_bytes(data)


def peak_bytes() -> int:
    """The most memory that this process ever had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def corpus_of(name: str) -> list[Path]:
    folder = CORPUS / name
    return sorted(folder.iterdir()) if folder.is_dir() else []


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Raise Hang in this (main) thread after `seconds`."""

    def late(_number: int, _frame: FrameType | None) -> None:
        raise Hang(f"no end after {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    timer = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, before)


def main(name: str, what: str) -> None:
    from targets import TARGETS

    target = TARGETS[name]
    if Path(what).exists():
        print(target.run(Path(what).read_bytes()))  # noqa: T201
        return
    fuzzer = Fuzzer(target, int(time.time()), save=CORPUS / name, keep=True)
    fuzzer.prime()
    fuzzer.run(float(what))
    print(f"{fuzzer.runs} inputs, {len(fuzzer.seen)} different outcomes")  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:3])
