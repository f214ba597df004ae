"""The time of a hand-off beside a busy engine: `python bench/agent.py [--rounds 1] [--json FILE]`.

Two engine processes, each with a manager in its own interpreter and one in an agent, for every transport,
over the same memory (SmolLM2's KV, pages of 16 tokens in one run, full checksums). Their main threads do one
of three things while a hand-off is under way: wait for its changes (`idle`); compute 1 ms in Python and sleep
1 ms, as vLLM's loop does (`stepping`); compute without a pause (`spinning`). A main thread that is not idle
looks for changes between two steps. Each hand-off is timed on prefill from its `send` (chunks of 512 tokens)
to the SUCCESS that its main thread sees. The variants take turns. CPU is that of all processes.
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
from collections.abc import Iterator
from typing import Any

import psutil

from recorded import commit, quantile
from segue.kv import (
    Incarnation,
    KVAgent,
    KVConfig,
    KVManager,
    KVPoll,
    KVShape,
    LeaderId,
    PoolSpec,
    Role,
    RoomKey,
    Span,
    allocate,
    new_room,
)

SHAPE = KVShape(layers=30, kv_heads=3, k_dim=64, v_dim=64, dtype="bfloat16", item_bytes=2)
PAGE, CHUNK = 16, 512
#: megabytes: tokens, hand-offs of each variant in a round
SIZES = {3: (128, 20), 18: (768, 10), 260: (11392, 3)}
TOKENS = max(tokens for tokens, _ in SIZES.values())
WAIT_S = 120.0
STEP_S = 0.001
MAIN_THREADS = ("idle", "stepping", "spinning")
VARIANTS = [(where, name) for name in ("shm", "tcp") for where in ("beside", "agent")]


def compute(seconds: float) -> None:
    """Python that keeps the interpreter's lock."""
    until, total = time.perf_counter() + seconds, 0
    while time.perf_counter() < until:
        total += 1


class Side:
    """The managers of one engine process, by variant."""

    def __init__(self, role: Role) -> None:
        self.changes: queue.SimpleQueue[Any] = queue.SimpleQueue()
        spec = PoolSpec(shape=SHAPE, page_tokens=PAGE, pages=TOKENS // PAGE, layer_count=30, head_count=3)
        memory = allocate(spec.nbytes)
        self.managers: dict[str, KVManager | KVAgent] = {}
        self.addresses: dict[str, tuple[str, str, int]] = {}
        self.start_s: list[float] = []
        for where, transport in VARIANTS:
            config = KVConfig(role=role, model="m", spec=spec, transports=[transport])
            kind = KVAgent if where == "agent" else KVManager
            began = time.perf_counter()
            manager = kind(config, memory, self.changes.put)
            name = f"{where} {transport}"
            self.managers[name] = manager
            self.addresses[name] = (config.me.incarnation, *manager.start())
            if where == "agent":
                self.start_s.append(time.perf_counter() - began)
        self.agents = [
            psutil.Process(manager.pid) for manager in self.managers.values() if isinstance(manager, KVAgent)
        ]

    def wait(self, handle: Any, phase: KVPoll, busy: str) -> None:
        """Until `handle` is there, with a main thread that does what `busy` says meanwhile."""
        while (now := handle.poll()) is not phase:
            if now.terminal:
                raise SystemExit(f"a hand-off failed: {handle.error}")
            if busy == "idle":
                self.changes.get(timeout=WAIT_S)
            else:
                compute(STEP_S)
                if busy == "stepping":
                    time.sleep(STEP_S)
        while not self.changes.empty():
            self.changes.get()

    def cpu_s(self) -> float:
        """Of this process and its agents."""
        agents = [process.cpu_times() for process in self.agents]
        return time.process_time() + float(sum(times.user + times.system for times in agents))

    def close(self) -> None:
        for manager in self.managers.values():
            manager.close()


def decode() -> None:
    """The other engine: lines of JSON in and out."""
    side = Side(Role.DECODE)
    leaders = {}
    for name, (incarnation, host, port) in json.loads(sys.stdin.readline()).items():
        leaders[name] = LeaderId(Incarnation(incarnation))
        side.managers[name].add_peer(leaders[name], host, port)
    print("ready", flush=True)
    for line in sys.stdin:
        name, room, tokens, busy = json.loads(line)
        key = RoomKey(room)
        receiver = side.managers[name].receive(key, leaders[name], tokens, WAIT_S)
        side.wait(receiver, KVPoll.WAITING_FOR_INPUT, "idle")
        receiver.publish(range(tokens // PAGE))
        side.wait(receiver, KVPoll.SUCCESS, busy)
        receiver.clear()
        print(side.cpu_s(), flush=True)
    side.close()


def hand_over(side: Side, other: subprocess.Popen[str], case: tuple[str, int, str]) -> tuple[float, float]:
    """Seconds, and the other process's CPU time afterwards."""
    name, tokens, busy = case
    assert other.stdin is not None
    assert other.stdout is not None
    key = RoomKey(new_room())
    sender = side.managers[name].expect(key, tokens, WAIT_S)
    other.stdin.write(json.dumps([name, key.room, tokens, busy]) + "\n")
    other.stdin.flush()
    side.wait(sender, KVPoll.WAITING_FOR_INPUT, "idle")
    began = time.perf_counter()
    for start in range(0, tokens, CHUNK):
        end = min(tokens, start + CHUNK)
        sender.send(Span(start, end), range(tokens // PAGE), b"" if end == tokens else None)
    side.wait(sender, KVPoll.SUCCESS, busy)
    seconds = time.perf_counter() - began
    sender.clear()
    return seconds, float(other.stdout.readline())


def cases(megabytes: int) -> Iterator[tuple[str, int, str]]:
    for busy in MAIN_THREADS:
        for where, transport in VARIANTS:
            yield f"{where} {transport}", SIZES[megabytes][0], busy


def measure(
    side: Side, other: subprocess.Popen[str], rounds: int, hand_offs: int | None
) -> list[dict[str, Any]]:
    seconds: dict[tuple[int, str, str], list[float]] = {}
    cpu: dict[tuple[int, str, str], list[float]] = {}
    for name in side.managers:  # sessions, paths, and pages that are touched first
        for tokens, _ in SIZES.values():
            _, theirs = hand_over(side, other, (name, tokens, "idle"))
    for _ in range(rounds):
        for megabytes, (_, count) in SIZES.items():
            for _ in range(hand_offs or count):
                for name, tokens, busy in cases(megabytes):
                    ours = side.cpu_s()
                    taken, after = hand_over(side, other, (name, tokens, busy))
                    where = megabytes, name, busy
                    seconds.setdefault(where, []).append(taken)
                    cpu.setdefault(where, []).append(side.cpu_s() - ours + after - theirs)
                    theirs = after
    found = []
    for (megabytes, name, busy), taken_s in seconds.items():
        _, _, transport = name.partition(" ")
        beside = statistics.median(seconds[megabytes, f"beside {transport}", busy])
        median = statistics.median(taken_s)
        gigabytes = SIZES[megabytes][0] * SHAPE.token_bytes / 1e9
        found.append(
            {
                "mb": megabytes,
                "variant": name,
                "main_thread": busy,
                "p50_ms": round(median * 1e3, 2),
                "p90_ms": round(quantile(taken_s, 0.9) * 1e3, 2),
                "ratio_to_beside": round(median / beside, 2),
                "cpu_s_per_gb": round(statistics.fmean(cpu[megabytes, name, busy]) / gigabytes, 2),
                "hand_offs": len(taken_s),
            }
        )
        print(*found[-1].values(), sep="\t", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--decode", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--hand-offs", type=int, help="of each variant, size and round")
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
        found = measure(side, other, args.rounds, args.hand_offs)
        rss = [round(process.memory_full_info().uss / 2**20, 1) for process in side.agents]
        other.stdin.close()
        side.close()
    start_s = [round(seconds, 2) for seconds in side.start_s]
    print("agents: start", start_s, "s; memory of its own", rss, "MiB; load before", load)
    if args.json:
        about = {"commit": commit(), "cpus": os.cpu_count(), "load_before": load, "rounds": args.rounds}
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump({**about, "start_s": start_s, "agent_mib": rss, "found": found}, file, indent=1)


if __name__ == "__main__":
    main()
