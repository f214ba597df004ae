"""TLS in virtual time: a visitor that is two nodes of its own, with the real OpenSSL between them."""

from __future__ import annotations

import asyncio
import tempfile
from functools import cache
from importlib import resources
from pathlib import Path

from segue.kv.errors import AbortedByClient, ConfigError, ErrorCode, SegueError
from segue.kv.session.node import SessionNode
from segue.kv.session.tls import Tls, load, tls_from_files
from segue.lab.sim.visitor import Visitor
from segue.lab.sim.world import new_leader
from segue.server.messages.control import Cancel
from segue.server.settings.commands import TlsConfig

#: See there what each is for.
IDENTITIES = resources.files("segue.lab.sim").joinpath("throwaway_identities.pem")


@cache
def _identity(name: str) -> str:
    """A private key and its certificate, in PEM form."""
    found = dict(part.split("\n", 1) for part in IDENTITIES.read_text("ascii").split("\nname: ")[1:])
    return found[name]


def _write(folder: Path, name: str, text: str) -> str:
    (folder / name).write_text(text)
    return str(folder / name)


@cache
def _contexts(shown: str, trusted: str) -> Tls:
    """Of a process that shows the identity `shown` and trusts `trusted`."""
    with tempfile.TemporaryDirectory() as folder:
        mine = _write(Path(folder), "mine.pem", _identity(shown))
        ca = _write(Path(folder), "ca.pem", _identity(trusted))
        return load(mine, mine, ca)


#: What the listening side shows and trusts, what the dialling side does, and how the dial ends.
PAIRS: dict[str, tuple[tuple[str, str], tuple[str, str] | None, tuple[ErrorCode, ...]]] = {
    "tls": (("ours", "ours"), ("ours", "ours"), ()),
    "tls, its client is unknown": (
        ("ours", "ours"),
        ("other", "ours"),
        (ErrorCode.BOOTSTRAP_UNREACHABLE, ErrorCode.UNAUTHORIZED),
    ),
    "tls, its server is unknown": (("other", "ours"), ("ours", "ours"), (ErrorCode.UNAUTHORIZED,)),
    "tls, its server is of another host": (("other", "ours"), ("ours", "other"), (ErrorCode.UNAUTHORIZED,)),
    "tls at the server only": (("ours", "ours"), None, (ErrorCode.PEER_REFUSED,)),
}


class Secured(Visitor):
    """Two nodes of one visitor, one of which listens with TLS."""

    WHAT = "misfit"

    async def visits(self) -> None:
        """A session over TLS, or the reason why there is none, on both sides."""
        if self.kind not in PAIRS:
            self._starts()
            return
        theirs, mine, codes = PAIRS[self.kind]
        server = self.node(tls=_contexts(*theirs))
        host, port = await server.listen(self.loop.host, 0)
        other = new_leader(self.rng)
        client = self.node(me=other, tls=None if mine is None else _contexts(*mine))
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

    def _starts(self) -> None:
        """With files that cannot work nobody starts, and the reason names what to give instead."""
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            ours, other = (_write(folder, name, _identity(name)) for name in ("ours", "other"))
            encrypted = _write(folder, "encrypted", _identity("encrypted"))
            text, nothing = _write(folder, "text", "no certificate"), str(folder / "nothing")
            here, elsewhere = "127.0.4.1", "127.0.4.9"
            for cert, key, ca, host, flag in (
                (nothing, ours, ours, here, "--tls-cert"),
                (ours, nothing, ours, here, "--tls-key"),
                (text, ours, ours, here, "--tls-cert"),
                (ours, other, ours, here, "--tls-key"),
                (ours, encrypted, ours, here, "--tls-key"),
                (ours, ours, text, here, "--tls-ca"),
                (ours, ours, other, here, "--tls-ca"),
                (ours, ours, ours, elsewhere, "--tls-cert"),
            ):
                try:
                    tls_from_files(TlsConfig(tls_cert=cert, tls_key=key, tls_ca=ca), host)
                except ConfigError as error:
                    if flag not in str(error):
                        self.wrong(f"does not name {flag}: {error}")
                else:
                    self.wrong(f"starts with {cert}, {key} and {ca} at {host}")
            good = TlsConfig(tls_cert=ours, tls_key=ours, tls_ca=ours)
            if tls_from_files(good, here) is None or tls_from_files(good, None) is None:
                self.wrong("does not start with files that work")
            if tls_from_files(TlsConfig(), here) is not None:
                self.wrong("has TLS without files")


TLS_KINDS = (*PAIRS, "tls, its files cannot work")
