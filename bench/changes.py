"""A fleet that changes under load: `python bench/changes.py [--requests 1000] [--json FILE]`.

Two prefill and two decode instances and two frontends (real processes, a tiny random model), 16 clients that
stream greedy and seeded completions from both frontends. Twice: while a frontend is killed (kill -9) and
another one started, again and again; and while instances are switched from role to role. Every stream is
compared with the answer from before. A client whose frontend was killed asks the other one again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import from_tests  # noqa: F401
import soak_changes
import tiny_model
import traffic
from cluster import Cluster
from soak_kills import Report, leaks

from recorded import commit
from segue.kv.ids import Role

LIMITS = ("--keepalive-s", "0.5", "--peer-silence-s", "3", "--request-budget-s", "300")
PLAN = [
    ("decode-1", Role.PREFILL),
    ("decode-1", Role.UNIFIED),
    ("decode-1", Role.DECODE),
    ("prefill-1", Role.DECODE),
    ("prefill-1", Role.UNIFIED),
    ("prefill-1", Role.PREFILL),
]


def piece(what: str, model: Path, requests: int, clients: int) -> dict[str, Any]:
    """One deployment; what became of every request."""
    asks = traffic.asks(301, 96, vocab=tiny_model.VOCAB - 8, longest=200, max_tokens=60)
    changes: list[dict[str, Any]] = []
    frontends = soak_changes.FRONTENDS
    with Cluster(model, soak_changes.NAMES, limits=LIMITS, frontends=frontends, kv_gib=0.01) as cluster:

        async def soak() -> tuple[Report, soak_changes.Spread]:
            killer = soak_changes.frontend_killer(cluster, changes)
            act = killer if what == "frontends" else soak_changes.switcher(cluster, changes, PLAN)
            report, load = await soak_changes.run(cluster, asks, act, total=requests, acts=6, clients=clients)
            if what == "roles":
                await soak_changes.back(cluster, changes)
                report.after = await asyncio.to_thread(cluster.rest)
            return report, load

        report, load = asyncio.run(soak())
    return {
        "what": what,
        "changes": changes,
        "completed": report.completed,
        "streams_cut_by_the_end_of_their_frontend": sum(load.cut.values()),
        "lost": sum(report.failed.values()) + sum(report.failed_begun.values()) + report.hangs,
        "failed": {**report.failed, **report.failed_begun},
        "hangs": report.hangs,
        "wrong": report.wrong,
        "healed_by_the_first_frontend": report.healed,
        "leaks": leaks(report),
        "seconds": round(report.seconds, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    done = []
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_model.save(Path(folder))
        for what in ("frontends", "roles"):
            done.append({"commit": commit(), **piece(what, model, args.requests, args.clients)})
            print(json.dumps({k: v for k, v in done[-1].items() if k != "changes"}), len(done[-1]["changes"]))
            if args.json:
                args.json.write_text(json.dumps({"command": sys.argv, "pieces": done}, indent=1) + "\n")
    sys.exit(any(one["lost"] or one["wrong"] or one["leaks"] for one in done))


if __name__ == "__main__":
    main()
