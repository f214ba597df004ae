"""What checksums cost: `python bench/checksum.py [--rounds 20] [--tokens 2000] [--transport shm]`.

Three prefill processes that differ in `--integrity` only, and one decode process, serve the default model.
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
from pathlib import Path

from handoff import Front, quantile
from segue.bootstrap.client import RegistryClient
from segue.bootstrap.server import serve as serve_registry
from segue.core.control import ControlMessage, Submit
from segue.core.limits import Limits
from segue.core.request import Request, SamplingParams, Ticket
from segue.core.types import Integrity, Placement, Role, Span, new_incarnation, new_room
from segue.layout.content import Part, Sample, canonical_content, checksum
from segue.layout.spec import KVShape, PoolSpec
from segue.session.api import Session
from segue.session.node import SessionNode
from segue.transport.memory import allocate

ROOT = Path(__file__).resolve().parent.parent
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
            content = canonical_content(spec, Part(0, 30, 0, 3), Span(0, tokens), pages, 0, Sample(), "bench")
            times = []
            for _ in range(repeats):
                start = time.perf_counter()
                checksum(view, content)
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
    limits = Limits()
    server = await serve_registry("127.0.0.1", PORT, secret=None, limits=limits)
    processes: list[subprocess.Popen[str]] = []
    try:
        for command in words:
            process = await asyncio.to_thread(start, command)
            processes.append(process)
        return await rounds(args, limits)
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            await asyncio.to_thread(process.wait, 30)
        await server.close()


async def rounds(args: argparse.Namespace, limits: Limits) -> dict[str, list[float]]:
    """One request to each prefill process per round; milliseconds to the first token, by mode."""
    registry = RegistryClient(f"http://127.0.0.1:{PORT}", secret=None, limits=limits)
    front = Front()
    node = SessionNode(
        incarnation=new_incarnation(),
        role=Role.FRONTEND,
        dp_rank=0,
        secret=None,
        handler=front,
        message_type=ControlMessage,
        limits=limits,
    )
    sessions: dict[str, Session] = {}
    wanted = {Role.PREFILL: len(Integrity), Role.DECODE: 1}
    for role, count in wanted.items():
        async for records in registry.watch(role):
            if len(records) == count:
                for record in records:
                    replica = record.replicas[0]
                    # Served under the name of its mode: that is how this program tells them apart.
                    name = record.served_model if role is Role.PREFILL else "decode"
                    sessions[name] = await node.connect(
                        replica.host, replica.port, expect=record.incarnation, timeout_s=10
                    )
                break
    rng = random.Random(1)
    times: dict[str, list[float]] = {mode: [] for mode in Integrity}
    decode = sessions["decode"]
    for index in range(args.warmup + args.rounds):
        for mode in rng.sample(list(Integrity), len(Integrity)):
            prompt = [rng.randrange(1000, 40000) for _ in range(args.tokens)]
            prefill = sessions[mode]
            ticket = Ticket(
                room=new_room(),
                attempt=0,
                prefill=Placement(prefill.peer.incarnation),
                decode=Placement(decode.peer.incarnation),
                budget_s=60,
            )
            sampling = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
            submit = Submit(Request(request_id=f"{mode}{index}", prompt=prompt, sampling=sampling), ticket)
            start = time.perf_counter()
            for session in (prefill, decode):
                session.send(submit)
            first = 0.0
            while True:
                output = await asyncio.wait_for(front.outputs.get(), 60)
                assert output.error is None, output.error
                first = first or time.perf_counter() - start
                if output.finish is not None:
                    break
            if index >= args.warmup:
                times[mode].append(first * 1e3)
    await node.close()
    await registry.aclose()
    return times


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
    segue = [sys.executable, "-m", "segue.cli.main"]
    shared += ["--registry", f"http://127.0.0.1:{PORT}"]
    words = [
        [*segue, "prefill", "--integrity", mode, "--served-model-name", mode, *shared] for mode in Integrity
    ]
    words.append([*segue, "decode", *shared])
    times = asyncio.run(measure(args, words))
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()
    rows = {
        mode: {
            "ttft_p50_ms": round(statistics.median(values), 2),
            "ttft_p90_ms": round(quantile(values, 0.9), 2),
            **(compare(times, mode) if mode != "off" else {}),
        }
        for mode, values in times.items()
    }
    print(f"{args.rounds} rounds of {args.tokens} tokens over {args.transport}, commit {commit}")
    for name, row in (*alone.items(), *rows.items()):
        print(f"{name:>18}  " + "   ".join(f"{key} {value:,}" for key, value in row.items()))
    if args.json:
        result = {
            "command": sys.argv,
            "commit": commit,
            "rounds": args.rounds,
            "tokens": args.tokens,
            "transport": args.transport,
            "hash_alone": alone,
            "rows": rows,
            "raw_ms": times,
        }
        args.json.write_text(json.dumps(result, indent=1))


def start(words: list[str]) -> subprocess.Popen[str]:
    """One process, once it says that it is ready."""
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("ready"), f"{words[3]} did not start: {line!r}"
    return process


if __name__ == "__main__":
    main()
