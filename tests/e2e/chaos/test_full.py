"""Disk, shared memory and the KV pool are full while 32 clients stream: nothing hangs, nobody dies."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import httpx2 as httpx
import pytest
import traffic
from cluster import MODEL, Cluster
from served import Served
from soak_kills import references
from tiny_model import VOCAB

from ports import HeldPort

pytestmark = [pytest.mark.soak, pytest.mark.timeout(300)]

NO_SPACE = Path("/dev/full")
#: About 180 pages of 16 tokens: less than a third of what 32 clients need at once.
TIGHT_GIB = 0.0014


def results_of(url: str, asks: list[traffic.Ask]) -> list[traffic.Result]:
    async def run() -> list[traffic.Result]:
        return list(await asyncio.gather(*(traffic.stream(url, MODEL, ask, within_s=120) for ask in asks)))

    return asyncio.run(run())


def test_a_full_disk_and_no_memory_for_a_newcomer_disturb_no_stream(tiny: Path) -> None:
    """Every line that is logged fails (ENOSPC), and a newcomer finds no shared memory for its pool: it
    says so in one sentence and leaves."""
    asks = traffic.asks(31, 32, vocab=VOCAB - 8, longest=100, max_tokens=500)
    names = ("prefill-0", "decode-0", "decode-1")
    held = {name: HeldPort() for name in names}
    doors = {name: each.port for name, each in held.items()}
    with Cluster(
        tiny,
        names,
        flags=("--log-level", "debug"),
        stderr=dict.fromkeys((*names, "frontend"), NO_SPACE),
        doors=doors,
    ) as cluster:
        reference = asyncio.run(references(cluster.url, asks))

        async def meanwhile() -> tuple[list[traffic.Result], tuple[int, str]]:
            first = asyncio.Event()
            streams = [
                asyncio.create_task(traffic.stream(cluster.url, MODEL, ask, first=first)) for ask in asks
            ]
            await first.wait()
            newcomer = await asyncio.to_thread(no_shared_memory, cluster, tiny)
            return list(await asyncio.gather(*streams)), newcomer

        results, (status, said) = asyncio.run(meanwhile())
        assert [r.error for r in results] == [""] * 32
        assert {r.ask: r.tokens for r in results} == reference
        assert status == 1
        assert "cannot allocate" in said
        assert "--kv-gib" in said
        assert "Traceback" not in said
        assert results_of(cluster.url, asks[:2])[0].tokens == reference[asks[0]]
        cluster.rest()


def no_shared_memory(cluster: Cluster, model: Path) -> tuple[int, str]:
    """Start a decode instance that may make no file of more than 64 KiB, memfds included."""
    command = [sys.executable, "-m", "segue.cli.main", "decode", "--model", str(model), "--kv-gib", "0.05"]
    command += ["--registry", f"http://127.0.0.1:{cluster.registry.port}", "--threads-per-worker", "1"]
    command += ["--dtype", "float32", "--served-model-name", MODEL]
    done = subprocess.run(
        ["prlimit", "--fsize=65536", *command],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
    )
    return done.returncode, done.stderr


def test_a_pool_that_is_far_too_small_serves_32_clients_and_refuses_what_never_fits(tiny: Path) -> None:
    asks = traffic.asks(32, 32, vocab=VOCAB - 8, longest=100, max_tokens=200)
    calm = ("--unified", "--dtype", "float32", "--kv-gib", "0.05", "--model", str(tiny), "--port", "0")
    calm += ("--served-model-name", MODEL, "--threads-per-worker", "1")
    with Served(*calm) as undisturbed, Cluster(tiny, kv_gib=TIGHT_GIB) as cluster:
        reference = asyncio.run(references(undisturbed.url, asks))
        results = results_of(cluster.url, asks)
        assert [r.error for r in results] == [""] * 32
        assert {r.ask: r.tokens for r in results} == reference
        [never] = results_of(cluster.url, [traffic.Ask(tuple([7] * 3500), 4)])
        assert never.error == "INVALID_REQUEST"
        assert never.status == 400
        states = cluster.rest()
        assert all(s["pages"]["free"] == s["pages"]["total"] for s in states.values() if s["pages"])
        assert httpx.get(f"{cluster.url}/ready", timeout=60).status_code == 200
