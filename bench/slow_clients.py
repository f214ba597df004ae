"""The effect of 2,000 slow or silent connections at the public port on 16 clients that stream.

    .venv/bin/python bench/slow_clients.py [--connections 2000] [--streams 16] [--rounds 4] [--json FILE]

The server (guard, door, detokenizer, SSE, uvloop) is a process of its own with a backend that gives a token
every 10 ms; the slow clients are another process. They come from 20 loopback addresses: a third says nothing,
a third sends its head by a byte a second, a third its body; whoever is cut off comes again. Rounds without
and with them alternate in one run, and their order changes, so the machine's other work falls on both.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from scripted_frontend import serve
from segue.engine.request import Request
from segue.server.frontend.http_server import HttpServer
from segue.server.observe.integrity_report import process_facts

ROOT = Path(__file__).resolve().parents[1]

TOKEN_S = 0.01
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n"


class Pace:
    """A token every `TOKEN_S` seconds, counted from each request's first."""

    def __init__(self) -> None:
        self._began: dict[str, float] = {}

    async def __call__(self, request: Request, index: int) -> None:
        now = asyncio.get_running_loop().time()
        began = self._began.setdefault(request.request_id, now)
        if index == request.sampling.max_tokens - 1:
            del self._began[request.request_id]
        await asyncio.sleep(max(0.0, began + (index + 1) * TOKEN_S - now))


def server(pipe: Connection, folder: str) -> None:
    """Serve until told to stop; answer `state` with memory, CPU seconds, connections and what was counted."""

    def state(http: HttpServer) -> dict[str, float]:
        facts = {"rss_mib": process_facts()[2] / 2**20, "cpu_s": time.process_time()}
        return facts | {"open": http.pending + http.busy, **http.counts}

    serve(pipe, folder, Pace(), state)


def slow_clients(pipe: Any, port: int, count: int) -> None:
    """Hold `count` slow connections while told so; `begin` answers when all are there, `end` when none is."""

    async def one(number: int, there: asyncio.Semaphore) -> None:
        openings = (b"", HEAD + b"x: ", HEAD + b"content-length: 100000\r\n\r\n{")
        first = True
        while True:
            writer = None
            try:
                where = (f"127.0.1.{1 + number % 20}", 0)
                reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=where)
                writer.write(openings[number % 3])
                if first:
                    first = False
                    there.release()
                ended = asyncio.ensure_future(reader.read())
                while not ended.done():
                    await asyncio.wait({ended}, timeout=1.0)
                    if number % 3:
                        writer.write(b"y")
            except OSError:
                await asyncio.sleep(0.1)
            finally:
                if writer is not None:
                    writer.transport.abort()

    async def main() -> None:
        while await asyncio.to_thread(pipe.recv) == "begin":
            there = asyncio.Semaphore(0)
            tasks = [asyncio.create_task(one(number, there)) for number in range(count)]
            for _ in range(count):
                await there.acquire()
            pipe.send("there")
            await asyncio.to_thread(pipe.recv)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            pipe.send("gone")

    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    asyncio.run(main())


async def streams(port: int, count: int, requests: int, tokens: int) -> tuple[list[float], list[float]]:
    """First-token and inter-token times in milliseconds of `count` clients, each on its connection."""
    first_ms: list[float] = []
    gaps_ms: list[float] = []
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}], "max_tokens": tokens, "stream": True})
    raw = HEAD + f"content-length: {len(body)}\r\n\r\n{body}".encode()

    async def client() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(requests):
            last = begun = time.perf_counter()
            writer.write(raw)
            assert b" 200 " in await reader.readuntil(b"\r\n\r\n")
            while True:
                data = await reader.readuntil(b"\r\n")
                payload = await reader.readexactly(int(data, 16) + 2)
                now = time.perf_counter()
                if data == b"0\r\n":
                    break
                if b'"content"' in payload:
                    (first_ms if last == begun else gaps_ms).append(1e3 * (now - last))
                    last = now
        writer.close()

    await asyncio.gather(*(client() for _ in range(count)))
    return first_ms, gaps_ms


def spread(values: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(values, n=100)
    return {"p50": round(cuts[49], 3), "p90": round(cuts[89], 3), "p99": round(cuts[98], 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--connections", type=int, default=2000)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--requests", type=int, default=6, help="of each client in a round")
    parser.add_argument("--tokens", type=int, default=150)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    door, theirs = context.Pipe()
    crowd, crowds = context.Pipe()
    times: dict[bool, tuple[list[float], list[float]]] = {False: ([], []), True: ([], [])}
    states: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        processes = [context.Process(target=server, args=(theirs, folder))]
        processes[0].start()
        theirs.close()  # so that its end is ours
        port = door.recv()
        processes.append(context.Process(target=slow_clients, args=(crowds, port, args.connections)))
        processes[1].start()
        crowds.close()
        for process in processes:
            stack.callback(process.kill)

        def state(phase: str) -> None:
            door.send("state")
            states.append({"phase": phase, **door.recv()})

        asyncio.run(streams(port, args.streams, 1, args.tokens))
        state("warm")
        for number in range(2 * args.rounds):
            slow = number % 4 in (1, 2)
            if slow:
                crowd.send("begin")
                crowd.recv()
            state("with" if slow else "without")
            found = asyncio.run(streams(port, args.streams, args.requests, args.tokens))
            for kept, new in zip(times[slow], found, strict=True):
                kept.extend(new)
            state("with, at the end" if slow else "without, at the end")
            if slow:
                crowd.send("end")
                crowd.recv()
        crowd.send("stop")
        door.send("stop")
        for process in processes:
            process.join(10)
    result: dict[str, Any] = {}
    for index, name in enumerate(("first_token_ms", "inter_token_ms")):
        without, slow_ = spread(times[False][index]), spread(times[True][index])
        ratio = {key: round(slow_[key] / without[key], 3) for key in without}
        result[name] = {"without": without, "with": slow_, "ratio": ratio, "samples": len(times[True][index])}
        print(f"{name}: without {without}, with {args.connections} slow connections {slow_}: {ratio}")
    for entry in states:
        print(entry)
    if args.json:
        git = ["git", "rev-parse", "--short", "HEAD"]
        commit = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
        machine = {"cpus": os.cpu_count(), "load": os.getloadavg(), "python": platform.python_version()}
        report = {"commit": commit, "args": sys.argv[1:], "machine": machine, **result, "states": states}
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
