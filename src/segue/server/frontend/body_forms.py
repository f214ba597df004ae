"""A body before it is decoded: unpacked, and nested no deeper than what walks its values can bear."""

from __future__ import annotations

import zlib
from itertools import accumulate
from typing import Final

from segue.kv.errors import RequestTooLarge
from segue.server.frontend.problems import BadParam, UnknownEncoding

#: Levels of lists and objects in a body, or in a text of JSON within one. Chat templates, grammars and
#: encoders walk values by recursion, of which Python allows some 1,000 calls.
MAX_LEVELS: Final = 100

#: Ways to compress a body that the standard library can undo.
_ENCODINGS: Final = frozenset({"gzip", "x-gzip", "deflate"})
#: zlib: find out by itself whether it is gzip's or zlib's form.
_EITHER: Final = 32 + zlib.MAX_WBITS
#: Compressed members, one after the other, of one body: to read each copies what follows it.
MAX_MEMBERS: Final = 256

_BRACKETS: Final = b'[]{}"'
_OTHERS: Final = bytes(set(range(256)) - set(_BRACKETS))
#: 1 for each level that opens, -1 for each that closes.
_STEPS: Final = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")


def unpacked(raw: bytes, encoding: str, limit_bytes: int) -> bytes:
    """The body that came compressed. Raises RequestTooLarge if it has more than `limit_bytes`, BadParam if it
    is not what its header says, UnknownEncoding for a way that is not known here."""
    if encoding not in _ENCODINGS:
        raise UnknownEncoding(
            f"Content-Encoding: {encoding[:64]!r} is not known here; send gzip, deflate, or the body as it is"
        )
    pieces, left = list[bytes](), limit_bytes + 1
    try:
        while raw and left:
            if len(pieces) == MAX_MEMBERS:
                raise BadParam(
                    f"the body has more than {MAX_MEMBERS} members of {encoding}: compress it as one"
                )
            found = zlib.decompressobj(_EITHER)
            pieces.append(found.decompress(raw, left))
            left -= len(pieces[-1])
            if left and not found.eof:
                raise BadParam(f"the body ends before its {encoding} does (Content-Encoding)")
            raw = found.unused_data
    except zlib.error as error:
        raise BadParam(f"the body is not {encoding}, as its Content-Encoding says: {error}") from None
    if not left:
        raise RequestTooLarge(f"the body has more than {limit_bytes} bytes when it is decompressed")
    return b"".join(pieces)


def check_levels(raw: bytes, what: str = "the body", param: str | None = None) -> None:
    """Raises BadParam if a text of JSON has more than `MAX_LEVELS` levels. It is not decoded for that."""
    if raw.count(b"[") + raw.count(b"{") <= MAX_LEVELS:
        return
    # Only brackets matter that stand outside of texts: without escapes a text is what two quotes enclose.
    bare = raw.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, _OTHERS).replace(b'""', b"")
    steps = b"".join(bare.split(b'"')[::2]).translate(_STEPS)
    if max(accumulate(memoryview(steps).cast("b")), default=0) > MAX_LEVELS:
        raise BadParam(f"{what}: nested in more than {MAX_LEVELS} levels of lists and objects", param)
