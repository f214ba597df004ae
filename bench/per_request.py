"""Costs of one request, of this tree and of another commit's, in turns.

    python bench/per_request.py --other /path/to/another/tree [--rounds 3] [--requests 200] [--save FILE]

Starts a prefill instance (with the registry), a decode instance and a frontend of one tree, then of the other
one (`git worktree add` makes it), again and again, in a network namespace of their own. A random two-layer
model, so that a request costs little else than its messages. One request at a time, in three ways: through
the frontend (`paired`), the two legs of SGLang's style at once (`sglang`), vLLM's two legs one after the
other (`vllm`). Reported for each way and tree, as medians over the rounds:

    ms          from sending the request to its first token, median of a round
    segments    of TCP with data, from the kernel's counter, without those of a client's own connection
    registry    of these, on connections to the registry
    CPU, ms     of all processes

Segments and CPU of an idle deployment are subtracted.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import from_tests  # noqa: F401
import httpx2 as httpx
import tiny_model

from recorded import ROOT, commit

REGISTRY, PREFILL, DECODE, FRONTEND = 18998, 18101, 18111, 18103
DOORS = (PREFILL, DECODE, FRONTEND)
WARM_UP = 30
IDLE_S = 5.0
_TICKS = os.sysconf("SC_CLK_TCK")


def part(tree: Path, model: Path, name: str, *words: str) -> subprocess.Popen[str]:
    """A started part of a deployment, once it is ready."""
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "segue.cli.main",
            name,
            *words,
            *(("--model", str(model)) if name != "frontend" else ()),
        ],
        env=os.environ | {"PYTHONPATH": str(tree / "src"), "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    if not process.stdout.readline().startswith("ready "):
        raise SystemExit(f"segue {name} of {tree} did not start; run it by hand to see why")
    return process


@contextmanager
def deployment(tree: Path, model: Path) -> Iterator[list[int]]:
    """The process ids of the three parts."""
    engine = ["--dtype", "float32", "--kv-gib", "0.05", "--threads-per-worker", "1", "--transport", "shm"]
    engine += ["--served-model-name", "tiny"]
    registry = ["--registry", f"http://127.0.0.1:{REGISTRY}"]
    words = {
        "prefill": [*engine, "--http-port", str(PREFILL), "--bootstrap-port", str(REGISTRY)],
        "decode": [*engine, "--http-port", str(DECODE), *registry],
        "frontend": ["--port", str(FRONTEND), *registry],
    }
    with ExitStack() as parts:
        pids = []
        for name, more in words.items():
            process = part(tree, model, name, *more)
            parts.callback(process.wait, 60)
            parts.callback(process.send_signal, signal.SIGTERM)
            pids.append(process.pid)
        yield pids


def counted(pids: list[int]) -> tuple[float, float, float]:
    """Since the start: segments in all, those of the registry's connections, CPU in ms."""
    names, values = (
        line.split()
        for line in Path("/proc/self/net/netstat").read_text().splitlines()
        if line.startswith("TcpExt")
    )
    sent = int(dict(zip(names, values, strict=True))["TCPOrigDataSent"])
    found = {"registry": 0, "doors": 0}
    connections = subprocess.run(["ss", "-tniHO"], capture_output=True, text=True, check=True).stdout
    for line in connections.splitlines():
        fields = line.split()
        ports = {int(address.rpartition(":")[2]) for address in fields[3:5]}
        out = next((int(f.partition(":")[2]) for f in fields if f.startswith("data_segs_out:")), 0)
        if REGISTRY in ports:
            found["registry"] += out
        elif ports & set(DOORS):
            found["doors"] += out
    cpu = 0.0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        cpu += 1e3 * (int(fields[11]) + int(fields[12])) / _TICKS
    return sent - found["doors"], found["registry"], cpu


def ways(client: httpx.Client, legs: ThreadPoolExecutor) -> dict[str, Callable[[list[int]], None]]:
    """How one request is asked; each returns when its first token is there."""

    def post(port: int, path: str, body: dict[str, Any]) -> dict[str, Any]:
        answer = client.post(f"http://127.0.0.1:{port}{path}", json=body)
        if answer.status_code != 200:
            raise SystemExit(f"{answer.status_code} {answer.text[:500]}")
        return dict(answer.json())

    def paired(prompt: list[int]) -> None:
        post(FRONTEND, "/v1/completions", {"model": "tiny", "prompt": prompt, "max_tokens": 1})

    def sglang(prompt: list[int]) -> None:
        room = random.randrange(1, 2**63)
        where = {"bootstrap_host": "127.0.0.1", "bootstrap_port": REGISTRY, "bootstrap_room": room}
        body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 1}, **where}
        other = legs.submit(post, PREFILL, "/generate", body)
        post(DECODE, "/generate", body)
        other.result()

    def vllm(prompt: list[int]) -> None:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 1}
        first = post(PREFILL, "/v1/completions", {**body, "kv_transfer_params": {"do_remote_decode": True}})
        post(DECODE, "/v1/completions", {**body, "kv_transfer_params": first["kv_transfer_params"]})

    return {"paired": paired, "sglang": sglang, "vllm": vllm}


def round_of(tree: Path, model: Path, requests: int) -> dict[str, dict[str, float]]:
    rng = random.Random(time.monotonic_ns())
    found = {}
    with (
        deployment(tree, model) as pids,
        httpx.Client(timeout=60) as client,
        ThreadPoolExecutor(1) as legs,
    ):
        for name, ask in ways(client, legs).items():
            times: list[float] = []
            for _ in range(WARM_UP):
                ask([rng.randrange(256) for _ in range(64)])
            first = counted(pids)
            time.sleep(IDLE_S)  # the measurement: what an idle deployment sends
            before = counted(pids)
            began = time.monotonic()
            for _ in range(requests):
                at = time.perf_counter()
                ask([rng.randrange(256) for _ in range(64)])
                times.append(1e3 * (time.perf_counter() - at))
            idle = (time.monotonic() - began) / IDLE_S
            after = counted(pids)
            used = [(c - b - idle * (b - a)) / requests for a, b, c in zip(first, before, after, strict=True)]
            found[name] = dict(zip(("segments", "registry", "cpu_ms"), used, strict=True))
            found[name]["ms"] = statistics.median(times)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--other", type=Path, required=True, help="a tree of another commit")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--save", type=Path, help="write all of it as JSON")
    args = parser.parse_args()
    if "SEGUE_ALONE" not in os.environ:
        os.environ["SEGUE_ALONE"] = "1"
        os.execvp("unshare", ["unshare", "-rn", sys.executable, *sys.argv])
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    trees = {"other": args.other, "this": ROOT}
    rounds: dict[str, list[dict[str, dict[str, float]]]] = {name: [] for name in trees}
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_model.save(Path(folder))
        for _ in range(args.rounds):
            for name, tree in trees.items():
                rounds[name].append(round_of(tree, model, args.requests))
    print("| way | figure | other | this | ratio, by round |\n|---|---|---|---|---|")
    for way in rounds["this"][0]:
        for figure in ("ms", "segments", "registry", "cpu_ms"):
            both = [[r[way][figure] for r in rounds[name]] for name in trees]
            ratios = ", ".join(f"{b / a:.2f}" if a > 0.05 else "-" for a, b in zip(*both, strict=True))
            middle = " | ".join(f"{statistics.median(values):.2f}" for values in both)
            print(f"| {way} | {figure} | {middle} | {ratios} |")
    if args.save:
        report = {"commit": commit(), "args": sys.argv[1:], "rounds": rounds}
        args.save.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
