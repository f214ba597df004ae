"""Headers of the registry's queries and answers: who asks, and a digest.

The bearer token is derived from the shared secret and is never the secret itself. The digest sees what TCP's
checksum misses, a flip that a broken box on the way makes: a flipped port or incarnation would register
something that nobody said. It proves nothing against an attacker (TLS does).
"""

from __future__ import annotations

import hmac

import xxhash

#: Absent in queries that somebody types by hand; then nothing is verified.
DIGEST_HEADER = "x-segue-digest"


def bearer_token(secret: bytes) -> str:
    """The value of `Authorization: Bearer …` for a deployment's secret."""
    return hmac.new(secret, b"segue registry bearer v1", "sha256").hexdigest()


def authorized(secret: bytes, header: str) -> bool:
    """True if the `Authorization` header carries the token; compared in constant time."""
    return hmac.compare_digest(f"Bearer {bearer_token(secret)}".encode(), header.encode("utf-8", "replace"))


def digest_of(start: bytes, body: bytes | bytearray) -> str:
    """The digest over what begins a message (`GET /path?query`, or the status) and its body."""
    return xxhash.xxh3_64_hexdigest(body, xxhash.xxh3_64_intdigest(start))
