"""The cost of `segue bench` itself: its CPU time per received chunk, against a server that does nothing.

    .venv/bin/python bench/serve_client.py [--chunks 200] [--requests 200]

The server is a bare asyncio protocol in a process of its own that sends ready-made chunks, one write
each. The client's figure is process CPU time over received chunks, its request's share included.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
from typing import cast

import uvloop

from segue.cli.commands.bench import Bench
from segue.cli.commands.bench_flags import BenchConfig

EVENT = b'data: {"id":"cmpl-0123456789abcdef","object":"text_completion","created":1700000000,"model":"m",'
EVENT += b'"choices":[{"index":0,"text":" word","logprobs":null,"finish_reason":null}]}\n\n'
MODELS = b'{"data":[{"id":"m","owned_by":"nobody"}]}'


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


class Bare(asyncio.Protocol):
    """Answers any POST to a completion with `chunks` events, paced by `gap_s`."""

    def __init__(self, chunks: int, gap_s: float) -> None:
        self.chunks, self.gap_s = chunks, gap_s
        self.buffer = b""
        self.task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop's is no subclass of it

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        head, separator, body = self.buffer.partition(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0] or 0)
        if not separator or len(body) < length:
            return
        self.buffer = b""
        if head.startswith(b"GET"):
            self.transport.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(MODELS), MODELS))
        elif b"/tokenize" in head.split(b"\r\n")[0]:
            self.transport.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
        else:
            self.task = asyncio.get_running_loop().create_task(self.stream())

    async def stream(self) -> None:
        self.transport.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for _ in range(self.chunks):
            self.transport.write(chunk(EVENT))
            await asyncio.sleep(self.gap_s)
        self.transport.write(chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")


async def serve(chunks: int, gap_s: float) -> None:
    server = await asyncio.get_running_loop().create_server(lambda: Bare(chunks, gap_s), "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    # Ends with the pipe that holds the process: no port to guess, nobody left behind.
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    server.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--chunks", type=int, default=200)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--gap-ms", type=float, default=2.0)
    parser.add_argument("--server", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.server:
        uvloop.run(serve(args.chunks, args.gap_ms / 1e3))
        return
    command = [
        sys.executable,
        __file__,
        "--server",
        "--chunks",
        str(args.chunks),
        "--gap-ms",
        str(args.gap_ms),
    ]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        url = f"http://127.0.0.1:{int(process.stdout.readline())}"
        config = BenchConfig(
            url=url, requests=args.requests, concurrency=args.concurrency, output_tokens=args.chunks
        )
        report = uvloop.run(Bench(config).run())
        process.stdin.close()
    client = report["client"]
    assert isinstance(client, dict)
    print(
        f"{report['completed']} requests, {report['total_output_tokens']} chunks, {args.concurrency} at once"
    )
    print(
        f"client: {client['cpu_us_per_event']:.1f} us of CPU per chunk, {client['cpu_share']:.1%} of a core"
    )


if __name__ == "__main__":
    main()
