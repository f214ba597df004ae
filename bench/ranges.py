"""Many small ranges beside one long one of as many bytes.

    .venv/bin/python bench/ranges.py [--rounds N] [--json FILE]

Two processes, pools of Llama 8B's form (32 layers, 8 KV heads of 128, bfloat16; pages of 16 tokens). The
parent writes 64 pages to the first decode rank, over `shm` and over `tcp`:

    whole     tp 1 to 1: a row is a page of a plane
    half      tp 1 to 2: a row is the 4 heads of a token (1 KiB)
    eighth    tp 1 to 8: a row is one head of a token (256 bytes)

`run` and `scattered` say how the pages lie, `long` is one contiguous range of as many bytes. `gather` is what
a staging buffer would cost at each end beside the long range: one numpy copy of each page into or out of it.
The ways take turns; medians, in milliseconds from the call of `write` to `Written`.
"""

from __future__ import annotations

import argparse
import json
import queue
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np

from plan import GQA, ranks
from recorded import commit
from segue.kv.ids import Span
from segue.kv.layout.blocks import CopyBlock
from segue.kv.layout.content import Content
from segue.kv.layout.planner import plan_pair
from segue.kv.layout.spec import Plane, PoolSpec
from segue.kv.transport.base import TransportEvent, Written
from segue.kv.transport.memory.pool_memory import allocate
from transport import EPOCH, KINDS, READER, WRITER, Hello, make

PAGES, PAGE = 64, 16
CASES = {"whole": 1, "half": 2, "eighth": 8}
POOL_PAGES = 2 * PAGES


def pools(tp: int) -> tuple[list[PoolSpec], list[PoolSpec]]:
    """Both sides of a case, with room for the prompt twice."""
    sides = ranks(GQA, 1, 1), ranks(GQA, tp, 1)
    small, large = ([msgspec.structs.replace(s, pages=POOL_PAGES) for s in side] for side in sides)
    return small, large


def child(nbytes: int) -> None:
    """The receiver."""
    memory = allocate(nbytes)
    transports = {kind.name: make(kind, lambda _event: None, READER, None) for kind in KINDS}
    hello = Hello({name: t.register(memory) for name, t in transports.items()}, 0, 0, 0)
    for transport in transports.values():
        transport.grant(WRITER, EPOCH, Content((Plane(0, 1, 1, 1, 1, 1),), ((0, nbytes),)))
    sys.stdout.write(msgspec.json.encode(hello).decode() + "\n")
    sys.stdout.flush()
    sys.stdin.read()
    for transport in transports.values():
        transport.close()


def gather(source: np.ndarray, stage: np.ndarray, pages: Sequence[int]) -> float:
    """Seconds that it takes to copy the heads of these pages into one buffer."""
    started = time.perf_counter()
    for at, page in enumerate(pages):
        stage[at] = source[:, page]
    return time.perf_counter() - started


def measure(rounds: int) -> dict[str, dict[str, float]]:
    """The medians of each case, and its bytes."""
    sources = pools(1)[0]
    nbytes = sources[0].nbytes
    command = [sys.executable, __file__, "--child", str(nbytes)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    hello = msgspec.json.decode(process.stdout.readline(), type=Hello)
    memory = allocate(nbytes)
    np.frombuffer(memory.buffer, np.uint8)[:] = 7
    events: queue.SimpleQueue[TransportEvent] = queue.SimpleQueue()
    transports = {kind.name: make(kind, events.put, WRITER, None) for kind in KINDS}
    for name, transport in transports.items():
        transport.register(memory)
        transport.connect(READER, hello.endpoints[name], 10)

    def move(name: str, blocks: list[CopyBlock]) -> float:
        started = time.perf_counter()
        transports[name].write(READER, EPOCH, 1, blocks)
        event = events.get(timeout=60)
        if not isinstance(event, Written):
            raise SystemExit(f"{name}: {event}")
        return time.perf_counter() - started

    found: dict[str, dict[str, float]] = {}
    for case, tp in CASES.items():
        plan = plan_pair(*pools(tp))
        rng, span = random.Random(tp), Span(0, PAGES * PAGE)
        runs = list(range(PAGES)), list(range(7, PAGES + 7))
        apart = rng.sample(range(POOL_PAGES), PAGES), rng.sample(range(POOL_PAGES), PAGES)
        forms = {
            "run": plan.blocks(0, 0, span, *runs, 0),
            "scattered": plan.blocks(0, 0, span, *apart, 0),
        }
        size = sum(block.nbytes for block in forms["run"])
        forms["long"] = [CopyBlock(0, 0, 1, size)]
        width = 8 // tp * GQA.k_dim * GQA.item_bytes
        planes = np.frombuffer(memory.buffer, np.uint8, nbytes).reshape(64, POOL_PAGES, PAGE, -1)[..., :width]
        stage = np.empty((PAGES, 64, PAGE, width), np.uint8)
        ways: dict[str, Callable[[], float]] = {
            f"{name}, {form}": lambda name=name, blocks=blocks: move(name, blocks)  # type: ignore[misc]
            for name in transports
            for form, blocks in forms.items()
        }
        ways["gather"] = lambda planes=planes, stage=stage, pages=apart[0]: gather(planes, stage, pages)  # type: ignore[misc]
        times: dict[str, list[float]] = {name: [] for name in ways}
        for turn in range(rounds + 2):
            names = list(ways)
            random.shuffle(names)
            for name in names:
                seconds = ways[name]()
                if turn >= 2:
                    times[name].append(seconds)
        found[case] = {
            "mib": size / 2**20,
            "rows": sum(block.rows * block.groups for block in forms["scattered"]),
        }
        found[case] |= {name: round(statistics.median(times[name]) * 1e3, 2) for name in ways}
        del planes
    for transport in transports.values():
        transport.close()
    process.communicate()
    return found


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.child)
        return 0
    results = measure(args.rounds)
    for name, numbers in results.items():
        print(name, numbers)
    if args.json:
        text = json.dumps({"command": sys.argv, "commit": commit(), "median_ms": results}, indent=1)
        args.json.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
