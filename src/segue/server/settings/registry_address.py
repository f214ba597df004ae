"""Addresses in settings: of registries, and of hosts that listen. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from segue.kv import ConfigError
from segue.kv.session import is_loopback

#: How the address of a registry begins: one of our own, etcd, or no registry but a name or a list.
REGISTRY_SCHEMES = ("http", "https", "etcd", "dns", "static")
REGISTRY_HELP = (
    "registry: http://HOST:PORT, or etcd://HOST:PORT,HOST:PORT (of a user: "
    "etcd://USER@HOST:PORT?password-file=/FILE); or none, but where the instances are: "
    "dns://NAME:PORT or static://HOST:PORT,HOST:PORT"
)


_PASSWORD_FILE = "password-file="


@dataclass(frozen=True, slots=True)
class EtcdUser:
    """The user of an etcd, and the absolute path of the file with the password."""

    name: str
    password_file: str


def check_hosts(host: str, advertise_host: str | None, secret: bool) -> None:
    """Refuse an address that peers cannot use, and one that strangers can use without a secret."""
    if host in ("0.0.0.0", "::") and advertise_host is None:
        raise ConfigError(f"--host {host} needs --advertise-host, the address that peers reach this host by")
    if not is_loopback(host) and not secret:
        raise ConfigError(
            f"--host {host} can be reached from other hosts; give --secret-file with the deployment's secret"
        )


def registry_places(url: str) -> list[tuple[str, int]]:
    """The addresses in a `--registry`: one of `http` and `dns`, one or more of `etcd` and `static`.
    ConfigError if it is none."""
    scheme, _, rest = url.partition("://")
    if scheme == "etcd":
        registry_user(url)
        rest = rest.partition("?")[0].rpartition("@")[2]
    places = [_place(part) for part in rest.rstrip("/").split(",")]
    found = [place for place in places if place is not None]
    several = scheme in ("etcd", "static")
    if scheme not in REGISTRY_SCHEMES or len(found) != len(places) or (len(found) > 1 and not several):
        raise ConfigError(
            "--registry must look like http://HOST:PORT (https with TLS), etcd://HOST:PORT,HOST:PORT, "
            f"dns://NAME:PORT or static://HOST:PORT,HOST:PORT, not {url!r}"
        )
    return found


def registry_user(url: str) -> EtcdUser | None:
    """The user in an `etcd://USER@…?password-file=/FILE`. ConfigError if only one of both is there."""
    rest, _, query = url.partition("://")[2].partition("?")
    name, at, _ = rest.rpartition("@")
    if not at and not query:
        return None
    file = query.removeprefix(_PASSWORD_FILE)
    if not name or ":" in name or file == query or not file.startswith("/"):
        raise ConfigError(
            "--registry of an etcd with users must look like etcd://USER@HOST:PORT?password-file=/FILE, with "
            "an absolute path and no password in it"
        )
    return EtcdUser(name, file)


def _place(text: str) -> tuple[str, int] | None:
    host, colon, port = text.rpartition(":")
    legal = host and colon and port.isdecimal() and int(port) < 65536 and not set("/@?") & set(host)
    return (host.removeprefix("[").removesuffix("]"), int(port)) if legal else None


def check_url(url: str, *, encrypted: bool) -> None:
    """Refuse a registry that is none (`registry_places`), and `http` under TLS or `https` without."""
    registry_places(url)
    scheme, _, rest = url.partition("://")
    if scheme == "http" and encrypted:
        raise ConfigError(
            f"--tls-cert encrypts the registry too: give --registry https://{rest}, not {url!r}"
        )
    if scheme == "https" and not encrypted:
        raise ConfigError(
            f"--registry {url} needs --tls-cert, --tls-key and --tls-ca: a registry with TLS lets in only "
            "who has a certificate of its own"
        )


def bracket(host: str) -> str:
    """`host` as it stands before a port."""
    return f"[{host}]" if ":" in host else host
