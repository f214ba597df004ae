"""The report of `segue advise`, as `--json` writes it."""

from __future__ import annotations

import msgspec

from segue_lab.advise.advice import Advice, Question
from segue_lab.advise.costs import StepTimes

#: Tokens that a worker's KV memory holds where `--kv-gib` was not given.
UNLIMITED_TOKENS = 2**40


class WireRow(msgspec.Struct, frozen=True, kw_only=True):
    """Handing over the mean prompt by one transport: milliseconds in all, and after the last forward."""

    name: str
    gb_per_s: float
    wire_ms: float
    exposed_ms: float


class AdviseReport(msgspec.Struct, frozen=True, kw_only=True):
    """All that `segue advise` says; `--json` writes it. `fit_error`: the largest part by which the
    calculation misses a measured forward; None without a measurement."""

    version: str
    command: str
    model: str
    steps: StepTimes
    fit_error: float | None
    kv_bytes_per_request: float
    wires: tuple[WireRow, ...]
    transport: str
    question: Question
    advice: Advice
