"""The hand-off's own cost: `python bench/handoff.py [--transport shm] [--requests 100] [--tokens 512]`.

One prefill and one decode process serve the default model; one request is in flight at a time. The
overhead of a hand-off is the time from the end of prefill's last forward to the moment at which
decode's next step can include the request. Nothing is subtracted for the wire: KV leaves before the
forward ends, and what of the wire comes after that end counts. Both stamps are CLOCK_MONOTONIC of one
host; nothing else should run on it.
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
from segue.kv.ids import Role

PORT = 18998

Times = dict[str, list[float]]


async def measure(args: argparse.Namespace) -> Times:
    """Milliseconds of each part of the time to the first token, by name."""
    rng = random.Random(1)
    times: Times = {}
    async with connected(PORT, {Role.PREFILL: 1, Role.DECODE: 1}, lambda role, _: role.value) as front:
        for i in range(args.warmup + args.requests):
            prompt = [rng.randrange(1000, 40000) for _ in range(args.tokens)]
            first = (await front.ask(f"r{i}", prompt, "prefill", "decode", tokens=2))[0]
            if i >= args.warmup:
                overhead = first.timeline["at_ready"] - first.timeline["at_forward_end"]
                for name, value in {**first.timeline, "overhead": overhead}.items():
                    if not name.startswith("at_"):
                        times.setdefault(name, []).append(round(value * 1e3, 4))
    return times


def row(values: list[float]) -> dict[str, float]:
    """The published figures of one part."""
    return {
        "p50_ms": round(statistics.median(values), 3),
        "p99_ms": round(quantile(values, 0.99), 3),
        "max_ms": round(max(values), 3),
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
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    shared = ["--model", args.model, "--transport", args.transport, "--dtype", args.dtype]
    shared += ["--kv-checksum", args.kv_checksum]
    shared += ["--threads-per-worker", "1", "--kv-gib", "0.5", "--log-level", "warning"]
    processes = []
    try:
        prefill = ["prefill", "--bootstrap-port", str(PORT), *shared]
        processes.append(start(prefill))
        decode = ["decode", "--registry", f"http://127.0.0.1:{PORT}", *shared]
        processes.append(start(decode))
        times = asyncio.run(measure(args))
    finally:
        end(processes)
    measured_at = commit()
    print(f"{args.requests} requests of {args.tokens} tokens over {args.transport}, commit {measured_at}")
    rows = {name: row(values) for name, values in times.items()}
    for name, columns in rows.items():
        print(f"{name:>12}  " + "   ".join(f"{k} {v:9.3f}" for k, v in columns.items()))
    result = {"command": sys.argv, "commit": measured_at, "requests": args.requests}
    if args.json:
        args.json.write_text(json.dumps({**result, "rows": rows, "raw_ms": times}, indent=1))


if __name__ == "__main__":
    main()
