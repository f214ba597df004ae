"""An instance's HTTP door among silent clients: probes still get their answer, and no descriptor stays."""

from __future__ import annotations

import asyncio
import gc
import os

import httpx2 as httpx
import pytest
import uvloop

from segue.server.http.guarded_http import GuardedServer
from segue.server.instance.instance_http import InstanceStatus, start_http

LOOPS = {"asyncio": asyncio.run, "uvloop": uvloop.run}
DEADLINE_S = 60.0


async def _nothing() -> object:
    return {}


def door(request_s: float) -> GuardedServer:
    facts = InstanceStatus(
        about={"x": 1}, load=lambda: None, counts=dict, alive=lambda: True, integrity=_nothing
    )  # type: ignore[arg-type]
    return start_http(facts, "127.0.0.1", 0, request_s)


def descriptors() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("runner", LOOPS)
def test_200_silent_connections_keep_no_probe_out_and_end_at_their_deadline(runner: str) -> None:
    async def main() -> None:
        server = door(0.5)
        try:
            url = "http://{}:{}".format(*server.address)
            async with httpx.AsyncClient(timeout=60) as client:
                assert (await client.get(f"{url}/health")).json() == {"status": "ok"}
                before = descriptors()
                silent = [await asyncio.open_connection(*server.address) for _ in range(200)]
                async with httpx.AsyncClient(timeout=60) as probe:
                    assert (await probe.get(f"{url}/health")).status_code == 200
                assert server.pending <= 128
                async with asyncio.timeout(DEADLINE_S):
                    while server.pending:  # noqa: ASYNC110  nothing tells of it
                        await asyncio.sleep(0.01)
                for _, writer in silent:
                    writer.close()
                async with asyncio.timeout(DEADLINE_S):
                    while descriptors() > before:  # noqa: ASYNC110
                        await asyncio.sleep(0.01)
        finally:
            await server.stop()

    LOOPS[runner](main())
