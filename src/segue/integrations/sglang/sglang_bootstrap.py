"""Questions to the bootstrap servers that requests name (`bootstrap_host`).

A client writes that name, so it must not lead to services that the client cannot reach: only hosts that
`SEGUE_SGLANG_BOOTSTRAP_HOSTS` allows are asked, at the address that was checked, without redirects and
without a proxy of the environment. SGLang's own questions go the same way (`guard`).
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterable
from types import ModuleType, SimpleNamespace
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import requests

from segue.integrations.host_rules import address_of, matches
from segue.integrations.prompt_claim import CLAIM_VERSION
from segue.integrations.sglang.sglang_settings import PREFIX
from segue.kv import BootstrapUnreachable, Incarnation, InvalidRequest, PeerRefused, Unauthorized

#: The keys of a rank in its row in the bootstrap server.
LEADER = "segue_leader"
CLAIMS = "segue_claims"


class BootstrapHosts:
    """The hosts that may be asked: those that match one of `rules` (see `host_rules`), also by an address of
    their name. Each thread has a session of its own."""

    def __init__(self, rules: Iterable[str]) -> None:
        self._rules = tuple(rules)
        self._local = threading.local()

    def check(self, address: str) -> None:
        """Raises InvalidRequest for an `address` that is not HOST:PORT, and Unauthorized for a host that is
        not allowed. A name passes: its addresses are looked at when it is asked."""
        host = _host_of(address)
        if address_of(host) is not None:
            self._allow(host, [host])

    def resolve(self, address: str) -> str:
        """The network location to connect to for HOST:PORT. Raises as `check`, and BootstrapUnreachable for a
        name without an address."""
        host, port = _host_of(address), urlsplit(f"//{address}").port
        if address_of(host) is not None:
            found = [host]
        else:
            try:
                found = [str(info[4][0]) for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
            except (OSError, UnicodeError) as error:
                raise BootstrapUnreachable(f"bootstrap_host {host[:100]!r} has no address: {error}") from None
        allowed = self._allow(host, found)
        return f"[{allowed}]:{port}" if ":" in allowed else f"{allowed}:{port}"

    def session(self) -> requests.Session:
        """This thread's session."""
        if (found := getattr(self._local, "session", None)) is None:
            found = self._local.session = _BootstrapSession(self)
        return found

    def _allow(self, host: str, addresses: list[str]) -> str:
        for address in addresses:
            if any(matches(host, rule) or matches(address, rule) for rule in self._rules):
                return address
        raise Unauthorized(
            f"bootstrap_host {host[:100]!r} is not a host that decode may ask: name it in "
            f"{PREFIX}BOOTSTRAP_HOSTS (now {', '.join(self._rules)})"
        )


def _host_of(address: str) -> str:
    try:
        parts = urlsplit(f"http://{address}")
        if parts.netloc == address and "@" not in address and parts.hostname and parts.port:
            return parts.hostname
    except ValueError:
        pass
    raise InvalidRequest(f"bootstrap_host and bootstrap_port {address[:100]!r} are no host and port")


class _BootstrapSession(requests.Session):  # type: ignore[misc]
    """Connects to the address that was checked; follows nothing."""

    def __init__(self, hosts: BootstrapHosts) -> None:
        super().__init__()
        self.trust_env = False
        self._hosts = hosts

    def request(self, method: str, url: str, *args: Any, **kwargs: Any) -> requests.Response:
        """See `requests.Session`."""
        return super().request(method, url, *args, **{**kwargs, "allow_redirects": False})

    def send(self, request: requests.PreparedRequest, **kwargs: Any) -> requests.Response:
        """See `requests.Session`. Raises as `BootstrapHosts.resolve`."""
        parts = urlsplit(str(request.url))
        request.headers["Host"] = parts.netloc
        request.url = urlunsplit(parts._replace(netloc=self._hosts.resolve(parts.netloc)))
        return super().send(request, **kwargs)


def guard(conn: ModuleType, hosts: BootstrapHosts) -> None:
    """Have the questions of `sglang.srt.disaggregation.common.conn` to bootstrap servers go this way."""

    def get(url: str, **kwargs: Any) -> requests.Response:
        return hosts.session().get(url, **kwargs)

    conn.requests = SimpleNamespace(**{**vars(requests), "get": get})  # type: ignore[attr-defined]
    conn._get_bootstrap_session = lambda address: hosts.session()  # type: ignore[attr-defined]


def answer_of(response: requests.Response, address: str) -> dict[str, Any]:
    """The JSON object in an answer. Raises BootstrapUnreachable for another one."""
    try:
        if response.status_code != 200:
            raise ValueError(f"status {response.status_code}")
        found = response.json()
        if not isinstance(found, dict):
            raise ValueError("no JSON object")
    except ValueError as error:
        raise BootstrapUnreachable(f"the bootstrap server {address} gave no row: {error}") from None
    return found


def leader_in(row: dict[str, Any], address: str) -> Incarnation:
    """The leader of a rank in its row in the bootstrap server. Raises PeerRefused for another backend, and
    for a segue whose halves do not compare prompts as ours do."""
    leader = row.get(LEADER)
    if not isinstance(leader, str):
        raise PeerRefused(
            f"the prefill at {address} does not use segue: start it with "
            "--disaggregation-transfer-backend segue"
        )
    if row.get(CLAIMS) != CLAIM_VERSION:
        raise PeerRefused(
            f"the prefill at {address} does not compare prompts as this decode does ({CLAIM_VERSION!r}): run "
            "the same version of segue on both sides"
        )
    return Incarnation(leader)
