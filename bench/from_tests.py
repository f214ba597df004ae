"""Import this before what a measurement takes from the tests: Python finds it from then on."""

import sys
from pathlib import Path

_TESTS = Path(__file__).resolve().parent.parent / "tests"
FOLDERS = [
    _TESTS / "server" / "frontend",
    _TESTS / "server" / "fleet",
    _TESTS / "e2e",
    _TESTS / "e2e" / "chaos",
    _TESTS / "vllm_engines",
    _TESTS / "integrations" / "vllm",
    _TESTS / "sglang_engines",
    _TESTS / "deploy",
    _TESTS,
]
sys.path[:0] = map(str, FOLDERS)
