"""The hand-off's own cost: `python bench/handoff.py [--transport shm] [--requests 100] [--tokens 512]`.

One prefill and one decode process serve the default model; one request is in flight at a time. The
overhead of a hand-off is the time from the end of prefill's last forward to the moment at which
decode's next step can include the request, less the time that the transport took for the last
chunk. Both stamps are CLOCK_MONOTONIC of one host; nothing else should run on it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
from pathlib import Path

from instances import connected, end, start
from recorded import commit, quantile
from segue.core.types import Role

PORT = 18998


async def measure(args: argparse.Namespace) -> dict[str, list[float]]:
    """Milliseconds of each part of the time to the first token, by name."""
    rng = random.Random(1)
    times: dict[str, list[float]] = {}
    async with connected(PORT, {Role.PREFILL: 1, Role.DECODE: 1}, lambda role, _: role.value) as front:
        for i in range(args.warmup + args.requests):
            prompt = [rng.randrange(1000, 40000) for _ in range(args.tokens)]
            first = (await front.ask(f"r{i}", prompt, "prefill", "decode", tokens=2))[0]
            if i >= args.warmup:
                whole = first.timeline["at_ready"] - first.timeline["at_forward_end"]
                row = {**first.timeline, "hand_over": whole, "overhead": whole - first.timeline["wire"]}
                for name, value in row.items():
                    if not name.startswith("at_"):
                        times.setdefault(name, []).append(value * 1e3)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--transport", default="shm")
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--integrity", default="full")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    shared = ["--model", args.model, "--transport", args.transport, "--dtype", args.dtype]
    shared += ["--integrity", args.integrity]
    shared += ["--threads-per-worker", "1", "--kv-gib", "0.5", "--log-level", "warning"]
    processes = []
    try:
        for extra in (
            ["prefill", "--bootstrap-port", str(PORT)],
            ["decode", "--registry", f"http://127.0.0.1:{PORT}"],
        ):
            process = start([*extra, *shared])
            processes.append(process)
        times = asyncio.run(measure(args))
    finally:
        end(processes)
    measured_at = commit()
    rows = {
        name: {
            "p50_ms": round(statistics.median(values), 3),
            "p99_ms": round(quantile(values, 0.99), 3),
            "max_ms": round(max(values), 3),
        }
        for name, values in times.items()
    }
    print(f"{args.requests} requests of {args.tokens} tokens over {args.transport}, commit {measured_at}")
    for name, row in rows.items():
        print(f"{name:>12}  " + "   ".join(f"{key} {value:9.3f}" for key, value in row.items()))
    if args.json:
        result = {
            "command": sys.argv,
            "commit": measured_at,
            "requests": args.requests,
            "rows": rows,
            "raw_ms": times,
        }
        args.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
