"""The time that the wire adds to the time to first token: `python bench/exposed.py [--transports shm tcp …]`.

One prefill and one decode process for each transport serve the default model; the registry runs in this
process. One request is in flight at a time. In each round every transport serves two new prompts, in an order
drawn anew: one with a hand-off, and one that its prefill process computes alone and answers itself (what a
ticket for one leader asks for).

    exposed   of a hand-off: from the end of prefill's last forward to the moment at which decode's next step
              can include the request. KV that leaves sooner is hidden behind the forward.
    added     the time to the first output of the one with a hand-off, less that of the one without, in one
              round: also what copying and hashing take from the forward beside them.
    CPU       the same of the CPU time of both processes, which other work on the machine changes less.

The last two are medians over the rounds, `added` with a bootstrap interval of 90 %. The first two are percent
of the median time to first token with a hand-off, CPU of that without.
With `--send-layers 0 5` each transport serves twice, with and without what that sets.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path

from instances import Front, connected, end, start
from recorded import commit, quantile
from segue.engine.request import Output
from segue.kv.ids import Role
from segue.kv.limits import Limits
from segue.server.registry.registry_server import serve as serve_registry
from transports import cpu_seconds

PORT = 18995
TRANSPORTS = ("shm", "tcp", "nixl", "mooncake")
#: Milliseconds of each round: times and CPU times with a hand-off and without, and what is exposed.
Rounds = dict[str, list[dict[str, float]]]


async def measure(args: argparse.Namespace) -> Rounds:
    """Start everything, measure, end everything."""
    server = await serve_registry("127.0.0.1", PORT, secret=None, limits=Limits())
    shared = ["--model", args.model, "--registry", f"http://127.0.0.1:{PORT}", "--threads-per-worker", "1"]
    shared += ["--kv-gib", "0.25", "--log-level", "error", "--chunk-tokens", str(args.chunk_tokens)]
    processes: list[subprocess.Popen[str]] = []
    try:
        pids = {}
        for name in names(args):
            transport, layers = name.split("+")
            for role in ("prefill", "decode"):
                words = [role, "--transport", transport, "--served-model-name", name, *shared]
                words += ["--send-layers", layers] if role == "prefill" else []
                processes.append(await asyncio.to_thread(start, words))
            pids[name] = processes[-2].pid, processes[-1].pid
        return await rounds(args, pids)
    finally:
        await asyncio.to_thread(end, processes)
        await server.close()


def names(args: argparse.Namespace) -> list[str]:
    """The name and served model of each pair: its transport, and layers that are sent at a time."""
    return [f"{name}+{layers}" for name in args.transports for layers in args.send_layers]


async def rounds(args: argparse.Namespace, pids: dict[str, tuple[int, int]]) -> Rounds:
    """`args.rounds` rounds after those that warm up."""
    rng = random.Random(1)
    found: Rounds = {name: [] for name in pids}
    wanted = dict.fromkeys((Role.PREFILL, Role.DECODE), len(pids))
    async with connected(PORT, wanted, lambda role, record: f"{role} {record.served_model}") as front:
        for turn in range(args.warmup + args.rounds):
            for name in rng.sample(list(pids), len(pids)):
                pair = f"{Role.PREFILL} {name}", f"{Role.DECODE} {name}"
                row: dict[str, float] = {}
                for kind in rng.sample(["with", "without"], 2):
                    prompt = [rng.randrange(1000, 40000) for _ in range(args.tokens)]
                    before = cpu_seconds(pids[name])
                    asked = f"{kind} {name} {turn}", prompt, pair[0], pair[kind == "with"]
                    row[kind], first = await ask(front, *asked)
                    row[f"cpu_{kind}"] = round((cpu_seconds(pids[name]) - before) * 1e3, 1)
                    if kind == "with":
                        ends = first.timeline
                        row["exposed"] = round((ends["at_ready"] - ends["at_forward_end"]) * 1e3, 4)
                if turn >= args.warmup:
                    found[name].append(row)
    return found


async def ask(front: Front, name: str, prompt: list[int], prefill: str, decode: str) -> tuple[float, Output]:
    """Milliseconds from sending a request for one token to its first output, and that."""
    heard: list[tuple[float, Output]] = []
    began = time.perf_counter()
    await front.ask_each(
        name, prompt, prefill, decode, 1, lambda output: heard.append((time.perf_counter(), output))
    )
    return round((heard[0][0] - began) * 1e3, 3), heard[0][1]


def summary(rows: list[dict[str, float]]) -> dict[str, float]:
    """The published figures of one transport."""
    base = statistics.median(row["with"] for row in rows)
    gaps = [(row["with"] - row["without"]) / base * 100 for row in rows]
    rng = random.Random(2)
    medians = sorted(statistics.median(rng.choices(gaps, k=len(gaps))) for _ in range(2000))
    exposed = [row["exposed"] for row in rows]
    cpu = statistics.median(row["cpu_with"] - row["cpu_without"] for row in rows)
    return {
        "ttft_p50_ms": round(base, 1),
        "exposed_p50_ms": round(statistics.median(exposed), 2),
        "exposed_max_ms": round(quantile(exposed, 1), 2),
        "exposed_percent": round(statistics.median(exposed) / base * 100, 2),
        "added_percent": round(statistics.median(gaps), 2),
        "added_low_percent": round(medians[100], 2),
        "added_high_percent": round(medians[1900], 2),
        "cpu_percent": round(cpu / statistics.median(row["cpu_without"] for row in rows) * 100, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--transports", nargs="+", default=list(TRANSPORTS))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--chunk-tokens", type=int, default=512)
    parser.add_argument("--send-layers", type=int, nargs="+", default=[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    before = os.getloadavg()
    found = asyncio.run(measure(args))
    rows = {name: summary(times) for name, times in found.items()}
    print(f"{args.rounds} rounds of {args.tokens} tokens in chunks of {args.chunk_tokens}, commit {commit()}")
    for name, row in rows.items():
        print(f"{name:>12}  " + "   ".join(f"{key} {value:,}" for key, value in row.items()))
    if args.json:
        result = {
            "command": "python bench/exposed.py " + " ".join(sys.argv[1:]),
            "commit": commit(),
            "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
            "load": {"before": before, "after": os.getloadavg()},
            "rows": rows,
            "raw_ms": found,
        }
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
