"""The cost of open rooms: `python bench/open_rooms.py [--rooms 1 100 5000] [--hand-offs 200] [--rounds 5]`.

One prefill and one decode leader in two processes, over a real session and shm. Measured at each number of
open rooms: the CPU time of each process for a whole hand-off, one after the other, while all those rooms are
open on both sides (decode has published its pages, prefill has not sent yet); and the private memory that
each process has more with the most rooms open than before any was. Rounds take the numbers in turn. The
prefill process's time includes reading and answering one line for each hand-off.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from leader_pair import Pair, Work, resident_bytes
from recorded import commit

#: Small KV, so that what the protocol does is most of the time; four chunks.
WORK = Work(
    layers=2,
    kv_heads=1,
    head_dim=16,
    prompt_tokens=128,
    chunk_tokens=32,
    forward_s=0.0,
    held_from=2**32,
    budget_s=600.0,
)
SIDES = ("prefill", "decode")


class PrefillRendezvous(Pair):
    """Rooms that stay open, and hand-offs beside them."""

    def __init__(self, most: int) -> None:
        super().__init__(msgspec.structs.replace(WORK, pages=most + WORK.prompt_tokens // WORK.page_tokens))
        self.most = most
        self.held: list[int] = []
        self.times = 0
        self.room = 0
        self.asked = 0

    def hold(self, count: int) -> None:
        """Have exactly so many rooms open on both sides."""
        self.times += 1
        while len(self.held) < count:
            # Each in a page of its own, with a number that was never used.
            room = WORK.held_from + self.times * self.most + len(self.held)
            self.held.append(room)
            self.open(room)
            self.wait("prefill", "held", room)
        gone, self.held = self.held[count:], self.held[:count]
        for room in gone:
            self.decode.abort(room)
        for room in gone:
            for side in SIDES:
                self.wait(side, "released", room)
        with self.changed:
            self.news.clear()

    def cost(self) -> dict[str, tuple[float, int]]:
        """CPU seconds and bytes of each process up to now."""
        self.asked += 1
        self.order("cost", self.asked)
        said = self.wait("prefill", "cost", self.asked)
        return {
            "prefill": (said.at, int(said.words[0])),
            "decode": (time.process_time(), resident_bytes()),
        }

    def hand_offs(self, count: int) -> dict[str, float]:
        """Do so many, one after the other; CPU µs of each side for one."""
        before = self.cost()
        for _ in range(count):
            self.room += 1
            self.open(self.room)
            for side in SIDES:
                self.wait(side, "released", self.room)
            with self.changed:
                assert ("decode", "SUCCESS", self.room) in self.news, f"room {self.room} failed"
        after = self.cost()
        with self.changed:
            self.news.clear()
        return {side: (after[side][0] - before[side][0]) / count * 1e6 for side in SIDES}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rooms", type=int, nargs="+", default=[1, 100, 5000])
    parser.add_argument("--hand-offs", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    pair = PrefillRendezvous(max(args.rooms))
    raw: dict[int, dict[str, list[float]]] = {n: {side: [] for side in SIDES} for n in args.rooms}
    try:
        pair.hand_offs(args.hand_offs)
        empty = pair.cost()
        pair.hold(max(args.rooms))
        full = pair.cost()
        for _ in range(args.rounds):
            for rooms in args.rooms:
                pair.hold(rooms)
                for side, cost_us in pair.hand_offs(args.hand_offs).items():
                    raw[rooms][side].append(round(cost_us, 1))
        pair.hold(0)
    finally:
        pair.close()
    rows: dict[str, Any] = {}
    first = args.rooms[0]
    for rooms in args.rooms:
        row = {side: statistics.median(raw[rooms][side]) for side in SIDES}
        ratios = {
            side: statistics.median(a / b for a, b in zip(raw[rooms][side], raw[first][side], strict=True))
            for side in SIDES
        }
        rows[str(rooms)] = {
            **{f"{side}_cpu_us": round(row[side], 1) for side in SIDES},
            **{f"{side}_ratio": round(ratios[side], 3) for side in SIDES},
        }
        print(f"{rooms:>6} open rooms  " + "   ".join(f"{k} {v:8.2f}" for k, v in rows[str(rooms)].items()))
    memory = {
        f"{side}_bytes_per_room": round((full[side][1] - empty[side][1]) / max(args.rooms)) for side in SIDES
    }
    print(f"{max(args.rooms)} rooms: {memory}")
    if args.json:
        report = {
            "command": " ".join(sys.argv),
            "commit": commit(),
            "cores": os.cpu_count(),
            "hand_offs": args.hand_offs,
            "rows": rows,
            "memory": memory,
            "raw_us": raw,
        }
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
