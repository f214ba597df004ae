"""Memory that a rank's part of a model takes while it loads: `.venv/bin/python bench/rank_memory.py FOLDER`.

`before`, `loaded` and `cut` are the private memory of the process in MiB, `peak` is its largest resident
size, which counts pages of the weights' files that all ranks share. `whole`: the model is converted whole,
as it was before ranks converted their part alone. Each line is a process of its own.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import torch
from transformers import LlamaForCausalLM  # noqa: F401  # what it takes is not the model's

from segue.engine.models.model_loading import load_model
from segue.engine.parallel import ParallelSize
from segue.engine.ranks.slicing import cut


def mib(field: str) -> int:
    """A field of this process's status."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) // 1024 for line in lines if line.startswith(f"{field}:"))


def measure(folder: Path, dtype: str, tp: int, pp: int, in_parts: bool) -> None:
    """Load the last rank's part and print what that took."""
    size = ParallelSize(tp=tp, pp=pp)
    before = mib("RssAnon")
    with torch.inference_mode():
        whole = load_model(folder, dtype, in_parts=in_parts)
        loaded = mib("RssAnon")
        part = cut(whole, size, size.coord(size.ranks - 1))
    del whole
    held = f"before {before} loaded {loaded} cut {mib('RssAnon')} peak {mib('VmHWM')}"
    print(f"{dtype} tp {tp} pp {pp} {'in parts' if in_parts else 'whole'}: {held}", flush=True)
    del part


def main() -> int:
    """Measure each case in a process of its own, or one case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("case", nargs="*")
    args = parser.parse_args()
    if args.case:
        dtype, tp, pp, way = args.case
        measure(args.folder, dtype, int(tp), int(pp), way == "in-parts")
        return 0
    for dtype in ("bfloat16", "float32"):
        for sizes in (("2", "1"), ("1", "2")):
            for way in ("whole", "in-parts"):
                command = [sys.executable, __file__, str(args.folder), dtype, *sizes, way]
                subprocess.run(command, check=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
