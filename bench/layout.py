"""How the pool's memory layout costs attention and a copy: `.venv/bin/python bench/layout.py [--json FILE]`.

SmolLM2's shape in bfloat16 (30 layers, 3 KV heads of 64, pages of 16 tokens: a page of all layers is 368 KB),
one thread, medians of interleaved rounds. Attention: one decode step of 16 sequences of 576 tokens, whose
pages lie scattered, over all layers; in a page-major pool (all layers of a page in one run), in a
layer-major one (all pages of a layer in one run, the one we have), and over K and V that are contiguous for
each sequence. Copy: 32 scattered pages to 32 others, as `shm` copies them. With `--model`, also how many
runs of pages a chunk of prefill attends one by one before it gathers them (`cpu_views.MAX_RUNS`).
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from recorded import commit
from segue.engine.cpu import cpu_views
from segue.engine.cpu.cpu_forward import load_engine
from segue.engine.cpu.cpu_kernels import make_kernels
from segue.engine.engine_api import SequenceStep, run_step
from segue.engine.replica_engine import ReplicaEngine
from segue.engine.request import SamplingParams

LAYERS, HEADS, KV_HEADS, DIM, PAGE = 30, 9, 3, 64, 16
BATCH, CONTEXT, COPIED = 16, 576, 32
PAGES = BATCH * CONTEXT // PAGE
PREFIX, CHUNK = 1024, 128

Part = Callable[[], object]


def medians_ms(calls: dict[str, Part], rounds: int) -> dict[str, float]:
    """The median of each call, in turns, after two rounds that do not count."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for index in range(rounds + 2):
        for name, call in calls.items():
            begin = time.perf_counter()
            call()
            if index >= 2:
                times[name].append((time.perf_counter() - begin) * 1e3)
    return {name: round(statistics.median(values), 3) for name, values in times.items()}


def attention(rounds: int) -> dict[str, float]:
    """Milliseconds of one step's attention, by where K and V lie."""
    order = torch.randperm(PAGES)
    tables = order.view(BATCH, CONTEXT // PAGE)
    q = torch.randn(BATCH, HEADS, 1, DIM).bfloat16()
    page_major = torch.randn(PAGES, LAYERS, 2, PAGE, KV_HEADS, DIM).bfloat16()
    layer_major = page_major.permute(1, 2, 0, 3, 4, 5).contiguous()
    whole = [
        layer_major[layer][:, tables].reshape(2, BATCH, CONTEXT, KV_HEADS, DIM).transpose(2, 3).contiguous()
        for layer in range(LAYERS)
    ]

    def attend(kv: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, kv[0], kv[1], enable_gqa=True)

    def gathered(pool_of: Callable[[int], torch.Tensor]) -> Part:
        def run() -> None:
            for layer in range(LAYERS):
                # (2, pages, 16, heads, dim) of one layer, wherever its pages lie
                kv = pool_of(layer)[:, order].view(2, BATCH, CONTEXT, KV_HEADS, DIM)
                attend(kv.transpose(2, 3))

        return run

    def contiguous() -> None:
        for kv in whole:
            attend(kv)

    qkv = torch.randn(BATCH, HEADS + 2 * KV_HEADS, DIM).bfloat16()
    qkv[:, :HEADS] = q.squeeze(2)
    out = torch.empty(BATCH, HEADS, DIM).bfloat16()
    at = np.arange(BATCH, dtype=np.int32)
    ends = np.full(BATCH, CONTEXT, dtype=np.int32)
    pages = order.to(torch.int32).numpy()
    first_page = np.arange(BATCH, dtype=np.int32) * (CONTEXT // PAGE)
    kernel = make_kernels("bfloat16", DIM, HEADS, KV_HEADS, 1).attend

    def by_kernel() -> None:
        for layer in range(LAYERS):
            k, v = layer_major[layer]
            addresses = [tensor.data_ptr() for tensor in (qkv, out, k, v)]
            addresses += [array.ctypes.data for array in (at, ends, pages, first_page)]
            kernel(*addresses, BATCH, PAGE, 0, DIM**-0.5)

    by_kernel()
    right = F.scaled_dot_product_attention(q, whole[-1][0], whole[-1][1], enable_gqa=True).squeeze(2)
    torch.testing.assert_close(out, right, rtol=0.02, atol=0.02)
    calls: dict[str, Part] = {
        "page-major, gathered": gathered(lambda layer: page_major[:, layer].transpose(0, 1)),
        "layer-major, gathered": gathered(lambda layer: layer_major[layer]),
        "layer-major, by the kernel": by_kernel,
        "contiguous": contiguous,
    }
    return medians_ms(calls, rounds)


def copies(rounds: int) -> dict[str, float]:
    """Milliseconds to copy scattered pages to others, by the pool's layout: one numpy call per page."""
    draw = random.Random(1)
    source, target = draw.sample(range(PAGES), COPIED), draw.sample(range(PAGES), COPIED)
    row = PAGE * KV_HEADS * DIM * 2
    here, there = (
        np.random.default_rng(i).integers(0, 255, (PAGES * 2 * LAYERS, row), np.uint8) for i in (0, 1)
    )
    by_page = [pool.reshape(PAGES, 2 * LAYERS, row) for pool in (here, there)]
    by_layer = [pool.reshape(2 * LAYERS, PAGES, row) for pool in (here, there)]

    def page_major() -> None:
        for a, b in zip(source, target, strict=True):
            np.copyto(by_page[1][b], by_page[0][a])

    def layer_major() -> None:
        for a, b in zip(source, target, strict=True):
            np.copyto(by_layer[1][:, b], by_layer[0][:, a])

    return medians_ms({"page-major": page_major, "layer-major": layer_major}, rounds)


def runs(engine: ReplicaEngine, rounds: int) -> dict[str, dict[str, float]]:
    """Milliseconds of a step of CHUNK tokens after PREFIX others, whose pages lie in so many runs:
    attended run by run, and gathered."""
    engine.open(0, [1], SamplingParams(temperature=0.0))
    whole = (PREFIX + CHUNK) // PAGE
    found = {}
    for count in (1, 2, 3, 4, 6, 8, 12):
        each = -(-whole // count)
        # every other extent of pages, so that no two runs are neighbours
        pages = [2 * each * (at // each) + at % each for at in range(whole)]
        step = [SequenceStep(0, list(range(1000, 1000 + CHUNK)), PREFIX, pages, False)]

        def stepped(most: int, step: list[SequenceStep] = step) -> None:
            kept, cpu_views.MAX_RUNS = cpu_views.MAX_RUNS, most
            try:
                run_step(engine, step)
            finally:
                cpu_views.MAX_RUNS = kept

        calls: dict[str, Part] = {
            "run by run": lambda stepped=stepped: stepped(99),  # type: ignore[misc]
            "gathered": lambda stepped=stepped: stepped(0),  # type: ignore[misc]
        }
        found[f"{count} runs"] = medians_ms(calls, rounds)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--model", type=Path, help="folder of a llama-family model, for the runs of a chunk")
    parser.add_argument("--json", type=Path, help="where to write the results")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with torch.inference_mode():
        found: dict[str, object] = {"attention_ms": attention(args.rounds), "copy_ms": copies(args.rounds)}
        if args.model is not None:
            engine = load_engine(args.model, dtype="bfloat16", pool_bytes=2**28, threads=1)
            found["chunk_ms"] = runs(engine, max(4, args.rounds // 2))
    print(json.dumps(found, indent=1))
    if args.json:
        args.json.write_text(json.dumps({"command": sys.argv, "commit": commit(), **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
