"""Addresses that only this host can reach. Pure."""

from __future__ import annotations

import ipaddress


def is_loopback(host: str) -> bool:
    """True if `host` is `localhost` or an IP address that no other host can reach. Any other name may lead
    anywhere. IPv4 may be written as IPv6, and a zone may follow."""
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)
