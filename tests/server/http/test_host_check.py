"""Which requests of web pages a server answers: by the names, the origin and the type of the body."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import httpx2 as httpx
import pytest

from segue.kv.errors import SegueError
from segue.kv.limits import Limits
from segue.server.frontend.frontend_listener import FrontendListener
from segue.server.frontend.keys import ApiKeys
from segue.server.http.host_check import HostCheck
from segue.server.instance.instance_http import InstanceStatus, start_http
from segue.server.observe.metrics import Metrics
from segue.server.registry.registry_server import serve
from segue.server.settings.shared_config import ClientsConfig

OWN = socket.gethostname().lower()
URL = "http://127.0.0.1:8000"


def answer(method: str = "POST", hosts: Any = (), origins: Any = (), **headers: str) -> tuple[int, str]:
    """Status and text of the answer to a request with these headers; `_` in a name is a dash."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"answered"})

    def body_of(error: SegueError) -> bytes:
        return error.info.text.encode()

    async def ask() -> tuple[int, str]:
        check = HostCheck(app, hosts=hosts, origins=origins, body_of=body_of, origins_hint="give --o {}")
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=check)) as http:  # type: ignore[arg-type]
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            found = await http.request(method, f"{URL}/v1/x", headers=named)
            return found.status_code, found.text

    return asyncio.run(ask())


@pytest.mark.parametrize(
    "host",
    [
        *("127.0.0.1:8000", "10.1.2.3", "[::1]:8000", "[fe80::1]", "0.0.0.0:8000", "192.168.1.7:80"),
        *("localhost", "LOCALHOST:8000", "localhost.", "chat.localhost:8000", ""),
        *(OWN, f"{OWN.upper()}:8000", f"{OWN.partition('.')[0]}.local"),
    ],
)
def test_an_address_localhost_and_the_hosts_own_name_are_always_taken(host: str) -> None:
    assert answer(host=host) == (200, "answered")


@pytest.mark.parametrize(
    "host",
    [
        *("evil.example", "evil.example:8000", "127.0.0.1.evil.example", "evil.localhost.example"),
        *("localhost.evil.example", f"{OWN}.evil.example", "1.2.3", "127.1", "[evil.example]", "x"),
        *("127.0.0.1@evil.example", "localhostt", "\x1b[2J"),
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS"])
def test_another_name_is_refused_and_the_refusal_names_the_flag(host: str, method: str) -> None:
    status, text = answer(method, host=host)
    assert status == 403
    assert "DNS rebinding" in text
    assert "give --allowed-hosts" in text
    assert text.isprintable()


def test_names_are_allowed_by_a_list_below_a_domain_or_all() -> None:
    names = ("gpu1.example", "*.svc.cluster.local")
    for host in ("gpu1.example:8000", "GPU1.example", "a.svc.cluster.local", "a.b.svc.cluster.local"):
        assert answer(hosts=names, host=host)[0] == 200
    for host in ("gpu2.example", "svc.cluster.local", "a.svc.cluster.local.example", "xgpu1.example"):
        assert answer(hosts=names, host=host)[0] == 403
    assert answer(hosts=("*",), host="evil.example")[0] == 200
    assert answer(hosts=None, host="evil.example")[0] == 200, "clients prove themselves by a key"


@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS"])
def test_pages_of_another_origin_are_refused_whatever_they_ask(method: str) -> None:
    for origin in ("https://evil.example", "http://127.0.0.1:3000", "http://localhost:8000", "null"):
        status, text = answer(method, hosts=None, origin=origin)
        assert status == 403
        assert f"give --o {origin}" in text
    assert answer(method, origin=URL)[0] == 200, "a page of this server"
    assert answer(method, origins=("https://Chat.example",), origin="https://chat.example")[0] == 200
    assert answer(method, origins=("https://chat.example",), origin="https://evil.example")[0] == 403
    assert answer(method, origins=("*",), origin="https://evil.example")[0] == 200


def test_bodies_that_a_form_sends_are_refused_and_what_curl_sends_is_not() -> None:
    for content_type in (
        "text/plain",
        "text/plain;charset=UTF-8",
        "TEXT/PLAIN",
        "multipart/form-data; boundary=x",
    ):
        status, text = answer(content_type=content_type)
        assert status == 415
        assert "content-type: application/json" in text
    for content_type in (
        "application/json",
        "application/json; charset=utf-8",
        "application/x-www-form-urlencoded",
    ):
        assert answer(content_type=content_type)[0] == 200
    assert answer()[0] == 200


async def _frontend(hosts: tuple[str, ...], keys: tuple[str, ...] = ()) -> tuple[str, Any]:
    clients = ClientsConfig(allowed_origins="https://chat.example")
    made = FrontendListener(
        "127.0.0.1", 0, drain_s=1.0, keys=ApiKeys(keys), metrics=Metrics(), clients=clients, hosts=hosts
    )
    return f"{made.url}/health", made.close


async def _instance(hosts: tuple[str, ...], keys: tuple[str, ...] = ()) -> tuple[str, Any]:
    status = InstanceStatus({}, lambda: None, dict, lambda: True, lambda: asyncio.sleep(0))  # type: ignore[arg-type,return-value]
    made = start_http(status, "127.0.0.1", 0, 5.0, keys=ApiKeys(keys), hosts=hosts)
    return "http://{}:{}/health".format(*made.address), made.stop


async def _registry(hosts: tuple[str, ...], keys: tuple[str, ...] = ()) -> tuple[str, Any]:
    secret = keys[0].encode() if keys else None
    made = await serve("127.0.0.1", 0, secret=secret, limits=Limits())
    return f"{made.url}/v1/health", made.close


Start = Callable[..., Any]


def statuses(start: Start, *headers: dict[str, str], **settings: Any) -> list[int]:
    async def ask() -> list[int]:
        url, close = await start(settings.pop("hosts", ()), **settings)
        try:
            async with httpx.AsyncClient(timeout=60) as http:
                return [(await http.get(url, headers=each)).status_code for each in headers]
        finally:
            await close()

    return asyncio.run(ask())


@pytest.mark.parametrize("start", [_frontend, _instance, _registry])
def test_every_port_with_http_looks_at_both(start: Start) -> None:
    rebound, page = {"host": "evil.example"}, {"origin": "https://evil.example"}
    assert statuses(start, {}, rebound, page, {"content-type": "text/plain"}) == [200, 403, 403, 415]
    # Who asks by a name and shows a key is no page of others. An instance without a door asks for none.
    keyed = statuses(start, rebound, page, keys=("a-secret-of-enough-bytes",))
    assert keyed == [403 if start is _instance else 200, 403]


@pytest.mark.parametrize("start", [_frontend, _instance])
def test_allowed_names_reach_a_port(start: Start) -> None:
    assert statuses(start, {"host": "gpu1.example"}, hosts=("gpu1.example",)) == [200]


def test_an_allowed_origin_is_asked_before_a_request_and_answered() -> None:
    question = {"origin": "https://chat.example", "access-control-request-method": "POST"}

    async def ask() -> httpx.Response:
        url, close = await _frontend(())
        try:
            async with httpx.AsyncClient(timeout=60) as http:
                return await http.options(url, headers=question)
        finally:
            await close()

    assert asyncio.run(ask()).headers["access-control-allow-origin"] == "https://chat.example"
