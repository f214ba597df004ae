"""The type that `--dtype auto` stands for, by the flags of a processor."""

import platform
import subprocess
import sys

import pytest

from segue.engine.cpu.cpu_products import packs_bfloat16
from segue.engine.cpu.processor import processor_of, this_processor

AMX = "flags\t: fpu avx2 avx512f avx512bw avx512_bf16 avx512_fp16 amx_bf16 amx_tile\n"
ZEN4 = "flags\t: fpu avx2 avx512f avx512bw avx512_bf16\n"


@pytest.mark.parametrize(
    ("cpuinfo", "environ", "best", "slow"),
    [
        (AMX, {}, "bfloat16", []),
        (ZEN4, {}, "bfloat16", ["float16"]),
        ("flags\t: fpu avx2 avx512f avx512bw avx512vl avx512dq\n", {}, "float32", ["bfloat16", "float16"]),
        ("flags\t: fpu avx2 avx_ne_convert\n", {}, "float32", ["bfloat16", "float16"]),
        ("flags\t: fpu avx2\n", {}, "float32", ["bfloat16", "float16"]),
        ("Features\t: fp asimd asimdhp bf16\n", {}, "bfloat16", []),
        ("Features\t: fp asimd\n", {}, "float32", ["bfloat16", "float16"]),
        ("", {}, "float32", ["bfloat16", "float16"]),
        (AMX, {"ONEDNN_MAX_CPU_ISA": "AVX2"}, "float32", ["bfloat16", "float16"]),
        (AMX, {"ONEDNN_MAX_CPU_ISA": "sse41"}, "float32", ["bfloat16", "float16"]),
        (AMX, {"DNNL_MAX_CPU_ISA": "AVX512_CORE"}, "float32", ["bfloat16", "float16"]),
        (AMX, {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}, "bfloat16", ["float16"]),
        (AMX, {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_AMX"}, "bfloat16", []),
        (AMX, {"ONEDNN_MAX_CPU_ISA": "ALL", "ATEN_CPU_CAPABILITY": "default"}, "bfloat16", []),
        (ZEN4, {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_AMX"}, "bfloat16", ["float16"]),
    ],
)
def test_auto_is_bfloat16_where_the_processor_multiplies_it(
    cpuinfo: str, environ: dict[str, str], best: str, slow: list[str]
) -> None:
    processor = processor_of(cpuinfo, environ)
    assert processor.dtype("auto") == best
    assert [dtype for dtype in ("bfloat16", "float16", "float32") if processor.is_slow(dtype)] == slow
    assert processor.dtype("float16") == "float16", "a type that is named is taken"


def test_the_reason_names_the_flags_and_the_variable() -> None:
    limited = processor_of(AMX, {"ONEDNN_MAX_CPU_ISA": "AVX2"})
    assert limited.reason == (
        "this processor does not multiply bfloat16 "
        "(amx_bf16 avx512_bf16 avx512_fp16 avx512f avx2, ONEDNN_MAX_CPU_ISA=AVX2)"
    )
    assert processor_of(ZEN4, {}).reason == ("this processor multiplies bfloat16 (avx512_bf16 avx512f avx2)")


def test_this_processor_is_described_without_torch() -> None:
    program = "import sys; from segue.engine.cpu.processor import this_processor as it; "
    program += "print(it().best, 'torch' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == [this_processor().best, "False"]


def test_on_another_architecture_nothing_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """oneDNN could be asked there and says yes; what packing costs or gains is not measured."""
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert not packs_bfloat16()
