"""The lines of production that the simulator runs: a table of packages, and of lines left out (`--missed`).

`python tools/sim_coverage.py --seeds 100` runs the seeds in this process. Lines that run while a module
is imported (`def`, `class`) count as run, as they do for `coverage run`.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import coverage

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "segue"
#: What decides between workers; `--packages` asks for others.
PACKAGES = (
    "kv",
    "server/schedulers",
    "server/balance",
    "server/registry",
    "server/instance",
    "server/fleet",
    "server/frontend",
)


def main(argv: Sequence[str] | None = None) -> int:
    """0 if every seed held, 1 if one did not: its lines count all the same."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=50, help="how many (default 50)")
    parser.add_argument("--seed", type=int, default=0, help="the first one (default 0)")
    parser.add_argument(
        "--missed", action="store_true", help="also each file with the lines that did not run"
    )
    parser.add_argument("--packages", nargs="*", default=PACKAGES, help="folders of src/segue")
    args = parser.parse_args(argv)

    measured = coverage.Coverage(data_file=None, source=[str(SOURCE / package) for package in args.packages])
    measured.start()
    # Only now, so that what runs at import is seen.
    from segue_lab.sim.run import load, run_scenario

    failed = []
    for seed in range(args.seed, args.seed + args.seeds):
        outcome = run_scenario(load(seed))
        if outcome.failed:
            failed.append(seed)
            print(f"seed {seed} broke invariant {outcome.text}")
    measured.stop()
    show(measured, args.missed)
    return 1 if failed else 0


def show(measured: coverage.Coverage, missed: bool) -> None:
    """The table, by package and then by file."""
    packages: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    files: list[tuple[str, int, int, str]] = []
    for folder in sorted(measured.config.source or ()):
        for path in sorted(Path(folder).rglob("*.py")):
            _, lines, _, left, shown = measured.analysis2(str(path))
            file = path.relative_to(SOURCE)
            files.append((str(file), len(lines), len(lines) - len(left), shown))
            package = str(file.parent)
            packages[package][0] += len(lines)
            packages[package][1] += len(lines) - len(left)
    if missed:
        for name, count, covered, shown in files:
            print(f"{name:<44} {count:6} {covered:6} {_percent(covered, count):6.1f}  {shown}")
        print()
    print("| package | lines | covered | % |\n|---|---|---|---|")
    for name, (count, covered) in packages.items():
        print(f"| {name} | {count} | {covered} | {_percent(covered, count):.1f} |")


def _percent(ran: int, lines: int) -> float:
    return 100.0 * ran / lines if lines else 100.0


if __name__ == "__main__":
    sys.exit(main())
