"""Number types that this processor multiplies, and the type that `--dtype auto` stands for.

Decided from the flags of /proc/cpuinfo, so that the supervisor of `segue serve`, `segue doctor` and `segue
advise` can ask without torch. `ONEDNN_MAX_CPU_ISA` lowers the answer as it lowers the instructions that
oneDNN uses; ATEN_CPU_CAPABILITY does not change which products oneDNN computes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

#: The setting that leaves the choice to the processor.
AUTO = "auto"
#: Flags of x86 and ARM ("bf16", "asimdhp") processors that multiply a type. AVX-512 without one of these
#: emulates bfloat16: each product converts to float32 first.
_MULTIPLY = {
    "bfloat16": frozenset({"amx_bf16", "avx512_bf16", "bf16"}),
    "float16": frozenset({"amx_fp16", "avx512_fp16", "asimdhp"}),
}
#: Flags that are named to a person.
_NAMED = ("amx_bf16", "avx512_bf16", "avx512_fp16", "avx512f", "avx2", "bf16", "asimdhp", "asimd")
#: Values of `ONEDNN_MAX_CPU_ISA` that hide the instructions for a type; other values hide none.
_EMULATED = frozenset({"SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI"})
_HIDDEN_BY = {"bfloat16": _EMULATED, "float16": _EMULATED | {"AVX512_CORE_BF16"}}
_CEILINGS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")


@dataclass(frozen=True, slots=True)
class Processor:
    """`found` names the flags that matter, `multiplies` the half-precision types with instructions of
    their own."""

    found: str
    multiplies: frozenset[str]

    @property
    def best(self) -> str:
        """The type that `--dtype auto` stands for."""
        return "bfloat16" if "bfloat16" in self.multiplies else "float32"

    def dtype(self, setting: str) -> str:
        """The type that the setting `--dtype` stands for."""
        return self.best if setting == AUTO else setting

    def is_slow(self, dtype: str) -> bool:
        """Whether float32 is faster than `dtype`."""
        return dtype != "float32" and dtype not in self.multiplies

    @property
    def reason(self) -> str:
        """One clause that says why `best` is chosen."""
        does = "multiplies" if self.best == "bfloat16" else "does not multiply"
        return f"this processor {does} bfloat16 ({self.found})"


def processor_of(cpuinfo: str, environ: Mapping[str, str]) -> Processor:
    """The processor that /proc/cpuinfo describes, under the limit of oneDNN that `environ` sets. Pure."""
    flags: set[str] = set()
    for line in cpuinfo.splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            flags |= set(value.split())
    found = " ".join(name for name in _NAMED if name in flags) or "no vector instructions known to segue"
    variable = next((name for name in _CEILINGS if environ.get(name)), "")
    ceiling = environ.get(variable, "").upper()
    if ceiling in _HIDDEN_BY["float16"]:
        found += f", {variable}={ceiling}"
    multiplies = (dtype for dtype, needs in _MULTIPLY.items() if flags & needs)
    return Processor(found, frozenset(dtype for dtype in multiplies if ceiling not in _HIDDEN_BY[dtype]))


def this_processor() -> Processor:
    """The processor of this host; one that multiplies float32 alone where the kernel does not describe it."""
    try:
        cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        cpuinfo = ""
    return processor_of(cpuinfo, os.environ)
