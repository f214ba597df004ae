"""The server that a command asks over HTTP, and the API key for it."""

from __future__ import annotations

import argparse
import os

from segue.kv import ConfigError


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


def authorization(file: str | None) -> dict[str, str]:
    """The header with the first key of the file, or else of the variables that clients and servers use."""
    from segue.server.frontend.keys import read_keys
    from segue.server.settings.shared_config import AccessConfig

    found = os.environ.get("SEGUE_API_KEY") or os.environ.get("OPENAI_API_KEY") or None
    keys = read_keys(AccessConfig(api_key=None if file else found, api_key_file=file))
    return {"Authorization": f"Bearer {keys[0]}"} if keys else {}


def server_here() -> str:
    """The URL of the only deployment of this user on this host. Raises ConfigError."""
    from segue.server.supervisor.local_deployments import local_deployments

    found = [here.url for here in local_deployments()]
    if not found:
        raise ConfigError(
            "no deployment of this user runs on this host: start one with segue serve, or name a URL"
        )
    if len(found) > 1:
        raise ConfigError(f"{len(found)} deployments of this user run here; name one: {', '.join(found)}")
    return found[0]
