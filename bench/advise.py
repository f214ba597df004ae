"""Compare the predictions of `segue advise` with the measurements of `segue bench`, on this machine, in one
run.

    .venv/bin/python bench/advise.py --json bench/results/advise.json

1 prefill + 1 decode, 1 and 2 unified instances of one thread each serve the default model, two mixes of
lengths each under two loads. The engine's forwards are timed before each deployment and after the last; the
prediction takes all of them. Prediction and measurement have the same lengths and moments of arrival.
`--again FILE` calculates anew for what an earlier run has measured.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from instances import end, start
from recorded import commit
from segue.cli.commands.models import model_size
from segue.engine.model_names import DEFAULT_MODEL
from segue.engine.models.model_store import resolve_model
from segue.kv.transport.host_speed import Speed
from segue.kv.transport.host_speed import measure as measure_transport
from segue_lab.advise.advice import Expected, Question, expect
from segue_lab.advise.costs import TimedForward, fit, fit_error
from segue_lab.advise.queues import HandOffWire, WorkerKind, WorkerSplit
from segue_lab.advise.workload import AskedLoad, LatencyTargets, Lengths
from segue_lab.commands.advise_measure import measure
from serve import SEGUE, machine, served

FLEETS = {
    "1 + 1": WorkerSplit(prefill=1, decode=1),
    "1 unified": WorkerSplit(unified=1),
    "2 unified": WorkerSplit(unified=2),
}
#: Tokens of a prompt and of an output.
MIXES = ((128, 64), (512, 32))
KV_GIB = 1.0
THREADS = ["--threads-per-worker", "1", "--kv-gib", f"{KV_GIB:g}"]
PREDICTED = {
    "median_ttft_ms": "ttft_p50_s",
    "p99_ttft_ms": "ttft_p99_s",
    "median_itl_ms": "itl_p50_s",
    "p99_itl_ms": "itl_p99_s",
}


@contextlib.contextmanager
def fleet(split: WorkerSplit, port: int) -> Iterator[str]:
    """A deployment of `split`; gives its URL."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        secret = Path(folder, "secret")
        secret.write_text(os.urandom(16).hex())
        flags = [*THREADS, "--bootstrap-port", str(port), "--secret-file", str(secret)]
        if not split.unified:
            flags += ["--prefill", str(split.prefill), "--decode", str(split.decode)]
        url = stack.enter_context(served([*flags, "--unified"] if split.unified else flags))
        registry = ["--registry", f"http://127.0.0.1:{port}", "--secret-file", str(secret)]
        for _ in range(split.unified - 1):
            more = start(["unified", "--model", DEFAULT_MODEL, *registry, *THREADS, "--log-level", "warning"])
            stack.callback(end, [more])
        yield url


def bench(url: str, mix: tuple[int, int], load: list[str], requests: int, seed: int) -> dict[str, object]:
    """The report of `segue bench`."""
    lengths = ["--input-tokens", str(mix[0]), "--output-tokens", str(mix[1])]
    command = [
        *SEGUE,
        "bench",
        url,
        *lengths,
        *load,
        "--requests",
        str(requests),
        "--seed",
        str(seed),
        "--json",
        "-",
    ]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    report: dict[str, object] = json.loads(done.stdout)
    return report


def row(one: Mapping[str, Any], said: Expected) -> dict[str, object]:
    """One line of the table: predicted and measured, and the error of each."""
    report = one["report"]
    pairs = {"request_throughput": (said.requests_per_s, report["request_throughput"])}
    for key, field in PREDICTED.items():
        pairs[key] = (getattr(said, field) * 1e3, report[key])
    load = f"rate {one['rate']:g}" if one["rate"] else f"{one['concurrency']} at a time"
    told = "  ".join(f"{key} {p:.4g}/{s:.4g} ({p / s - 1:+.0%})" for key, (p, s) in pairs.items())
    print(f"{one['fleet']}, {one['prompt']} in {one['output']} out, {load}: {told}", flush=True)
    errors = {k: {"predicted": p, "measured": s, "error": p / s - 1} for k, (p, s) in pairs.items()}
    return {key: one[key] for key in ("fleet", "prompt", "output", "rate", "concurrency")} | errors


def measured(args: argparse.Namespace) -> dict[str, Any]:
    """Forwards, the transport, and what `segue bench` reports of each deployment under each load."""
    record: dict[str, Any] = {"commit": commit(), "machine": machine(), "load_average": [os.getloadavg()[0]]}
    folder = resolve_model(DEFAULT_MODEL)
    size = model_size(folder, "bfloat16")
    assert size is not None
    forwards: list[list[TimedForward]] = []
    runs: list[dict[str, Any]] = []
    for name, split in FLEETS.items():
        forwards.append(measure(folder, "bfloat16", 1, args.rounds))
        with fleet(split, args.port) as url:
            for mix, rate in zip(MIXES, args.rates, strict=True):
                for load in ({"concurrency": args.concurrency}, {"rate": rate}):
                    seed = len(runs)  # the same prompts again would be in the prefix cache
                    one: dict[str, Any] = {"fleet": name, "prompt": mix[0], "output": mix[1], "seed": seed}
                    one |= {"rate": None, "concurrency": None} | load
                    flags = [str(word) for key, value in load.items() for word in (f"--{key}", value)]
                    runs.append(one | {"report": bench(url, mix, flags, args.requests, seed)})
                    print(f"measured {name} {mix} {shlex.join(flags)}", flush=True)
    forwards.append(measure(folder, "bfloat16", 1, args.rounds))
    speed = measure_transport("shm")
    assert isinstance(speed, Speed)
    record["load_average"].append(os.getloadavg()[0])
    return record | {
        "requests": args.requests,
        "kv_token_bytes": size.token_bytes,
        "transport": msgspec.to_builtins(speed),
        "forwards": msgspec.to_builtins(forwards),
        "runs": runs,
    }


def predicted(record: Mapping[str, Any]) -> dict[str, object]:
    """The rows of the table, and how well the forwards themselves are met."""
    forwards = msgspec.convert(record["forwards"], list[list[TimedForward]])
    timed = [
        TimedForward(work=each[0].work, samples=tuple(s for one in each for s in one.samples))
        for each in zip(*forwards, strict=True)
    ]
    steps = fit(timed)
    speed = msgspec.convert(record["transport"], Speed)
    wire = HandOffWire(name="shm", bytes_per_s=speed.gb_per_s * 1e9, latency_s=speed.page_us * 1e-6)
    token_bytes = record["kv_token_bytes"]
    kind = WorkerKind(
        steps=steps, chunk_tokens=512, max_batch=64, kv_tokens=int(KV_GIB * 2**30 / token_bytes)
    )
    rows = []
    for one in record["runs"]:
        load = AskedLoad(
            prompt=Lengths.parse(str(one["prompt"]), "prompt"),
            output=Lengths.parse(str(one["output"]), "output"),
            rate=one["rate"],
            concurrency=one["concurrency"],
        )
        question = Question(
            kind=kind,
            load=load,
            targets=LatencyTargets(),
            wire=wire,
            kv_token_bytes=token_bytes,
            seed=one["seed"],
        )
        rows.append(row(one, expect(question, FLEETS[one["fleet"]], record["requests"])))
    turns = [[one.seconds for one in each] for each in zip(*forwards, strict=True)]
    drift = [max(each) / min(each) for each in turns]
    error = fit_error(steps, timed)
    print(
        f"the calculation misses a forward by at most {error:.0%}; in its slowest turn a forward took "
        f"{min(drift):.2f} to {max(drift):.2f} times as long as in its fastest"
    )
    return {"rows": rows, "steps": msgspec.to_builtins(steps), "fit_error": error, "turns": drift}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--rates", type=float, nargs=2, default=(0.6, 0.3), help="of each mix, requests/s")
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--port", type=int, default=18998, help="of the registry")
    parser.add_argument("--rounds", type=int, default=4, help="of timing forwards, each turn")
    parser.add_argument("--again", type=Path, help="calculate anew for what an earlier run has measured")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    record = measured(args) if args.again is None else json.loads(args.again.read_text())
    record |= {"predicted_at": commit(), **predicted(record)}
    if args.json:
        args.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
