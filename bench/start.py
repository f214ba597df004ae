"""How long a start takes, and the memory of what it starts: `python bench/start.py [--runs 3] [-- FLAGS]`.

Starts `segue serve` (one prefill and one decode instance unless FLAGS say otherwise) with the model already
in the cache: with cold caches (no compiled kernels) and with warm ones, `--runs` times each. Says, from the
start of the command: when the port answers, when both instances serve, and `ready`. At `ready` it reads CPU
time and memory (PSS: shared pages are divided among those that have them) of each process. The time to
ready depends on what else the machine does, so the CPU time of other processes is said, too.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from recorded import commit
from segue.kv.model_weights import cache_folder

READY_S = 300.0
_TICKS = os.sysconf("SC_CLK_TCK")


def started(flags: list[str], cache: Path, shown: bool) -> dict[str, object]:
    """One start: its moments in seconds, and the processes when it was ready."""
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    stolen, busy = machine()
    began = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "segue.cli.main", "serve", "--port", "0", "--cache", str(cache), *flags],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    killer = threading.Timer(READY_S, process.kill)
    killer.start()
    moments: dict[str, float] = {}
    processes: list[dict[str, object]] = []
    kernels: list[str] = []
    assert process.stdout is not None
    for line in process.stdout:
        at = time.monotonic() - began
        if shown:
            print(f"{at:6.2f} {line.rstrip()}")
        if "event=listening" in line:
            moments["listening"] = at
        elif "event=ready child=" in line and "frontend" not in line.partition("child=")[2]:
            moments["instances"] = at
        elif "event=kernels_ready" in line:
            kernels.append(line.partition("event=kernels_ready ")[2].strip())
        elif line.startswith("ready "):
            moments["ready"] = at
            now_stolen, now_busy = machine()
            processes = [facts(pid) for pid in family(process.pid)]
            process.send_signal(signal.SIGTERM)
    process.wait()
    killer.cancel()
    if "ready" not in moments:
        raise SystemExit("segue serve did not become ready; run it by hand to see why")
    used = sum(float(str(p["cpu_s"])) for p in processes)
    return {
        "moments_s": {name: round(at, 2) for name, at in moments.items()},
        "kernels": kernels,
        "processes": processes,
        "cpu_s": round(used, 1),
        "others_cpu_s": round(now_busy - busy - used, 1),
        "stolen_s": round(now_stolen - stolen, 1),
    }


def machine() -> tuple[float, float]:
    """CPU seconds since the machine's start: taken by other guests of its host, and used by all processes."""
    user, nice, system, _, _, irq, soft, steal, *_ = (
        int(word) / _TICKS for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:]
    )
    return steal, user + nice + system + irq + soft


def family(pid: int) -> list[int]:
    """`pid` and its children."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *map(int, children)]


def facts(pid: int) -> dict[str, object]:
    """Memory and CPU time of one process."""
    words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    sizes = {
        name: int(re.findall(rf"^{name}: +(\d+) kB", rollup, re.M)[0]) // 1024 for name in ("Pss", "Rss")
    }
    return {
        "process": words[3],
        "pss_mib": sizes["Pss"],
        "rss_mib": sizes["Rss"],
        "cpu_s": round((int(fields[11]) + int(fields[12])) / _TICKS, 2),
    }


def row(kind: str, runs: list[dict[str, object]]) -> str:
    """One line of the table."""

    def all_of(name: str) -> str:
        return ", ".join(f"{run['moments_s'][name]:.1f}" for run in runs)  # type: ignore[index]

    cpu, others = (
        statistics.mean(float(str(run[name])) for run in runs) for name in ("cpu_s", "others_cpu_s")
    )
    moments = " | ".join(all_of(name) for name in ("listening", "instances", "ready"))
    return f"| {kind} | {moments} | {cpu:.1f} | {others:.1f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--shown", action="store_true", help="print each line of the log with its time")
    parser.add_argument("--save", type=Path, help="write all of it as JSON")
    parser.add_argument("flags", nargs="*", help="flags of segue serve, after --")
    args = parser.parse_args()
    found: dict[str, list[dict[str, object]]] = {"cold": [], "warm": []}
    with tempfile.TemporaryDirectory() as name:
        cache = Path(name)
        (cache / "models").symlink_to(cache_folder() / "models")
        for _ in range(args.runs):
            for path in sorted(cache.glob("kernels/**/*"), reverse=True):
                path.rmdir() if path.is_dir() else path.unlink()
            found["cold"].append(started(args.flags, cache, args.shown))
            found["warm"].append(started(args.flags, cache, args.shown))
    print(f"commit {commit()}, segue serve {' '.join(args.flags)}, seconds from the start of the command\n")
    print("| caches | the port listens | instances serve | ready | CPU of all processes, mean | of others |")
    print("|---|---|---|---|---|---|")
    for kind, runs in found.items():
        print(row(kind, runs))
    print("\n| process, last warm start | PSS MiB | RSS MiB | CPU s |\n|---|---|---|---|")
    last = found["warm"][-1]["processes"]
    for one in last:  # type: ignore[attr-defined]
        print(f"| {one['process']} | {one['pss_mib']} | {one['rss_mib']} | {one['cpu_s']} |")
    if args.save:
        about = {"commit": commit(), "command": ["bench/start.py", *sys.argv[1:]], "cores": os.cpu_count()}
        args.save.write_text(json.dumps({**about, **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
