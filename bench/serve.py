"""Serve the default model on this machine and measure it with `segue bench`.

    .venv/bin/python bench/serve.py [--modes pd unified] [--serve="--prefill 2"] [-- BENCH FLAGS]

Each mode is served in a deployment of its own, one after the other, with the same requests. The
raw report of each run, with command, commit and machine, goes to `bench/results/serve-MODE.json`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from recorded import commit

ROOT = Path(__file__).resolve().parents[1]
SEGUE = [sys.executable, "-m", "segue.cli.main"]
MODES = {"pd": [], "unified": ["--unified"]}
DRAIN_S = 60.0


@contextlib.contextmanager
def served(flags: list[str]) -> Iterator[str]:
    """A deployment on a free port; gives its URL, and drains it at the end."""
    command = [*SEGUE, "serve", "--port", "0", "--log-level", "warning", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            line = process.stdout.readline()  # ends with the process, if that comes first
            match = re.fullmatch(r"ready (http://\S+)\n", line)
            if match is None:
                raise SystemExit(f"{shlex.join(command)} did not get ready")
            yield match[1]
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                status = process.wait(DRAIN_S)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
    if status:
        raise SystemExit(f"{shlex.join(command)} ended with status {status}")


def machine() -> dict[str, object]:
    """The facts of this machine that the numbers depend on."""
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    dirty = subprocess.run(
        ["git", "status", "--porcelain", "--untracked-files=no"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return {
        "dirty": bool(dirty.stdout.strip()),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": cpu[1] if cpu else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "command": shlex.join(sys.argv),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--serve", default="", help="further flags of segue serve, as one word")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results")
    args, bench_flags = parser.parse_known_args()
    bench_flags = [flag for flag in bench_flags if flag != "--"]
    args.out.mkdir(parents=True, exist_ok=True)
    measured_at = commit()  # before the runs: what is committed meanwhile is not what was measured
    for mode in args.modes:
        file = args.out / f"serve-{mode}.json"
        flags = [*MODES[mode], *shlex.split(args.serve)]
        with served(flags) as url:
            print(f"\n{mode}: segue serve {shlex.join(flags)}", flush=True)
            command = [*SEGUE, "bench", url, *bench_flags, "--json", str(file)]
            status = subprocess.run(command, check=False).returncode
        if status:
            raise SystemExit(f"{shlex.join(command)} ended with status {status}")
        report = json.loads(file.read_text())
        report |= {"commit": measured_at, "machine": machine(), "serve_flags": flags}
        file.write_text(json.dumps(report, indent=2) + "\n")
        print(f"raw report: {file}")


if __name__ == "__main__":
    main()
