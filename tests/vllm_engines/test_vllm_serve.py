"""`vllm serve` over HTTP as users start it: API server, EngineCore and worker are processes of their own."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import psutil
import pytest
from engines import PYTHON, TO_PREFILL, make_model, prompts
from llmd_sidecar import Leg, mooncake, nixlv2_decode, nixlv2_prefill, picker_reads
from serving import Servers, complete, healthy, running, serve, text, texts

from ports import HeldPort

pytestmark = [pytest.mark.vllm, pytest.mark.skipif(not PYTHON.exists(), reason="needs `make test-vllm`")]

REQUESTS = 200


@pytest.fixture(scope="module", params=["tcp", "shm"])
def servers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """A pair for each transport; over shm the hand-off runs in an agent beside each worker."""
    log = tmp_path_factory.mktemp("serve")
    model = make_model(log / "model")
    ports = [HeldPort() for _ in range(3)]
    first, second, query = (held.port for held in ports)
    extra = {"transport": [request.param], "agent": request.param == "shm"}
    with (
        serve(model, "kv_producer", 0, first, log, query_port=query, **extra) as prefill,
        serve(model, "kv_consumer", 1, second, log, **extra) as decode,
    ):
        yield Servers(prefill, decode, query)


@pytest.fixture(scope="module")
def wanted(servers: Servers) -> dict[tuple[int, ...], str]:
    """Decode's own answers to prompts."""
    asked = prompts(REQUESTS, seed=9)
    answers = texts(servers.decode, asked)
    assert len(set(answers)) > 0.9 * REQUESTS
    return dict(zip(map(tuple, asked), answers, strict=True))


def test_two_servers(servers: Servers) -> None:
    asked = prompts(20, seed=8)
    for prompt in asked:
        params = complete(servers.prefill, prompt, 1, TO_PREFILL)["kv_transfer_params"]
        assert text(servers.decode, prompt, params) == text(servers.decode, prompt)
    servers.check(len(asked))


@pytest.mark.parametrize("kind", ["nixl", "mooncake"])
def test_behind_vllm_router(servers: Servers, wanted: dict[tuple[int, ...], str], kind: str) -> None:
    """The vLLM project's router, unmodified: `nixl` is the sequential flow, `mooncake` the concurrent one."""
    port = HeldPort()
    prefill = [servers.prefill] if kind == "nixl" else [servers.prefill, str(servers.query_port)]
    command = [
        str(PYTHON.parent.parent / "router" / "bin" / "vllm-router"),
        *("--vllm-pd-disaggregation", "--prefill", *prefill, "--decode", servers.decode),
        *("--kv-connector", kind, "--host", "127.0.0.1", "--port", str(port.port)),
    ]
    asked = [list(prompt) for prompt in wanted]
    router = f"http://127.0.0.1:{port.port}"
    with running(command, 0, servers.log / f"router-{kind}.log", router) as started:
        started.ready()
        assert texts(router, asked) == list(wanted.values())
    servers.check(REQUESTS)


@pytest.mark.parametrize("flow", ["nixlv2", "mooncake"])
def test_what_llm_ds_sidecar_sends(servers: Servers, flow: str) -> None:
    """Recorded from its source (`llmd_sidecar`): prefill's leg, then or at the same time decode's."""
    asked = prompts(10, seed=10)

    def post(address: str, leg: Leg) -> dict[str, Any]:
        answer = httpx.post(f"{address}/v1/completions", json=leg.body, headers=leg.headers, timeout=60)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    for number, prompt in enumerate(asked):
        body = {"model": "dummy", "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        if flow == "nixlv2":
            first = post(servers.prefill, nixlv2_prefill(body, f"r{number}"))
            answer = post(servers.decode, nixlv2_decode(body, f"r{number}", first))
        else:
            query = httpx.get(f"http://127.0.0.1:{servers.query_port}/query", timeout=10).json()
            one, other = mooncake(body, "127.0.0.1", servers.query_port, query)
            beside = threading.Thread(target=post, args=(servers.prefill, one))
            beside.start()
            answer = post(servers.decode, other)
            beside.join()
        assert answer["choices"][0]["text"] == text(servers.decode, prompt)
    servers.check(len(asked))
    for address in (servers.prefill, servers.decode):
        read = picker_reads(httpx.get(f"{address}/metrics", timeout=10).text)
        assert read["vllm:num_requests_waiting"] == 0
        assert read["num_gpu_blocks"] > 0


@pytest.mark.parametrize("servers", ["shm"], indirect=True)
def test_a_killed_agent_fails_the_health_check(servers: Servers) -> None:
    """At the next request: vLLM's workers do nothing without one."""
    [agent] = agents(servers.pids[1])
    assert healthy(servers.decode)
    agent.kill()
    [prompt] = prompts(1, seed=10)
    body = {"model": "dummy", "prompt": prompt, "max_tokens": 8}
    with contextlib.suppress(httpx.TransportError):  # the server may have ended
        assert httpx.post(f"{servers.decode}/v1/completions", json=body, timeout=60).status_code >= 500
    deadline = time.monotonic() + 30
    while healthy(servers.decode):
        assert time.monotonic() < deadline
        time.sleep(0.1)  # it is asked, and says nothing by itself
    assert healthy(servers.prefill)


def agents(server: int) -> list[psutil.Process]:
    """The agents among the descendants of a server's process."""
    family = psutil.Process(server).children(recursive=True)
    return [process for process in family if "segue.kv.agent.agent_process" in process.cmdline()]
