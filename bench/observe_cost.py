"""CPU of a frontend per streamed chunk while it is observed, over that of a frontend without observers.

    .venv/bin/python bench/observe_cost.py [--on spans scrapes dashboard] [--pairs 5] [--model M]

Two deployments of `segue serve` stream the same answers in turns, in alternating order. One of them exports
the spans of each request to a collector (`spans`), is scraped once a second (`scrapes`) and has a viewer of
its dashboard (`dashboard`). A frontend always counts; what that takes of a chunk is measured alone.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import from_tests  # noqa: F401
import psutil

from frontend import one
from otlp import collecting
from recorded import commit
from routing import cpu_s
from segue.server.frontend.generate import Meter
from segue.server.observe.metrics import Metrics
from serve import ROOT, machine, served

PARTS = ("spans", "scrapes", "dashboard")
PROMPT = "the capital of France is Paris and the answer " * 8
SCRAPE_S = 1.0
ALONE = 200_000


@contextlib.contextmanager
def deployment(model: str) -> Iterator[tuple[str, int]]:
    """A `segue serve`: its URL and the number of its frontend's process."""
    flags = ["--model", model] if model else []
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    with served(flags) as url:
        [pid] = [
            process.pid
            for process in psutil.Process().children(recursive=True)
            if process.pid not in before and "frontend" in process.cmdline()[:5]
        ]
        yield url, pid


@contextlib.contextmanager
def beside(work: Callable[[threading.Event], None]) -> Iterator[None]:
    """Run `work` in a thread until the block ends; raise its failure."""
    ended, failures = threading.Event(), list[Exception]()

    def run() -> None:
        try:
            work(ended)
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(30)
    for failure in failures:
        raise failure


@contextlib.contextmanager
def observed(url: str, parts: list[str]) -> Iterator[None]:
    """A scraper and a viewer, if they are among `parts`."""

    def scrape(ended: threading.Event) -> None:
        while not ended.wait(SCRAPE_S):
            with urllib.request.urlopen(f"{url}/metrics", timeout=10) as page:
                page.read()

    def view(ended: threading.Event) -> None:
        with urllib.request.urlopen(f"{url}/dashboard/events", timeout=10) as stream:
            while not ended.is_set():
                stream.readline()

    with contextlib.ExitStack() as stack:
        if "scrapes" in parts:
            stack.enter_context(beside(scrape))
        if "dashboard" in parts:
            stack.enter_context(beside(view))
        yield


async def chunk_us(url: str, pid: int, streams: int, tokens: int, times: int) -> float:
    """CPU microseconds of the frontend for each event of `times` answers on each of `streams` connections."""
    port = int(url.rpartition(":")[2])
    body = {"prompt": PROMPT, "max_tokens": tokens, "stream": True, "ignore_eos": True, "temperature": 0}
    before = cpu_s(pid)
    events = sum(await asyncio.gather(*(one(port, body, times, "/v1/completions") for _ in range(streams))))
    return (cpu_s(pid) - before) / events * 1e6


def counting_us() -> float:
    """CPU microseconds that the metrics take of one chunk."""
    meter, last = Meter(Metrics(), time.monotonic, time.monotonic(), ("chat", "segue", "m")), time.monotonic()
    began = time.process_time()
    for _ in range(ALONE):
        last = meter.arrived(None, 1, last)  # type: ignore[arg-type]  # a sample is asked at its first token
    return (time.process_time() - began) / ALONE * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--on", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--times", type=int, default=4)
    parser.add_argument("--model", default="")
    parser.add_argument("--json", type=Path, default=ROOT / "bench" / "results" / "observe_cost.json")
    args = parser.parse_args()
    runs: dict[str, list[float]] = {"off": [], "on": []}
    load = os.getloadavg()
    with contextlib.ExitStack() as stack:
        made = {"off": stack.enter_context(deployment(args.model))}
        if "spans" in args.on:
            collector, _ = stack.enter_context(collecting())
            os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = collector
        made["on"] = stack.enter_context(deployment(args.model))
        for pair in range(-1, args.pairs):  # the first one warms up
            for name in ("off", "on") if pair % 2 else ("on", "off"):
                url, pid = made[name]
                with observed(url, args.on if name == "on" else []):
                    found = asyncio.run(chunk_us(url, pid, args.streams, args.tokens, args.times))
                if pair >= 0:
                    runs[name].append(found)
                    print(f"pair {pair}: {name} {found:.1f} µs CPU per chunk", flush=True)
    ratios = [on / off for on, off in zip(runs["on"], runs["off"], strict=True)]
    counting, off = counting_us(), statistics.median(runs["off"])
    low, middle, high = (f(ratios) for f in (min, statistics.median, max))
    print(f"{' '.join(args.on)}, over off: {middle:.3f} ({low:.3f} to {high:.3f})")
    print(f"off, over its median: {min(runs['off']) / off:.3f} to {max(runs['off']) / off:.3f}")
    print(f"counting: {counting:.2f} of {off:.1f} µs, {100 * counting / off:.1f} %")
    report = {
        "commit": commit(),
        "machine": machine(),
        "load": [load, os.getloadavg()],
        "on": args.on,
        "chunk_us": runs,
        "ratios": ratios,
        "counting_us": counting,
    }
    args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
