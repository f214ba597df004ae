"""Which addresses only this host can reach. Pure."""

from __future__ import annotations

import ipaddress

from segue.core.errors import ConfigError


def is_loopback(host: str) -> bool:
    """True for `localhost` and for an IP address that no other host can reach. Any other name may lead
    anywhere, whatever it begins with. IPv4 may be written as IPv6, and a zone may follow."""
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)


def check_hosts(host: str, advertise_host: str | None, secret: bool) -> None:
    """Refuse an address that peers cannot use, and one that strangers can use without a secret."""
    if host in ("0.0.0.0", "::") and advertise_host is None:
        raise ConfigError(f"--host {host} needs --advertise-host, the address that peers reach this host by")
    if not is_loopback(host) and not secret:
        raise ConfigError(
            f"--host {host} can be reached from other hosts; give --secret-file with the deployment's secret"
        )


def check_url(url: str, *, encrypted: bool) -> None:
    """Refuse a registry that is not `http://HOST:PORT`, or `https://HOST:PORT` under TLS."""
    scheme, separator, rest = url.partition("://")
    host, colon, port = rest.rstrip("/").rpartition(":")
    legal = (
        scheme in ("http", "https") and separator and host and colon and port.isdigit() and int(port) < 65536
    )
    if not legal or "/" in host:
        raise ConfigError(
            f"--registry must look like {'https' if encrypted else 'http'}://HOST:PORT, not {url!r}"
        )
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
