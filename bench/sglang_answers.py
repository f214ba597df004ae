"""Answers of two SGLang engines that segue hands KV over between, and of one engine beside itself.

    .venv-sglang/bin/python bench/sglang_answers.py --dtype bfloat16 --json FILE

Needs the environment of `make test-sglang`. The same greedy prompts, in batches and one at a time, to one
engine and to a prefill and a decode engine. For each two of these: the prompts whose tokens differ, and the
lead of the first token over the second one, in log-probability, where they part.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import from_tests  # noqa: F401
from sglang_sides import Side, Sides, prompts

from recorded import commit

Answers = dict[str, list[list[Any]]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--batch", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=12)
    parser.add_argument("--no-radix-cache", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    options = {"dtype": arguments.dtype, "disable_radix_cache": arguments.no_radix_cache}
    asked = prompts(arguments.prompts)
    runs: dict[str, Answers] = {}
    with TemporaryDirectory() as folder:
        sides = Sides(Path(folder))
        try:
            one = sides.start("null", **options)
            one.answer()
            for size in (arguments.batch, 1):
                runs[f"one engine, {size} at a time"] = ask(sides, [one], asked, size, arguments.tokens)
            one.end()
            pair = [sides.start(role, **options) for role in ("prefill", "decode")]
            for side in pair:
                side.answer()
            for size in (arguments.batch, 1):
                runs[f"two engines, {size} at a time"] = ask(sides, pair, asked, size, arguments.tokens)
            pages, wrong = digests(sides.folder / "digests")
        finally:
            sides.close()
    found = {f"{a} | {b}": differences(runs[a], runs[b]) for a, b in itertools.combinations(runs, 2)}
    found["pages"] = {"landed": pages, "with other bytes than prefill stored": wrong}
    for name, difference in found.items():
        print(name, json.dumps(difference))
    if arguments.json:
        about = {"command": " ".join(sys.argv), "commit": commit(), "load": os.getloadavg()}
        arguments.json.write_text(json.dumps({**about, "prompts": len(asked), **found}, indent=1) + "\n")


def ask(sides: Sides, engines: list[Side], asked: list[str], size: int, tokens: int) -> Answers:
    """The tokens of all prompts, so many at a time, and the leads of each of them."""
    found: Answers = {"ids": [], "leads": []}
    for at in range(0, len(asked), size):
        batch = asked[at : at + size]
        rooms = sides.rooms(len(batch))
        jobs = [(side, side.ask(batch, rooms, tokens=tokens, logprobs=True)) for side in engines]
        answers = [side.answer(job) for side, job in jobs]
        for name, values in found.items():
            values += answers[-1][name]
    return found


def differences(first: Answers, second: Answers) -> dict[str, Any]:
    """The prompts whose tokens differ, and the lead in both where they part."""
    parted, leads = [], []
    for number, (a, b) in enumerate(zip(first["ids"], second["ids"], strict=True)):
        if a != b:
            at = next(n for n, (x, y) in enumerate(zip(a, b, strict=True)) if x != y)
            parted.append(number)
            leads.append([round(run["leads"][number][at], 4) for run in (first, second)])
    return {"equal": len(first["ids"]) - len(parted), "parted": parted, "leads": leads}


def digests(path: Path) -> tuple[int, int]:
    """The pages that landed, and those whose bytes are not those that prefill stored."""
    halves = [json.loads(line) for line in path.read_text().splitlines()]
    stored = {half["room"]: half["pages"] for half in halves if half["role"] == "prefill"}
    pairs = [
        pair
        for half in halves
        if half["role"] == "decode"
        for pair in zip(half["pages"], stored[half["room"]][half["prefix"] :], strict=True)
    ]
    return len(pairs), sum(landed != stored for landed, stored in pairs)


if __name__ == "__main__":
    main()
