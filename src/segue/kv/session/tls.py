"""Mutual TLS: what a process presents and whom it trusts, from three PEM files.

Both sides of every connection present a certificate and verify the other's against one authority
(`--tls-ca`), TLS 1.3 at least. The side that connects also verifies that the certificate was issued for
the address it connected to (the registry names instances by address), so the certificate of one host
does not pass for another. The side that listens verifies the chain only: its peers have no fixed
address, and who they are is what the session's handshake proves.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from segue.kv.errors import ConfigError

#: The first byte of every TLS connection: a handshake record.
HANDSHAKE_RECORD = 0x16
#: OpenSSL's reasons for the first bytes of a peer that does not speak TLS.
_NOT_TLS = {"WRONG_VERSION_NUMBER", "HTTP_REQUEST", "UNEXPECTED_MESSAGE", "RECORD_LAYER_FAILURE"}
#: The end of each sentence about a peer of the other kind.
GIVE_BOTH = "give both sides --tls-cert, --tls-key and --tls-ca, or neither"


class TlsFiles(Protocol):
    """The paths of the PEM files of one process: its certificate, its private key, the authority of all. All
    or none."""

    @property
    def tls_cert(self) -> str | None:
        """The certificate, with its chain."""

    @property
    def tls_key(self) -> str | None:
        """The private key."""

    @property
    def tls_ca(self) -> str | None:
        """The authority."""

    @property
    def enabled(self) -> bool:
        """TLS is asked for."""


@dataclass(frozen=True, slots=True)
class Tls:
    """Mutual TLS of one process: the contexts for connections that it accepts (`server`) and opens
    (`client`), and the paths of the `files` that they were made from (certificate, key, authority). See
    `load_tls`."""

    server: ssl.SSLContext
    client: ssl.SSLContext
    files: tuple[str, str, str] | None = None


def tls_from_files(config: TlsFiles, host: str | None) -> Tls | None:
    """The contexts that `config` asks for; None without TLS.

    `host` is the address that peers will connect to, None for a process that does not listen.
    Raises ConfigError for files that cannot work, found out before anybody connects: unreadable,
    not a pair, encrypted, expired, issued by another authority or for another address.
    """
    if not config.enabled:
        return None
    assert config.tls_cert is not None
    assert config.tls_key is not None
    assert config.tls_ca is not None
    tls = load_tls(config.tls_cert, config.tls_key, config.tls_ca)
    _rehearse(tls, config, host)
    return tls


def load_tls(cert: str, key: str, ca: str) -> Tls:
    """Contexts for mutual TLS from the paths of three PEM files: this host's certificate `cert` (with its
    chain), its private `key` without a passphrase, and `ca`, the authority that has issued those of all
    hosts.

    Raises ConfigError for a file that cannot be read or used; the text names it by its flag.
    """
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    for flag, name in (("--tls-cert", cert), ("--tls-key", key), ("--tls-ca", ca)):
        _readable(flag, name)
    for context in (server, client):
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_cert_chain(cert, key, password=_no_password)
        except ssl.SSLError as error:
            raise ConfigError(
                f"--tls-cert {cert} and --tls-key {key} are no certificate and its private key in PEM form "
                f"({error.reason or error}); give a matching pair"
            ) from error
        try:
            context.load_verify_locations(cafile=ca)
        except ssl.SSLError as error:
            raise ConfigError(
                f"--tls-ca {ca} holds no certificate in PEM form ({error.reason or error}); give the "
                "authority that issued every part's --tls-cert"
            ) from error
    # Sessions live long and are few; resumption would only add state.
    server.num_tickets = 0
    return Tls(server, client, (cert, key, ca))


def _readable(flag: str, name: str) -> None:
    try:
        with Path(name).open("rb") as file:
            file.read(1)
    except OSError as error:
        raise ConfigError(f"{flag} {name} cannot be read: {error.strerror}") from error


def _no_password() -> str:
    # Without this OpenSSL would ask on the terminal, and a service would wait there for ever.
    raise ConfigError("--tls-key is encrypted; give a key without a passphrase, readable by its user only")


def _rehearse(tls: Tls, config: TlsFiles, host: str | None) -> None:
    """Shake hands with ourselves in memory: what fails here would fail with every peer."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = tls.server.wrap_bio(to_server, to_client, server_side=True)
    client = tls.client.wrap_bio(to_client, to_server, server_hostname=host or "segue.invalid")
    try:
        for _ in range(4):
            for side in (client, server):
                try:
                    side.do_handshake()
                except ssl.SSLWantReadError:
                    continue
    except ssl.SSLCertVerificationError as error:
        if error.verify_code not in (62, 64):  # another host name, another address
            raise ConfigError(
                f"--tls-cert {config.tls_cert} is not accepted by --tls-ca {config.tls_ca}: "
                f"{error.verify_message}; both must work together, for both server and client use"
            ) from error
        if host is not None:
            raise ConfigError(
                f"--tls-cert {config.tls_cert} was not issued for {host}, the address that peers connect "
                "to; its subject alternative names must have it (see --host and --advertise-host)"
            ) from error
    except ssl.SSLError as error:
        raise ConfigError(
            f"--tls-cert {config.tls_cert} cannot be used: {error.reason or error}; give another"
        ) from error


def explain_tls(error: ssl.SSLError) -> str:
    """A sentence that says why a TLS connection failed with `error`."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not valid here: {error.verify_message}"
    if error.reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return "it showed no certificate; give it --tls-cert, --tls-key and --tls-ca"
    if not_tls(error):
        return f"it does not speak TLS; {GIVE_BOTH}"
    return f"TLS failed: {error.reason or error}"


def not_tls(error: ssl.SSLError) -> bool:
    """True if `error` says that the peer sent something that is not TLS."""
    return error.reason in _NOT_TLS
