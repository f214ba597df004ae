"""The vLLM connector in the simulator: `.venv/bin/python bench/vllm_faults.py --seeds 2000 --json FILE`.

A file that is there is gone on with, behind its last seed. A seed that breaks a rule is noted with what it
said; the exit status is 1 if there is one.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections import Counter
from pathlib import Path

import from_tests  # noqa: F401
from vllm_sim import VllmDeployment, vllm_scenario

from recorded import commit
from segue.lab.sim.run import run_scenario


def main() -> int:
    """Go on with the file, and print where it stands."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=2000)
    parser.add_argument("--cpu-seconds", type=float, default=float("inf"))
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    result = {"first_seed": args.seed, "next_seed": args.seed, "commits": [], "cpu_seconds": 0.0}
    result |= {"with_a_fault": 0, "virtual_hours": 0.0, "failed": {}, "counts": {}}
    if args.json.exists():
        result = json.loads(args.json.read_text())
    counts, begin = Counter(result["counts"]), time.process_time()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
    while result["next_seed"] < args.seed + args.seeds and time.process_time() - begin < args.cpu_seconds:
        seed, result["next_seed"] = result["next_seed"], result["next_seed"] + 1
        outcome = run_scenario(vllm_scenario(seed), deploy=VllmDeployment)
        counts.update(outcome.counts)
        result["with_a_fault"] += bool(outcome.injected)
        result["virtual_hours"] += outcome.virtual_s / 3600
        if outcome.failed:
            result["failed"][str(seed)] = outcome.text
            print(f"seed {seed} broke {outcome.text}", flush=True)
        gc.collect()
    result["counts"] = dict(sorted(counts.items()))
    result["commits"] = [*dict.fromkeys([*result["commits"], commit()])]
    result["cpu_seconds"] = round(result["cpu_seconds"] + time.process_time() - begin, 1)
    args.json.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({name: result[name] for name in ("next_seed", "with_a_fault", "cpu_seconds", "failed")}))
    return 1 if result["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
