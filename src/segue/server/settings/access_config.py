"""Who may ask an HTTP server of segue: a branch of the settings of each that has one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from segue.server.settings.layers import secret, text

#: Whose `priority` and `user` count where prompts wait: of clients that have shown an API key, all, or none.
CLIENT_ORDERS: Final = ("keys", "all", "none")


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessConfig:
    """Who may ask the frontend, or an instance's HTTP door. Without a key: everybody who can reach it."""

    api_key: str | None = secret(
        "key that clients must show; other users of this host see a command line, so rather give the "
        "variable or --api-key-file",
        metavar="K",
    )
    api_key_file: str | None = text(
        "file with keys, one a line (# begins a comment), one of which clients must show", metavar="F"
    )
    client_order: str = text(
        "whose `priority` and `user` count where prompts wait: of clients with an API key, all, or none",
        "keys",
        choices=CLIENT_ORDERS,
        metavar="WHOSE",
    )
    prefix_cache_sharing: str = text(
        "which requests use each other's cached prefixes: tenant (those with one API key, where there are "
        "several keys) or all (then cached_tokens and the time to the first token tell what others asked)",
        "tenant",
        choices=("tenant", "all"),
    )
