"""`vllm serve` as users start it, and requests to it over HTTP."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2 as httpx
from engines import BLOCK, PYTHON, environment, transfer_config

START_S = 200


@dataclass(frozen=True, slots=True)
class Running:
    """A server at `url`, whose log is `log`."""

    process: subprocess.Popen[bytes]
    log: Path
    url: str

    def ready(self) -> None:
        """Wait until it says that it is healthy; fail if it ends before."""
        deadline = time.monotonic() + START_S
        while not healthy(self.url):
            assert self.process.poll() is None, f"it has ended, see {self.log}"
            assert time.monotonic() < deadline, f"it is not ready, see {self.log}"
            time.sleep(0.5)  # it says so nowhere else


@contextlib.contextmanager
def running(command: list[str], core: int | str, log: Path, url: str) -> Iterator[Running]:
    """A server until the block ends; its process group is ended at last. Others can start beside it."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=environment(core), stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        yield Running(process, log, url)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(20)


def serve(
    model: Path, role: str, core: int | str, port: int, log: Path, *arguments: str, **extra: Any
) -> contextlib.AbstractContextManager[Running]:
    """A `vllm serve` with more `arguments`; `extra` are the connector's settings."""
    command = [
        str(PYTHON.with_name("vllm")),
        *("serve", str(model), "--served-model-name", "dummy", "--port", str(port), "--host", "127.0.0.1"),
        *("--dtype", "float32", "--enforce-eager", "--max-model-len", "1024", "--block-size", str(BLOCK)),
        *("--num-gpu-blocks-override", "256", "--no-enable-prefix-caching", "--max-num-seqs", "8"),
        *("--kv-transfer-config", json.dumps(transfer_config(role, **extra)), *arguments),
    ]
    return running(command, core, log / f"{role}.log", f"http://127.0.0.1:{port}")


def healthy(url: str) -> bool:
    """Whether a server says so."""
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"{url}/health", timeout=5).status_code == 200
    return False


def complete(
    address: str, prompt: list[int], count: int, params: Any = None, rank: int | None = None
) -> dict[str, Any]:
    """The answer to a prompt, by a data-parallel rank."""
    body = {"model": "dummy", "prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True}
    body |= {"kv_transfer_params": params} if params else {}
    headers = {} if rank is None else {"X-data-parallel-rank": str(rank)}
    answer = httpx.post(f"{address}/v1/completions", json=body, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def text(address: str, prompt: list[int], params: Any = None, count: int = 8) -> str:
    """The text of an answer."""
    return str(complete(address, prompt, count, params)["choices"][0]["text"])


def texts(address: str, asked: list[list[int]], at_once: int = 8) -> list[str]:
    """The texts of the answers to several prompts."""
    with ThreadPoolExecutor(at_once) as threads:
        return list(threads.map(lambda prompt: text(address, prompt), asked))


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


class Servers:
    """The URLs of a prefill and a decode server, once both are ready, and the port of `GET /query`; `pids`
    are those of their processes, `log` is the folder of their logs."""

    def __init__(self, prefill: Running, decode: Running, query_port: int = 0) -> None:
        both = prefill, decode
        for server in both:
            server.ready()
        self.prefill, self.decode, self.query_port = prefill.url, decode.url, query_port
        self.pids = [server.process.pid for server in both]
        self.log = prefill.log.parent
        self.handed_over = 0

    def check(self, more: int) -> None:
        """So many more hand-offs have ended, all well, and nothing is held."""
        self.handed_over += more
        for address in (self.prefill, self.decode):
            until(address, "vllm:segue_handoffs_total", self.handed_over)
            lines = httpx.get(f"{address}/metrics", timeout=10).text.splitlines()
            ended = [line for line in lines if line.startswith("vllm:segue_handoffs_total")]
            assert all('outcome="OK"' in line for line in ended), ended
            until(address, "vllm:segue_pinned_blocks", 0)
            until(address, "vllm:kv_cache_usage_perc", 0)
            assert metric(address, "vllm:segue_kv_bytes_total") > 0
