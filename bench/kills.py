"""Instances killed at random under load: `python bench/kills.py [--kills 50] [--pieces 5] [--transport shm]`.

Two prefill and two decode instances (real processes, a tiny random model), 32 clients that stream
greedy and seeded completions, and one prober with a short request. Again and again a random
instance gets kill -9 and is started again at its ports, as an orchestrator would. Every stream is
compared with the answer from before the first kill. The wait from a kill to the first success is
that of the first probe which began after it. With `--pieces` the kills are spread over so many
deployments, one after the other; `--part N` runs one piece and adds it to the file.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import from_tests  # noqa: F401
import soak_kills
import tiny_model
import traffic
from cluster import Cluster
from holdings import LIBRARY_PATH, PATH_DESCRIPTORS

from recorded import commit

NAMES = ("prefill-0", "prefill-1", "decode-0", "decode-1")
LIMITS = ("--keepalive-s", "0.5", "--peer-silence-s", "3", "--request-budget-s", "60")


def piece(number: int, kills: int, clients: int, transport: str) -> dict[str, Any]:
    """One deployment with its kills; what became of every request."""
    asks = traffic.asks(100 + number, 96, vocab=tiny_model.VOCAB - 8, longest=200, max_tokens=300)
    asks += traffic.asks(200 + number, 1, vocab=tiny_model.VOCAB - 8, longest=20, max_tokens=4)
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_model.save(Path(folder))
        flags = ("--transport", transport)
        with Cluster(model, NAMES, flags=flags, limits=LIMITS, kv_gib=0.006) as cluster:
            report = asyncio.run(soak_kills.run(cluster, asks, kills=kills, clients=clients, seed=number))
    return {
        "kills": [
            {
                "name": kill.name,
                "first_success_s": round(kill.first_success_s or 0.0, 3),
                "back_s": round(kill.back_s, 3),
            }
            for kill in report.kills
        ],
        "completed": report.completed,
        "running_at_a_kill": report.spanned,
        "running_at_a_kill_completed": report.spanned_completed,
        "failed_before_a_token": dict(report.failed),
        "failed_after_a_token": dict(report.failed_begun),
        "healed_by_the_frontend": report.healed,
        "hangs": report.hangs,
        "wrong": report.wrong,
        "untyped": report.untyped,
        "leaks": soak_kills.leaks(report, 0 if transport in PATH_DESCRIPTORS else 2 * LIBRARY_PATH),
        "seconds": round(report.seconds, 1),
        "rss_mib": {
            name: [round(report.before[name]["rss_bytes"] / 2**20), round(state["rss_bytes"] / 2**20)]
            for name, state in report.after.items()
            if name in report.before
        },
    }


def summary(pieces: list[dict[str, Any]]) -> dict[str, Any]:
    waits = [kill["first_success_s"] for p in pieces for kill in p["kills"]]

    def added(name: str) -> dict[str, int]:
        return dict(sum((Counter(p[name]) for p in pieces), Counter()))

    return {
        "kills": len(waits),
        "first_success_p50_s": round(statistics.median(waits), 3),
        "first_success_max_s": max(waits),
        **{
            name: sum(p[name] for p in pieces)
            for name in ("completed", "running_at_a_kill", "running_at_a_kill_completed", "hangs")
        },
        "healed_by_the_frontend": (healed := added("healed_by_the_frontend")),
        "placed_again_prompt_tokens_kept": healed.get(soak_kills.KEPT, 0),
        "failed_before_a_token": added("failed_before_a_token"),
        "failed_after_a_token": added("failed_after_a_token"),
        "wrong": sum(len(p["wrong"]) for p in pieces),
        "untyped": sum(len(p["untyped"]) for p in pieces),
        "leaks": sum(len(p["leaks"]) for p in pieces),
        "seconds": round(sum(p["seconds"] for p in pieces), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--pieces", type=int, default=5)
    parser.add_argument("--part", type=int, help="only this piece, 1 … PIECES")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--transport", default="shm")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    numbers = range(1, args.pieces + 1) if args.part is None else [args.part]
    done: list[dict[str, Any]] = []
    if args.json and args.json.exists() and args.part is not None and args.part > 1:
        done = json.loads(args.json.read_text())["pieces"]
    for number in numbers:
        measured_at = commit()
        made = piece(number, args.kills // args.pieces, args.clients, args.transport)
        done.append({"commit": measured_at, **made})
        print(json.dumps({**summary(done), "last": made["kills"]}))
        if args.json:
            result = {"command": sys.argv, "summary": summary(done), "pieces": done}
            args.json.write_text(json.dumps(result, indent=1) + "\n")
    bad = summary(done)
    sys.exit(1 if bad["wrong"] or bad["hangs"] or bad["untyped"] or bad["leaks"] else 0)


if __name__ == "__main__":
    main()
