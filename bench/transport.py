"""Wire speed of `shm` and `tcp` beside the plain copy that each cannot beat, in one run.

    python bench/transport.py [--rounds 100] [--tls] [--json bench/results/transport.json]

Two processes, one pool each (SmolLM2: 30 layers, 3 KV heads, 64 dims, bf16; pages of 16 tokens). The parent
writes 512 tokens (11.25 MiB) into the child's pool, at places chosen anew each time:

    memcpy   numpy copyto of as many contiguous bytes, from the parent's pool into the child's, one thread
    shm      the transport: pages in one run, and pages scattered on both sides
    socket   sendall of one contiguous buffer, recv_into of one buffer in the child, one byte back
    tcp      the transport: pages in one run, and pages scattered on both sides; with --tls encrypted

The ways take turns within each round, so that noise hits all alike; ratios are of medians. A time
is from the call of `write` to the caller's thread having been woken with `Written`.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import platform
import queue
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np

from segue.kv.ids import Incarnation, LeaderId, RankId
from segue.kv.layout.blocks import CopyBlock
from segue.kv.layout.content import whole_pages
from segue.kv.layout.spec import KVShape, PoolSpec
from segue.kv.session.tls import Tls, load_tls
from segue.kv.transport.base import Endpoint, EventSink, Transport, TransportEvent, Written
from segue.kv.transport.memory.pool_memory import Memory, allocate
from segue.kv.transport.options import TransportOptions
from segue.kv.transport.shm.shm_transport import ShmTransport
from segue.kv.transport.tcp.tcp_transport import TcpTransport

SHAPE = KVShape(layers=30, kv_heads=3, k_dim=64, v_dim=64, dtype="bfloat16", item_bytes=2)
TOKENS = 512
KINDS: tuple[type[Transport], ...] = (ShmTransport, TcpTransport)
EPOCH = 7
WRITER, READER = (RankId(LeaderId(Incarnation(digit * 32))) for digit in "ab")


class Hello(msgspec.Struct):
    """The child's message when it is ready."""

    endpoints: dict[str, Endpoint]
    pid: int
    fd: int
    port: int


def pool_spec(pages: int) -> PoolSpec:
    return PoolSpec(shape=SHAPE, pages=pages, page_tokens=16, layer_count=30, head_count=3)


def blocks_of(spec: PoolSpec, sources: list[int], targets: list[int]) -> list[CopyBlock]:
    """One block per pair of pages (or per run of neighbours): one row per (layer, K or V)."""
    page = spec.page_tokens * spec.k_token_bytes
    stride = spec.pages * page
    blocks, first = [], 0
    for i in range(1, len(sources) + 1):
        apart = i == len(sources) or sources[i] != sources[i - 1] + 1 or targets[i] != targets[i - 1] + 1
        if apart:
            rows = 2 * spec.layer_count
            blocks.append(
                CopyBlock(
                    sources[first] * page, targets[first] * page, rows, (i - first) * page, stride, stride
                )
            )
            first = i
    return blocks


def make(kind: type[Transport], sink: EventSink, me: RankId, tls: Tls | None) -> Transport:
    """One transport of a side."""
    return kind(sink, TransportOptions(me=me, tls=tls))


def child(pages: int, nbytes: int, tls: Tls | None) -> None:
    """The receiver: grants the epoch, and serves the plain socket copy."""
    memory = allocate(pool_spec(pages).nbytes)
    transports = {kind.name: make(kind, lambda _event: None, READER, tls) for kind in KINDS}
    listener = socket.create_server(("127.0.0.1", 0))
    fd = memory.only.fd
    assert fd is not None  # `allocate` gives a memfd
    hello = Hello(
        {name: t.register(memory) for name, t in transports.items()},
        os.getpid(),
        fd,
        listener.getsockname()[1],
    )
    for transport in transports.values():
        transport.grant(WRITER, EPOCH, whole_pages(pool_spec(pages), range(pages)))
    sys.stdout.write(msgspec.json.encode(hello).decode() + "\n")
    sys.stdout.flush()
    threading.Thread(target=serve_plain, args=(listener, memory, nbytes), daemon=True).start()
    sys.stdin.read()
    for transport in transports.values():
        transport.close()


def serve_plain(listener: socket.socket, memory: Memory, nbytes: int) -> None:
    sock, _ = listener.accept()
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    pool = memoryview(memory.buffer)
    while True:
        start = random.randrange(0, (len(pool) - nbytes) // 4096) * 4096
        target, got = pool[start : start + nbytes], 0
        while got < nbytes:
            moved = sock.recv_into(target[got:])
            if not moved:
                return
            got += moved
        sock.sendall(b"k")


class Bench:
    """The writer and its ways to move one hand-off."""

    def __init__(self, hello: Hello, spec: PoolSpec, nbytes: int, tls: Tls | None) -> None:
        self.spec, self.nbytes = spec, nbytes
        self.memory = allocate(spec.nbytes)
        self.source = np.frombuffer(self.memory.buffer, np.uint8)
        self.source[:] = np.random.default_rng(1).integers(0, 256, len(self.source), np.uint8)
        fd = os.open(f"/proc/{hello.pid}/fd/{hello.fd}", os.O_RDWR)
        theirs = mmap.mmap(fd, spec.nbytes, mmap.MAP_SHARED | mmap.MAP_POPULATE)
        os.close(fd)
        self.target = np.frombuffer(theirs, np.uint8)
        self.events: queue.SimpleQueue[TransportEvent] = queue.SimpleQueue()
        self.transports = {kind.name: make(kind, self.events.put, WRITER, tls) for kind in KINDS}
        for name, transport in self.transports.items():
            transport.register(self.memory)
            transport.connect(READER, hello.endpoints[name], 10)
        self.sock = socket.create_connection(("127.0.0.1", hello.port))
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def _place(self) -> int:
        return random.randrange(0, (len(self.source) - self.nbytes) // 4096) * 4096

    def memcpy(self) -> float:
        a, b = self._place(), self._place()
        started = time.perf_counter()
        np.copyto(self.target[b : b + self.nbytes], self.source[a : a + self.nbytes])
        return time.perf_counter() - started

    def plain_socket(self) -> float:
        a = self._place()
        view = memoryview(self.memory.buffer)[a : a + self.nbytes]
        started = time.perf_counter()
        self.sock.sendall(view)
        self.sock.recv(1)
        seconds = time.perf_counter() - started
        view.release()
        return seconds

    def move(self, name: str, scattered: bool) -> float:
        count = TOKENS // self.spec.page_tokens
        if scattered:
            pages = random.sample(range(self.spec.pages), count), random.sample(range(self.spec.pages), count)
        else:
            a, b = (random.randrange(0, self.spec.pages - count) for _ in range(2))
            pages = list(range(a, a + count)), list(range(b, b + count))
        blocks = blocks_of(self.spec, *pages)
        started = time.perf_counter()
        self.transports[name].write(READER, EPOCH, 1, blocks)
        event = self.events.get(timeout=30)
        seconds = time.perf_counter() - started
        if not isinstance(event, Written) or event.nbytes != self.nbytes:
            raise SystemExit(f"{name}: {event}")
        last = blocks[-1]
        if not np.array_equal(
            self.target[last.dst_offset : last.dst_offset + last.row_bytes],
            self.source[last.src_offset : last.src_offset + last.row_bytes],
        ):
            raise SystemExit(f"{name}: wrong bytes")
        return seconds

    def close(self) -> None:
        for transport in self.transports.values():
            transport.close()


def measure(args: argparse.Namespace) -> dict[str, object]:
    spec = pool_spec(args.pages)
    nbytes = TOKENS * SHAPE.token_bytes
    command = [sys.executable, __file__, "--child", f"--pages={args.pages}"]
    command += [f"--tls-folder={args.tls_folder}"] if args.tls_folder else []
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    hello = msgspec.json.decode(process.stdout.readline(), type=Hello)
    bench = Bench(hello, spec, nbytes, tls_of(args.tls_folder))
    ways: dict[str, Callable[[], float]] = {
        "memcpy": bench.memcpy,
        "shm, one run": lambda: bench.move("shm", False),
        "shm, scattered": lambda: bench.move("shm", True),
        "socket": bench.plain_socket,
        "tcp, one run": lambda: bench.move("tcp", False),
        "tcp, scattered": lambda: bench.move("tcp", True),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    names = list(ways)
    for turn in range(args.rounds + 5):
        random.shuffle(names)
        for name in names:
            seconds = ways[name]()
            if turn >= 5:
                times[name].append(seconds)
    bench.close()
    process.communicate()
    medians = {name: statistics.median(values) for name, values in times.items()}
    base = {n: medians["memcpy" if n[:3] in ("mem", "shm") else "socket"] for n in names}
    return {
        "nbytes": nbytes,
        "rounds": args.rounds,
        "median_ms": {n: round(medians[n] * 1e3, 4) for n in ways},
        "p90_ms": {n: round(statistics.quantiles(times[n], n=10)[8] * 1e3, 4) for n in ways},
        "gb_per_s": {n: round(nbytes / medians[n] / 1e9, 3) for n in ways},
        "ratio": {n: round(base[n] / medians[n], 3) for n in ways},
    }


def tls_of(folder: str) -> Tls | None:
    """The contexts of the files that `make_tls` has put into `folder`."""
    return load_tls(*(f"{folder}/{part}.pem" for part in ("cert", "key", "ca"))) if folder else None


def make_tls(folder: str) -> None:
    """A certificate for loopback, its key and its authority."""
    import trustme

    authority = trustme.CA()
    made = authority.issue_cert("127.0.0.1")
    made.cert_chain_pems[0].write_to_path(f"{folder}/cert.pem")
    made.private_key_pem.write_to_path(f"{folder}/key.pem")
    authority.cert_pem.write_to_path(f"{folder}/ca.pem")


def git_commit() -> str:
    done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100, help="times each way is measured")
    parser.add_argument("--runs", type=int, default=1, help="whole runs, each with new processes")
    parser.add_argument("--pages", type=int, default=1024, help="pages of each pool")
    parser.add_argument("--json", type=Path, help="where to write the results")
    parser.add_argument("--tls", action="store_true", help="encrypt tcp")
    parser.add_argument("--tls-folder", default="", help=argparse.SUPPRESS)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.pages, TOKENS * SHAPE.token_bytes, tls_of(args.tls_folder))
        return
    with tempfile.TemporaryDirectory() as folder:
        if args.tls:
            make_tls(folder)
            args.tls_folder = folder
        run(args)


def run(args: argparse.Namespace) -> None:
    """Measure, print, write."""
    runs = []
    for _ in range(args.runs):
        result = measure(args)
        runs.append(result)
        print(f"{result['nbytes']} bytes, {args.rounds} rounds, medians")
        for name in result["median_ms"]:  # type: ignore[attr-defined]
            row = [result[k][name] for k in ("median_ms", "p90_ms", "gb_per_s", "ratio")]  # type: ignore[index]
            print(
                f"  {name:16} {row[0]:8.3f} ms  p90 {row[1]:8.3f} ms  {row[2]:7.2f} GB/s  ratio {row[3]:.3f}"
            )
    if args.json:
        record = {
            "command": "python bench/transport.py " + " ".join(sys.argv[1:]),
            "commit": git_commit(),
            "machine": f"{platform.machine()}, {os.cpu_count()} cores, Linux {platform.release()}",
            "python": platform.python_version(),
            "runs": runs,
        }
        args.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
