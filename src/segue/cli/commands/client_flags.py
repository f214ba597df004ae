"""The server that a command asks over HTTP, and the API key for it."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from segue.kv import ConfigError

if TYPE_CHECKING:
    import ssl


def add_key_file(command: argparse.ArgumentParser) -> None:
    """The flag `--api-key-file`."""
    command.add_argument(
        "--api-key-file",
        metavar="F",
        help="file with an API key for the server (default: SEGUE_API_KEY or OPENAI_API_KEY)",
    )


def add_top_arguments(command: argparse.ArgumentParser) -> None:
    """The flags of `segue top`."""
    command.add_argument("url", metavar="URL", nargs="?", help="a frontend (default: the one on this host)")
    add_key_file(command)
    command.add_argument("--once", action="store_true", help="print once and end")


@dataclass(frozen=True, slots=True)
class AskedServer:
    """A server that a command asks: its URL, the file with an API key for it, and the file with the one
    certificate to trust (None: the authorities of this host)."""

    url: str
    api_key_file: str | None = None
    https_cert: str | None = None


def server_of(args: argparse.Namespace) -> AskedServer:
    """The server that the flags name, else the only deployment of this user on this host, with its key and
    its certificate. Raises ConfigError."""
    if args.url:
        return AskedServer(args.url, args.api_key_file)

    from segue.server.supervisor.local_deployments import local_deployments

    found = local_deployments()
    if not found:
        raise ConfigError(
            "no deployment of this user runs on this host: start one with segue serve, or name a URL"
        )
    if len(found) > 1:
        urls = ", ".join(here.url for here in found)
        raise ConfigError(f"{len(found)} deployments of this user run here; name one: {urls}")
    [here] = found
    return AskedServer(here.url, args.api_key_file or here.api_key_file, here.https_cert)


def authorization(file: str | None) -> dict[str, str]:
    """The header with the first key of the file, or else of the variables that clients and servers use."""
    from segue.server.frontend.keys import read_keys
    from segue.server.settings.shared_config import AccessConfig

    found = os.environ.get("SEGUE_API_KEY") or os.environ.get("OPENAI_API_KEY") or None
    keys = read_keys(AccessConfig(api_key=None if file else found, api_key_file=file))
    return {"Authorization": f"Bearer {keys[0]}"} if keys else {}


def trusting(https_cert: str | None) -> ssl.SSLContext:
    """A TLS context that trusts exactly the certificate in this file, whatever its names; without a file, the
    authorities of this host. Raises ConfigError."""
    import ssl

    if https_cert is None:
        return ssl.create_default_context()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    try:
        own, end, _ = Path(https_cert).read_text().partition("-----END CERTIFICATE-----")
        context.load_verify_locations(cadata=own[own.index("-----BEGIN CERTIFICATE-----") :] + end)
    except (OSError, ValueError) as error:  # SSLError is an OSError
        raise ConfigError(f"the server's certificate {https_cert} cannot be read: {error}") from error
    return context
