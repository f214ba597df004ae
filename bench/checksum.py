"""The cost of checksums: `python bench/checksum.py [--rounds 20] [--tokens 2000] [--transport shm]`.

Three prefill processes that differ in `--kv-checksum` only, and one decode process, serve the default model.
One request is in flight at a time; each round sends one to each prefill process, in an order drawn
anew. The registry runs in this process, so that the three differ in nothing else. The time to first
token is from sending the request to both sides to the first output of decode.
Every prompt is new, so no prefix is cached. A difference is that of two requests of one round; the median
over the rounds is reported, and a bootstrap interval of it. Before that, the hash alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

from instances import connected, end, start
from recorded import commit, quantile
from segue.engine.request import Output
from segue.kv.ids import ChecksumMode, Role, Span
from segue.kv.layout.content import LayerSample, Part, canonical_content, checksum
from segue.kv.layout.spec import KVShape, PoolSpec
from segue.kv.limits import Limits
from segue.kv.transport.memory.pool_memory import allocate
from segue.server.registry.registry_server import serve as serve_registry

PORT = 18997
#: SmolLM2-135M in bfloat16.
SHAPE = KVShape(layers=30, kv_heads=3, k_dim=64, v_dim=64, dtype="bfloat16", item_bytes=2)


def hash_alone(tokens: int, repeats: int = 30) -> dict[str, dict[str, float]]:
    """The hash of one prompt's KV over a pool that is larger than the caches."""
    spec = PoolSpec(shape=SHAPE, pages=1024, layer_count=30, head_count=3)
    memory = allocate(spec.nbytes)
    for at in range(0, spec.nbytes, 2**20):
        memory.buffer[at : min(at + 2**20, spec.nbytes)] = os.urandom(min(2**20, spec.nbytes - at))
    count = -(-tokens // spec.page_tokens)
    placed = {
        "pages in one run": list(range(count)),
        "scattered pages": random.Random(1).sample(range(spec.pages), count),
    }
    found = {}
    with memoryview(memory.buffer) as view:
        for name, pages in placed.items():
            content = canonical_content(
                spec, Part(0, 30, 0, 3), Span(0, tokens), pages, 0, LayerSample(), "bench"
            )
            times = []
            for _ in range(repeats):
                start = time.perf_counter()
                checksum([view], content)
                times.append(time.perf_counter() - start)
            best = statistics.median(times)
            found[name] = {
                "bytes": content.nbytes,
                "p50_ms": round(best * 1e3, 3),
                "gb_s": round(content.nbytes / best / 1e9, 2),
            }
    memory.close()
    return found


async def measure(args: argparse.Namespace, words: list[list[str]]) -> dict[str, list[float]]:
    """Start everything, measure, end everything."""
    server = await serve_registry("127.0.0.1", PORT, secret=None, limits=Limits())
    processes: list[subprocess.Popen[str]] = []
    try:
        for command in words:
            process = await asyncio.to_thread(start, command)
            processes.append(process)
        return await rounds(args)
    finally:
        await asyncio.to_thread(end, processes)
        await server.close()


async def rounds(args: argparse.Namespace) -> dict[str, list[float]]:
    """One request to each prefill process per round; milliseconds to the first token, by mode."""
    rng = random.Random(1)
    times: dict[str, list[float]] = {mode: [] for mode in ChecksumMode}
    wanted = {Role.PREFILL: len(ChecksumMode), Role.DECODE: 1}
    # Served under the name of its mode: that is how this program tells them apart.
    async with connected(
        PORT, wanted, lambda role, r: r.served_model if role is Role.PREFILL else "decode"
    ) as front:
        for index in range(args.warmup + args.rounds):
            for mode in rng.sample(list(ChecksumMode), len(ChecksumMode)):
                prompt = [rng.randrange(1000, 40000) for _ in range(args.tokens)]
                heard_at: list[float] = []
                began = time.perf_counter()
                await front.ask_each(
                    f"{mode}{index}",
                    prompt,
                    mode,
                    "decode",
                    1,
                    partial(_hear, heard_at),
                )
                if index >= args.warmup:
                    times[mode].append((heard_at[0] - began) * 1e3)
    return times


def _hear(heard_at: list[float], _: Output) -> None:
    heard_at.append(time.perf_counter())


def compare(times: dict[str, list[float]], mode: str) -> dict[str, float]:
    """Rounds of `mode` against those of `off`, pairwise; percent of the time to first token."""
    base = statistics.median(times["off"])
    gaps = [(a - b) / base * 100 for a, b in zip(times[mode], times["off"], strict=True)]
    rng = random.Random(2)
    medians = sorted(statistics.median(rng.choices(gaps, k=len(gaps))) for _ in range(2000))
    return {
        "median_percent": round(statistics.median(gaps), 2),
        "low_percent": round(medians[100], 2),
        "high_percent": round(medians[1900], 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--transport", default="shm")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    alone = hash_alone(args.tokens)
    shared = ["--model", args.model, "--transport", args.transport]
    shared += ["--threads-per-worker", "1", "--kv-gib", "0.25", "--log-level", "error"]
    shared += ["--registry", f"http://127.0.0.1:{PORT}"]
    words = [
        ["prefill", "--kv-checksum", mode, "--served-model-name", mode, *shared] for mode in ChecksumMode
    ]
    words.append(["decode", *shared])
    times = asyncio.run(measure(args, words))
    measured_at = commit()
    rows = {
        mode: {
            "ttft_p50_ms": round(statistics.median(values), 2),
            "ttft_p90_ms": round(quantile(values, 0.9), 2),
            **(compare(times, mode) if mode != "off" else {}),
        }
        for mode, values in times.items()
    }
    print(f"{args.rounds} rounds of {args.tokens} tokens over {args.transport}, commit {measured_at}")
    for name, row in (*alone.items(), *rows.items()):
        print(f"{name:>18}  " + "   ".join(f"{key} {value:,}" for key, value in row.items()))
    if args.json:
        result = {
            "command": sys.argv,
            "commit": measured_at,
            "rounds": args.rounds,
            "tokens": args.tokens,
            "transport": args.transport,
            "hash_alone": alone,
            "rows": rows,
            "raw_ms": times,
        }
        args.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
