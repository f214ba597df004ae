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
def running(command: list[str], core: int, log: Path, ready: str) -> Iterator[None]:
    """A program until the block ends, once it answers at `ready`; its process group is ended at last."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=environment(core), stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        deadline = time.monotonic() + START_S
        while not healthy(ready):
            assert process.poll() is None, f"it has ended, see {log}"
            assert time.monotonic() < deadline, f"it is not ready, see {log}"
            time.sleep(0.5)  # it says so nowhere else
        yield
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(20)


def serve(model: Path, role: str, core: int, port: int, log: Path, **extra: Any) -> Any:
    """A `vllm serve`."""
    command = [
        str(PYTHON.with_name("vllm")),
        *("serve", str(model), "--served-model-name", "dummy", "--port", str(port), "--host", "127.0.0.1"),
        *("--dtype", "float32", "--enforce-eager", "--max-model-len", "1024", "--block-size", str(BLOCK)),
        *("--num-gpu-blocks-override", "256", "--no-enable-prefix-caching", "--max-num-seqs", "8"),
        *("--kv-transfer-config", json.dumps(transfer_config(role, **extra))),
    ]
    return running(command, core, log / f"{role}.log", f"http://127.0.0.1:{port}/health")


def healthy(address: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(address, timeout=5).status_code == 200
    return False


class Servers:
    """A prefill and a decode server, by their addresses."""

    def __init__(self, query_port: int, prefill: str, decode: str, log: Path) -> None:
        self.query_port, self.prefill, self.decode, self.log = query_port, prefill, decode, log
        self.handed_over = 0

    def check(self, more: int) -> None:
        """So many more hand-offs have ended, all well, and nothing is held."""
        self.handed_over += more
        ok = 'vllm:segue_handoffs_total{engine="0",model_name="dummy",outcome="OK"}'
        for address in (self.prefill, self.decode):
            until(address, "vllm:segue_handoffs_total", self.handed_over)
            assert metric(address, ok) == self.handed_over
            until(address, "vllm:segue_pinned_blocks", 0)
            until(address, "vllm:kv_cache_usage_perc", 0)
            assert metric(address, "vllm:segue_kv_bytes_total") > 0


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    log = tmp_path_factory.mktemp("serve")
    model = make_model(log / "model")
    ports = [HeldPort() for _ in range(3)]
    first, second, query = (held.port for held in ports)
    with (
        serve(model, "kv_producer", 0, first, log, transport=["tcp"], query_port=query),
        serve(model, "kv_consumer", 1, second, log, transport=["tcp"]),
    ):
        yield Servers(query, f"http://127.0.0.1:{first}", f"http://127.0.0.1:{second}", log)


def complete(address: str, prompt: list[int], count: int, params: Any = None) -> dict[str, Any]:
    body = {"model": "dummy", "prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True}
    body |= {"kv_transfer_params": params} if params else {}
    answer = httpx.post(f"{address}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def text(address: str, prompt: list[int], params: Any = None) -> str:
    return str(complete(address, prompt, 8, params)["choices"][0]["text"])


def metric(address: str, name: str) -> float:
    """The sum of a metric over its labels."""
    lines = httpx.get(f"{address}/metrics", timeout=10).text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


def until(address: str, name: str, wanted: float, within_s: float = 15) -> None:
    """Figures come with a step, and prefill keeps a room for a moment after decode has it."""
    deadline = time.monotonic() + within_s
    while (found := metric(address, name)) != wanted:
        assert time.monotonic() < deadline, f"{name} of {address} is {found}, not {wanted}"
        time.sleep(0.1)  # metrics are asked for


def test_two_servers(servers: Servers) -> None:
    asked = prompts(20, seed=8)
    for prompt in asked:
        params = complete(servers.prefill, prompt, 1, TO_PREFILL)["kv_transfer_params"]
        assert text(servers.decode, prompt, params) == text(servers.decode, prompt)
    servers.check(len(asked))


@pytest.mark.parametrize("kind", ["nixl", "mooncake"])
def test_behind_vllm_router(servers: Servers, kind: str) -> None:
    """The vLLM project's router, unmodified: `nixl` is the sequential flow, `mooncake` the concurrent one."""
    port = HeldPort()
    prefill = [servers.prefill] if kind == "nixl" else [servers.prefill, str(servers.query_port)]
    command = [
        str(PYTHON.parent.parent / "router" / "bin" / "vllm-router"),
        *("--vllm-pd-disaggregation", "--prefill", *prefill, "--decode", servers.decode),
        *("--kv-connector", kind, "--host", "127.0.0.1", "--port", str(port.port)),
    ]
    asked = prompts(20, seed=9)
    router = f"http://127.0.0.1:{port.port}"
    with running(command, 0, servers.log / f"router-{kind}.log", f"{router}/health"):
        for prompt in asked:
            assert text(router, prompt) == text(servers.decode, prompt)
    servers.check(len(asked))
