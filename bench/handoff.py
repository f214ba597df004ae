"""The hand-off's own cost: `python bench/handoff.py [--transport shm] [--requests 100] [--tokens 512]`.

One prefill and one decode process serve the default model; one request is in flight at a time. The
overhead of a hand-off is the time from the end of prefill's last forward to the moment at which
decode's next step can include the request, less the time that the transport took for the last
chunk. Both stamps are CLOCK_MONOTONIC of one host; nothing else should run on it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
from pathlib import Path

from segue.bootstrap.client import RegistryClient
from segue.core.control import ControlMessage, Load, Outputs, Submit
from segue.core.errors import SegueError
from segue.core.limits import Limits
from segue.core.request import Output, Request, SamplingParams, Ticket
from segue.core.types import Incarnation, Placement, Role, new_incarnation, new_room
from segue.session.api import PeerInfo, Session
from segue.session.node import SessionNode

ROOT = Path(__file__).resolve().parent.parent
PORT = 18998


class Front:
    """The least that a frontend is; outputs of the one request in flight go into a queue."""

    def __init__(self) -> None:
        self.outputs: asyncio.Queue[Output] = asyncio.Queue()

    def hello(self) -> bytes:
        return b""

    def accept(self, peer: PeerInfo) -> None: ...

    def opened(self, session: Session) -> None: ...

    def closed(self, session: Session, error: SegueError) -> None: ...

    def received(self, session: Session, message: object) -> None:
        if isinstance(message, Outputs):
            for output in message.outputs:
                self.outputs.put_nowait(output)
        else:
            assert isinstance(message, Load)


async def measure(args: argparse.Namespace) -> dict[str, list[float]]:
    limits = Limits()
    registry = RegistryClient(f"http://127.0.0.1:{PORT}", secret=None, limits=limits)
    front = Front()
    node = SessionNode(
        incarnation=new_incarnation(),
        role=Role.FRONTEND,
        dp_rank=0,
        secret=None,
        handler=front,
        message_type=ControlMessage,
        limits=limits,
    )
    sessions: dict[Role, tuple[Incarnation, Session]] = {}
    for role in (Role.PREFILL, Role.DECODE):
        async for records in registry.watch(role):
            if records:
                record, replica = records[0], records[0].replicas[0]
                session = await node.connect(
                    replica.host, replica.port, expect=record.incarnation, timeout_s=10
                )
                sessions[role] = (record.incarnation, session)
                break
    rng = random.Random(1)
    times: dict[str, list[float]] = {}
    for i in range(args.warmup + args.requests):
        prompt = [rng.randrange(1000, 40000) for _ in range(args.tokens)]
        ticket = Ticket(
            room=new_room(),
            attempt=0,
            prefill=Placement(sessions[Role.PREFILL][0]),
            decode=Placement(sessions[Role.DECODE][0]),
            budget_s=60,
        )
        sampling = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
        submit = Submit(Request(request_id=f"r{i}", prompt=prompt, sampling=sampling), ticket)
        for _me, session in sessions.values():
            session.send(submit)
        timeline: dict[str, float] = {}
        while True:
            output = await asyncio.wait_for(front.outputs.get(), 60)
            assert output.error is None, output.error
            timeline = output.timeline if output.position == 0 else timeline
            if output.finish is not None:
                break
        if i >= args.warmup:
            whole = timeline["at_ready"] - timeline["at_forward_end"]
            row = {**timeline, "hand_over": whole, "overhead": whole - timeline["wire"]}
            for name, value in row.items():
                if not name.startswith("at_"):
                    times.setdefault(name, []).append(value * 1e3)
    await node.close()
    await registry.aclose()
    return times


def quantile(values: list[float], q: float) -> float:
    return sorted(values)[min(len(values) - 1, round(q * (len(values) - 1)))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--transport", default="shm")
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--integrity", default="full")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    shared = ["--model", args.model, "--transport", args.transport, "--dtype", args.dtype]
    shared += ["--integrity", args.integrity]
    shared += ["--threads-per-worker", "1", "--kv-gib", "0.5", "--log-level", "warning"]
    segue = [sys.executable, "-m", "segue.cli.main"]
    processes = []
    try:
        for extra in (
            ["prefill", "--bootstrap-port", str(PORT)],
            ["decode", "--registry", f"http://127.0.0.1:{PORT}"],
        ):
            process = subprocess.Popen([*segue, *extra, *shared], stdout=subprocess.PIPE, text=True)
            processes.append(process)
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line.startswith("ready"), f"{extra[0]} did not start: {line!r}"
        times = asyncio.run(measure(args))
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(30)
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()
    rows = {
        name: {
            "p50_ms": round(statistics.median(values), 3),
            "p99_ms": round(quantile(values, 0.99), 3),
            "max_ms": round(max(values), 3),
        }
        for name, values in times.items()
    }
    print(f"{args.requests} requests of {args.tokens} tokens over {args.transport}, commit {commit}")
    for name, row in rows.items():
        print(f"{name:>12}  " + "   ".join(f"{key} {value:9.3f}" for key, value in row.items()))
    if args.json:
        result = {
            "command": sys.argv,
            "commit": commit,
            "requests": args.requests,
            "rows": rows,
            "raw_ms": times,
        }
        args.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
