"""Which bootstrap servers a request can make decode ask, and how."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import ModuleType
from typing import Any

import pytest
import requests

from segue.integrations.prompt_claim import CLAIM_VERSION
from segue.integrations.sglang.sglang_bootstrap import (
    CLAIMS,
    LEADER,
    BootstrapHosts,
    answer_of,
    guard,
    leader_in,
)
from segue.integrations.sglang.sglang_settings import backend_settings
from segue.kv import (
    BootstrapUnreachable,
    ConfigError,
    InvalidRequest,
    PeerRefused,
    Unauthorized,
    new_incarnation,
)


class Servers:
    """An HTTP server whose paths were asked; /away redirects to /secret."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.heads: list[str] = []
        seen = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                seen.asked.append(self.path)
                seen.heads.append(self.headers["Host"])
                body = json.dumps({"path": self.path}).encode()
                self.send_response(302 if self.path.startswith("/away") else 200)
                self.send_header("Location", "/secret")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_POST = do_GET

            def log_message(self, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self.server.server_address[1]
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


@pytest.fixture
def servers() -> Iterator[Servers]:
    made = Servers()
    yield made
    made.close()


def rules(**environ: str) -> tuple[str, ...]:
    return backend_settings({f"SEGUE_SGLANG_{name}": value for name, value in environ.items()}).host_rules


ALONE, SECRET = rules(), rules(SECRET_FILE="s")
LISTED = rules(BOOTSTRAP_HOSTS="prefill.example, 192.0.2.0/24,198.51.100.7", SECRET_FILE="s")
#: the metadata services of clouds, and addresses of everybody
NEVER = ["169.254.169.254", "[fe80::1]", "100.100.100.200", "0.0.0.0", "[::ffff:169.254.169.254]", "8.8.8.8"]


@pytest.mark.parametrize(
    ("listed", "allowed", "refused"),
    [
        (ALONE, ["127.0.0.1", "[::1]", "[::ffff:127.0.0.1]"], ["10.0.0.1", "[fd00::1]", *NEVER]),
        (SECRET, ["127.0.0.1", "10.0.0.1", "172.16.3.4", "192.168.1.1", "[fd00::1]"], NEVER),
        (LISTED, ["192.0.2.9", "198.51.100.7"], ["127.0.0.1", "10.0.0.1", *NEVER]),
    ],
    ids=["without a secret", "with a secret", "listed"],
)
def test_only_hosts_that_the_setting_allows_are_asked(
    listed: tuple[str, ...], allowed: list[str], refused: list[str]
) -> None:
    hosts = BootstrapHosts(listed)
    for host in allowed:
        hosts.check(f"{host}:8998")
    for host in refused:
        for ask in (hosts.check, hosts.resolve, lambda a: hosts.session().get(f"http://{a}/route")):
            with pytest.raises(Unauthorized, match="SEGUE_SGLANG_BOOTSTRAP_HOSTS"):
                ask(f"{host}:8998")


@pytest.mark.parametrize(
    "odd", ["", ":1", "h", "h:x", "a@h:1", "10.0.0.1:80/x?y=:1", "h:1#", "h h:1", "[::1:1"]
)
def test_an_address_that_is_more_than_a_host_and_a_port_is_refused(odd: str) -> None:
    with pytest.raises((InvalidRequest, BootstrapUnreachable)):
        BootstrapHosts(ALONE).resolve(odd)


def test_a_name_is_asked_at_an_address_that_was_checked(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name server that gives another address at the second question changes nothing."""
    found = ["127.0.0.1"]

    def resolved(host: str, port: int, *more: Any, **_: Any) -> list[Any]:
        if host == "127.0.0.1":
            return original(host, port, *more)
        return [(2, 1, 6, "", (address, port)) for address in found]

    original = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", resolved)
    hosts, address = BootstrapHosts(ALONE), f"prefill.example:{servers.port}"
    hosts.check(address)
    assert hosts.resolve(address) == f"127.0.0.1:{servers.port}"
    answer = hosts.session().get(f"http://{address}/route")
    assert answer_of(answer, address) == {"path": "/route"}
    assert servers.heads == [address]
    found[:] = ["169.254.169.254"]
    with pytest.raises(Unauthorized):
        hosts.session().get(f"http://{address}/route")
    found.append("127.0.0.1")
    assert hosts.resolve(address) == f"127.0.0.1:{servers.port}"
    found[:] = ["203.0.113.9"]
    assert BootstrapHosts(LISTED).resolve(address) == f"203.0.113.9:{servers.port}"


def test_redirects_and_proxies_are_not_followed(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "")
    session, address = BootstrapHosts(ALONE).session(), f"127.0.0.1:{servers.port}"
    assert session.get(f"http://{address}/route").json() == {"path": "/route"}
    for method in (session.get, session.post):
        with pytest.raises(BootstrapUnreachable, match="status 302"):
            answer_of(method(f"http://{address}/away"), address)
    assert servers.asked == ["/route", "/away", "/away"]


def test_sglangs_own_questions_go_the_same_way(servers: Servers) -> None:
    """SGLang's module calls `requests.get` and asks for a session by the address."""
    conn: Any = ModuleType("conn")
    conn.requests = requests
    guard(conn, BootstrapHosts(ALONE))
    address = f"127.0.0.1:{servers.port}"
    asks = (
        lambda a: conn.requests.get(f"http://{a}/away", timeout=5),
        lambda a: conn._get_bootstrap_session(a).post(f"http://{a}/away", json={}, timeout=5),
    )
    for ask in asks:
        assert ask(address).status_code == 302
        with pytest.raises(Unauthorized):
            ask("169.254.169.254:80")
    assert servers.asked == ["/away", "/away"]
    assert conn.requests.Session is requests.Session


def test_a_row_of_another_backend_or_version_is_refused() -> None:
    leader = new_incarnation()
    assert leader_in({LEADER: leader, CLAIMS: CLAIM_VERSION}, "h:1") == leader
    with pytest.raises(PeerRefused, match="does not use segue"):
        leader_in({}, "h:1")
    for older in ({}, {CLAIMS: "segue claim 1"}):
        with pytest.raises(PeerRefused, match="run the same version of segue on both sides"):
            leader_in({LEADER: leader, **older}, "h:1")


def test_a_network_that_is_none_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match=r"10\.0\.0\.1/8"):
        rules(BOOTSTRAP_HOSTS="10.0.0.1/8")
