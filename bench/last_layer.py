"""A step with and without the rows of the last layer that nobody looks at, in turns, in CPU time.

.venv/bin/python bench/last_layer.py [--turns 14] [--tokens 512]
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time

from recorded import commit
from segue.engine.cpu.cpu_forward import CpuForward, load_engine
from segue.engine.cpu.cpu_fused import FusedLayer
from segue.engine.engine_api import SequenceStep, run_step
from segue.engine.models.model_store import resolve_model
from segue.engine.request import SamplingParams
from serve import ROOT, machine


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--turns", type=int, default=14)
    parser.add_argument("--tokens", type=int, default=512)
    args = parser.parse_args()
    engine = load_engine(resolve_model("smollm2"), dtype="bfloat16", pool_bytes=2**27, threads=1)
    assert isinstance(engine._forward, CpuForward)
    layer = engine._forward.loaded.model.model.layers[-1]
    assert isinstance(layer, FusedLayer)
    draw = random.Random(0)
    tokens = [draw.randrange(engine.info.vocab_size) for _ in range(args.tokens)]
    pages = list(range(-(-args.tokens // engine.spec.page_tokens)))
    engine.open(1, tokens, SamplingParams(max_tokens=2**20, temperature=0.0))
    report: dict[str, object] = {"commit": commit(), "machine": machine(), "tokens": args.tokens}
    for name, sample in (("a chunk before the last", False), ("the last chunk", True)):
        cpu_s: dict[bool, list[float]] = {True: [], False: []}
        for turn in range(args.turns):
            for layer.last in (turn % 2 == 0, turn % 2 == 1):
                began = time.process_time()
                run_step(engine, [SequenceStep(1, tokens, 0, pages, sample)])
                cpu_s[layer.last].append(time.process_time() - began)
        ratios = [few / every for few, every in zip(cpu_s[True], cpu_s[False], strict=True)]
        report[name] = {
            "all_rows_ms": 1e3 * statistics.median(cpu_s[False]),
            "wanted_rows_ms": 1e3 * statistics.median(cpu_s[True]),
            "ratio": statistics.median(ratios),
        }
        print(name, report[name], flush=True)
    file = ROOT / "bench" / "results" / "last_layer.json"
    file.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
