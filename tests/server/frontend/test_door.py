"""The public port for clients of the internet: TLS and its renewal, pages of other origins, quiet streams."""

import asyncio
import contextlib
import os
import re
import socket
import ssl
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import wraps
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
import uvloop
from cryptography.hazmat.primitives import serialization
from frontend_rig import DEADLINE_S, FakeBackend, Running, serve
from starlette.responses import JSONResponse
from test_tool_calls import ASK

from segue.cli.commands.client_flags import trusting
from segue.engine.request import Output, Request
from segue.kv import pending
from segue.kv.errors import ConfigError, OutOfCapacity
from segue.kv.session.guarded_listener import GuardedListener
from segue.server.frontend.client_tls import ClientTls
from segue.server.frontend.frontend_listener import FrontendListener
from segue.server.frontend.http_call import HttpCall, Receive, Scope, Send
from segue.server.frontend.keys import ApiKeys
from segue.server.frontend.tokenizer import ModelTokenizer
from segue.server.observe.metrics import Metrics
from segue.server.settings.shared_config import ClientsConfig
from tls_files import Authority

PAGE = "https://page.example"


async def told(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["path"] == "/starlette":
        await JSONResponse({})(scope, receive, send)
        return
    await HttpCall(scope, receive).answer(200, {"here": scope["path"]})


@contextlib.asynccontextmanager
async def listening(keys: tuple[str, ...] = (), drain_s: float = 1, **clients: Any) -> AsyncIterator[str]:
    listener = FrontendListener(
        "127.0.0.1",
        0,
        drain_s=drain_s,
        keys=ApiKeys(keys),
        metrics=Metrics(),
        clients=ClientsConfig(**clients),
    )
    try:
        if not keys:
            listener.open(told)
        yield listener.url
    finally:
        await listener.close()


def in_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """The test, run in an event loop of its own."""

    @wraps(test)
    def run(**given: Any) -> None:
        uvloop.run(test(**given))  # type: ignore[arg-type]

    return run


# ---- TLS ----------------------------------------------------------------------------------------


def shown(url: str, authority: Authority) -> bytes:
    """The certificate that a client is shown, which comes from this authority."""
    context = ssl.create_default_context(cafile=str(authority.file))
    with httpx.Client(verify=context) as client, client.stream("GET", f"{url}/x") as answer:
        assert answer.status_code == 200
        found: bytes = answer.extensions["network_stream"].get_extra_info("ssl_object").getpeercert(True)
        answer.read()
        return found


@in_loop
async def test_a_renewed_certificate_is_shown_to_the_next_client_and_a_broken_one_is_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    authority = Authority(tmp_path)
    first, second = authority.issue(), authority.issue()
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"

    def put(files: Any) -> None:
        # As a renewal does it: each file is replaced at once.
        for source, at in ((files.key, key), (files.cert, cert)):
            (tmp_path / "new").write_bytes(source.read_bytes())
            os.utime(tmp_path / "new", (0, 0))  # as a copy that keeps the times
            (tmp_path / "new").rename(at)

    put(first)
    caplog.set_level("INFO", "segue.frontend.tls")
    async with listening(https_cert=str(cert), https_key=str(key)) as url:
        assert url.startswith("https://")
        before = await asyncio.to_thread(shown, url, authority)
        assert await asyncio.to_thread(shown, url, authority) == before
        put(second)
        after = await asyncio.to_thread(shown, url, authority)
        assert after != before
        (tmp_path / "new").write_bytes(first.key.read_bytes())
        (tmp_path / "new").rename(key)
        assert await asyncio.to_thread(shown, url, authority) == after, "the pair does not fit: not taken"
        cert.unlink()
        for _ in range(3):
            assert await asyncio.to_thread(shown, url, authority) == after
        assert caplog.text.count("are not used") == 2, "once for each trouble, and not for each client"
        put(first)
        assert await asyncio.to_thread(shown, url, authority) == before
        cert.unlink()
        assert await asyncio.to_thread(shown, url, authority) == before
        assert caplog.text.count("are not used") == 3
        assert caplog.text.count("https_certificate_reloaded") == 2, "not for each client"


@in_loop
async def test_a_connection_in_a_pool_and_half_a_handshake_delay_neither_a_client_nor_the_end(
    tmp_path: Path,
) -> None:
    authority = Authority(tmp_path)
    files, loop = authority.issue(), asyncio.get_running_loop()
    context = ssl.create_default_context(cafile=str(authority.file))
    async with contextlib.AsyncExitStack() as ending:
        url = await ending.enter_async_context(
            listening(drain_s=60, https_cert=str(files.cert), https_key=str(files.key))
        )
        port = httpx.URL(url).port
        assert port is not None
        with socket.create_connection(("127.0.0.1", port)) as half, httpx.Client(verify=context) as pool:
            half.sendall(b"\x16\x03\x01")
            assert (await asyncio.to_thread(pool.get, f"{url}/x")).status_code == 200
            began = loop.time()
            await ending.aclose()
            assert loop.time() - began < 20


@in_loop
async def test_a_client_without_tls_gets_no_answer(tmp_path: Path) -> None:
    files = Authority(tmp_path).issue()
    async with listening(https_cert=str(files.cert), https_key=str(files.key)) as url:
        with pytest.raises(httpx.HTTPError):
            async with httpx.AsyncClient() as client:
                (await client.get(url.replace("https", "http"))).raise_for_status()


@in_loop
async def test_clients_whose_handshake_fails_are_one_line_a_minute(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = Authority(tmp_path).issue()
    async with (
        listening(https_cert=str(files.cert), https_key=str(files.key)) as url,
        httpx.AsyncClient() as client,
    ):
        for _ in range(3):
            answer = await client.get(url.replace("https", "http"))
            assert "use https://" in answer.json()["error"]["message"]
    [line] = caplog.messages
    assert re.fullmatch(r"127\.0\.0\.1:\d+ was refused: only TLS is spoken here .* use https://", line)
    caplog.clear()
    listener = GuardedListener(lambda: None, server_tls=None, handshake_s=1.0, count=lambda what: None)
    for number in range(3):
        listener.log_refused(f"client {number}", "no")
    listener.log_refused("client 9", "another reason")
    monkeypatch.setattr(pending, "REFUSED_S", 0.0)
    listener.log_refused("client 3", "no")
    listener.log_refused("client 4", "no")
    assert caplog.messages == [
        "client 0 was refused: no",
        "client 9 was refused: another reason",
        "client 3 was refused: no; 2 more since the last such line",
        "client 4 was refused: no",
    ]


@in_loop
async def test_a_command_on_this_host_trusts_the_server_s_own_certificate_and_no_other(
    tmp_path: Path,
) -> None:
    authority = Authority(tmp_path)
    files, other = authority.issue("chat.example"), authority.issue("chat.example")
    async with listening(https_cert=str(files.cert), https_key=str(files.key)) as url:
        for cert, trusted in ((files.cert, True), (other.cert, False), (None, False)):
            expected: Any = contextlib.nullcontext() if trusted else pytest.raises(httpx.ConnectError)
            async with httpx.AsyncClient(verify=trusting(None if cert is None else str(cert))) as client:
                with expected:
                    assert (await client.get(f"{url}/x")).status_code == 200
    for wrong in (files.key, tmp_path / "gone"):
        with pytest.raises(ConfigError, match="cannot be read"):
            trusting(str(wrong))


def test_files_that_cannot_work_are_refused_at_the_start(tmp_path: Path) -> None:
    first, second = Authority(tmp_path).issue(), Authority(tmp_path, "b").issue()
    with pytest.raises(ConfigError, match="matching pair"):
        ClientTls(str(first.cert), str(second.key))
    with pytest.raises(ConfigError, match=r"--https-key .* cannot be read"):
        ClientTls(str(first.cert), str(tmp_path / "no"))
    with pytest.raises(ConfigError, match="together"):
        ClientsConfig(https_cert="x")
    assert ClientTls(str(first.cert), str(first.key)).context.minimum_version is ssl.TLSVersion.TLSv1_2
    locked = serialization.BestAvailableEncryption(b"a passphrase")
    key = serialization.load_pem_private_key(first.key.read_bytes(), None)
    pkcs8 = serialization.PrivateFormat.PKCS8
    first.key.write_bytes(key.private_bytes(serialization.Encoding.PEM, pkcs8, locked))
    with pytest.raises(ConfigError, match="without a passphrase"):
        ClientTls(str(first.cert), str(first.key))


# ---- pages of other origins ---------------------------------------------------------------------

ASKS = {
    "origin": PAGE,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization",
}


@pytest.mark.parametrize("allowed", [PAGE, f"https://other.example, {PAGE}", "*"])
@in_loop
async def test_a_page_of_an_allowed_origin_may_ask_and_read_the_answer(allowed: str) -> None:
    async with (
        listening(allowed_origins=allowed, keys=("right",)) as locked,
        listening(allowed_origins=allowed) as url,
        httpx.AsyncClient() as client,
    ):
        asked = await client.options(f"{locked}/v1/models", headers=ASKS)
        assert asked.status_code == 204, "a browser asks without the key"
        assert asked.headers["access-control-allow-headers"] == "authorization"
        assert "POST" in asked.headers["access-control-allow-methods"]
        for at, status in ((url, 200), (locked, 401)):
            answer = await client.get(f"{at}/v1/models", headers={"origin": PAGE})
            assert answer.status_code == status
            assert answer.headers["access-control-allow-origin"] == ("*" if allowed == "*" else PAGE)
            assert "x-request-id" in answer.headers["access-control-expose-headers"]
            assert answer.headers["vary"] == "origin"
        answer = await client.get(f"{url}/starlette", headers={"origin": PAGE})
        assert "access-control-allow-origin" in answer.headers
        plain = await client.options(url, headers={"origin": PAGE})
        assert plain.status_code == 200, "it is no browser's question"


@pytest.mark.parametrize("allowed", ["", "https://other.example"])
@in_loop
async def test_a_page_of_another_origin_may_not(allowed: str) -> None:
    async with listening(allowed_origins=allowed, keys=("right",)) as url, httpx.AsyncClient() as client:
        for answer in (
            await client.options(f"{url}/v1/models", headers=ASKS),
            await client.get(f"{url}/health", headers={"origin": PAGE}),
        ):
            assert answer.status_code == 403
            assert f"give --allowed-origins {PAGE}" in answer.json()["error"]["message"]
            assert not [name for name in answer.headers if name.startswith("access-control")]


@pytest.mark.parametrize("wrong", ["page.example", "https://page.example/path", "https://*.example", "null"])
def test_an_origin_that_is_none_is_refused(wrong: str) -> None:
    with pytest.raises(ConfigError, match="is no origin"):
        ClientsConfig(allowed_origins=f"{PAGE},{wrong}")


# ---- quiet streams ------------------------------------------------------------------------------


class Slow(FakeBackend):
    """Says nothing until it may, and then fails or answers."""

    def __init__(self, tokenizer: ModelTokenizer) -> None:
        super().__init__(tokenizer)
        self.go_on = asyncio.Event()

    async def _run(self, request: Request) -> AsyncIterator[Output]:
        async for output in super()._run(request):
            self.reached.set()
            await self.go_on.wait()
            if self.error is not None:
                raise self.error.info.exception()
            yield output


def pass_time(running: Running, backend: Slow) -> None:
    """Three times as long as a stream may be quiet, once the request runs."""
    assert backend.reached.wait(DEADLINE_S)
    for _ in range(3):
        running.over(16.0)


@pytest.mark.parametrize(
    ("path", "comment"),
    [
        ("/v1/chat/completions", ": waiting for tokens\n\n"),
        ("/v1/responses", ": waiting for tokens\n\n"),
        ("/v1/messages", 'event: ping\ndata: {"type":"ping"}\n\n'),
    ],
)
@pytest.mark.parametrize("fails", [False, True])
def test_a_stream_without_tokens_gets_comments(
    tokenizer: ModelTokenizer, path: str, comment: str, fails: bool
) -> None:
    backend = Slow(tokenizer)
    backend.error = OutOfCapacity("full") if fails else None
    body = {"model": "tiny", "messages": ASK, "input": "hi", "max_tokens": 50, "stream": True}
    with serve(backend, tokenizer, jumping=True, quiet_s=15.0) as running:
        passing = threading.Thread(target=pass_time, args=(running, backend))
        passing.start()
        with running.http.stream("POST", path, json=body) as answer_of:
            passing.join()
            pieces, text = answer_of.iter_text(), ""
            while text.count(comment) < 3:
                text += next(pieces)
            assert text == comment * 3
            running.on_loop(backend.go_on.set)
            text += "".join(pieces)
        assert text.startswith(comment * 3)
        assert ("full" in text) is fails
        assert text.count(comment) == 3
