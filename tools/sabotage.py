# ruff: noqa: T201
"""Break one line of a copy of the code, and see whether the tests that hold it fail.

    .venv/bin/python tools/sabotage.py [--only TEXT …] [--file FILE] [--jobs N]

`sabotages.toml` lists the sabotages: a `file` below `src/segue`, a text `old` that occurs there once, the
text `new` that replaces it, and `tests`, those of pytest that must fail. Each is applied to a temporary copy
of `src`; the working tree is never touched. A line for each says `caught`, `survived`, `gone` if the text is
not there once any more, or `failing` if the tests fail without it, too. Exit status 1 unless all are caught.

`--file` takes a list of your own, for a change that you make: before a test goes, sabotage what it holds.
`mutants.py` has the sabotages that only the simulator can notice.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TABLE = Path(__file__).with_name("sabotages.toml")
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
#: Seconds for the tests of one sabotage; a sabotage that makes them endless is caught.
LIMIT_S = 300


def failure(source: Path, tests: Iterable[str]) -> str:
    """Run `tests` with the code below `source`: the first failure, or "" if they pass."""
    path = os.pathsep.join(map(str, (source, ROOT / "lab")))
    words = (
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-n",
        "0",
        "-p",
        "no:cacheprovider",
        "-m",
        "",
        *tests,
    )
    try:
        done = subprocess.run(
            words,
            cwd=ROOT,
            env={**os.environ, **ENVIRONMENT, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"no end after {LIMIT_S} s"
    if done.returncode == 0:
        return ""
    failed = [line for line in done.stdout.split("\n") if line.startswith(("FAILED", "ERROR"))]
    return (failed or [f"status {done.returncode}: {done.stderr[-200:]}"])[0][:200]


def judge(sabotage: dict[str, Any]) -> tuple[str, str]:
    """Apply `sabotage` to a copy: the verdict, and the failure that says why."""
    text = (ROOT / "src" / "segue" / sabotage["file"]).read_text()
    if text.count(sabotage["old"]) != 1:
        return "gone", f"occurs {text.count(sabotage['old'])} times in {sabotage['file']}"
    with tempfile.TemporaryDirectory(prefix="segue-sabotage-") as folder:
        source = Path(folder) / "src"
        shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        changed = text.replace(sabotage["old"], sabotage["new"])
        (source / "segue" / sabotage["file"]).write_text(changed)
        said = failure(source, sabotage["tests"])
    if not said:
        return "survived", ""
    sound = failure(ROOT / "src", sabotage["tests"])
    return ("failing", sound) if sound else ("caught", said)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--file", type=Path, default=TABLE, help="the list of sabotages")
    parser.add_argument("--only", nargs="*", default=[""], help="those whose name or file has one of these")
    parser.add_argument("--jobs", type=int, default=1)
    args = parser.parse_args()
    listed = tomllib.loads(args.file.read_text())["sabotage"]
    chosen = [s for s in listed if any(part in f"{s['file']}: {s['name']}" for part in args.only)]
    caught = 0
    with ThreadPoolExecutor(args.jobs) as pool:
        for sabotage, (verdict, detail) in zip(chosen, pool.map(judge, chosen), strict=True):
            caught += verdict == "caught"
            print(f"{verdict:<9}{sabotage['file']}: {sabotage['name']} | {detail}", flush=True)
    print(f"{caught} of {len(chosen)} caught")
    return 0 if caught == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
