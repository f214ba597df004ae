"""The cost of the records for `segue explain` in a frontend, as a share of its CPU time for a streamed
request.

    .venv/bin/python bench/explain_cost.py [--rounds 10] [--streams 32] [--tokens 200] [--json FILE]

In turns: a frontend serves, as in bench/frontend.py, and records of requests are made and kept alone, as its
door and a call of its fleet make them. The noise of a machine hides a difference of one in a hundred between
two frontends; it hides no share of a part.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import statistics
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from frontend import measure, pace, server
from recorded import commit
from scripted_frontend import ScriptedBackend
from segue.engine.request import Request, SamplingParams
from segue.server.frontend.app import _record_of
from segue.server.frontend.trace_context import TraceContext
from segue.server.messages.records import Records
from serve import machine

COUNT = 5000


async def records_us(records: Records) -> float:
    """CPU microseconds of all that is recorded of one request."""
    backend = ScriptedBackend([], pace, records)
    sampling = SamplingParams(max_tokens=200)
    call: Any = SimpleNamespace(
        id="cmpl-3F2kZ4mDmJ0DaBVAXrYB2Ie1",
        endpoint="completions",
        planned_at=1.0,
        status=200,
        gone=False,
        trace=TraceContext(),
        inference=None,
    )
    requests = [
        Request(request_id=f"{call.id}-{n}", prompt=[1] * 100, sampling=sampling) for n in range(COUNT)
    ]
    began = time.process_time()
    for request in requests:
        path = backend._began(600.0)
        path.enter("answer", asyncio.get_running_loop().time())
        backend._ended(request, path)
        records.put(_record_of(call, None, 0.5, 2.0))
    return (time.process_time() - began) / COUNT * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--requests", type=int, default=640)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    spawn, records = multiprocessing.get_context("spawn"), Records()
    streamed: list[dict[str, float]] = []
    alone: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        ours, theirs = spawn.Pipe()
        process = spawn.Process(target=server, args=(theirs, folder, True))
        process.start()
        theirs.close()  # so that its end is ours
        port = ours.recv()
        for _ in range(args.rounds):
            streamed.append(asyncio.run(measure(args, ours, port)))
            alone.append(asyncio.run(records_us(records)))
        ours.send("stop")
        process.join(10)
    print(
        f"records of a request: {statistics.median(alone):.1f} µs CPU ({min(alone):.1f} to {max(alone):.1f})"
    )
    for key, what in (("request_us", "whole request"), ("chunk_us", "streamed chunk")):
        print(f"{what}: {statistics.median(run[key] for run in streamed):.1f} µs CPU")
    shares: dict[str, list[float]] = {}
    for chunks in (0, 20, args.tokens):
        name = f"stream of {chunks} chunks" if chunks else "whole request"
        pairs = zip(alone, streamed, strict=True)
        shares[name] = [100 * us / (run["request_us"] + chunks * run["chunk_us"]) for us, run in pairs]
        low, middle, high = (f(shares[name]) for f in (min, statistics.median, max))
        print(f"share of a {name}: {middle:.2f} % ({low:.2f} to {high:.2f})")
    if args.json:
        found = {"records_us": alone, "streamed": streamed, "percent": shares}
        args.json.write_text(json.dumps({"commit": commit(), "machine": machine(), **found}, indent=1))


if __name__ == "__main__":
    main()
