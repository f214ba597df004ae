"""Answers of vLLM engines that segue hands KV over to, and what is held over many requests.

    python bench/vllm_answers.py --json FILE

Needs the environment of `make test-vllm`. For each transport: as many prompts as `--answers` sequentially and
concurrently, compared with decode's own answers without a hand-off; then `--requests` more, and after each
tenth of them what both engines hold at rest.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import from_tests  # noqa: F401
from engines import TO_PREFILL, Clients, Engine, make_model, prompts, transfer_config, unified

from ports import HeldPort
from recorded import commit


def run(transport: str, model: Path, log: Path, answers: int, requests: int) -> dict[str, Any]:
    """All figures of one transport."""
    port = HeldPort()
    sides = []
    try:
        for role, core, extra in (("kv_producer", 0, {"query_port": port.port}), ("kv_consumer", 1, {})):
            config = transfer_config(role, transport=[transport], **extra)
            sides.append(
                Engine(f"{transport}-{role}", core, log, model=str(model), kv_transfer_config=config)
            )
        prefill, decode = (side.wait() for side in sides)
        clients = Clients(prefill, decode, port.port)
        asked = prompts(answers, seed=11)
        wanted = unified(decode, "u", asked)
        found: dict[str, Any] = {"vllm": decode.version, "distinct_answers": len({*map(tuple, wanted)})}
        for flow in ("sequential", "concurrent"):
            got = getattr(clients, flow)(flow, asked)
            found[flow] = {"asked": answers, "equal": sum(a == b for a, b in zip(got, wanted, strict=True))}
        found["outcomes"] = decode.counts()["outcomes"]
        found["one_at_a_time"] = legs(prefill, decode, asked[:50])
        found["curve"] = curve(clients, requests)
        return found
    finally:
        for side in sides:
            side.close()


def legs(prefill: Engine, decode: Engine, asked: list[list[int]]) -> dict[str, float]:
    """Milliseconds of a request to decode, 8 tokens out, one at a time: with KV of prefill, and without."""
    handed_over: list[float] = []
    alone: list[float] = []
    for number, tokens in enumerate(asked):
        prefill.ask(f"leg-p{number}", tokens, 1, TO_PREFILL)
        params = prefill.answer(f"leg-p{number}")["params"]
        for name, times, given in (("d", handed_over, params), ("u", alone, None)):
            begin = time.perf_counter()
            decode.ask(f"leg-{name}{number}", tokens, 8, given)
            decode.answer(f"leg-{name}{number}")
            times.append(1000 * (time.perf_counter() - begin))
    return {"handed_over_p50_ms": statistics.median(handed_over), "alone_p50_ms": statistics.median(alone)}


def curve(clients: Clients, requests: int) -> list[dict[str, Any]]:
    """The resources of both engines at rest after each tenth of the requests, half of them in each flow."""
    points = [{"requests": 0, **holdings(clients)}]
    for tenth in range(10):
        asked = prompts(requests // 20, seed=100 + tenth)
        clients.sequential(f"cs{tenth}-", asked)
        clients.concurrent(f"cc{tenth}-", asked)
        points.append({"requests": (tenth + 1) * (requests // 20) * 2, **holdings(clients)})
    return points


def holdings(clients: Clients) -> dict[str, Any]:
    """The resources of each engine at rest: free blocks, rooms, pins, descriptors, threads, memory."""
    found = {}
    for engine in (clients.prefill, clients.decode):
        counts = engine.at_rest()
        held = counts.pop("held")
        counts |= {
            name: held[name] for name in ("rooms", "pinned", "halves", "handles", "transfers", "ended")
        }
        found[engine.name.split("-")[1]] = counts
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--transports", default="tcp,shm")
    parser.add_argument("--answers", type=int, default=200)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with TemporaryDirectory() as folder:
        model = make_model(Path(folder) / "model")
        figures = {
            name: run(name, model, Path(folder), arguments.answers, arguments.requests)
            for name in arguments.transports.split(",")
        }
    for name, found in figures.items():
        print(name, json.dumps({key: value for key, value in found.items() if key != "curve"}))
        for point in found["curve"]:
            print("  ", json.dumps(point))
    if arguments.json:
        about = {"command": " ".join(sys.argv), "commit": commit(), "load": os.getloadavg()}
        arguments.json.write_text(json.dumps({**about, **figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
