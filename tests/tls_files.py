"""Certificates for tests: one authority, and files of a deployment that belongs to it."""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from pathlib import Path

import trustme

from segue.kv.session.tls import Tls, load_tls


@dataclass(frozen=True)
class TlsFiles:
    """Three PEM files, as the flags take them."""

    cert: Path
    key: Path
    ca: Path

    def load(self) -> Tls:
        return load_tls(str(self.cert), str(self.key), str(self.ca))

    def flags(self) -> list[str]:
        return ["--tls-cert", str(self.cert), "--tls-key", str(self.key), "--tls-ca", str(self.ca)]


class Authority:
    """Issues certificates into `folder`."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self.folder = folder
        self.ca = trustme.CA()
        self.file = folder / f"{name}.pem"
        self.ca.cert_pem.write_to_path(str(self.file))
        self.issued = 0

    def issue(self, *names: str, expired: bool = False, trust: Authority | None = None) -> TlsFiles:
        """Files for a part that listens at `names`; it trusts `trust` (default: this authority)."""
        until = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=1) if expired else None
        made = self.ca.issue_cert(*(names or ("127.0.0.1", "localhost")), not_after=until)
        self.issued += 1
        cert = self.folder / f"{self.file.stem}-{self.issued}-cert.pem"
        key = self.folder / f"{self.file.stem}-{self.issued}-key.pem"
        cert.write_bytes(b"".join(blob.bytes() for blob in made.cert_chain_pems))
        key.write_bytes(made.private_key_pem.bytes())
        return TlsFiles(cert, key, (trust or self).file)
