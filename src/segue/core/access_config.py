"""Who may ask an HTTP server of segue: a branch of the settings of each that has one."""

from __future__ import annotations

from dataclasses import dataclass

from segue.core.settings import secret, text


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
