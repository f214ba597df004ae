"""How soon the peer learns of an abort: `python bench/abort.py [--aborts 600] [--transport shm]`.

One prefill and one decode leader in two processes, joined by a real session and transport. Each
hand-off is aborted at a random moment of its life, by a random side; measured is the time from the
abort to the other side's terminal event, both on CLOCK_MONOTONIC of this host. A hand-off that had
already ended when the abort came is not counted. Then the same through HTTP: a client leaves in
the middle of its stream, and the time is until both instances hold nothing of it (asked again and
again, so it is an upper bound).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from pathlib import Path

import httpx2 as httpx

from leader_pair import Pair, Say, Work
from recorded import commit, quantile


class Aborts(Pair):
    """Hand-offs of which one side ends each."""

    def one(self, room: int, side: str, after_s: float) -> float | None:
        """Seconds until the other side learned of the abort; None if it came too late to matter."""
        self.open(room)
        with self.changed:  # wait, but wake up early if the hand-off ends by itself
            self.changed.wait_for(lambda: ("decode", "SUCCESS", room) in self.news, after_s)
        if side == "decode":
            self.note("decode", Say("aborted", room, self.decode.abort(room)))
        else:
            self.order("abort", room)
        other = "prefill" if side == "decode" else "decode"
        for each in ("prefill", "decode"):
            self.wait(each, "released", room)
        aborted = self.wait(side, "aborted", room).at
        learned, own = self.news.get((other, "FAILED", room)), self.news.get((side, "FAILED", room))
        if learned is None or own is None or learned.at < aborted:
            return None
        return learned.at - aborted


def between_leaders(aborts: int, transport: str) -> dict[str, list[float]]:
    rng, bench = random.Random(1), Aborts(Work(transport=transport))
    times: dict[str, list[float]] = {"from prefill": [], "from decode": []}
    room = 0
    while sum(map(len, times.values())) < aborts:
        room += 1
        side = rng.choice(["prefill", "decode"])
        seconds = bench.one(room, side, rng.uniform(0, 0.025))
        if seconds is not None:
            times[f"from {side}"].append(seconds * 1e3)
    bench.close()
    return times


def through_http(count: int) -> list[float]:
    import from_tests  # noqa: F401
    import tiny_model
    import traffic
    from cluster import MODEL, Cluster

    folder = tiny_model.save(Path(tempfile.mkdtemp()))
    asks = traffic.asks(5, count, vocab=200, longest=1500, max_tokens=2000)
    rng, times = random.Random(2), []

    async def leave(url: str, ask: traffic.Ask, after_s: float) -> None:
        task = asyncio.create_task(traffic.stream(url, MODEL, ask))
        await asyncio.wait({task}, timeout=after_s)
        task.cancel()
        await asyncio.wait({task})

    with Cluster(folder) as cluster, httpx.Client() as client:
        doors = [part.door for name, part in cluster.parts.items() if name != "frontend"]
        for ask in asks:
            asyncio.run(leave(cluster.url, ask, rng.uniform(0.01, 0.3)))
            at = time.monotonic()
            while not all(client.get(f"{door}/integrity").json()["at_rest"] for door in doors):
                assert time.monotonic() - at < 30
            times.append((time.monotonic() - at) * 1e3)
    return times


def summary(values: list[float]) -> dict[str, float]:
    return {
        "n": len(values),
        "p50_ms": round(quantile(values, 0.5), 3),
        "p99_ms": round(quantile(values, 0.99), 3),
        "max_ms": round(max(values), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--aborts", type=int, default=600)
    parser.add_argument("--http", type=int, default=100, help="clients that leave")
    parser.add_argument("--transport", default="shm")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    raw = between_leaders(args.aborts, args.transport)
    if args.http:
        raw["client leaves"] = through_http(args.http)
    rows = {name: summary(values) for name, values in raw.items()}
    rows["between leaders"] = summary(raw["from prefill"] + raw["from decode"])
    for name, row in rows.items():
        print(f"{name:>16}  " + "   ".join(f"{key} {value:9.3f}" for key, value in row.items()))
    if args.json:
        result = {"command": sys.argv, "commit": commit(), "rows": rows, "raw_ms": raw}
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
