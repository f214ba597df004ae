"""A digest of each query and answer of the registry, in a header of its own.

TCP's checksum misses a flip that a broken box on the way makes; a flipped port or incarnation would
register something that nobody said. It proves nothing against an attacker (TLS does).
"""

from __future__ import annotations

import xxhash

#: Absent in queries that somebody types by hand; then nothing is verified.
DIGEST_HEADER = "x-segue-digest"


def digest_of(start: bytes, body: bytes | bytearray) -> str:
    """The digest over what begins a message (`GET /path?query`, or the status) and its body."""
    return xxhash.xxh3_64_hexdigest(body, xxhash.xxh3_64_intdigest(start))
