"""TLS for clients of the public port. A renewed certificate is taken by the next connection."""

from __future__ import annotations

import logging
import os
import ssl
from typing import Any

from segue.kv import ConfigError

log = logging.getLogger("segue.frontend.tls")


class ClientTls:
    """The certificate that clients are shown, from two PEM files. `context` is for the listener: each
    handshake compares the files' times with those of the pair in use, and takes a new pair that fits
    together.

    Raises ConfigError for files that cannot be read or that do not fit together.
    """

    def __init__(self, cert: str, key: str) -> None:
        self._files = cert, key
        self._seen = self._times()
        #: why the files of now are not used, as the log has it
        self._trouble = ""
        try:
            self.context = self._newest = self._load()
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(
                f"--https-cert {cert} and --https-key {key} are no certificate and its private key in PEM "
                f"form ({error.strerror or error}); give a matching pair"
            ) from error
        # Called with None too, for clients that name no server.
        self.context.sni_callback = self._greeted

    def _times(self) -> tuple[int, ...]:
        times: list[int] = []
        for flag, name in zip(("--https-cert", "--https-key"), self._files, strict=True):
            try:
                found = os.stat(name)
            except OSError as error:
                raise ConfigError(f"{flag} {name} cannot be read: {error.strerror}") from error
            times += (found.st_mtime_ns, found.st_ino)
        return tuple(times)

    def _load(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        context.load_cert_chain(*self._files, password=_no_password)
        return context

    def _greeted(self, connection: Any, name: str | None, context: ssl.SSLContext) -> None:
        """A client has begun its handshake."""
        try:
            times = self._times()
            if times != self._seen:
                self._seen = times
                self._newest = self._load()
                self._trouble = ""
                log.info("event=https_certificate_reloaded file=%s", self._files[0])
        except (ConfigError, OSError, ssl.SSLError) as error:
            if str(error) != self._trouble:  # once, and not for each client
                self._trouble = str(error)
                log.warning("the new --https-cert and --https-key are not used: %s", error)
        if self._newest is not self.context:
            connection.context = self._newest


def _no_password() -> str:
    raise ConfigError("--https-key is encrypted; give a key without a passphrase")
