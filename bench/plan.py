"""The cost of a copy plan: `.venv/bin/python bench/plan.py [--rounds N] [--json FILE]`.

Llama 8B's KV (32 layers, 8 KV heads of 128, bfloat16), a prompt of 512 pages of 16 tokens, CPU time. `new`:
two sides that meet, `plan_pair` and the first plan of every pair of ranks. `known`: the next plan of one
pair, and of all pairs; pages in one run on both sides, and scattered.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from recorded import commit
from segue.kv.ids import RankCoord, Span
from segue.kv.layout.planner import plan_pair
from segue.kv.layout.spec import KVShape, PoolSpec

PAGES, PAGE = 512, 16
GQA = KVShape(layers=32, kv_heads=8, k_dim=128, v_dim=128, dtype="bfloat16", item_bytes=2)
MLA = KVShape(kind="mla", layers=32, kv_heads=1, k_dim=576, v_dim=0, dtype="bfloat16", item_bytes=2)
#: shape, (tp, pp, cp) of prefill, (tp, pp) of decode
CASES = {
    "1 to 1": (GQA, (1, 1, 1), (1, 1)),
    "tp 1 to 2": (GQA, (1, 1, 1), (2, 1)),
    "tp 2 to 1": (GQA, (2, 1, 1), (1, 1)),
    "tp 3 to 2": (GQA, (3, 1, 1), (2, 1)),
    "tp 8, pp 4, cp 2 to tp 4, pp 2": (GQA, (8, 4, 2), (4, 2)),
    "latent, tp 4 to 8": (MLA, (4, 1, 1), (8, 1)),
}


def ranks(shape: KVShape, tp: int, pp: int, cp: int = 1) -> list[PoolSpec]:
    """The pools of one side."""
    layers = [shape.layers * p // pp for p in range(pp + 1)]
    heads = [shape.kv_heads * t // tp for t in range(tp + 1)]
    return [
        PoolSpec(
            shape=shape,
            coord=RankCoord(pp=p, cp=c, tp=t),
            page_tokens=PAGE,
            pages=2 * PAGES,
            layer_start=layers[p],
            layer_count=layers[p + 1] - layers[p],
            head_start=heads[t],
            head_count=max(1, heads[t + 1] - heads[t]),
        )
        for p in range(pp)
        for c in range(cp)
        for t in range(tp)
    ]


def cpu_ms(call: Callable[[], object], rounds: int) -> float:
    """The median CPU time of a call."""
    times = []
    for _ in range(rounds):
        begin = time.process_time_ns()
        call()
        times.append((time.process_time_ns() - begin) / 1e6)
    return round(statistics.median(times), 3)


def measure(
    shape: KVShape, prefill: tuple[int, int, int], decode: tuple[int, int], rounds: int
) -> dict[str, float]:
    """Milliseconds, and how many pairs and blocks there are."""
    sources, targets = ranks(shape, *prefill), ranks(shape, *decode)
    rng = random.Random(1)
    placed = {
        "run": (list(range(PAGES)), list(range(7, PAGES + 7))),
        "scattered": (rng.sample(range(2 * PAGES), PAGES), rng.sample(range(2 * PAGES), PAGES)),
    }
    whole = Span(0, PAGES * PAGE)
    plan = plan_pair(sources, targets)

    def blocks(pairs: Sequence[tuple[int, int]], pages: tuple[list[int], list[int]]) -> int:
        return sum(len(plan.blocks(s, t, plan.share(s, whole), *pages, 0)) for s, t in pairs)

    def new() -> None:
        nonlocal plan
        plan = plan_pair(sources, targets)
        blocks(plan.pairs, placed["run"])

    found: dict[str, float] = {
        "pairs": len(plan.pairs),
        "relays": len(plan.relays),
        "new": cpu_ms(new, rounds),
    }
    for name, pages in placed.items():
        found[f"blocks, {name}"] = blocks(plan.pairs, pages)
        found[f"known, one pair, {name}"] = cpu_ms(partial(blocks, plan.pairs[:1], pages), rounds)
        found[f"known, all pairs, {name}"] = cpu_ms(partial(blocks, plan.pairs, pages), rounds)
    return found


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results = {name: measure(*case, args.rounds) for name, case in CASES.items()}
    for name, numbers in results.items():
        print(name, numbers)
    if args.json:
        text = json.dumps({"command": sys.argv, "commit": commit(), "cpu_ms": results}, indent=1)
        args.json.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
