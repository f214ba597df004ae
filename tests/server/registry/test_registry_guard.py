"""The registry's HTTP server among hostile clients: bounded, deadlined, and TLS with readable reasons."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import httpx2 as httpx
import msgspec
import pytest
import uvloop
from registry_records import DEADLINE_S, SECRET, record

from segue.kv.errors import (
    BootstrapUnreachable,
    ConfigError,
    ErrorCode,
    PeerRefused,
    Unauthorized,
)
from segue.kv.ids import Role
from segue.kv.limits import Limits
from segue.kv.session.tls import Tls
from segue.server.http.guarded_http import ErrorBody
from segue.server.registry.client import RegistryClient
from segue.server.registry.message_headers import bearer_token
from segue.server.registry.registry_server import RegistryServer, serve
from tls_files import Authority

LOOPS = {"asyncio": asyncio.run, "uvloop": uvloop.run}
#: Nobody who does what he should is late on a machine that stands still for a while.
PATIENT = Limits(handshake_s=60.0, connect_s=60.0, registry_ttl_s=60.0)


@asynccontextmanager
async def registry(**changes: object) -> AsyncIterator[RegistryServer]:
    settings = {"secret": SECRET, "limits": PATIENT} | changes
    server = await serve("127.0.0.1", 0, **settings)  # type: ignore[arg-type]
    try:
        yield server
    finally:
        await server.close()


async def asks(server: RegistryServer, tls: Tls | None = None, secret: bytes = SECRET) -> None:
    """A good client registers and sees itself."""
    client = RegistryClient(server.url, secret=secret, limits=PATIENT, tls=tls)
    try:
        await client.register(record())
        lists = client.watch(Role.PREFILL)
        async with asyncio.timeout(DEADLINE_S):
            assert len(await anext(lists)) == 1
        await lists.aclose()  # type: ignore[attr-defined]
    finally:
        await client.aclose()


def descriptors() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


async def until(condition: object) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():  # type: ignore[operator]  # noqa: ASYNC110  nothing tells of it
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("runner", LOOPS)
def test_200_silent_connections_keep_nobody_out_and_leave_no_descriptor(runner: str) -> None:
    async def main() -> None:
        async with registry() as server:
            await asks(server)
            await until(lambda: not server.server.server_state.connections)
            before = descriptors()
            silent = [await asyncio.open_connection(server.host, server.port) for _ in range(200)]
            await asks(server)
            assert server.server.pending <= 128
            assert server.server.counts["pending_dropped"] >= 200 - 128
            for _, writer in silent:
                writer.close()
            await asyncio.gather(*(w.wait_closed() for _, w in silent), return_exceptions=True)
            await until(lambda: not server.server.server_state.connections)
            await until(lambda: descriptors() <= before)

    LOOPS[runner](main())


SLOW = {
    "silent": b"",
    "half a line": b"GET /v1/hea",
    "half a head": b"GET /v1/health HTTP/1.1\r\nhost: x\r\n",
    "no body": b"PUT /v1/rooms/5 HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{",
    "half a body of one of us": (
        b"PUT /v1/rooms/5 HTTP/1.1\r\nhost: x\r\nauthorization: Bearer %b\r\ncontent-length: 1000\r\n\r\n{"
        % bearer_token(SECRET).encode()
    ),
}


@pytest.mark.parametrize("runner", LOOPS)
@pytest.mark.parametrize("opening", SLOW)
def test_a_slow_request_ends_at_its_deadline(opening: str, runner: str) -> None:
    async def main() -> None:
        async with registry(limits=Limits(handshake_s=0.2)) as server:
            reader, writer = await asyncio.open_connection(server.host, server.port)
            writer.write(SLOW[opening])
            told = b""
            async with asyncio.timeout(DEADLINE_S):
                # What the server had not read when the deadline passed resets the connection.
                with contextlib.suppress(ConnectionError):
                    told = await reader.read()
            if told and opening != "no body":
                info = msgspec.json.decode(told.partition(b"\r\n\r\n")[2], type=ErrorBody).error
                assert info.code is ErrorCode.REQUEST_TIMEOUT
            writer.close()
            await until(lambda: not server.server.server_state.connections)

    LOOPS[runner](main())


# ---- TLS ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls"))


@pytest.mark.parametrize("runner", LOOPS)
def test_the_registry_answers_over_mutual_tls(runner: str, authority: Authority) -> None:
    async def main() -> None:
        async with registry(tls=authority.issue().load()) as server:
            assert server.url.startswith("https://")
            await asks(server, authority.issue("10.0.0.9").load())
            with pytest.raises(Unauthorized, match="secret"):  # a certificate alone is not enough
                await asks(server, authority.issue().load(), secret=b"another secret of the tests")

    LOOPS[runner](main())


@pytest.mark.parametrize("runner", LOOPS)
def test_plain_and_tls_that_meet_are_told_why_they_part(
    runner: str, authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        tls = authority.issue().load()
        async with registry(tls=tls) as server, registry() as plain:
            client = RegistryClient(f"http://127.0.0.1:{server.port}", secret=SECRET, limits=PATIENT)
            with pytest.raises(PeerRefused, match=r"only TLS is spoken here.*--tls-cert"):
                await client.register(record())
            await client.aclose()
            client = RegistryClient(f"https://127.0.0.1:{plain.port}", secret=SECRET, limits=PATIENT, tls=tls)
            with pytest.raises(PeerRefused, match="does not speak TLS"):
                await client.register(record())
            await client.aclose()
            forger = Authority(tmp_path, "forger").issue(trust=authority).load()
            with pytest.raises(BootstrapUnreachable, match="may not accept our --tls-cert"):
                await asks(server, forger)
            wary = Authority(tmp_path, "wary").issue().load()
            with pytest.raises(Unauthorized, match="certificate is not valid here"):
                await asks(server, wary)

    LOOPS[runner](main())
    assert "speaks TLS and this side does not" in caplog.text
    assert "was refused: its certificate is not valid here" in caplog.text


async def test_an_address_and_files_that_contradict_one_another_are_a_wrong_setting(
    authority: Authority,
) -> None:
    for url, tls in (("https://127.0.0.1:1", None), ("http://127.0.0.1:1", authority.issue().load())):
        if tls is None:
            with pytest.raises(ConfigError, match="--tls-cert"):
                RegistryClient(url, secret=SECRET, limits=Limits(), tls=tls)


async def test_the_door_of_the_api_is_not_opened_by_health() -> None:
    async with registry() as server, httpx.AsyncClient() as client:
        assert (await client.get(f"{server.url}/v1/health")).status_code == 200
        assert server.server.pending == 1  # it asked only what everybody may


async def test_who_knows_the_secret_waits_among_strangers_no_more() -> None:
    async with registry() as server:
        for secret, held in ((b"another secret of the tests", (1, 0)), (SECRET, (0, 1))):
            headers = {"Authorization": f"Bearer {bearer_token(secret)}"}
            async with httpx.AsyncClient(headers=headers) as client:
                status = (await client.get(f"{server.url}/v1/instances")).status_code
                assert status == (200 if secret is SECRET else 401)
                assert (server.server.pending, server.server.busy) == held
            await until(lambda: not server.server.server_state.connections)


async def test_a_part_that_is_idle_makes_room_for_another_one() -> None:
    limits = Limits(handshake_s=60.0, connect_s=60.0, max_queue=1)  # four connections
    async with registry(limits=limits) as server, AsyncExitStack() as stack:
        for _ in range(6):
            headers = {"Authorization": f"Bearer {bearer_token(SECRET)}"}
            client = await stack.enter_async_context(httpx.AsyncClient(headers=headers))
            assert (await client.get(f"{server.url}/v1/instances")).status_code == 200
        assert (server.server.busy, server.server.counts["requests_dropped"]) == (4, 2)
