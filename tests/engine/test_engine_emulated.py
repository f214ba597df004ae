"""The engine on weaker processors than this one: torch refuses to pack bfloat16, and all else is as here."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from emulated import below

HERE = Path(__file__).parent
pytestmark = pytest.mark.timeout(900)

REFUSAL = """
import torch
from segue.engine.cpu.cpu_products import packs_bfloat16
from segue.engine.cpu.processor import this_processor
try:
    torch.ops.mkldnn._reorder_linear_weight(torch.ones(64, 64, dtype=torch.bfloat16), None)
    refused = "no"
except RuntimeError as error:
    refused = str(error).partition(":")[0]
print(this_processor().best, packs_bfloat16(), refused)
"""


def run(ceiling: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | below(ceiling),
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("ceiling", ["avx2", "sse"])
def test_below_avx512_torch_refuses_to_pack_bfloat16_and_auto_is_float32(ceiling: str) -> None:
    """On a processor with AVX-512 this is the failure that ended each start on one without."""
    assert run(ceiling, "-c", REFUSAL).split() == ["float32", "False", "mkldnn_reorder_linear_weight"]


@pytest.mark.slow
def test_avx512_that_only_emulates_bfloat16_serves_float32() -> None:
    best, packs, refused = run("avx512", "-c", REFUSAL).split()
    assert best == "float32"
    assert (packs == "True") is (refused == "no"), "packed where it can be, never refused"


@pytest.mark.slow
@pytest.mark.parametrize("ceiling", ["sse", "avx512"])
def test_engine_and_kernels_give_the_same_tokens_below(ceiling: str) -> None:
    if not below(ceiling):
        pytest.skip("this processor has nothing above that; `make test` runs these tests on it")
    files = [str(HERE / f"test_engine_{name}.py") for name in ("kernels", "families", "cpu")]
    words = ("-k", "not test_tokens_equal_generate or 64-")  # one size of a chunk
    said = run(ceiling, "-m", "pytest", "-n", "0", "-q", "-p", "no:cacheprovider", *words, *files)
    assert " passed" in said
