"""`vllm serve` over HTTP as users start it: API server, EngineCore and worker are processes of their own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from engines import BLOCK, PYTHON, TO_PREFILL, environment, make_model, prompts, transfer_config

from ports import HeldPort

pytestmark = [pytest.mark.vllm, pytest.mark.skipif(not PYTHON.exists(), reason="needs `make test-vllm`")]

START_S = 200


@contextlib.contextmanager
def serve(model: Path, role: str, core: int, port: int, log: Path, **extra: Any) -> Iterator[str]:
    """The base address of a `vllm serve`; its whole process group is ended at last."""
    command = [
        str(PYTHON.with_name("vllm")),
        *("serve", str(model), "--served-model-name", "dummy", "--port", str(port), "--host", "127.0.0.1"),
        *("--dtype", "float32", "--enforce-eager", "--max-model-len", "1024", "--block-size", str(BLOCK)),
        *("--num-gpu-blocks-override", "256", "--no-enable-prefix-caching", "--max-num-seqs", "8"),
        *("--kv-transfer-config", json.dumps(transfer_config(role, **extra))),
    ]
    path = log / f"{role}.log"
    with path.open("wb") as output:
        process = subprocess.Popen(
            command, env=environment(core), stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        address = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + START_S
        while not healthy(address):
            assert process.poll() is None, f"vllm serve has ended, see {path}"
            assert time.monotonic() < deadline, f"vllm serve is not ready, see {path}"
            time.sleep(0.5)  # it says so nowhere else
        yield address
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(20)


def healthy(address: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"{address}/health", timeout=5).status_code == 200
    return False


def complete(address: str, prompt: list[int], count: int, params: Any = None) -> dict[str, Any]:
    body = {"model": "dummy", "prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True}
    body |= {"kv_transfer_params": params} if params else {}
    answer = httpx.post(f"{address}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def metric(address: str, name: str) -> float:
    """The sum of a metric over its labels."""
    lines = httpx.get(f"{address}/metrics", timeout=10).text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


def until_zero(address: str, name: str, within_s: float = 10) -> None:
    """Prefill keeps a room for a moment after decode has it."""
    deadline = time.monotonic() + within_s
    while metric(address, name):
        assert time.monotonic() < deadline, f"{name} of {address} is {metric(address, name)}"
        time.sleep(0.1)  # metrics are asked for


def test_two_servers(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    ports = HeldPort(), HeldPort()
    asked = prompts(20, seed=8)
    with (
        serve(model, "kv_producer", 0, ports[0].port, tmp_path, transport=["tcp"]) as prefill,
        serve(model, "kv_consumer", 1, ports[1].port, tmp_path, transport=["tcp"]) as decode,
    ):
        for prompt in asked:
            params = complete(prefill, prompt, 1, TO_PREFILL)["kv_transfer_params"]
            handed_over = complete(decode, prompt, 8, params)
            assert handed_over["choices"][0]["text"] == complete(decode, prompt, 8)["choices"][0]["text"]
        ok = 'vllm:segue_handoffs_total{engine="0",model_name="dummy",outcome="OK"}'
        for address in (prefill, decode):
            assert metric(address, "vllm:segue_handoffs_total") == metric(address, ok) == len(asked)
            until_zero(address, "vllm:segue_pinned_blocks")
            assert metric(address, "vllm:segue_kv_bytes_total") > 0
            assert metric(address, "vllm:kv_cache_usage_perc") == 0
