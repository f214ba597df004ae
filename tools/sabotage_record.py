"""Runs test folders once and writes which test executes which line of a package: for `sabotage.py`."""

from __future__ import annotations

import json
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import coverage
import pytest

ROOT = Path(__file__).resolve().parents[1]


class Recorder:
    """A pytest plugin: one coverage context for each test, its set-up included."""

    def __init__(self, measured: coverage.Coverage) -> None:
        self._measured = measured
        self.seconds: dict[str, float] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Around one test."""
        self._measured.switch_context(item.nodeid)
        began = time.perf_counter()
        result = yield
        self.seconds[item.nodeid] = round(time.perf_counter() - began, 3)
        return result


def main(where: str, package: str, *folders: str) -> int:
    """Exit status of pytest."""
    base = ROOT / "src" / "segue"
    source = base / package
    chosen = {"include": [str(source)]} if source.is_file() else {"source": [str(source)]}
    measured = coverage.Coverage(data_file=None, **chosen)  # type: ignore[arg-type]
    measured.start()
    recorder = Recorder(measured)
    words = ["-q", "-p", "no:cacheprovider", "-m", "not soak and not slow", "--timeout=600", *folders]
    status = pytest.main(words, plugins=[recorder])
    measured.stop()
    if status != 0:
        return int(status)
    data = measured.get_data()
    names = sorted(recorder.seconds)
    number = {name: n for n, name in enumerate(names)}
    lines: dict[str, dict[int, list[int]]] = defaultdict(dict)
    for path in data.measured_files():
        file = str(Path(path).relative_to(base))
        for line, contexts in data.contexts_by_lineno(path).items():
            lines[file][line] = [number[c] for c in contexts if c in number]
    Path(where).write_text(json.dumps({"seconds": recorder.seconds, "names": names, "lines": lines}))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
