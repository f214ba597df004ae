"""Values in a store that others can write to: each carries a code that only the deployment's secret makes.

The code covers the key, so that no value can be moved to another. A writer to the store can still delete a
value or bring back an old one. That reveals nothing, because sessions prove who is at an address.
"""

from __future__ import annotations

import hmac
import logging
from typing import TypeVar

import msgspec

from segue.kv import DECODE_ERRORS

log = logging.getLogger(__name__)

T = TypeVar("T")

_CODE_DIGITS = 64


class Seal:
    """Writes and reads such values: the code in hexadecimal, a space, JSON. Without a secret the code is one
    that everybody can make; then only this machine may be asked."""

    def __init__(self, secret: bytes | None) -> None:
        self._key = hmac.digest(secret or b"", b"segue registry record v1", "sha256")
        #: Prefix of this deployment's keys: two deployments can share a store.
        self.prefix = b"/segue/" + hmac.new(self._key, b"prefix", "sha256").hexdigest()[:16].encode() + b"/"

    def _code(self, key: bytes, body: bytes) -> bytes:
        return hmac.new(self._key, b"%d %b%b" % (len(key), key, body), "sha256").hexdigest().encode()

    def close(self, key: bytes, value: object) -> bytes:
        """The sealed value to write at `key`."""
        body = msgspec.json.encode(value)
        return self._code(key, body) + b" " + body

    def open(self, key: bytes, data: bytes, type_: type[T]) -> T | None:
        """The value at `key`; None if it was not written by this deployment, which is logged."""
        code, body = data[:_CODE_DIGITS], data[_CODE_DIGITS + 1 :]
        where = key.decode("utf-8", "replace")
        reason = f"{where} was written by somebody without this deployment's secret: ignored"
        if hmac.compare_digest(code, self._code(key, body)):
            try:
                return msgspec.json.decode(body, type=type_)
            except DECODE_ERRORS:
                reason = f"{where} holds no {type_.__name__}: ignored"
        log.warning("event=registry_value_ignored reason=%r", reason)
        return None
