"""What checksums, staging and an agent cost in a hand-off: `bench/staging.py [--rounds 1] [--json FILE]`.

Two processes, each with one manager for every variant over the same memory (SmolLM2's KV, pages of 16
tokens in one run); the manager of `agent` is in a process of its own. The variants take turns; each hand-off
is timed on prefill from its `send` (chunks of 512 tokens) to SUCCESS. Ratios are to the same transport
without any of the three, in the same run. CPU is that of both processes and their agents. `device` is memory
of the host in tensors that are declared as a device's: copies and checksums are those of a device, computed
by a CPU. No GPU takes part.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import statistics
import subprocess
import sys
import time
from typing import Any

import psutil
import torch

from recorded import commit
from segue.kv import (
    ChecksumMode,
    Incarnation,
    KVAgent,
    KVConfig,
    KVManager,
    KVPoll,
    KVShape,
    LeaderId,
    Memory,
    PoolSpec,
    Region,
    Role,
    RoomKey,
    Span,
    allocate,
    new_room,
)

SHAPE = KVShape(layers=30, kv_heads=3, k_dim=64, v_dim=64, dtype="bfloat16", item_bytes=2)
PAGE, CHUNK = 16, 512
#: megabytes: tokens, hand-offs of each variant in a round
SIZES = {3: (128, 30), 18: (768, 10), 260: (11392, 3)}
TOKENS = max(tokens for tokens, _ in SIZES.values())
WAIT_S = 60.0
#: transports and whether they stage, whether chunks are hashed, where the manager or the memory is
VARIANTS: dict[str, tuple[str, ChecksumMode, str]] = {
    f"{inner}, {name}": (staged + inner, mode, where)
    for inner in ("shm", "tcp")
    for name, staged, mode, where in (
        ("plain", "", ChecksumMode.OFF, ""),
        ("xxh3-64", "", ChecksumMode.FULL, ""),
        ("agent", "", ChecksumMode.OFF, "agent"),
        ("agent, xxh3-64", "", ChecksumMode.FULL, "agent"),
        ("staged", "staged_", ChecksumMode.OFF, ""),
        ("staged, xxh3-64", "staged_", ChecksumMode.FULL, ""),
        ("agent, staged, xxh3-64", "staged_", ChecksumMode.FULL, "agent"),
        ("staged, device", "staged_", ChecksumMode.OFF, "device"),
        ("staged, device, words-64", "staged_", ChecksumMode.FULL, "device"),
    )
}


class Side:
    """The managers of one process."""

    def __init__(self, role: Role) -> None:
        self.changes: queue.Queue[Any] = queue.Queue()
        spec = PoolSpec(shape=SHAPE, page_tokens=PAGE, pages=TOKENS // PAGE, layer_count=30, head_count=3)
        memory = allocate(spec.nbytes)
        tensor = torch.frombuffer(memory.buffer, dtype=torch.uint8)
        device = Memory([Region(tensor.data_ptr(), tensor.nbytes, "cpu:0", owner=tensor)])
        self.managers: dict[str, KVManager | KVAgent] = {}
        self.addresses: dict[str, tuple[str, str, int]] = {}
        for name, (transport, mode, where) in VARIANTS.items():
            config = KVConfig(role=role, model="m", spec=spec, transports=[transport], kv_checksum=mode)
            kind = KVAgent if where == "agent" else KVManager
            manager = kind(config, device if where == "device" else memory, self.changes.put)
            self.managers[name] = manager
            self.addresses[name] = (config.me.incarnation, *manager.start())
        self.agents = [
            psutil.Process(manager.pid) for manager in self.managers.values() if isinstance(manager, KVAgent)
        ]

    def cpu_s(self) -> float:
        """Of this process and its agents."""
        agents = [process.cpu_times() for process in self.agents]
        return time.process_time() + float(sum(times.user + times.system for times in agents))

    def wait(self, handle: Any, phase: KVPoll) -> None:
        while (now := handle.poll()) is not phase:
            if now.terminal:
                raise SystemExit(f"a hand-off failed: {handle.error}")
            self.changes.get(timeout=WAIT_S)


def decode() -> None:
    """The other process: lines of JSON in and out."""
    side = Side(Role.DECODE)
    leaders = {}
    for name, (incarnation, host, port) in json.loads(sys.stdin.readline()).items():
        leaders[name] = LeaderId(Incarnation(incarnation))
        side.managers[name].add_peer(leaders[name], host, port)
    print("ready", flush=True)
    for line in sys.stdin:
        name, room, tokens = json.loads(line)
        key = RoomKey(room)
        receiver = side.managers[name].receive(key, leaders[name], tokens, WAIT_S)
        side.wait(receiver, KVPoll.WAITING_FOR_INPUT)
        receiver.publish(range(tokens // PAGE))
        side.wait(receiver, KVPoll.SUCCESS)
        receiver.clear()
        print(side.cpu_s(), flush=True)
    for manager in side.managers.values():
        manager.close()


def hand_over(side: Side, other: subprocess.Popen[str], name: str, tokens: int) -> tuple[float, float]:
    """Seconds, and the other process's CPU time afterwards."""
    assert other.stdin is not None
    assert other.stdout is not None
    key = RoomKey(new_room())
    sender = side.managers[name].expect(key, tokens, WAIT_S)
    other.stdin.write(json.dumps([name, key.room, tokens]) + "\n")
    other.stdin.flush()
    side.wait(sender, KVPoll.WAITING_FOR_INPUT)
    began = time.perf_counter()
    for start in range(0, tokens, CHUNK):
        end = min(tokens, start + CHUNK)
        sender.send(Span(start, end), range(tokens // PAGE), b"" if end == tokens else None)
    side.wait(sender, KVPoll.SUCCESS)
    seconds = time.perf_counter() - began
    sender.clear()
    return seconds, float(other.stdout.readline())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--decode", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    if args.decode:
        decode()
        return
    load = os.getloadavg()[0]
    side = Side(Role.PREFILL)
    command = [sys.executable, __file__, "--decode"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        other.stdin.write(json.dumps(side.addresses) + "\n")
        other.stdin.flush()
        assert other.stdout.readline() == "ready\n"
        times: dict[tuple[int, str], list[float]] = {}
        cpu: dict[tuple[int, str], list[float]] = {}
        for name in VARIANTS:  # sessions, paths, and pages that are touched first
            for tokens, _ in SIZES.values():
                _, theirs = hand_over(side, other, name, tokens)
        for _ in range(args.rounds):
            for size, (tokens, count) in SIZES.items():
                for _ in range(count):
                    for name in VARIANTS:
                        ours = side.cpu_s()
                        seconds, after = hand_over(side, other, name, tokens)
                        times.setdefault((size, name), []).append(seconds)
                        used = side.cpu_s() - ours + after - theirs
                        cpu.setdefault((size, name), []).append(used)
                        theirs = after
        other.stdin.close()
        for manager in side.managers.values():
            manager.close()
    found = []
    for (size, name), taken in times.items():
        plain = statistics.median(times[size, f"{name.partition(',')[0]}, plain"])
        median = statistics.median(taken)
        gigabytes = SIZES[size][0] * SHAPE.token_bytes / 1e9
        found.append(
            {
                "mb": size,
                "variant": name,
                "p50_ms": round(median * 1e3, 2),
                "ratio": round(median / plain, 2),
                "cpu_s_per_gb": round(statistics.fmean(cpu[size, name]) / gigabytes, 2),
            }
        )
        print(*found[-1].values(), sep="\t")
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            about = {"commit": commit(), "load_before": load, "rounds": args.rounds}
            json.dump({**about, "found": found}, file, indent=1)


if __name__ == "__main__":
    main()
