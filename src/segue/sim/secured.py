"""TLS in virtual time: a visitor that is two processes of its own, with the real OpenSSL between them.

The certificates are their own authorities, valid until 2120; nobody else trusts them.
"""

from __future__ import annotations

import asyncio
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

from segue.core.config import TlsConfig
from segue.core.control import Cancel
from segue.core.errors import AbortedByClient, ConfigError, ErrorCode, SegueError
from segue.session.node import SessionNode
from segue.session.tls import Tls, from_config, load
from segue.sim.visitor import Visitor
from segue.sim.world import new_leader

#: A key and a certificate for each address that a visitor may come from.
OURS = """\
-----BEGIN PRIVATE KEY-----
MC4CAQAwBQYDK2VwBCIEIMt79w200/3DD9iiX21jFCphfg9gFFI+glmaf/Hm6pgr
-----END PRIVATE KEY-----
-----BEGIN CERTIFICATE-----
MIIBCDCBu6ADAgECAgEBMAUGAytlcDAUMRIwEAYDVQQDDAlzZWd1ZSBzaW0wIBcN
MjAwMTAxMDAwMDAwWhgPMjEyMDAxMDEwMDAwMDBaMBQxEjAQBgNVBAMMCXNlZ3Vl
IHNpbTAqMAUGAytlcAMhANcj3Vz4yg6kK7rjuicEcHJ7iT9Wt6pjZ7Fc7IbvBi6X
ozAwLjAPBgNVHRMBAf8EBTADAQH/MBsGA1UdEQQUMBKHBH8ABAGHBH8ABAKHBH8A
BAMwBQYDK2VwA0EABKF5QsWq8GX4ejBOxwoPpCA1WhO35RG+basKJSzoVrgjFPWZ
hYxYfDsN92V9tke/M60zbqo7+KvR3wxM2NrpAA==
-----END CERTIFICATE-----
"""
#: Those of another host and another authority.
OTHER = """\
-----BEGIN PRIVATE KEY-----
MC4CAQAwBQYDK2VwBCIEIIkXz7NiNLLNfTyEJIUsLNSBaV6qDbS4HXPI42gO0zYr
-----END PRIVATE KEY-----
-----BEGIN CERTIFICATE-----
MIIBCDCBu6ADAgECAgEBMAUGAytlcDAaMRgwFgYDVQQDDA9vZiBhbm90aGVyIGhv
c3QwIBcNMjAwMTAxMDAwMDAwWhgPMjEyMDAxMDEwMDAwMDBaMBoxGDAWBgNVBAMM
D29mIGFub3RoZXIgaG9zdDAqMAUGAytlcAMhAI9YX4A7jBUGF99bCBXXZPoVRB+O
iqh4UUlHqVESh+RMoyQwIjAPBgNVHRMBAf8EBTADAQH/MA8GA1UdEQQIMAaHBH8A
BAkwBQYDK2VwA0EA2R7RqBFORq3A+rY875IilLeMex94n02OI6+OpouyO598I8tz
ieIK4VFBiauF/nOmSShsTTAmYBus+VZtHpnkAg==
-----END CERTIFICATE-----
"""


@lru_cache
def _contexts(pem: str, trusted: str) -> tuple[TlsConfig, Tls]:
    """Of a process that shows `pem` and trusts `trusted`."""
    with tempfile.TemporaryDirectory() as folder:
        mine, ca = Path(folder) / "mine.pem", Path(folder) / "ca.pem"
        mine.write_text(pem)
        ca.write_text(trusted)
        config = TlsConfig(tls_cert=str(mine), tls_key=str(mine), tls_ca=str(ca))
        try:
            tls = from_config(config, "127.0.4.1")
            assert tls is not None
        except ConfigError:
            tls = load(str(mine), str(mine), str(ca))
        return config, tls


#: What the listening side shows and trusts, what the dialling side does, and how the dial ends.
PAIRS: dict[str, tuple[tuple[str, str], tuple[str, str] | None, tuple[ErrorCode, ...]]] = {
    "tls": ((OURS, OURS), (OURS, OURS), ()),
    "tls, its client is unknown": (
        (OURS, OURS),
        (OTHER, OURS),
        (ErrorCode.BOOTSTRAP_UNREACHABLE, ErrorCode.UNAUTHORIZED),
    ),
    "tls, its server is unknown": ((OTHER, OURS), (OURS, OURS), (ErrorCode.UNAUTHORIZED,)),
    "tls, its server is of another host": ((OTHER, OURS), (OURS, OTHER), (ErrorCode.UNAUTHORIZED,)),
    "tls at the server only": ((OURS, OURS), None, (ErrorCode.PEER_REFUSED,)),
}


class Secured(Visitor):
    """Two nodes of one visitor, one of which listens with TLS."""

    WHAT = "misfit"

    async def visits(self) -> None:
        """A session over TLS, or the reason why there is none, on both sides."""
        theirs, mine, codes = PAIRS[self.kind]
        port, host = 7100 + self.rng.randrange(10000), self.loop.host
        listener: Any = self.loop.network.listen(self.loop, port)
        server = self.node(tls=_contexts(*theirs)[1])
        server._listen_on(listener, host, port)
        other = new_leader(self.rng)
        client = self.node(me=other, tls=None if mine is None else _contexts(*mine)[1])
        try:
            session = await client.connect(host, port, timeout_s=10.0)
        except SegueError as error:
            if error.info.code not in codes:
                self.wrong(f"was told {error}")
        else:
            if codes:
                self.wrong("has a session with somebody whom it does not know")
            session.send(Cancel("a request", AbortedByClient("it left").info))
            await asyncio.sleep(self.deployment.timing.silence_s)
            if self.ends:
                self.wrong(f"its session ended: {self.ends}")
        await client.close()
        await self._left(server)

    async def _left(self, server: SessionNode) -> None:
        await server.close()
        if server.pending or server.sessions:
            self.wrong(f"{server.pending} pending connections and {len(server.sessions)} sessions are left")


TLS_KINDS = tuple(PAIRS)
