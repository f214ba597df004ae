"""The registry that a `--registry` names."""

from __future__ import annotations

import httpx

from segue.kv import Limits
from segue.kv.session import Tls
from segue.server.registry.address_backend import AddressBackend
from segue.server.registry.backends import HttpBackend, RegistryBackend
from segue.server.registry.etcd_backend import EtcdBackend


def open_backend(
    url: str,
    secret: bytes | None,
    limits: Limits,
    tls: Tls | None,
    transport: httpx.AsyncBaseTransport | None = None,
) -> RegistryBackend:
    """How the registry at `url` is asked. Raises ConfigError. `transport` takes the place of sockets in a
    test."""
    scheme = url.partition(":")[0]
    if scheme == "etcd":
        return EtcdBackend(url, secret, limits, tls)
    if scheme in ("dns", "static"):
        return AddressBackend(url, secret, limits, tls)
    return HttpBackend(url, secret, limits, tls, transport)
