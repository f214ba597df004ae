"""The engine's step beside the sum of its own parts, timed alone and interleaved with it in one run.

    .venv/bin/python bench/engine.py --model FOLDER --json bench/results/engine.json

Each part is the fastest plain torch form that we know, over all layers, with the model's own weights
and as many separate K and V as the model has layers, so that no part lives in a cache in which the
step could not. `required` are the parts that issue 2 names; rotary embedding and residual adds, which
any step also has, are listed beside them. One thread. Medians.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

from segue.engine.cpu.cpu_forward import CpuForward, load_engine
from segue.engine.cpu.cpu_products import FusedNorm
from segue.engine.engine_api import SequenceStep, run_step
from segue.engine.replica_engine import ReplicaEngine
from segue.engine.request import SamplingParams

REQUIRED = ("products", "attention", "norms", "activation", "sampling")
CASES = {
    "decode batch 1, context 128": (1, 1, 128),
    "decode batch 16, context 576": (16, 1, 576),
    "prefill 512": (1, 512, 512),
    "prefill 1024": (1, 1024, 1024),
}

Part = Callable[[], object]


def step_of(engine: ReplicaEngine, batch: int, rows: int, context: int, first_page: int = 0) -> Part:
    """A step of `batch` sequences of `rows` new tokens each; the pool holds noise before them."""
    draw = random.Random(0)
    each = -(-context // engine.spec.page_tokens)
    steps = []
    for index in range(batch):
        start = context - rows
        pages = list(range(first_page + index * each, first_page + (index + 1) * each))
        tokens = [draw.randrange(engine.info.vocab_size) for _ in range(rows)]
        steps.append(SequenceStep(index, tokens, start, pages, True))
    return lambda: run_step(engine, steps)


def fastest(forms: list[Part]) -> Part:
    """The fastest of several forms of the same computation, on this machine, now."""
    return min(forms, key=lambda form: median_s(form, 5))


def median_s(call: Part, count: int) -> float:
    times = []
    for _ in range(count):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def parts_of(engine: ReplicaEngine, batch: int, rows: int, context: int) -> dict[str, Part]:
    """Every part of a step, each over all layers."""
    forward = engine._forward
    assert isinstance(forward, CpuForward)
    assert forward.head is not None
    model, head = forward.loaded.model, forward.head._product
    layers = list(model.model.layers)
    n, (hidden, inner) = (
        batch * rows,
        (layers[0].input_norm.size, model.config.intermediate_size),
    )
    q_heads, kv_heads, dim = layers[0].heads, layers[0].kv_heads, layers[0].head_dim
    x, res, wide, wide2 = (torch.randn(n, size).bfloat16() for size in (hidden, hidden, inner, inner))
    last = torch.randn(batch, hidden).bfloat16()
    attended = torch.randn(n, q_heads * dim).bfloat16()
    q = torch.randn(batch, q_heads, rows, dim).bfloat16()
    kv = [
        (
            torch.randn(batch, kv_heads, context, dim).bfloat16(),
            torch.randn(batch, kv_heads, context, dim).bfloat16(),
        )
        for _ in layers
    ]
    turned = torch.randn(n, q_heads + kv_heads, dim).bfloat16()
    cos, sin = torch.randn(n, 1, dim).bfloat16(), torch.randn(n, 1, dim).bfloat16()
    logits = torch.randn(batch, engine.info.vocab_size)
    norm: FusedNorm = layers[0].input_norm
    weight = norm.weight.bfloat16()
    normed = torch.empty_like(x)
    count = 2 * len(layers) + 1

    def products() -> None:
        for layer in layers:
            mlp = layer.feed_forward
            layer.qkv(x), layer.o(attended), mlp._gate(x), mlp._up(x), mlp._down(wide)
        head(last)

    def attention() -> None:
        for k, v in kv:
            F.scaled_dot_product_attention(q, k, v, is_causal=rows > 1, enable_gqa=True)

    def repeat(call: Part, times: int) -> Part:
        def run() -> None:
            for _ in range(times):
                call()

        return run

    return {
        "products": products,
        "attention": attention,
        "norms": repeat(
            fastest([lambda: F.rms_norm(x, (hidden,), weight, norm.eps), lambda: norm(x, n, normed)]), count
        ),
        "activation": repeat(lambda: F.silu(wide).mul_(wide2), len(layers)),
        "sampling": lambda: engine.sampler.sample(list(range(batch)), logits),
        "rotary": repeat(
            fastest(
                [
                    lambda: (turned * cos).addcmul_(turned.roll(dim // 2, -1), sin),
                    lambda: (turned * cos).addcmul_(
                        torch.cat((turned[..., dim // 2 :], turned[..., : dim // 2]), -1), sin
                    ),
                ]
            ),
            len(layers),
        ),
        "residual adds": repeat(lambda: x + res, 2 * len(layers)),
    }


def measure(engine: ReplicaEngine, name: str, rounds: int) -> dict[str, object]:
    batch, rows, context = CASES[name]
    calls = {"step": step_of(engine, batch, rows, context), **parts_of(engine, batch, rows, context)}
    times: dict[str, list[float]] = {key: [] for key in calls}
    for index in range(rounds + 2):
        for key, call in calls.items():
            begin = time.perf_counter()
            call()
            if index >= 2:
                times[key].append((time.perf_counter() - begin) * 1e3)
    medians = {key: statistics.median(values) for key, values in times.items()}
    step_ms = medians.pop("step")
    required_ms = sum(medians[key] for key in REQUIRED)
    return {
        "case": name,
        "step_ms": step_ms,
        "parts_ms": medians,
        "required_sum_ms": required_ms,
        "all_sum_ms": sum(medians.values()),
        "step_over_required": step_ms / required_ms,
        "step_over_all": step_ms / sum(medians.values()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="folder of a llama-family model")
    parser.add_argument(
        "--rounds", type=int, default=40, help="rounds of decode cases; prefill takes a quarter"
    )
    parser.add_argument("--json", type=Path, help="where to write the results")
    args = parser.parse_args()
    engine = load_engine(args.model, dtype="bfloat16", pool_bytes=2**29, threads=1)
    with torch.inference_mode():
        engine.pool.kv.normal_()
        for index in range(16):
            engine.open(index, [1], SamplingParams(temperature=0.0))
        results = []
        for name, (_, rows, _) in CASES.items():
            result = measure(engine, name, args.rounds if rows == 1 else max(8, args.rounds // 4))
            results.append(result)
            parts = ", ".join(f"{key} {value:.2f}" for key, value in result["parts_ms"].items())  # type: ignore[attr-defined]
            print(f"{name}: step {result['step_ms']:.2f} ms; {parts}")
            print(
                f"  step / required parts = {result['step_ms']:.2f} / {result['required_sum_ms']:.2f}"
                f" = {result['step_over_required']:.3f};"
                f" step / all parts = {result['step_ms']:.2f} / {result['all_sum_ms']:.2f}"
                f" = {result['step_over_all']:.3f}"
            )
    if args.json:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
        record = {
            "command": " ".join(["bench/engine.py", *sys.argv[1:]]),
            "commit": commit.stdout.strip(),
            "torch": torch.__version__,
            "machine": platform.platform(),
            "threads": 1,
            "results": results,
        }
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
