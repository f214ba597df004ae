"""CPU of the frontend per request and per streamed chunk, with a backend that costs nothing.

    .venv/bin/python bench/frontend.py [--streams 32] [--tokens 200] [--requests 2000] [--rounds 1] \\
        [--json FILE]

Two servers are measured in turn, one that keeps records of its requests (for `segue explain`, as a frontend
does) and one that keeps none; the ratio is the median of those of `--rounds` rounds.

The server (door, detokenizer, SSE, uvicorn, uvloop) runs in its own process and reports its own CPU time
over the run; the client is a plain socket reader. One output is one token, as from decode.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import platform
import statistics
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from scripted_frontend import NoRecords, serve
from segue.engine.request import Request
from segue.server.messages.records import Records

BODY = {"messages": [{"role": "user", "content": "the capital of France is Paris and the answer " * 8}]}


async def pace(request: Request, index: int) -> None:
    """Streams let others run between two tokens."""
    if index and request.sampling.ignore_eos:
        await asyncio.sleep(0)


def server(pipe: Connection, folder: str, kept: bool) -> None:
    """Serve until told to stop; answer `cpu` with this process's CPU seconds."""
    serve(pipe, folder, pace, lambda _: time.process_time(), Records() if kept else NoRecords())


async def one(port: int, body: dict[str, Any], times: int, path: str = "/v1/chat/completions") -> int:
    """`times` requests on one connection; the number of stream events read."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    raw = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n".encode()
    head += b"content-length: %d\r\n\r\n" % len(raw)
    events = 0
    for _ in range(times):
        writer.write(head + raw)
        header = await reader.readuntil(b"\r\n\r\n")
        assert b" 200 " in header, header
        if body.get("stream"):
            while True:
                data = await reader.readuntil(b"\r\n")
                payload = await reader.readexactly(int(data, 16) + 2)
                events += payload.count(b"data: ")
                if data == b"0\r\n":
                    break
        else:
            length = int(header.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            await reader.readexactly(length)
    writer.close()
    return events


async def measure(args: argparse.Namespace, pipe: Any, port: int) -> dict[str, float]:
    def cpu() -> float:
        pipe.send("cpu")
        return float(pipe.recv())

    plain = {**BODY, "max_tokens": 1, "temperature": 0}
    stream = {**BODY, "max_tokens": args.tokens, "stream": True, "ignore_eos": True}
    await asyncio.gather(*(one(port, plain, 20) for _ in range(8)))
    each = args.requests // args.streams
    before = cpu()
    await asyncio.gather(*(one(port, plain, each) for _ in range(args.streams)))
    request_us = (cpu() - before) / (each * args.streams) * 1e6
    before = cpu()
    events = sum(await asyncio.gather(*(one(port, stream, 4) for _ in range(args.streams))))
    stream_us = (cpu() - before) * 1e6
    chunk_us = (stream_us - 4 * args.streams * request_us) / events
    return {"request_us": request_us, "chunk_us": chunk_us, "chunks": events}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")
    runs: dict[bool, list[dict[str, float]]] = {True: [], False: []}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        servers = {}
        for kept in (True, False):
            ours, theirs = spawn.Pipe()
            process = spawn.Process(target=server, args=(theirs, folder, kept))
            process.start()
            theirs.close()  # so that its end is ours
            stack.callback(process.join, 10)
            stack.callback(ours.send, "stop")
            servers[kept] = ours, ours.recv()
        for number in range(args.rounds):
            for kept in (True, False) if number % 2 == 0 else (False, True):
                runs[kept].append(asyncio.run(measure(args, *servers[kept])))
    result, bare = (
        {key: statistics.median(r[key] for r in runs[kept]) for key in ("request_us", "chunk_us", "chunks")}
        for kept in (True, False)
    )
    ratios = {
        key: [a[key] / b[key] for a, b in zip(runs[True], runs[False], strict=True)]
        for key in ("request_us", "chunk_us")
    }
    for key, what in (("request_us", "whole request"), ("chunk_us", "streamed chunk")):
        low, middle, high = (f(ratios[key]) for f in (min, statistics.median, max))
        print(f"{what}, with records to without: {middle:.3f} ({low:.3f} to {high:.3f})")
    print(f"whole request, {args.streams} connections: {result['request_us']:.0f} µs CPU")
    chunk_us, chunks = result["chunk_us"], int(result["chunks"])
    print(f"streamed chunk, {args.streams} streams: {chunk_us:.1f} µs CPU ({chunks} chunks)")
    if args.json:
        machine = {"cpus": os.cpu_count(), "python": platform.python_version()}
        args.json.write_text(
            json.dumps(
                {**result, "without_records": bare, "ratios": ratios, **machine, "args": sys.argv[1:]},
                indent=1,
            )
        )


if __name__ == "__main__":
    main()
