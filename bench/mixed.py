"""Short and long prompts at once: always handed over, only the long ones, and never.

    .venv/bin/python bench/mixed.py [--turns 2] [--requests 16] [--rate 0.3]

Each mode has a deployment of its own with the same requests, at Poisson arrivals; every other prompt is
short. The modes take turns, so that other work on the machine meets all of them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from contextlib import ExitStack
from pathlib import Path

from recorded import commit, quantile
from segue.cli.bench.stats import RequestTimes
from segue.cli.commands.bench import Bench
from segue.cli.commands.bench_flags import MAX_CONNECTIONS, BenchConfig
from serve import ROOT, machine, served

MODES = {"always": 0, "long": 64, "never": 2**20, "measured": -1}
LENGTHS = {"short": 20, "long": 1500}


async def load(
    benches: dict[str, Bench], requests: int, rate: float, turn: int
) -> dict[str, list[RequestTimes]]:
    """One turn: half of the requests short, half long, at Poisson arrivals of `rate` a second."""
    arrivals = random.Random(f"turn {turn}")
    due: dict[str, list[tuple[int, float | None]]] = {name: [] for name in benches}
    at = 0.0
    for index in range(requests):
        at += arrivals.expovariate(rate)
        due[list(benches)[index % 2]].append((turn * requests + index, at))
    for bench in benches.values():
        bench.samples = []
    await asyncio.gather(
        *(bench.load(due[name], MAX_CONNECTIONS, lambda: None) for name, bench in benches.items())
    )
    return {name: bench.samples for name, bench in benches.items()}


async def prepared(url: str, output_tokens: int) -> dict[str, Bench]:
    """The two kinds of requests to a server, which has served each once."""
    benches = {}
    for name, tokens in LENGTHS.items():
        bench = Bench(BenchConfig(url=url, input_tokens=tokens, output_tokens=output_tokens))
        await bench.prepare()
        await bench.load(((index, None) for index in (-1, -2)), 1, lambda: None)
        benches[name] = bench
    return benches


def figures(samples: list[RequestTimes]) -> dict[str, float]:
    """In milliseconds."""
    good = [s for s in samples if not s.error]
    gaps = [b - a for s in good for a, b in zip(s.token_s, s.token_s[1:], strict=False)]
    first = [s.token_s[0] for s in good]
    times = {"ttft": first, "itl": gaps}
    found = {f"{name}_p{q}": 1e3 * quantile(times[name], q / 100) for name in times for q in (50, 99)}
    return {"requests": len(good), "failed": len(samples) - len(good), **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES)[:3])
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--rate", type=float, default=0.3)
    parser.add_argument("--output-tokens", type=int, default=32)
    parser.add_argument("--json", type=Path, default=ROOT / "bench" / "results" / "mixed.json")
    args = parser.parse_args()
    report: dict[str, object] = {"commit": commit(), "machine": machine()}
    samples: dict[str, dict[str, list[RequestTimes]]] = {}
    with ExitStack() as stack:
        urls = {
            mode: stack.enter_context(
                served(["--kv-gib", "0.2", f"--max-local-prefill-length={MODES[mode]}"])
            )
            for mode in args.modes
        }
        made = {mode: asyncio.run(prepared(url, args.output_tokens)) for mode, url in urls.items()}
        for turn in range(args.turns):
            for mode in args.modes[turn % len(args.modes) :] + args.modes[: turn % len(args.modes)]:
                found = asyncio.run(load(made[mode], args.requests, args.rate, turn))
                for name, more in found.items():
                    samples.setdefault(mode, {}).setdefault(name, []).extend(more)
                print(f"turn {turn}: {mode}", {k: figures(v) for k, v in found.items()}, flush=True)
    report["modes"] = {
        mode: {
            **{name: figures(s) for name, s in kinds.items()},
            "all": figures([s for more in kinds.values() for s in more]),
        }
        for mode, kinds in samples.items()
    }
    args.json.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report["modes"], indent=1))


if __name__ == "__main__":
    main()
