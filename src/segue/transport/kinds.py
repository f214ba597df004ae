"""Which transports there are, which work here, and which one two sides should use.

The table maps a name to the module and class that implement it; a module is imported when its
transport is created or asked about, so that a laptop never loads an RDMA library.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from segue.core.errors import DECODE_ERRORS, ConfigError
from segue.core.types import RankId
from segue.session.tls import Tls
from segue.transport.base import Endpoint, EventSink, Transport


@dataclass(frozen=True, slots=True)
class _Entry:
    module: str
    needs: str = ""  # a package that must be importable
    missing: str = ""  # why it cannot work in this version, whatever is installed
    check: str = ""  # a function of the module that says why it cannot be used on this host, or ""


_TABLE: dict[str, _Entry] = {
    "fake": _Entry("segue.transport.fake"),
    "shm": _Entry("segue.transport.shm", check="unusable"),
    "tcp": _Entry("segue.transport.tcp"),
    "nixl": _Entry("", "nixl", "not part of this version of segue"),
    "mooncake": _Entry("", "mooncake", "not part of this version of segue"),
    "mori": _Entry("", "mori", "not part of this version of segue"),
    "ascend": _Entry("", "mf_adapter", "not part of this version of segue"),
    "cuda_ipc": _Entry("", "torch", "not part of this version of segue"),
}
NAMES = tuple(_TABLE)
OK = "ok"

#: what `choose` tries, best first; `fake` only where nothing else is offered
_PREFERENCE = ("shm", "tcp", "fake")


def available() -> dict[str, str]:
    """Each known transport with `"ok"`, or with the reason why it cannot be used here."""
    return {name: _reason(entry) for name, entry in _TABLE.items()}


def create(
    name: str,
    on_event: EventSink,
    *,
    me: RankId,
    host: str = "127.0.0.1",
    port: int = 0,
    advertise: str | None = None,
    advertise_port: int | None = None,
    streams: int | None = None,
    stall_s: float = 10.0,
    tls: Tls | None = None,
) -> Transport:
    """A transport by name. `me` is the rank that it moves bytes for.

    `host:port` (0: any free port) is where it listens, `advertise` and `advertise_port` what peers are
    told if it is something else, `streams` is the number of connections per peer, one that is silent
    for `stall_s` seconds is given up, and `tls` encrypts them; only transports with a network use
    these. Raises ConfigError for an unknown name, one that cannot be used here, or a port in use.
    """
    entry = _TABLE.get(name)
    if entry is None:
        raise ConfigError(f"unknown transport {name!r}; known are {', '.join(NAMES)} (or auto)")
    reason = _reason(entry)
    if reason != OK:
        raise ConfigError(f"transport {name!r} cannot be used here: {reason}")
    if name == "fake":
        from segue.transport.fake import FakeTransport

        return FakeTransport(on_event, me=me)
    if name == "shm":
        from segue.transport.shm import ShmTransport

        return ShmTransport(on_event, me=me)
    from segue.transport.tcp import DEFAULT_STREAMS, TcpTransport

    return TcpTransport(
        on_event,
        me=me,
        host=host,
        port=port,
        advertise=advertise,
        advertise_port=advertise_port,
        streams=streams or DEFAULT_STREAMS,
        stall_s=stall_s,
        tls=tls,
    )


def choose(ours: Mapping[str, Endpoint], theirs: Mapping[str, Endpoint]) -> str | None:
    """The transport for a pair of sides, by what both offer; None when they share none. Pure.

    `shm` when both run on one host, in one network namespace, as one user (their endpoints say);
    else `tcp`. Symmetric, so both sides come to the same answer without asking.
    """
    for name in _PREFERENCE:
        if name not in ours or name not in theirs:
            continue
        if name == "shm":
            hosts = _shm_host(ours[name]), _shm_host(theirs[name])
            if not hosts[0] or hosts[0] != hosts[1]:
                continue
        return name
    return None


class _ShmHost(msgspec.Struct, frozen=True):
    """The part of `shm_wire.ShmAddress` that says where it is; read without loading `shm`."""

    version: int
    host: str


def _shm_host(endpoint: Endpoint) -> str:
    """The host identity in an shm endpoint, or "" when it is unreadable or of another version."""
    try:
        address = msgspec.msgpack.decode(endpoint.data, type=_ShmHost)
    except DECODE_ERRORS:
        return ""
    return address.host if address.version == 1 else ""


def _reason(entry: _Entry) -> str:
    if entry.missing:
        return entry.missing
    if sys.platform != "linux" and entry.module != "segue.transport.fake":
        return "needs Linux"
    try:
        module = importlib.import_module(entry.module)
    except ImportError as exc:
        return f"cannot be imported: {exc}"
    return (getattr(module, entry.check)() if entry.check else "") or OK
