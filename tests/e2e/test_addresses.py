"""A deployment without a registry: every part is given the addresses of the instances."""

from __future__ import annotations

from pathlib import Path

import httpx2 as httpx
import pytest
from cluster import MODEL
from served import Served

from ports import HeldPort
from segue.cli.main import main


@pytest.mark.slow
def test_parts_that_know_each_others_addresses_serve_without_a_registry(
    tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    held = HeldPort(), HeldPort()
    one, two = (each.port for each in held)
    url = f"static://127.0.0.1:{one},127.0.0.1:{two}"
    common = ("--registry", url, "--model", str(tiny), "--served-model-name", MODEL)
    engine = ("--dtype", "float32", "--kv-gib", "0.02", "--threads-per-worker", "1")
    with (
        Served(*common, "--port", "0", command="frontend", wait=False) as frontend,
        Served(*common, *engine, "--port", str(one), command="prefill", wait=False) as prefill,
        Served(*common, *engine, "--port", str(two), command="decode", wait=False) as decode,
    ):
        for part in (prefill, decode, frontend):
            part.ready()
        body = {"model": MODEL, "prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0, "ignore_eos": True}
        answer = httpx.post(f"{frontend.url}/v1/completions", json=body, timeout=60)
        assert answer.json()["usage"]["completion_tokens"] == 4
        assert main(["ps", "--registry", url]) == 0
        shown = capsys.readouterr().out
        assert f"127.0.0.1:{one}" in shown
        assert f"127.0.0.1:{two}" in shown
        # Each keeps a session with each address, which `holdings` does not expect.
        for part in (frontend, prefill, decode):
            assert part.stop(at_rest=False) == 0
