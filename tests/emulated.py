"""Weaker processors than this one, by the variables that oneDNN, torch and numba read.

A ceiling only lowers: on a processor that is below it the variables change nothing, and the tests still run.
Variables that could raise what is used (numba's, and torch's) are set only where the processor has it.
"""

from __future__ import annotations

from pathlib import Path

_AVX2 = "+avx2,+fma,+f16c,+bmi,+bmi2,+lzcnt,+popcnt"
#: Flags of /proc/cpuinfo that a processor above the ceiling has, and the variables that hide them.
_CEILINGS = {
    "avx512": (
        "avx512_bf16",
        {
            "ONEDNN_MAX_CPU_ISA": "AVX512_CORE",
            "NUMBA_CPU_NAME": "skylake-avx512",
            "NUMBA_CPU_FEATURES": f"{_AVX2},+avx512f,+avx512bw,+avx512vl,+avx512dq,+avx512cd",
        },
    ),
    "avx2": (
        "avx2",
        {
            "ONEDNN_MAX_CPU_ISA": "AVX2",
            "ATEN_CPU_CAPABILITY": "avx2",
            "NUMBA_CPU_NAME": "haswell",
            "NUMBA_CPU_FEATURES": _AVX2,
        },
    ),
    "sse": (
        "sse2",
        {"ONEDNN_MAX_CPU_ISA": "SSE41", "ATEN_CPU_CAPABILITY": "default", "NUMBA_CPU_NAME": "generic"},
    ),
}


def below(ceiling: str) -> dict[str, str]:
    """The variables of a process that is to use nothing above `ceiling`."""
    flag, variables = _CEILINGS[ceiling]
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    has = any(flag in line.split() for line in lines if line.startswith("flags"))
    return variables if has else {}
