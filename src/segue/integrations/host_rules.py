"""Which hosts may be contacted: names, addresses and networks. Pure."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_LOOPBACK_NAMES = {"localhost", "localhost.localdomain"}


def address_of(host: str) -> Address | None:
    """The address that `host` is written as; None for a name. An IPv4 address within an IPv6 one is that
    IPv4 address."""
    try:
        found = ipaddress.ip_address(host)
    except ValueError:
        return None
    return getattr(found, "ipv4_mapped", None) or found


def is_loopback(host: str) -> bool:
    """Whether `host` is this machine alone."""
    address = address_of(host)
    return address.is_loopback if address is not None else host.lower() in _LOOPBACK_NAMES


def matches(host: str, rule: str) -> bool:
    """Whether `host` is the name or address `rule`, or an address in the network `rule` (CIDR)."""
    address = address_of(host)
    if "/" in rule:
        return address is not None and address in ipaddress.ip_network(rule)
    return host.lower() == rule.lower() if address is None else address == address_of(rule)


def check_rules(rules: Iterable[str]) -> None:
    """Raises ValueError for a network that is none."""
    for rule in rules:
        if "/" in rule:
            ipaddress.ip_network(rule)
