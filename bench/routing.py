"""The cost of our frontend and of other routers, on the same stub instances.

    unshare -n .venv/bin/python bench/routing.py [--rounds 5] [--connections 32] [--requests 2000] \\
        [--tokens 20 220] [--first 100] [--json FILE]

In turns: `segue frontend`, sglang-router and vllm-router (ROUTERS_VENV says where; `make routers`), each a
process of its own in front of the same two stub instances of bench/routing_stub.py, over loopback alone. Our
frontend gets token ids. The others read no prompt, and one of them refuses ids: they get a text with as many
bytes. Of each, per round:

- CPU of its process for a request that is not streamed and asks for one token;
- CPU for a streamed chunk: the slope between streams of two lengths, all at once, a chunk each 8 ms;
- the time to the first token, less that of the stub's own door, asked in turns by one client.

Our frontend makes text of the tokens and the routers do not, so what that alone costs is measured beside it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fcntl
import json
import multiprocessing
import os
import signal
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from frontend import one
from recorded import ROOT, commit, quantile
from routing_stub import TOKEN, serve
from segue.server.frontend.detokenize import Detokenizer
from segue.server.frontend.tokenizer import ModelTokenizer
from serve import SEGUE, machine

ROUTERS = Path(os.environ.get("ROUTERS_VENV") or ROOT / ".venv" / "routers") / "bin"
PATH = "/v1/completions"
IDS = {"model": "tiny", "prompt": [TOKEN] * 64, "temperature": 0, "return_token_ids": True}
TEXT = IDS | {"prompt": " " * (len(json.dumps(IDS["prompt"])) - 2)}
READY_S = 30.0


def commands(folder: str, registry: int, prefill: int, decode: int) -> dict[str, tuple[int, list[str]]]:
    """By name: the port each one listens at, and what starts it."""
    doors = f"http://127.0.0.1:{prefill}", f"http://127.0.0.1:{decode}"
    ours, sglang, vllm, *metrics = _free_ports(5)
    return {
        "segue": (
            ours,
            [
                *(*SEGUE, "frontend", "--model", folder, "--served-model-name", "tiny"),
                *("--registry", f"http://127.0.0.1:{registry}", "--port", str(ours)),
                *("--log-level", "warning"),
            ],
        ),
        "sglang-router": (
            sglang,
            [
                *(str(ROUTERS / "python"), "-m", "sglang_router.launch_router", "--pd-disaggregation"),
                *("--prefill", doors[0], str(registry), "--decode", doors[1], "--host", "127.0.0.1"),
                *("--port", str(sglang), "--prometheus-port", str(metrics[0])),
                *("--policy", "round_robin", "--log-level", "warn"),
            ],
        ),
        "vllm-router": (
            vllm,
            [
                *(str(ROUTERS / "vllm-router"), "--vllm-pd-disaggregation", "--policy", "round_robin"),
                *("--prefill", doors[0], "--decode", doors[1], "--host", "127.0.0.1", "--port", str(vllm)),
                *("--prometheus-port", str(metrics[1]), "--log-level", "warning"),
                *("--worker-startup-check-interval", "1"),
            ],
        ),
    }


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


@contextlib.contextmanager
def running(name: str, words: list[str], folder: str) -> Iterator[subprocess.Popen[bytes]]:
    """The process, from its start to its end."""
    log = Path(folder) / f"{name}.log"
    with log.open("w") as out, subprocess.Popen(words, stdout=out, stderr=out) as process:
        try:
            yield process
        except BaseException:
            print(f"{name}: {log.read_text()[-2000:]}", file=sys.stderr)
            raise
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


def cpu_s(pid: int) -> float:
    """CPU of the process `pid`, all its threads, and of its children: seconds, exact to a microsecond."""
    own = time.clock_gettime((~pid << 3) | 2)  # the clock of another process, as clock_getcpuclockid makes it
    children: list[str] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        children += (task / "children").read_text().split()
    return own + sum(cpu_s(int(child)) for child in children)


async def answering(process: subprocess.Popen[bytes], port: int, base: dict[str, Any]) -> None:
    """Wait until a whole request through `port` succeeds."""
    async with asyncio.timeout(READY_S):
        while True:
            if process.poll() is not None:
                raise SystemExit("it has ended")
            try:
                await one(port, base | {"max_tokens": 1}, 1, PATH)
                return
            except (OSError, AssertionError, asyncio.IncompleteReadError):
                await asyncio.sleep(0.2)


async def costs(args: argparse.Namespace, pid: int, port: int, base: dict[str, Any]) -> dict[str, float]:
    """Microseconds of CPU for a request and for a chunk."""

    async def spent(times: int, **more: Any) -> tuple[float, int]:
        before = cpu_s(pid)
        body = base | more
        events = await asyncio.gather(*(one(port, body, times, PATH) for _ in range(args.connections)))
        return (cpu_s(pid) - before) * 1e6, sum(events)

    each = max(1, args.requests // args.connections)
    await spent(2, max_tokens=1)
    request_us, _ = await spent(each, max_tokens=1)
    (short_us, short), (long_us, long) = [
        await spent(1, max_tokens=tokens, stream=True, ignore_eos=True) for tokens in args.tokens
    ]
    assert long - short == args.connections * (args.tokens[1] - args.tokens[0]), (short, long)
    return {
        "request_us": request_us / (each * args.connections),
        "chunk_us": (long_us - short_us) / (long - short),
    }


async def first_tokens(args: argparse.Namespace, port: int, direct: int, base: dict[str, Any]) -> list[float]:
    """Milliseconds to the first token by `port` less those by the door `direct`, of neighbours."""
    raw = json.dumps(base | {"max_tokens": 2, "stream": True, "ignore_eos": True}).encode()
    head = f"POST {PATH} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    head += f"content-length: {len(raw)}\r\n\r\n"
    both = [await asyncio.open_connection("127.0.0.1", where) for where in (port, direct)]

    async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> float:
        began = time.perf_counter()
        writer.write(head.encode() + raw)
        await reader.readuntil(b"data: ")
        took = time.perf_counter() - began
        await reader.readuntil(b"[DONE]")
        await reader.readuntil(b"0\r\n\r\n")
        return took * 1e3

    found = []
    for number in range(args.first + 5):
        order = both if number % 2 else both[::-1]
        took = [await ask(*each) for each in order]
        found.append(took[0] - took[1] if number % 2 else took[1] - took[0])
    for _, writer in both:
        writer.close()
    return found[5:]


def detokenizing_us(folder: str, tokens: int) -> float:
    """CPU microseconds of one token's way to text, alone."""
    detokenizer, count = Detokenizer(ModelTokenizer.load(Path(folder))), 20 * tokens
    began = time.process_time()
    for _ in range(count):
        detokenizer.feed([TOKEN])
    return (time.process_time() - began) / count * 1e6


def measure(args: argparse.Namespace) -> dict[str, Any]:
    from frontend_rig import make_tokenizer

    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        make_tokenizer().save_pretrained(folder)
        config = {"model_type": "llama", "max_position_embeddings": 4096, "vocab_size": 330}
        (Path(folder) / "config.json").write_text(json.dumps(config))
        (Path(folder) / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")
        ours, theirs = spawn.Pipe()
        stub = spawn.Process(target=serve, args=(theirs,))
        stub.start()
        theirs.close()  # so that its end is ours
        stack.callback(stub.join, 10)
        stack.callback(ours.send, "stop")
        registry, prefill, decode = ours.recv()
        servers = {}
        for name, (port, words) in commands(folder, registry, prefill, decode).items():
            servers[name] = stack.enter_context(running(name, words, folder)), port
        bodies = {name: IDS if name == "segue" else TEXT for name in servers}
        for name, (process, port) in servers.items():
            asyncio.run(answering(process, port, bodies[name]))
        rounds: dict[str, list[dict[str, float]]] = {name: [] for name in servers}
        first: dict[str, list[float]] = {name: [] for name in servers}
        text = []
        for number in range(args.rounds):
            names = list(servers)[number % 3 :] + list(servers)[: number % 3]
            for name in names:
                process, port = servers[name]
                rounds[name].append(asyncio.run(costs(args, process.pid, port, bodies[name])))
                first[name] += asyncio.run(first_tokens(args, port, decode, bodies[name]))
            text.append(detokenizing_us(folder, args.tokens[1]))
    return {"rounds": rounds, "first_token_ms": first, "detokenizing_us": text}


def _quartiles(values: list[float]) -> dict[str, float]:
    return {
        "low": quantile(values, 0.25),
        "median": statistics.median(values),
        "high": quantile(values, 0.75),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--tokens", type=int, nargs=2, default=[20, 220])
    parser.add_argument("--first", type=int, default=100)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with socket.socket() as any_socket:  # a new network has its loopback down
        fcntl.ioctl(any_socket, 0x8914, struct.pack("16sh", b"lo", 1 | 64))
    load = os.getloadavg()
    found = measure(args)
    summary: dict[str, Any] = {}
    for name, rounds in found["rounds"].items():
        summary[name] = {key: _quartiles([r[key] for r in rounds]) for key in ("request_us", "chunk_us")}
        summary[name]["first_token_ms"] = _quartiles(found["first_token_ms"][name])
        line = (
            f"{key} {s['median']:.2f} ({s['low']:.2f} to {s['high']:.2f})" for key, s in summary[name].items()
        )
        print(f"{name}: {', '.join(line)}")
    summary["detokenizing_us"] = _quartiles(found["detokenizing_us"])
    print(f"of a chunk of ours its text: {summary['detokenizing_us']['median']:.2f} µs")
    if args.json:
        told = {
            "commit": commit(),
            "machine": machine(),
            "load": [load, os.getloadavg()],
            "args": sys.argv[1:],
        }
        args.json.write_text(json.dumps({**told, "summary": summary, **found}, indent=1))


if __name__ == "__main__":
    main()
