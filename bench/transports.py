"""One hand-off over each transport, beside the plain copy and beside its library called directly.

    python bench/transports.py [--rounds 100] [--seconds 60] [--json bench/results/transports.json]

Two processes, one memory of 640 MiB each. The parent writes the KV of one request into the child's, at places
chosen anew each time, in four sizes: SmolLM2 (30 layers, 3 KV heads, 64 dims, bf16) with 128, 512 and 2,000
tokens, and the layout of Llama-3.1-8B (32 layers, 8 KV heads, 128 dims, bf16) with 2,000; pages of 16 tokens.

    memcpy          numpy copyto of as many contiguous bytes into the child's memory, one thread
    socket          sendall of one contiguous buffer, recv_into of one buffer in the child, one byte back
    nixl, direct    its agents, one descriptor of as many bytes, asked for its state until it is done
    mooncake, direct   its engines, one blocking call of as many bytes
    LIBRARY, direct, scattered   the same calls with a list of the rows of scattered pages
    NAME            segue's transport: the pages of the request in one run
    NAME, scattered the same, each page at a random place on both sides

The ways take turns within each round, so that noise hits all alike; ratios are of medians. A time is from
the call to the caller's thread knowing that the bytes have landed. CPU is that of both processes, without
what they take when nothing is asked of them.
"""

from __future__ import annotations

import argparse
import importlib
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
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from recorded import commit, quantile
from segue.kv.layout.blocks import CopyBlock
from segue.kv.layout.content import Content
from segue.kv.layout.spec import KVShape, Plane, PoolSpec
from segue.kv.transport import nixl
from segue.kv.transport.base import Endpoint, Transport, TransportEvent, Written
from segue.kv.transport.kinds import KINDS, USABLE
from segue.kv.transport.library.library_out import pieces
from segue.kv.transport.memory.pool_memory import Memory, allocate
from segue.kv.transport.options import TransportOptions
from segue.kv.transport.tcp.tcp_wire import Rows
from transport import EPOCH, READER, WRITER, blocks_of

MEMORY_BYTES = 640 * 2**20
NAMES = ("shm", "tcp", "nixl", "mooncake")
SMOL = KVShape(layers=30, kv_heads=3, k_dim=64, v_dim=64, dtype="bfloat16", item_bytes=2)
LLAMA = KVShape(layers=32, kv_heads=8, k_dim=128, v_dim=128, dtype="bfloat16", item_bytes=2)
SIZES = {
    "SmolLM2, 128 tokens": (SMOL, 128),
    "SmolLM2, 512 tokens": (SMOL, 512),
    "SmolLM2, 2,000 tokens": (SMOL, 2000),
    "Llama-8B, 2,000 tokens": (LLAMA, 2000),
}
#: What each way is compared with.
BESIDE = {"shm": "memcpy", "tcp": "socket", "nixl": "nixl, direct", "mooncake": "mooncake, direct"}
READS, WRITES = "direct-reads", "direct-writes"
IDLE_S = 1.0
#: One call with 4,096 fails.
MOONCAKE_ROWS = 1000
Call = Callable[[Rows, Rows], float]


class Hello(msgspec.Struct):
    """The child's message when it is ready. `agent` and `engine` belong to the libraries called directly."""

    endpoints: dict[str, Endpoint]
    pid: int
    fd: int
    port: int
    address: int
    agent: bytes
    engine: str


def usable() -> list[str]:
    """The transports that work here."""
    there = KINDS.available()
    return [name for name in NAMES if there[name] == USABLE]


def nixl_agent(name: str, address: int) -> Any:
    """An agent with the memory registered. Its thread sleeps while nothing comes, as that of `nixl` does."""
    config = nixl.bindings().nixlAgentConfig()
    config.useProgThread, config.pthrDelay = name == READS, 10_000
    agent = nixl.bindings().nixlAgent(name, config)
    agent.createBackend("UCX", {})
    dram = nixl.bindings().DRAM_SEG
    agent.registerMem(nixl.bindings().nixlRegDList(dram, [(address, MEMORY_BYTES, 0, b"")]), [])
    return agent


def mooncake_engine(address: int) -> Any:
    """An engine with the memory registered."""
    engine = importlib.import_module("mooncake.engine").TransferEngine()
    if engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") or engine.register_memory(
        address, MEMORY_BYTES
    ):
        raise SystemExit("mooncake makes no engine")
    return engine


def child() -> None:
    """The receiver: grants the epoch, serves the plain socket copy, and holds the ends of the libraries."""
    memory = allocate(MEMORY_BYTES)
    names = usable()
    transports = {n: KINDS.create(n, lambda _event: None, TransportOptions(me=READER)) for n in names}
    endpoints = {n: t.register(memory) for n, t in transports.items()}
    for transport in transports.values():
        transport.grant(WRITER, EPOCH, Content((Plane(0, 1, 1, 1, 1, 1),), ((0, MEMORY_BYTES),)))
    fd, address = memory.only.fd, memory.only.address
    assert fd is not None  # `allocate` gives a memfd
    agent = nixl_agent(READS, address) if "nixl" in names else None
    engine = mooncake_engine(address) if "mooncake" in names else None
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=serve_plain, args=(listener, memory), daemon=True).start()
    hello = Hello(
        endpoints,
        os.getpid(),
        fd,
        listener.getsockname()[1],
        address,
        agent.getLocalMD() if agent else b"",
        f"127.0.0.1:{engine.get_rpc_port()}" if engine else "",
    )
    print(msgspec.json.encode(hello).decode(), flush=True)
    sys.stdin.read()
    for transport in transports.values():
        transport.close()


def serve_plain(listener: socket.socket, memory: Memory) -> None:
    """Take what comes to where it is to go: 16 bytes say where and how much."""
    sock, _ = listener.accept()
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    pool = memoryview(memory.buffer)
    while head := sock.recv(16, socket.MSG_WAITALL):
        start, nbytes = (int.from_bytes(part, "little") for part in (head[:8], head[8:]))
        target = pool[start : start + nbytes]
        while len(target):
            target = target[sock.recv_into(target) :]
        sock.sendall(b"k")


def cpu_seconds(pids: tuple[int, int]) -> float:
    """CPU time of all live threads of these processes."""
    total = 0
    for pid in pids:
        for task in os.listdir(f"/proc/{pid}/task"):
            try:
                total += int(Path(f"/proc/{pid}/task/{task}/schedstat").read_text("ascii").split()[0])
            except FileNotFoundError:
                continue  # it ends just now
    return total / 1e9


class Bench:
    """The writer and its ways to move one request."""

    def __init__(self, hello: Hello) -> None:
        self.hello = hello
        self.pids = os.getpid(), hello.pid
        self.memory = allocate(MEMORY_BYTES)
        self.address = self.memory.only.address
        self.source = np.frombuffer(self.memory.buffer, np.uint8)
        self.source[:] = np.random.default_rng(1).integers(0, 256, len(self.source), np.uint8)
        fd = os.open(f"/proc/{hello.pid}/fd/{hello.fd}", os.O_RDWR)
        theirs = mmap.mmap(fd, MEMORY_BYTES, mmap.MAP_SHARED | mmap.MAP_POPULATE)
        os.close(fd)
        self.target = np.frombuffer(theirs, np.uint8)
        self.events: queue.SimpleQueue[TransportEvent] = queue.SimpleQueue()
        self.transports: dict[str, Transport] = {}
        for name, endpoint in hello.endpoints.items():
            transport = KINDS.create(name, self.events.put, TransportOptions(me=WRITER))
            transport.register(self.memory)
            transport.connect(READER, endpoint, 30)
            self.transports[name] = transport
        self.sock = socket.create_connection(("127.0.0.1", hello.port))
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.agent = nixl_agent(WRITES, self.address) if hello.agent else None
        if self.agent:
            self.agent.loadRemoteMD(hello.agent)
        self.engine = mooncake_engine(self.address) if hello.engine else None

    def ways(self) -> dict[str, Callable[[KVShape, int], float]]:
        """Each way by its name: given a request, it gives the seconds."""
        found: dict[str, Callable[[KVShape, int], float]] = {"memcpy": self.memcpy, "socket": self.plain}
        for name, there, call in (
            ("nixl", self.agent, self.over_nixl),
            ("mooncake", self.engine, self.over_mooncake),
        ):
            if there:
                found[f"{name}, direct"] = partial(self.direct, call, False)
                found[f"{name}, direct, scattered"] = partial(self.direct, call, True)
        for name in self.transports:
            found[name] = lambda shape, tokens, name=name: self.move(name, shape, tokens, False)  # type: ignore[misc]
            found[f"{name}, scattered"] = lambda shape, tokens, name=name: self.move(  # type: ignore[misc]
                name, shape, tokens, True
            )
        return found

    def places(self, nbytes: int) -> tuple[int, int]:
        """Where a contiguous copy begins, here and there."""
        a, b = (random.randrange(0, (MEMORY_BYTES - nbytes) // 4096) * 4096 for _ in range(2))
        return a, b

    def check(self, source: int, target: int, nbytes: int) -> None:
        """The last bytes are there."""
        last = min(nbytes, 4096)
        a, b = source + nbytes - last, target + nbytes - last
        if not np.array_equal(self.source[a : a + last], self.target[b : b + last]):
            raise SystemExit("wrong bytes")

    def memcpy(self, shape: KVShape, tokens: int) -> float:
        nbytes = tokens * shape.token_bytes
        a, b = self.places(nbytes)
        started = time.perf_counter()
        np.copyto(self.target[b : b + nbytes], self.source[a : a + nbytes])
        return time.perf_counter() - started

    def plain(self, shape: KVShape, tokens: int) -> float:
        nbytes = tokens * shape.token_bytes
        a, b = self.places(nbytes)
        view = memoryview(self.memory.buffer)[a : a + nbytes]
        started = time.perf_counter()
        self.sock.sendall(b.to_bytes(8, "little") + nbytes.to_bytes(8, "little"))
        self.sock.sendall(view)
        self.sock.recv(1)
        seconds = time.perf_counter() - started
        view.release()
        self.check(a, b, nbytes)
        return seconds

    def direct(self, call: Call, scattered: bool, shape: KVShape, tokens: int) -> float:
        """A library called with one contiguous buffer, or with the rows of scattered pages."""
        nbytes = tokens * shape.token_bytes
        if scattered:
            parts = list(pieces(self.blocks(shape, tokens, True), MEMORY_BYTES, MEMORY_BYTES))
            ours, theirs = (
                np.concatenate(sides) for sides in zip(*((p.source, p.target) for p in parts), strict=True)
            )
        else:
            a, b = self.places(nbytes)
            ours, theirs = np.array([(a, nbytes)], np.uint64), np.array([(b, nbytes)], np.uint64)
        (a, length), b = ours[-1].tolist(), int(theirs[-1, 0])
        ours[:, 0] += np.uint64(self.address)
        theirs[:, 0] += np.uint64(self.hello.address)
        seconds = call(ours, theirs)
        self.check(a, b, length)
        return seconds

    def over_nixl(self, sources: Rows, targets: Rows) -> float:
        agent, it = self.agent, nixl.bindings()
        assert agent is not None
        started = time.perf_counter()
        ours, theirs = (
            it.nixlXferDList(it.DRAM_SEG, np.pad(rows, ((0, 0), (0, 1)))) for rows in (sources, targets)
        )
        request = agent.createXferReq(it.NIXL_WRITE, ours, theirs, READS, b"", [])
        state = agent.postXferReq(request, b"")
        while state == it.NIXL_IN_PROG:
            state = agent.getXferStatus(request)
        seconds = time.perf_counter() - started
        agent.releaseXferReq(request)
        return seconds

    def over_mooncake(self, sources: Rows, targets: Rows) -> float:
        assert self.engine is not None
        where = sources[:, 0].tolist(), targets[:, 0].tolist(), sources[:, 1].tolist()
        started = time.perf_counter()
        for at in range(0, len(sources), MOONCAKE_ROWS):
            part = slice(at, at + MOONCAKE_ROWS)
            if self.engine.batch_transfer_sync_write(self.hello.engine, *(side[part] for side in where)):
                raise SystemExit("mooncake, direct: failed")
        return time.perf_counter() - started

    def blocks(self, shape: KVShape, tokens: int, scattered: bool) -> list[CopyBlock]:
        """A request's pages at new places, here and there."""
        page = PoolSpec(
            shape=shape, pages=1, page_tokens=16, layer_count=shape.layers, head_count=shape.kv_heads
        )
        spec = msgspec.structs.replace(page, pages=MEMORY_BYTES // page.page_bytes)
        count = tokens // spec.page_tokens
        if scattered:
            pages = random.sample(range(spec.pages), count), random.sample(range(spec.pages), count)
        else:
            a, b = (random.randrange(0, spec.pages - count) for _ in range(2))
            pages = list(range(a, a + count)), list(range(b, b + count))
        return blocks_of(spec, *pages)

    def move(self, name: str, shape: KVShape, tokens: int, scattered: bool) -> float:
        blocks = self.blocks(shape, tokens, scattered)
        started = time.perf_counter()
        self.transports[name].write(READER, EPOCH, 1, blocks)
        event = self.events.get(timeout=60)
        seconds = time.perf_counter() - started
        if not isinstance(event, Written) or event.nbytes != tokens * shape.token_bytes:
            raise SystemExit(f"{name}: {event}")
        last = blocks[-1]
        *_, row = last.ranges()
        self.check(*row)
        return seconds

    def idle(self) -> float:
        """Cores that both processes take when nothing is asked of them."""
        before = cpu_seconds(self.pids)
        time.sleep(IDLE_S)
        return (cpu_seconds(self.pids) - before) / IDLE_S


def measure(bench: Bench, shape: KVShape, tokens: int, rounds: int, seconds: float) -> dict[str, Any]:
    """All ways of one size, `rounds` times or until `seconds` have passed."""
    ways = bench.ways()
    times: dict[str, list[float]] = {name: [] for name in ways}
    cpu = dict.fromkeys(ways, 0.0)
    idle = bench.idle()
    names, until, turn = list(ways), time.monotonic() + seconds, -3  # the first three warm up
    while turn < rounds and (turn < 5 or time.monotonic() < until):
        random.shuffle(names)
        for name in names:
            before, began = cpu_seconds(bench.pids), time.perf_counter()
            took = ways[name](shape, tokens)
            used = cpu_seconds(bench.pids) - before - idle * (time.perf_counter() - began)
            if turn >= 0:
                times[name].append(took)
                cpu[name] += used
        turn += 1
    nbytes = tokens * shape.token_bytes
    medians = {name: statistics.median(values) for name, values in times.items()}
    rows = {}
    for name in ways:
        beside = BESIDE.get(name.split(",")[0]) if "direct" not in name else None
        rows[name] = {
            "gb_per_s": round(nbytes / medians[name] / 1e9, 3),
            "p50_ms": round(medians[name] * 1e3, 3),
            "p99_ms": round(quantile(times[name], 0.99) * 1e3, 3),
            "cpu_s_per_gb": round(cpu[name] / len(times[name]) / nbytes * 1e9, 3),
            "ratio": round(medians[beside] / medians[name], 3) if beside else None,
            "beside": beside,
        }
    return {"nbytes": nbytes, "rounds": turn, "idle_cores": round(idle, 3), "ways": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100, help="times each way is measured, per size")
    parser.add_argument("--seconds", type=float, default=60, help="end a size after that, with fewer rounds")
    parser.add_argument("--json", type=Path, help="where to write the results")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child()
        return
    process = subprocess.Popen(
        [sys.executable, __file__, "--child"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    bench = Bench(msgspec.json.decode(process.stdout.readline(), type=Hello))
    sizes = {}
    for title, (shape, tokens) in SIZES.items():
        sizes[title] = result = measure(bench, shape, tokens, args.rounds, args.seconds)
        print(f"{title}: {result['nbytes']} bytes, {result['rounds']} rounds")
        for name, row in result["ways"].items():
            beside = f"  {row['ratio']:.2f} of {row['beside']}" if row["beside"] else ""
            print(
                f"  {name:26} {row['gb_per_s']:6.2f} GB/s  p50 {row['p50_ms']:8.2f} ms  "
                f"p99 {row['p99_ms']:8.2f} ms  CPU {row['cpu_s_per_gb']:5.2f} s/GB{beside}"
            )
    if args.json:
        record = {
            "command": "python bench/transports.py " + " ".join(sys.argv[1:]),
            "commit": commit(),
            "machine": f"{platform.machine()}, {os.cpu_count()} cores, Linux {platform.release()}",
            "load": os.getloadavg(),
            "sizes": sizes,
        }
        args.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    for transport in bench.transports.values():
        transport.close()
    process.communicate()


if __name__ == "__main__":
    main()
