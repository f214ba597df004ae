"""Many seeds of the simulator, a piece at a time: `.venv/bin/python bench/sim_many.py --json FILE`.

A file that is there is gone on with, behind its last seed, until all its pieces together have so many
hand-offs under faults. Hand-offs of seeds in which a side has several ranks are also counted apart; with
`--several-ranks` other seeds are left out. A seed that breaks a rule is noted with what it said; the exit
status is 1 if there is one.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from recorded import commit
from segue_lab.sim.run import run_scenario
from segue_lab.sim.scenario import make_scenario

#: After so many seconds of CPU time what has run is written.
PIECE_S = 600.0


def piece(result: dict[str, Any], hand_offs: int, cpu_seconds: float, several_ranks: bool) -> None:
    """Run seeds until there are so many hand-offs, or this piece has taken so long."""
    counts = Counter(result["counts"])
    begin, seeds, before = time.process_time(), 0, counts["hand-offs"]
    while result["hand_offs_under_faults"] < hand_offs and time.process_time() - begin < cpu_seconds:
        seed, result["next_seed"] = result["next_seed"], result["next_seed"] + 1
        scenario = make_scenario(seed)
        if several_ranks and not scenario.splits.several:
            continue
        seeds += 1
        outcome = run_scenario(scenario)
        counts.update(outcome.counts)
        if scenario.splits.several:
            counts["hand-offs of seeds with several ranks"] += outcome.counts.get("hand-offs", 0)
        result["hand_offs_under_faults"] += outcome.under_faults
        result["virtual_hours"] += outcome.virtual_s / 3600
        if outcome.failed:
            result["failed"][str(seed)] = outcome.text
            print(f"seed {seed} broke {outcome.text}", flush=True)
        gc.collect()  # a seed's pools hang in cycles
    result["hand_offs"] = counts["hand-offs"]
    result["counts"] = dict(sorted(counts.items()))
    took = {"commit": commit(), "seeds": seeds, "hand_offs": counts["hand-offs"] - before}
    result["pieces"].append(took | {"cpu_seconds": round(time.process_time() - begin, 1)})


def main() -> int:
    """Go on with the file, and print where it stands."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=4_000_000)
    parser.add_argument("--hand-offs", type=int, default=1_000_000)
    parser.add_argument("--several-ranks", action="store_true")
    parser.add_argument("--cpu-seconds", type=float, default=float("inf"))
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    result: dict[str, Any] = {"first_seed": args.seed, "next_seed": args.seed, "pieces": [], "counts": {}}
    result |= {"hand_offs": 0, "hand_offs_under_faults": 0, "virtual_hours": 0.0, "failed": {}}
    if args.json.exists():
        result = json.loads(args.json.read_text())
    # What is imported is never garbage, and a run makes much that is short-lived.
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
    ends_at = time.process_time() + args.cpu_seconds
    while result["hand_offs_under_faults"] < args.hand_offs and (left := ends_at - time.process_time()) > 0:
        piece(result, args.hand_offs, min(left, PIECE_S), args.several_ranks)
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    shown = {name: result[name] for name in ("next_seed", "hand_offs", "hand_offs_under_faults", "failed")}
    print(json.dumps(shown))
    return 1 if result["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
