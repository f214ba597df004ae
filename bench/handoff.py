"""The hand-off's own cost: `python bench/handoff.py [--transport shm] [--requests 100] [--tokens 512]`.

One prefill and one decode process serve the default model; one request is in flight at a time. The
overhead of a hand-off is the time from the end of prefill's last forward to the moment at which
decode's next step can include the request. Nothing is subtracted for the wire: KV leaves before the
forward ends, and what of the wire comes after that end counts. Both stamps are CLOCK_MONOTONIC of one
host; nothing else should run on it.

`--late-half` sends every other request's KV only when its forward has ended, as segue once did: what
that changes, in the overhead and in decode's whole wait (`transfer`), is measured in one run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
from pathlib import Path

from instances import SEGUE, connected, end, start
from recorded import commit, quantile
from segue.kv.ids import Role

PORT = 18998
LATE = (sys.executable, str(Path(__file__).with_name("late_prefill.py")))

Times = dict[str, list[float]]


async def measure(args: argparse.Namespace) -> dict[str, Times]:
    """Milliseconds of each part of the time to the first token, by name, of each kind of request."""
    rng = random.Random(1)
    kinds: dict[str, Times] = {}
    async with connected(PORT, {Role.PREFILL: 1, Role.DECODE: 1}, lambda role, _: role.value) as front:
        for i in range(args.warmup + args.requests):
            prompt = [rng.randrange(1000, 40000) for _ in range(args.tokens)]
            first = (await front.ask(f"r{i}", prompt, "prefill", "decode", tokens=2))[0]
            if i >= args.warmup:
                overhead = first.timeline["at_ready"] - first.timeline["at_forward_end"]
                times = kinds.setdefault("late" if args.late_half and i % 2 == 0 else "early", {})
                for name, value in {**first.timeline, "overhead": overhead}.items():
                    if not name.startswith("at_"):
                        times.setdefault(name, []).append(round(value * 1e3, 4))
    return kinds


def row(values: list[float]) -> dict[str, float]:
    """The published figures of one part."""
    return {
        "p50_ms": round(statistics.median(values), 3),
        "p99_ms": round(quantile(values, 0.99), 3),
        "max_ms": round(max(values), 3),
    }


def saved(kinds: dict[str, Times]) -> dict[str, float]:
    """How much less decode waits when KV leaves early: of neighbouring requests, each early one against
    the late one beside it; the median in ms and its standard error."""
    differences = [a - b for a, b in zip(kinds["late"]["transfer"], kinds["early"]["transfer"], strict=False)]
    spread = statistics.stdev(differences) / len(differences) ** 0.5
    return {
        "p50_ms": round(statistics.median(differences), 2),
        # of a median of normal values
        "standard_error_ms": round(1.2533 * spread, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--transport", default="shm")
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--warmup", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--kv-checksum", default="full")
    parser.add_argument("--late-half", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    shared = ["--model", args.model, "--transport", args.transport, "--dtype", args.dtype]
    shared += ["--kv-checksum", args.kv_checksum]
    shared += ["--threads-per-worker", "1", "--kv-gib", "0.5", "--log-level", "warning"]
    processes = []
    try:
        prefill = ["prefill", "--bootstrap-port", str(PORT), *shared]
        processes.append(start(prefill, LATE if args.late_half else SEGUE))
        decode = ["decode", "--registry", f"http://127.0.0.1:{PORT}", *shared]
        processes.append(start(decode))
        kinds = asyncio.run(measure(args))
    finally:
        end(processes)
    measured_at = commit()
    print(f"{args.requests} requests of {args.tokens} tokens over {args.transport}, commit {measured_at}")
    rows = {kind: {name: row(values) for name, values in times.items()} for kind, times in kinds.items()}
    for kind, parts in rows.items():
        for name, columns in parts.items():
            label = f"{kind:>5} " if args.late_half else ""
            print(f"{label}{name:>12}  " + "   ".join(f"{k} {v:9.3f}" for k, v in columns.items()))
    result = {"command": sys.argv, "commit": measured_at, "requests": args.requests}
    if args.late_half:
        result["saved"] = saved(kinds)
        print("saved by leaving early, of decode's wait:", result["saved"])
    if args.json:
        args.json.write_text(json.dumps({**result, "rows": rows, "raw_ms": kinds}, indent=1))


if __name__ == "__main__":
    main()
