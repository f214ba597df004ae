"""The registry's bearer token: derived from the shared secret, never the secret itself."""

from __future__ import annotations

import hmac


def bearer_token(secret: bytes) -> str:
    """The value of `Authorization: Bearer …` for a deployment's secret."""
    return hmac.new(secret, b"segue registry bearer v1", "sha256").hexdigest()


def authorized(secret: bytes, header: str) -> bool:
    """True if the `Authorization` header carries the token; compared in constant time."""
    return hmac.compare_digest(f"Bearer {bearer_token(secret)}".encode(), header.encode("utf-8", "replace"))
